"""`hpctrain plan`: what a config would run, worked out on a login node without MPI, torch or a job.

Owns the tables. The numbers come from the same functions that training uses.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpctrain.errors import ConfigError

if TYPE_CHECKING:
    from hpctrain.config.records import Config
    from hpctrain.plan.batch import Batch
    from hpctrain.plan.mesh import Mesh

__all__ = ["plan"]

#: Ranks times micro-batches above which simulating every pipeline schedule would take seconds.
MOST_SIMULATED = 4096


def plan(
    config: Annotated[Path, typer.Argument(help="TOML file; see `hpctrain train --help-config`.")],
    settings: Annotated[list[str], typer.Option("--set", metavar="SECTION.KEY=VALUE",
                                                help="An option on top of the file's; may be repeated.")] = [],  # noqa: B006
    ranks: Annotated[int | None, typer.Option(min=1, help="Number of ranks of the job; what the mesh says, or 1, when "
                                              "not given.")] = None,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Ranks that share a node's memory; matters for "
                                                "zero.share.")] = 1,
    stages: Annotated[bool, typer.Option("--stages", help="Also show how much memory each stage of ZeRO needs on 1 to "
                                         "RANKS ranks.")] = False,
) -> None:
    """Show mesh, batch, memory and steps of a config. Needs neither MPI nor a GPU."""
    from rich.console import Console

    from hpctrain.cli.memory import memory_tables, stages_table
    from hpctrain.config.read import read_config
    from hpctrain.plan.batch import solve_batch

    loaded = read_config(config, settings)
    mesh = loaded.mesh.mesh(ranks)
    batch = solve_batch(mesh.length("data"), size=loaded.batch.global_, micro=loaded.batch.micro,
                        accumulation=loaded.batch.accumulation)
    console = Console()
    console.print(_table("mesh", _mesh_rows(mesh)))
    console.print(_table("batch", _batch_rows(batch, loaded)))
    for table in memory_tables(loaded, batch, ranks_per_node):
        console.print(table)
    if stages:
        console.print(stages_table(loaded, batch, ranks_per_node))
    if mesh.length("pipeline") > 1:
        console.print(_table("pipeline schedules", _pipeline_rows(mesh.length("pipeline"), batch.accumulation)))
    console.print(_table("run", _run_rows(batch, loaded)))


def _table(title: str, rows: list[tuple[str, str]]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False, min_width=60)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def _mesh_rows(mesh: Mesh) -> list[tuple[str, str]]:
    rows = [("ranks", f"{mesh.size} = " + " x ".join(f"{axis} {length}" for axis, length in mesh.lengths))]
    for axis, length in mesh.lengths:
        first = mesh.group(0, axis)
        shown = ", ".join(map(str, first[:8])) + (", ..." if length > 8 else "")
        rows.append((f"{axis} group of rank 0", shown))
    if any(length > 1 for axis, length in mesh.lengths if axis != "data"):
        rows.append(("note", "this release trains over the data axis only; the tables below replicate the model"))
    return rows


def _batch_rows(batch: Batch, config: Config) -> list[tuple[str, str]]:
    derived = f"   ({', '.join(batch.derived)} derived)" if batch.derived else ""
    return [
        ("global = micro x accumulation x data axis", f"{batch}{derived}"),
        ("samples a rank and update", str(batch.micro * batch.accumulation)),
        ("tokens an update", f"{batch.size} x {config.length} = {batch.size * config.length:,}"),
    ]


def _pipeline_rows(num_ranks: int, num_micro_batches: int) -> list[tuple[str, str]]:
    """What each schedule with a flush would cost, all stages alike, a backward twice a forward.

    Not the automatic one, which is for measured times.
    """
    from hpctrain.plan.pipeline.catalogue import SCHEDULES, schedule
    from hpctrain.plan.pipeline.simulate import simulate
    from hpctrain.plan.pipeline.stash import peaks

    sizes = f"{num_ranks} ranks, {num_micro_batches} micro-batches"
    if num_ranks * num_micro_batches > MOST_SIMULATED:
        return [("bubble", f"{sizes}: `hpctrain draw` simulates one schedule of this size")]
    rows = [("bubble of", f"{sizes}, as part of the ideal time")]
    for name, (_, options) in SCHEDULES.items():
        if "times" in options:
            continue
        plan = schedule(name, num_ranks, num_micro_batches)
        if plan.weights == "one":
            most = max(peak.held for peak in peaks(plan)) * num_ranks / plan.depth  # a chunk holds less than a rank
            bubble = 100 * simulate(plan).bubble_of_ideal
            rows.append((name, f"{bubble:.1f} %, a rank holds up to {most:.4g} micro-batch{'es' * (most != 1)}"))
    return rows


def _run_rows(batch: Batch, config: Config) -> list[tuple[str, str]]:
    from hpctrain.data.sampler import Sampler
    from hpctrain.data.store import locate
    from hpctrain.train.recipe import make_optimizer, make_schedule

    make_optimizer(config)  # their checks are part of the plan
    make_schedule(config)
    tokens = config.run.steps * batch.size * config.length
    rows = [("updates", f"{config.run.steps:,}"), ("tokens", f"{tokens:,}")]
    try:
        num_tokens = locate(config.data.store)["train"][2]
    except ConfigError as error:
        return [*rows, ("steps per epoch", f"unknown: {error}")]
    num_samples = max(0, num_tokens - 1) // config.length
    if not num_samples:
        return [*rows, ("steps per epoch", f"none: {config.data.store} has {num_tokens} training tokens")]
    sampler = Sampler(num_samples, batch.size, rank=0, size=batch.data, seed=config.run.seed,
                      accumulation=batch.accumulation, tail=config.data.tail)
    per_epoch = sampler.updates_per_epoch
    return [*rows, ("samples", f"{num_samples:,} of {config.length} tokens"),
            ("steps per epoch", f"{per_epoch:,.10g} (tail = {config.data.tail!r})"),
            ("epochs", f"{config.run.steps / per_epoch:.3f}")]
