"""The process group: what users and other engines hold.

Owns the choice of plan for each call, the handling of arrays of any layout, and the numbering of works. Knows the
contracts only. A group owns its transport: nobody else may send on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from hpctrain.collectives import agreement
from hpctrain.collectives.executor import Execution, Scratch, Workspace
from hpctrain.collectives.work import Queue
from hpctrain.contracts import Array, Arrays, ArraysOf, Transport, Work
from hpctrain.dtypes import check_reduction, dtype_of
from hpctrain.errors import UnsupportedError
from hpctrain.plan import pairwise, ring, split
from hpctrain.plan.steps import CollectivePlan, Program

__all__ = ["SEGMENT_BYTES", "Group"]

#: Messages are cut into segments of this size, so that what arrives is added while it is still in cache.
SEGMENT_BYTES = 512 * 1024
_NUM_TAGS = 32767  # works take tags in turn; the last tag is for send and recv
_BLOCK_SEGMENTS = 4  # of a wide sum under way: enough to overlap arrival and addition, small enough to stay in cache


class Group:
    """Collectives among the ranks of one transport, on NumPy arrays and torch tensors of any layout.

    Every rank of the group makes the collective calls in the same order with arrays of the same dtype and element
    count. One thread at a time. Blocking calls return when this rank's result is there. Reductions of half types add
    in float32 and round once; which dtype allows which operation is in `hpctrain.dtypes`. All ranks end with the same
    bits.
    """

    def __init__(self, transport: Transport, arrays_of: ArraysOf, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        assert segment_bytes > 0
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self._arrays_of, self._segment_bytes = arrays_of, segment_bytes
        self._queue, self._scratch = Queue(), Scratch()
        self._num_works = 0
        self._program = lru_cache(maxsize=64)(self._make_program)

    # Collectives on arrays ------------------------------------------------------------------------------------------

    def all_reduce(self, array: Array, operation: str = "sum") -> Array:
        """Reduces `array` over all ranks, in place, and returns it. Collective over the group.

        `operation` is "sum", "mean", "min" or "max". Raises UnsupportedError before anything moves where it is not
        defined on the dtype. A ring for types that add exactly as they are; half sums go pairwise to their owner.
        """
        arrays = self._arrays_of(array)
        if arrays.is_contiguous(array):
            self.start_all_reduce(array, operation).wait()
        else:
            flat = arrays.to_flat(array)
            self.start_all_reduce(flat, operation).wait()
            arrays.assign(array, flat)
        return array

    def start_all_reduce(self, array: Array, operation: str = "sum") -> Work:
        """Starts an `all_reduce` of a C-contiguous array, which must be left alone until the work is done.

        Collective over the group. Messages move on whenever the work is polled or waited for, or `advance` is called.
        """
        arrays = self._arrays_of(array)
        check_reduction(operation, arrays.dtype(array))
        flat = self._in_place(arrays, array)
        space = self._workspace(arrays, flat, flat, operation)
        wide = space.accumulate != space.dtype
        block = self._segment(space.num_bytes) * _BLOCK_SEGMENTS if wide else None
        kind = "all_reduce pairwise" if wide else "all_reduce"
        return self._start(self._program(kind, _count(arrays, flat), block), space)

    def reduce_scatter(self, array: Array, operation: str = "sum") -> Array:
        """The rank's own part of the reduction, flat: `plan.split.part(count, size, rank)` of the flattened array.

        Collective over the group. The input, of any layout, is not changed. Pairwise exchange.
        """
        arrays = self._arrays_of(array)
        check_reduction(operation, arrays.dtype(array))
        flat = arrays.flat(array) if arrays.is_contiguous(array) else arrays.to_flat(array)
        count = _count(arrays, flat)
        start, stop = split.part(count, self.size, self.rank)
        own = arrays.empty(stop - start, arrays.dtype(array))
        space = self._workspace(arrays, flat, own, operation, offset=start)
        wide = space.accumulate != space.dtype
        block = self._segment(space.num_bytes) * _BLOCK_SEGMENTS if wide else None
        self._start(self._program("reduce_scatter", count, block), space).wait()
        return own

    def all_gather(self, part: Array) -> Array:
        """The parts of all ranks one after the other, flat, in rank order; lengths may differ. Collective."""
        arrays = self._arrays_of(part)
        flat = arrays.flat(part) if arrays.is_contiguous(part) else arrays.to_flat(part)
        dtype = arrays.dtype(part)
        announced = self.exchange([dtype, _count(arrays, flat)])
        if len({name for name, _ in announced}) > 1:
            raise UnsupportedError(f"all_gather needs one dtype on all ranks, has {[name for name, _ in announced]}")
        bounds = [0]
        for _, count in announced:
            bounds.append(bounds[-1] + count)
        whole = arrays.empty(bounds[-1], dtype)
        arrays.assign(whole[bounds[self.rank] : bounds[self.rank + 1]], flat)
        self.all_gather_into(whole, bounds)
        return whole

    def all_gather_into(self, flat: Array, bounds: Sequence[int]) -> None:
        """Fills `flat` in place: rank r's part flat[bounds[r]:bounds[r + 1]] is already there on rank r. Collective.

        `bounds` are size + 1 ascending offsets, the same on all ranks; parts may be empty.
        """
        arrays = self._arrays_of(flat)
        flat = self._in_place(arrays, flat)
        if len(bounds) != self.size + 1 or bounds[-1] != _count(arrays, flat):
            raise ValueError(f"bounds must be {self.size + 1} offsets up to {_count(arrays, flat)}, not {list(bounds)}")
        space = self._workspace(arrays, flat, flat, "")
        self._start(self._program("all_gather", tuple(bounds)), space).wait()

    def broadcast(self, array: Array, root: int = 0) -> Array:
        """Gives every rank the content of `root`'s array, in place in an array of any layout. Collective."""
        self._check_rank("root", root)
        arrays = self._arrays_of(array)
        contiguous = arrays.is_contiguous(array)
        flat = self._in_place(arrays, array if contiguous else arrays.to_flat(array))
        space = self._workspace(arrays, flat, flat, "")
        count = _count(arrays, flat)
        # m pieces take (m + p - 2) / m of the time of sending all: within an eighth of the best, in few rounds.
        pieces = min(-(-count // self._segment(space.num_bytes)), 1 + 8 * max(self.size - 2, 0))
        self._start(self._program("broadcast", count, max(pieces, 1), root), space).wait()
        if not contiguous:
            arrays.assign(array, flat)
        return array

    def send(self, array: Array, destination: int) -> None:
        """Sends an array of any layout to rank `destination`, which calls `recv`. Blocks until it may be reused."""
        self._check_rank("destination", destination)
        arrays = self._arrays_of(array)
        flat = arrays.flat(array) if arrays.is_contiguous(array) else arrays.to_flat(array)
        self.transport.send(arrays.memory(flat), destination, _NUM_TAGS).wait()

    def recv(self, array: Array, source: int) -> Array:
        """Receives into an array of any layout, of the sender's dtype and count, from rank `source`. Blocks."""
        self._check_rank("source", source)
        arrays = self._arrays_of(array)
        contiguous = arrays.is_contiguous(array)
        flat = self._in_place(arrays, array if contiguous else arrays.to_flat(array))
        self.transport.recv(arrays.memory(flat), source, _NUM_TAGS).wait()
        if not contiguous:
            arrays.assign(array, flat)
        return array

    # Agreement ------------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Returns when every rank has called it. Collective over the group."""
        self.exchange(None)

    def exchange(self, value: Any) -> list[Any]:
        """The small JSON-able values of all ranks, in rank order. Collective over the group."""
        return agreement.exchange(self.transport, self._next_tag(), value)

    def broadcast_value(self, value: Any, root: int = 0) -> Any:
        """`root`'s small JSON-able value; the others' argument is ignored. Collective over the group."""
        self._check_rank("root", root)
        return agreement.broadcast_value(self.transport, self._next_tag(), value, root)

    def agree(self) -> agreement.Agreement:
        """`with group.agree():` an exception in the body on any rank is raised on all ranks. Collective."""
        return agreement.Agreement(self.transport, self._next_tag())

    def on_root(self, function: Callable[[], Any], root: int = 0) -> Any:
        """Runs `function()` on `root`; its JSON-able value is returned, or its error raised, on all. Collective."""
        self._check_rank("root", root)
        return agreement.on_root(self.transport, self._next_tag(), function, root)

    # Works and life -------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Moves on the works under way as far as their messages allow. Local, never blocks."""
        self._queue.advance()

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """A group of `ranks`, numbered in that order; None on other ranks. Collective over this group.

        Disjoint subgroups may be made in one call, each rank passing the list of its own.
        """
        transport = self.transport.subgroup(ranks)
        return None if transport is None else Group(transport, self._arrays_of, segment_bytes=self._segment_bytes)

    def close(self) -> None:
        """Finishes the works under way and releases the transport. Collective over the group."""
        self._queue.drain()
        self.transport.close()

    # Inside ---------------------------------------------------------------------------------------------------------

    def _make_program(self, kind: str, *shape: Any) -> Program:
        plan: CollectivePlan
        if kind == "all_reduce":
            plan = ring.all_reduce(split.bounds(shape[0], self.size))
        elif kind == "all_reduce pairwise":
            plan = pairwise.all_reduce(split.bounds(shape[0], self.size), shape[1])
        elif kind == "reduce_scatter":
            plan = pairwise.reduce_scatter(split.bounds(shape[0], self.size), shape[1])
        elif kind == "all_gather":
            plan = ring.all_gather(shape[0])
        else:
            plan = ring.broadcast(split.bounds(shape[0], shape[1]), self.size, shape[2])
        return plan.program(self.rank)

    def _workspace(self, arrays: Arrays, source: Array, target: Array, operation: str, offset: int = 0) -> Workspace:
        dtype = dtype_of(arrays.dtype(source))
        summed = operation in ("sum", "mean")
        return Workspace(
            arrays, dtype.name, dtype.num_bytes, source, target, offset,
            operation="sum" if summed else operation,
            accumulate=dtype.accumulate if summed else dtype.name,
            factor=1.0 / self.size if operation == "mean" else None,
        )

    def _start(self, program: Program, space: Workspace) -> Work:
        segment = self._segment(space.num_bytes)
        execution = Execution(program, self.transport, self._next_tag(), space, self._scratch, segment)
        return self._queue.start(execution.run())

    def _segment(self, num_bytes: int) -> int:
        return max(1, self._segment_bytes // num_bytes)

    def _next_tag(self) -> int:
        self._num_works += 1
        return self._num_works % _NUM_TAGS

    def _in_place(self, arrays: Arrays, array: Array) -> Array:
        """The flat view of an array that is to be written."""
        if not arrays.is_contiguous(array):
            raise UnsupportedError(f"an array of shape {arrays.shape(array)} must be C-contiguous here; pass a copy")
        if arrays.memory(array).readonly:
            raise ValueError("the array is read-only, but its collective works in place; pass a copy")
        return arrays.flat(array)

    def _check_rank(self, name: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"{name} = {rank} must be in 0..{self.size - 1}")


def _count(arrays: Arrays, flat: Array) -> int:
    return arrays.shape(flat)[0]
