"""`hpctrain train`: a config in, a trained model and its curve out.

Owns the options of the command. The config is read by one rank for all, so a thousand ranks ask the file system once
and all have the same words.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpctrain.errors import CheckpointError, ConfigError, HpctrainError, NonFiniteError, RemoteError

__all__ = ["train"]


def _help_config(wanted: bool) -> None:
    if wanted:
        from hpctrain.config.describe import describe_options

        typer.echo(describe_options(), nl=False)
        raise typer.Exit


def train(
    config: Annotated[Path, typer.Argument(help="TOML file; see --help-config.")],
    settings: Annotated[list[str], typer.Option("--set", metavar="SECTION.KEY=VALUE",
                                                help="An option on top of the file's; may be repeated.")] = [],  # noqa: B006
    resume: Annotated[str, typer.Option(metavar="auto|none|PATH",
                                        help="auto: from the newest whole checkpoint of this run, if there is one. "
                                        "PATH: from that checkpoint.")] = "none",
    restart: Annotated[bool, typer.Option("--restart", help="Delete the checkpoints that an earlier run left in the "
                                          "same directory and begin anew.")] = False,
    help_config: Annotated[bool, typer.Option("--help-config", callback=_help_config, is_eager=True,
                                              help="Show every option of a config and exit.")] = False,
) -> None:
    """Train a model. Start it with mpirun or srun for more than one rank."""
    import hpctrain
    from hpctrain.config.read import config_from, read_config, to_dict
    from hpctrain.train.loop import run
    from hpctrain.train.session import prepare

    if restart and resume != "none":
        raise ConfigError(f"--restart begins anew, --resume {resume} goes on; legal is one of them")
    context = hpctrain.start()
    words = context.world.on_root(lambda: to_dict(read_config(config, settings)))
    checked = config_from(words)
    context.progress(checked.run.progress_thread)
    session = prepare(checked, context, resume=resume, restart=restart)
    try:
        run(session)
    except (CheckpointError, NonFiniteError, RemoteError):
        raise  # these are decided by all ranks together: one message
    except HpctrainError as error:
        # From here on any other error may be this rank's alone: it must be printed here and end the job.
        raise RuntimeError(f"{type(error).__name__} during training") from error
    context.close()
