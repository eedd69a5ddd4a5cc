"""Offload changes where numbers live and not one bit of them; a late update is the one of a sequential simulation."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import parity
import pytest
import torch

import hpctrain
import hpctrain.torch
from hpctrain.errors import ConfigError
from hpctrain.optim import flat as flat_module
from hpctrain.runtime import flat_model as flat_model_module
from hpctrain.runtime.step import Trainer
from hpctrain.transport.threads import run_threads
from tests.collective_cases import to_numpy

ADAMW = hpctrain.AdamW(lr=0.02, weight_decay=0.1)
BFLOAT = hpctrain.Precision(compute="bfloat16")
EVERYTHING = {"states": "disk", "gradients": "disk", "parameters": "disk"}

# name: (stage, share, accumulate, what is on disk)
CASES: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "0 states": (0, "auto", "reduce", {"states": "disk"}),
    "1 states": (1, "auto", "reduce", {"states": "disk"}),
    "2 states": (2, "auto", "buffer", {"states": "disk"}),
    "2 gradients": (2, "auto", "reduce", {"gradients": "disk"}),
    "2 both": (2, "auto", "reduce", {"states": "disk", "gradients": "disk"}),
    "3 node": (3, "node", "reduce", {"states": "disk", "gradients": "disk"}),
    "3 parameters": (3, "none", "reduce", {"parameters": "disk"}),
    "3 all": (3, "none", "reduce", EVERYTHING),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_module, "CHUNK", 16)


def zero(case: str, offload: dict[str, Any] | None, directory: Path, **more: Any) -> hpctrain.Zero:
    stage, share, accumulate, places = CASES[case]
    options = more if offload is None else {**places, **offload, "directory": directory, "window_bytes": 1, **more}
    return hpctrain.Zero(stage, share, accumulate, threshold=8, bucket_bytes=100, offload=options)


def torch_model(dtype: torch.dtype = torch.float32) -> Any:
    return hpctrain.torch.adapt(parity.TinyNet(dtype), parity.torch_loss)


def torch_trace(context: Any, **options: Any) -> parity.Trace:
    return train(context, torch_model(), parity.global_batches(4, 7, torch.float32), **options)


def numpy_trace(context: Any, **options: Any) -> parity.Trace:
    random = np.random.default_rng(2)
    batches = [(random.integers(parity.VOCAB, size=(7, 2)), random.integers(parity.VOCAB, size=7)) for _ in range(4)]
    return train(context, parity.numpy_network("float32"), batches, **options)


def train(context: Any, model: Any, batches: list[Any], **options: Any) -> parity.Trace:
    trainer, trace = Trainer(context, model, optimizer=ADAMW, clip_norm=0.5, **options), parity.Trace()
    for batch in batches:
        result = trainer.step(parity.micro_batches(batch, context.rank, context.size, 2))
        trace.losses.append(result.loss)
        trace.norms.append(result.gradient_norm)
        trace.gradients |= {f"{result.update} {name}": to_numpy(g) for name, g in trainer.gradients()}
    trace.weights = {name: to_numpy(w) for name, w in trainer.parameters()}
    return trace


def same_bits(a: parity.Trace, b: parity.Trace) -> None:
    assert a.losses == b.losses and a.norms == b.norms
    for mine, theirs in ((a.gradients, b.gradients), (a.weights, b.weights)):
        assert mine.keys() == theirs.keys()
        assert [name for name in mine if not np.array_equal(mine[name], theirs[name])] == []


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("trace", [torch_trace, numpy_trace])
def test_on_disk_and_not_are_the_same_bits(tmp_path: Path, case: str, num_ranks: int, trace: Any) -> None:
    for precision in (hpctrain.Precision(), BFLOAT) if trace is torch_trace else (hpctrain.Precision(),):
        def run(transport: Any, offload: Any, precision: Any = precision) -> parity.Trace:
            return trace(parity.context_of(transport), precision=precision, zero=zero(case, offload, tmp_path))

        truth = run_threads(num_ranks, lambda t, run=run: run(t, None))
        for plain, disk in zip(truth, run_threads(num_ranks, lambda t, run=run: run(t, {})), strict=True):
            same_bits(disk, plain)


def test_what_is_on_disk(tmp_path: Path) -> None:
    def run(context: Any) -> tuple[int, int]:
        trainer = Trainer(context, torch_model(), optimizer=ADAMW, precision=BFLOAT,
                          zero=zero("3 all", {}, tmp_path))
        lender: Any = trainer._flat.lender
        return len(lender._lent), lender.num_bytes

    # parameters (three buffers: trained and large, frozen), gradients, master, two moments of those that are trained
    for arrays, num_bytes in run_threads(2, lambda t: run(parity.context_of(t))):
        assert arrays >= 6 and num_bytes >= 4096 * arrays
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    def run(transport: Any) -> str:
        where = tmp_path if transport.rank else tmp_path / "none"
        with pytest.raises(ConfigError, match=r"offload\.directory = .*none' cannot be used: No such file") as error:
            Trainer(parity.context_of(transport), torch_model(), optimizer=ADAMW, zero=zero("1 states", {}, where))
        return str(error.value)

    assert len(set(run_threads(3, run))) == 1


def test_host_is_memory_here_and_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(flat_model_module.log, "warning", said.append)

    def run(transport: Any, **places: str) -> parity.Trace:
        return torch_trace(parity.context_of(transport), zero=hpctrain.Zero(2, offload=places))

    host = run_threads(2, lambda t: run(t, states="host", gradients="host"))
    assert len(said) == 1 and "'host' changes nothing here" in said[0]
    same_bits(host[1], run_threads(2, run)[1])
    assert len(said) == 1


# Late updates ---------------------------------------------------------------------------------------------------------

START, STEPS = 2, 6


def sequential(batches: list[Any], clip_norm: float | None, steps: int = STEPS) -> parity.Trace:
    """Delay 1 in plain torch: from START on, update i is applied when step i + 1 has computed its gradient.

    A gradient that is not finite is forgotten. Gradients are named after the update that they are for.
    """
    module = parity.TinyNet(torch.float64)
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=0.02, weight_decay=0.1)
    trace, waits, update = parity.Trace(), None, 0
    for batch in batches[:steps]:
        for p in trained.values():
            p.grad = torch.zeros_like(p)
        loss_sum, weight = parity.torch_loss(module, batch)
        (loss_sum / weight).backward()
        gradients = {n: p.grad.numpy().copy() for n, p in trained.items()}
        trace.losses.append(loss_sum.item() / weight)
        trace.norms.append(parity.clip(trained, clip_norm))
        fresh = {n: p.grad.clone() for n, p in trained.items()}
        if waits is not None:
            for n, p in trained.items():
                p.grad = waits[n]
            optimizer.step()
            waits = None
        if not np.isfinite(trace.norms[-1]):
            continue
        update += 1
        trace.gradients |= {f"{update} {n}": g for n, g in gradients.items()}
        if update > START:
            waits = fresh
        else:
            optimizer.step()
    trace.weights = {n: p.detach().numpy().copy() for n, p in module.named_parameters()}
    return trace


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_late_update_is_that_of_a_sequential_simulation(tmp_path: Path, case: str, num_ranks: int) -> None:
    batches = parity.global_batches(STEPS, 7, torch.float64)
    truth = sequential(batches, 0.5)
    assert truth.losses != parity.reference(parity.TinyNet(), parity.torch_loss, batches, torch.optim.AdamW(
        parity.TinyNet().parameters()), 0.5).losses

    def run(transport: Any, offload: Any) -> parity.Trace:
        late = zero(case, offload, tmp_path, delay=True, delay_start=START)
        return train(parity.context_of(transport), torch_model(torch.float64), batches, zero=late)

    for offload in (None, {}):
        for trace in run_threads(num_ranks, lambda t, offload=offload: run(t, offload)):
            parity.assert_same(trace, truth, 1e-12)


def test_a_step_that_is_skipped_keeps_nothing_and_the_update_before_it_is_applied(tmp_path: Path) -> None:
    batches = parity.global_batches(STEPS, 7, torch.float64)
    batches[3][2][5] = float("nan")
    truth = sequential(batches, 0.5)

    def run(context: Any) -> parity.Trace:
        late = zero("2 both", {}, tmp_path, delay=True, delay_start=START)
        trainer = Trainer(context, torch_model(torch.float64), optimizer=ADAMW, clip_norm=0.5, zero=late)
        trace = parity.Trace()
        for i, batch in enumerate(batches):
            result = trainer.step(parity.micro_batches(batch, context.rank, context.size, 2))
            assert result.update == i + 1 - (i >= 3) and (result.skipped == "not finite") == (i == 3)
            trace.losses.append(result.loss)
            trace.norms.append(result.gradient_norm)
        trace.weights = {name: to_numpy(w) for name, w in trainer.parameters()}
        return trace

    with pytest.warns(UserWarning, match="not finite"):
        traces = run_threads(2, lambda t: run(parity.context_of(t)))
    truth.gradients = {}
    for trace in traces:
        parity.assert_same(trace, truth, 1e-12)


def test_late_updates_of_half_precision_are_the_same_at_all_stages(tmp_path: Path) -> None:
    def run(transport: Any, case: str, offload: Any) -> parity.Trace:
        return torch_trace(parity.context_of(transport), precision=BFLOAT,
                           zero=zero(case, offload, tmp_path, delay=True, delay_start=1))

    truth = run_threads(1, lambda t: run(t, "0 states", None))[0]
    for case in CASES:
        plain, disk = (run_threads(1, lambda t, case=case, o=o: run(t, case, o))[0] for o in (None, {}))
        same_bits(disk, plain)
        np.testing.assert_allclose(disk.losses, truth.losses, rtol=1e-2)


def test_a_late_update_runs_while_the_next_step_computes(tmp_path: Path) -> None:
    """Forward waits for the update to have begun, the update for forward: one after the other would hang."""

    def run(context: Any) -> None:
        model = torch_model()
        options = zero("0 states", None, tmp_path, delay=True, delay_start=0)
        trainer = Trainer(context, model, optimizer=ADAMW, zero=options)
        updates, passes = Event(), Event()
        apply, forward = trainer.optimizer.apply, model.forward

        def slow_apply(*args: Any) -> None:
            updates.set()
            assert passes.wait(20)
            apply(*args)

        def slow_forward(*args: Any, **kwargs: Any) -> Any:
            assert updates.wait(20)
            passes.set()
            return forward(*args, **kwargs)

        batches = parity.global_batches(2, 3, torch.float32)
        trainer.step([batches[0]])
        trainer.optimizer.apply, model.forward = slow_apply, slow_forward  # type: ignore[method-assign]
        trainer.step([batches[1]])

    run_threads(1, lambda t: run(parity.context_of(t)))


@pytest.mark.parametrize(("before", "after"), [((3, "3 all"), (2, "0 states")), ((1, "2 both"), (3, "3 all")),
                                               ((2, "3 node"), (1, "1 states"))])
def test_waiting_gradients_go_through_a_checkpoint_to_any_layout(tmp_path: Path, before: Any, after: Any) -> None:
    batches = parity.global_batches(STEPS, 7, torch.float64)
    truth = sequential(batches, None)

    def trainer_of(context: Any, case: str, **more: Any) -> Trainer:
        return Trainer(context, torch_model(torch.float64), optimizer=ADAMW, zero=zero(case, {}, tmp_path, **more))

    def steps(context: Any, trainer: Trainer, some: list[Any]) -> list[float]:
        return [trainer.step(parity.micro_batches(b, context.rank, context.size, 2)).loss for b in some]

    def first(context: Any) -> None:
        trainer = trainer_of(context, before[1], delay=True, delay_start=START)
        steps(context, trainer, batches[:4])
        trainer.save(tmp_path / "saved")

    def weights(trainer: Trainer) -> dict[str, np.ndarray]:
        return {name: np.asarray(value) for name, value in trainer.parameters()}

    def second(context: Any) -> tuple[list[float], dict[str, np.ndarray]]:
        trainer = trainer_of(context, after[1], delay=True, delay_start=START)
        trainer.resume(tmp_path / "saved", policy="require")
        assert trainer.num_updates == 4
        return steps(context, trainer, batches[4:]), weights(trainer)

    def without(context: Any) -> dict[str, np.ndarray]:
        """An update that waits is applied where updates do not come late."""
        trainer = trainer_of(context, after[1])
        trainer.resume(tmp_path / "saved", policy="require")
        return weights(trainer)

    run_threads(before[0], lambda t: first(parity.context_of(t)))
    for losses, values in run_threads(after[0], lambda t: second(parity.context_of(t))):
        np.testing.assert_allclose(losses, truth.losses[4:], rtol=1e-12)
        for name, value in truth.weights.items():
            np.testing.assert_allclose(values[name], value.ravel(), rtol=0, atol=1e-12)
    later = sequential(batches, None, 5).weights  # the update of step 4 is applied in step 5
    for values in run_threads(after[0], lambda t: without(parity.context_of(t))):
        for name, value in later.items():
            np.testing.assert_allclose(values[name], value.ravel(), rtol=0, atol=1e-12)
