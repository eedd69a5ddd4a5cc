"""What only the transport of threads promises: rendezvous, failures that reach everybody, deadlines."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

from hpctrain.errors import TransportError
from hpctrain.transport.threads import run_threads, single


def test_a_send_is_done_only_when_it_is_received() -> None:
    def run(transport: Any) -> None:
        if transport.rank == 0:
            data = bytearray(b"first")
            send = transport.send(memoryview(data), 1, 0)
            assert not send.done()
            transport.send(memoryview(b""), 1, 1).wait()  # from now on rank 1 may receive
            send.wait()
            data[:] = b"later"
        else:
            transport.recv(memoryview(bytearray(0)), 0, 1).wait()
            into = bytearray(5)
            transport.recv(memoryview(into), 0, 0).wait()
            assert into == b"first"

    run_threads(2, run, timeout=10.0)


def test_results_come_in_rank_order() -> None:
    assert run_threads(4, lambda transport: (transport.rank, transport.size)) == [(r, 4) for r in range(4)]


def test_a_failed_rank_wakes_the_others_and_its_error_is_raised() -> None:
    seen = []

    def run(transport: Any) -> None:
        if transport.rank == 2:
            raise KeyError("mine")
        try:
            transport.recv(memoryview(bytearray(1)), 2, 0).wait()
        except TransportError as error:
            seen.append(str(error))
            raise

    begin = time.monotonic()
    with pytest.raises(KeyError, match="mine"):
        run_threads(3, run, timeout=30.0)
    assert time.monotonic() - begin < 5
    assert len(seen) == 2
    assert all("rank 2 failed: KeyError" in text for text in seen)


def test_a_poll_hears_of_a_failed_rank() -> None:
    def run(transport: Any) -> None:
        if transport.rank == 1:
            raise ValueError("mine")
        request = transport.recv(memoryview(bytearray(1)), 1, 0)
        while not request.done():
            time.sleep(0.001)

    with pytest.raises(ValueError, match="mine"):
        run_threads(2, run, timeout=5.0)


def test_a_message_without_partner_ends_at_the_deadline() -> None:
    def run(transport: Any) -> None:
        if transport.rank == 0:
            transport.recv(memoryview(bytearray(3)), 1, 4).wait()

    with pytest.raises(TransportError, match=r"no partner within 0\.2 s .* 3 bytes from rank 1 to rank 0 with tag 4"):
        run_threads(2, run, timeout=0.2)


def test_abort_ends_all_ranks() -> None:
    def run(transport: Any) -> None:
        if transport.rank == 1:
            transport.abort(7)
        transport.recv(memoryview(bytearray(1)), 1, 0).wait()

    with pytest.raises(TransportError, match="exit status 7"):
        run_threads(2, run, timeout=10.0)


def test_the_single_rank_needs_no_mpi_and_abort_ends_the_process() -> None:
    transport = single()
    assert (transport.rank, transport.size, transport.node_ranks()) == (0, 1, (0,))
    code = (
        "import sys; from hpctrain.transport.threads import single; print('before');"
        "assert 'mpi4py' not in sys.modules; single().abort(5); print('after')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (5, "before\n")
