"""Unmodified torch modules at every stage of ZeRO equal one process, however they use their parameters."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import parity
import pytest
import torch
import torch_models
from torch import nn

import hpctrain
import hpctrain.torch
from hpctrain.errors import ConfigError, UnsupportedError
from hpctrain.runtime.step import Trainer
from hpctrain.transport.threads import run_threads

Zero = hpctrain.Zero
SPREAD = Zero(3, "none", threshold=0, bucket_bytes=100)


def trainer_of(transport: Any, name: str = "stack", zero: Any = SPREAD, **options: Any) -> Trainer:
    model = hpctrain.torch.adapt(torch_models.make(name), torch_models.loss)
    return Trainer(parity.context_of(transport), model, optimizer=hpctrain.AdamW(lr=0.02, weight_decay=0.1), zero=zero,
                   **options)


def share(transport: Any, batch: Any) -> list[Any]:
    return parity.micro_batches(batch, transport.rank, transport.size, 1)


def truth_of(name: str, batches: list[Any], clip_norm: float | None = None) -> parity.Trace:
    module = torch_models.make(name)
    optimizer = torch.optim.AdamW((p for p in module.parameters() if p.requires_grad), lr=0.02, weight_decay=0.1)
    return parity.reference(module, torch_models.loss, batches, optimizer, clip_norm)


@pytest.mark.parametrize("name", torch_models.MODULES)
@pytest.mark.parametrize("zero", [Zero(0), Zero(1), Zero(2), Zero(3, "node"), SPREAD, Zero(3, "none", "buffer", 0)],
                         ids=lambda z: f"{z.stage}-{z.share}-{z.accumulate}")
def test_modules_equal_one_process(name: str, zero: Zero) -> None:
    batches = torch_models.batches(3, 5)
    truth = truth_of(name, batches, 0.5)

    def run(transport: Any) -> None:
        model = hpctrain.torch.adapt(torch_models.make(name), torch_models.loss)
        trace = parity.train(parity.context_of(transport), model, batches, 2, clip_norm=0.5, zero=zero,
                             optimizer=hpctrain.AdamW(lr=0.02, weight_decay=0.1))
        parity.assert_same(trace, truth, 1e-10)

    for num_ranks in (1, 3) if zero.stage == 3 else (2,):
        run_threads(num_ranks, run)


@pytest.mark.parametrize("name", torch_models.MODULES)
def test_units_are_closed_when_they_are_not_used(name: str) -> None:
    """In forward and backward no more than the units of the calls under way have memory; afterwards none has."""
    def run(transport: Any) -> tuple[int, int]:
        trainer = trainer_of(transport, name)
        model, open_now, most = trainer.model, set[int](), 0
        opened, closed = model.open, model.close

        def opens(unit: int) -> Any:
            nonlocal most
            open_now.add(unit)
            most = max(most, len(open_now))
            return opened(unit)

        def closes(unit: int) -> None:
            open_now.discard(unit)
            closed(unit)

        model.open, model.close = opens, closes
        for batch in torch_models.batches(2, 4):
            trainer.step(share(transport, batch))
            trainer.evaluate(share(transport, batch))
        assert not open_now
        assert all(p.untyped_storage().nbytes() == 0 for p in shells(trainer) if p.numel())
        return most, len(model.units)

    most, total = run_threads(2, run)[0]
    assert total >= 3 and most == {"ties": 3, "odd": 2, "inner checkpoint": 2, "routers": 2}.get(name, 1), (most, total)


def shells(trainer: Trainer) -> list[torch.Tensor]:
    with torch._C.DisableTorchFunctionSubclass():
        return [p.detach() for p in trainer.model.module.parameters()]


def test_units_by_rule_and_by_pattern() -> None:
    def units(name: str, *patterns: str) -> set[tuple[str, ...]]:
        return set(hpctrain.torch.adapt(torch_models.make(name), torch_models.loss, units=patterns).units)

    block = tuple(f"{part}.{kind}" for part in ("norm", "up", "down") for kind in ("weight", "bias"))
    blocks = {tuple(f"blocks.{i}.{name}" for name in block) for i in range(3)}
    ends = {(f"{end}.weight", f"{end}.bias") for end in ("first", "last")}
    assert units("stack") == blocks | ends
    assert units("stack", "") == {tuple(n for n, _ in torch_models.make("stack").named_parameters())}
    assert units("stack", "blocks.*.up", "blocks") == {
        *((f"blocks.{i}.up.weight", f"blocks.{i}.up.bias") for i in range(3)),
        tuple(f"blocks.{i}.{name}" for i in range(3) for name in block if not name.startswith("up"))} | ends
    assert units("ties") == {("first.weight", "first.bias"), ("blocks.0.0.weight",), ("blocks.0.0.bias",),
                             ("blocks.1.0.bias",)}
    with pytest.raises(ConfigError, match=r"'block'.*did you mean 'blocks'"):
        units("stack", "block")


def test_touching_a_closed_parameter_says_so() -> None:
    def run(transport: Any) -> None:
        trainer = trainer_of(transport)
        module = trainer.model.module
        weight = module.blocks[1].up.weight
        for touch in (lambda: weight.norm(), lambda: weight.data, lambda: weight + 1, lambda: weight.sum(),
                      lambda: nn.init.zeros_(weight), lambda: nn.functional.linear(torch.ones(1, 6).double(), weight),
                      lambda: weight[0], lambda: weight.detach(), lambda: module.state_dict(), lambda: module.float(),
                      lambda: pickle.dumps(weight), lambda: torch.save(module.blocks[1].up, io.BytesIO())):
            with pytest.raises(UnsupportedError, match=r"parameter '.*'.* touched .*gathered\(trainer\)"):
                touch()
        assert (weight.shape, weight.dtype, weight.numel(), weight.requires_grad) == ((13, 6), torch.float64, 78, True)
        assert "blocks.1.up.weight" in repr(weight) and "(13, 6)" in repr(weight)
        assert "Linear(in_features=6, out_features=13" in repr(module)
        assert [n for n, _ in module.named_parameters()] == list(module.state_dict(keep_vars=True))
        assert isinstance(weight, nn.Parameter) and weight is module.blocks[1].up.weight
        module.zero_grad()
        twin = copy.deepcopy(module)
        assert [p.shape for p in twin.parameters()] == [p.shape for p in module.parameters()]
        with pytest.raises(UnsupportedError, match=r"'first\.weight'.*deep copy"):
            twin(torch.ones(1, 6).double())
        with pytest.raises(UnsupportedError, match="outside of the trainer"):
            module(torch.ones(1, 6).double())

    run_threads(2, run)


def test_a_parent_that_reads_its_child_is_told_and_works_as_one_unit() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Linear(6, 6, bias=False, dtype=torch.float64)
            nn.init.ones_(self.child.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.child.weight

    def run(transport: Any) -> None:
        batch = torch_models.batches(1, 4)[0]

        def step(**options: Any) -> Any:
            model = hpctrain.torch.adapt(Parent(), torch_models.loss, **options)
            made = Trainer(parity.context_of(transport), model, optimizer=hpctrain.SGD(lr=0.1), zero=SPREAD)
            return made.step(share(transport, batch))

        with pytest.raises(UnsupportedError, match=r"'child\.weight'.*units=\[name of that module\]"):
            step()
        assert step(units=[""]).gradient_norm > 0

    run_threads(2, run)


@pytest.mark.parametrize("zero", [Zero(0), Zero(2), Zero(3, "node"), SPREAD], ids=lambda z: f"{z.stage}-{z.share}")
def test_gathered_reads_and_changes(zero: Zero) -> None:
    before = {n: p.detach().clone() for n, p in torch_models.make("stack").named_parameters()}

    def run(transport: Any) -> None:
        trainer = trainer_of(transport, zero=zero, precision=hpctrain.Precision(compute="float32", master="float64"))
        module = trainer.model.module
        with hpctrain.torch.gathered(trainer):
            assert all(torch.equal(p, before[n].float()) for n, p in module.named_parameters())
            twin = copy.deepcopy(module)
        assert torch.equal(twin(torch.ones(2, 6)), torch_models.make("stack").float()(torch.ones(2, 6)))
        pickle.dumps(twin)
        with hpctrain.torch.gathered(trainer, ["last.weight"]):
            assert torch.equal(module.last.weight, before["last.weight"].float())
            if zero == SPREAD:
                with pytest.raises(UnsupportedError):
                    module.first.weight.sum()
        refused = pytest.raises(ConfigError, match=r"'first\.bias' was changed.*modify=RANK")
        with refused, torch.no_grad(), hpctrain.torch.gathered(trainer, ["first.bias"]):
            module.first.bias.mul_(1)
        root = transport.size - 1
        with hpctrain.torch.gathered(trainer, modify=root):
            if transport.rank == root:
                with torch.no_grad():
                    module.first.weight.fill_(7)
        values = dict(trainer.parameters())
        assert (values["first.weight"] == 7).all()
        masters = trainer._flat.parameters.masters
        held = torch.cat([m.array for m in masters])
        assert (held == 7).sum() > 0 or zero.stage > 0
        assert not torch.equal(held, held.float().double())  # what was not changed keeps the master's bits
        result = trainer.step(share(transport, torch_models.batches(1, 4, torch.float32)[0]))
        assert result.update == 1
        assert not (dict(trainer.parameters())["first.weight"] == 7).any()
        wrong: list[Any] = [({"names": ["first.weigh"]}, "did you mean 'first.weight'"), ({"modify": 9}, "modify = 9")]
        for options, text in wrong:
            with pytest.raises(ConfigError, match=text), hpctrain.torch.gathered(trainer, **options):
                pass

    run_threads(3, run)
    run_threads(4, run, ranks_per_node=2)


@pytest.mark.parametrize("zero", [Zero(0), Zero(2), SPREAD], ids=lambda z: f"{z.stage}-{z.share}")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_on_all_ranks_leaves_the_state_whole(zero: Zero, where: str) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if state["fails"] == "forward":
                raise FloatingPointError("on purpose")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            if state["fails"] == "backward":
                raise FloatingPointError("on purpose")
            return gradient

    state = {"fails": ""}
    batches = torch_models.batches(3, 5)
    truth = truth_of("stack", batches)

    def run(transport: Any) -> None:
        module = torch_models.make("stack")
        module.blocks[1].norm.register_forward_hook(lambda m, args, out: Fails.apply(out))
        model = hpctrain.torch.adapt(module, torch_models.loss)
        trainer = Trainer(parity.context_of(transport), model, optimizer=hpctrain.AdamW(lr=0.02, weight_decay=0.1),
                          zero=zero)
        losses = []
        for number, batch in enumerate(batches):
            if number != 1:
                trainer._group.barrier()
                state["fails"] = where
                trainer._group.barrier()
                with pytest.raises(FloatingPointError):
                    trainer.step(share(transport, batch))
                trainer._group.barrier()
                state["fails"] = ""
                trainer._group.barrier()
            if zero == SPREAD:
                assert all(p.untyped_storage().nbytes() == 0 for p in shells(trainer))
                with pytest.raises(UnsupportedError, match="outside of the trainer"):
                    module(batch[0])
            losses.append(trainer.step(share(transport, batch)).loss)
        np.testing.assert_allclose(losses, truth.losses, rtol=1e-10)

    run_threads(2, run)


@pytest.mark.parametrize("zero", [Zero(0), SPREAD], ids=lambda z: f"{z.stage}-{z.share}")
def test_freezing_thawing_moving_and_replacing_are_errors_on_all_ranks(zero: Zero) -> None:
    def run(transport: Any) -> None:
        batch = torch_models.batches(1, 1)[0]  # the second rank has no data, and raises as well
        for change, text in [
            (lambda m: m.last.requires_grad_(False), r"'last\.weight' was trained .* frozen now.*resume"),
            (lambda m: m.first.requires_grad_(True), r"'first\.weight' was frozen .* trained now"),
            (lambda m: setattr(m.last, "bias", nn.Parameter(torch.zeros(6).double())), "'bias' of Linear was replaced"),
        ]:
            trainer = trainer_of(transport, "frozen below", zero)
            trainer.step(share(transport, batch))
            change(trainer.model.module)
            with pytest.raises(ConfigError, match=text):
                trainer.step(share(transport, batch))

    run_threads(2, run)


def test_a_second_trainer_of_a_module() -> None:
    """Refused while its parameters are spread; within gathered the module changes hands."""
    batches = torch_models.batches(2, 4)

    def run(transport: Any) -> None:
        first = trainer_of(transport)
        module = first.model.module
        with pytest.raises(ConfigError, match="by another trainer"):
            hpctrain.torch.adapt(module, torch_models.loss)
        with hpctrain.torch.gathered(first):
            module.first.requires_grad_(False)
            second = Trainer(first._context, hpctrain.torch.adapt(module, torch_models.loss), zero=SPREAD,
                             optimizer=hpctrain.AdamW(lr=0.02, weight_decay=0.1))
        before = {n: v.clone() for n, v in second.parameters()}
        second.step(share(transport, batches[0]))
        moved = {n for n, v in second.parameters() if not torch.equal(v, before[n])}
        assert moved == before.keys() - {"first.weight", "first.bias"}

    run_threads(2, run)
