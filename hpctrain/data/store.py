"""The token store: one file that holds a text as tokens, for training and for validation.

Owns the layout of the file and the way it is read. Must not know where the text came from or who trains on it.

The file is HDF5, so every tool can read it and it says itself what it holds; its token datasets are *contiguous*, so
the tokens lie in the file exactly as in memory. A reader asks HDF5 once for the place of each dataset (`locate`, one
rank for all) and then maps that stretch of the file into memory: no HDF5 call, no lock and no copy on the data path,
one page cache a node however many ranks read, and no library state that a forked loader worker could break.

    /train, /validation   1-D, contiguous, little-endian uint8 (bytes) or uint16 (larger vocabularies)
    /sources              one row a document: name, number of bytes, hash (xxh3 of the content), split
    attributes of /       format, format_version, vocabulary, split_rule, hash (xxh3 of train, then validation)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.errors import ConfigError

__all__ = ["FORMAT", "FORMAT_VERSION", "SPLITS", "TokenStore", "locate", "open_store"]

FORMAT, FORMAT_VERSION = "hpctrain-tokens", 1
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class TokenStore:
    """A store, open for reading: two read-only memory maps."""

    path: Path
    vocabulary: int
    hash: str
    train: np.ndarray
    validation: np.ndarray


def open_store(path: str | Path, found: dict[str, Any] | None = None) -> TokenStore:
    """Maps the store at `path`. Local.

    Args:
        path: file made by `hpctrain data prepare`.
        found: what `locate(path)` returned, perhaps on another rank; asked here when not given.
    """
    found = found or locate(path)
    maps = {}
    for split in SPLITS:
        dtype, offset, count = found[split]
        maps[split] = (np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)) if count
                       else np.empty(0, dtype))
    return TokenStore(Path(path), found["vocabulary"], found["hash"], **maps)


def locate(path: str | Path) -> dict[str, Any]:
    """Where the tokens lie: {split: (dtype, offset in bytes, count)}, vocabulary and hash, as JSON-able values. Local.

    Raises:
        ConfigError: no such file, or not a token store of a version that is known here.
    """
    import h5py

    if not Path(path).is_file():
        raise ConfigError(f"there is no token store {str(path)!r}; make it with `hpctrain data prepare`, or name "
                          "another with data.store")
    try:
        file = h5py.File(path, "r", locking=False)
    except OSError:
        raise ConfigError(f"{str(path)!r} is not a token store (not an HDF5 file); make one with "
                          "`hpctrain data prepare`") from None
    with file:
        version = (file.attrs.get("format"), file.attrs.get("format_version"))
        if version != (FORMAT, FORMAT_VERSION):
            raise ConfigError(f"{str(path)!r} is not a token store of version {FORMAT_VERSION}: it says {version}")
        found: dict[str, Any] = {"vocabulary": int(file.attrs["vocabulary"]), "hash": str(file.attrs["hash"])}
        for split in SPLITS:
            dataset = file[split]
            if dataset.chunks is not None or dataset.ndim != 1:
                raise ConfigError(f"/{split} in {str(path)!r} must be one contiguous row of tokens")
            found[split] = (dataset.dtype.str, dataset.id.get_offset() or 0, int(dataset.size))
    return found
