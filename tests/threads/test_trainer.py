"""The training step: loss weights, accumulation tails, schedules, groups, skipped steps, odd models."""

from __future__ import annotations

from typing import Any

import numpy as np
import parity
import pytest
import torch

import hpctrain
import hpctrain.torch
from hpctrain.errors import ConfigError, NonFiniteError, UnsupportedError
from hpctrain.plan.split import part
from hpctrain.runtime.step import Trainer
from hpctrain.transport.threads import run_threads


class Scalar(torch.nn.Module):
    """One weight, w = 1."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones((), dtype=dtype))


def on_threads(num_ranks: int, function: Any) -> list[Any]:
    return run_threads(num_ranks, lambda t: function(parity.context_of(t)))


def half_square(module: Scalar, x: list[float]) -> tuple[torch.Tensor, float]:
    return sum(0.5 * (module.w * v) ** 2 for v in x), float(len(x))


#: rank 0: [1], [2,2,2]; rank 1: [3,3], [1]*6; gradient sum(x^2)/12 = 37/12
TOKENS = [[1.0], [2.0] * 3, [3.0] * 2, [1.0] * 6]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_uneven_tokens_weigh_by_their_number(num_ranks: int) -> None:
    def run(context: Any) -> None:
        trainer = Trainer(context, hpctrain.torch.adapt(Scalar(), half_square), optimizer=hpctrain.SGD(lr=0.0))
        start, stop = part(4, context.size, context.rank)
        result = trainer.step(TOKENS[start:stop])
        assert result.loss == pytest.approx(37 / 24, rel=1e-12)
        assert float(dict(trainer.gradients())["w"][0]) == pytest.approx(37 / 12, rel=1e-12)
        assert result.gradient_norm == pytest.approx(37 / 12, rel=1e-12)
        assert result.weight == 12
        assert trainer.evaluate(TOKENS[start:stop]).loss == pytest.approx(37 / 24, rel=1e-12)

    on_threads(num_ranks, run)


def linear(module: Scalar, x: float) -> tuple[torch.Tensor, float]:
    return module.w * x, 1.0


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_last_partial_window_is_a_step_with_its_own_weight(num_ranks: int) -> None:
    from hpctrain.data.windows import windows

    def run(context: Any) -> None:
        model = hpctrain.torch.adapt(Scalar(), linear)
        trainer = Trainer(context, model, optimizer=hpctrain.SGD(lr=0.1))
        results = [trainer.step(w) for w in windows([float(x) for x in range(1, 8)], accumulation=4)]
        assert float(model.parameter("w")) == pytest.approx(0.15, rel=1e-12)
        assert [r.update for r in results] == [1, 2]
        short = [trainer.step(w) for w in windows([1.0, 2.0, 3.0], accumulation=4)]
        assert len(short) == 1 and trainer.num_updates == 3

    on_threads(num_ranks, run)


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_schedules_count_applied_updates_only(num_ranks: int, accumulation: int) -> None:
    def run(context: Any) -> None:
        model = hpctrain.torch.adapt(Scalar(), linear)
        trainer = Trainer(context, model, optimizer=hpctrain.SGD(lr=1.2), schedule=hpctrain.WarmupLinear(0, 12))
        rates = []
        for i in range(13):
            bad = i == 4 and context.rank == context.size - 1
            result = trainer.step([float("inf") if bad else 1.0] * accumulation)
            assert (result.skipped == "not finite") == (i == 4)
            rates.append(result.lr)
        assert rates[4] == rates[5]
        np.testing.assert_allclose(rates[:4] + rates[5:], [1.2 - 0.1 * k for k in range(12)], rtol=1e-12)
        assert trainer.num_updates == 12

    on_threads(num_ranks, run)


def test_plateau_reduces_once_for_all_ranks() -> None:
    def run(context: Any) -> None:
        trainer = Trainer(context, hpctrain.torch.adapt(Scalar(), linear), optimizer=hpctrain.SGD(lr=1.0),
                          schedule=hpctrain.Plateau(shrink=0.5, patience=1))
        for value in (3.0, 2.0, 2.5, 2.5, 2.5):
            trainer.observe(value)  # improves twice, then stands still three times: reduced after the second
        assert trainer.step([1.0]).lr == 0.5

    on_threads(2, run)


@pytest.mark.filterwarnings("ignore:.*not finite")
def test_a_step_that_is_not_finite_changes_nothing_and_ends_at_last() -> None:
    def run(context: Any) -> None:
        model = hpctrain.torch.adapt(Scalar(), linear)
        trainer = Trainer(context, model, optimizer=hpctrain.AdamW(), max_skips=2)
        assert trainer.step([float("nan") if context.rank else 1.0]).skipped == "not finite"
        assert float(model.parameter("w")) == 1 and trainer.num_updates == 0
        with pytest.raises(NonFiniteError):
            trainer.step([float("nan") if context.rank else 1.0])

    on_threads(2, run)


def test_no_data_anywhere_is_said_and_changes_nothing() -> None:
    def run(context: Any) -> None:
        model = hpctrain.torch.adapt(Scalar(), linear)
        trainer = Trainer(context, model, optimizer=hpctrain.AdamW())
        result = trainer.step([])
        assert (result.skipped, result.weight, trainer.num_updates) == ("no data", 0, 0)
        assert float(model.parameter("w")) == 1

    on_threads(2, run)


def groups() -> list[hpctrain.ParameterGroup]:
    return [hpctrain.ParameterGroup("no decay", ("*bias",), lr=0.01, weight_decay=0.0,
                                    schedule=hpctrain.WarmupLinear(2, 8)),
            hpctrain.ParameterGroup("empty", ("nothing-has-this-name",), schedule=hpctrain.Plateau())]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_groups_equal_torch_and_keep_empty_ones(num_ranks: int) -> None:
    batches = parity.global_batches(5, 6, torch.float64)
    module = parity.TinyNet()
    named = {n: p for n, p in module.named_parameters() if p.requires_grad}
    bias = [p for n, p in named.items() if n.endswith("bias")]
    rest = [p for n, p in named.items() if not n.endswith("bias")]
    optimizer = torch.optim.AdamW([{"params": bias, "lr": 0.01, "weight_decay": 0.0}, {"params": rest}], lr=0.02,
                                  weight_decay=0.1)
    shape = hpctrain.WarmupLinear(2, 8)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda u: shape.factor(u, {}), lambda u: 1.0])
    optimizer.register_step_post_hook(lambda *args: scheduler.step())
    truth = parity.reference(module, parity.torch_loss, batches, optimizer, None)

    def run(context: Any) -> None:
        model = hpctrain.torch.adapt(parity.TinyNet(), parity.torch_loss)
        trace = parity.train(context, model, batches, 2, optimizer=hpctrain.AdamW(lr=0.02, weight_decay=0.1),
                             groups=groups())
        parity.assert_same(trace, truth, 1e-10)
        trainer = Trainer(context, model, optimizer=hpctrain.AdamW(), groups=groups())
        assert list(trainer.optimizer.schedule_state()) == ["no decay", "empty", "default"]
        assert len(trainer.optimizer.learning_rates(0)) == 3

    on_threads(num_ranks, run)


class Silent:
    """A model that reports no gradient before the end: nothing overlaps with backward."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def backward(self, stash: Any, output_grads: Any, deliver: Any, scale: float = 1.0) -> Any:
        kept = []
        result = self._model.backward(stash, output_grads, lambda name, g: kept.append((name, g.clone())), scale)
        for name, gradient in kept:
            deliver(name, gradient)
        return result


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_overlap_changes_no_bit(num_ranks: int, dtype: torch.dtype) -> None:
    batches = parity.global_batches(8, 7, dtype)

    def run(context: Any, wrap: Any) -> Any:
        model = wrap(hpctrain.torch.adapt(parity.TinyNet(dtype), parity.torch_loss))
        return parity.train(context, model, batches, 2, optimizer=hpctrain.AdamW(lr=0.02), clip_norm=0.5,
                            zero=hpctrain.Zero(bucket_bytes=64))

    on, off = (on_threads(num_ranks, lambda c, w=wrap: run(c, w)) for wrap in (lambda m: m, Silent))
    for a, b in zip(on, off, strict=True):
        assert a.losses == b.losses and a.norms == b.norms
        assert all(np.array_equal(a.weights[n], b.weights[n]) for n in a.weights)
        assert all(np.array_equal(a.weights[n], on[0].weights[n]) for n in a.weights), "ranks differ"


def test_unused_parameters_are_named() -> None:
    def run(context: Any) -> None:
        model = hpctrain.torch.adapt(parity.TinyNet(), parity.torch_loss)
        trainer = Trainer(context, model, optimizer=hpctrain.AdamW())
        trainer.step(parity.global_batches(1, 4, torch.float64))
        assert trainer.unused == {"unused.weight", "unused.bias", "nothing"}

    on_threads(2, run)


def test_a_zero_grad_by_the_user_does_no_harm() -> None:
    def run(context: Any) -> None:
        module = Scalar()
        trainer = Trainer(context, hpctrain.torch.adapt(module, half_square), optimizer=hpctrain.SGD(lr=0.0))
        module.zero_grad(set_to_none=True)
        trainer.step([[2.0], [1.0]])
        assert float(dict(trainer.gradients())["w"][0]) == pytest.approx(2.5)

    on_threads(2, run)


def test_the_newest_trainer_of_a_module_works_and_the_older_one_refuses() -> None:
    def run(context: Any) -> None:
        module = Scalar()
        older, newer = (Trainer(context, hpctrain.torch.adapt(module, half_square), optimizer=hpctrain.SGD(lr=0.0))
                        for _ in range(2))
        newer.step([[2.0], [1.0]])
        assert float(dict(newer.gradients())["w"][0]) == pytest.approx(2.5)
        with pytest.raises(ConfigError, match="'w' has moved"):
            older.step([[2.0]])

    on_threads(1, run)


def test_a_module_that_moved_is_refused() -> None:
    def run(context: Any) -> None:
        module = Scalar()
        trainer = Trainer(context, hpctrain.torch.adapt(module, half_square), optimizer=hpctrain.SGD(lr=0.0))
        module.float()
        with pytest.raises(ConfigError, match="'w' has moved"):
            trainer.step([[2.0]])

    on_threads(1, run)


def test_ranks_with_different_models_are_refused_alike() -> None:
    def run(context: Any) -> str:
        module = torch.nn.Linear(3, 2 + context.rank)
        with pytest.raises(ConfigError, match="on rank 1") as error:
            Trainer(context, hpctrain.torch.adapt(module, half_square), optimizer=hpctrain.AdamW())
        return str(error.value)

    assert len(set(on_threads(2, run))) == 1


def test_all_ranks_start_from_rank_0() -> None:
    def run(context: Any) -> np.ndarray:
        module = Scalar()
        module.w.data.fill_(7.0 + context.rank)
        Trainer(context, hpctrain.torch.adapt(module, half_square), optimizer=hpctrain.AdamW())
        return module.w.detach().numpy().copy()

    assert [float(w) for w in on_threads(3, run)] == [7.0] * 3


@pytest.mark.parametrize(("options", "word"), [
    ({"clip_norm": 0.0}, "clip_norm"), ({"groups": [hpctrain.ParameterGroup("default")]}, "default"),
])
def test_bad_options_name_themselves(options: dict[str, Any], word: str) -> None:
    def run(context: Any) -> None:
        with pytest.raises(ConfigError, match=word):
            Trainer(context, hpctrain.torch.adapt(Scalar(), linear), optimizer=hpctrain.AdamW(), **options)

    on_threads(1, run)


def test_parameters_that_cannot_be_trained_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="'weight' is torch.strided on device 'meta'"):
        hpctrain.torch.adapt(torch.nn.Linear(2, 2, device="meta"), linear)


@pytest.mark.parametrize("bad", [3.0, (torch.ones(2), 1.0), torch.ones(())])
def test_a_loss_of_another_form_is_refused(bad: Any) -> None:
    def run(context: Any) -> None:
        trainer = Trainer(context, hpctrain.torch.adapt(Scalar(), lambda m, b: bad), optimizer=hpctrain.AdamW())
        with pytest.raises(ConfigError, match="loss"):
            trainer.step([1.0])

    on_threads(1, run)
