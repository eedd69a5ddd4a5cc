"""MPI, any library, by mpi4py.

Owns non-blocking messages of plain bytes on a private communicator. Knows no array library, and asks MPI neither for
arithmetic nor to guess a type: half types, for one, are added byte by byte by some libraries. Importing this module
initialises MPI.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from mpi4py import MPI

from hpctrain.contracts import Shared
from hpctrain.errors import TransportError
from hpctrain.transport.memory import allocate
from hpctrain.transport.shared import NodeMemory

__all__ = ["MESSAGE_LIMIT", "MpiTransport"]

#: Bytes of one MPI message; longer ones are cut. Some libraries refuse 2**31 and more.
MESSAGE_LIMIT = 1 << 30


class _Message:
    """One MPI request; fulfils `contracts.Request`. `expected` is the length of a receive, -1 for a send."""

    __slots__ = ("_expected", "_finished", "_request", "_status")

    def __init__(self, request: MPI.Request, expected: int) -> None:
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


class _Pieces:
    """A message that was cut; done when all its pieces are."""

    __slots__ = ("_pieces",)

    def __init__(self, pieces: list[_Message]) -> None:
        self._pieces = pieces

    def done(self) -> bool:
        return all([piece.done() for piece in self._pieces])

    def wait(self) -> None:
        for piece in self._pieces:
            piece.wait()


class MpiTransport:
    """See `hpctrain.contracts.Transport`.

    Made on all ranks of `communicator` together, which is duplicated: traffic of the program's own cannot mix with
    ours. `message_limit` is the longest piece in bytes.
    """

    name = "mpi"

    def __init__(self, communicator: MPI.Intracomm = MPI.COMM_WORLD, *, message_limit: int = MESSAGE_LIMIT) -> None:
        node = communicator.Split_type(MPI.COMM_TYPE_SHARED)
        try:
            everyone, on_node = communicator.Get_group(), node.Get_group()
            node_ranks = tuple(sorted(on_node.Translate_ranks(None, everyone)))
            everyone.Free()
            on_node.Free()
        finally:
            node.Free()
        self._adopt(communicator.Dup(), node_ranks, message_limit)

    def _adopt(self, communicator: MPI.Intracomm, node_ranks: tuple[int, ...], message_limit: int) -> None:
        assert message_limit > 0
        communicator.Set_errhandler(MPI.ERRORS_RETURN)
        self._communicator = communicator
        self._node_ranks = node_ranks
        self.message_limit = message_limit
        self.concurrent = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.rank, self.size = communicator.Get_rank(), communicator.Get_size()
        self._node_memory = NodeMemory(communicator) if 1 < self.size == len(node_ranks) else None

    def allocate(self, num_bytes: int) -> memoryview:
        if self._node_memory is None or num_bytes == 0:
            return allocate(num_bytes)
        made = self._node_memory.allocate(num_bytes)
        if isinstance(made, memoryview):
            return made
        if self.rank == 0:
            text = f"ranks of this node exchange by messages, since they cannot share memory: {made}"
            warnings.warn(text, stacklevel=2)
        self._node_memory = None
        return allocate(num_bytes)

    @property
    def shares(self) -> bool:
        return self._node_memory is not None and len(self._node_memory) > 0

    def shared(self, memory: memoryview) -> Shared | None:
        return None if self._node_memory is None else self._node_memory.find(memory)

    def send(self, data: memoryview, destination: int, tag: int) -> _Message | _Pieces:
        if len(data) <= self.message_limit:
            return self._send(data, destination, tag)
        return _Pieces([self._send(piece, destination, tag) for piece in self._cut(data)])

    def recv(self, data: memoryview, source: int, tag: int) -> _Message | _Pieces:
        if len(data) <= self.message_limit:
            return self._recv(data, source, tag)
        return _Pieces([self._recv(piece, source, tag) for piece in self._cut(data)])

    def _send(self, data: memoryview, destination: int, tag: int) -> _Message:
        try:
            return _Message(self._communicator.Isend([data, len(data), MPI.BYTE], destination, tag), -1)
        except MPI.Exception as error:
            raise self._refused(error) from error

    def _recv(self, data: memoryview, source: int, tag: int) -> _Message:
        try:
            return _Message(self._communicator.Irecv([data, len(data), MPI.BYTE], source, tag), len(data))
        except MPI.Exception as error:
            raise self._refused(error) from error

    def _refused(self, error: MPI.Exception) -> TransportError:
        closed = self._communicator == MPI.COMM_NULL
        return TransportError("the transport is closed" if closed else f"MPI failed: {error}")

    def _cut(self, data: memoryview) -> list[memoryview]:
        return [data[i : i + self.message_limit] for i in range(0, len(data), self.message_limit)]

    def subgroup(self, ranks: Sequence[int]) -> MpiTransport | None:
        if self.rank not in ranks:
            return None
        everyone = self._communicator.Get_group()
        members = everyone.Incl(list(ranks))
        try:
            communicator = self._communicator.Create_group(members)
        finally:
            members.Free()
            everyone.Free()
        made = MpiTransport.__new__(MpiTransport)
        near = tuple(i for i, rank in enumerate(ranks) if rank in self._node_ranks)
        made._adopt(communicator, near, self.message_limit)
        return made

    def node_ranks(self) -> tuple[int, ...]:
        return self._node_ranks

    def abort(self, code: int) -> None:
        MPI.COMM_WORLD.Abort(code)

    def close(self) -> None:
        if self._communicator != MPI.COMM_NULL:
            self._communicator.Free()
