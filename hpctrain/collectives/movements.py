"""Collectives that only move data, as jobs: broadcast, scatter, gather, all_gather, all_to_all.

Owns which memory serves which part of a plan's workspace on each rank, and what is refused. Knows the contracts only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hpctrain.collectives import shared
from hpctrain.collectives.core import Core
from hpctrain.collectives.jobs import Far, Job
from hpctrain.collectives.layout import Output, check_out, count_of, elements, to_write
from hpctrain.collectives.shared import Near
from hpctrain.collectives.way import Call
from hpctrain.collectives.workspace import Blocks, Workspace
from hpctrain.contracts import Array, Arrays, NativeCall
from hpctrain.dtypes import dtype_of
from hpctrain.errors import UnsupportedError
from hpctrain.plan import split
from hpctrain.plan.rows import EvenRows, uneven

__all__ = ["all_gather", "all_gather_into", "all_to_all", "broadcast", "gather", "scatter"]


def broadcast(core: Core, array: Array, root: int, algorithm: str | None, name: str) -> Job:
    """See `Group.broadcast`."""
    core.check_rank("root", root)
    arrays = core.arrays_of(array)
    dtype = dtype_of(arrays.dtype(array))
    output = to_write(arrays, array)
    flat, memory = output.flat, output.memory
    count = count_of(arrays, array)
    call = Call("broadcast", f"broadcast from {root}", dtype.name, count, algorithm, name, root)

    def far(algorithm: str) -> Far:
        shape: Sequence[int] | int = count
        if algorithm == "ring":
            # m pieces take (m + p - 2) / m of the time of sending all: within an eighth of the best, in few rounds.
            pieces = min(-(-count // core.segment(dtype.num_bytes)), 1 + 8 * max(core.size - 2, 0))
            shape = split.bounds(count, max(pieces, 1))
        program = core.prepare("broadcast", algorithm, shape, root).program
        space = Workspace(arrays, dtype.name, dtype.num_bytes, flat, flat, target_memory=memory)
        return Far(program, space, output.put_back)

    return Job(call, arrays, dtype.num_bytes, array, far, output.put_back,
               Near(memory, lambda near: shared.broadcast(near, root, count)),
               lambda: NativeCall("broadcast", dtype.name, "", memory, memory, root))


def scatter(core: Core, out: Array, array: Array | None, root: int, counts: Sequence[int] | None,
            algorithm: str | None, name: str) -> Job:
    """See `Group.scatter`."""
    core.check_rank("root", root)
    arrays = core.arrays_of(out)
    dtype = dtype_of(arrays.dtype(out))
    output = to_write(arrays, out)
    mine = count_of(arrays, out)
    bounds = core.bounds([mine] * core.size if counts is None else counts)
    start, stop = bounds[core.rank], bounds[core.rank + 1]
    if stop - start != mine:
        raise ValueError(f"out has {mine} elements, but counts[{core.rank}] = {stop - start}")
    call = Call("scatter", f"scatter from {root}", dtype.name, bounds[-1], algorithm, name, root)
    whole, memory = None, None
    if core.rank == root:
        if array is None:
            raise ValueError(f"array must be given on rank {root}, the root")
        check_out(core.arrays_of(array), arrays, out, arrays.dtype(array), mine)
        whole = elements(arrays, array)
        if count_of(arrays, array) != bounds[-1]:
            raise ValueError(f"array has {count_of(arrays, array)} elements, but its parts have {bounds[-1]} together")
        memory = arrays.memory(whole)

    def take_own() -> None:
        if whole is not None:
            arrays.assign(output.flat, whole[start:stop])
        if output.put_back is not None:
            output.put_back()

    def far(algorithm: str) -> Far:
        program = core.prepare("scatter", algorithm, bounds, root).program
        if whole is None:
            return Far(program, Blocks(bounds, dtype.num_bytes, {core.rank: output.memory}), output.put_back)
        return Far(program, Workspace(arrays, dtype.name, dtype.num_bytes, whole, whole), take_own)

    return Job(call, arrays, dtype.num_bytes, out, far, take_own,
               Near(memory, lambda near: shared.fetch(near, root, start, stop, output.flat), shown_by=root),
               lambda: NativeCall("scatter", dtype.name, "", memory, output.memory, root, _uneven(bounds)))


def gather(core: Core, part: Array, root: int, counts: Sequence[int] | None, out: Array | None,
           algorithm: str | None, name: str) -> Job:
    """See `Group.gather`."""
    core.check_rank("root", root)
    arrays = core.arrays_of(part)
    dtype = dtype_of(arrays.dtype(part))
    flat = elements(arrays, part)
    bounds = _bounds_of_parts(core, arrays, part, counts, "gather")
    start, stop = bounds[core.rank], bounds[core.rank + 1]
    call = Call("gather", f"gather to {root}", dtype.name, bounds[-1], algorithm, name, root)
    result, output = _whole(core, arrays, out, dtype.name, bounds[-1]) if core.rank == root else (None, None)
    if output is not None:
        arrays.assign(output.flat[start:stop], flat)

    def far(algorithm: str) -> Far:
        program = core.prepare("gather", algorithm, bounds, root).program
        if output is None:
            return Far(program, Blocks(bounds, dtype.num_bytes, {core.rank: arrays.memory(flat)}), None)
        space = Workspace(arrays, dtype.name, dtype.num_bytes, output.flat, output.flat, target_memory=output.memory)
        return Far(program, space, output.put_back)

    def native() -> NativeCall:
        given, taken = (arrays.memory(flat), None) if output is None else (None, output.memory)
        return NativeCall("gather", dtype.name, "", given, taken, root, _uneven(bounds))

    near = Near(None if output is None else output.memory,
                lambda near: shared.store(near, root, start, stop, flat), shown_by=root)
    return Job(call, arrays, dtype.num_bytes, result, far, None if output is None else output.put_back, near, native)


def all_gather(core: Core, part: Array, counts: Sequence[int] | None, out: Array | None, algorithm: str | None,
               name: str) -> Job:
    """See `Group.all_gather`."""
    arrays = core.arrays_of(part)
    bounds = _bounds_of_parts(core, arrays, part, counts, "all_gather")
    result, output = _whole(core, arrays, out, arrays.dtype(part), bounds[-1])
    flat = elements(arrays, part)
    arrays.assign(output.flat[bounds[core.rank] : bounds[core.rank + 1]], flat)
    return _all_gather(core, arrays, output, arrays.memory(flat), bounds, algorithm, name, result)


def all_gather_into(core: Core, flat: Array, bounds: Sequence[int], algorithm: str | None, name: str) -> Job:
    """See `Group.all_gather_into`."""
    arrays = core.arrays_of(flat)
    count = count_of(arrays, flat)
    if len(bounds) != core.size + 1 or bounds[-1] != count:
        raise ValueError(f"bounds must be {core.size + 1} offsets up to {count}, not {list(bounds)}")
    return _all_gather(core, arrays, to_write(arrays, flat), None, tuple(bounds), algorithm, name, flat)


def all_to_all(core: Core, array: Array, counts: Sequence[Sequence[int]] | None, out: Array | None,
               algorithm: str | None, name: str) -> Job:
    """See `Group.all_to_all`."""
    arrays = core.arrays_of(array)
    dtype = dtype_of(arrays.dtype(array))
    p, rank, length = core.size, core.rank, count_of(arrays, array)
    # In place, the blocks that leave must be read from elsewhere.
    source = arrays.to_flat(array) if out is array and p > 1 else elements(arrays, array)
    bounds: Sequence[int]
    if counts is None:
        if length % p:
            raise ValueError(f"an array of {length} elements has no {p} equal blocks; give counts")
        bounds, sent, received, total = EvenRows(length, p), [length // p] * p, [length // p] * p, length
        offsets = [length // p * rank] * p
    else:
        if len(counts) != p or any(len(row) != p or min(row) < 0 for row in counts):
            raise ValueError(f"counts must be a matrix of {p} x {p} numbers of at least 0: counts[from][to]")
        bounds, sent, received = uneven(counts), list(counts[rank]), [row[rank] for row in counts]
        total = bounds[-1]
        offsets = [sum(row[:rank]) for row in counts]
    if sum(sent) != length:
        raise ValueError(f"the array has {length} elements, but counts[{rank}] adds up to {sum(sent)}")
    result, output = _whole(core, arrays, out, dtype.name, sum(received))
    call = Call("all_to_all", "all_to_all", dtype.name, total, algorithm, name)
    leaving, arriving = core.bounds(sent), core.bounds(received)
    if out is not array or p > 1:
        arrays.assign(output.flat[arriving[rank] : arriving[rank + 1]], source[leaving[rank] : leaving[rank + 1]])
    memory = arrays.memory(source)

    def far(algorithm: str) -> Far:
        program = core.prepare("all_to_all", algorithm, bounds).program
        size, into = dtype.num_bytes, output.memory
        own = {peer * p + rank: into[arriving[peer] * size : arriving[peer + 1] * size] for peer in range(p)}
        own |= {rank * p + peer: memory[leaving[peer] * size : leaving[peer + 1] * size] for peer in range(p)}
        return Far(program, Blocks(bounds, size, own), output.put_back)

    return Job(call, arrays, dtype.num_bytes, result, far, output.put_back,
               Near(memory, lambda near: shared.all_to_all(near, offsets, arriving, output.flat)),
               lambda: NativeCall("all_to_all", dtype.name, "", memory, output.memory, 0,
                                  None if counts is None else (sent, received)))


def _all_gather(core: Core, arrays: Arrays, output: Output, part: memoryview | None, bounds: tuple[int, ...],
                algorithm: str | None, name: str, result: Array) -> Job:
    """`part`: where this rank's part lies, if also outside of `output`."""
    dtype = dtype_of(arrays.dtype(output.flat))
    flat, memory, size = output.flat, output.memory, dtype.num_bytes
    call = Call("all_gather", "all_gather", dtype.name, bounds[-1], algorithm, name)
    own = memory[bounds[core.rank] * size : bounds[core.rank + 1] * size]

    def far(algorithm: str) -> Far:
        program = core.prepare("all_gather", algorithm, bounds).program
        space = Workspace(arrays, dtype.name, size, flat, flat, target_memory=memory)
        return Far(program, space, output.put_back)

    shown = own if part is None or core.transport.place(own) is not None else part
    return Job(call, arrays, size, result, far, output.put_back,
               Near(shown, lambda near: shared.all_gather(near, bounds, flat)),
               lambda: NativeCall("all_gather", dtype.name, "", None, memory, 0, _uneven(bounds)))


def _uneven(bounds: Sequence[int]) -> list[int] | None:
    """The lengths of the parts, where they are not all equal."""
    lengths = [b - a for a, b in pairwise(bounds)]
    return lengths if len(set(lengths)) > 1 else None


def _bounds_of_parts(core: Core, arrays: Arrays, part: Array, counts: Sequence[int] | None,
                     operation: str) -> tuple[int, ...]:
    """The offsets of all ranks' parts; asks them where `counts` is not given."""
    dtype, mine = arrays.dtype(part), count_of(arrays, part)
    if counts is None:
        announced = core.exchange([dtype, mine])
        if len({name for name, _ in announced}) > 1:
            named = [name for name, _ in announced]
            raise UnsupportedError(f"{operation} needs one dtype on all ranks, has {named}")
        counts = [count for _, count in announced]
    bounds = core.bounds(counts)
    if counts[core.rank] != mine:
        raise ValueError(f"this rank's part has {mine} elements, but counts[{core.rank}] = {counts[core.rank]}")
    return bounds


def _whole(core: Core, arrays: Arrays, out: Array | None, dtype: str, count: int) -> tuple[Array, Output]:
    """The array that is returned, and its flat form to write into."""
    if out is None:
        made = arrays.empty(count, dtype)
        return made, Output(made, arrays.memory(made))
    check_out(arrays, core.arrays_of(out), out, dtype, count)
    return out, to_write(arrays, out)
