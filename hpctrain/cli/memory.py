"""The memory tables of `hpctrain plan`: parameters by kind, memory a rank, and what each stage of ZeRO would need.

Owns the tables. The numbers come from `plan.memory`, by the flat buffers that training uses; activations from the
model's formula, which is an estimate. Loads no array library.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpctrain.cli.tables import UNITS, new_table, power_of, shown_bytes
from hpctrain.dtypes import dtype_of
from hpctrain.errors import ConfigError
from hpctrain.plan.memory import MemoryRow, Partition, by_regions, total
from hpctrain.plan.placement import Placement

if TYPE_CHECKING:
    from hpctrain.cli.stages import Stages
    from hpctrain.config.records import Config
    from hpctrain.plan.batch import Batch

__all__ = ["element_bytes", "memory_tables", "stages_table"]

WHERE = {"device": "rank", "node": "node (its share)", "host": "host", "disk": "disk"}
MOST_PLACES = 4  # of a pipeline, side by side in one table


def memory_tables(config: Config, batch: Batch, ranks_per_node: int, cut: Stages | None = None) -> list[Any]:
    """Two tables: the parameters by kind, and rows of memory: of the rank with the most and the one with the least; of
    a pipeline, of each place along it, or of the places with the most and the least.
    """
    from hpctrain.runtime.flat_model import types_of
    from hpctrain.train.recipe import make_precision

    placements, partition = _placements(config), _partition(config, batch, ranks_per_node)
    count = sum(p.count for p in placements)
    kinds = new_table("parameters", "kind", "tensors", "elements")
    for kind, members in _kinds(placements).items():
        kinds.add_row(kind, str(len(members)), f"{sum(p.count for p in members):,}")
    kinds.add_row("together", str(len(placements)), f"{count:,}")

    compute, accumulate, _, master = types_of(make_precision(config), config.run.dtype)
    columns = _columns(config, batch, partition, cut)
    most = max(columns.values(), key=total)
    title = (f"memory a rank, zero.stage = {partition.stage}\nparameters {compute}, gradients {accumulate}, "
             f"master {master}")
    each = ["B/parameter"] * (cut is None)
    memory = new_table(title, "what", *columns, *each, "where", words=("where",))
    for row, *cells in zip(most, *columns.values(), strict=True):
        if any(cell.num_bytes for cell in cells):
            memory.add_row(row.name + " (estimate)" * (row.name == "activations"),
                           *(shown_bytes(cell.num_bytes) for cell in cells),
                           *(f"{row.num_bytes / count:.3f}" for _ in each), WHERE[row.where])
    sums = [shown_bytes(total(rows)) for rows in columns.values()]
    memory.add_row("together", *sums, *(f"{total(most) / count:.3f}" for _ in each), "")
    return [kinds, memory]


def _columns(config: Config, batch: Batch, partition: Partition,
             cut: Stages | None) -> dict[str, tuple[MemoryRow, ...]]:
    """Rows by heading.

    Parts are cut as evenly as possible, earlier ranks first: nobody has more than rank 0 of the data axis or less than
    its last one.
    """
    last = partition.num_ranks - 1
    if cut is None:
        return {"most: rank 0": _rows(config, batch, partition, 0),
                f"least: rank {last}": _rows(config, batch, partition, last)}
    places = [_rows(config, batch, partition, 0, cut, place) for place in range(cut.plan.num_ranks)]
    if len(places) <= MOST_PLACES:
        return {f"pipeline {place}": rows for place, rows in enumerate(places)}
    order = sorted(range(len(places)), key=lambda place: -total(places[place]))
    return {f"{word}: pipeline {place}": places[place] for word, place in (("most", order[0]), ("least", order[-1]))}


def stages_table(config: Config, batch: Batch, ranks_per_node: int, cut: Stages | None = None) -> Any:
    """Stage by number of ranks: memory of the rank with the most, activations included. A pipeline has two stages."""
    given = replace(_partition(config, batch, ranks_per_node), share="none")
    numbers = sorted({2**k for k in range(batch.data.bit_length())} | {batch.data})
    stages: dict[str, dict[str, Any]] = {str(stage): {"stage": stage} for stage in range(3 if cut is None else 2)}
    if cut is None:
        stages["3, share = none"] = {"stage": 3}
        if ranks_per_node > 1:
            stages["3, share = node"] = {"stage": 3, "share": "node"}
    places = [0] if cut is None else range(cut.plan.num_ranks)
    cells = {name: [max(total(_rows(config, batch, replace(given, num_ranks=n, **changes), 0, cut, place))
                        for place in places) for n in numbers
                    if n <= ranks_per_node or "share" not in changes] for name, changes in stages.items()}
    power = power_of(max(map(max, cells.values())))
    where = " of the data axis" * (cut is not None)
    title = f"{UNITS[power]} on the rank with the most, by zero.stage and ranks{where}"
    table = new_table(title, "stage", *map(str, numbers))
    for name, row in cells.items():
        shown = [f"{cell / 1024**power:,.2f}" for cell in row]
        table.add_row(name, *shown, *["-"] * (len(numbers) - len(row)))
    return table


def _rows(config: Config, batch: Batch, partition: Partition, rank: int, cut: Stages | None = None,
          place: int = 0) -> tuple[MemoryRow, ...]:
    """Of one rank on the data axis; of the pipeline `cut`, at `place`."""
    from hpctrain.runtime.flat_model import types_of
    from hpctrain.train.recipe import make_optimizer, make_precision, make_shape, make_zero
    from hpctrain.zero.regions import make_regions

    precision, optimizer, placements = make_precision(config), make_optimizer(config), _placements(config)
    if cut is not None:
        placements = [p for p in placements if p.name in cut.held_by(place)]
        partition = replace(partition, num_ranks=partition.num_ranks * len(cut.plan.peers()[place]))
    units = [[p.name for p in members] for members in _units(placements).values()]
    regions = make_regions(placements, units, lambda dtype: types_of(precision, dtype), make_zero(config),
                           partition.stage == 3 and not partition.shared, partition.num_ranks,
                           whole_tensors=optimizer.ownership == "tensor")
    elements = make_shape(config).num_activations(batch.micro, config.length) if cut is None else cut.stashed[place]
    rows = by_regions(regions, rank, partition, num_moments=len(optimizer.slots),
                      activations=element_bytes(config) * elements)
    if cut is None:
        return rows
    sums = dtype_of(types_of(precision, config.run.dtype).accumulate).num_bytes
    tied = sum(p.count for p in placements if p.name in cut.tied)
    return (*rows, MemoryRow("sums of tied gradients", tied * sums))


def element_bytes(config: Config) -> int:
    """Bytes of one number of an activation."""
    from hpctrain.runtime.flat_model import types_of
    from hpctrain.train.recipe import make_precision

    return dtype_of(types_of(make_precision(config), config.run.dtype).compute).num_bytes


def _partition(config: Config, batch: Batch, ranks_per_node: int) -> Partition:
    zero, offload, one_node = config.zero, config.offload, ranks_per_node >= batch.data
    if zero.stage == 3 and zero.share == "node" and not one_node:
        raise ConfigError(f"zero.share = 'node' needs all {batch.data} ranks on one node, --ranks-per-node is "
                          f"{ranks_per_node}; legal here are 'none' or 'auto'")
    share = "node" if zero.share != "none" and one_node else "none"
    return Partition(batch.data, zero.stage, share, ranks_per_node, zero.accumulate, zero.bucket_bytes,
                     states=offload.states or "device", gradients=offload.gradients or "device",
                     parameters=offload.parameters or "device", delay=offload.delay)


def _placements(config: Config) -> list[Placement]:
    from hpctrain.train.recipe import make_shape

    return [Placement(name, shape, config.run.dtype) for name, shape in make_shape(config).parameters().items()]


def _kinds(placements: list[Placement]) -> dict[str, list[Placement]]:
    """`blocks.3.qkv.weight` is one of `blocks.*.qkv.weight`."""
    kinds: dict[str, list[Placement]] = {}
    for placement in placements:
        kinds.setdefault(re.sub(r"\b\d+\b", "*", placement.name), []).append(placement)
    return kinds


def _units(placements: list[Placement]) -> dict[str, list[Placement]]:
    """What is gathered together: a numbered block as a whole (`blocks.3`), else a module."""
    units: dict[str, list[Placement]] = {}
    for placement in placements:
        block = re.match(r".*?\b\d+\b", placement.name)
        units.setdefault(block[0] if block else placement.name.rpartition(".")[0], []).append(placement)
    return units
