"""What one ZeRO stage saved, any other goes on with, on any number of ranks and in other types."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import parity
import pytest
import torch

import hpctrain
import hpctrain.torch
from hpctrain.runtime.step import Trainer
from hpctrain.transport.threads import run_threads

Zero = hpctrain.Zero
STAGES = {"0": Zero(0, bucket_bytes=100), "1": Zero(1, bucket_bytes=100), "2": Zero(2, bucket_bytes=100),
          "3 node": Zero(3, "node", "buffer", bucket_bytes=100), "3 none": Zero(3, "none", threshold=8)}
HALF, WIDE = hpctrain.Precision(compute="bfloat16"), hpctrain.Precision()
UPDATES = 4


def make(context: Any, zero: Zero, precision: hpctrain.Precision = WIDE, dtype: torch.dtype = torch.float64,
         fill: float | None = None) -> Trainer:
    module = parity.TinyNet(dtype)
    if fill is not None:  # other values than those that were saved
        with torch.no_grad():
            for tensor in module.parameters():
                tensor.fill_(fill)
    return Trainer(context, hpctrain.torch.adapt(module, parity.torch_loss), optimizer=hpctrain.AdamW(lr=0.02),
                   zero=zero, precision=precision, clip_norm=0.5)


def steps(context: Any, trainer: Trainer, batches: list[Any]) -> list[float]:
    return [trainer.step(parity.micro_batches(b, context.rank, context.size, 2)).loss for b in batches]


def bits(trainer: Trainer) -> dict[str, np.ndarray]:
    return {name: value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
            for name, value in trainer.parameters()}


@pytest.mark.parametrize("before", STAGES)
@pytest.mark.parametrize("ranks", [(3, 2), (2, 4), (1, 3), (4, 1)], ids=lambda r: f"{r[0]}to{r[1]}")
def test_every_stage_goes_on_from_every_other(tmp_path: Path, before: str, ranks: tuple[int, int]) -> None:
    batches = parity.global_batches(UPDATES, 7, torch.float64)

    def first(context: Any) -> dict[str, np.ndarray]:
        trainer = make(context, STAGES[before])
        steps(context, trainer, batches[:2])
        trainer.save(tmp_path)
        return bits(trainer)

    def second(context: Any, zero: Zero) -> tuple[dict[str, np.ndarray], list[float]]:
        trainer = make(context, zero, fill=3.0)
        trainer.resume(tmp_path, policy="require")
        return bits(trainer), steps(context, trainer, batches[2:])

    truth = run_threads(1, lambda t: steps(parity.context_of(t), make(parity.context_of(t), Zero()), batches))[0]
    saved = run_threads(ranks[0], lambda t: first(parity.context_of(t)))[0]
    for zero in STAGES.values():
        for loaded, later in run_threads(ranks[1], lambda t, z=zero: second(parity.context_of(t), z)):
            assert [n for n in saved if not np.array_equal(loaded[n], saved[n])] == []
            np.testing.assert_allclose(later, truth[2:], rtol=1e-10)


@pytest.mark.parametrize("before", STAGES)
def test_half_precision_goes_on_bit_by_bit(tmp_path: Path, before: str) -> None:
    """The master is what is saved, so that nothing is rounded on the way."""
    batches = parity.global_batches(UPDATES, 6, torch.float32)

    def unbroken(context: Any) -> dict[str, np.ndarray]:
        trainer = make(context, STAGES[before], HALF, torch.float32)
        steps(context, trainer, batches)
        return bits(trainer)

    def first(context: Any) -> None:
        trainer = make(context, STAGES[before], HALF, torch.float32)
        steps(context, trainer, batches[:2])
        trainer.save(tmp_path)

    def second(context: Any, zero: Zero) -> dict[str, np.ndarray]:
        trainer = make(context, zero, HALF, torch.float32, fill=3.0)
        trainer.resume(tmp_path, policy="require")
        steps(context, trainer, batches[2:])
        return bits(trainer)

    truth = run_threads(2, lambda t: unbroken(parity.context_of(t)))[0]
    run_threads(2, lambda t: first(parity.context_of(t)))
    zero = STAGES[before]
    for loaded in run_threads(2, lambda t: second(parity.context_of(t), zero)):
        assert [n for n in truth if not np.array_equal(loaded[n], truth[n])] == []


@pytest.mark.parametrize("name", STAGES)
def test_no_rank_goes_on_before_all_have_loaded(tmp_path: Path, name: str) -> None:
    batches = parity.global_batches(2, 6, torch.float32)

    def run(context: Any) -> None:
        trainer = make(context, STAGES[name], HALF, torch.float32)
        steps(context, trainer, batches[:1])
        trainer.save(tmp_path)
        expected = steps(context, trainer, batches[1:])
        again = make(context, STAGES[name], HALF, torch.float32, fill=3.0)
        loaded = again._flat.parameters.loaded

        def late() -> None:
            time.sleep(0.05 * (context.rank == 1))
            loaded()

        again._flat.parameters.loaded = late  # type: ignore[method-assign]
        again.resume(tmp_path)
        assert steps(context, again, batches[1:]) == pytest.approx(expected, rel=1e-12)

    run_threads(2, lambda t: run(parity.context_of(t)))


def test_once_per_node_on_several_nodes_goes_on(tmp_path: Path) -> None:
    """From one node to two: frozen parameters and masters reach both."""
    batches = parity.global_batches(2, 6, torch.float32)

    def save(context: Any) -> tuple[dict[str, np.ndarray], list[float]]:
        trainer = make(context, STAGES["1"], HALF, torch.float32)
        steps(context, trainer, batches[:1])
        trainer.save(tmp_path)
        return bits(trainer), steps(context, trainer, batches[1:])

    def load(context: Any) -> tuple[dict[str, np.ndarray], list[float]]:
        trainer = make(context, STAGES["3 node"], HALF, torch.float32, fill=3.0)
        trainer.resume(tmp_path, policy="require")
        return bits(trainer), steps(context, trainer, batches[1:])

    saved, truth = run_threads(2, lambda t: save(parity.context_of(t)))[0]
    for loaded, later in run_threads(4, lambda t: load(parity.context_of(t)), ranks_per_node=2):
        assert [n for n in saved if not np.array_equal(loaded[n], saved[n])] == []
        np.testing.assert_allclose(later, truth, rtol=1e-2)


def test_other_types_take_the_values_over(tmp_path: Path) -> None:
    batches = parity.global_batches(1, 6, torch.float32)

    def save(context: Any) -> dict[str, np.ndarray]:
        trainer = make(context, Zero(1), WIDE, torch.float32)
        steps(context, trainer, batches)
        trainer.save(tmp_path)
        return bits(trainer)

    saved = run_threads(2, lambda t: save(parity.context_of(t)))[0]

    def load(context: Any, precision: hpctrain.Precision, dtype: torch.dtype) -> dict[str, np.ndarray]:
        trainer = make(context, Zero(3, "none", threshold=8), precision, dtype, fill=3.0)
        trainer.resume(tmp_path, policy="require")
        return bits(trainer)

    for loaded in run_threads(3, lambda t: load(parity.context_of(t), WIDE, torch.float64)):
        assert all(np.array_equal(loaded[n], saved[n].astype(np.float64)) for n in saved)
    for loaded in run_threads(3, lambda t: load(parity.context_of(t), HALF, torch.float32)):
        for name, value in saved.items():
            assert np.array_equal(loaded[name], torch.from_numpy(value).bfloat16().float().numpy()), name


def test_the_loss_scale_is_saved(tmp_path: Path) -> None:
    def run(context: Any) -> None:
        def fresh() -> Trainer:
            return Trainer(context, hpctrain.torch.adapt(parity.TinyNet(torch.float32), parity.torch_loss),
                           optimizer=hpctrain.AdamW(), precision=hpctrain.Precision(compute="float16"),
                           loss_scale=hpctrain.LossScale(initial=4.0, interval=2))

        trainer = fresh()
        steps(context, trainer, parity.global_batches(3, 4, torch.float32))
        assert trainer.loss_scale.scale == 8.0 and trainer.loss_scale.clean == 1
        trainer.save(tmp_path)
        again = fresh()
        again.resume(tmp_path)
        assert again.loss_scale == trainer.loss_scale

    run_threads(2, lambda t: run(parity.context_of(t)))
