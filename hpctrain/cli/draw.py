"""`hpctrain draw`: the picture of a pipeline schedule, proved and simulated.

Owns the options of this command. Needs neither MPI nor a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpctrain.errors import ConfigError

if TYPE_CHECKING:
    from hpctrain.plan.pipeline.plan import PipelinePlan
    from hpctrain.plan.pipeline.simulate import Times

__all__ = ["draw"]


def draw(
    schedule: Annotated[str, typer.Argument(help="Name of a schedule (naive, gpipe, 1f1b, interleaved, pipedream, "
                                            "pipedream-vertical, pipedream-2bw, zb-h1, zb-h2, zb-v, zb-auto, dualpipe, "
                                            "dualpipe-v), or a file with one as text.")],
    ranks: Annotated[int, typer.Option(min=1, help="Ranks along the pipeline.")] = 4,
    micro_batches: Annotated[int, typer.Option(min=1, help="Micro-batches of a step.")] = 8,
    chunks: Annotated[int | None, typer.Option(min=1, help="Stages a rank (gpipe, interleaved).")] = None,
    group: Annotated[int | None, typer.Option(min=1, help="Micro-batches that pass one chunk before the next one has "
                                              "its turn (interleaved).")] = None,
    per_update: Annotated[int | None, typer.Option(min=1, help="Micro-batches an update (pipedream-2bw).")] = None,
    limit: Annotated[float | None, typer.Option(help="Micro-batches that a rank may hold (zb-auto).")] = None,
    times: Annotated[list[str] | None, typer.Option(metavar="F,I,W", help="Times of a forward, of a gradient of the "
                                                    "input, of one of the weights. Given once: of a whole rank; "
                                                    "several times: of each stage.")] = None,
    message: Annotated[float, typer.Option(min=0, help="Time of a message, in the same unit.")] = 0,
    paired: Annotated[float | None, typer.Option(min=0, help="Forward and backward side by side take this part of "
                                                 "their sum (dualpipe); one after the other when not given.")] = None,
    column: Annotated[float | None, typer.Option(help="Time of a column of the text.")] = None,
    actions: Annotated[bool, typer.Option("--actions", help="Print the schedule as a text that this command reads, "
                                          "instead of the picture.")] = False,
    messages: Annotated[bool, typer.Option("--messages", help="Print the order of each rank with sends and receives, "
                                           "instead of the picture.")] = False,
    png: Annotated[Path | None, typer.Option(help="Write the picture as PNG; needs matplotlib.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a file for Chrome's and Perfetto's trace viewers.")] = None,
) -> None:
    """Prove a pipeline schedule, and show it as text, PNG or trace."""
    from hpctrain.cli.schedule_files import write_files
    from hpctrain.plan.pipeline.draw import draw as drawn
    from hpctrain.plan.pipeline.messages import with_messages
    from hpctrain.plan.pipeline.proof import prove
    from hpctrain.plan.pipeline.simulate import simulate
    from hpctrain.plan.pipeline.text import plan_to_text
    from hpctrain.plan.schedule import to_text

    rows = [_numbers(text) for text in times or ["1,1,1"]]
    options = {"chunks": chunks, "group": group, "per_update": per_update, "limit": limit}
    plan = _plan(schedule, ranks, micro_batches, options, rows)
    proof = prove(plan)
    timeline = simulate(plan, _times(plan, rows, Fraction(message), None if paired is None else Fraction(paired)))
    if column is not None and not column > 0:
        raise ConfigError(f"column = {column} must be above 0")
    if actions:
        typer.echo(plan_to_text(plan), nl=False)
    elif messages:
        for rank, order in enumerate(with_messages(plan)):
            typer.echo(f"rank {rank}: " + to_text(order, stages=len(plan.stages_of(rank)) > 1))
    else:
        typer.echo(drawn(timeline, column))
        typer.echo(f"proved: {proof.messages} messages, at most {proof.buffers} under way on a channel")
    write_files(timeline, png, trace)


def _plan(
    name: str, ranks: int, micro_batches: int, options: dict[str, float | None], rows: Sequence[Sequence[Fraction]]
) -> PipelinePlan:
    """The schedule of that name, or in that file."""
    from hpctrain.plan.pipeline.catalogue import SCHEDULES, schedule
    from hpctrain.plan.pipeline.simulate import Times
    from hpctrain.plan.pipeline.text import from_text

    if name not in SCHEDULES and Path(name).is_file():
        if given := [key for key, value in options.items() if value is not None]:
            raise ConfigError(f"{name} is a file, which says everything; leave {given[0]} out")
        return from_text(Path(name).read_text())
    times = None
    if "times" in SCHEDULES.get(name, (None, ()))[1]:
        times = Times(*_columns(rows if len(rows) > 1 else list(rows) * ranks))
    return schedule(name, ranks, micro_batches, times=times, **options)


def _times(
    plan: PipelinePlan, rows: Sequence[Sequence[Fraction]], message: Fraction, paired: Fraction | None
) -> Times:
    from hpctrain.plan.pipeline.simulate import Times

    if len(rows) == 1:
        return replace(Times.even(plan, *rows[0]), message=message, paired=paired)
    return Times(*_columns(rows), message, paired)


def _columns(rows: Sequence[Sequence[Fraction]]) -> tuple[list[Fraction], list[Fraction], list[Fraction]]:
    """Of one row a stage: its forwards, its gradients of inputs, its gradients of weights."""
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]


def _numbers(text: str) -> list[Fraction]:
    """Three times, exactly as written."""
    try:
        numbers = [Fraction(word.strip()) for word in text.split(",")]
    except (ValueError, ZeroDivisionError):
        numbers = []
    if len(numbers) != 3 or min(numbers) < 0:
        raise ConfigError(f"times = {text!r} must be three numbers of at least 0: forward, gradient of the input, "
                          f"gradient of the weights; like 1,1,0.5")
    return numbers
