"""`hpctrain plan`: what a config would run, worked out on a login node without MPI, torch or a job.

Owns the tables. The numbers come from the same functions that training uses.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpctrain.errors import ConfigError
from hpctrain.plan.mesh import AXES

if TYPE_CHECKING:
    from hpctrain.config.records import Config
    from hpctrain.plan.batch import Batch
    from hpctrain.plan.mesh import Mesh

__all__ = ["plan"]


def plan(
    config: Annotated[Path, typer.Argument(help="TOML file; see `hpctrain train --help-config`.")],
    settings: Annotated[list[str], typer.Option("--set", metavar="SECTION.KEY=VALUE",
                                                help="An option on top of the file's; may be repeated.")] = [],  # noqa: B006
    ranks: Annotated[int | None, typer.Option(min=1, help="Number of ranks of the job; what the mesh says, or 1, when "
                                              "not given.")] = None,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Ranks that share a node's memory; matters for "
                                                "zero.share.")] = 1,
    png: Annotated[Path | None, typer.Option(help="Write the pipeline's schedule as PNG; needs matplotlib.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write it as a file for Chrome's and Perfetto's trace "
                                               "viewers.")] = None,
    stages: Annotated[bool, typer.Option("--stages", help="Also show how much memory each stage of ZeRO needs on 1 to "
                                         "RANKS ranks.")] = False,
) -> None:
    """Show mesh, batch, memory and steps of a config. Needs neither MPI nor a GPU."""
    from rich.console import Console

    from hpctrain.cli.memory import element_bytes, memory_tables, stages_table
    from hpctrain.cli.plan_pipeline import bubbles_table, stages_shown
    from hpctrain.cli.schedule_files import write_files
    from hpctrain.cli.stages import Stages
    from hpctrain.cli.tables import rows_table
    from hpctrain.config.read import read_config
    from hpctrain.plan.batch import solve_batch
    from hpctrain.train.pipeline import check_axes, pipelining

    loaded = read_config(config, settings)
    mesh = loaded.mesh.mesh(ranks)
    batch = solve_batch(mesh.length("data"), size=loaded.batch.global_, micro=loaded.batch.micro,
                        accumulation=loaded.batch.accumulation)
    check_axes(mesh, AXES)
    pipeline = pipelining(loaded, mesh, batch)
    if pipeline is None and (png or trace):
        raise ConfigError("--png and --trace show a pipeline; mesh.pipeline must be above 1")
    cut = None if pipeline is None else Stages.of(loaded, batch, pipeline)
    console = Console()
    console.print(rows_table("mesh", _mesh_rows(mesh)))
    console.print(rows_table("batch", _batch_rows(batch, loaded, mesh.length("pipeline"))))
    if cut is not None:
        for shown in stages_shown(cut, loaded, element_bytes(loaded)):
            console.print(shown, soft_wrap=isinstance(shown, str), highlight=False)
        console.print(bubbles_table(cut.plan))
        write_files(cut.timeline, png, trace)
    for table in memory_tables(loaded, batch, ranks_per_node, cut):
        console.print(table)
    if stages:
        console.print(stages_table(loaded, batch, ranks_per_node, cut))
    console.print(rows_table("run", _run_rows(batch, loaded)))


def _mesh_rows(mesh: Mesh) -> list[tuple[str, str]]:
    rows = [("ranks", f"{mesh.size} = " + " x ".join(f"{axis} {length}" for axis, length in mesh.lengths))]
    for axis, length in mesh.lengths:
        first = mesh.group(0, axis)
        shown = ", ".join(map(str, first[:8])) + (", ..." if length > 8 else "")
        rows.append((f"{axis} group of rank 0", shown))
    if any(length > 1 for axis, length in mesh.lengths if axis not in ("pipeline", "data")):
        rows.append(("note", "this release trains over pipeline and data only; the tables below replicate the model"))
    return rows


def _batch_rows(batch: Batch, config: Config, stages: int) -> list[tuple[str, str]]:
    derived = f"   ({', '.join(batch.derived)} derived)" if batch.derived else ""
    return [
        ("global = micro x accumulation x data axis", f"{batch}{derived}"),
        (f"samples a {'pipeline' if stages > 1 else 'rank'} and update", str(batch.micro * batch.accumulation)),
        ("tokens an update", f"{batch.size} x {config.length} = {batch.size * config.length:,}"),
    ]


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
