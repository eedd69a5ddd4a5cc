"""Plain python, no launcher, not one environment variable: works as one rank, and equals the reference."""

from __future__ import annotations

import os

from tests.jobs.jobs import ROOT, python

PROGRAM = """
import hpctrain, parity
context = hpctrain.start()
assert (context.rank, context.size, context.world.size) == (0, 1, 1)
parity.numpy_case(context, "adamw", "float64", 2, 0.5)
print("equal")
"""


def test_no_launcher_no_variables(script, tmp_path):
    environ = dict.fromkeys(os.environ) | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    job = python([script(PROGRAM)], tmp_path, environ=environ).finish()
    assert job.code == 0 and job.stdout == "equal\n", job.text
