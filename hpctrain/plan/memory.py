"""How much memory training needs on a rank, row by row, before anything runs.

Owns the rule of who keeps what at each stage of ZeRO (arXiv 1910.02054, section 5) and the two ways to apply it:
`by_count` from numbers of parameters (a million ranks, 1e12 parameters, real numbers) and `by_regions` from the flat
buffers that training uses (whole elements, padding and uneven parts included).

    row               stage 0     1        2        3
    parameters        all         all      all      own, or one copy a node     compute type
    gradients         all         all      own      own                         accumulate type
    gradient windows  -           -        two buckets                          reduce type; all stages if another
    gradient copy     all         own      own      own                         only of trainers that make one
    master            all         own      own      own                         only where it is not the compute type
    late gradients    all         own      own      own                         only where updates come a step late
    moments           all         own      own      own                         master type
    gather windows    -           -        -        two units, unless shared    compute type
    unit in use       -           -        -        one unit, unless shared     compute type

Knows neither models nor optimizers nor a device. Pure, standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from hpctrain.dtypes import dtype_of
from hpctrain.errors import ConfigError, choices
from hpctrain.plan.flat import BUCKET_BYTES
from hpctrain.plan.shards import Shards
from hpctrain.plan.split import part

__all__ = ["Buffer", "MemoryRow", "Partition", "StateTypes", "by_count", "by_regions", "bytes_per_parameter",
           "largest_model", "total"]

_ROWS = ("parameters", "gradients", "gradient windows", "gradient copy", "master", "moments", "gather windows",
         "unit in use", "activations")


@dataclass(frozen=True)
class MemoryRow:
    """One use of memory on one rank. `where`: "device", "node" (this rank's share of what its node's ranks hold
    together), "host" or "disk".
    """

    name: str
    num_bytes: float
    where: str = "device"


@dataclass(frozen=True)
class StateTypes:
    """The element types of a training's states, and how many numbers the optimizer remembers for each parameter.

    `compute`: parameters. `accumulate`: gradients in memory. `reduce`: gradients under way. `master`: the weights that
    are updated, and the moments. None: float32 where compute is a half type, else as compute; reduce as accumulate.
    `gradient_copy`: some trainers (not this one) copy the reduced gradient to a wider type for the update.
    """

    compute: str = "float32"
    accumulate: str | None = None
    reduce: str | None = None
    master: str | None = None
    num_moments: int = 2
    gradient_copy: str | None = None

    @property
    def filled(self) -> tuple[str, str, str, str]:
        """(compute, accumulate, reduce, master)."""
        wide = dtype_of(self.compute).accumulate
        accumulate = self.accumulate or wide
        return self.compute, accumulate, self.reduce or accumulate, self.master or wide


class Buffer(Protocol):
    """What is read of one flat buffer; `zero.regions.Region` is one."""

    @property
    def shards(self) -> Shards:
        """The layout, its buckets and who owns what of them."""

    @property
    def types(self) -> tuple[str, str, str, str]:
        """(compute, accumulate, reduce, master)."""

    @property
    def frozen(self) -> bool:
        """Whether there are neither gradients nor states."""

    @property
    def spread(self) -> bool:
        """Whether each rank keeps its own ranges of the parameters only; bucket b then is the unit `units[b]`."""

    @property
    def units(self) -> Sequence[int]:
        """The units of the model that the buckets are."""


@dataclass(frozen=True)
class Partition:
    """Over how many ranks of the data axis which states are divided, and where they are kept.

    Attributes:
        stage: 0 nothing is divided; 1 master and moments; 2 gradients too; 3 parameters too.
        share: "node": at stage 3 the ranks of a node hold one copy of the parameters together; "none": own parts only.
        accumulate: "reduce": stages 2 and 3 keep only the own part of a gradient; "buffer": the whole, while
            micro-batches add up.
        bucket_bytes: as for `plan.flat.make_buckets`; `by_regions` looks at the buckets themselves.
        num_windows: buckets, and units, under way at a time.
        states, gradients, parameters: where they are kept: "device", "host" or "disk".
        delay: updates come one step late, from a copy of the gradients and into masters of their own.
    """

    num_ranks: int = 1
    stage: int = 0
    share: str = "none"
    ranks_per_node: int = 1
    accumulate: str = "reduce"
    bucket_bytes: int = BUCKET_BYTES
    num_windows: int = 2
    states: str = "device"
    gradients: str = "device"
    parameters: str = "device"
    delay: bool = False

    def __post_init__(self) -> None:
        places = ("device", "host", "disk")
        legal: dict[str, Sequence[object]] = {"stage": (0, 1, 2, 3), "share": ("node", "none"), "states": places,
                                              "accumulate": ("reduce", "buffer"), "gradients": places,
                                              "parameters": places}
        for name, values in legal.items():
            if getattr(self, name) not in values:
                raise ConfigError(f"{name} = {getattr(self, name)!r} is not legal; legal are {choices(values)}")
        if min(self.num_ranks, self.ranks_per_node) < 1:
            raise ConfigError(f"num_ranks = {self.num_ranks} and ranks_per_node = {self.ranks_per_node} must be at "
                              "least 1")

    @property
    def shared(self) -> bool:
        """Whether the ranks of a node hold the parameters together."""
        return self.stage == 3 and self.share == "node"

    @property
    def whole_gradients(self) -> bool:
        """Whether every rank holds whole gradients."""
        return self.stage < 2 or self.accumulate == "buffer"

    @property
    def gathers(self) -> bool:
        """Whether parameters must be gathered before use."""
        return self.stage == 3 and self.share == "none" and self.num_ranks > 1


@dataclass(frozen=True)
class _Elements:
    """Elements of one flat buffer: all, of this rank's own ranges, and of the parameters that it itself holds."""

    all: float
    own: float
    resident: float
    trained: bool = True


def by_count(count: float, types: StateTypes, partition: Partition, *, frozen: float = 0, largest_unit: float = 0,
             activations: float = 0) -> tuple[MemoryRow, ...]:
    """The rows of any rank by closed form: no padding, all parts equal, every unit spread.

    Args:
        count: trained parameters, elements; `frozen` comes on top.
        types: the element types.
        partition: who keeps what.
        largest_unit: elements of the parameters that are gathered and reduced together at stage 3.
        activations: bytes, as they are.
    """
    compute, accumulate, reduce, _ = types.filled
    n, size = partition.num_ranks, dtype_of(compute).num_bytes
    copies = 1 if partition.stage < 3 else min(n, partition.ranks_per_node) if partition.shared else n
    parts = [(_Elements(count, count / n, count / copies), types.filled),
             (_Elements(frozen, frozen / n, frozen / copies, trained=False), types.filled)]
    unit = largest_unit * partition.gathers
    bucket = unit or min(count, partition.bucket_bytes / size)
    passes = n > 1 and (not partition.whole_gradients or reduce != accumulate)
    windows = {
        "gradient windows": partition.num_windows * bucket * dtype_of(reduce).num_bytes * passes,
        "gradient copy": (count / n if partition.stage else count) * dtype_of(types.gradient_copy).num_bytes
        if types.gradient_copy else 0,
        "gather windows": partition.num_windows * unit * size,
        "unit in use": unit * size,
        "activations": activations,
    }
    return _rows(parts, partition, types.num_moments, windows)


def by_regions(regions: Sequence[Buffer], rank: int, partition: Partition, *, num_moments: int = 2,
               activations: float = 0) -> tuple[MemoryRow, ...]:
    """The rows of `rank`, to the byte, from the flat buffers that training uses; see `by_count`."""
    parts = []
    for region in regions:
        shards = region.shards
        count, own = shards.layout.count, sum(stop - start for start, stop in shards.owned(rank))
        resident = own if region.spread else _share_of_node(count, rank, partition) if partition.shared else count
        parts.append((_Elements(count, own, resident, not region.frozen), region.types))
    gathers, in_use = _unit_bytes(regions, partition)
    return _rows(parts, partition, num_moments, {
        "gradient windows": _gradient_windows(regions, partition), "gather windows": gathers, "unit in use": in_use,
        "activations": activations})


def _share_of_node(count: int, rank: int, partition: Partition) -> int:
    """Elements that count for `rank` of `count` that its node has once; the last node may have fewer ranks."""
    node, index = divmod(rank, partition.ranks_per_node)
    ranks_here = min(partition.ranks_per_node, partition.num_ranks - node * partition.ranks_per_node)
    start, stop = part(count, ranks_here, index)
    return stop - start


def _gradient_windows(regions: Sequence[Buffer], partition: Partition) -> int:
    """Bytes of the windows that gradients are reduced in: as large as the largest bucket of their type."""
    if partition.num_ranks == 1:
        return 0
    largest: dict[str, int] = {}
    for region in regions:
        _, accumulate, reduce, _ = region.types
        if not region.frozen and (not partition.whole_gradients or reduce != accumulate):
            largest[reduce] = max([largest.get(reduce, 0), *(b.stop - b.start for b in region.shards.buckets)])
    return sum(partition.num_windows * count * dtype_of(dtype).num_bytes for dtype, count in largest.items())


def _unit_bytes(regions: Sequence[Buffer], partition: Partition) -> tuple[int, int]:
    """Bytes of the windows that units are gathered in, and of the largest unit.

    A unit with parameters of several kinds (types, trained and frozen) has a bucket of each, and windows for all.
    """
    largest: dict[str, int] = {}
    units: dict[int, list[int]] = {}
    for region in regions:
        size = dtype_of(region.types[0]).num_bytes
        for unit, bucket in zip(region.units, region.shards.buckets, strict=region.spread):
            length = bucket.stop - bucket.start
            largest[region.types[0]] = max(largest.get(region.types[0], 0), length * size)
            units.setdefault(unit, []).append(length * size)
    most_parts = max(map(len, units.values()), default=0)
    return partition.num_windows * most_parts * sum(largest.values()), max(map(sum, units.values()), default=0)


def _rows(parts: Sequence[tuple[_Elements, tuple[str, str, str, str]]], partition: Partition, num_moments: int,
          windows: dict[str, float]) -> tuple[MemoryRow, ...]:
    sizes: dict[str, float] = dict.fromkeys(_ROWS, 0)
    for e, types in parts:
        compute, accumulate, _, master = (dtype_of(name).num_bytes for name in types)
        sizes["parameters"] += e.resident * compute
        if e.trained:
            updated = e.own if partition.stage else e.all
            sizes["gradients"] += (e.all if partition.whole_gradients else e.own) * accumulate
            sizes["master"] += updated * master * (types[3] != types[0] or partition.delay)
            sizes["moments"] += updated * master * num_moments
            if partition.delay:
                sizes["late gradients"] = sizes.get("late gradients", 0) + updated * accumulate
    where = {"parameters": "node" if partition.shared else partition.parameters, "gradients": partition.gradients,
             "gradient copy": partition.gradients, "late gradients": partition.gradients, "master": partition.states,
             "moments": partition.states}
    return tuple(MemoryRow(name, size, where.get(name, "device")) for name, size in (sizes | windows).items())


def total(rows: Iterable[MemoryRow], *where: str) -> float:
    """Bytes of the rows together; of those kept at one of the places, if any are named."""
    return sum(row.num_bytes for row in rows if not where or row.where in where)


def bytes_per_parameter(types: StateTypes, partition: Partition) -> float:
    """Bytes of model states on a rank for each parameter of the model, windows left out."""
    return total(by_count(1.0, types, replace(partition, num_windows=0)))


def largest_model(memory: float, types: StateTypes, partition: Partition, *, model_parallel: int = 1) -> float:
    """Parameters of the largest model whose states fit into `memory` bytes a rank, cut over `model_parallel` ranks.

    ZeRO, Table 2, the theoretical columns. `partition.num_ranks` counts ranks of the data axis.
    """
    return model_parallel * memory / bytes_per_parameter(types, partition)
