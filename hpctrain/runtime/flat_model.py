"""A model whose parameters and gradients live in flat buffers, kept as the ZeRO stage says.

Joins Model, group and the zero engine; decides nothing that options do not say. All buffers are made here, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from hpctrain import log
from hpctrain.collectives import Group
from hpctrain.contracts import Array, Model
from hpctrain.dtypes import dtype_of
from hpctrain.errors import ConfigError, UnsupportedError, choices, nearest
from hpctrain.optim.home import Home
from hpctrain.optim.own import OwnBuffer
from hpctrain.optim.precision import Precision
from hpctrain.plan.placement import Placement
from hpctrain.plan.shards import Range
from hpctrain.zero.disk import Disk
from hpctrain.zero.gradients import Gradients
from hpctrain.zero.held import Held, num_elements
from hpctrain.zero.lender import Lender, Plain
from hpctrain.zero.options import Zero
from hpctrain.zero.parameters import Parameters, copies_of, node_memory
from hpctrain.zero.regions import Region, Types, make_regions
from hpctrain.zero.units import Units

__all__ = ["FlatModel"]


class FlatModel:
    """The flat home of one model's parameters. Collective over `group` to make: all ranks get rank 0's values.

    `regions[i]` are its buffers, trained ones first; `gradients.held[i]` belongs to `trained[i]`.
    """

    def __init__(self, model: Model, group: Group, zero: Zero, precision: Precision, *, whole_tensors: bool) -> None:
        self.model, self.group, self.zero = model, group, zero
        self.placements: tuple[Placement, ...] = tuple(model.placements)
        _check_same_model(self.placements, group)
        def regions(spread: bool) -> tuple[Region, ...]:
            return make_regions(self.placements, model.units, lambda dtype: types_of(precision, dtype), zero, spread,
                                group.size, whole_tensors=whole_tensors)

        self.regions = regions(spread=False)
        memory = node_memory(zero, group, self.regions)
        if zero.stage == 3 and memory is None:
            self.regions = regions(spread=True)
        self.trained = tuple(r for r in self.regions if not r.frozen)
        self.lender = _lender(model, group, zero)
        self.parameters = Parameters(model, group, self.regions, self.lender, zero=zero, shared=memory)
        self.units = (Units(model, group, self.regions, self.parameters.held, self.lender)
                      if any(r.spread for r in self.regions) else None)
        self.gradients = Gradients(group, model.arrays, self.trained, lender=self.lender, to_all=zero.stage == 0,
                                   whole=zero.stage < 2 or zero.accumulate == "buffer",
                                   starts=None if self.units is None else self.units.tell_reduction)
        for array in model.buffers().values():
            group.broadcast(array)
        self._updated = [self.updated_ranges(region) for region in self.trained]

    @property
    def home(self) -> Home | None:
        """Where an optimizer keeps its states; None: in plain memory."""
        return self.lender if isinstance(self.lender, Disk) else None

    def updated_ranges(self, region: Region) -> tuple[Range, ...]:
        """What this rank updates of a region, without empty ranges."""
        return tuple((a, b) for a, b in region.updated_by(self.group.rank, self.zero.stage) if a < b)

    def own_buffers(self, homes: Sequence[Held] | None = None) -> list[OwnBuffer]:
        """What this rank updates, for an optimizer; with `homes`, of a copy of the parameters that is there."""
        made = []
        for i, region in enumerate(self.trained):
            held, master = self.parameters.held[i], self.parameters.masters[i]
            ranges, home = self._updated[i], held if homes is None else homes[i]
            late = master is held or self.zero.offload.delay
            copies = () if late else [home.piece(*r) for r in ranges]
            dtype = region.layout.dtype if master is held else region.types.master
            updated = home if master is held else master
            made.append(OwnBuffer(region.layout, dtype, ranges, [updated.piece(*r) for r in ranges], copies))
        return made

    def own_gradients(self) -> list[list[Array]]:
        """The gradients of what this rank updates, in the same order."""
        return self.views(self.gradients.held)

    def own_copies(self, lender: Lender) -> list[Held]:
        """Memory for another copy of the gradients of what this rank updates."""
        return [Held(ranges, lender.zeros("pending", i, num_elements(ranges), region.types.accumulate),
                     whole=self.zero.stage == 0)
                for i, (region, ranges) in enumerate(zip(self.trained, self._updated, strict=True))]

    def views(self, helds: Sequence[Held]) -> list[list[Array]]:
        """For each trained region the views of what this rank updates."""
        return [[held.piece(*r) for r in ranges] for held, ranges in zip(helds, self._updated, strict=True)]

    def publish(self) -> None:
        """What this rank updates has been updated: the model, on all ranks, sees it. Collective over the group."""
        if self.zero.offload.delay:
            self.parameters.publish()
        self.parameters.updated()

    def counted_gradients(self, without: frozenset[str] = frozenset()) -> Iterator[Array]:
        """The gradients that this rank counts in a norm: over all ranks each element is there once.

        Those of the parameters `without` somebody else counts.
        """
        pieces = [held.piece(start, stop) for region, held in zip(self.trained, self.gradients.held, strict=True)
                  for owned in region.shards.owned(self.group.rank)
                  for start, stop in region.layout.rest(*owned, without)]
        for i, piece in enumerate(pieces):
            for later in pieces[i + 1 : i + 2]:
                self.lender.fetch(later)
            yield piece
            self.lender.release(piece)

    def gradient_copies(self) -> Iterator[tuple[str, Array]]:
        """(name, flat copy of the gradient in memory: a sum over samples, see `optim.clip`). Collective."""
        for region, held in zip(self.trained, self.gradients.held, strict=True):
            yield from copies_of(self.group, self.model, region, held, owned=self.zero.stage > 0)

    @contextmanager
    def gathered(self, names: Sequence[str] | None = None, modify: int | None = None) -> Iterator[Model]:
        """The model with these parameters there (None: all); rank `modify`'s changes are kept. Collective."""
        known = [p.name for p in self.placements]
        wanted = known if names is None else names
        for name in wanted:
            if name not in known:
                raise ConfigError(f"names has {name!r}{nearest(name, known)}, which is no parameter; legal are "
                                  f"{choices(known[:8])} ...")
        if modify is not None and modify not in range(self.group.size):
            raise ConfigError(f"modify = {modify!r} is no rank; legal are 0 to {self.group.size - 1}, or None")
        units = [u for u, members in enumerate(self.model.units) if not set(wanted).isdisjoint(members)]
        if self.units is not None:
            self.units.open_all(units)
        if modify is not None:
            self.group.barrier()  # where memory is shared, others may still read
        try:
            yield self.model
            if modify is not None:
                self.parameters.replaced(set(wanted), modify)
        finally:
            if self.units is not None:
                self.units.close_all(units)


def types_of(precision: Precision, dtype: str) -> Types:
    """The types of parameters that the model has in `dtype`; what is no floating point number stays what it is."""
    if dtype_of(dtype).kind != "float":
        return Types(dtype, dtype, dtype, dtype)
    found = precision.resolve(dtype)
    if found.parameter != found.compute:
        raise UnsupportedError(f"precision.parameter = {found.parameter!r} with precision.compute = {found.compute!r} "
                               "is not supported: parameters live in the type of the arithmetic; for values in "
                               "another type use precision.master")
    return Types(found.compute, found.accumulate, found.reduce, found.master)


def _lender(model: Model, group: Group, zero: Zero) -> Disk | Plain:
    """What lends a rank the arrays of what it owns. Collective over the group."""
    o = zero.offload
    if "host" in (o.states, o.gradients, o.parameters) and group.rank == 0:
        log.warning("zero.offload: 'host' changes nothing here, the ranks compute in host memory")
    if not o.on_disk:
        return Plain(model.arrays)
    assert o.directory is not None
    with group.agree():
        return Disk(model.arrays, Path(o.directory), o.on_disk, o.window_bytes,
                    idle=("gradient", "parameter") if o.delay else ())


def _check_same_model(placements: Sequence[Placement], group: Group) -> None:
    """Refuses, on all ranks alike, a model that is not the same everywhere."""
    mine = [sorted((key, str(value)) for key, value in asdict(p).items()) for p in placements]
    theirs = group.broadcast_value(mine)
    difference = None
    if len(mine) != len(theirs):
        difference = f"{len(mine)} parameters here, {len(theirs)} on rank 0"
    elif mine != [[tuple(pair) for pair in record] for record in theirs]:
        i = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != [tuple(pair) for pair in b])
        difference = f"parameter {i} is {dict(mine[i])} here, {dict(theirs[i])} on rank 0"
    for rank, problem in enumerate(group.exchange(difference)):
        if problem is not None:
            raise ConfigError(f"the model must be the same on all ranks; on rank {rank}: {problem}")
