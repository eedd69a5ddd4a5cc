"""How much memory training needs on a rank, row by row, before anything runs.

Owns the rule of who keeps what at each stage of ZeRO (arXiv 1910.02054, section 5) and the two ways to apply it:
`by_count` from numbers of parameters (a million ranks, 1e12 parameters, real numbers) and `by_layout` from the flat
layouts that training uses (whole elements, padding and uneven parts included).

    row                stage 0     1        2        3
    parameters         all         all      all      own, or one copy a node      compute type
    gradients          all         all      own      own                          accumulate type
    gradient windows   -           -        a few buckets                         accumulate type
    reduced gradients  all         own      own      own    only where the reduce type is not the accumulate type
    master             all         own      own      own    only where the master type is not the compute type
    moments            all         own      own      own                          master type
    gather window      -           -        -        two units, unless shared     compute type

Knows neither models nor optimizers nor a device. Pure, standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hpctrain.dtypes import dtype_of
from hpctrain.errors import ConfigError, choices
from hpctrain.plan.flat import BUCKET_BYTES, FlatLayout, flat_layouts, make_buckets
from hpctrain.plan.placement import Placement
from hpctrain.plan.split import part

__all__ = ["MemoryRow", "Partition", "StateTypes", "by_count", "by_layout", "bytes_per_parameter", "largest_model",
           "total"]


_STATES = ("parameters", "gradients", "gradient windows", "reduced gradients", "master", "moments")


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

    `compute`: parameters, activations (None: as the model has them). `accumulate`: gradients. `reduce`: the reduced
    gradient, a copy of its own where it differs. `master`: the weights that are updated, and the moments.
    """

    compute: str | None = None
    accumulate: str | None = None
    reduce: str | None = None
    master: str | None = None
    num_moments: int = 2

    def resolve(self, dtype: str) -> StateTypes:
        """All names filled in for a parameter that is `dtype` in the model: for half types the others are float32."""
        compute = self.compute if self.compute and dtype_of(dtype).kind == "float" else dtype
        wide = dtype_of(compute).accumulate
        accumulate = self.accumulate or wide
        return StateTypes(compute, accumulate, self.reduce or accumulate, self.master or wide, self.num_moments)


@dataclass(frozen=True)
class Partition:
    """Over how many ranks of the data axis which states are divided, and where they are kept.

    Attributes:
        stage: 0 nothing is divided; 1 master and moments; 2 gradients too; 3 parameters too.
        share: "node": at stage 3 the ranks of a node hold one copy of the parameters together; "none": own parts only.
        threshold: parameters of fewer elements are whole on every rank at stage 3.
        accumulate: "reduce": stages 2 and 3 keep only the own part of a gradient; "buffer": the whole, while
            micro-batches add up.
        bucket_bytes: as for `plan.flat.make_buckets`; `num_windows` buckets are under way at a time.
        states, gradients, parameters: where they are kept: "device", "host" or "disk".
    """

    num_ranks: int = 1
    stage: int = 0
    share: str = "none"
    ranks_per_node: int = 1
    threshold: int = 0
    accumulate: str = "reduce"
    bucket_bytes: int = BUCKET_BYTES
    num_windows: int = 2
    states: str = "device"
    gradients: str = "device"
    parameters: str = "device"

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
    """What one rank has to do with one layout: elements of it, all or of own ranges.

    `resident` are those of parameters that the rank itself holds at stage 3.
    """

    all: float
    own: float
    resident: float
    bucket: float
    num_buckets: float
    trained: bool = True


def by_count(count: float, types: StateTypes, partition: Partition, *, frozen: float = 0, largest_unit: float = 0,
             activations: float = 0) -> tuple[MemoryRow, ...]:
    """The rows of any rank by closed form: no padding, all parts equal. The threshold is not looked at.

    Args:
        count: trained parameters, elements; `frozen` comes on top.
        types: float32 stands for a compute type that is not given.
        partition: as it is.
        largest_unit: elements of the parameters that are gathered together (two such units are there at a time).
        activations: bytes, as they are.
    """
    types = types.resolve("float32")
    assert types.compute is not None
    n = partition.num_ranks
    bucket = min(count, partition.bucket_bytes / dtype_of(types.compute).num_bytes)
    copies = min(n, partition.ranks_per_node) if partition.shared else n
    trained = _Elements(count, count / n, count / copies, bucket, count / bucket if bucket else 0)
    rest = _Elements(frozen, frozen / n, frozen / copies, 0, 0, trained=False)
    window = 2 * largest_unit * dtype_of(types.compute).num_bytes if partition.gathers else 0
    return _rows([(trained, types), (rest, types)], partition, window, activations)


def by_layout(placements: Iterable[Placement], rank: int, types: StateTypes, partition: Partition, *,
              units: Sequence[Sequence[str]] = (), activations: float = 0) -> tuple[MemoryRow, ...]:
    """The rows of `rank`, to the byte, from the layouts and buckets that training uses.

    `units` are names of parameters that are gathered together, in the model's order; see `by_count` for the others.
    """
    placements = [replace(p, dtype=types.resolve(p.dtype).compute or p.dtype) for p in placements]
    parts = [(_elements(layout, rank, partition, trained), types.resolve(layout.dtype))
             for trained in (True, False) for layout in flat_layouts(p for p in placements if p.frozen != trained)]
    window = _window(placements, units, partition.threshold) if partition.gathers else 0
    return _rows(parts, partition, window, activations)


def _elements(layout: FlatLayout, rank: int, partition: Partition, trained: bool) -> _Elements:
    n = partition.num_ranks
    buckets = make_buckets(layout, partition.bucket_bytes)
    spans = [(b.start + first, b.start + last) for b in buckets for first, last in (part(b.stop - b.start, n, rank),)]
    own = sum(stop - start for start, stop in spans)
    if partition.shared:
        node, index = divmod(rank, partition.ranks_per_node)
        ranks_here = min(partition.ranks_per_node, n - node * partition.ranks_per_node)
        start, stop = part(layout.count, ranks_here, index)
        resident = stop - start
    else:
        small = {slot.name for slot in layout.slots if slot.stop - slot.start < partition.threshold}
        small_own = sum(p.stop - p.start for span in spans for p in layout.pieces(*span) if p.name in small)
        resident = own - small_own + sum(s.stop - s.start for s in layout.slots if s.name in small)
    largest = max((b.stop - b.start for b in buckets), default=0)
    return _Elements(layout.count, own, resident, largest, len(buckets), trained)


def _window(placements: Sequence[Placement], units: Sequence[Sequence[str]], threshold: int) -> int:
    """Bytes of the two neighbouring units (the one in use and the next) that are largest together."""
    sizes = {p.name: p.count * dtype_of(p.dtype).num_bytes for p in placements if p.count >= threshold}
    lengths = [sum(sizes.get(name, 0) for name in unit) for unit in units]
    return max((a + b for a, b in pairwise(lengths)), default=sum(lengths))


def _rows(parts: Sequence[tuple[_Elements, StateTypes]], partition: Partition, window: float,
          activations: float) -> tuple[MemoryRow, ...]:
    stage = partition.stage
    num_windows = 0 if partition.num_ranks == 1 or partition.whole_gradients else partition.num_windows
    sizes: dict[str, float] = dict.fromkeys(_STATES, 0)
    for e, t in parts:
        assert t.compute and t.accumulate and t.reduce and t.master
        sizes["parameters"] += (e.resident if stage == 3 else e.all) * dtype_of(t.compute).num_bytes
        if not e.trained:
            continue
        updated = e.own if stage else e.all
        accumulate, master = dtype_of(t.accumulate).num_bytes, dtype_of(t.master).num_bytes
        sizes["gradients"] += (e.all if partition.whole_gradients else e.own) * accumulate
        sizes["gradient windows"] += e.bucket * min(num_windows, e.num_buckets) * accumulate
        sizes["reduced gradients"] += updated * dtype_of(t.reduce).num_bytes * (t.reduce != t.accumulate)
        sizes["master"] += updated * master * (t.master != t.compute)
        sizes["moments"] += updated * master * t.num_moments
    where = {"parameters": "node" if partition.shared else partition.parameters, "gradients": partition.gradients,
             "reduced gradients": partition.gradients, "master": partition.states, "moments": partition.states}
    sizes |= {"gather window": window, "activations": activations}
    return tuple(MemoryRow(name, size, where.get(name, "device")) for name, size in sizes.items())


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
