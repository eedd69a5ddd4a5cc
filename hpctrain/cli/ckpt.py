"""`hpctrain ckpt`: look at checkpoints and check them, with one process, no MPI and no torch.

Owns the tables on the terminal. What a checkpoint is and when it is whole, `hpctrain.checkpoint` says.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hpctrain.checkpoint import verify as verification
from hpctrain.checkpoint.keep import entries, pointed_to
from hpctrain.checkpoint.schema import MANIFEST, step_of
from hpctrain.checkpoint.validate import bind_tables, read_record
from hpctrain.errors import CheckpointError

__all__ = ["app"]

app = typer.Typer(help="List, show and verify checkpoints.", no_args_is_help=True)

RootArgument = Annotated[Path, typer.Argument(help="Directory that holds checkpoints.", metavar="ROOT")]
PathArgument = Annotated[Path, typer.Argument(help="A checkpoint, or a root (then its newest one).", metavar="PATH")]
VerifyArgument = Annotated[Path, typer.Argument(help="A checkpoint, or a root (then all in it).", metavar="PATH")]


def _size(num_bytes: int) -> str:
    """Bytes for people: 1.5 GiB."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _refuse(error: Exception | str) -> typer.Exit:
    typer.echo(f"hpctrain ckpt: {error}", err=True)
    return typer.Exit(1)


def _checkpoints(path: Path) -> list[Path]:
    """The checkpoint itself, or those of a root, the one that `latest` names first, then newest first."""
    if step_of(path.absolute().name) is not None or (path / MANIFEST).exists():
        return [path]
    try:
        names, latest = [entry.name for entry in entries(str(path), os)], pointed_to(str(path), os)
    except OSError as error:
        raise _refuse(error) from error
    if not names:
        raise _refuse(f"there is no checkpoint in {path}")
    return [path / name for name in sorted(names, key=lambda name: name != latest)]


@app.command("ls")
def list_root(root: RootArgument) -> None:
    """Lists the checkpoints of ROOT, newest first, by what their manifests say (verify reads the data)."""
    _checkpoints(root)
    latest = pointed_to(str(root), os)
    table = Table("checkpoint", "step", "saved (UTC)", "ranks", "files", "size", "", title=str(root))
    for entry in entries(str(root), os):
        mark = "latest" if entry.name == latest else ""
        if entry.manifest is None:
            table.add_row(entry.name, "", "", "", "", "", f"[red]damaged: {entry.fault}[/red]")
            continue
        files = entry.manifest["files"]
        size = _size(sum(num_bytes for num_bytes, _ in files.values()))
        table.add_row(entry.name, str(entry.manifest["step"]), entry.manifest["time"][:16].replace("T", " "),
                      str(entry.manifest["world_size"]), str(len(files)), size, mark)  # fmt: skip
    Console().print(table)


@app.command("show")
def show(path: PathArgument) -> None:
    """Shows what is in a checkpoint: step, user data, tensors, files."""
    directory = _checkpoints(path)[0]
    try:
        record = read_record(str(directory), os)
        tables = bind_tables(record)
    except (OSError, CheckpointError) as error:
        raise _refuse(f"{directory}: {error}") from error
    manifest, console = record.manifest, Console()
    axes = zip(manifest["mesh"]["dims"], manifest["mesh"]["shape"], strict=True)
    mesh = " x ".join(f"{axis} {length}" for axis, length in axes)
    console.print(str(directory), markup=False, highlight=False)
    console.print(f"step {manifest['step']}, saved {manifest['time']} by {manifest['world_size']} ranks ({mesh})")
    for title in ("user", "env"):
        if manifest[title]:
            console.print(f"{title}: {json.dumps(manifest[title], indent=2)}", markup=False)
    num_pieces = Counter(piece.tensor for piece in tables.pieces)
    tensors = Table("name", "role", "dtype", "shape", "size", "pieces", title=f"{len(tables.tensors)} tensors")
    for number, tensor in enumerate(tables.tensors):
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        tensors.add_row(tensor.name, tensor.role, tensor.dtype, shape, _size(tensor.num_bytes), str(num_pieces[number]))
    console.print(tensors)
    files = Table("file", "size", "pieces", title=f"{len(tables.files)} files")
    for file in tables.files:
        files.add_row(file.name, _size(file.size), str(file.num_hashes))
    console.print(files)


@app.command("verify")
def verify(path: VerifyArgument) -> None:
    """Reads every byte and checks it; one line a fault, and exit status 1 when there is any."""
    broken = False
    for directory in _checkpoints(path):
        faults = verification.faults(str(directory))
        for fault in faults:
            typer.echo(f"{directory}: {fault}")
        if not faults:
            for remark in verification.remarks(str(directory)):
                typer.echo(f"{directory}: note: {remark}")
            typer.echo(f"{directory}: whole")
        broken = broken or bool(faults)
    if broken:
        raise typer.Exit(1)
