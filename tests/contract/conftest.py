"""One suite for every backend of a contract: the fixtures through which a test meets each of them in turn.

Started by mpirun, the contract tests run over MPI on all its ranks; started plainly, over MPI on one rank and over
threads on one to five.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from mpi4py import MPI

from hpctrain.transport.mpi import MpiTransport
from hpctrain.transport.threads import run_threads

Launch = Callable[..., None]

# Arrays are local: what one rank finds holds for all, so several need not repeat it.
collect_ignore = ["test_arrays.py"] if MPI.COMM_WORLD.size > 1 else []


@pytest.fixture(params=["mpi"] if MPI.COMM_WORLD.size > 1 else ["mpi", *(f"threads {n}" for n in range(1, 6))])
def launch(request: pytest.FixtureRequest) -> Launch:
    """`launch(function, **options)` runs function(transport) on every rank.

    `ranks_per_node` is for every transport, other options are for MpiTransport alone.
    """

    def on_mpi(function: Callable[[Any], None], **options: Any) -> None:
        transport = MpiTransport(**options)
        function(transport)
        transport.close()

    def on_threads(function: Callable[[Any], None], **options: Any) -> None:
        run_threads(int(request.param.split()[1]), function, timeout=20.0, ranks_per_node=options.get("ranks_per_node"))

    return on_mpi if request.param == "mpi" else on_threads
