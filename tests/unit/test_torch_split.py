"""Models that are no chains, cut by torch's tracer into pieces, equal the whole model; what is refused, and how."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import stage_cases
import torch
import torch_models
import torch_skips
from torch import Tensor, nn
from torch.distributed.pipelining import pipe_split

import hpctrain.torch
from hpctrain.errors import ConfigError, UnsupportedError
from hpctrain.plan.pipeline.partition import by_parameters, by_time

WIDTH = torch_models.WIDTH


def squared_error(outputs: Tensor, micro_batch: Any) -> tuple[Tensor, float]:
    return (outputs - micro_batch[1]).square().sum(), float(outputs.numel())


def stages_of(model: nn.Module, example: Any, at: Sequence[str], loss: Any = squared_error, **how: Any) -> list[Any]:
    chain = hpctrain.torch.split(model, example, at)
    assert len(chain.layers) == len(at) + 1
    stages = hpctrain.torch.stages(chain, len(chain.layers), loss, **how)
    stage_cases.bind(stages)
    return stages


def test_any_cut_of_skips_equals_the_whole() -> None:
    batches = torch_skips.batches((3, 4, 2))
    truth = stage_cases.whole(torch_skips.make(), squared_error, batches, 0.3)
    chain = hpctrain.torch.split(torch_skips.make(), batches[0][0], ["up.0", "down.2", "up.1", "up.2"])
    for split in (False, True):
        for bounds in (1, 2, 5, (0, 1, 4, 5), (0, 0, 2, 5), (0, 4, 4, 5)):
            stages = hpctrain.torch.stages(copy.deepcopy(chain), bounds, squared_error)
            stage_cases.bind(stages)
            stage_cases.assert_equal(stage_cases.by_hand(stages, batches, split=split, scale=0.3), truth)


#: Where each model of `torch_models` is cut.
CUTS = {"rounds": ["first", "last"], "checkpoint": ["last"], "in place": ["blocks.1", "blocks.2", "last"],
        "frozen below": ["blocks.1", "last"], "ties": ["blocks.0", "blocks.1", "last"], "odd": ["normed"],
        "attention": ["encoder.layers.1", "attention", "decoder.layers.1"], "routers": ["blocks.0", "blocks.2"]}


@pytest.mark.parametrize("name", CUTS)
def test_models_of_all_kinds_equal_the_whole(name: str) -> None:
    batches = [*torch_models.batches(1, 3), *torch_models.batches(1, 2)]
    truth = stage_cases.whole(torch_models.make(name), squared_error, batches)
    with warnings.catch_warnings():  # routers: torch says that an attribute was set, which the trace will not do
        warnings.filterwarnings("ignore", message="The tensor attribute.* assigned during export")
        stages = stages_of(torch_models.make(name), batches[0][0], CUTS[name])
    for split in (False, True):
        stage_cases.assert_equal(stage_cases.by_hand(stages, batches, split=split), truth)


def test_names_are_those_of_the_whole_model() -> None:
    model = torch_skips.make()
    adapted = {p.name: p for p in hpctrain.torch.adapt(model, lambda m, b: (m(b[0]).sum(), 1.0)).placements}
    stages = hpctrain.torch.stages(hpctrain.torch.split(model, torch.ones(3, WIDTH).double(), ["down.1", "up.1"]), 3,
                                   squared_error)
    for stage in stages:
        assert all(placement == adapted[placement.name] for placement in stage.placements)
    assert {p.name for stage in stages for p in stage.placements} == set(adapted)
    assert [stage.shared for stage in stages] == [{"down.0.weight": (0, 2)}, {}, {"down.0.weight": (0, 2)}]
    assert [set(stage.buffers()) for stage in stages] == [
        set(), {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}, set()]
    assert [p.name for p in stages[0].placements] == ["down.0.weight", "down.0.bias", "unused.weight", "unused.bias"]
    assert stages[1].module["norm"].weight is model.norm.weight and stages[1].module.get_buffer("mask") is model.mask
    assert stages[2].module.get_buffer("mask") is not model.mask  # two stages use it


def test_dropout_and_running_statistics_are_those_of_the_model() -> None:
    model = torch_skips.make(dropout=0.5)
    stages = stages_of(copy.deepcopy(model), torch_skips.batches((4,))[0][0], ["down.2", "up.0", "up.2"])
    for batch in torch_skips.batches((3, 5)):
        torch.manual_seed(5)
        expected, value = squared_error(model(batch[0]), batch)[0].item(), None
        torch.manual_seed(5)
        for stage in stages:
            value, _ = stage.forward(batch, value)
        assert value == (pytest.approx(expected, rel=1e-12), batch[0].numel())
    for name, buffer in ((n, b) for stage in stages for n, b in stage.buffers().items()):
        torch.testing.assert_close(buffer, model.get_buffer(name), msg=name)
    assert int(model.norm.num_batches_tracked) == 2
    (batch,) = torch_skips.batches((3,))
    with torch.no_grad():
        expected = squared_error(model.eval()(batch[0]), batch)[0].item()
    value = None
    for stage in stages:
        value, stash = stage.forward(batch, value, training=False)
        assert stash is None
    assert value[0] == pytest.approx(expected, rel=1e-12)
    assert int(stages[1].buffers()["norm.num_batches_tracked"]) == 2
    value = None
    for stage in stages:
        value, _ = stage.forward(batch, value)  # in training again
    assert int(stages[1].buffers()["norm.num_batches_tracked"]) == 3 and value[0] != pytest.approx(expected)


def test_nothing_in_the_model_changes() -> None:
    model = torch_skips.make(dropout=0.5)
    model.down[0].eval()
    before, flags = copy.deepcopy(model.state_dict()), [part.training for part in model.modules()]
    random = torch.get_rng_state()
    example = torch.ones(3, WIDTH).double()
    hpctrain.torch.split(model, example, ["up.0"])
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert flags == [part.training for part in model.modules()] and torch.equal(random, torch.get_rng_state())
    assert not any(part._forward_pre_hooks for part in model.modules())
    assert torch.equal(example, torch.ones(3, WIDTH)) and not torch.distributed.is_initialized()


def test_a_stage_lets_go_of_the_rest() -> None:
    model = torch_skips.make()
    others = [weakref.ref(part) for part in (model, model.down[2].weight, model.up[0].weight, model.up[0])]
    stage = hpctrain.torch.stage(hpctrain.torch.split(model, torch.ones(3, WIDTH).double(), ["down.1", "down.2"]), 3, 1,
                                 squared_error)
    mine = weakref.ref(model.down[1].weight)
    del model
    gc.collect()
    assert [other() for other in others] == [None] * 4 and mine() is stage.module["down"]["1"].weight


class Several(nn.Module):
    """Several inputs, of which one is for the last part, some are no tensors; a nest as output."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.a, self.b = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor, more: Any, *, scale: int = 1, labels: Tensor | None = None) -> Any:
        x = self.table(tokens) * more["mask"][0][..., None]
        first, places = self.a(x).max(1)
        y = self.b(torch.tanh(first)) * scale
        loss = None if labels is None else (y - labels).square().sum()
        return {"loss": loss, "y": (y, None), "n": tokens.shape[1], "scale": scale, "places": places}


@pytest.mark.parametrize("split", [False, True])
def test_several_inputs_and_outputs(split: bool) -> None:
    model = Several().double()
    generator = torch.Generator().manual_seed(2)

    def batch(n: int, length: int) -> Any:
        more = {"mask": (torch.rand(n, length, generator=generator) > 0.5,), "nothing": None}
        return {"tokens": torch.randint(7, (n, length), generator=generator), "more": more, "scale": 3,
                "labels": torch.randn(n, WIDTH, generator=generator, dtype=torch.float64)}

    def loss(outputs: Any, micro_batch: Any) -> tuple[Tensor, float]:
        assert outputs["n"] == micro_batch["tokens"].shape[1] and outputs["scale"] == 3
        assert outputs["places"].dtype is torch.int64 and outputs["y"][1] is None
        return outputs["loss"] + outputs["y"][0].sum(), 1.0

    batches = [batch(2, 5), batch(3, 4), batch(1, 4)]
    truth = stage_cases.whole(_Called(model), lambda outputs, pair: loss(outputs, pair[1]), [(b, b) for b in batches])
    stages = stages_of(model, batches[0], ["a", "b"], loss, inputs=lambda micro_batch: micro_batch)
    found = stage_cases.by_hand(stages, batches, split=split)
    stage_cases.assert_equal(found, (truth[0], {name.removeprefix("model."): g for name, g in truth[1].items()}))
    with pytest.raises(ConfigError, match="scale == 3"):
        stages[0].forward({**batch(2, 5), "scale": 4})
    with pytest.raises(ConfigError, match="another structure"):
        stages[0].forward({key: value for key, value in batch(2, 5).items() if key != "labels"})
    with pytest.raises(ConfigError, match=r"mask.*is float64.*legal is bool"):
        stages[0].forward({**batch(2, 5), "more": {"mask": (torch.ones(2, 5).double(),), "nothing": None}})


class _Called(nn.Module):
    """A model that takes its keyword arguments as one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Any) -> Any:
        return self.model(**inputs)


class Own(nn.Module):
    """Says itself where it is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        pipe_split()
        return self.b(y) + x


def test_the_models_own_marks_count() -> None:
    batches = torch_models.batches(2, 3)
    model = Own().double()
    truth = stage_cases.whole(model, squared_error, batches)
    for at in ([], ["b"], ["a"]):  # both marks before b, or none before the first: a piece that does nothing
        chain = hpctrain.torch.split(model, batches[0][0], at)
        assert len(chain.layers) == len(at) + 2
        stages = hpctrain.torch.stages(copy.deepcopy(chain), len(chain.layers), squared_error)
        stage_cases.bind(stages)
        stage_cases.assert_equal(stage_cases.by_hand(stages, batches, split=True), truth)


def test_matrices_and_kernels_have_their_gradients_in_the_second_part() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.up = nn.Conv1d(4, 4, 3, padding=1), nn.Linear(WIDTH, 2 * WIDTH)
            self.down, self.norm = nn.Parameter(torch.ones(2 * WIDTH, WIDTH) / 9), nn.LayerNorm(WIDTH)
            self.frozen_norm = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                z = self.frozen_norm(x)
            return self.norm(torch.relu(self.up(self.conv(x))) @ self.down + z)

    model, batches = Mixed().double(), torch_models.batches(2, 3)
    truth = stage_cases.whole(model, squared_error, batches)
    (stage,) = stages_of(model, batches[0][0], [])
    stage_cases.assert_equal(stage_cases.by_hand([stage], batches, split=True), truth)
    _, stash = stage.forward(batches[0])
    _, rest = stage.backward_input(stash, None)
    assert {use.name for use in rest.kept} == {"conv.weight", "up.weight", "down"}


def test_the_profile_feeds_the_partitioner() -> None:
    model, (batch,) = torch_skips.make(), torch_skips.batches((4,))
    before = copy.deepcopy(model.state_dict())
    chain = hpctrain.torch.split(model, batch[0], ["down.1", "down.2", "up.0"])
    found = hpctrain.torch.profile(chain, batch, squared_error, repeats=2)
    assert all(layer.forward > 0 for layer in found) and by_time(found, 2)[-1] == by_parameters(found, 2)[-1] == 4
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


# What is refused --------------------------------------------------------------------------------------------------


def test_sizes_that_the_trace_is_not_for() -> None:
    class Even(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 1:
                return x * 0
            return x.reshape(x.shape[0] // 2, 2, WIDTH).sum(1) if x.shape[0] % 2 == 0 else x

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Even())
    stage = stages_of(model, torch.ones(4, WIDTH), [], lambda y, _: (y.sum(), 1.0))[0]
    assert stage.forward((torch.ones(6, WIDTH),))[0][1] == 1.0
    with pytest.raises(ConfigError, match=r"\(3, 6\).*% 2 == 0.*hpctrain\.torch\.layers"):
        stage.forward((torch.ones(3, WIDTH),))
    with pytest.raises(ConfigError, match=r"\(4, 5\).*== 6"):
        stage.forward((torch.ones(4, 5),))
    with pytest.raises(ConfigError, match=r"shape \(1, 6\); legal in dim 0 are sizes from 2"):
        stage.forward((torch.ones(1, WIDTH),))
    with pytest.raises(ConfigError, match=r"is float32\(2, 3, 6\); legal is float32\(s\d+, 6\)"):
        stage.forward((torch.ones(2, 3, WIDTH),))
    one = stages_of(model, torch.ones(1, WIDTH), [], lambda y, _: (y.sum(), 1.0))[0]
    assert one.forward((torch.ones(1, WIDTH),))[0] == (0.0, 1.0)
    with pytest.raises(ConfigError, match=r"\(2, 6\).*== 1"):
        one.forward((torch.ones(2, WIDTH),))


def test_sizes_of_one_are_tried() -> None:
    def sizes(x: Tensor, *, one: bool) -> Tensor:
        return x * 2 if one and x.shape[1] == 1 else x

    class Model(nn.Module):
        def __init__(self, *, one: bool) -> None:
            super().__init__()
            self.linear, self.one = nn.Linear(WIDTH, WIDTH), one

        def forward(self, x: Tensor) -> Tensor:
            return sizes(self.linear(x), one=self.one)

    batches = [tuple(torch.ones(a, b, WIDTH) for _ in range(2)) for a, b in ((1, 1), (1, 3), (2, 1))]
    model = Model(one=False)
    truth = stage_cases.whole(model, squared_error, batches)
    stages = stages_of(model, torch.ones(3, 2, WIDTH), ["linear"])
    stage_cases.assert_equal(stage_cases.by_hand(stages, batches, split=False), truth, 1e-5)
    stage = stages_of(Model(one=True), torch.ones(3, 2, WIDTH), [])[0]
    stage.forward(batches[1])
    with pytest.raises(ConfigError, match=r"\(2, 1, 6\); legal in dim 1 are sizes from 2: .* traced model is wrong"):
        stage.forward(batches[2])


def test_stages_of_different_traces_do_not_meet() -> None:
    first, _ = stages_of(torch_skips.make(), torch.ones(3, WIDTH).double(), ["up.0"])
    _, last = stages_of(torch_skips.make().eval(), torch.ones(1, WIDTH).double(), ["up.0"])
    (batch,) = torch_skips.batches((3,))
    with pytest.raises(ConfigError, match="another trace of the model.*same shapes on all ranks"):
        last.forward(batch, first.forward(batch)[0])


def test_the_dtype_is_that_of_the_trace() -> None:
    chain = hpctrain.torch.split(nn.Linear(WIDTH, WIDTH), torch.ones(2, WIDTH), [])
    stage = hpctrain.torch.stage(chain, 1, 0, squared_error)
    for placement in stage.placements:
        stage.bind(placement.name, torch.empty(placement.count, dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match=r"'weight' is torch\.bfloat16, and was torch\.float32"):
        stage.forward((torch.ones(2, WIDTH), torch.ones(2, WIDTH)))


def test_names_to_cut_at() -> None:
    x = torch.ones(3, WIDTH).double()
    with pytest.raises(ConfigError, match=r"'downs\.1'.*did you mean 'down\.1'"):
        hpctrain.torch.split(torch_skips.make(), x, ["downs.1"])
    with pytest.raises(ConfigError, match=r"'up\.1' twice"):
        hpctrain.torch.split(torch_skips.make(), x, ["up.1", "up.1"])
    with pytest.raises(ConfigError, match="'unused', which the model calls 0 times"):
        hpctrain.torch.split(torch_skips.make(), x, ["unused"])
    with pytest.raises(ConfigError, match=r"'blocks\.1', which the model calls 2 times"):
        hpctrain.torch.split(torch_models.make("rounds"), torch.ones(2, 4, WIDTH).double(), ["blocks.1"])
    with pytest.raises(ConfigError, match="example is not what a model can be traced for.*set"):
        hpctrain.torch.split(torch_skips.make(), {1, 2}, [])


class Refused(nn.Module):
    """Two matrices and a way to call them that a pipeline cannot cut before the second."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def branches(model: Any, x: Tensor) -> Tensor:
    return model.b(x) if x.sum() > 0 else model.a(x)


def without_gradients(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = model.b(model.a(x))
    return model.norm(y)


def statistics_twice(model: Any, x: Tensor) -> Tensor:
    return model.norm(model.b(model.norm(model.a(x))))


def a_view(model: Any, x: Tensor) -> Tensor:
    y = x * 2
    part = y[:, :3]
    z = model.b(model.a(x))
    part.add_(1)  # seen in y, which another piece would have as another tensor
    return y + z


class Reversed(torch.autograd.Function):
    """Its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return -dy


def a_reversal(model: Any, x: Tensor) -> Tensor:
    return model.b(Reversed.apply(model.a(x)))


def a_hook(model: Any, x: Tensor) -> Tensor:
    y = model.a(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 2)
    return model.b(y)


def a_counter(model: Any, x: Tensor) -> Tensor:
    model.count = getattr(model, "count", 0) + 1
    return model.b(model.a(x)) * model.count


def test_reentrant_checkpoints() -> None:
    example = torch.ones(2, 4, WIDTH).double()
    with pytest.raises(UnsupportedError, match="a reentrant checkpoint|reentrant checkpoints"):
        hpctrain.torch.split(torch_models.make("reentrant"), example, ["blocks.1"])
    with pytest.raises(UnsupportedError, match="the gradient of parameter 'blocks.*reentrant checkpoints"):
        hpctrain.torch.split(torch_models.make("reentrant"), example)


@pytest.mark.parametrize(("call", "why"), [
    (a_reversal, "in training: the gradient of parameter 'a.bias' differs"),
    (a_hook, "in training: the gradient of parameter 'a.bias' differs"), (a_counter, "change from call to call"),
    (branches, r"torch\.export cannot trace Refused"), (without_gradients, r"a cut is within torch\.no_grad"),
    (statistics_twice, r"buffer 'norm\.running_mean' changes in a forward, and pieces \[0, 1\]"),
    (a_view, r"the pieces do not compute what the model does in training.*another piece has a view")])
def test_models_that_cannot_be_cut(call: Any, why: str) -> None:
    with pytest.raises(UnsupportedError, match=f"(?s){why}.*"):
        hpctrain.torch.split(Refused(call), torch.ones(3, WIDTH), ["b"])
    if call in (statistics_twice, a_view, without_gradients):
        hpctrain.torch.split(Refused(call), torch.ones(3, WIDTH), [])
