"""How a process ends, with an MPI that is played by a few lines: quick, and on every Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys, threading, time, types
import hpctrain
from hpctrain.runtime import abort

class World:
    def Get_rank(self): return 1
    def Get_size(self): return 2
    def Ibarrier(self): return types.SimpleNamespace(Test=lambda: together)
    def Abort(self, code):
        print("abort", code, flush=True)
        os._exit(code)

world = World()
together, way = False, sys.argv[1]
sys.modules["mpi4py.MPI"] = types.SimpleNamespace(
    Is_initialized=lambda: True, Is_finalized=lambda: False, COMM_WORLD=world)
abort.watch(world)
if way == "exit":
    threading.Thread(target=time.sleep, args=(60,)).start()
    sys.exit(3)
if way == "words":
    sys.exit("words")
if way == "hook replaced":
    sys.excepthook = lambda *args: print("mine", flush=True)
    raise ValueError("boom")
if way == "raise":
    threading.Thread(target=time.sleep, args=(60,)).start()
    raise ValueError("boom")
if way == "child":
    child = os.fork()
    if child == 0:
        raise ValueError("boom")
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
together = True
if way == "caught":
    try:
        sys.exit(9)
    except SystemExit as error:
        print("caught", error.code)
if way == "together":
    sys.exit(75)
"""


@pytest.mark.parametrize("way, code, said", [
    ("exit", 3, "abort 3"),
    ("words", 1, "abort 1"),
    ("raise", 1, "abort 1"),
    ("hook replaced", 1, "mine\nabort 1"),
    ("child", 0, "child 1"),
    ("caught", 0, "caught 9"),
    ("together", 75, ""),
])
def test_end(way, code, said):
    run = subprocess.run([sys.executable, "-c", PROGRAM, way], capture_output=True, text=True, timeout=30, check=False,
                         cwd=Path(__file__).parents[2])
    assert (run.returncode, run.stdout.strip()) == (code, said), run.stderr
    if way == "raise":
        assert all(line.startswith("[rank 1/2 ") for line in run.stderr.splitlines())
