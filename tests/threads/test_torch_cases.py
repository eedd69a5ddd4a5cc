"""Groups, norms, ties and thawing of torch modules on several ranks: cases in which trainers went wrong."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import parity
import pytest
import torch
import torch_models
from torch import nn

import hpctrain
import hpctrain.torch
from hpctrain.runtime.step import Trainer
from hpctrain.transport.threads import run_threads

Zero = hpctrain.Zero
STAGES = [Zero(0), Zero(1), Zero(2), Zero(3, "node"), Zero(3, "none", threshold=0)]
NAMES = [f"{z.stage}-{z.share}" for z in STAGES]


class Tied(nn.Module):
    """One matrix of one element at both ends; the loss gives each end the gradient that the batch holds."""

    def __init__(self, value: float = 2.0) -> None:
        super().__init__()
        self.embedding = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        self.head = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.constant_(self.embedding.weight, value)
        self.head.weight = self.embedding.weight

    def forward(self, gradients: torch.Tensor) -> torch.Tensor:
        return self.embedding(gradients[:, :1]) + self.head(gradients[:, 1:])


def tied_loss(module: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
    return module(batch).sum(), float(len(batch))


@pytest.mark.parametrize("zero", STAGES, ids=NAMES)
def test_a_tied_matrix_gets_the_gradients_of_both_ends_once(zero: Zero) -> None:
    """(1 + 3) / 2 from one end, (10 + 20) / 2 from the other: 17; saved once, with its other name."""
    data = torch.tensor([[1.0, 10.0], [3.0, 20.0]], dtype=torch.float64)
    twin = Tied()
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.1, weight_decay=0.3)
    for _ in range(20):
        optimizer.zero_grad()
        (twin(data).sum() / 2).backward()
        optimizer.step()

    with tempfile.TemporaryDirectory() as root:
        def run(transport: Any) -> None:
            def make(value: float) -> Trainer:
                model = hpctrain.torch.adapt(Tied(value), tied_loss)
                return Trainer(parity.context_of(transport), model, zero=zero,
                               optimizer=hpctrain.AdamW(lr=0.1, weight_decay=0.3))

            trainer = make(2.0)
            for _ in range(20):
                result = trainer.step([data[transport.rank : transport.rank + 1]])
                assert result.gradient_norm == 17.0
                assert [(n, g.tolist()) for n, g in trainer.gradients()] == [("embedding.weight", [17.0])]
            saved = {n: v.tolist() for n, v in trainer.parameters()}
            np.testing.assert_allclose(saved["embedding.weight"], twin.head.weight.detach().numpy()[0], rtol=1e-12)
            trainer.save(Path(root))
            again = make(5.0)
            again.resume(Path(root))
            assert {n: v.tolist() for n, v in again.parameters()} == saved

        run_threads(2, run)

        def other(transport: Any) -> None:
            model = hpctrain.torch.adapt(Tied(5.0), tied_loss)
            again = Trainer(parity.context_of(transport), model, zero=zero, optimizer=hpctrain.AdamW(lr=0.1))
            again.resume(Path(root))
            (value,) = [float(v) for _, v in again.parameters()]
            np.testing.assert_allclose(value, float(twin.head.weight.detach()), rtol=1e-12)

        run_threads(3, other)


@pytest.mark.parametrize("zero", STAGES, ids=NAMES)
@pytest.mark.parametrize("kind", ["l2", "l1", "inf"])
def test_a_norm_that_all_ranks_have_is_not_added_up_over_them(kind: str, zero: Zero) -> None:
    """Gradient norm 0.8 on both ranks, limit 1: 0.8, and nothing is clipped."""
    def run(transport: Any) -> None:
        model = hpctrain.torch.adapt(Tied(), tied_loss)
        trainer = Trainer(parity.context_of(transport), model, optimizer=hpctrain.SGD(lr=1.0), zero=zero, clip_norm=1.0,
                          norm_kind=kind)
        result = trainer.step([torch.tensor([[0.3, 0.5]], dtype=torch.float64)])
        assert result.gradient_norm == pytest.approx(0.8, rel=1e-15)
        assert dict(trainer.parameters())["embedding.weight"].tolist() == pytest.approx([1.2], rel=1e-15)

    run_threads(2, run)


@pytest.mark.parametrize("zero", STAGES, ids=NAMES)
def test_groups_with_own_schedules_one_of_them_empty(zero: Zero) -> None:
    batches = torch_models.batches(4, 5)
    module = torch_models.make("stack")
    decay = [p for n, p in module.named_parameters() if n.endswith("weight") and "norm" not in n]
    rest = [p for n, p in module.named_parameters() if not (n.endswith("weight") and "norm" not in n)]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1, "lr": 0.02},
                                   {"params": rest, "weight_decay": 0.0, "lr": 0.05}])
    losses = []
    for step, batch in enumerate(batches):  # the second group warms up over 3 updates, the others are constant
        optimizer.param_groups[1]["lr"] = 0.05 * min(1.0, (step + 1) / 3)
        optimizer.zero_grad()
        loss_sum, weight = torch_models.loss(module, batch)
        (loss_sum / weight).backward()
        optimizer.step()
        losses.append(loss_sum.item() / weight)
    truth = {n: p.detach().numpy() for n, p in module.named_parameters()}

    def run(transport: Any) -> None:
        model = hpctrain.torch.adapt(torch_models.make("stack"), torch_models.loss)
        rest = hpctrain.ParameterGroup("rest", ("*.norm.weight", "*.bias"), lr=0.05, weight_decay=0.0,
                                       schedule=hpctrain.WarmupLinear(3, 10**9))
        trainer = Trainer(parity.context_of(transport), model, zero=zero,
                          optimizer=hpctrain.AdamW(lr=0.02, weight_decay=0.1),
                          groups=[hpctrain.ParameterGroup("none", ("nothing.*",), lr=9.0), rest])
        ours = [trainer.step(parity.micro_batches(b, transport.rank, transport.size, 1)).loss for b in batches]
        np.testing.assert_allclose(ours, losses, rtol=1e-8)
        for name, value in trainer.parameters():
            np.testing.assert_allclose(value, truth[name].reshape(-1), rtol=0, atol=1e-8, err_msg=name)

    run_threads(2, run)


@pytest.mark.filterwarnings("ignore:.*this optimizer state starts fresh")
@pytest.mark.parametrize("zero", STAGES, ids=NAMES)
def test_thawing_on_resume_goes_on_unbroken(zero: Zero) -> None:
    """Frozen but one layer, saved, loaded into other values, two layers thawed: the one goes on, they start fresh."""
    batches = torch_models.batches(5, 4)

    def freeze(module: nn.Module, *trained: str) -> nn.Module:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name.startswith(trained))
        return module

    twin = freeze(torch_models.make("stack"), "first")
    optimizer = torch.optim.AdamW(twin.first.parameters(), lr=0.02, weight_decay=0.1)
    losses = []
    for batch in batches[:4]:
        optimizer.zero_grad()
        loss_sum, weight = torch_models.loss(twin, batch)
        (loss_sum / weight).backward()
        optimizer.step()
        losses.append(loss_sum.item() / weight)

    with tempfile.TemporaryDirectory() as root:
        def run(transport: Any) -> None:
            def trainer_of(module: nn.Module) -> Trainer:
                return Trainer(parity.context_of(transport), hpctrain.torch.adapt(module, torch_models.loss), zero=zero,
                               optimizer=hpctrain.AdamW(lr=0.02, weight_decay=0.1))

            def step(trainer: Trainer, batch: Any) -> float:
                return trainer.step(parity.micro_batches(batch, transport.rank, transport.size, 1)).loss

            trainer = trainer_of(freeze(torch_models.make("stack"), "first"))
            ours = [step(trainer, batch) for batch in batches[:3]]
            states = sum(s.numel() for slot in trainer.optimizer.state.values() for s in slot)
            assert states <= 2 * (48 + 16)  # of the one layer, padding included
            frozen = {n: v for n, v in trainer.parameters() if not n.startswith("first")}
            trainer.save(Path(root))
            module = torch_models.make("stack")
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(1)
            trainer = trainer_of(freeze(module, "first", "last", "blocks.1"))
            trainer.resume(Path(root))
            assert all(torch.equal(v, frozen[n]) for n, v in trainer.parameters() if n in frozen)
            ours += [step(trainer, batch) for batch in batches[3:]]
            np.testing.assert_allclose(ours[:4], losses, rtol=1e-10)
            moved = {n for n, v in trainer.parameters() if n in frozen and not torch.equal(v, frozen[n])}
            assert moved == {n for n in frozen if n.startswith(("last", "blocks.1"))}

        run_threads(2, run)
