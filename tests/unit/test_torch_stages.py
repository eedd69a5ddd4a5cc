"""Stages of torch models, run one after the other, equal the whole model; names, ties, nests, memory, errors."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from typing import Any

import pytest
import stage_cases
import torch
import torch_models
from torch import Tensor, nn

import hpctrain.torch
from hpctrain.errors import ConfigError, UnsupportedError
from hpctrain.models import gpt
from hpctrain.models.gpt_shape import GPTShape
from hpctrain.plan.pipeline.partition import Layer, by_parameters, by_time

WIDTH = torch_models.WIDTH


def squared_error(outputs: Tensor, micro_batch: Any) -> tuple[Tensor, float]:
    return (outputs - micro_batch[1]).square().sum(), float(outputs.numel())


def sequential() -> nn.Sequential:
    """Six layers; two of them are the same module, two share a matrix, one is frozen, one has buffers."""
    twice = nn.Linear(WIDTH, WIDTH)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), twice, torch_models.Block(), nn.BatchNorm1d(4), twice,
                           nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).double()
    layers[6].weight = layers[0].weight
    layers[5].requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return layers


@pytest.mark.parametrize("split", [False, True])
def test_any_cut_equals_the_whole(split: bool) -> None:
    batches = torch_models.batches(3, 5)
    truth = stage_cases.whole(sequential(), squared_error, batches, 0.3)
    choose = random.Random(2)
    for num_stages in (1, 2, 3, 4, 9):
        bounds = (0, *sorted(choose.randint(0, 7) for _ in range(num_stages - 1)), 7)
        stages = hpctrain.torch.stages(hpctrain.torch.layers(sequential()), bounds, squared_error)
        stage_cases.bind(stages)
        stage_cases.assert_equal(stage_cases.by_hand(stages, batches, split=split, scale=0.3), truth)


def test_names_are_those_of_the_whole_model() -> None:
    module = sequential()
    adapted = {p.name: p for p in hpctrain.torch.adapt(module, lambda m, b: (m(b[0]).sum(), 1.0)).placements}
    stages = hpctrain.torch.stages(hpctrain.torch.layers(module), (0, 3, 4, 7), squared_error)
    assert [[p.name for p in stage.placements] for stage in stages] == [
        ["0.weight", "0.bias", "1.weight", "1.bias", *(f"2.{n}" for n, _ in module[2].named_parameters())],
        ["3.weight", "3.bias"], ["1.weight", "1.bias", "5.weight", "5.bias", "0.weight", "6.bias"]]
    for stage in stages:
        assert all(placement == adapted[placement.name] for placement in stage.placements)
    assert adapted["0.weight"].aliases == ("6.weight",)
    ties = {"0.weight": (0, 2), "1.weight": (0, 2), "1.bias": (0, 2)}
    assert [stage.shared for stage in stages] == [ties, {}, ties]
    assert set(stages[1].buffers()) == {"3.running_mean", "3.running_var", "3.num_batches_tracked"}


def test_a_shared_parameter_is_copied_and_nothing_else_is() -> None:
    module = sequential()
    first, _, last = hpctrain.torch.stages(hpctrain.torch.layers(module), (0, 3, 4, 7), squared_error)
    assert first.module["0"] is module[0] and last.module["5"] is module[5]
    assert last.module["6"].weight is not module[0].weight and torch.equal(last.module["6"].weight, module[0].weight)
    assert last.module["6"].bias is module[6].bias
    assert module[6].weight is module[0].weight  # the user's model stays as it is


def test_a_stage_lets_go_of_the_rest() -> None:
    module = sequential()
    others = [weakref.ref(module[0]), weakref.ref(module[6])]
    stage = hpctrain.torch.stage(hpctrain.torch.layers(module), (0, 2, 6, 7), 1, squared_error)
    del module
    gc.collect()
    assert [other() for other in others] == [None, None] and stage.module["2"] is not None


def test_functions_that_make_modules_are_called_for_their_stage_only() -> None:
    made: list[int] = []

    def maker(number: int) -> Any:
        def make() -> nn.Module:
            made.append(number)
            return nn.Linear(WIDTH, WIDTH)
        return make

    stage = hpctrain.torch.stage(hpctrain.torch.layers([maker(i) for i in range(4)]), 2, 1, squared_error)
    assert made == [2, 3] and [p.name for p in stage.placements] == ["2.weight", "2.bias", "3.weight", "3.bias"]


class Nest(nn.Module):
    """Takes and gives a nest; counts, marks and looks at what is in it."""

    def __init__(self, *, is_first: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.is_first = is_first

    def forward(self, nest: Any) -> Any:
        if self.is_first:
            nest = {"x": nest, "n": 0, "more": (torch.arange(3), [None, True, "text", 0.5]), "unused": nest * 2,
                    "mask": nest > 0, "constant": torch.ones(2, dtype=nest.dtype)}
        assert nest["more"][0].dtype is torch.int64 and nest["more"][1] == [None, True, "text", 0.5]
        assert nest["mask"].dtype is torch.bool
        x = torch.tanh(self.linear(nest["x"])).transpose(0, 1).contiguous().transpose(0, 1) * nest["mask"]
        return {**nest, "x": x + nest["n"], "n": nest["n"] + 1}


def test_nests() -> None:
    module = nn.Sequential(Nest(is_first=True), Nest(), Nest(), nn.Identity()).double()
    batches = torch_models.batches(2, 3)

    def loss(nest: Any, micro_batch: Any) -> tuple[Tensor, float]:
        assert nest["n"] == 3
        return squared_error(nest["x"] * nest["constant"].sum(), micro_batch)

    truth = stage_cases.whole(module, loss, batches)
    for num_stages in (2, 3, 4):
        stages = hpctrain.torch.stages(hpctrain.torch.layers(module), num_stages, loss)
        stage_cases.bind(stages)
        stage_cases.assert_equal(stage_cases.by_hand(stages, batches, split=True), truth)


def test_gradients_of_inputs_are_a_nest_like_theirs() -> None:
    chain = hpctrain.torch.layers([nn.Linear(1, 1), Nest().double(), nn.Linear(1, 1)])
    stage = hpctrain.torch.stage(chain, 3, 1, squared_error)
    x = torch.randn(2, WIDTH, dtype=torch.float64)
    inputs = {"x": x, "n": 0, "more": (torch.arange(3), [None, True, "text", 0.5]), "unused": x, "mask": x > 0}
    outputs, stash = stage.forward(None, inputs)
    grads = stage.backward(stash, {**dict.fromkeys(outputs), "x": torch.ones_like(x)}, lambda name, gradient: None)
    assert grads["x"].shape == x.shape and grads["mask"] is None and grads["unused"] is None
    assert grads["more"] == (None, [None] * 4) and grads["n"] is None


def test_nothing_is_computed_for_inputs_that_nobody_trains() -> None:
    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    chain = hpctrain.torch.layers([frozen, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
    stage = hpctrain.torch.stage(chain, 3, 1, squared_error)
    stage_cases.bind([stage])
    stage.splits = True
    outputs, stash = stage.forward(None, torch.ones(2, WIDTH))
    grads, rest = stage.backward_input(stash, torch.ones_like(outputs))
    assert grads is None and [use.name for use in rest.kept] == ["1.weight"] and set(rest.finished) == {"1.bias"}


def test_evaluation_is_without_gradients_and_dropout() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)).double()
    module[2].eval()  # frozen statistics, say
    (batch,) = torch_models.batches(1, 3)
    expected = float(squared_error(copy.deepcopy(module).eval()(batch[0]), batch)[0].detach())
    value: Any = None
    for stage in hpctrain.torch.stages(hpctrain.torch.layers(module), 3, squared_error):
        value, stash = stage.forward(batch, value, training=False)
        assert stash is None and not getattr(value, "requires_grad", False)
    assert value == (pytest.approx(expected, rel=1e-13), 3 * 4 * WIDTH)
    assert [part.training for part in module] == [True, True, False]


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("tied", [True, False])
def test_gpt_equals_the_whole(positions: str, tied: bool) -> None:
    shape = GPTShape(layers=3, width=8, heads=2, context=6, vocabulary=11, positions=positions, tied=tied)
    module = gpt.GPT(shape, dtype=torch.float64)
    generator = torch.Generator().manual_seed(4)
    batches = [tuple(torch.randint(11, (2, 5), generator=generator) for _ in range(2)) for _ in range(2)]
    truth = stage_cases.whole(module, gpt.loss_of_logits, batches)
    chain = hpctrain.torch.layers(module, module.steps())
    for num_stages in (1, 2, 3, 5, 6):
        stages = hpctrain.torch.stages(chain, num_stages, gpt.loss_of_logits, inputs=gpt.tokens_of)
        stage_cases.bind(stages)
        assert stages[0].shared == ({"embedding.weight": (0, num_stages - 1 - (num_stages == 6))}
                                    if tied and num_stages > 1 else {})
        for split in (False, True):
            stage_cases.assert_equal(stage_cases.by_hand(stages, batches, split=split), truth)


def test_a_model_in_one_piece_takes_both_parts() -> None:
    module, batches = sequential(), torch_models.batches(2, 3)
    truth = stage_cases.whole(module, squared_error, batches)
    model = hpctrain.torch.adapt(module, lambda m, batch: squared_error(m(batch[0]), batch))
    stage_cases.bind([model])
    gradients: dict[str, Tensor] = {}
    for batch in batches:
        _, stash = model.forward(batch)
        grads, rest = model.backward_input(stash, None)
        assert grads is None
        model.backward_weight(rest, lambda name, g: gradients.update({name: gradients.get(name, 0) + g}))
    stage_cases.assert_equal((truth[0], gradients), truth)


class Own(nn.Module):
    """Parameters of its own, which functions of steps read."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.body = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)}).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.body["b"](torch.tanh(self.body["a"](x * self.token))) * self.token


def test_parameters_as_parts_of_steps() -> None:
    module, batches = Own(), torch_models.batches(2, 3)
    truth = stage_cases.whole(module, squared_error, batches)
    steps = [("token", lambda token, x: x * token), "body.a", ("body.b", lambda b, x: b(torch.tanh(x))),
             (["token"], lambda token, x: x * token)]
    for num_stages in (1, 2, 4):
        stages = hpctrain.torch.stages(hpctrain.torch.layers(module, steps), num_stages, squared_error)
        stage_cases.bind(stages)
        stage_cases.assert_equal(stage_cases.by_hand(stages, batches, split=True), truth)


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match=r"'body\.c'.*did you mean"):
        hpctrain.torch.layers(Own(), ["token", "body.c"])
    with pytest.raises(ConfigError, match=r"'body\.b\.weight' of the model is in no step|'body\.b\.bias'"):
        hpctrain.torch.layers(Own(), [("token", torch.mul), "body.a"])
    with pytest.raises(ConfigError, match="model is Own"):
        hpctrain.torch.layers(Own())
    chain = hpctrain.torch.layers(sequential())
    for bounds in (0, (0, 3), (1, 7), (0, 4, 3, 7), (7,)):
        with pytest.raises(ConfigError, match="bounds = "):
            hpctrain.torch.stage(chain, bounds, 0, squared_error)
    with pytest.raises(ConfigError, match="stage = 2; legal are 0 to 1"):
        hpctrain.torch.stage(chain, 2, 2, squared_error)
    with pytest.raises(ConfigError, match="repeats = 0"):
        hpctrain.torch.profile(chain, torch_models.batches(1, 2)[0], squared_error, repeats=0)
    odd = hpctrain.torch.stage(hpctrain.torch.layers([torch_models._Nested(), nn.Identity()]), 2, 0, squared_error,
                               inputs=lambda batch: {"x": [batch]})
    with pytest.raises(UnsupportedError, match="legal are nests of"):
        odd.module["0"].forward = lambda nest: {1, 2}
        odd.forward(torch.ones(2, WIDTH))


def test_the_profile_feeds_the_partitioner() -> None:
    module = sequential()
    module[0].requires_grad_(False)
    chain, (batch,) = hpctrain.torch.layers(module), torch_models.batches(1, 5)
    before = copy.deepcopy(module.state_dict())
    state = torch.get_rng_state()
    found = hpctrain.torch.profile(chain, batch, squared_error, repeats=2)
    assert [layer.activation_bytes for layer in found] == [8 * 5 * 4 * WIDTH] * 6 + [8]
    square = 8 * (WIDTH + 1) * WIDTH
    block = sum(p.nbytes for p in module[2].parameters())
    assert [layer.parameter_bytes for layer in found] == [square, square, block, 64, square, square, square]
    assert found[0].backward == 0 and all(layer.forward > 0 for layer in found)
    assert all(layer.backward > 0 for layer in found[1:])
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in before.items())
    assert torch.equal(state, torch.get_rng_state()) and all(p.grad is None for p in module.parameters())
    assert isinstance(found[0], Layer) and by_time(found, 2)[-1] == by_parameters(found, 2)[-1] == 7


def test_the_profile_sees_which_layer_is_slow() -> None:
    wide = nn.Sequential(nn.Linear(8, 256), nn.Linear(256, 256), nn.Linear(256, 8))
    batch = torch.ones(512, 8), torch.ones(512, 8)
    found = hpctrain.torch.profile(hpctrain.torch.layers(wide), batch, squared_error)
    assert max(range(3), key=lambda i: found[i].forward) == max(range(3), key=lambda i: found[i].backward) == 1
