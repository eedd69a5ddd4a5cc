"""Any number of ranks to any other: what was saved comes back bit by bit, and training goes on as if never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import parity
import pytest
import torch

import hpctrain
import hpctrain.torch
from hpctrain.errors import CheckpointError, ConfigError
from hpctrain.runtime.step import Trainer
from hpctrain.transport.threads import run_threads

UPDATES = 6
GROUPS = [hpctrain.ParameterGroup("bias", ("*bias",), lr=0.01, weight_decay=0.0, schedule=hpctrain.WarmupLinear(2, 9)),
          hpctrain.ParameterGroup("empty", ("no-such-name",), schedule=hpctrain.Plateau())]
OPTIMIZERS = {"adamw": hpctrain.AdamW(lr=0.02), "momentum": hpctrain.SGD(lr=0.1, momentum=0.9)}


def make(context: Any, optimizer: str, seed: int | None = None, dtype: torch.dtype = torch.float64) -> Trainer:
    module = parity.TinyNet(dtype)
    module.register_buffer("counts", torch.arange(3))
    if seed is not None:  # other values than those that were saved
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in (*module.parameters(), module.counts):
                tensor.copy_(torch.randint(9, tensor.shape, generator=generator))
    model = hpctrain.torch.adapt(module, parity.torch_loss)
    return Trainer(context, model, optimizer=OPTIMIZERS[optimizer], groups=GROUPS, clip_norm=0.5,
                   zero=hpctrain.Zero(bucket_bytes=100))


def steps(context: Any, trainer: Trainer, batches: list[Any]) -> list[float]:
    return [trainer.step(parity.micro_batches(b, context.rank, context.size, 2)).loss for b in batches]


def state(trainer: Trainer) -> dict[str, np.ndarray]:
    """Every tensor that a checkpoint holds, by its name in the file."""
    model, result = trainer.model, {}
    for placement in model.placements:
        result[placement.name] = np.asarray(model.parameter(placement.name)).copy()
    for slot, arrays in trainer.optimizer.state.items():
        for buffers, array in zip(trainer._flat.trained, arrays, strict=True):
            for s in buffers.layout.slots:
                result[f"optim.{slot}.{s.name}"] = np.asarray(array[s.start : s.stop]).copy()
    return result | {name: np.asarray(b).copy() for name, b in model.buffers().items()}


@pytest.mark.parametrize(("before", "after"), [(4, 2), (4, 3), (4, 1), (2, 4), (1, 3), (2, 2)])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_save_on_some_ranks_and_go_on_on_others(tmp_path: Path, before: int, after: int, optimizer: str) -> None:
    batches = parity.global_batches(UPDATES, 7, torch.float64)

    def unbroken(context: Any) -> tuple[list[float], dict[str, np.ndarray]]:
        trainer = make(context, optimizer)
        return steps(context, trainer, batches), state(trainer)

    def first(context: Any) -> dict[str, np.ndarray]:
        trainer = make(context, optimizer)
        steps(context, trainer, batches[:3])
        trainer.observe(1.0)
        trainer.save(tmp_path, data={"samples": 21})
        return state(trainer)

    def second(context: Any) -> tuple[dict[str, np.ndarray], list[float], dict[str, np.ndarray]]:
        trainer = make(context, optimizer, seed=8 + context.rank)
        assert trainer.resume(tmp_path, policy="require") == {"samples": 21}
        assert trainer.num_updates == 3 and trainer.optimizer.schedule_state()["empty"] == {"best": 1.0, "bad": 0}
        loaded = state(trainer)
        return loaded, steps(context, trainer, batches[3:]), state(trainer)

    losses, truth = run_threads(1, lambda t: unbroken(parity.context_of(t)))[0]
    saved = run_threads(before, lambda t: first(parity.context_of(t)))[0]
    for loaded, later, final in run_threads(after, lambda t: second(parity.context_of(t))):
        assert loaded.keys() == saved.keys()
        assert [n for n in saved if not np.array_equal(loaded[n], saved[n])] == []
        np.testing.assert_allclose(later, losses[3:], rtol=1e-10)
        for name, value in truth.items():
            atol = 1e-10 * float(np.max(np.abs(value), initial=1e-3))
            np.testing.assert_allclose(final[name], value, rtol=0, atol=atol, err_msg=name)


def test_auto_without_a_checkpoint_starts_fresh_and_require_refuses(tmp_path: Path) -> None:
    def run(context: Any) -> None:
        trainer = make(context, "adamw")
        assert trainer.resume(tmp_path / "none") is None
        with pytest.raises(CheckpointError):
            trainer.resume(tmp_path / "none", policy="require")
        with pytest.raises(ConfigError, match="policy"):
            trainer.resume(tmp_path, policy="maybe")

    run_threads(2, lambda t: run(parity.context_of(t)))


def test_another_model_is_refused_by_name_on_all_ranks(tmp_path: Path) -> None:
    def run(context: Any) -> str:
        make(context, "adamw").save(tmp_path)
        other = parity.TinyNet()
        other.down = torch.nn.Linear(parity.WIDTH, 4, dtype=torch.float64)
        trainer = Trainer(context, hpctrain.torch.adapt(other, parity.torch_loss), optimizer=hpctrain.AdamW())
        with pytest.raises(CheckpointError, match=r"'down\.weight' is \(\(3, 5\).* in the file") as error:
            trainer.resume(tmp_path)
        return str(error.value)

    assert len(set(run_threads(2, lambda t: run(parity.context_of(t))))) == 1


def test_optimizer_state_that_the_file_lacks_starts_fresh_with_a_word(tmp_path: Path) -> None:
    def run(context: Any) -> None:
        make(context, "momentum").save(tmp_path)
        trainer = make(context, "adamw", seed=4)
        with pytest.warns(UserWarning, match="no 'exp_avg"):
            trainer.resume(tmp_path)
        assert trainer.num_updates == 0

    run_threads(1, lambda t: run(parity.context_of(t)))


def test_the_random_state_of_a_rank_comes_back_on_the_same_layout(tmp_path: Path) -> None:
    def run(context: Any) -> None:
        trainer = make(context, "adamw")
        torch.manual_seed(11)
        trainer.save(tmp_path)
        drawn = torch.rand(3)
        trainer.resume(tmp_path)
        assert torch.equal(torch.rand(3), drawn)

    run_threads(1, lambda t: run(parity.context_of(t)))
