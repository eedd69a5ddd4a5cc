"""What all collectives of one group share: transport, works under way, scratch, the choice of algorithm, programs.

Owns the way from a plan to a work under way. Knows neither which collective it is (`reductions`, `movements`) nor which
libraries serve it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol

from hpctrain.collectives import agreement
from hpctrain.collectives.executor import Execution
from hpctrain.collectives.recorder import Observer
from hpctrain.collectives.shared import Neighbours, together
from hpctrain.collectives.tags import tag_of
from hpctrain.collectives.work import Queue, QueuedWork
from hpctrain.collectives.workspace import Blocks, Scratch, Workspace
from hpctrain.contracts import Array, ArraysOf, Request, Shared, Transport
from hpctrain.dtypes import dtype_of
from hpctrain.errors import UnsupportedError
from hpctrain.plan.algorithms import make_plan
from hpctrain.plan.steps import Program, Receive

__all__ = ["NUM_TAGS", "Call", "Chooses", "Core", "Prepared"]

NUM_TAGS = 32767  # collectives have the tags below (see `tags`); the last tag is for send and recv

SHARED_BYTES = 64 * 1024  # smaller arrays go by messages: they cost about as much as the two meetings

Near = Callable[[Neighbours], None]

#: What is used where no chooser is given; sums of half types have ways of their own, see `reductions`.
DEFAULTS = {
    "broadcast": "ring", "scatter": "binomial tree", "gather": "binomial tree", "reduce": "binomial tree",
    "all_reduce": "ring", "reduce_scatter": "pairwise", "all_gather": "ring", "all_to_all": "pairwise",
}


class Chosen(Protocol):
    """What a chooser says."""

    @property
    def algorithm(self) -> str:
        """A name of `hpctrain.plan.algorithms.ALGORITHMS`."""


class Chooses(Protocol):
    """What a group asks of a chooser; the answer depends on nothing but the arguments, which all ranks share."""

    def choose(self, operation: str, num_bytes: int, num_ranks: int, num_nodes: int, dtype: str) -> Chosen:
        """The algorithm for one call."""


@dataclass(slots=True)
class Call:
    """One collective call: the plan's operation, how it is told to the observer, and what the caller asked for."""

    operation: str
    title: str  # with whatever else must be the same on all ranks: "all_reduce sum"
    dtype: str
    count: int  # elements of the whole array
    algorithm: str | None = None
    name: str = ""
    root: int = 0


@dataclass(frozen=True)
class Prepared:
    """This rank's program of a plan. `combines`: it adds something up on this rank; `direct`: see CollectivePlan."""

    program: Program
    direct: bool
    combines: bool


class Core:
    """The engine of one group. One thread at a time."""

    def __init__(self, transport: Transport, arrays_of: ArraysOf, segment_bytes: int, chooser: Chooses | None,
                 observer: Observer | None, node_size: int | None) -> None:
        assert segment_bytes > 0
        self.transport, self.rank, self.size = transport, transport.rank, transport.size
        self.arrays_of, self.segment_bytes = arrays_of, segment_bytes
        self.chooser, self.observer, self.node_size = chooser, observer, node_size
        self.queue, self.scratch = Queue(), Scratch()
        self.num_works = 0
        self.talking = 0  # the observer's number of the latest `observed` call
        self._nodes: tuple[int, int | None] | None = None
        self.prepare = lru_cache(maxsize=256)(self._prepare)

    def choose(self, call: Call, default: str | None = None) -> str:
        """The algorithm of `call`; `default` is taken where neither caller nor chooser says."""
        if call.algorithm is not None:
            return call.algorithm
        if self.chooser is None:
            return default or DEFAULTS[call.operation]
        num_bytes = call.count * dtype_of(call.dtype).num_bytes
        return self.chooser.choose(call.operation, num_bytes, self.size, self.nodes()[0], call.dtype).algorithm

    def nodes(self) -> tuple[int, int | None]:
        """(number of nodes, ranks of a node), as far as plans can use them. Collective over the group the first time.

        (1, None) where the ranks are not grouped node by node, with as many on each node but the last.
        """
        if self._nodes is None:
            size = self.node_size
            if size is None:
                firsts = [near[0] for near in self.exchange(list(self.transport.node_ranks()), "find nodes")]
                size = firsts.count(0)
                if firsts != [rank // size * size for rank in range(self.size)]:
                    self._nodes = (1, None)
                    return self._nodes
            self._nodes = (-(-self.size // size), size)
        return self._nodes

    def _prepare(self, operation: str, algorithm: str, shape: Sequence[int] | int, root: int = 0,
                 block: int | None = None) -> Prepared:
        node_size = self.nodes()[1] if algorithm == "two-level" else None
        if algorithm == "two-level" and node_size is None:
            raise UnsupportedError("algorithm 'two-level' needs a group whose ranks are numbered node by node, with as "
                                   "many on each node but the last")
        plan = make_plan(operation, algorithm, self.size, shape, root=root, node_size=node_size, block=block)
        program = plan.program(self.rank)
        combines = any(isinstance(a, Receive) and a.combine for step in program for a in step)
        return Prepared(program, plan.direct, combines)

    def segment(self, num_bytes: int) -> int:
        """Elements of one segment, for elements of `num_bytes` bytes."""
        return max(1, self.segment_bytes // num_bytes)

    def bounds(self, counts: Sequence[int], total: int | None = None) -> tuple[int, ...]:
        """The offsets of parts of `counts` elements, one a rank. Refuses counts that do not add up to `total`."""
        if len(counts) != self.size or min(counts) < 0:
            raise ValueError(f"counts = {list(counts)} must be {self.size} numbers of at least 0, one for each rank")
        bounds = (0, *accumulate(counts))
        if total is not None and bounds[-1] != total:
            raise ValueError(f"counts = {list(counts)} must add up to {total}, the elements of the array")
        return bounds

    def start(self, call: Call, program: Program, space: Workspace | Blocks, result: Array,
              at_end: Callable[[], None] | None = None, near: Near | None = None) -> QueuedWork:
        """Starts `program`; `at_end` is called when this rank is through with it.

        Where the ranks can reach each other's memory, and the caller leaves the way to us, `near` replaces the program.
        """
        segment = self.segment(space.num_bytes)
        tag = self.next_tag(call.title, call.dtype, call.count)
        steps = Execution(program, self.transport, tag, space, self.scratch, segment).run
        large = call.count * space.num_bytes >= SHARED_BYTES
        if near is None or call.algorithm is not None or not large or not self.transport.shares:
            return self.enqueue(call, steps(), result, at_end)
        assert isinstance(space, Workspace)
        whole = space

        def work(found: Shared) -> None:
            near(Neighbours.of(whole, self.rank, found, self.scratch))

        met = together(self.transport, tag, self.transport.shared(whole.source_memory), work, steps)
        return self.enqueue(call, met, result, at_end)

    def enqueue(self, call: Call, steps: Generator[Request, None, None], result: Any = None,
                at_end: Callable[[], None] | None = None) -> QueuedWork:
        """Starts a work of any steps, and tells the observer of it."""
        observer = self.observer
        if observer is None:
            return self.queue.start(steps, result, at_end)
        sequence = observer.started(call.title, call.dtype, call.count, call.name)

        def finished() -> None:
            if at_end is not None:
                at_end()
            observer.finished(sequence)

        return self.queue.start(steps, result, finished, lambda: observer.waiting(sequence))

    def observed(self, title: str, talk: Callable[[int], Any], tag: int | None = None) -> Any:
        """The value of a blocking `talk(tag)`, of which the observer is told. Collective over the group.

        Works under way are finished first: a rank that waits for one of them will come only then.
        """
        tag = self.next_tag(title) if tag is None else tag
        observer = self.observer
        if observer is None:
            self.queue.drain()
            return talk(tag)
        sequence = self.talking = observer.started(title)
        observer.waiting(sequence)
        try:
            self.queue.drain()
            return talk(tag)
        finally:
            observer.finished(sequence)

    def working(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """`function`, during which this rank is not waiting but at work, while others wait in the same call."""
        observer, sequence = self.observer, self.talking

        def work() -> Any:
            if observer is None:
                return function()
            observer.working(sequence)
            try:
                return function()
            finally:
                observer.waiting(sequence)

        return work

    def exchange(self, value: Any, title: str = "exchange", tag: int | None = None) -> list[Any]:
        """The small values of all ranks. Collective over the group."""
        told: list[Any] = self.observed(title, lambda tag: agreement.exchange(self.transport, tag, value), tag)
        return told

    def next_tag(self, title: str, dtype: str = "", count: int = 0) -> int:
        """The tag of the next collective, see `tags`."""
        self.num_works += 1
        return tag_of(self.num_works, title, dtype, count)
