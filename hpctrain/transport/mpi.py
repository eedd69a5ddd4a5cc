"""MPI, any library, by mpi4py.

Owns non-blocking messages of plain bytes on a private communicator. Knows no array library, and asks MPI neither for
arithmetic nor to guess a type: half types, for one, are added byte by byte by some libraries. Importing this module
initialises MPI.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from mpi4py import MPI

from hpctrain.contracts import Native, Place
from hpctrain.transport.memory import allocate
from hpctrain.transport.native import MpiNative
from hpctrain.transport.places import Places, Table
from hpctrain.transport.request import Message, Pieces, failed
from hpctrain.transport.shared import NodeMemory

__all__ = ["MESSAGE_LIMIT", "MpiTransport"]

#: Bytes of one MPI message; longer ones are cut. Some libraries refuse 2**31 and more.
MESSAGE_LIMIT = 1 << 30


class MpiTransport:
    """See `hpctrain.contracts.Transport`.

    Made on all ranks of `communicator` together, which is duplicated: traffic of the program's own cannot mix with
    ours. `message_limit` is the longest piece in bytes. `ranks_per_node` imitates nodes on one: so many consecutive
    ranks of a node count as one, the last few ranks as a smaller one.
    """

    name = "mpi"

    def __init__(self, communicator: MPI.Intracomm = MPI.COMM_WORLD, *, message_limit: int = MESSAGE_LIMIT,
                 ranks_per_node: int | None = None) -> None:
        assert message_limit > 0 and (ranks_per_node is None or ranks_per_node > 0)
        nodes = _nodes(communicator, ranks_per_node)
        rank = communicator.Get_rank()
        self._adopt(communicator.Dup(), Places(Table(rank), range(len(nodes)), nodes, rank), message_limit)

    def _adopt(self, communicator: MPI.Intracomm, places: Places, message_limit: int, *,
               may_share: bool = True) -> None:
        communicator.Set_errhandler(MPI.ERRORS_RETURN)
        self._communicator = communicator
        self._places = places
        self.message_limit = message_limit
        self.rank, self.size = communicator.Get_rank(), communicator.Get_size()
        self.concurrent = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._native = MpiNative(communicator, message_limit) if self.size > 1 else None
        self.native: Native | None = self._native
        self._node_memory = NodeMemory(communicator, places) if may_share and places.possible else None

    def allocate(self, num_bytes: int) -> memoryview:
        if self._node_memory is None or num_bytes == 0:
            return allocate(num_bytes)
        made = self._node_memory.allocate(num_bytes)
        if isinstance(made, memoryview):
            return made
        self._share_no_more(made)
        return allocate(num_bytes)

    def allocate_node(self, num_bytes: int) -> memoryview | None:
        if num_bytes == 0 or not self._places.possible:
            return allocate(num_bytes)
        if self._node_memory is None:
            return None
        made = self._node_memory.allocate_together(num_bytes)
        if isinstance(made, memoryview):
            return made
        self._share_no_more(made)
        return None

    def _share_no_more(self, reason: str) -> None:
        if self.rank == 0:
            text = f"ranks of one node exchange by messages, since they cannot share memory: {reason}"
            warnings.warn(text, stacklevel=3)
        self._node_memory = None

    @property
    def shares(self) -> bool:
        return self._places.shares

    def place(self, memory: memoryview) -> Place | None:
        return self._places.place(memory)

    def view(self, rank: int, place: Place, num_bytes: int) -> memoryview:
        return self._places.view(rank, place, num_bytes)

    def send(self, data: memoryview, destination: int, tag: int) -> Message | Pieces:
        if len(data) <= self.message_limit:
            return self._send(data, destination, tag)
        return Pieces([self._send(piece, destination, tag) for piece in self._cut(data)])

    def recv(self, data: memoryview, source: int, tag: int) -> Message | Pieces:
        if len(data) <= self.message_limit:
            return self._recv(data, source, tag)
        return Pieces([self._recv(piece, source, tag) for piece in self._cut(data)])

    def _send(self, data: memoryview, destination: int, tag: int) -> Message:
        try:
            return Message(self._communicator.Isend([data, len(data), MPI.BYTE], destination, tag))
        except MPI.Exception as error:
            raise failed(self._communicator, error) from error

    def _recv(self, data: memoryview, source: int, tag: int) -> Message:
        try:
            return Message(self._communicator.Irecv([data, len(data), MPI.BYTE], source, tag), len(data))
        except MPI.Exception as error:
            raise failed(self._communicator, error) from error

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
        places = self._places.subgroup(ranks, communicator.Get_rank())
        made._adopt(communicator, places, self.message_limit, may_share=self._node_memory is not None)
        return made

    def node_ranks(self) -> tuple[int, ...]:
        return self._places.node_ranks

    def abort(self, code: int) -> None:
        MPI.COMM_WORLD.Abort(code)

    def close(self) -> None:
        if self._communicator != MPI.COMM_NULL:
            self._communicator.Free()
        if self._native is not None:
            self._native.close()


def _nodes(communicator: MPI.Intracomm, ranks_per_node: int | None) -> list[tuple[int, int]]:
    """What tells each rank's node from the others. Collective."""
    near = communicator.Split_type(MPI.COMM_TYPE_SHARED, communicator.Get_rank())
    try:
        first = near.bcast(communicator.Get_rank())
    finally:
        near.Free()
    firsts = communicator.allgather(first)
    return [(first, rank // ranks_per_node if ranks_per_node else 0) for rank, first in enumerate(firsts)]
