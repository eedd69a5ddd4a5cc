"""FlatOptimizer on own ranges: all partitions give the bits of the whole, copies follow, homes hear of every chunk."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hpctrain.arrays.numpy import NumpyArrays
from hpctrain.arrays.torch import TorchArrays
from hpctrain.contracts import Array
from hpctrain.errors import UnsupportedError
from hpctrain.optim import flat as flat_module
from hpctrain.optim.flat import FlatOptimizer
from hpctrain.optim.groups import resolve_groups
from hpctrain.optim.home import Chunk, Memory
from hpctrain.optim.options import LAMB, SGD, Adam, AdamW, Muon, Optimizer, ParameterGroup
from hpctrain.optim.own import OwnBuffer
from hpctrain.optim.schedule import Constant, WarmupLinear
from hpctrain.plan.flat import flat_layouts
from hpctrain.plan.placement import Placement
from tests.collective_cases import as_library, to_numpy

PLACEMENTS = [Placement("embed", (5, 3), "float64"), Placement("a.weight", (4, 6), "float64"),
              Placement("a.bias", (4,), "float64", decay=False), Placement("none", (0,), "float64"),
              Placement("b.weight", (6, 4), "float64"), Placement("norm", (7,), "float32", decay=False)]
GROUPS = [ParameterGroup("slow", ("a.*",), lr=0.003, schedule=WarmupLinear(2, 8)), ParameterGroup("empty", ("x",))]
OPTIMIZERS = [AdamW(lr=0.01, weight_decay=0.1), Adam(lr=0.01, weight_decay=0.1), SGD(lr=0.1, momentum=0.9), SGD(lr=0.1),
              LAMB(lr=0.01, weight_decay=0.1), Muon(lr=0.01, weight_decay=0.1)]
LAYOUTS = flat_layouts(PLACEMENTS)
LIBRARIES = {"numpy": NumpyArrays(), "torch": TorchArrays()}
libraries = pytest.mark.parametrize("library", LIBRARIES)
Cuts = Sequence[Sequence[int]]  # of each layout
WHOLE: Cuts = [[0, layout.count] for layout in LAYOUTS]


def start() -> list[Array]:
    random = np.random.default_rng(0)
    buffers = [np.zeros(layout.count, layout.dtype) for layout in LAYOUTS]
    for buffer, layout in zip(buffers, LAYOUTS, strict=True):
        for slot in layout.slots:
            buffer[slot.start : slot.stop] = random.normal(size=slot.stop - slot.start)
    return buffers


def gradients_of(update: int) -> list[Array]:
    random = np.random.default_rng(100 + update)
    buffers = [np.zeros(layout.count, layout.dtype) for layout in LAYOUTS]
    for buffer, layout in zip(buffers, LAYOUTS, strict=True):
        for slot in layout.slots:
            buffer[slot.start : slot.stop] = random.normal(size=slot.stop - slot.start)
    return buffers


def make(library: str, optimizer: Optimizer, parameters: list[Array], cuts: Cuts, rank: int, size: int,
         **more: Any) -> FlatOptimizer:
    """The optimizer of one rank that owns every size-th range between cuts."""
    arrays = LIBRARIES[library]
    own = []
    for layout, buffer, cut in zip(LAYOUTS, parameters, cuts, strict=True):
        ranges = tuple(list(pairwise(cut))[rank::size])
        own.append(OwnBuffer(layout, layout.dtype, ranges, [buffer[a:b] for a, b in ranges]))
    return FlatOptimizer(arrays, optimizer, resolve_groups(PLACEMENTS, optimizer, GROUPS, Constant()), own, **more)


def train(library: str, optimizer: Optimizer, cuts: Cuts, size: int, **more: Any) -> list[Array]:
    """Three updates by `size` ranks that work on one memory."""
    parameters = [as_library(a, library) for a in start()]
    ranks = [make(library, optimizer, parameters, cuts, rank, size, **more) for rank in range(size)]
    for update in range(3):
        for rank in ranks:
            plain = [as_library(g, library) for g in gradients_of(update)]
            rank.apply(update, 0.5, [[g[a:b] for a, b in own.ranges]
                                     for g, own in zip(plain, rank.buffers, strict=True)])
    return [to_numpy(p) for p in parameters]


@libraries
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_together_give_the_bits_of_one(library: str, optimizer: Optimizer, size: int) -> None:
    borders = [[0, *(s.stop for s in layout.slots[:-1] if s.stop), layout.count] for layout in LAYOUTS]
    odd = [[0, 3, 17, 18, 41, 70, layout.count] if layout.count > 70 else [0, 2, layout.count] for layout in LAYOUTS]
    cuts = borders if optimizer.ownership == "tensor" else odd
    for ours, whole in zip(train(library, optimizer, cuts, size), train(library, optimizer, WHOLE, 1), strict=True):
        np.testing.assert_array_equal(ours, whole)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_small_chunks_change_nothing(optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train("numpy", optimizer, WHOLE, 1)
    monkeypatch.setattr(flat_module, "CHUNK", 5)
    for ours, other in zip(train("numpy", optimizer, WHOLE, 1), whole, strict=True):
        np.testing.assert_array_equal(ours, other)


def test_groups_have_their_rates_and_decay() -> None:
    plain = AdamW(lr=0.01, weight_decay=0.1)
    parameters = start()
    optimizer = make("numpy", plain, parameters, WHOLE, 0, 1)
    assert optimizer.learning_rates(0) == [0.0015, 0.01, 0.01]
    zero = [[np.zeros(layout.count, layout.dtype)] for layout in LAYOUTS]
    optimizer.apply(0, 1.0, zero)  # without a gradient only the decay moves anything
    for layout, before, after in zip(LAYOUTS, start(), parameters, strict=True):
        for slot in layout.slots:
            lr = 0.0015 if slot.name.startswith("a.") else 0.01
            decay = 0.0 if slot.name in ("a.bias", "norm") else 0.1
            span = slice(slot.start, slot.stop)
            np.testing.assert_allclose(after[span], before[span] * (1 - lr * decay), rtol=1e-12, err_msg=slot.name)


@libraries
@pytest.mark.parametrize("optimizer", [AdamW(lr=0.01), LAMB(lr=0.01), Muon(lr=0.01)], ids=repr)
def test_copies_are_the_rounded_masters(library: str, optimizer: Optimizer) -> None:
    arrays = LIBRARIES[library]
    placements = [Placement("a", (3, 5), "float32"), Placement("b", (9,), "float32")]
    (layout,) = flat_layouts(placements)
    ranges = ((0, 16), (16, layout.count))
    random = np.random.default_rng(0)
    master = as_library(random.normal(size=layout.count).astype(np.float32), library)
    live = arrays.zeros(layout.count, "bfloat16")
    own = OwnBuffer(layout, "float32", ranges, [master[a:b] for a, b in ranges], [live[a:b] for a, b in ranges])
    flat = FlatOptimizer(arrays, optimizer, resolve_groups(placements, optimizer, [], Constant()), [own])
    assert [len(s) for s in flat.state["exp_avg"]] == [layout.count]
    gradient = as_library(random.normal(size=layout.count).astype(np.float32), library)
    flat.apply(0, 1.0, [[gradient[a:b] for a, b in ranges]])
    for slot in layout.slots:
        ours, wide = to_numpy(live)[slot.start : slot.stop], to_numpy(master)[slot.start : slot.stop]
        np.testing.assert_array_equal(ours, wide.astype(ml_dtypes.bfloat16))
        assert ours.any()


class Listener(Memory):
    """A home that notes what it hears."""

    def __init__(self) -> None:
        super().__init__(NumpyArrays())
        self.made: list[tuple[str, int, int, str]] = []
        self.chunks: list[Chunk] = []
        self.heard: list[tuple[str, int]] = []

    def zeros(self, name: str, buffer: int, count: int, dtype: str) -> Array:
        self.made.append((name, buffer, count, dtype))
        return super().zeros(name, buffer, count, dtype)

    def expect(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = list(chunks)

    def before(self, index: int) -> None:
        self.heard.append(("before", index))

    def after(self, index: int) -> None:
        self.heard.append(("after", index))


def test_a_home_hears_of_every_element_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_module, "CHUNK", 20)
    home = Listener()
    cuts = [[0, 10, 50, LAYOUTS[0].count], [0, 3, LAYOUTS[1].count]]
    optimizer = make("numpy", AdamW(), start(), cuts, 1, 2, home=home)
    counts = [b.count for b in optimizer.buffers]
    assert counts == [40, LAYOUTS[1].count - 3]
    assert home.made == [(slot, i, counts[i], LAYOUTS[i].dtype) for slot in AdamW.slots for i in range(2)]
    optimizer.apply(0, 1.0, [[np.zeros(b - a) for a, b in own.ranges] for own in optimizer.buffers])
    assert home.heard == [(word, i) for i in range(len(home.chunks)) for word in ("before", "after")]
    touched = [(s.buffer, e) for chunk in home.chunks for s in chunk for e in range(s.start, s.stop)]
    assert len(touched) == len(set(touched))
    slots = {(i, e) for i, layout in enumerate(LAYOUTS) for slot in layout.slots for e in range(slot.start, slot.stop)}
    own = {(0, e - 10) for i, e in slots if i == 0 and 10 <= e < 50} | {(1, e - 3) for i, e in slots if i and e >= 3}
    assert own <= set(touched)
    assert all(sum(s.stop - s.start for s in chunk) <= 20 for chunk in home.chunks)


def test_a_rank_may_own_nothing() -> None:
    own = [OwnBuffer(layout, layout.dtype, (), []) for layout in LAYOUTS]
    groups = resolve_groups(PLACEMENTS, AdamW(), GROUPS, Constant())
    FlatOptimizer(NumpyArrays(), AdamW(), groups, own).apply(0, 1.0, [[], []])
    FlatOptimizer(NumpyArrays(), AdamW(), groups, []).apply(0, 1.0, [])


@pytest.mark.parametrize("optimizer", [LAMB(), Muon()], ids=repr)
def test_optimizers_of_whole_tensors_refuse_ranges_that_cut_one(optimizer: Optimizer) -> None:
    with pytest.raises(UnsupportedError, match="needs whole tensors.*'embed'"):
        make("numpy", optimizer, start(), [[0, 7, LAYOUTS[0].count], [0, LAYOUTS[1].count]], 0, 1)
