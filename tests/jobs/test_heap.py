"""A process that was started by hpctrain does not ask the system for the same memory in every step."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import numpy
if sys.argv[1] == "start":
    import hpctrain
    hpctrain.start(keep_memory=sys.argv[2] == "keep")
faults = []
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [numpy.ones(2**19) for _ in range(16)]  # 4 MiB each
    del arrays
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults[2:]))
"""


def faults_of_a_step(*words: str, environment: dict[str, str] | None = None) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, timeout=60,
                          check=True, env=environment)
    return int(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc")
def test_memory_that_a_step_frees_is_there_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = 16 * 4 * 2**20 // 4096
    assert faults_of_a_step("start", "keep") < pages / 100
    assert faults_of_a_step("start", "give back") > pages / 10
    assert faults_of_a_step("nothing", "") > pages / 10
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "100000")
    assert faults_of_a_step("start", "keep") > pages / 10, "what the user has set holds"
