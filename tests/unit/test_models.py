"""The models that come along: initial values, shapes by formula, loss."""

import numpy as np
import pytest

from hpctrain.models.gpt_shape import GPTShape
from hpctrain.models.initial import CHUNK, normal
from hpctrain.models.mlp_shape import MLPShape

TINY = {"vocabulary": 37, "context": 12, "width": 16, "layers": 2, "heads": 4}


def test_any_slice_of_initial_values_is_the_slice_of_the_whole():
    whole = normal(3, "w", 0, 1000)
    for start, stop in [(0, 0), (0, 1), (1, 2), (3, 9), (4, 8), (997, 1000), (5, 995)]:
        assert np.array_equal(normal(3, "w", start, stop), whole[start:stop])
    edge = normal(3, "w", CHUNK - 3, CHUNK + 5)
    assert np.array_equal(normal(3, "w", 2, CHUNK + 5)[-8:], edge)


def test_initial_values_are_normal_and_differ_by_seed_and_name():
    values = normal(0, "w", 0, 200_000, std=2.0)
    assert values.mean() == pytest.approx(0, abs=0.02)
    assert values.std() == pytest.approx(2, rel=0.01)
    assert (np.abs(values) > 4).mean() == pytest.approx(0.0455, abs=0.003)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.01
    assert not np.array_equal(normal(0, "w", 0, 9), normal(1, "w", 0, 9))
    assert not np.array_equal(normal(0, "w", 0, 9), normal(0, "v", 0, 9))


def test_initial_values_do_not_change_between_releases():
    assert normal(0, "w", 0, 3) == pytest.approx([-0.842459002737, -0.836366199515, -0.591833053626], abs=1e-11)


@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("tied", [True, False])
def test_formula_and_module_have_the_same_parameters(positions, tied):
    torch = pytest.importorskip("torch")
    from hpctrain.models.gpt import GPT

    shape = GPTShape(positions=positions, tied=tied, **TINY)
    module = GPT(shape, seed=1)
    assert {n: tuple(p.shape) for n, p in module.named_parameters()} == shape.parameters()
    assert [n for n, _ in module.named_parameters()] == list(shape.parameters())
    assert sum(p.numel() for p in module.parameters()) == shape.num_parameters
    assert (module.head.weight is module.embedding.weight) == tied
    torch.manual_seed(99)  # torch's generator has no say
    again = GPT(shape, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("layers, batch", [(0, 2), (1, 1), (3, 2)])
def test_activations_of_the_gpt_are_what_torch_keeps(positions, layers, batch):
    torch = pytest.importorskip("torch")
    from hpctrain.models.gpt import GPT, loss

    shape = GPTShape(**{**TINY, "layers": layers}, positions=positions)
    module = GPT(shape)
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and tensor.ndim and storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes() // 4, tensor)  # the tensor keeps the address from being reused
        return tensor

    tokens = torch.zeros((batch, 12), dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss(module, (tokens, tokens))
    found, planned = sum(count for count, _ in kept.values()), shape.num_activations(batch, 12)
    assert found == pytest.approx(planned, rel=0.02)  # what exactly is kept depends on torch's release


@pytest.mark.parametrize("layers", [1, 3])
def test_activations_of_the_network_are_its_stash(layers):
    from hpctrain.models.mlp import make_mlp, rows

    shape = MLPShape(vocabulary=11, context=3, width=6, layers=layers)
    tokens = np.zeros((2, 5), np.int64)
    _, (kept, gradient) = make_mlp(shape).forward(rows((tokens, tokens), 3))
    assert sum(x.size for x in [*kept, gradient] if x.dtype.kind == "f") == shape.num_activations(2, 5)


@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_layers_of_the_gpt_are_those_of_its_chain(positions, tied):
    pytest.importorskip("torch")
    import hpctrain.torch
    from hpctrain.models.gpt import GPT, loss_of_logits

    shape = GPTShape(positions=positions, tied=tied, **TINY)
    module = GPT(shape)
    chain = hpctrain.torch.layers(module, module.steps())
    stages = hpctrain.torch.stages(chain, tuple(range(len(chain.layers) + 1)), loss_of_logits)
    assert [{p.name for p in stage.placements} for stage in stages] == [set(names) for names in shape.steps().values()]
    angles = (shape.layers - 1) * 12 * 16 // 4 * (positions == "rotary")  # in a chain each block has its own
    assert sum(shape.step_activations(2, 12)) == shape.num_activations(2, 12) + angles


def test_the_layers_of_the_network():
    from hpctrain.models.mlp import make_layers

    shape = MLPShape(vocabulary=11, context=3, width=6, layers=2)
    layers, steps = make_layers(shape), shape.steps()
    assert [name.split()[0] for name in steps] == [type(layer).__name__.lower() for layer in layers]
    names = [tuple(f"{i}.{name}" for name in layer.parameters) for i, layer in enumerate(layers)]
    assert names == list(steps.values())
    assert sum(shape.step_activations(2, 5)) == shape.num_activations(2, 5)


def test_loss_is_a_sum_with_the_number_of_targets_as_weight():
    torch = pytest.importorskip("torch")
    from hpctrain.models.gpt import GPT, loss

    module = GPT(GPTShape(**TINY), dtype=torch.float64)
    tokens = np.random.default_rng(0).integers(0, 37, (3, 13))
    batch = tokens[:, :-1], tokens[:, 1:]
    loss_sum, weight = loss(module, batch)
    odds = torch.log_softmax(module(torch.from_numpy(batch[0].copy())), -1).detach()
    by_hand = -sum(float(odds[i, j, batch[1][i, j]]) for i in range(3) for j in range(12))
    assert weight == 36
    loss_sum = loss_sum.detach()
    assert float(loss_sum) == pytest.approx(by_hand)
    assert float(loss_sum) / weight == pytest.approx(np.log(37), rel=0.02)  # knows nothing yet


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_no_place_sees_the_future_and_all_see_positions(positions):
    torch = pytest.importorskip("torch")
    from hpctrain.models.gpt import GPT

    module = GPT(GPTShape(positions=positions, **TINY), dtype=torch.float64)
    tokens = torch.arange(10)[None] % 37
    changed = tokens.clone()
    changed[0, 6] = 30
    before, after = module(tokens), module(changed)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])
    # One block without positions could not tell the order of what is behind it; two could, by the causal mask.
    single = GPT(GPTShape(positions=positions, **TINY | {"layers": 1}), dtype=torch.float64)
    swapped = tokens.clone()
    swapped[0, 1], swapped[0, 2] = tokens[0, 2], tokens[0, 1]
    assert not torch.allclose(single(swapped)[0, 5], single(tokens)[0, 5], rtol=1e-9, atol=0)
    with pytest.raises(ValueError, match="context = 12"):
        module(torch.zeros(1, 13, dtype=torch.long))


def test_written_bytes_are_reproducible():
    pytest.importorskip("torch")
    from hpctrain.models.gpt import GPT

    module = GPT(GPTShape(**TINY))
    text = module.generate(b"\x01\x02", 20, temperature=0.8, seed=4)
    assert len(text) == 20
    assert text == module.generate(b"\x01\x02", 20, temperature=0.8, seed=4)
    assert module.generate(b"\x01", 5, temperature=0) == module.generate(b"\x01", 5, temperature=0, seed=7)
    with pytest.raises(ValueError, match="prompt"):
        module.generate(b"", 1)


def test_mlp_rows_are_the_bytes_before_each_target():
    from hpctrain.models.mlp import rows

    inputs, targets = rows((np.array([[1, 2, 3], [4, 5, 6]]), np.array([[2, 3, 9], [5, 6, 8]])), 2)
    assert inputs.tolist() == [[0, 1], [1, 2], [2, 3], [0, 4], [4, 5], [5, 6]]
    assert targets.tolist() == [2, 3, 9, 5, 6, 8]


def test_mlp_formula_and_network_have_the_same_parameters():
    from hpctrain.models.mlp import make_mlp

    shape = MLPShape(vocabulary=11, context=3, width=5, layers=2)
    model = make_mlp(shape, dtype="float64")
    assert {p.name: p.shape for p in model.placements} == shape.parameters()
    x = np.random.default_rng(0).integers(0, 11, (7, 3))
    (loss_sum, weight), _ = model.forward((x, x[:, 0]))
    assert weight == 7
    assert np.isfinite(loss_sum)
