"""Makes a token store from files and folders, byte by byte.

Owns which files are taken, in which order, and which of them are for validation. Must not know who trains on it.

The result is a function of the files' names and contents alone: files are taken in the order of their names, folders
are walked in sorted order, links to folders are not followed. Each document is followed by one 0 byte, so a model can
tell where one ends. The whole file is written beside its final name, flushed to disk and renamed: a store is either
there and whole, or not there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpctrain.data.store import FORMAT, FORMAT_VERSION, SPLITS
from hpctrain.errors import ConfigError, choices

__all__ = ["SPLIT_RULES", "Document", "find_documents", "prepare_store", "split_documents"]

CHUNK = 1 << 20  # bytes read at a time

#: How a document's part of the validation text is chosen.
SPLIT_RULES = {
    "documents": "whole documents, those whose content hash falls into the first {percent} % of all hash values; equal "
                 "documents are on the same side, and adding documents moves none",
    "tail": "the last {percent} % of each document",
}


@dataclass(frozen=True)
class Document:
    """One file of text. `name` is what the store remembers of its place, `hash` is the xxh3 of its content."""

    name: str
    path: Path
    num_bytes: int
    hash: str


def find_documents(paths: Iterable[str | Path], *, suffixes: Sequence[str] = (), recursive: bool = True,
                   limit: int | None = None) -> list[Document]:
    """The documents in files and folders, in the order of the paths and, within a folder, of their names. Local.

    Args:
        paths: files (always taken) and folders (searched).
        suffixes: endings of the file names taken from folders, such as ".py"; none: all files.
        recursive: whether folders in folders are searched too.
        limit: stop before the text would become longer than this many bytes; documents that do not fit are left out.

    Raises:
        ConfigError: a path that does not exist, or nothing found.
    """
    documents, total, seen = [], 0, set()
    for name, path in _files(paths, suffixes, recursive):
        if path.resolve() in seen or not path.stat().st_size:
            continue
        seen.add(path.resolve())
        if limit is not None and total + path.stat().st_size + 1 > limit:
            continue
        readable = name.encode("utf-8", "backslashreplace").decode()  # file names may hold any byte, HDF5 strings not
        documents.append(Document(readable, path, path.stat().st_size, _hash(path)))
        total += documents[-1].num_bytes + 1
    if not documents:
        raise ConfigError(f"no document that is not empty in {choices(str(p) for p in paths)}"
                          + (f" with the ending {choices(suffixes)}" if suffixes else ""))
    return documents


def _files(paths: Iterable[str | Path], suffixes: Sequence[str], recursive: bool) -> Iterator[tuple[str, Path]]:
    for root in map(Path, paths):
        if root.is_file():
            yield root.name, root
        elif root.is_dir():
            for folder, folders, names in os.walk(root):
                folders[:] = sorted(folders) if recursive else []
                for name in sorted(names):
                    path = Path(folder, name)
                    if path.is_file() and (not suffixes or name.endswith(tuple(suffixes))):
                        yield path.relative_to(root).as_posix(), path
        else:
            raise ConfigError(f"{str(root)!r} is neither a file nor a folder")


def _hash(path: Path) -> str:
    import xxhash

    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            state.update(chunk)
    return str(state.hexdigest())


def split_documents(documents: Sequence[Document], rule: str, percent: float) -> list[tuple[int, int]]:
    """For each document how many of its bytes, from its start, are for training and how many, the rest, for validation.

    Raises:
        ConfigError: an unknown rule, or one side of the split without a document.
    """
    if rule not in SPLIT_RULES:
        raise ConfigError(f"split = {rule!r} is not legal; legal are {choices(SPLIT_RULES)}")
    if not 0 < percent < 100:
        raise ConfigError(f"validation percent = {percent} must be between 0 and 100")
    if rule == "documents":
        chosen = [int(document.hash[:8], 16) < percent / 100 * (1 << 32) for document in documents]
        parts = [(0, d.num_bytes) if c else (d.num_bytes, 0) for d, c in zip(documents, chosen, strict=True)]
    else:
        tails = [int(d.num_bytes * percent / 100) for d in documents]
        parts = [(d.num_bytes - tail, tail) for d, tail in zip(documents, tails, strict=True)]
    for index, split in enumerate(SPLITS):
        if not sum(part[index] for part in parts):
            raise ConfigError(f"split = {rule!r} with {percent} % of {len(documents)} documents leaves nothing for "
                              f"{split}; take split = 'tail' or another percentage")
    return parts


def prepare_store(out: str | Path, documents: Sequence[Document], *, split: str = "documents",
                  percent: float = 5.0) -> dict[str, int]:
    """Writes the store `out` from `documents`; an older file of that name is replaced. Local.

    Returns:
        Number of tokens of each split.

    Raises:
        ConfigError: see `split_documents`; or a file that changed while it was read.
    """
    parts = split_documents(documents, split, percent)
    sizes = {name: sum(part[i] + (part[i] > 0) for part in parts) for i, name in enumerate(SPLITS)}
    with _replaced(Path(out)) as temporary:
        _write(temporary, documents, parts, sizes, SPLIT_RULES[split].format(percent=f"{percent:g}"))
    return sizes


def _write(path: Path, documents: Sequence[Document], parts: Sequence[tuple[int, int]], sizes: dict[str, int],
           rule: str) -> None:
    import h5py
    import xxhash

    state = xxhash.xxh3_128()
    with h5py.File(path, "w", alignment_threshold=4096, alignment_interval=4096) as file:
        for index, name in enumerate(SPLITS):
            dataset, position = file.create_dataset(name, (sizes[name],), np.uint8), 0
            for document, part in zip(documents, parts, strict=True):
                start = 0 if index == 0 else part[0]
                for piece in _pieces(document, start, start + part[index]):
                    dataset[position:position + len(piece)] = np.frombuffer(piece, np.uint8)
                    state.update(piece)
                    position += len(piece)
            assert position == sizes[name]
        _write_sources(file, documents, parts)
        file.attrs.update(format=FORMAT, format_version=FORMAT_VERSION, vocabulary=256, hash=state.hexdigest(),
                          split_rule=rule, num_documents=len(documents))


def _pieces(document: Document, start: int, stop: int) -> Iterator[bytes]:
    """The bytes [start, stop) of a document and the 0 byte behind them; nothing for an empty stretch."""
    with document.path.open("rb") as file:
        file.seek(start)
        while start < stop:
            piece = file.read(min(CHUNK, stop - start))
            if not piece:
                raise ConfigError(f"{str(document.path)!r} became shorter while it was read; prepare the store again")
            yield piece
            start += len(piece)
            if start == stop:
                yield b"\0"


def _write_sources(file: object, documents: Sequence[Document], parts: Sequence[tuple[int, int]]) -> None:
    import h5py

    text = h5py.string_dtype("utf-8")
    row = np.dtype([("name", text), ("num_bytes", np.int64), ("num_train_bytes", np.int64), ("hash", "S32")])
    table = np.empty(len(documents), row)
    for index, (document, part) in enumerate(zip(documents, parts, strict=True)):
        table[index] = (document.name, document.num_bytes, part[0], document.hash.encode())
    assert isinstance(file, h5py.File)
    file.create_dataset("sources", data=table)


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`; on success its file is on disk and has become `path`, otherwise it is gone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
