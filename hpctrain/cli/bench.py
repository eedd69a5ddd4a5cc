"""`hpctrain bench`: how fast this machine's collectives are, and the table of algorithms that follows from it.

Owns options, tables and files. What is measured and how is in `hpctrain.bench`. Started by mpirun or srun, all ranks
take part and rank 0 prints; alone it is a job of one rank.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpctrain.errors import ConfigError, choices

if TYPE_CHECKING:
    from hpctrain.bench.figures import Measured
    from hpctrain.bench.survey import Request
    from hpctrain.collectives import Group
    from hpctrain.collectives.choice_row import Row
    from hpctrain.runtime.context import Context

__all__ = ["app", "parse_size"]

app = typer.Typer(no_args_is_help=True, help="Measure this machine; choose algorithms for it.")

_SIZES = "4KiB,32KiB,256KiB,1MiB,4MiB,16MiB"
_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "K": 1 << 10, "MIB": 1 << 20, "M": 1 << 20, "GIB": 1 << 30, "G": 1 << 30}

Operations = Annotated[str, typer.Option(metavar="NAME,...", help="Operations; all by default.")]
Sizes = Annotated[str, typer.Option(metavar="SIZE,...", help="Sizes of the whole array: 4096, 64KiB, 1MiB.")]
Rounds = Annotated[int, typer.Option(min=1, help="Samples of each contender.")]


@app.command()
def collectives(
    operations: Operations = "",
    sizes: Sizes = _SIZES,
    algorithms: Annotated[str, typer.Option(metavar="NAME,...", help="Contenders; all by default. `chosen`: hpctrain "
                                            "left to itself; `MPI`: MPI's own call.")] = "",
    dtypes: Annotated[str, typer.Option(metavar="NAME,...", help="Element types.")] = "float32",
    rounds: Rounds = 11,
    out: Annotated[Path, typer.Option(help="Folder for collectives.json and the pictures.")] = Path("runs/bench"),
    table: Annotated[Path | None, typer.Option(help="A table written by `hpctrain bench tune`, for `chosen`.")] = None,
    draw: Annotated[bool, typer.Option("--draw", help="Measure nothing: show what each rank sends in each round, on "
                                       "--ranks ranks and --nodes nodes. Needs neither MPI nor a job.")] = False,
    ranks: Annotated[int, typer.Option(min=1, help="For --draw.")] = 4,
    nodes: Annotated[int, typer.Option(min=1, help="For --draw, of two-level plans.")] = 2,
    servers: Annotated[int, typer.Option(min=1, help="For --draw, of parameter servers.")] = 1,
) -> None:
    """Time every algorithm of every collective, and MPI's own call, side by side on the ranks of this job."""
    from hpctrain import log
    from hpctrain.bench.figures import rows_of
    from hpctrain.bench.survey import survey

    request = _request(operations, dtypes, sizes, algorithms, rounds)
    if draw:
        _draw(request, ranks, nodes, servers)
        return
    context = _start()
    world = _choosing(context, table)
    rows: list[dict[str, Any]] = []
    for _, group in groupby(survey(world, request, _communicator(context)),
                            key=lambda one: (one.operation, one.dtype)):
        measured = list(group)
        rows += [row for one in measured for row in rows_of(one)]
        for words in dict.fromkeys(measured[0].refused.values()):
            log.once(f"{measured[0].operation}: contenders are left out: {words}")
        if context.rank == 0 and measured[0].times:
            _print_times(measured)
            _picture(measured, out)
    if context.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        (out / "collectives.json").write_text(json.dumps(rows, indent=1) + "\n")
        typer.echo(f"{len(rows)} rows in {out / 'collectives.json'}")
    world.close()
    context.close()


@app.command()
def tune(
    out: Annotated[Path, typer.Option(help="The table to write. One that is there already keeps its rows for other "
                                      "numbers of ranks and nodes.")],
    operations: Operations = "",
    sizes: Sizes = _SIZES,
    rounds: Rounds = 15,
) -> None:
    """Measure this job's ranks and write the table of algorithms for them."""
    from hpctrain.bench.survey import survey
    from hpctrain.bench.tune import tuned_rows
    from hpctrain.collectives.choice_row import REDUCING
    from hpctrain.plan.algorithms import ALGORITHMS

    request = _request(operations or ",".join(ALGORITHMS), "float32", sizes, "", rounds)
    if without := [operation for operation in request.operations if operation not in ALGORITHMS]:
        raise ConfigError(f"--operations: {without[0]!r} has one way only; legal are {choices(ALGORITHMS)}")
    adding = [operation for operation in request.operations if operation in REDUCING]
    halves = replace(request, operations=tuple(adding), dtypes=("bfloat16",))
    context = _start()
    old = _rows_there(out, context)  # first: a file that cannot be read should not cost a measurement
    nodes = context.world.num_nodes()
    new = []
    for _, group in groupby(chain(survey(context.world, request), survey(context.world, halves)),
                            key=lambda one: (one.operation, one.dtype)):
        new += tuned_rows(list(group), nodes)
    context.world.on_root(lambda: _write_table(out, old, new, context))
    context.close()


@app.command()
def choose(
    operation: Annotated[str, typer.Argument(help="all_reduce, broadcast, ...")],
    size: Annotated[str, typer.Argument(help="Size of the whole array: 4096, 64KiB, 1MiB.")],
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the group.")] = 2,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes that they are on.")] = 1,
    dtype: Annotated[str, typer.Option(help="Element type.")] = "float32",
    table: Annotated[Path | None, typer.Option(help="A table written by `hpctrain bench tune`.")] = None,
) -> None:
    """Say which algorithm a collective would take, and why. Needs neither MPI nor a job."""
    from hpctrain.collectives.choose import Chooser
    from hpctrain.collectives.way import NATIVE, SHARED

    if nodes > ranks:
        raise ConfigError(f"--nodes {nodes} is more than --ranks {ranks}; every node has a rank")
    chooser = Chooser() if table is None else Chooser.load(table)
    cases = {"arrays in shared memory": (NATIVE, SHARED), "other arrays": (NATIVE,),
             "other arrays, asynchronously": ()}
    said: dict[tuple[str, str], list[str]] = {}
    for where, ways in cases.items():
        choice = chooser.choose(operation, parse_size(size), ranks, nodes, dtype, frozenset(ways))
        said.setdefault((choice.algorithm, choice.reason), []).append(where)
    for (algorithm, reason), places in said.items():
        typer.echo(f"{algorithm}: {', '.join(places) if len(said) > 1 else 'wherever arrays lie'}\n    {reason}")


def _request(operations: str, dtypes: str, sizes: str, algorithms: str, rounds: int) -> Request:
    from hpctrain.bench.contenders import OPERATIONS
    from hpctrain.bench.survey import Request

    return Request(tuple(_words(operations)) or tuple(OPERATIONS), tuple(_words(dtypes)),
                   tuple(sorted(parse_size(word) for word in _words(sizes))), tuple(_words(algorithms)), rounds)


def parse_size(word: str) -> int:
    """Bytes in `4096`, `64KiB`, `1.5MiB`; K, M and G are powers of 1024 too. Pure.

    Raises:
        ConfigError: not a size, or not a whole number of bytes above 0.
    """
    text = word.strip().upper()
    number = text.rstrip("BIKMG")
    try:
        size = float(number) * _UNITS[text[len(number) :].strip()]
    except (ValueError, KeyError):
        size = -1.0
    if size < 1 or not size.is_integer():
        raise ConfigError(f"--sizes: {word!r} is not a size; legal are whole bytes such as 4096, 64KiB, 1MiB")
    return int(size)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _start() -> Context:
    """The job; says how busy the machine is. Collective over all ranks."""
    from hpctrain import log
    from hpctrain.runtime.context import start

    context = start()  # says where ranks share a core: times are then those of ranks that wait for each other
    load = os.getloadavg()[0]  # of the minute before: what else runs here
    log.once(f"load average before measuring: {load:.2f} on {os.cpu_count()} cores")
    return context


def _draw(request: Request, num_ranks: int, num_nodes: int, num_servers: int) -> None:
    """The plans as text, each on a vector of two elements a rank."""
    from hpctrain.plan.algorithms import ALGORITHMS, make_plan
    from hpctrain.plan.draw import draw

    for operation in request.operations:
        for algorithm in request.algorithms_of(operation):
            if algorithm in ALGORITHMS.get(operation, ()):
                plan = make_plan(operation, algorithm, num_ranks, 2 * num_ranks, node_size=-(-num_ranks // num_nodes),
                                 num_servers=num_servers)
                typer.echo(draw(plan) + "\n")


def _choosing(context: Context, table: Path | None) -> Group:
    """The group of all ranks with the rows of a table, read by rank 0 for all. Collective over all ranks."""
    from hpctrain.arrays import arrays_of
    from hpctrain.collectives import Group, choice_file
    from hpctrain.collectives.choose import Chooser

    text = "" if table is None else context.world.on_root(lambda: choice_file.read_text(table))
    transport = context.world.transport.subgroup(range(context.size))
    assert transport is not None, "all ranks are in it"
    return Group(transport, arrays_of, chooser=Chooser.parse(text, source=str(table)))


def _communicator(context: Context) -> Any:
    """MPI's own communicator of all ranks, or None where there is no MPI."""
    if context.library is None:
        return None
    from mpi4py import MPI

    return MPI.COMM_WORLD


def _print_times(measured: Sequence[Measured]) -> None:
    """One operation and dtype: a row for each size and contender, the fastest in bold."""
    from rich.console import Console
    from rich.table import Table

    from hpctrain.bench.figures import ratios, row, shown_bytes

    native, ranks = measured[0].native, measured[0].num_ranks
    to_native = f"of {native}'s time" if native else ""
    title = f"{measured[0].operation} of {measured[0].dtype}, {ranks} rank{'s' * (ranks != 1)}"
    table = Table(title=title, title_justify="left")
    for name in ("size", "contender", "time (us)", "quartiles (us)", "bus GB/s", to_native):
        table.add_column(name, justify="left" if name == "contender" else "right")
    for one in measured:
        medians = {name: statistics.median(times) for name, times in one.times.items()}
        for name, seconds in medians.items():
            figures = row("", name, "us", (1e6 * t for t in one.times[name]))
            ratio = "" if native is None else f"{statistics.median(ratios(one.times[name], one.times[native])):.2f}"
            table.add_row(shown_bytes(one.num_bytes), name, f"{figures['median']:.4g}",
                          f"{figures['low']:.4g} .. {figures['high']:.4g}", f"{one.bus_bandwidth(seconds) / 1e9:.3g}",
                          ratio, style="bold" if seconds == min(medians.values()) else None)
        copy = statistics.median(one.copy)
        table.add_row(shown_bytes(one.num_bytes), "memory copy", f"{1e6 * copy:.4g}", "",
                      f"{one.num_bytes / copy / 1e9:.3g}", "", style="dim", end_section=True)
    Console(width=110).print(table)


def _picture(measured: Sequence[Measured], out: Path) -> None:
    """Draws where matplotlib is installed; one line says so where it is not."""
    from hpctrain import log
    from hpctrain.bench.picture import draw_picture

    path = out / f"{measured[0].operation}-{measured[0].dtype}.png"
    try:
        draw_picture(measured, path)
    except ImportError:
        log.once("no pictures: matplotlib is not installed (pip install 'hpctrain[plot]')", level=log.WARNING)
        return
    typer.echo(f"picture: {path}")


def _rows_there(out: Path, context: Context) -> list[Row]:
    """The rows of the file if there is one, read by rank 0 for all. Collective over all ranks."""
    from hpctrain.collectives import choice_file
    from hpctrain.collectives.choice_row import check_rows

    text = context.world.on_root(lambda: choice_file.read_text(out) if out.exists() else "")
    rows = choice_file.parse_rows(text, str(out))
    check_rows(rows, str(out))
    return rows


def _write_table(out: Path, old: Sequence[Row], new: Sequence[Row], context: Context) -> None:
    """Merges the rows into the file. Run by one rank."""
    from hpctrain.bench.tune import merge
    from hpctrain.collectives import choice_file

    rows, about = merge(old, new), context.description()
    heading = (f"Algorithms of the collectives, written by hpctrain bench tune; the first row that fits decides.\n"
               f"Last measured on {context.size} ranks: {about['host']}, {about['mpi']}.")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(choice_file.format_rows(rows, heading), encoding="utf-8")
    for row in new:
        high = "" if row.bytes[1] is None else row.bytes[1]
        typer.echo(f"{row.operation:<15}{row.dtypes:<6}{row.bytes[0]}..{high}  {row.algorithm} ({row.reason})")
    typer.echo(f"{len(rows)} rows in {out}, {len(new)} of them new")
