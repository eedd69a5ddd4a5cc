"""`hpctrain data`: makes and shows token stores.

Owns the options of these commands. Started under mpirun by mistake, only rank 0 works.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpctrain import env

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Make and show token stores.")


@app.command()
def prepare(
    out: Annotated[Path, typer.Option(help="The token store to write; replaced if it is there.")],
    paths: Annotated[list[Path] | None, typer.Argument(help="Files and folders.")] = None,
    python_stdlib: Annotated[bool, typer.Option("--python-stdlib", help="Also take the sources of this Python's "
                                                "standard library: real text on every machine.")] = False,
    suffix: Annotated[list[str] | None, typer.Option(help="Take only files with this ending from folders (.py for "
                                                     "--python-stdlib alone); may be repeated.")] = None,
    recursive: Annotated[bool, typer.Option(help="Search folders in folders.")] = True,
    limit_mib: Annotated[float | None, typer.Option(help="Take documents up to this many MiB of text.")] = None,
    split: Annotated[str, typer.Option(metavar="documents|tail", help="Validation text: whole documents, chosen by the "
                                       "hash of their content, or the end of each document.")] = "documents",
    validation_percent: Annotated[float, typer.Option(help="Share of the validation text.")] = 5.0,
) -> None:
    """Make a token store (bytes, vocabulary 256) from files and folders."""
    from hpctrain.data.prepare import find_documents, prepare_store

    launch = env.launch()
    if launch is not None and launch.rank > 0:
        return
    roots, endings = list(paths or []), tuple(suffix or ())
    if python_stdlib:
        import sysconfig

        endings = endings or ((".py",) if not roots else ())
        roots.append(Path(sysconfig.get_path("stdlib")))
    if not roots:
        raise typer.BadParameter("give files or folders, or --python-stdlib")
    limit = None if limit_mib is None else int(limit_mib * 2**20)
    documents = find_documents(roots, suffixes=endings, recursive=recursive, limit=limit)
    sizes = prepare_store(out, documents, split=split, percent=validation_percent)
    typer.echo(f"{out}: {len(documents)} documents, " + ", ".join(f"{n:,} {name} tokens" for name, n in sizes.items()))


@app.command()
def show(store: Annotated[Path, typer.Argument(help="A token store.")]) -> None:
    """Show what a token store holds."""
    from hpctrain.data.store import open_store
    from hpctrain.data.text import bigram_entropy

    opened = open_store(store)
    typer.echo(f"{store}: vocabulary {opened.vocabulary}, hash {opened.hash}")
    for name, tokens in (("train", opened.train), ("validation", opened.validation)):
        entropy = bigram_entropy(tokens, opened.vocabulary)
        typer.echo(f"{name:<11}{len(tokens):>15,} tokens   bigram entropy {entropy:.4f} nats per token")
