"""Collectives that only move data, as works: broadcast, scatter, gather, all_gather, all_to_all.

Owns which memory serves which part of a plan's workspace on each rank, and what is refused. Knows the contracts only.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.collectives import shared
from hpctrain.collectives.core import Call, Core
from hpctrain.collectives.layout import Output, check_out, count_of, elements, to_write
from hpctrain.collectives.work import QueuedWork
from hpctrain.collectives.workspace import Blocks, Workspace
from hpctrain.contracts import Array, Arrays
from hpctrain.dtypes import dtype_of
from hpctrain.errors import UnsupportedError
from hpctrain.plan import split
from hpctrain.plan.rows import EvenRows, uneven

__all__ = ["start_all_gather", "start_all_gather_into", "start_all_to_all", "start_broadcast", "start_gather",
           "start_scatter"]


def start_broadcast(core: Core, array: Array, root: int, algorithm: str | None, name: str) -> QueuedWork:
    """See `Group.broadcast`."""
    arrays = core.arrays_of(array)
    dtype = dtype_of(arrays.dtype(array))
    output = to_write(arrays, array)
    count = count_of(arrays, array)
    call = Call("broadcast", f"broadcast from {root}", dtype.name, count, algorithm, name, root)
    chosen = core.choose(call)
    shape: Sequence[int] | int = count
    if chosen == "ring":
        # m pieces take (m + p - 2) / m of the time of sending all: within an eighth of the best, in few rounds.
        pieces = min(-(-count // core.segment(dtype.num_bytes)), 1 + 8 * max(core.size - 2, 0))
        shape = split.bounds(count, max(pieces, 1))
    program = core.prepare("broadcast", chosen, shape, root).program
    space = Workspace(arrays, dtype.name, dtype.num_bytes, output.flat, output.flat, target_memory=output.memory)
    return core.start(call, program, space, array, output.put_back)


def start_scatter(core: Core, out: Array, array: Array | None, root: int, counts: Sequence[int] | None,
                  algorithm: str | None, name: str) -> QueuedWork:
    """See `Group.scatter`."""
    arrays = core.arrays_of(out)
    dtype = dtype_of(arrays.dtype(out))
    output = to_write(arrays, out)
    mine = count_of(arrays, out)
    bounds = core.bounds([mine] * core.size if counts is None else counts)
    start, stop = bounds[core.rank], bounds[core.rank + 1]
    if stop - start != mine:
        raise ValueError(f"out has {mine} elements, but counts[{core.rank}] = {stop - start}")
    call = Call("scatter", f"scatter from {root}", dtype.name, bounds[-1], algorithm, name, root)
    program = core.prepare("scatter", core.choose(call), bounds, root).program
    if core.rank != root:
        blocks = Blocks(bounds, dtype.num_bytes, {core.rank: output.memory})
        return core.start(call, program, blocks, out, output.put_back)
    if array is None:
        raise ValueError(f"array must be given on rank {root}, the root")
    check_out(core.arrays_of(array), arrays, out, arrays.dtype(array), mine)
    whole = elements(arrays, array)
    if count_of(arrays, array) != bounds[-1]:
        raise ValueError(f"array has {count_of(arrays, array)} elements, but its parts have {bounds[-1]} together")
    arrays.assign(output.flat, whole[start:stop])
    space = Workspace(arrays, dtype.name, dtype.num_bytes, whole, whole)
    return core.start(call, program, space, out, output.put_back)


def start_gather(core: Core, part: Array, root: int, counts: Sequence[int] | None, out: Array | None,
                 algorithm: str | None, name: str) -> QueuedWork:
    """See `Group.gather`."""
    arrays = core.arrays_of(part)
    dtype = dtype_of(arrays.dtype(part))
    flat = elements(arrays, part)
    bounds = _bounds_of_parts(core, arrays, part, counts, "gather")
    call = Call("gather", f"gather to {root}", dtype.name, bounds[-1], algorithm, name, root)
    program = core.prepare("gather", core.choose(call), bounds, root).program
    if core.rank != root:
        return core.start(call, program, Blocks(bounds, dtype.num_bytes, {core.rank: arrays.memory(flat)}), None)
    result, output = _whole(core, arrays, out, dtype.name, bounds[-1])
    arrays.assign(output.flat[bounds[root] : bounds[root + 1]], flat)
    space = Workspace(arrays, dtype.name, dtype.num_bytes, output.flat, output.flat, target_memory=output.memory)
    return core.start(call, program, space, result, output.put_back)


def start_all_gather(core: Core, part: Array, counts: Sequence[int] | None, out: Array | None, algorithm: str | None,
                     name: str) -> QueuedWork:
    """See `Group.all_gather`."""
    arrays = core.arrays_of(part)
    bounds = _bounds_of_parts(core, arrays, part, counts, "all_gather")
    result, output = _whole(core, arrays, out, arrays.dtype(part), bounds[-1])
    arrays.assign(output.flat[bounds[core.rank] : bounds[core.rank + 1]], elements(arrays, part))
    return _all_gather(core, arrays, output, bounds, algorithm, name, result)


def start_all_gather_into(core: Core, flat: Array, bounds: Sequence[int], algorithm: str | None,
                          name: str) -> QueuedWork:
    """See `Group.all_gather_into`."""
    arrays = core.arrays_of(flat)
    count = count_of(arrays, flat)
    if len(bounds) != core.size + 1 or bounds[-1] != count:
        raise ValueError(f"bounds must be {core.size + 1} offsets up to {count}, not {list(bounds)}")
    return _all_gather(core, arrays, to_write(arrays, flat), tuple(bounds), algorithm, name, flat)


def start_all_to_all(core: Core, array: Array, counts: Sequence[Sequence[int]] | None, out: Array | None,
                     algorithm: str | None, name: str) -> QueuedWork:
    """See `Group.all_to_all`."""
    arrays = core.arrays_of(array)
    dtype = dtype_of(arrays.dtype(array))
    p, rank, length = core.size, core.rank, count_of(arrays, array)
    # In place, the blocks that leave must be read from elsewhere.
    source = arrays.to_flat(array) if out is array else elements(arrays, array)
    bounds: Sequence[int]
    if counts is None:
        if length % p:
            raise ValueError(f"an array of {length} elements has no {p} equal blocks; give counts")
        bounds, sent, received, total = EvenRows(length, p), [length // p] * p, [length // p] * p, length
    else:
        if len(counts) != p or any(len(row) != p or min(row) < 0 for row in counts):
            raise ValueError(f"counts must be a matrix of {p} x {p} numbers of at least 0: counts[from][to]")
        bounds, sent, received = uneven(counts), list(counts[rank]), [row[rank] for row in counts]
        total = bounds[-1]
    if sum(sent) != length:
        raise ValueError(f"the array has {length} elements, but counts[{rank}] adds up to {sum(sent)}")
    result, output = _whole(core, arrays, out, dtype.name, sum(received))
    call = Call("all_to_all", "all_to_all", dtype.name, total, algorithm, name)
    program = core.prepare("all_to_all", core.choose(call), bounds).program
    leaving, arriving = core.bounds(sent), core.bounds(received)
    arrays.assign(output.flat[arriving[rank] : arriving[rank + 1]], source[leaving[rank] : leaving[rank + 1]])
    out_memory, in_memory, size = arrays.memory(source), output.memory, dtype.num_bytes
    own = {peer * p + rank: in_memory[arriving[peer] * size : arriving[peer + 1] * size] for peer in range(p)}
    own |= {rank * p + peer: out_memory[leaving[peer] * size : leaving[peer + 1] * size] for peer in range(p)}
    return core.start(call, program, Blocks(bounds, size, own), result, output.put_back)


def _all_gather(core: Core, arrays: Arrays, output: Output, bounds: tuple[int, ...], algorithm: str | None, name: str,
                result: Array) -> QueuedWork:
    dtype = dtype_of(arrays.dtype(output.flat))
    call = Call("all_gather", "all_gather", dtype.name, bounds[-1], algorithm, name)
    program = core.prepare("all_gather", core.choose(call), bounds).program
    space = Workspace(arrays, dtype.name, dtype.num_bytes, output.flat, output.flat, target_memory=output.memory)
    return core.start(call, program, space, result, output.put_back, lambda near: shared.all_gather(near, bounds))


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
