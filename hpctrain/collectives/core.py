"""What all collectives of one group share: transport, works under way, scratch, programs, the talk to the observer.

Owns the state of a group. Knows neither which collective it is (`reductions`, `movements`), nor how one is carried out
(`jobs`), nor which libraries serve it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

from hpctrain.collectives import agreement
from hpctrain.collectives.layout import count_of
from hpctrain.collectives.recorder import Message, Observer
from hpctrain.collectives.shared import Waits
from hpctrain.collectives.tags import tag_of
from hpctrain.collectives.way import Call, Chooses, Way
from hpctrain.collectives.work import Queue, QueuedWork
from hpctrain.collectives.workspace import Scratch
from hpctrain.contracts import Array, Arrays, ArraysOf, Transport
from hpctrain.errors import UnsupportedError
from hpctrain.plan.algorithms import make_plan
from hpctrain.plan.steps import Program, Receive

__all__ = ["NUM_CHANNELS", "NUM_TAGS", "Core", "Prepared"]

NUM_TAGS = 32767  # the last tag; the last ones are for send and recv, one a channel, those below for collectives
NUM_CHANNELS = 256  # see `tags`


@dataclass(frozen=True)
class Prepared:
    """This rank's program of a plan. `combines`: it adds something up on this rank; `direct`: see CollectivePlan."""

    program: Program
    direct: bool
    combines: bool


class Core:
    """The engine of one group. One thread at a time."""

    def __init__(self, transport: Transport, arrays_of: ArraysOf, segment_bytes: int, chooser: Chooses | None,
                 observer: Observer | None, node_size: int | None, num_servers: int = 1) -> None:
        assert segment_bytes > 0
        self.transport, self.rank, self.size = transport, transport.rank, transport.size
        self.arrays_of, self.segment_bytes = arrays_of, segment_bytes
        self.chooser, self.observer = chooser, observer
        self.node_size, self.num_servers = node_size, num_servers
        self.queue, self.scratch = Queue(), Scratch()
        self.num_works = 0
        self.talking = 0  # the observer's number of the latest `observed` call
        self.node = transport.node_ranks()
        self.ways: dict[tuple[Any, ...], Way] = {}  # found so far, see `jobs`
        self._nodes: tuple[int, int | None] | None = None
        self._peers: Core | None = None
        self.prepare = lru_cache(maxsize=256)(self._prepare)

    # Plans ----------------------------------------------------------------------------------------------------------

    def choose_by(self, chooser: Chooses | None) -> None:
        """From the next call on, `chooser` chooses. Local."""
        self.chooser = chooser
        self.ways.clear()

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
        plan = make_plan(operation, algorithm, self.size, shape, root=root, node_size=node_size,
                         num_servers=min(self.num_servers, self.size), block=block)
        program = plan.program(self.rank)
        combines = any(isinstance(a, Receive) and a.combine for step in program for a in step)
        return Prepared(program, plan.direct, combines)

    def check_rank(self, name: str, rank: int) -> None:
        """Refuses what is no rank of this group."""
        if not 0 <= rank < self.size:
            raise ValueError(f"{name} = {rank} must be in 0..{self.size - 1}")

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

    def peers(self) -> Core:
        """The ranks at this rank's position of every node. Collective over the group the first time."""
        if self._peers is None:
            num_nodes, node_size = self.nodes()
            assert node_size is not None and num_nodes * node_size == self.size
            transport = self.transport.subgroup([self.rank % node_size + i * node_size for i in range(num_nodes)])
            assert transport is not None, "this rank is one of them"
            self._peers = Core(transport, self.arrays_of, self.segment_bytes, self.chooser, None, 1)
        return self._peers

    # Works and talks ------------------------------------------------------------------------------------------------

    def enqueue(self, call: Call, steps: Waits, result: Any = None,
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

    def record(self, operation: str, arrays: Arrays, array: Array) -> Message | None:
        """Tells the observer of a message that begins. Local."""
        if self.observer is None:
            return None
        return self.observer.message(operation, arrays.dtype(array), count_of(arrays, array))

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
