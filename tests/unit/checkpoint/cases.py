"""Tensors of every dtype and shape, and how the tests save and load them."""

import warnings

import ml_dtypes
import numpy as np

from hpctrain.arrays import arrays_of
from hpctrain.checkpoint import Piece, Saver, TensorSpec, find, index
from hpctrain.collectives import Group
from hpctrain.transport.threads import run_threads

CASES = {  # every dtype, names that HDF5 would misread, 0-d, empty, large and small
    "layers.0.weight": ("float32", (5, 7)),
    "wide/name%b#1": ("bfloat16", (300, 40)),
    "half": ("float16", (3,)),
    "mask": ("bool", (9,)),
    "scalar": ("int64", ()),
    "empty": ("float64", (0, 3)),
    "complex": ("complex64", (4, 4)),
    "bytes": ("uint8", (70_000,)),
    "fp8": ("float8_e4m3fn", (13,)),
    "fp8 wide": ("float8_e5m2", (256,)),
    ".": ("int8", (2, 2, 2)),
    "ünïcode": ("uint64", (2,)),
}


def numpy_type(dtype):
    return np.dtype(getattr(ml_dtypes, dtype) if dtype.startswith(("bfloat", "float8")) else dtype)


def alone(function):
    """function(group) on a group of one rank."""
    return run_threads(1, lambda transport: function(Group(transport, arrays_of)))[0]


def pieces_of(values, step=0):
    """Two pieces a tensor, the first a third of it."""
    pieces = []
    for name, array in values.items():
        spec = TensorSpec(name, CASES[name][0], CASES[name][1], "param")
        raw, cut = array.reshape(-1).view(np.uint8), spec.count // 3
        size = array.dtype.itemsize
        pieces.append(Piece(spec, 0, cut, memoryview(raw[: cut * size])))
        pieces.append(Piece(spec, cut, spec.count, memoryview(raw[cut * size :])))
    return pieces


def save(root, values, steps=(1,), **kwargs):
    def job(group):
        saver = Saver(root, group, keep=3, env={"host": "here"})
        states = {"random": b"\x00\x01state", "none": b""}
        return [saver.save(s, pieces_of(values), user={"loss": 0.5}, rank_state=states, **kwargs) for s in steps]

    return alone(job)


def load(where, **kwargs):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = alone(lambda group: find(where, group, must_exist=True, **kwargs))
    return found, [str(warning.message) for warning in caught]


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def damage_piece(directory):
    tables = find_tables(directory)
    piece = max(tables.pieces, key=lambda piece: piece.num_bytes)
    flip(directory / "shards/f00000.h5", piece.offset + piece.num_bytes // 2)


def damage_state(directory):
    flip(directory / "shards/f00000.h5", find_tables(directory).states[0].offset)


def find_tables(directory):
    return index.parse_index((directory / "index.h5").read_bytes())[0]
