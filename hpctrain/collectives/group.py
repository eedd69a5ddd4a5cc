"""The process group: what users and other engines hold.

Owns the calls and what they promise; `reductions` and `movements` carry them out, `core` keeps what they share. Knows
the contracts only. A group owns its transport: nobody else may send on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hpctrain.collectives import agreement, jobs, movements, reductions
from hpctrain.collectives.core import NUM_CHANNELS, NUM_TAGS, Core
from hpctrain.collectives.layout import to_receive
from hpctrain.collectives.progress import Progress
from hpctrain.collectives.recorder import Observer
from hpctrain.collectives.way import Chooses
from hpctrain.collectives.work import Message, QueuedWork
from hpctrain.contracts import Array, ArraysOf, Transport

__all__ = ["NUM_CHANNELS", "SEGMENT_BYTES", "Group"]

#: Messages are cut into segments of this size, so that what arrives is added while it is still in cache.
SEGMENT_BYTES = 512 * 1024

class Group:
    """Collectives among the ranks of one transport, on NumPy arrays and torch tensors of any layout.

    Every rank of the group makes the collective calls in the same order with arrays of the same dtype and element
    count. One thread at a time. Blocking calls return when this rank's result is there. Each has a twin `start_...`
    that returns at once with a work: `wait()` gives what the blocking call returns, and until then the arrays must be
    left alone. Messages move on whenever a work is polled or waited for, or `advance` is called; with a progress thread
    (`progress_by`) at any time.

    `out` is an array for the result, of any layout; without it the call works in place or makes a new flat array, as
    it says. `algorithm` is a name from `hpctrain.plan.algorithms.ALGORITHMS`, the same on all ranks; None leaves it to
    the group's chooser. `name` is for the observer alone.

    Reductions: `operation` is a name from `hpctrain.dtypes.OPERATIONS`, where the table says which dtype allows it; any
    other combination raises UnsupportedError before anything moves. Sums, means and products of half types are carried
    in float32 and rounded once. All ranks end with the same bits.

    Args:
        segment_bytes: the length at which messages are cut.
        chooser: see `hpctrain.collectives.choose`; None: one fixed algorithm for each operation.
        observer: see `hpctrain.collectives.recorder`; None costs nothing.
        node_size: ranks of a node, for two-level algorithms, instead of what the transport knows.
        num_servers: ranks among which the algorithm "parameter server" splits the array.
    """

    def __init__(self, transport: Transport, arrays_of: ArraysOf, *, segment_bytes: int = SEGMENT_BYTES,
                 chooser: Chooses | None = None, observer: Observer | None = None,
                 node_size: int | None = None, num_servers: int = 1) -> None:
        if num_servers < 1:
            raise ValueError(f"num_servers = {num_servers} must be at least 1")
        if node_size is not None and node_size < 1:
            raise ValueError(f"node_size = {node_size} must be at least 1")
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self._core = Core(transport, arrays_of, segment_bytes, chooser, observer, node_size, num_servers)

    # Reductions -----------------------------------------------------------------------------------------------------

    def all_reduce(self, array: Array, operation: str = "sum", *, out: Array | None = None,
                   algorithm: str | None = None, name: str = "") -> Array:
        """Reduces `array` over all ranks, in place or into `out`, and returns the result. Collective over the group."""
        return jobs.run(self._core, reductions.all_reduce(self._core, array, operation, out, algorithm, name))

    def start_all_reduce(self, array: Array, operation: str = "sum", *, out: Array | None = None,
                         algorithm: str | None = None, name: str = "") -> QueuedWork:
        """Starts an `all_reduce`. Collective over the group."""
        return jobs.start(self._core, reductions.all_reduce(self._core, array, operation, out, algorithm, name))

    def reduce(self, array: Array, operation: str = "sum", root: int = 0, *, out: Array | None = None,
               algorithm: str | None = None, name: str = "") -> Array | None:
        """Reduces `array` over all ranks to rank `root`: in place or into `out` there; None on the others.

        The others' arrays do not change. Collective over the group.
        """
        return jobs.run(self._core, reductions.reduce(self._core, array, operation, root, out, algorithm, name))

    def start_reduce(self, array: Array, operation: str = "sum", root: int = 0, *, out: Array | None = None,
                     algorithm: str | None = None, name: str = "") -> QueuedWork:
        """Starts a `reduce`. Collective over the group."""
        return jobs.start(self._core, reductions.reduce(self._core, array, operation, root, out, algorithm, name))

    def reduce_scatter(self, array: Array, operation: str = "sum", *, counts: Sequence[int] | None = None,
                       out: Array | None = None, algorithm: str | None = None, name: str = "") -> Array:
        """The rank's own part of the reduction, flat: `plan.split.part(count, size, rank)` of the flattened array.

        `counts` (one number a rank, the same on all ranks) cuts it otherwise. The input is not changed, but `out` may
        be the rank's own part of it. Collective over the group.
        """
        return jobs.run(
            self._core, reductions.reduce_scatter(self._core, array, operation, counts, out, algorithm, name))

    def start_reduce_scatter(self, array: Array, operation: str = "sum", *, counts: Sequence[int] | None = None,
                             out: Array | None = None, algorithm: str | None = None, name: str = "") -> QueuedWork:
        """Starts a `reduce_scatter`. Collective over the group."""
        return jobs.start(
            self._core, reductions.reduce_scatter(self._core, array, operation, counts, out, algorithm, name))

    # Movements ------------------------------------------------------------------------------------------------------

    def broadcast(self, array: Array, root: int = 0, *, algorithm: str | None = None, name: str = "") -> Array:
        """Gives every rank the content of `root`'s array, in place. Collective over the group."""
        return jobs.run(self._core, movements.broadcast(self._core, array, root, algorithm, name))

    def start_broadcast(self, array: Array, root: int = 0, *, algorithm: str | None = None,
                        name: str = "") -> QueuedWork:
        """Starts a `broadcast`. Collective over the group."""
        return jobs.start(self._core, movements.broadcast(self._core, array, root, algorithm, name))

    def scatter(self, out: Array, array: Array | None = None, root: int = 0, *, counts: Sequence[int] | None = None,
                algorithm: str | None = None, name: str = "") -> Array:
        """Fills `out` with this rank's part of `root`'s flattened `array`, and returns it. Collective over the group.

        Parts lie in `array` in rank order. `counts` are their lengths, the same on all ranks; without it all ranks'
        `out` have equally many elements. `array` is looked at on `root` only.
        """
        return jobs.run(self._core, movements.scatter(self._core, out, array, root, counts, algorithm, name))

    def start_scatter(self, out: Array, array: Array | None = None, root: int = 0, *,
                      counts: Sequence[int] | None = None, algorithm: str | None = None, name: str = "") -> QueuedWork:
        """Starts a `scatter`. Collective over the group."""
        return jobs.start(self._core, movements.scatter(self._core, out, array, root, counts, algorithm, name))

    def gather(self, part: Array, root: int = 0, *, counts: Sequence[int] | None = None, out: Array | None = None,
               algorithm: str | None = None, name: str = "") -> Array | None:
        """The parts of all ranks one after the other, flat, in rank order, on `root`; None on the others. Collective.

        Lengths may differ. `counts` are all ranks' lengths; without it they are asked for first.
        """
        return jobs.run(self._core, movements.gather(self._core, part, root, counts, out, algorithm, name))

    def start_gather(self, part: Array, root: int = 0, *, counts: Sequence[int] | None = None,
                     out: Array | None = None, algorithm: str | None = None, name: str = "") -> QueuedWork:
        """Starts a `gather`. Collective over the group; without `counts`, waits for all ranks to tell theirs."""
        return jobs.start(self._core, movements.gather(self._core, part, root, counts, out, algorithm, name))

    def all_gather(self, part: Array, *, counts: Sequence[int] | None = None, out: Array | None = None,
                   algorithm: str | None = None, name: str = "") -> Array:
        """The parts of all ranks one after the other, flat, in rank order. Collective over the group.

        Lengths may differ. `counts` are all ranks' lengths; without it they are asked for first.
        """
        return jobs.run(self._core, movements.all_gather(self._core, part, counts, out, algorithm, name))

    def start_all_gather(self, part: Array, *, counts: Sequence[int] | None = None, out: Array | None = None,
                         algorithm: str | None = None, name: str = "") -> QueuedWork:
        """Starts an `all_gather`. Collective over the group; without `counts`, waits for all ranks to tell theirs."""
        return jobs.start(self._core, movements.all_gather(self._core, part, counts, out, algorithm, name))

    def all_gather_into(self, flat: Array, bounds: Sequence[int], *, algorithm: str | None = None,
                        name: str = "") -> None:
        """Fills `flat` in place: rank r's part flat[bounds[r]:bounds[r + 1]] is already there on rank r. Collective.

        `bounds` are size + 1 ascending offsets, the same on all ranks; parts may be empty.
        """
        jobs.run(self._core, movements.all_gather_into(self._core, flat, bounds, algorithm, name))

    def start_all_gather_into(self, flat: Array, bounds: Sequence[int], *, algorithm: str | None = None,
                              name: str = "") -> QueuedWork:
        """Starts an `all_gather_into`. Collective over the group."""
        return jobs.start(self._core, movements.all_gather_into(self._core, flat, bounds, algorithm, name))

    def all_to_all(self, array: Array, *, counts: Sequence[Sequence[int]] | None = None, out: Array | None = None,
                   algorithm: str | None = None, name: str = "") -> Array:
        """Sends block d of the flattened `array` to rank d; returns what came, flat, in rank order. Collective.

        Blocks are equally long, or counts[s][d] elements from rank s to rank d, the same matrix on all ranks
        (`group.exchange(my_row)` makes it). `out` may be `array` itself.
        """
        return jobs.run(self._core, movements.all_to_all(self._core, array, counts, out, algorithm, name))

    def start_all_to_all(self, array: Array, *, counts: Sequence[Sequence[int]] | None = None,
                         out: Array | None = None, algorithm: str | None = None, name: str = "") -> QueuedWork:
        """Starts an `all_to_all`. Collective over the group."""
        return jobs.start(self._core, movements.all_to_all(self._core, array, counts, out, algorithm, name))

    # Messages -------------------------------------------------------------------------------------------------------

    def send(self, array: Array, destination: int) -> None:
        """Sends an array of any layout to rank `destination`, which calls `recv`. Blocks until it may be reused."""
        self.start_send(array, destination).wait()

    def start_send(self, array: Array, destination: int, *, channel: int = 0) -> Message:
        """Starts a `send`. Messages between two ranks on one channel arrive in the order in which they were started.

        Channels, 0 to NUM_CHANNELS - 1, do not wait for each other.
        """
        self._core.check_rank("destination", destination)
        assert 0 <= channel < NUM_CHANNELS
        core = self._core
        arrays = core.arrays_of(array)
        memory = arrays.memory(array if arrays.is_contiguous(array) else arrays.to_flat(array))
        record = core.record(f"send to {destination}", arrays, array)
        return Message(core.queue, self.transport.send(memory, destination, NUM_TAGS - channel), None, None, record)

    def recv(self, array: Array, source: int) -> Array:
        """Receives into an array of any layout, of the sender's dtype and count, from rank `source`. Blocks."""
        return self.start_recv(array, source).wait()

    def start_recv(self, array: Array, source: int, *, channel: int = 0) -> Message:
        """Starts a `recv` of what comes on one channel."""
        self._core.check_rank("source", source)
        assert 0 <= channel < NUM_CHANNELS
        core = self._core
        arrays = core.arrays_of(array)
        memory, put_back = to_receive(arrays, array)
        record = core.record(f"recv from {source}", arrays, array)
        request = self.transport.recv(memory, source, NUM_TAGS - channel)
        return Message(core.queue, request, array, put_back, record)

    # Agreement ------------------------------------------------------------------------------------------------------

    def barrier(self, *, name: str = "") -> None:
        """Returns when every rank has called it. Collective over the group."""
        jobs.barrier(self._core, name)

    def start_barrier(self, *, name: str = "") -> QueuedWork:
        """Starts a `barrier`: done when every rank has started it. Collective over the group."""
        return jobs.start_barrier(self._core, name)

    def exchange(self, value: Any) -> list[Any]:
        """The small JSON-able values of all ranks, in rank order. Collective over the group."""
        return self._core.exchange(value)

    def broadcast_value(self, value: Any, root: int = 0) -> Any:
        """`root`'s small JSON-able value; the others' argument is ignored. Collective over the group."""
        self._core.check_rank("root", root)
        return self._core.observed(
            f"broadcast_value from {root}", lambda tag: agreement.broadcast_value(self.transport, tag, value, root)
        )

    def agree(self) -> agreement.Agreement:
        """`with group.agree():` an exception in the body on any rank is raised on all ranks. Collective."""
        tag = self._core.next_tag("agree")  # now: a rank that fails may start fewer works in the body than the others
        return agreement.Agreement(lambda failure: self._core.exchange(failure, "agree", tag))

    def on_root(self, function: Callable[[], Any], root: int = 0) -> Any:
        """Runs `function()` on `root`; its JSON-able value is returned, or its error raised, on all. Collective."""
        self._core.check_rank("root", root)
        core = self._core
        return core.observed(
            f"on_root {root}",
            lambda tag: agreement.on_root(self.transport, tag, core.working(function), root),
        )

    # Works and life -------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Moves on the works under way as far as their messages allow. Local, never blocks."""
        self._core.queue.advance()

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """A group of `ranks`, numbered in that order; None on other ranks. Collective over this group.

        Disjoint subgroups may be made in one call, each rank passing the list of its own.
        """
        core = self._core
        transport = self.transport.subgroup(ranks)
        observer = None if core.observer is None else core.observer.subgroup(ranks, transport)
        if transport is None:
            return None
        made = Group(transport, core.arrays_of, segment_bytes=core.segment_bytes, chooser=core.chooser,
                     observer=observer, num_servers=core.num_servers)
        made._core.queue.progress = core.queue.progress
        made._core.queue.shares_core = core.queue.shares_core
        return made

    def choose_by(self, chooser: Chooses | None) -> None:
        """From the next call on, `chooser` (the same on all ranks) chooses the algorithms; None: defaults. Local."""
        self._core.choose_by(chooser)

    def share_core(self, shared: bool) -> None:
        """Whether this rank computes on a core with others, which it should not keep while it waits for a message.

        Holds for subgroups made from now on as well. Local.
        """
        self._core.queue.shares_core = shared

    def progress_by(self, progress: Progress | None) -> None:
        """From the next `start_...` on, `progress` moves works on while this rank does something else; None: nobody.

        Later subgroups have it too. Their transports must bear two threads (`Transport.concurrent`). Local.
        """
        self._core.queue.progress = None if progress is None else progress.serve

    def num_nodes(self) -> int:
        """Nodes that the ranks are on, as a chooser hears of them. Collective over the group.

        1 where ranks are not numbered node by node, with as many on each but the last: no algorithm can use those.
        """
        return self._core.nodes()[0]

    def close(self) -> None:
        """Finishes the works under way and releases the transport. Collective over the group."""
        self._core.queue.drain()
        if self._core.observer is not None:
            self._core.observer.close()
        self.transport.close()
