"""Rules for every test: a deadline, and under mpirun one verdict for all ranks.

A test that hangs is ended, with the stack of each thread printed, and the job with it. Under mpirun, a test that fails
on one rank fails on all: rank 0, the only rank that prints, shows whose failure it was. The exchange of verdicts is
also the barrier that keeps one test's messages out of the next.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

DEADLINE = float(os.environ.get("HPCTRAIN_TEST_DEADLINE", "120"))  # seconds
_state: dict[str, Any] = {}


def world() -> Any:
    """A communicator for verdicts alone when mpirun started several ranks, else None."""
    if "world" not in _state:
        mpi = sys.modules.get("mpi4py.MPI")
        several = mpi is not None and mpi.COMM_WORLD.size > 1
        _state["world"] = mpi.COMM_WORLD.Dup() if several else None
    return _state["world"]


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    _state["stderr"] = os.fdopen(os.dup(2), "w")  # the real one: pytest is not capturing at this moment
    if world() is not None and world().rank > 0:
        config.pluginmanager.unregister(config.pluginmanager.getplugin("terminalreporter"))
        _state["silent"] = open(os.devnull, "w")
        config.pluginmanager.register(pytest.TerminalReporter(config, _state["silent"]), "terminalreporter")


def pytest_unconfigure() -> None:
    for name in ("stderr", "silent"):
        if name in _state:
            _state.pop(name).close()


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    faulthandler.dump_traceback_later(DEADLINE, exit=True, file=_state["stderr"])
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    comm = world()
    if comm is None:
        return (yield)
    failure: BaseException | None = None
    result = None
    try:
        result = yield
    except BaseException as error:
        failure = error
        if not isinstance(error, pytest.skip.Exception):
            print(f"rank {comm.rank}: {pyfuncitem.name}\n{traceback.format_exc()}", file=_state["stderr"], flush=True)
    verdicts = comm.allgather(None if failure is None else (type(failure).__name__, str(failure)))
    if failure is not None:
        raise failure
    others = [f"rank {rank}: {': '.join(verdict)}" for rank, verdict in enumerate(verdicts) if verdict]
    if others:
        pytest.fail("failed on another rank\n" + "\n".join(others), pytrace=False)
    return result
