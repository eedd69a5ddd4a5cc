"""The command `hpctrain`: mounts the commands and says errors once.

Owns the way in and the way out: an error that hpctrain raises on purpose becomes one message and exit status 2,
without a traceback. All ranks have it alike (the set-up runs under `agree`), so only rank 0 speaks.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hpctrain import __version__, env
from hpctrain.cli import bench, ckpt, data
from hpctrain.cli.doctor import doctor
from hpctrain.cli.draw import draw
from hpctrain.cli.plan import plan
from hpctrain.cli.train import train
from hpctrain.errors import HpctrainError

__all__ = ["app"]


class _Group(TyperGroup):
    """The group of all commands."""

    def invoke(self, ctx: Any) -> Any:
        """Runs a command; an HpctrainError of it is said once, by rank 0."""
        try:
            return super().invoke(ctx)
        except HpctrainError as error:
            launch = env.launch()
            if launch is None or launch.rank == 0:
                sys.stderr.write(f"hpctrain: error: {error}\n")
            raise typer.Exit(2) from None


_commands = typer.Typer(cls=_Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                        rich_markup_mode=None, help="Train large models on supercomputers, started by mpirun or srun.")
_commands.command()(train)
_commands.command()(plan)
_commands.command()(draw)
_commands.command()(doctor)
_commands.add_typer(data.app, name="data")
_commands.add_typer(ckpt.app, name="ckpt")
_commands.add_typer(bench.app, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hpctrain {__version__}")
        raise typer.Exit


@_commands.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True,
                                          help="Show the version and exit.")] = False,
) -> None:
    """Train large models on supercomputers, started by mpirun or srun."""


#: The command. Not the Typer object: a call of that would replace the exception hook by which a failing rank ends the
#: whole job.
app = typer.main.get_command(_commands)
