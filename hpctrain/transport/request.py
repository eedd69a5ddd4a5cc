"""One MPI request under way, as the contract's Request.

Owns the translation of MPI's completion and MPI's errors. Knows neither who started the request nor what it carries.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpi4py import MPI

from hpctrain.errors import TransportError

__all__ = ["Message", "Pieces", "failed"]


def failed(communicator: MPI.Comm, error: MPI.Exception) -> TransportError:
    """What to raise when MPI refused a call on `communicator`."""
    return TransportError("the transport is closed" if communicator == MPI.COMM_NULL else f"MPI failed: {error}")


class Message:
    """One MPI request; fulfils `contracts.Request`. `expected` is the length of a receive, -1 for anything else."""

    __slots__ = ("_expected", "_finished", "_request", "_status")

    def __init__(self, request: MPI.Request, expected: int = -1) -> None:
        self._request, self._expected = request, expected
        self._status = MPI.Status() if expected >= 0 else None
        self._finished = False

    def done(self) -> bool:
        if not self._finished:
            try:
                arrived = self._request.Test(self._status)
            except MPI.Exception as error:
                raise TransportError(f"MPI failed: {error}") from error
            if arrived:
                self._finish()
        return self._finished

    def wait(self) -> None:
        if not self._finished:
            try:
                self._request.Wait(self._status)
            except MPI.Exception as error:
                raise TransportError(f"MPI failed: {error}") from error
            self._finish()

    def _finish(self) -> None:
        self._finished = True
        if self._status is not None and self._status.Get_count(MPI.BYTE) != self._expected:
            raise TransportError(
                f"a message of {self._status.Get_count(MPI.BYTE)} bytes from rank {self._status.Get_source()} "
                f"met a receive of {self._expected} bytes"
            )


class Pieces:
    """A message that was cut; done when all its pieces are."""

    __slots__ = ("_pieces",)

    def __init__(self, pieces: Sequence[Message]) -> None:
        self._pieces = pieces

    def done(self) -> bool:
        return all([piece.done() for piece in self._pieces])

    def wait(self) -> None:
        for piece in self._pieces:
            piece.wait()
