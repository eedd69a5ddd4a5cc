"""Reductions as jobs: all_reduce, reduce, reduce_scatter.

Owns what a reduction means for arrays: which memory a plan may write, in which type sums are carried, what is refused.
Knows the contracts only.

A direct plan (see `plan.steps.CollectivePlan`) that ends where its sums are finished leaves the input as it is and
needs no copy of it. Any other writes into its workspace: the result's memory where that holds all of it, a copy
otherwise. Half types are added in float32 and rounded once: a direct plan carries its sums in float32 where they are
formed; for any other the whole workspace is float32, on the wire too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from hpctrain.collectives import shared
from hpctrain.collectives.core import Core, Prepared
from hpctrain.collectives.jobs import Far, Job
from hpctrain.collectives.layout import Output, check_out, count_of, elements, to_write
from hpctrain.collectives.shared import Near, Sum
from hpctrain.collectives.way import Call
from hpctrain.collectives.workspace import Workspace
from hpctrain.contracts import Array, Arrays, NativeCall
from hpctrain.dtypes import DType, check_reduction, dtype_of
from hpctrain.plan import split

__all__ = ["all_reduce", "reduce", "reduce_scatter"]

_WIDE = frozenset({"sum", "mean", "prod"})  # what is carried in float32 for half types
_LOGICAL = frozenset({"logical_and", "logical_or", "logical_xor"})
_BLOCK_SEGMENTS = 4  # of a wide sum under way: enough to overlap arrival and addition, small enough to stay in cache


@dataclass(slots=True)
class _Reduction:
    """One reduction of one array."""

    core: Core
    arrays: Arrays
    dtype: DType
    operation: str

    @classmethod
    def of(cls, core: Core, array: Array, operation: str) -> _Reduction:
        """Refuses an operation that is not defined on the array's dtype."""
        arrays = core.arrays_of(array)
        name = arrays.dtype(array)
        check_reduction(operation, name)
        return cls(core, arrays, dtype_of(name), operation)

    @property
    def accumulate(self) -> str:
        """The type in which the result is formed."""
        return self.dtype.accumulate if self.operation in _WIDE else self.dtype.name

    @property
    def wide(self) -> bool:
        """Whether that is another one than the array's."""
        return self.accumulate != self.dtype.name

    def prepare(self, call: Call, algorithm: str, shape: Sequence[int] | int) -> Prepared:
        """The program of `call`; sums of half types go straight to their owner, block by block."""
        block = None
        if self.wide and algorithm == "pairwise":
            block = self.core.segment(self.dtype.num_bytes) * _BLOCK_SEGMENTS
        return self.core.prepare(call.operation, algorithm, shape, call.root, block)

    def call(self, operation: str, title: str, count: int, algorithm: str | None, name: str, root: int = 0) -> Call:
        """The call; the transport's library adds up for a mean, too."""
        return Call(operation, title, self.dtype.name, count, algorithm, name, root,
                    "sum" if self.operation == "mean" else self.operation)

    @property
    def sum(self) -> Sum:
        """What combining means on shared memory."""
        return _sum(self.operation, self.dtype.name, self.accumulate, self.core.size)

    def scaling(self, flat: Array) -> Callable[[], None] | None:
        """What makes a mean of a sum."""
        return (lambda: self.arrays.scale(flat, 1.0 / self.core.size)) if self.operation == "mean" else None

    def default(self, operation: str) -> str | None:
        """What sums of half types take where no chooser says."""
        return ("naive" if operation == "reduce" else "pairwise") if self.wide else None

    def between(self, source: Array, target: Array, offset: int = 0, memory: memoryview | None = None) -> Workspace:
        """The workspace of a direct plan, or of one in place (source is target) for types that add as they are.

        `memory` are the bytes of target, where they are known.
        """
        return Workspace(
            self.arrays, self.dtype.name, self.dtype.num_bytes, source, target, offset,
            operation="sum" if self.operation == "mean" else self.operation,
            accumulate=self.accumulate,
            factor=1.0 / self.core.size if self.operation == "mean" else None,
            target_memory=memory,
        )

    def copy(self, source: Array) -> Workspace:
        """The workspace of a plan that writes partial sums, in memory of its own."""
        work = self.arrays.empty(count_of(self.arrays, source), self.accumulate)
        self.arrays.assign(work, source)
        dtype = dtype_of(self.accumulate)
        space = self.between(source, source)
        return Workspace(self.arrays, dtype.name, dtype.num_bytes, work, work, operation=space.operation,
                         factor=space.factor)

    def ending(self, output: Output, result: Array | None) -> Callable[[], None] | None:
        """What is left to do when the plan is through: from `result` (None: it is there) to the user's array."""
        if result is None:
            return output.put_back

        def end() -> None:
            self.arrays.assign(output.flat, result)
            if output.put_back is not None:
                output.put_back()

        return end

    def alone(self, flat: Array) -> Callable[[], None] | None:
        """What a group of one rank has to do: several ranks would have made 0 and 1 of a logical operation."""
        if self.operation not in _LOGICAL:
            return None
        return lambda: self.arrays.combine("logical_or", flat, flat)


@lru_cache(maxsize=256)
def _sum(operation: str, dtype: str, accumulate: str, size: int) -> Sum:
    mean = operation == "mean"
    return Sum("sum" if mean else operation, dtype, accumulate, 1.0 / size if mean else None)


def all_reduce(core: Core, array: Array, operation: str, out: Array | None, algorithm: str | None, name: str) -> Job:
    """See `Group.all_reduce`."""
    todo = _Reduction.of(core, array, operation)
    arrays, dtype = todo.arrays, todo.dtype
    count = count_of(arrays, array)
    call = todo.call("all_reduce", f"all_reduce {operation}", count, algorithm, name)
    if out is not None:
        check_out(arrays, core.arrays_of(out), out, dtype.name, count)
    result = array if out is None else out
    output = to_write(arrays, result)
    flat, memory = output.flat, output.memory
    if out is not None and out is not array:
        arrays.assign(flat, elements(arrays, array))

    def far(algorithm: str) -> Far:
        prepared = todo.prepare(call, algorithm, count)
        if todo.wide and not prepared.direct:
            space = todo.copy(flat)
            return Far(prepared.program, space, todo.ending(output, space.target))
        return Far(prepared.program, todo.between(flat, flat, memory=memory), todo.ending(output, None))

    near = Near(memory, lambda near: shared.all_reduce(near, todo.sum, count), across=True)
    native = lambda: NativeCall("all_reduce", dtype.name, call.reduction, memory, memory)  # noqa: E731
    return Job(call, arrays, dtype.num_bytes, result, far, output.put_back, near, native, todo.scaling(flat),
               todo.default("all_reduce"), todo.alone(flat))


def reduce(core: Core, array: Array, operation: str, root: int, out: Array | None, algorithm: str | None,
           name: str) -> Job:
    """See `Group.reduce`."""
    core.check_rank("root", root)
    todo = _Reduction.of(core, array, operation)
    arrays, dtype, here = todo.arrays, todo.dtype, core.rank == root
    count = count_of(arrays, array)
    call = todo.call("reduce", f"reduce {operation} to {root}", count, algorithm, name, root)
    if here:
        if out is not None:
            check_out(arrays, core.arrays_of(out), out, dtype.name, count)
        result = array if out is None else out
        output = to_write(arrays, result)
        if out is not None and out is not array:
            arrays.assign(output.flat, elements(arrays, array))
    else:
        result, source = None, elements(arrays, array)
        output = Output(source, arrays.memory(source))
    flat, memory = output.flat, output.memory

    def far(algorithm: str) -> Far:
        prepared = todo.prepare(call, algorithm, count)
        if prepared.direct or not (here or prepared.combines or todo.wide):
            return Far(prepared.program, todo.between(flat, flat, memory=memory),
                       todo.ending(output, None) if here else None)
        space = todo.copy(flat)
        return Far(prepared.program, space, todo.ending(output, space.target) if here else None)

    near = Near(memory, lambda near: shared.reduce(near, todo.sum, root, count))
    native = lambda: NativeCall("reduce", dtype.name, call.reduction, memory, memory if here else None, root)  # noqa: E731
    return Job(call, arrays, dtype.num_bytes, result, far, output.put_back, near, native,
               todo.scaling(flat) if here else None, todo.default("reduce"), todo.alone(flat))


def reduce_scatter(core: Core, array: Array, operation: str, counts: Sequence[int] | None, out: Array | None,
                   algorithm: str | None, name: str) -> Job:
    """See `Group.reduce_scatter`."""
    todo = _Reduction.of(core, array, operation)
    arrays, dtype = todo.arrays, todo.dtype
    source = elements(arrays, array)
    count = count_of(arrays, array)
    bounds = split.bounds(count, core.size) if counts is None else core.bounds(counts, count)
    start, stop = bounds[core.rank], bounds[core.rank + 1]
    if out is None:
        result = arrays.empty(stop - start, dtype.name)
        output = Output(result, arrays.memory(result))
    else:
        check_out(arrays, core.arrays_of(out), out, dtype.name, stop - start)
        result, output = out, to_write(arrays, out)
    call = todo.call("reduce_scatter", f"reduce_scatter {operation}", count, algorithm, name)
    memory = arrays.memory(source)

    def far(algorithm: str) -> Far:
        prepared = todo.prepare(call, algorithm, count if counts is None else bounds)
        if prepared.direct:
            return Far(prepared.program, todo.between(source, output.flat, start), todo.ending(output, None))
        space = todo.copy(source)
        return Far(prepared.program, space, todo.ending(output, space.target[start:stop]))

    def native() -> NativeCall:
        uneven = counts is not None or count % core.size
        return NativeCall("reduce_scatter", dtype.name, call.reduction, memory, output.memory,
                          counts=[b - a for a, b in pairwise(bounds)] if uneven else None)

    near = Near(memory, lambda near: shared.reduce_scatter(near, todo.sum, start, stop, output.flat))

    def alone() -> None:
        if out is not array:
            arrays.assign(output.flat, source)
        if operation in _LOGICAL:
            arrays.combine("logical_or", output.flat, output.flat)

    return Job(call, arrays, dtype.num_bytes, result, far, output.put_back, near, native, todo.scaling(output.flat),
               todo.default("reduce_scatter"), alone)
