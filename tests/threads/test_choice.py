"""A group asks its chooser, and the caller's word is stronger."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpctrain.arrays import arrays_of
from hpctrain.collectives import Group, core
from hpctrain.collectives.choose import Chooser
from hpctrain.transport.threads import run_threads

TABLE = """
[[row]]
operation = "all_reduce"
bytes = [0, 1000]
algorithm = "naive"
reason = "measured"
"""


def test_the_table_decides_unless_the_caller_does(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    make_plan = core.make_plan
    monkeypatch.setattr(core, "make_plan", lambda operation, algorithm, *a, **k: (
        taken.append(algorithm), make_plan(operation, algorithm, *a, **k))[1])

    def run(transport: Any) -> None:
        g = Group(transport, arrays_of, chooser=Chooser())
        g.choose_by(Chooser.parse(TABLE))
        assert g.num_nodes() == 1
        for count, algorithm in ((10, None), (10, "recursive doubling"), (1_000_000, None)):
            x = np.ones(count, np.float32)
            g.all_reduce(x, algorithm=algorithm)
            assert (x == 3).all()

    run_threads(3, run)
    assert sorted(set(taken)) == sorted({"naive", "recursive doubling", "ring"})
