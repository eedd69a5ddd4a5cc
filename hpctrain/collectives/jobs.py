"""From a collective to done: a job, the ways to carry it out, and which one is taken.

    near      on shared memory, between two meetings (`shared`)
    native    by the transport's own library
    far       a plan's program, message by message (`executor`)

Owns the ways, blocking or as a work of the queue. Ranks that meet compare their calls first: ranks in different ones
raise alike, before any data moves. Knows neither which collective it is nor which libraries serve it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hpctrain.collectives import agreement, meeting, way
from hpctrain.collectives.core import Core
from hpctrain.collectives.executor import Execution
from hpctrain.collectives.fingerprint import describe_call, name_ranks
from hpctrain.collectives.meeting import NOTHING, NOWHERE, Told
from hpctrain.collectives.shared import Near, Neighbours, Waits
from hpctrain.collectives.tags import fingerprint
from hpctrain.collectives.way import NATIVE, SHARED, Call, Way
from hpctrain.collectives.work import QueuedWork
from hpctrain.collectives.workspace import Blocks, Workspace
from hpctrain.contracts import Array, Arrays, NativeCall, Place
from hpctrain.dtypes import dtype_of
from hpctrain.errors import MismatchError, UnsupportedError
from hpctrain.plan.algorithms import check_algorithm
from hpctrain.plan.steps import Program

__all__ = ["Far", "Job", "barrier", "run", "start", "start_barrier"]

AtEnd = Callable[[], None] | None


class Far(NamedTuple):
    """A program and the memory that it works on; `at_end` is called when this rank is through with it."""

    program: Program
    space: Workspace | Blocks
    at_end: AtEnd


@dataclass(slots=True)
class Job:
    """One collective on this rank. `far` takes an algorithm's name, `default` is one for groups without a chooser.

    `at_end` belongs to `near` and `native`; `scale` to `native` alone, before it. `alone`: what a group of one rank
    does instead of all this, before `at_end`.
    """

    call: Call
    arrays: Arrays
    num_bytes: int  # of one element
    result: Array
    far: Callable[[str], Far]
    at_end: AtEnd = None
    near: Near | None = None
    native: Callable[[], NativeCall] | None = None
    scale: AtEnd = None
    default: str | None = None
    alone: AtEnd = None


def run(core: Core, job: Job) -> Any:
    """Carries out `job` and returns its result. Collective over the group; blocks.

    Works under way are finished first: a rank that waits for one of them will come only then.
    """
    call, observer = job.call, core.observer
    if observer is None:
        core.queue.drain()
        _carry_out(core, job)
        return job.result
    sequence = observer.started(call.title, call.dtype, call.count, call.name)
    observer.waiting(sequence)
    try:
        core.queue.drain()
        _carry_out(core, job)
    finally:  # whoever catches the error waits no longer
        observer.finished(sequence)
    return job.result


def start(core: Core, job: Job) -> QueuedWork:
    """Starts `job` as a work of the queue. Collective over the group."""
    call = job.call
    taken = _way(core, job, False)
    tag = core.next_tag(call.title, call.dtype, call.count)
    if core.size == 1:
        return core.enqueue(call, _alone(job), job.result)
    if taken.native:
        return core.enqueue(call, _native(core, job), job.result)
    if taken.near:
        return core.enqueue(call, _near_or_far(core, job, taken, tag), job.result)
    far = job.far(taken.algorithm)
    return core.enqueue(call, _execution(core, far, tag).run(), job.result, far.at_end)


def barrier(core: Core, name: str) -> None:
    """Returns when every rank has called it. Collective over the group."""
    native, observer = core.transport.native, core.observer
    if native is None:
        start_barrier(core, name).wait()
        return
    sequence = 0
    if observer is not None:
        sequence = observer.started("barrier", name=name)
        observer.waiting(sequence)
    core.queue.drain()
    core.next_tag("barrier")
    call = Call("barrier", "barrier", "", 0)
    _compare(core, call, native.all_gather_words(Told(*NOWHERE, fingerprint("barrier", "", 0))), blocking=True)
    if observer is not None:
        observer.finished(sequence)


def start_barrier(core: Core, name: str) -> QueuedWork:
    """Starts a barrier. Collective over the group."""
    tag = core.next_tag("barrier")
    return core.enqueue(Call("barrier", "barrier", "", 0, name=name),
                        meeting.barrier(core.transport, tag, range(core.size), core.rank))


# The choice -----------------------------------------------------------------------------------------------------------


def _way(core: Core, job: Job, blocking: bool) -> Way:
    call = job.call
    key = (call.operation, call.reduction, call.dtype, call.count, call.algorithm, job.default, blocking,
           core.transport.shares)
    taken = core.ways.get(key)
    if taken is None:
        taken = core.ways[key] = _find_way(core, job, blocking)
    return taken


def _find_way(core: Core, job: Job, blocking: bool) -> Way:
    call, named = job.call, job.call.algorithm
    near, native = _can_near(core, job), _can_native(core, job)
    if (named == SHARED and not near) or (named == NATIVE and not native):
        raise UnsupportedError(f"algorithm {named!r} is not available for {call.title} of {call.count} x {call.dtype} "
                               f"in this group; legal are those of hpctrain.plan.algorithms for {call.operation!r}")
    if named == NATIVE:
        return Way("", native=True)
    if named is not None and named != SHARED:
        check_algorithm(call.operation, named)
        return Way(named)
    if core.chooser is None:
        large = call.num_bytes >= way.SHARED_BYTES
        return Way(job.default or way.DEFAULTS[call.operation], near=named == SHARED or (near and large))

    def choose(*ways: str) -> str:
        assert core.chooser is not None
        return core.chooser.choose(call.operation, call.num_bytes, core.size, core.nodes()[0], call.dtype,
                                   frozenset(ways)).algorithm

    natives = (NATIVE,) if native and blocking else ()
    first = SHARED if named == SHARED else choose(*natives, *((SHARED,) if near else ()))
    second = choose(*natives) if first == SHARED else first
    algorithm = choose() if second == NATIVE else second
    return Way(algorithm, near=first == SHARED, native=second == NATIVE)


def _can_near(core: Core, job: Job) -> bool:
    """Whether shared memory can serve the job, if its arrays lie there."""
    near, size = job.near, core.size
    if near is None or size == 1 or not core.transport.shares:
        return False
    if len(core.node) == size:
        return True
    node_size = core.nodes()[1]
    if not (near.across and node_size == len(core.node) > 1 and size % node_size == 0):
        return False
    core.peers()  # made now, when all ranks are here
    return True


def _can_native(core: Core, job: Job) -> bool:
    native, call = core.transport.native, job.call
    return (job.native is not None and native is not None
            and native.offers(call.operation, call.reduction, call.dtype, call.num_bytes))


# The ways -------------------------------------------------------------------------------------------------------------


def _carry_out(core: Core, job: Job) -> None:
    call, native = job.call, core.transport.native
    taken = _way(core, job, True)
    tag = core.next_tag(call.title, call.dtype, call.count)
    if core.size == 1:
        _drive(_alone(job))
    elif native is not None and (taken.near or taken.native):
        _meet_and_carry_out(core, job, taken, tag)
    elif taken.near:
        _drive(_near_or_far(core, job, taken, tag))
    else:
        _far(core, job, taken.algorithm, tag)


def _meet_and_carry_out(core: Core, job: Job, taken: Way, tag: int) -> None:
    native = core.transport.native
    assert native is not None
    told = native.all_gather_words(_told(core, job, taken))
    _compare(core, job.call, told, blocking=True)
    if taken.near and job.near is not None and _all_shown(job.near, told):
        steps = job.near.move(_neighbours(core, job, told, tag))
        if steps is not None:
            _drive(steps)
        native.barrier()
    elif taken.native and job.native is not None:
        native.run(job.native())
        if job.scale is not None:
            job.scale()
    else:
        _refuse_unshown(job.call)
        _far(core, job, taken.algorithm, tag)
        return
    if job.at_end is not None:
        job.at_end()


def _near_or_far(core: Core, job: Job, taken: Way, tag: int) -> Waits:
    """The job on shared memory if all ranks that must show their arrays do, else by messages."""
    near = job.near
    assert near is not None
    told = yield from meeting.by_messages(core.transport, tag, _told(core, job, taken))
    _compare(core, job.call, told, blocking=False)
    if not _all_shown(near, told):
        _refuse_unshown(job.call)
        far = job.far(taken.algorithm)
        yield from _execution(core, far, tag).run()
        if far.at_end is not None:
            far.at_end()
        return
    neighbours = _neighbours(core, job, told, tag)
    steps = near.move(neighbours)
    if steps is not None:
        yield from steps
    yield from meeting.barrier(core.transport, tag, neighbours.ranks, neighbours.index)
    if job.at_end is not None:
        job.at_end()


def _native(core: Core, job: Job) -> Waits:
    native = core.transport.native
    assert native is not None and job.native is not None
    yield native.start(job.native())
    for end in (job.scale, job.at_end):
        if end is not None:
            end()


def _alone(job: Job) -> Waits:
    for end in (job.alone, job.at_end):
        if end is not None:
            end()
    yield from ()


def _far(core: Core, job: Job, algorithm: str, tag: int) -> None:
    far = job.far(algorithm)
    _drive(_execution(core, far, tag).run())
    if far.at_end is not None:
        far.at_end()


def _execution(core: Core, far: Far, tag: int) -> Execution:
    return Execution(far.program, core.transport, tag, far.space, core.scratch, core.segment(far.space.num_bytes))


def _drive(steps: Generator[Any, None, None]) -> None:
    """Runs steps to their end; blocks."""
    for request in steps:
        request.wait()


# Meetings -------------------------------------------------------------------------------------------------------------


def _told(core: Core, job: Job, taken: Way) -> Told:
    call, near = job.call, job.near
    place: Place | None = None
    if taken.near and near is not None and near.memory is not None:
        place = core.transport.place(near.memory) if len(near.memory) else NOTHING
    return Told(*(place or NOWHERE), fingerprint(call.title, call.dtype, call.count))


def _compare(core: Core, call: Call, told: Sequence[tuple[int, int, int]], *, blocking: bool) -> None:
    """Refuses, on all ranks, a meeting of ranks that are in different calls."""
    mine = told[core.rank][2]
    if [words[2] for words in told].count(mine) == len(told):
        return
    here = describe_call(call.title, call.dtype, call.count, call.name)
    if not blocking:
        others = [rank for rank, words in enumerate(told) if words[2] != mine]
        raise MismatchError(f"{name_ranks(others)}: in other collective calls than this rank, which is in {here}")
    calls: dict[str, list[int]] = {}
    for rank, text in enumerate(agreement.exchange(core.transport, 0, here)):
        calls.setdefault(text, []).append(rank)
    raise MismatchError("the ranks' collective calls differ: "
                        + "; ".join(f"{name_ranks(ranks)}: {text}" for text, ranks in calls.items()))


def _all_shown(near: Near, told: Sequence[tuple[int, int, int]]) -> bool:
    if near.shown_by is not None:
        return told[near.shown_by][0] >= 0
    return min(told)[0] >= 0


def _refuse_unshown(call: Call) -> None:
    if call.algorithm == SHARED:
        raise UnsupportedError(f"algorithm {SHARED!r} needs arrays in memory from `transport.allocate` on every rank; "
                               "some rank's is not")


def _neighbours(core: Core, job: Job, told: Sequence[tuple[int, int, int]], tag: int) -> Neighbours:
    places = [(words[0], words[1]) for words in told]
    between = None
    if len(core.node) < core.size:
        def between(operation: str, array: Array) -> Waits:
            return _between_nodes(core, job.arrays, operation, array, tag)

    return Neighbours(core.transport, job.arrays, job.call.dtype, job.num_bytes, core.node,
                      core.node.index(core.rank), places, core.scratch, between)


def _between_nodes(core: Core, arrays: Arrays, operation: str, array: Array, tag: int) -> Waits:
    """All-reduces an array in place among the ranks at this rank's position of every node."""
    peers = core.peers()
    dtype, count = arrays.dtype(array), arrays.shape(array)[0]
    call = Call("all_reduce", f"all_reduce {operation}", dtype, count)
    algorithm = _way(peers, Job(call, arrays, 0, array, _no_far), False).algorithm
    space = Workspace(arrays, dtype, dtype_of(dtype).num_bytes, array, array, operation=operation)
    far = Far(peers.prepare("all_reduce", algorithm, count).program, space, None)
    yield from _execution(peers, far, tag).run()


def _no_far(algorithm: str) -> Far:
    raise AssertionError("only its algorithm is asked for")
