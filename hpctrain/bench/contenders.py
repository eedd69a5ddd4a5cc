"""What is measured: each collective and a message there and back, by hpctrain's algorithms and by MPI's own call.

Owns the operations' calls and their right results: a contender that gives a wrong answer must not win. Every element
on rank r is (index mod 7) + r, so results are whole numbers. `send_recv` is a ping-pong: rank 0 sends the array to rank
1, which sends it back; all others are idle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hpctrain.arrays.numpy import NumpyArrays
from hpctrain.collectives import Group
from hpctrain.dtypes import dtype_of
from hpctrain.plan import split

__all__ = ["NATIVE", "OPERATIONS", "Case"]

#: The contender that is MPI's own call.
NATIVE = "MPI"

Message = Callable[[Any, int], object]  # sends an array to a rank, or receives it from there
Call = Callable[[], Any]  # does the collective once; returns this rank's result, or None where it has none


class Case:
    """One operation at one size: the buffers of this rank, equal for all contenders. Collective over the group to make.

    Buffers come from the transport, or, where they are to be `ordinary`, from NumPy.

    Attributes:
        num_bytes: of the whole array; what was asked for, rounded up to a whole number of elements a rank.
        whole, other: two flat arrays of that size; `whole` holds the input, and the result where it is in place.
        part: a flat array of one rank's share.
    """

    def __init__(self, group: Group, operation: str, dtype: str, num_bytes: int, *, ordinary: bool = False) -> None:
        self.group, self.operation, self.dtype, self.ordinary = group, OPERATIONS[operation], dtype, ordinary
        item = dtype_of(dtype).num_bytes
        self.count = -(-num_bytes // (item * group.size)) * group.size
        self.num_bytes = self.count * item
        self.whole, self.other = self._allocate(self.count), self._allocate(self.count)
        self.part = self._allocate(self.count // group.size)
        self.bounds = split.bounds(self.count, group.size)
        self._next_root = 0

    @property
    def own(self) -> slice:
        """Where this rank's part lies in `whole`."""
        return slice(self.bounds[self.group.rank], self.bounds[self.group.rank + 1])

    def root(self) -> int:
        """The root of the next call: in turn, so that no root runs ahead of the others."""
        root = self._next_root
        self._next_root = (root + 1) % self.group.size
        return root

    def ours(self, algorithm: str | None = None) -> Call:
        """hpctrain's call, with the algorithm that the group chooses where none is named. Collective when called."""
        return self.operation.ours(self, algorithm)

    def native(self, communicator: Any) -> Call | None:
        """MPI's own call on the same buffers, or None where MPI has no such type. Collective when called."""
        return self.operation.native(self, _Native(communicator, self))

    def check(self, call: Call) -> None:
        """Runs `call` once and compares this rank's result. Collective over the group, the verdict is local.

        Raises:
            ArithmeticError: the result is wrong.
        """
        self.whole[...] = self._input
        self.other[...] = 0  # what an earlier call left here must not pass for a result
        self.part[...] = self.whole[self.own] if self.operation.sends_part else 0
        self._next_root = 0
        try:
            result, expected = call(), self._expected
            if result is not None and not _equal(result, expected, self.dtype):
                raise ArithmeticError(f"rank {self.group.rank} has a wrong result: {result[:8]}..., "
                                      f"not {expected[:8]}...")
        finally:
            self.whole[...] = 0  # what is summed again and again must stay finite

    @cached_property
    def _pattern(self) -> Any:
        return np.resize(np.arange(7.0), self.count)

    @cached_property
    def _input(self) -> Any:
        return _as(self.dtype, self._pattern + self.group.rank)

    @cached_property
    def _expected(self) -> Any:
        return _as(self.dtype, self.operation.expected(self._pattern, self.group.size, self.group.rank))

    def _allocate(self, count: int) -> Any:
        if self.ordinary:
            return NumpyArrays().zeros(count, self.dtype)
        memory = self.group.transport.allocate(count * dtype_of(self.dtype).num_bytes)
        return NumpyArrays().from_memory(memory, self.dtype)


class _Native:
    """What MPI's own calls need: its words, and buffers with an explicit datatype."""

    def __init__(self, communicator: Any, case: Case) -> None:
        from mpi4py import MPI

        self.mpi, self.comm = MPI, communicator
        types = {"float32": MPI.FLOAT, "float64": MPI.DOUBLE, "int32": MPI.INT32_T, "int64": MPI.INT64_T,
                 "uint8": MPI.UINT8_T, "int8": MPI.INT8_T, "int16": MPI.INT16_T, "uint16": MPI.UINT16_T,
                 "uint32": MPI.UINT32_T, "uint64": MPI.UINT64_T, "complex64": MPI.C_FLOAT_COMPLEX,
                 "complex128": MPI.C_DOUBLE_COMPLEX}
        self.datatype = types.get(case.dtype)  # None: no such type in MPI (half types), or no agreed sum (bool)

    def typed(self, array: Any) -> list[Any]:
        """For reductions."""
        return [array, self.datatype]

    def raw(self, array: Any) -> list[Any]:
        """For calls that only move bytes."""
        return [array.view(np.uint8), self.mpi.BYTE]


@dataclass(frozen=True)
class _Operation:
    """How hpctrain and MPI call it, and what a rank must end with: expected(pattern, ranks, rank)."""

    ours: Callable[[Case, str | None], Call]
    native: Callable[[Case, _Native], Call | None]
    expected: Callable[[Any, int, int], Any]
    sends_part: bool = False  # its input is `part`


def _all_reduce(case: Case, algorithm: str | None) -> Call:
    return lambda: case.group.all_reduce(case.whole, algorithm=algorithm)


def _all_reduce_native(case: Case, native: _Native) -> Call | None:
    if native.datatype is None:
        return None
    call = native.comm.Allreduce
    return _giving(lambda: call(native.mpi.IN_PLACE, native.typed(case.whole), op=native.mpi.SUM), case.whole)


def _reduce(case: Case, algorithm: str | None) -> Call:
    return lambda: case.group.reduce(case.whole, root=case.root(), algorithm=algorithm)


def _reduce_native(case: Case, native: _Native) -> Call | None:
    if native.datatype is None:
        return None

    def call() -> Any:
        root, whole = case.root(), native.typed(case.whole)
        here = root == case.group.rank
        native.comm.Reduce(native.mpi.IN_PLACE if here else whole, whole if here else None, native.mpi.SUM, root)
        return case.whole if here else None

    return call


def _reduce_scatter(case: Case, algorithm: str | None) -> Call:
    return lambda: case.group.reduce_scatter(case.whole, out=case.part, algorithm=algorithm)


def _reduce_scatter_native(case: Case, native: _Native) -> Call | None:
    if native.datatype is None:
        return None
    call = native.comm.Reduce_scatter_block
    return _giving(lambda: call(native.typed(case.whole), native.typed(case.part), op=native.mpi.SUM), case.part)


def _all_gather(case: Case, algorithm: str | None) -> Call:
    return _giving(lambda: case.group.all_gather_into(case.whole, case.bounds, algorithm=algorithm), case.whole)


def _all_gather_native(case: Case, native: _Native) -> Call:
    return _giving(lambda: native.comm.Allgather(native.mpi.IN_PLACE, native.raw(case.whole)), case.whole)


def _broadcast(case: Case, algorithm: str | None) -> Call:
    return lambda: case.group.broadcast(case.whole, case.root(), algorithm=algorithm)


def _broadcast_native(case: Case, native: _Native) -> Call:
    return _giving(lambda: native.comm.Bcast(native.raw(case.whole), root=case.root()), case.whole)


def _scatter(case: Case, algorithm: str | None) -> Call:
    return lambda: case.group.scatter(case.part, case.whole, case.root(), algorithm=algorithm)


def _scatter_native(case: Case, native: _Native) -> Call:
    def call() -> Any:
        root = case.root()
        source = native.raw(case.whole) if root == case.group.rank else None
        native.comm.Scatter(source, native.raw(case.part), root)
        return case.part

    return call


def _gather(case: Case, algorithm: str | None) -> Call:
    def call() -> Any:
        root = case.root()
        out = case.whole if root == case.group.rank else None
        return case.group.gather(case.part, root, counts=counts, out=out, algorithm=algorithm)

    counts = [case.count // case.group.size] * case.group.size
    return call


def _gather_native(case: Case, native: _Native) -> Call:
    def call() -> Any:
        root = case.root()
        out = case.whole if root == case.group.rank else None
        native.comm.Gather(native.raw(case.part), None if out is None else native.raw(out), root)
        return out

    return call


def _all_to_all(case: Case, algorithm: str | None) -> Call:
    return lambda: case.group.all_to_all(case.whole, out=case.other, algorithm=algorithm)


def _all_to_all_native(case: Case, native: _Native) -> Call:
    return _giving(lambda: native.comm.Alltoall(native.raw(case.whole), native.raw(case.other)), case.other)


def _send_recv(case: Case, algorithm: str | None) -> Call:
    return _there_and_back(case, case.group.send, case.group.recv)


def _send_recv_native(case: Case, native: _Native) -> Call:
    comm = native.comm
    return _there_and_back(case, lambda array, to: comm.Send(native.raw(array), to),
                           lambda array, source: comm.Recv(native.raw(array), source))


def _there_and_back(case: Case, send: Message, recv: Message) -> Call:
    """A ping-pong by blocking calls; rank 0 and 1 end with rank 0's array in `other`."""

    def ping() -> Any:
        send(case.whole, 1)
        recv(case.other, 1)
        return case.other

    def pong() -> Any:
        recv(case.other, 0)
        send(case.other, 0)
        return case.other

    return {0: ping, 1: pong}.get(case.group.rank, lambda: None) if case.group.size > 1 else lambda: None


def _giving(call: Callable[[], object], result: Any) -> Call:
    """A call that returns the array that it wrote."""

    def both() -> Any:
        call()
        return result

    return both


def _as(dtype: str, values: Any) -> Any:
    """Whole numbers as `dtype`; integers wrap around, as their sums do."""
    target = NumpyArrays().empty(0, dtype).dtype
    return values.astype(np.int64).astype(target) if dtype_of(dtype).kind in ("int", "bool") else values.astype(target)


def _equal(result: Any, expected: Any, dtype: str) -> bool:
    """Half types have 8 bits and more for whole numbers; sums of many ranks may need a rounding."""
    if dtype not in ("float16", "bfloat16"):
        return bool(np.array_equal(result, expected))
    return bool(np.allclose(result.astype(np.float32), expected.astype(np.float32), rtol=2.0**-7, atol=0))


def _sum(pattern: Any, size: int, rank: int) -> Any:
    return size * pattern + size * (size - 1) / 2


def _own(values: Any, size: int, rank: int) -> Any:
    return values.reshape(size, -1)[rank]


def _gathered(pattern: Any, size: int, rank: int) -> Any:
    return pattern + np.repeat(np.arange(size), len(pattern) // size)


def _exchanged(pattern: Any, size: int, rank: int) -> Any:
    return (_own(pattern, size, rank) + np.arange(size)[:, None]).reshape(-1)


#: Operation -> its calls. The first call's root is rank 0.
OPERATIONS: dict[str, _Operation] = {
    "all_reduce": _Operation(_all_reduce, _all_reduce_native, _sum),
    "reduce_scatter": _Operation(_reduce_scatter, _reduce_scatter_native, lambda x, p, r: _own(_sum(x, p, r), p, r)),
    "all_gather": _Operation(_all_gather, _all_gather_native, _gathered),
    "broadcast": _Operation(_broadcast, _broadcast_native, lambda x, p, r: x),
    "all_to_all": _Operation(_all_to_all, _all_to_all_native, _exchanged),
    "reduce": _Operation(_reduce, _reduce_native, _sum),
    "scatter": _Operation(_scatter, _scatter_native, _own),
    "gather": _Operation(_gather, _gather_native, _gathered, sends_part=True),
    "send_recv": _Operation(_send_recv, _send_recv_native, lambda x, p, r: x),
}
