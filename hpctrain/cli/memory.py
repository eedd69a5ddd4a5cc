"""The memory tables of `hpctrain plan`: parameters by kind, memory a rank, and what each stage of ZeRO would need.

Owns the tables. The numbers come from `plan.memory`, by the flat buffers that training uses; activations from the
model's formula, which is an estimate. Loads no array library.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpctrain.dtypes import dtype_of
from hpctrain.errors import ConfigError
from hpctrain.plan.memory import MemoryRow, Partition, by_regions, total
from hpctrain.plan.placement import Placement

if TYPE_CHECKING:
    from hpctrain.config.records import Config
    from hpctrain.plan.batch import Batch

__all__ = ["memory_tables", "stages_table"]

WHERE = {"device": "rank", "node": "node (its share)", "host": "host", "disk": "disk"}
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def memory_tables(config: Config, batch: Batch, ranks_per_node: int) -> list[Any]:
    """Two tables: the parameters by kind, and the rows of the rank with the most and the one with the least."""
    from hpctrain.runtime.flat_model import types_of
    from hpctrain.train.recipe import make_precision

    placements, partition = _placements(config), _partition(config, batch, ranks_per_node)
    count = sum(p.count for p in placements)
    kinds = _new_table("parameters", "kind", "tensors", "elements")
    for kind, members in _kinds(placements).items():
        kinds.add_row(kind, str(len(members)), f"{sum(p.count for p in members):,}")
    kinds.add_row("together", str(len(placements)), f"{count:,}")

    # Parts are cut as evenly as possible, earlier ranks first: nobody has more than rank 0 or less than the last one.
    last = partition.num_ranks - 1
    most, least = (_rows(config, batch, partition, rank) for rank in (0, last))
    compute, accumulate, _, master = types_of(make_precision(config), config.run.dtype)
    memory = _new_table(f"memory a rank, zero.stage = {partition.stage}\nparameters {compute}, gradients "
                        f"{accumulate}, master {master}", "what", "most: rank 0", f"least: rank {last}",
                        "B/parameter", "where")
    rows = [(a.name + " (estimate)" * (a.name == "activations"), a.num_bytes, b.num_bytes, WHERE[a.where])
            for a, b in zip(most, least, strict=True) if a.num_bytes or b.num_bytes]
    for name, high, low, where in [*rows, ("together", total(most), total(least), "")]:
        memory.add_row(name, _bytes(high), _bytes(low), f"{high / count:.3f}", where)
    return [kinds, memory]


def stages_table(config: Config, batch: Batch, ranks_per_node: int) -> Any:
    """Stage by number of ranks: memory of the rank with the most, activations of one micro-batch included."""
    given = replace(_partition(config, batch, ranks_per_node), share="none")
    numbers = sorted({2**k for k in range(batch.data.bit_length())} | {batch.data})
    stages: dict[str, dict[str, Any]] = {str(stage): {"stage": stage} for stage in range(3)}
    stages["3, share = none"] = {"stage": 3}
    if ranks_per_node > 1:
        stages["3, share = node"] = {"stage": 3, "share": "node"}
    cells = {name: [total(_rows(config, batch, replace(given, num_ranks=n, **changes), 0)) for n in numbers
                    if n <= ranks_per_node or "share" not in changes] for name, changes in stages.items()}
    power = _power(max(map(max, cells.values())))
    title = f"{UNITS[power]} on the rank with the most, by zero.stage and ranks"
    table = _new_table(title, "stage", *map(str, numbers))
    for name, row in cells.items():
        shown = [f"{cell / 1024**power:,.2f}" for cell in row]
        table.add_row(name, *shown, *["-"] * (len(numbers) - len(row)))
    return table


def _rows(config: Config, batch: Batch, partition: Partition, rank: int) -> tuple[MemoryRow, ...]:
    from hpctrain.runtime.flat_model import types_of
    from hpctrain.train.recipe import make_optimizer, make_precision, make_zero
    from hpctrain.zero.regions import make_regions

    precision, optimizer, placements = make_precision(config), make_optimizer(config), _placements(config)
    units = [[p.name for p in members] for members in _units(placements).values()]
    regions = make_regions(placements, units, lambda dtype: types_of(precision, dtype), make_zero(config),
                           partition.stage == 3 and not partition.shared, partition.num_ranks,
                           whole_tensors=optimizer.ownership == "tensor")
    element = dtype_of(types_of(precision, config.run.dtype).compute).num_bytes
    activations = element * _shape(config).num_activations(batch.micro, config.length)
    return by_regions(regions, rank, partition, num_moments=len(optimizer.slots), activations=activations)


def _partition(config: Config, batch: Batch, ranks_per_node: int) -> Partition:
    zero, offload, one_node = config.zero, config.offload, ranks_per_node >= batch.data
    if zero.stage == 3 and zero.share == "node" and not one_node:
        raise ConfigError(f"zero.share = 'node' needs all {batch.data} ranks on one node, --ranks-per-node is "
                          f"{ranks_per_node}; legal here are 'none' or 'auto'")
    share = "node" if zero.share != "none" and one_node else "none"
    return Partition(batch.data, zero.stage, share, ranks_per_node, zero.accumulate, zero.bucket_bytes,
                     states=offload.states or "device", gradients=offload.gradients or "device",
                     parameters=offload.parameters or "device", delay=offload.delay)


def _shape(config: Config) -> Any:
    from hpctrain.train.recipe import gpt_shape, mlp_shape

    return gpt_shape(config) if config.model.kind == "gpt" else mlp_shape(config)


def _placements(config: Config) -> list[Placement]:
    return [Placement(name, shape, config.run.dtype) for name, shape in _shape(config).parameters().items()]


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


def _new_table(title: str, *columns: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", min_width=60)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 or column == "where" else "right")
    return table


def _bytes(count: float) -> str:
    power = _power(count)
    return f"{count / 1024**power:,.{2 if power else 0}f} {UNITS[power]}"


def _power(count: float) -> int:
    return min(len(UNITS) - 1, max(0, int(count).bit_length() - 1) // 10)
