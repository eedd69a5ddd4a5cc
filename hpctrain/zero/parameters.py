"""Where parameters live, who updates which of them, and how all ranks see the result.

    each rank   |whole buffer|        stages 0 to 2: after the update of its own ranges each rank gathers the others'
    each node   |whole buffer|        stage 3, share "node": owners write where all ranks of the node read
    owner       |own ranges|          stage 3, share "none": gathered unit by unit, see `units`

Owns these buffers and the masters, which an update works on where they are of another type. Knows the contracts and
regions; neither an optimizer nor gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from hpctrain.collectives import Group
from hpctrain.contracts import Array, Model
from hpctrain.dtypes import dtype_of
from hpctrain.errors import ConfigError
from hpctrain.plan.flat import Slot
from hpctrain.plan.shards import Range
from hpctrain.plan.split import part as split_part
from hpctrain.zero.held import Held, buckets_of, complete, num_elements
from hpctrain.zero.lender import Lender
from hpctrain.zero.nodes import NodeExchange
from hpctrain.zero.options import Zero
from hpctrain.zero.regions import Region

__all__ = ["Parameters", "copies_of", "node_memory"]


def node_memory(zero: Zero, group: Group, regions: Sequence[Region]) -> list[memoryview] | None:
    """Memory for each region that exists once per node, or None: parameters live elsewhere. Collective over the group.

    Raises:
        ConfigError: zero.share = "node" where ranks cannot share memory. On all ranks alike.
    """
    if zero.stage < 3 or zero.share == "none":
        return None
    num_near = len(group.transport.node_ranks())
    reason = "as many ranks on each node, numbered node by node"
    if num_near == group.size or (zero.share == "node" and num_near * group.num_nodes() == group.size):
        sizes = [region.layout.count * dtype_of(region.layout.dtype).num_bytes for region in regions]
        made = [group.transport.allocate_node(num_bytes) for num_bytes in sizes]
        memories = [memory for memory in made if memory is not None]
        if len(memories) == len(regions):
            return memories
        reason = "a transport that shares memory, and room in it"
    if zero.share == "node":
        raise ConfigError(f"zero.share = 'node' needs {reason}; legal here are 'none' or 'auto'")
    return None


class Parameters:
    """The parameters of all regions. Collective over the group to make: all ranks get rank 0's values.

    `held[i]` has region i's values in the type the model computes with: the whole buffer, or with `spread` this rank's
    ranges. `masters[i]` has what this rank updates, in the master type: the same memory where that is the same type.
    Those of frozen regions are the values themselves. `shared` is what `node_memory` gave. `lender` has the masters,
    and parameters that are spread where they are on disk. Where updates come late, masters are other memory always, and
    `publish` makes their values the parameters'.
    """

    def __init__(self, model: Model, group: Group, regions: Sequence[Region], lender: Lender, *, zero: Zero,
                 shared: Sequence[memoryview] | None) -> None:
        self._model, self._group, self._arrays = model, group, model.arrays
        self._regions, self._stage, self._shared = regions, zero.stage, shared is not None and group.size > 1
        several = self._shared and len(group.transport.node_ranks()) < group.size
        self._nodes = NodeExchange(group, self._arrays, regions) if several else None
        self._lender, self._lends = lender, zero.offload.parameters == "disk"
        self._apart = zero.offload.delay
        with group.agree():
            self._lent = [self._lend(i, region) for i, region in enumerate(regions)]
        self.held = [self._make_held(i, region, None if shared is None else shared[i])
                     for i, region in enumerate(regions)]
        with group.agree():
            self.masters = [self._make_master(i, *both) for i, both in enumerate(zip(regions, self.held, strict=True))]
        for region, held, master in zip(regions, self.held, self.masters, strict=True):
            self._take_values(region, held, master)
        if self._shared:
            group.barrier()

    @property
    def shared(self) -> bool:
        """Whether the ranks of the node have one copy together."""
        return self._shared

    def _lend(self, number: int, region: Region) -> Held | None:
        if not (region.spread and self._lends):
            return None
        ranges = region.shards.owned(self._group.rank)
        return Held(ranges, self._lender.zeros("parameter", number, num_elements(ranges), region.layout.dtype))

    def _make_held(self, number: int, region: Region, shared: memoryview | None) -> Held:
        lent = self._lent[number]
        if lent is not None:
            return lent
        transport, layout = self._group.transport, region.layout
        size = dtype_of(layout.dtype).num_bytes
        if region.spread:
            ranges = region.shards.owned(self._group.rank)
            largest = max(num_elements(region.shards.owned(rank)) for rank in range(self._group.size))
            memory = transport.allocate(largest * size)[: num_elements(ranges) * size]
            return Held(ranges, self._arrays.from_memory(memory, layout.dtype))
        memory = transport.allocate(layout.count * size) if shared is None else shared
        return Held(((0, layout.count),), self._arrays.from_memory(memory, layout.dtype), whole=True)

    def _make_master(self, number: int, region: Region, held: Held) -> Held:
        if region.frozen or (region.types.master == region.types.compute and not self._apart):
            return held
        ranges = region.updated_by(self._group.rank, self._stage)
        return Held(ranges, self._lender.zeros("master", number, num_elements(ranges), region.types.master),
                    whole=self._stage == 0)

    def _take_values(self, region: Region, held: Held, master: Held) -> None:
        """Bucket by bucket: rank 0's values to all, the model's parameters to their new home."""
        arrays, model, layout = self._arrays, self._model, region.layout
        for number, bucket in enumerate(region.shards.buckets):
            slots = [slot for slot in layout.slots if slot.name in bucket.names]
            values = arrays.zeros(bucket.stop - bucket.start, arrays.dtype(master.array))
            for slot in slots:
                arrays.assign(values[slot.start - bucket.start : slot.stop - bucket.start], model.parameter(slot.name))
            self._group.broadcast(values)
            part = region.shards.part(number, self._group.rank)
            home = arrays.zeros(bucket.stop - bucket.start, layout.dtype) if region.spread else held.piece(
                bucket.start, bucket.stop)
            for slot in slots:
                model.bind(slot.name, home[slot.start - bucket.start : slot.stop - bucket.start])
            if self._shared:
                self._group.barrier()  # all have written their values here; now rank 0's, each rank its part of them
                near = self._group.transport.node_ranks()
                here = split_part(bucket.stop - bucket.start, len(near), near.index(self._group.rank))
                self._store(held, values, (bucket.start + here[0], bucket.start + here[1]), bucket.start)
            else:
                span = part if region.spread else (bucket.start, bucket.stop)
                self._store(held, values, span, bucket.start)
            if master is not held:
                self._store(master, values, part if self._stage else (bucket.start, bucket.stop), bucket.start)

    def _store(self, target: Held, values: Array, span: tuple[int, int], offset: int) -> None:
        self._arrays.assign(target.piece(*span), values[span[0] - offset : span[1] - offset])
        self._lender.release(target.piece(*span))

    # After an update --------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """The masters have new values: parameters take those that this rank updates. Local."""
        for region, held, master in zip(self._regions, self.held, self.masters, strict=True):
            if master is not held:
                for start, stop in region.updated_by(self._group.rank, self._stage):
                    self._arrays.assign(held.piece(start, stop), master.piece(start, stop))
                    self._lender.release(master.piece(start, stop))
                    self._lender.release(held.piece(start, stop))

    def updated(self) -> None:
        """Every rank has updated what it owns: from here on all see all of it. Collective over the group."""
        if self._group.size == 1 or self._stage == 0:
            return
        for region, held in zip(self._regions, self.held, strict=True):
            if not region.frozen:
                self._complete(region, held)
        if self._shared:
            self._group.barrier()

    def _complete(self, region: Region, held: Held) -> None:
        """From what this rank has stored of its own to all that should be here; shared memory wants a barrier then."""
        if self._nodes is not None:
            self._nodes.run(region, held)
        elif not self._shared and not region.spread:
            complete(self._group, region.shards, held)

    def loaded(self) -> None:
        """The owned ranges of all masters have new values: so have all parameters. Collective over the group."""
        for region, held, master in zip(self._regions, self.held, self.masters, strict=True):
            if master is not held:
                for start, stop in region.shards.owned(self._group.rank):
                    self._arrays.assign(held.piece(start, stop), master.piece(start, stop))
            if self._group.size == 1:
                continue
            self._complete(region, held)
            if master is not held and self._stage == 0:
                complete(self._group, region.shards, master)
        if self._shared:
            self._group.barrier()

    def replaced(self, names: Collection[str], root: int) -> None:
        """The model on rank `root` has new values of `names`: all take them. Collective over the group.

        A master whose parameter did not change keeps the bits that the parameter lacks.
        """
        arrays, near = self._arrays, self._group.transport.node_ranks()
        if self._shared:
            self._group.barrier()
        stores = not self._shared or (root not in near and near[0] == self._group.rank)
        for region, held, master in zip(self._regions, self.held, self.masters, strict=True):
            for slot in region.layout.slots:
                if slot.name not in names:
                    continue
                values = arrays.to_flat(self._model.parameter(slot.name))
                self._group.broadcast(values, root)
                for source, (start, stop) in _overlaps(held, slot) if stores else ():
                    arrays.assign(held.piece(start, stop), values[source])
                if master is not held:
                    for source, (start, stop) in _overlaps(master, slot):
                        now = arrays.empty(stop - start, region.layout.dtype)
                        arrays.assign(now, master.piece(start, stop))
                        if bytes(arrays.memory(now)) != bytes(arrays.memory(values[source])):
                            arrays.assign(master.piece(start, stop), values[source])
        if self._shared:
            self._group.barrier()

    def values(self) -> Iterator[tuple[str, Array]]:
        """(name, flat copy) of every parameter as the model computes with it. Collective over the group."""
        for region, held in zip(self._regions, self.held, strict=True):
            yield from copies_of(self._group, self._model, region, held)


def copies_of(group: Group, model: Model, region: Region, held: Held, *,
              owned: bool = False) -> Iterator[tuple[str, Array]]:
    """(name, flat copy) of each parameter of a region; `owned` as in `buckets_of`. Collective over the group."""
    home: dict[str, tuple[Array, int]] = {}
    arrays = buckets_of(group, model.arrays, region.shards, held, owned=owned)
    for bucket, array in zip(region.shards.buckets, arrays, strict=True):
        home.update(dict.fromkeys(bucket.names, (array, bucket.start)))
    for slot in region.layout.slots:
        array, start = home[slot.name]
        yield slot.name, model.arrays.to_flat(array[slot.start - start : slot.stop - start])

def _overlaps(held: Held, slot: Slot) -> Iterator[tuple[slice, Range]]:
    """The parts of a parameter that are held here: which elements of it, and where in the buffer."""
    for start, stop in held.ranges:
        low, high = max(start, slot.start), min(stop, slot.stop)
        if low < high:
            yield slice(low - slot.start, high - slot.start), (low, high)
