"""Reductions as works: all_reduce, reduce, reduce_scatter.

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

from hpctrain.collectives import shared
from hpctrain.collectives.core import Call, Core, Prepared
from hpctrain.collectives.layout import Output, check_out, count_of, elements, to_write
from hpctrain.collectives.work import Finished, QueuedWork
from hpctrain.collectives.workspace import Workspace
from hpctrain.contracts import Array, Arrays
from hpctrain.dtypes import DType, check_reduction, dtype_of
from hpctrain.plan import split

__all__ = ["start_all_reduce", "start_reduce", "start_reduce_scatter"]

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

    def prepare(self, call: Call, shape: Sequence[int] | int) -> Prepared:
        """The program of `call`; sums of half types go straight to their owner if nobody says otherwise."""
        algorithm = self.core.choose(call, self._wide_default(call.operation))
        block = None
        if self.wide and algorithm == "pairwise":
            block = self.core.segment(self.dtype.num_bytes) * _BLOCK_SEGMENTS
        return self.core.prepare(call.operation, algorithm, shape, call.root, block)

    def _wide_default(self, operation: str) -> str | None:
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
        logical = self.core.size == 1 and self.operation in _LOGICAL
        if result is None and not logical:
            return output.put_back

        def end() -> None:
            if result is not None:
                self.arrays.assign(output.flat, result)
            if logical:  # several ranks would have made 0 and 1 of it
                self.arrays.combine("logical_or", output.flat, output.flat)
            if output.put_back is not None:
                output.put_back()

        return end


def start_all_reduce(core: Core, array: Array, operation: str, out: Array | None, algorithm: str | None,
                     name: str) -> QueuedWork | Finished:
    """See `Group.all_reduce`."""
    todo = _Reduction.of(core, array, operation)
    arrays = todo.arrays
    count = count_of(arrays, array)
    call = Call("all_reduce", f"all_reduce {operation}", todo.dtype.name, count, algorithm, name)
    if out is not None:
        check_out(arrays, core.arrays_of(out), out, todo.dtype.name, count)
    result = array if out is None else out
    output = to_write(arrays, result)
    prepared = todo.prepare(call, count)
    if core.size == 1 and out is None and operation not in _LOGICAL and core.observer is None:
        return Finished(result)
    if todo.wide and not prepared.direct:
        space = todo.copy(output.flat if out is None else elements(arrays, array))
        return core.start(call, prepared.program, space, result, todo.ending(output, space.target))
    if out is not None:
        arrays.assign(output.flat, elements(arrays, array))
    space = todo.between(output.flat, output.flat, memory=output.memory)
    return core.start(call, prepared.program, space, result, todo.ending(output, None), shared.all_reduce)


def start_reduce(core: Core, array: Array, operation: str, root: int, out: Array | None, algorithm: str | None,
                 name: str) -> QueuedWork | Finished:
    """See `Group.reduce`."""
    todo = _Reduction.of(core, array, operation)
    arrays = todo.arrays
    count = count_of(arrays, array)
    call = Call("reduce", f"reduce {operation} to {root}", todo.dtype.name, count, algorithm, name, root)
    prepared = todo.prepare(call, count)
    if core.rank == root:
        if out is not None:
            check_out(arrays, core.arrays_of(out), out, todo.dtype.name, count)
        output = to_write(arrays, array if out is None else out)
        source = output.flat if out is None else elements(arrays, array)
        result = array if out is None else out
        if prepared.direct:
            space = todo.between(source, output.flat)
            return core.start(call, prepared.program, space, result, todo.ending(output, None))
        space = todo.copy(source)
        return core.start(call, prepared.program, space, result, todo.ending(output, space.target))
    source = elements(arrays, array)
    untouched = prepared.direct or not (prepared.combines or todo.wide)
    space = todo.between(source, source) if untouched else todo.copy(source)
    return core.start(call, prepared.program, space, None)


def start_reduce_scatter(core: Core, array: Array, operation: str, counts: Sequence[int] | None, out: Array | None,
                         algorithm: str | None, name: str) -> QueuedWork | Finished:
    """See `Group.reduce_scatter`."""
    todo = _Reduction.of(core, array, operation)
    arrays = todo.arrays
    source = elements(arrays, array)
    count = count_of(arrays, array)
    bounds = split.bounds(count, core.size) if counts is None else core.bounds(counts, count)
    start, stop = bounds[core.rank], bounds[core.rank + 1]
    if out is None:
        result = arrays.empty(stop - start, todo.dtype.name)
        output = Output(result, arrays.memory(result))
    else:
        check_out(arrays, core.arrays_of(out), out, todo.dtype.name, stop - start)
        result, output = out, to_write(arrays, out)
    call = Call("reduce_scatter", f"reduce_scatter {operation}", todo.dtype.name, count, algorithm, name)
    prepared = todo.prepare(call, count if counts is None else bounds)
    if prepared.direct:
        space = todo.between(source, output.flat, start)
        return core.start(call, prepared.program, space, result, todo.ending(output, None),
                          lambda near: shared.reduce_scatter(near, start, stop))
    space = todo.copy(source)
    return core.start(call, prepared.program, space, result, todo.ending(output, space.target[start:stop]))
