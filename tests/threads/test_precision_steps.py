"""Steps in half precision: masters, loss scale, what is skipped, and who is named for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import parity
import pytest
import torch

import hpctrain
import hpctrain.torch
from hpctrain.errors import ConfigError, NonFiniteError, UnsupportedError
from hpctrain.runtime.step import Trainer
from hpctrain.transport.threads import run_threads

Zero, Precision = hpctrain.Zero, hpctrain.Precision
STAGES = [Zero(0), Zero(1), Zero(2), Zero(3), Zero(3, "none", threshold=0)]


class Pair(torch.nn.Module):
    """Two weights of one element."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.full((1,), value))
        self.b = torch.nn.Parameter(torch.full((1,), value))

    def forward(self, function: Callable[[Pair], torch.Tensor]) -> torch.Tensor:
        return function(self)


def linear(module: Pair, x: tuple[float, float]) -> tuple[torch.Tensor, float]:
    """d loss / d a = x[0], d loss / d b = x[1]."""
    return module(lambda m: (m.a.float() * x[0] + m.b.float() * x[1]).sum()), 1.0


def on_threads(num_ranks: int, function: Any) -> list[Any]:
    return run_threads(num_ranks, lambda t: function(parity.context_of(t)))


def values(trainer: Trainer) -> list[float]:
    return [float(value) for _, value in trainer.parameters()]


@pytest.mark.parametrize("zero", STAGES, ids=lambda z: f"{z.stage}-{z.share}")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_small_updates_add_up_in_the_master(zero: Zero, dtype: str) -> None:
    """Each step is less than half a unit in the last place of the half type; ten of them are not."""
    def run(context: Any) -> None:
        trainer = Trainer(context, hpctrain.torch.adapt(Pair(), linear), optimizer=hpctrain.SGD(lr=2.0**-13),
                          zero=zero, precision=Precision(compute=dtype), loss_scale=hpctrain.LossScale.fixed(1.0))
        assert all(p.dtype == getattr(torch, dtype) for _, p in trainer.parameters())
        for _ in range(64):
            trainer.step([(1.0, -1.0)])
        assert values(trainer) == [1 - 2.0**-7, 1 + 2.0**-7]

    on_threads(2, run)


def test_gradients_of_micro_batches_and_ranks_add_up_wide() -> None:
    """256 + 1 is 256 in bfloat16: added up in float32 nothing is lost, at every stage."""
    def run(context: Any) -> None:
        for zero in STAGES:
            trainer = Trainer(context, hpctrain.torch.adapt(Pair(), linear), optimizer=hpctrain.SGD(lr=0.0), zero=zero,
                              precision=Precision(compute="bfloat16"))
            trainer.step([(256.0, 1.0), (1.0, 1.0)] if context.rank == 0 else [(1.0, 0.0)])
            assert [float(g) * 3 for _, g in trainer.gradients()] == pytest.approx([258.0, 2.0], rel=1e-6)

    on_threads(2, run)


@pytest.mark.parametrize("zero", STAGES, ids=lambda z: f"{z.stage}-{z.share}")
def test_an_overflow_lowers_the_scale_and_moves_nothing_else(zero: Zero) -> None:
    def run(context: Any) -> None:
        scale = hpctrain.LossScale(initial=2.0**16, interval=3, hysteresis=1)
        trainer = Trainer(context, hpctrain.torch.adapt(Pair(), linear), optimizer=hpctrain.SGD(lr=1.0), zero=zero,
                          precision=Precision(compute="float16"), loss_scale=scale,
                          schedule=hpctrain.WarmupLinear(0, 12))
        results = []
        for _ in range(9):  # on the last rank 4 * 2^14 = 2^16 is more than float16 holds
            big = context.rank == context.size - 1
            results.append(trainer.step([(4.0 if big else 1.0, 0.0)]))
        assert [r.loss_scale for r in results] == [2.0**k for k in (16, 15, 14, 13, 13, 13, 14, 13, 13)]
        assert [bool(r.skipped) for r in results] == [True] * 3 + [False] * 3 + [True] + [False] * 2
        lrs = [r.lr for r in results]
        assert lrs[0] == lrs[3] == 1.0 and lrs[6] == lrs[7] and trainer.num_updates == 5
        assert all(r.gradient_norm == pytest.approx(5 / 2) for r in results if not r.skipped)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the scale finding its place is no news
        on_threads(2, run)


def test_small_gradients_survive_by_the_loss_scale() -> None:
    def run(context: Any, scale: float) -> float:
        trainer = Trainer(context, hpctrain.torch.adapt(Pair(), linear), optimizer=hpctrain.SGD(lr=0.0),
                          precision=Precision(compute="float16"), loss_scale=hpctrain.LossScale.fixed(scale))
        trainer.step([(2.0**-26, 1.0)])
        return float(dict(trainer.gradients())["a"])

    assert on_threads(1, lambda c: run(c, 1.0)) == [0.0]
    assert on_threads(1, lambda c: run(c, 1024.0)) == [2.0**-26]


BAD = float("inf")
CASES = [((BAD, 1.0), "micro-batch 1: the loss"), ((3e38, 1.0), "micro-batch 1: the gradient of 'a'")]


def squared(module: Pair, x: tuple[float, float]) -> tuple[torch.Tensor, float]:
    """The gradient of `a` is 2 x[0], which may overflow where the loss does not."""
    return module(lambda m: (m.b * x[1]).sum() + Doubled.apply(m.a, x[0]).sum()), 1.0


class Doubled(torch.autograd.Function):
    """x in forward, twice x in backward."""

    @staticmethod
    def forward(context: Any, a: torch.Tensor, x: float) -> torch.Tensor:
        context.x = x
        return a * x

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return gradient * 2 * context.x, None


@pytest.mark.parametrize("zero", STAGES, ids=lambda z: f"{z.stage}-{z.share}")
@pytest.mark.parametrize(("bad", "words"), CASES)
def test_what_is_not_finite_is_named(zero: Zero, bad: Any, words: str) -> None:
    def run(context: Any) -> str:
        trainer = Trainer(context, hpctrain.torch.adapt(Pair(), squared), optimizer=hpctrain.AdamW(), zero=zero,
                          non_finite="stop")
        trainer.step([(1.0, 1.0)])
        with pytest.raises(NonFiniteError) as error:
            trainer.step([(1.0, 1.0), bad, bad] if context.rank == 1 else [(1.0, 1.0)])
        assert trainer.num_updates == 1
        return str(error.value)

    told = set(on_threads(3, run))
    assert len(told) == 1 and f"rank 1, {words}" in told.pop()


def test_the_search_leaves_buffers_and_random_numbers_alone() -> None:
    def run(context: Any) -> None:
        module = Pair()
        module.register_buffer("seen", torch.zeros(1))

        def loss(module: Any, x: float) -> tuple[torch.Tensor, float]:
            module.seen += 1
            torch.rand(int(module.seen))  # more in a second pass
            return (module.a * x).sum(), 1.0

        trainer = Trainer(context, hpctrain.torch.adapt(module, loss), optimizer=hpctrain.AdamW())
        torch.manual_seed(5)
        torch.rand(1), torch.rand(2)
        expected = torch.rand(1)
        torch.manual_seed(5)
        with pytest.warns(UserWarning, match="rank 0, micro-batch 1: the loss"):
            trainer.step([1.0, BAD])
        assert torch.equal(torch.rand(1), expected) and module.seen.tolist() == [2.0]

    on_threads(1, run)


def test_ignoring_updates_all_the_same() -> None:
    def run(context: Any) -> None:
        trainer = Trainer(context, hpctrain.torch.adapt(Pair(), linear), optimizer=hpctrain.SGD(lr=0.1),
                          non_finite="ignore", clip_norm=1.0)
        result = trainer.step([(float("nan"), 1.0)])
        assert result.skipped == "" and trainer.num_updates == 1
        assert np.isnan(values(trainer)[0]) and values(trainer)[1] == pytest.approx(0.9)

    on_threads(2, run)


@pytest.mark.parametrize(("options", "error", "word"), [
    ({"non_finite": "skipp"}, ConfigError, "'skip'"), ({"norm_kind": "l3"}, ConfigError, "norm_kind"),
    ({"precision": Precision(parameter="float32", compute="bfloat16")}, UnsupportedError, "precision.master")])
def test_bad_options_name_themselves(options: dict[str, Any], error: type[Exception], word: str) -> None:
    def run(context: Any) -> None:
        with pytest.raises(error, match=word):
            Trainer(context, hpctrain.torch.adapt(Pair(), linear), optimizer=hpctrain.AdamW(), **options)

    on_threads(1, run)


def test_a_half_precision_gpt_learns_like_a_wide_one() -> None:
    """A tiny real model: losses in bfloat16 fall as in float32."""
    from hpctrain.models.gpt import GPT, loss
    from hpctrain.models.gpt_shape import GPTShape

    tokens = torch.randint(16, (8, 9), generator=torch.Generator().manual_seed(1))
    batch = (tokens[:, :-1], tokens[:, 1:])

    def run(context: Any, precision: Precision) -> list[float]:
        module = GPT(GPTShape(16, 8, 16, 2, 2, "rotary", True), seed=0, dtype=torch.float32)
        trainer = Trainer(context, hpctrain.torch.adapt(module, loss), optimizer=hpctrain.AdamW(lr=0.01),
                          precision=precision, zero=Zero(2), clip_norm=1.0)
        return [trainer.step(parity.micro_batches(batch, context.rank, context.size, 1)).loss for _ in range(15)]

    wide, half = (on_threads(2, lambda c, p=p: run(c, p))[0] for p in (Precision(), Precision(compute="bfloat16")))
    assert all(a > b for a, b in pairwise(half)) and half[-1] < 0.8 * half[0]
    np.testing.assert_allclose(half, wide, rtol=3e-2)
