"""A backward in two parts gives what autograd gives, for any way to use parameters; and keeps little in between."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import stage_cases
import torch
import torch_models
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hpctrain.torch
from hpctrain.errors import UnsupportedError

WIDTH = torch_models.WIDTH


def squared_error(outputs: Tensor, micro_batch: Any) -> tuple[Tensor, float]:
    return (outputs - micro_batch[1]).square().sum(), float(outputs.numel())


class Used(nn.Module):
    """A matrix, another one and a vector, used as `use` says."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor], *frozen: str) -> None:
        super().__init__()
        self.use = use
        self.w = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.v = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.b = nn.Parameter(torch.empty(WIDTH))
        for name in frozen:
            getattr(self, name).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


class Images(nn.Module):
    """Convolutions of (samples, 4, WIDTH) as vectors, pictures and volumes."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv1d(4, 4, 3, padding=1, groups=2)
        self.two = nn.Conv2d(1, 2, (3, 2), stride=(1, 2), padding=(1, 0), bias=False)
        self.same = nn.Conv2d(2, 2, 3, padding="same", dilation=(1, 2))
        self.three = nn.Conv3d(1, 3, 2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.one(x))
        z = self.same(self.two(y[:, None]))
        volume = self.three(y.reshape(len(x), 1, 2, 2, WIDTH))
        unbatched = self.one(y[0])
        return y + z.sum((1, 2, 3))[:, None, None] + volume.sum((1, 2, 3, 4))[:, None, None] + unbatched


class Table(nn.Module):
    """An embedding whose table is a matrix of a product, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.empty(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.argmax(-1)
        return functional.linear(x + self.table(tokens), self.table.weight) + self.bias


class Penalty(nn.Module):
    """A gradient within the forward, of which there is a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope.square()


class Recurrent(nn.Module):
    """A library's fused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x)[0]


class Inner(torch.autograd.Function):
    """Computes its gradients by a backward of its own, and doubles them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = functional.linear(x, ctx.weight)
        dx, dw = torch.autograd.grad(y, (x, ctx.weight), dy, allow_unused=True)
        return 2 * dx, None if dw is None else 2 * dw


USES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: Used(lambda m, x: functional.linear(x, m.w, m.b)),
    "names": lambda: Used(lambda m, x: functional.linear(weight=m.w, bias=m.b, input=x)),
    "no bias": lambda: Used(lambda m, x: functional.linear(x, m.w)),
    "bias frozen": lambda: Used(lambda m, x: functional.linear(x, m.w, m.b), "b"),
    "weight frozen": lambda: Used(lambda m, x: functional.linear(x, m.w, m.b), "w"),
    "all frozen": lambda: Used(lambda m, x: functional.linear(x, m.w, m.b), "w", "v", "b"),
    "computed bias": lambda: Used(lambda m, x: functional.linear(x, m.w, m.b * 2)),
    "computed weight": lambda: Used(lambda m, x: functional.linear(x, m.w * m.v, m.b)),
    "vectors": lambda: Used(
        lambda m, x: x + (functional.linear(x[0, 1], m.v) + functional.linear(x[0, 0], m.w, m.b))),
    "matmul": lambda: Used(lambda m, x: torch.matmul(x @ m.w, m.v)),
    "product of two": lambda: Used(lambda m, x: x @ (m.w @ m.v)),
    "from the left": lambda: Used(lambda m, x: torch.tanh((m.w @ x.transpose(1, 2)).transpose(1, 2))),
    "transposed": lambda: Used(lambda m, x: x @ m.w.T),
    "flat": lambda: Used(lambda m, x: torch.mm(x.reshape(-1, WIDTH), m.w).mm(m.v).view_as(x)),
    "addmm": lambda: Used(lambda m, x: torch.addmm(m.b, x.reshape(-1, WIDTH), m.w).view_as(x)),
    "addmm scaled": lambda: Used(lambda m, x: torch.addmm(m.b, x.reshape(-1, WIDTH), m.w, alpha=2).view_as(x)),
    "addmm of matrices": lambda: Used(lambda m, x: torch.addmm(m.v, x.reshape(-1, WIDTH)[:WIDTH], m.w).sum() + x),
    "twice": lambda: Used(lambda m, x: functional.linear(torch.tanh(functional.linear(x, m.w, m.b)), m.w, m.b)),
    "straight and not": lambda: Used(lambda m, x: functional.linear(torch.tanh(x @ m.w), m.w) * m.w.sum()),
    "residual": lambda: Used(lambda m, x: x + functional.linear(x, m.w, m.b) + m.b),
    "in place after": lambda: Used(lambda m, x: functional.linear(x, m.w, m.b).mul_(2)),
    "einsum": lambda: Used(lambda m, x: torch.einsum("sti,oi->sto", x, m.w)),
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)),
    "checkpoint twice": lambda: Used(lambda m, x: checkpoint(
        lambda y: functional.linear(torch.tanh(functional.linear(y, m.w, m.b)), m.w, m.b), x, use_reentrant=False)),
    "backward of its own": lambda: Used(lambda m, x: Inner.apply(x, m.w)),
    "images": Images, "table": Table, "penalty": Penalty, "recurrent": Recurrent,
    "norms": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH)),
}


def _made(name: str) -> nn.Module:
    if name in torch_models.MODULES:
        return torch_models.make(name)
    module = USES[name]().double()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return module


@pytest.mark.parametrize("ends", ["between", "alone"])
@pytest.mark.parametrize("name", [*USES, *torch_models.MODULES])
def test_both_parts_equal_autograd(name: str, ends: str) -> None:
    between = ends == "between" or name in ("penalty", "all frozen")
    around = [nn.Linear(WIDTH, WIDTH).double() for _ in range(2)] if between else []
    module = nn.Sequential(*around[:1], _made(name), *around[1:])
    batches = torch_models.batches(2, 5)
    torch.manual_seed(3)
    truth = stage_cases.whole(module, squared_error, batches, 0.7)
    for split, splits in itertools.product((True, False), repeat=2):
        stages = hpctrain.torch.stages(hpctrain.torch.layers(module), len(module), squared_error,
                                       own_autograd=name == "penalty")
        stage_cases.bind(stages)
        torch.manual_seed(3)
        found = stage_cases.by_hand(stages, batches, split=split, splits=splits, scale=0.7)
        stage_cases.assert_equal(found, truth)
        for stage in stages:
            assert all(type(p) is nn.Parameter and p.grad is None for p in stage.module.parameters())


def _first_part(module: nn.Module, x: Tensor, *, splits: bool = True, own_autograd: bool = False) -> Any:
    chain = hpctrain.torch.layers([nn.Linear(WIDTH, WIDTH).double(), module, nn.Identity()])
    stage = hpctrain.torch.stage(chain, 3, 1, squared_error, own_autograd=own_autograd)
    stage.splits = splits
    stage_cases.bind([stage])
    outputs, stash = stage.forward(None, x)
    input_grads, rest = stage.backward_input(stash, torch.ones_like(outputs))
    assert stash.outputs is None  # the graph, which is large, does not wait for the caller
    return stage, input_grads, rest


@pytest.mark.parametrize(("name", "later", "at_once"), [
    ("linear", {"w"}, {"b"}), ("twice", {"w"}, {"b"}), ("addmm", {"w"}, {"b"}),
    ("matmul", {"w", "v"}, set()), ("computed weight", set(), {"w", "v", "b"}), ("bias frozen", {"w"}, set()),
    ("computed bias", {"w"}, {"b"}), ("in place after", {"w"}, {"b"}),
    ("norms", {"1.weight"}, {"0.weight", "0.bias", "1.bias", "2.weight"}),
    ("images", {"one.weight", "two.weight", "three.weight"},
     {"one.weight", "one.bias", "same.weight", "same.bias", "three.bias"}),
])
def test_matrices_and_kernels_are_later(name: str, later: set[str], at_once: set[str]) -> None:
    _, _, rest = _first_part(_made(name), torch.randn(5, 4, WIDTH, dtype=torch.float64))
    assert {use.name for use in rest.kept} == {f"1.{n}" for n in later}
    assert set(rest.finished) == {f"1.{n}" for n in at_once}


@pytest.mark.parametrize(("name", "own_autograd", "later", "at_once"), [
    ("checkpoint twice", False, {"w", "b"}, set()), ("linear", True, {"w", "b"}, set()),
    ("computed bias", True, set(), {"w", "b"}),
    ("images", True, {"one.weight", "one.bias", "two.weight", "three.weight", "three.bias"},
     {"one.weight", "one.bias", "same.weight", "same.bias"}),
])
def test_our_nodes_where_hooks_will_not_do(name: str, own_autograd: bool, later: set[str], at_once: set[str]) -> None:
    _, _, rest = _first_part(_made(name), torch.randn(5, 4, WIDTH, dtype=torch.float64), own_autograd=own_autograd)
    assert {use.name for use in rest.kept} == {f"1.{n}" for n in later}
    assert set(rest.finished) == {f"1.{n}" for n in at_once}


class Slope(nn.Module):
    """A gradient within the forward, of which there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        return y + torch.autograd.grad(y.sum(), x, retain_graph=True)[0]


@pytest.mark.parametrize("module", [Penalty, Slope])
def test_a_backward_within_a_forward_is_not_passed_over(module: Callable[[], nn.Module]) -> None:
    with pytest.raises(UnsupportedError, match=r"own_autograd = False.*'1.linear.weight'.*own_autograd=True"):
        _first_part(module().double(), torch.randn(5, 4, WIDTH, dtype=torch.float64))


def test_hooks_of_others_on_a_result_come_first() -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        y = functional.linear(x, m.w)
        y.register_hook(lambda gradient: -3 * gradient)
        return y

    module = Used(use, "v", "b").double()
    nn.init.ones_(module.w)
    _, _, rest = _first_part(module, torch.ones(2, WIDTH, dtype=torch.float64))
    (kept,) = rest.kept
    assert (kept.arguments[1] == -3).all()


def test_a_stage_that_does_not_split_computes_all_at_once() -> None:
    _, grads, rest = _first_part(_made("linear"), torch.randn(5, 4, WIDTH, dtype=torch.float64), splits=False)
    assert grads is not None and not rest.kept and set(rest.finished) == {"1.w", "1.b"}


class _InBfloat16(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def test_products_under_autocast_are_left_to_torch() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), _InBfloat16(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).bfloat16())
    batches = torch_models.batches(1, 5, torch.float32)
    truth = stage_cases.whole(module, squared_error, batches)
    stages = hpctrain.torch.stages(hpctrain.torch.layers(module), 3, squared_error)
    stage_cases.bind(stages)
    stage_cases.assert_equal(stage_cases.by_hand(stages, batches, split=True), truth, 0.01)


class _Packed:
    """What autograd saved."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_between_the_parts_only_factors_of_products_are_kept() -> None:
    module = nn.Sequential(torch_models.Block(), nn.Softmax(-1), torch_models.Block()).double()
    saved: weakref.WeakSet[Any] = weakref.WeakSet()

    def pack(tensor: Tensor) -> Any:
        packed = _Packed(tensor)
        saved.add(packed)
        return packed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor):
        _, _, rest = _first_part(module, torch.randn(5, 4, WIDTH, dtype=torch.float64))
    gc.collect()
    assert len(saved) == 0  # the graph is gone
    assert any(use.name.endswith("bias") for use in rest.kept)  # our nodes, as saving is watched
    _assert_factors(rest)


def _assert_factors(rest: Any) -> None:
    """Two Blocks' factors and nothing else."""
    tensors = {t.data_ptr(): t for use in rest.kept for t in use.arguments if isinstance(t, Tensor)}
    rows, inner = 5 * 4, 2 * WIDTH + 1
    assert all(t.grad_fn is None for t in tensors.values())
    assert sum(t.nbytes for t in tensors.values()) == 8 * rows * 2 * 2 * (WIDTH + inner)


class Witness(torch.autograd.Function):
    """Passes a tensor on; its node holds an object that dies with it."""

    alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.packed = _Packed(x.detach())
        Witness.alive.add(ctx.packed)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy


class Witnessed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Witness.apply(x)


def test_hooks_keep_no_graph() -> None:
    module = nn.Sequential(torch_models.Block(), Witnessed(), torch_models.Block()).double()
    _, _, rest = _first_part(module, torch.randn(5, 4, WIDTH, dtype=torch.float64))
    gc.collect()
    assert len(Witness.alive) == 0
    assert not any(use.name.endswith("bias") for use in rest.kept)
    _assert_factors(rest)


def test_memory_falls_in_the_second_part() -> None:
    stage, _, rest = _first_part(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double(),
                                 torch.randn(5, 4, WIDTH, dtype=torch.float64))
    uses = [weakref.ref(use.arguments[0]) for use in rest.kept]
    alive: list[int] = []
    stage.backward_weight(rest, lambda name, gradient: alive.append(sum(ref() is not None for ref in uses)))
    assert len(alive) == 4 and alive[-1] < 2 and not rest.kept and not rest.finished
