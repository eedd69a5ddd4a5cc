"""The MPI library's own collectives, for the pairs of operation and type in which it can be trusted.

Owns what is offered, and the form in which MPI wants each call. Must not know when the library is the best choice, nor
arrays. Movements go as bytes. Refused: half types (some libraries add them byte by byte), min and max of floating point
numbers (MPI does not promise that NaN comes through), and whatever has too many bytes for one call.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NoReturn

from mpi4py import MPI

from hpctrain.contracts import NativeCall
from hpctrain.dtypes import DTYPES, dtype_of
from hpctrain.errors import TransportError
from hpctrain.transport.request import Message, failed

__all__ = ["MpiNative"]

_TYPES: dict[str, MPI.Datatype] = {
    "float32": MPI.FLOAT, "float64": MPI.DOUBLE, "complex64": MPI.C_FLOAT_COMPLEX, "complex128": MPI.C_DOUBLE_COMPLEX,
    "int8": MPI.INT8_T, "int16": MPI.INT16_T, "int32": MPI.INT32_T, "int64": MPI.INT64_T,
    "uint8": MPI.UINT8_T, "uint16": MPI.UINT16_T, "uint32": MPI.UINT32_T, "uint64": MPI.UINT64_T,
    "bool": MPI.C_BOOL,
}

_NUMBERS, _INTEGERS, _TRUTHS = ("float", "int", "complex"), ("int",), ("int", "bool")
_OFFERED: dict[str, tuple[MPI.Op, tuple[str, ...]]] = {
    "sum": (MPI.SUM, _NUMBERS), "prod": (MPI.PROD, _NUMBERS),
    "min": (MPI.MIN, _INTEGERS), "max": (MPI.MAX, _INTEGERS),
    "band": (MPI.BAND, _INTEGERS), "bor": (MPI.BOR, _INTEGERS), "bxor": (MPI.BXOR, _INTEGERS),
    "logical_and": (MPI.LAND, _TRUTHS), "logical_or": (MPI.LOR, _TRUTHS), "logical_xor": (MPI.LXOR, _TRUTHS),
}

#: (reduction, dtype) -> how MPI names the two, and bytes of an element.
_REDUCTIONS: dict[tuple[str, str], tuple[MPI.Op, MPI.Datatype, int]] = {
    (reduction, name): (op, datatype, DTYPES[name].num_bytes)
    for reduction, (op, kinds) in _OFFERED.items() for name, datatype in _TYPES.items() if DTYPES[name].kind in kinds
}

_COUNT_LIMIT = 2**31  # bytes; MPI counts in 31 bits

_Ways = tuple[Callable[..., Any], Callable[..., Any]]  # the blocking call, and the one that gives a request
_Buffer = Any  # what mpi4py takes: [memory, count, type], [memory, (counts, offsets), type], IN_PLACE or None


class MpiNative:
    """See `hpctrain.contracts.Native`. A call must be one that is offered, and its memory as long as it says."""

    def __init__(self, communicator: MPI.Intracomm, message_limit: int) -> None:
        self._communicator = communicator
        self._limit = min(message_limit, _COUNT_LIMIT - 1)
        self._rank, self._size = communicator.Get_rank(), communicator.Get_size()
        names = ("Bcast", "Scatter", "Scatterv", "Gather", "Gatherv", "Reduce", "Allreduce", "Reduce_scatter_block",
                 "Reduce_scatter", "Allgather", "Allgatherv", "Alltoall", "Alltoallv")
        self._mpi: dict[str, _Ways] = {
            name: (getattr(communicator, name), getattr(communicator, f"I{name.lower()}")) for name in names
        }
        self._forms: dict[str, Callable[[NativeCall], tuple[str, tuple[Any, ...]]]] = {
            "broadcast": self._broadcast, "scatter": self._scatter, "gather": self._gather, "reduce": self._reduce,
            "all_reduce": self._all_reduce, "reduce_scatter": self._reduce_scatter, "all_gather": self._all_gather,
            "all_to_all": self._all_to_all,
        }
        self._barrier: Callable[[], None] = communicator.Barrier
        self._all_gather_bytes: Callable[..., None] = communicator.Allgather
        self._mine, self._all = array("q", (0, 0, 0)), array("q", (0, 0, 0) * self._size)
        self._words_out, self._words_in = [self._mine, 24, MPI.BYTE], [self._all, 24, MPI.BYTE]

    def offers(self, operation: str, reduction: str, dtype: str, num_bytes: int) -> bool:
        if operation not in self._forms or num_bytes > self._limit:
            return False
        return (reduction, dtype) in _REDUCTIONS if reduction else dtype in DTYPES

    def run(self, call: NativeCall) -> None:
        name, arguments = self._forms[call.operation](call)
        try:
            self._mpi[name][0](*arguments)
        except MPI.Exception as error:
            raise failed(self._communicator, error) from error

    def start(self, call: NativeCall) -> Message:
        name, arguments = self._forms[call.operation](call)
        try:
            return Message(self._mpi[name][1](*arguments))
        except MPI.Exception as error:
            raise failed(self._communicator, error) from error

    def barrier(self) -> None:
        try:
            self._barrier()
        except MPI.Exception as error:
            raise failed(self._communicator, error) from error

    def all_gather_words(self, mine: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        out = self._mine
        out[0], out[1], out[2] = mine
        try:
            self._all_gather_bytes(self._words_out, self._words_in)
        except MPI.Exception as error:
            raise failed(self._communicator, error) from error
        words = iter(self._all.tolist())
        return list(zip(words, words, words))

    def close(self) -> None:
        """Refuses every call from now on; some MPI libraries would return from an all-gather without having begun."""
        self._mpi = dict.fromkeys(self._mpi, (_refuse, _refuse))
        self._barrier = self._all_gather_bytes = _refuse

    def _broadcast(self, call: NativeCall) -> tuple[str, tuple[Any, ...]]:
        memory = call.source if call.target is None else call.target
        if call.source is not None and call.target is not None and call.root == self._rank:
            _copy_unless_same(call.source, call.target)
        return "Bcast", (_bytes(memory), call.root)

    def _scatter(self, call: NativeCall) -> tuple[str, tuple[Any, ...]]:
        given: _Buffer = None
        taken = _bytes(call.target)
        if self._rank == call.root:
            given = self._parts(call.source, call.counts, call.dtype)
            if call.target is None or _is_inside(call.target, call.source):
                taken = MPI.IN_PLACE
        return "Scatter" if call.counts is None else "Scatterv", (given, taken, call.root)

    def _gather(self, call: NativeCall) -> tuple[str, tuple[Any, ...]]:
        given, taken = _bytes(call.source), None
        if self._rank == call.root:
            taken = self._parts(call.target, call.counts, call.dtype)
            if call.source is None or _is_inside(call.source, call.target):
                given = MPI.IN_PLACE
        return "Gather" if call.counts is None else "Gatherv", (given, taken, call.root)

    def _reduce(self, call: NativeCall) -> tuple[str, tuple[Any, ...]]:
        op, datatype, size = _REDUCTIONS[call.reduction, call.dtype]
        source, target = call.source, call.target
        if self._rank != call.root:
            source = target if source is None else source
            assert source is not None
            return "Reduce", ([source, len(source) // size, datatype], None, op, call.root)
        assert target is not None
        same = source is None or source is target or _is_inside(source, target)
        given = MPI.IN_PLACE if same else [source, len(target) // size, datatype]
        return "Reduce", (given, [target, len(target) // size, datatype], op, call.root)

    def _all_reduce(self, call: NativeCall) -> tuple[str, tuple[Any, ...]]:
        op, datatype, size = _REDUCTIONS[call.reduction, call.dtype]
        source, target = call.source, call.target
        assert target is not None
        count = len(target) // size
        if source is target or source is None or _is_inside(source, target):
            return "Allreduce", (MPI.IN_PLACE, [target, count, datatype], op)
        return "Allreduce", ([source, count, datatype], [target, count, datatype], op)

    def _reduce_scatter(self, call: NativeCall) -> tuple[str, tuple[Any, ...]]:
        op, datatype, size = _REDUCTIONS[call.reduction, call.dtype]
        source, target = call.source, call.target
        assert source is not None and target is not None
        if _overlap(source, target):  # MPI's in-place form puts every rank's part at the beginning
            source = memoryview(bytes(source))
        taken = [target, len(target) // size, datatype]
        if call.counts is None:
            return "Reduce_scatter_block", ([source, len(target) // size, datatype], taken, op)
        return "Reduce_scatter", ([source, len(source) // size, datatype], taken, list(call.counts), op)

    def _all_gather(self, call: NativeCall) -> tuple[str, tuple[Any, ...]]:
        same = call.source is None or _is_inside(call.source, call.target)
        given = MPI.IN_PLACE if same else _bytes(call.source)
        taken = self._parts(call.target, call.counts, call.dtype)
        return "Allgather" if call.counts is None else "Allgatherv", (given, taken)

    def _all_to_all(self, call: NativeCall) -> tuple[str, tuple[Any, ...]]:
        source, target = call.source, call.target
        if source is None:
            source = target
        assert source is not None and target is not None
        if _overlap(source, target):  # the in-place form sends other messages, and other ranks may not be in place
            source = memoryview(bytes(source))
        leaving, arriving = (None, None) if call.counts is None else call.counts
        given, taken = self._parts(source, leaving, call.dtype), self._parts(target, arriving, call.dtype)
        return "Alltoall" if call.counts is None else "Alltoallv", (given, taken)

    def _parts(self, memory: memoryview | None, counts: Any, dtype: str) -> _Buffer:
        """Memory of one part a rank, as bytes."""
        assert memory is not None
        if counts is None:
            assert len(memory) % self._size == 0, f"{len(memory)} bytes have no {self._size} equal parts"
            return [memory, len(memory) // self._size, MPI.BYTE]
        size = dtype_of(dtype).num_bytes
        lengths = [count * size for count in counts]
        return [memory, (lengths, [0, *accumulate(lengths[:-1])]), MPI.BYTE]


def _refuse(*arguments: Any) -> NoReturn:
    raise TransportError("the transport is closed")


def _bytes(memory: memoryview | None) -> _Buffer:
    return None if memory is None else [memory, len(memory), MPI.BYTE]


def _range(memory: memoryview) -> tuple[int, int]:
    start = MPI.Get_address(memory)
    return start, start + len(memory)


def _is_inside(part: memoryview, whole: memoryview | None) -> bool:
    """Whether `part` is a stretch of `whole`, which is how a call says that it works in place."""
    if whole is None or not len(part):
        return False
    (start, stop), (low, high) = _range(part), _range(whole)
    return low <= start and stop <= high


def _overlap(a: memoryview, b: memoryview) -> bool:
    if not len(a) or not len(b):
        return False
    (start, stop), (low, high) = _range(a), _range(b)
    return start < high and low < stop


def _copy_unless_same(source: memoryview, target: memoryview) -> None:
    if source is not target and not _is_inside(source, target):
        target[:] = source
