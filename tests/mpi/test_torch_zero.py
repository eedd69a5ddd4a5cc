"""torch modules over MPI: built in parts, in less memory than the whole model, and read and changed within gathered."""

from __future__ import annotations

import copy

import parity
import pytest
import torch
import torch_models
from torch import nn

import hpctrain
import hpctrain.torch
from hpctrain.errors import ConfigError, UnsupportedError

Zero = hpctrain.Zero
MIB = 1 << 20


class Initialised(nn.Module):
    """Initial values in all the ways that constructors have."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(3, 5))
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(3)])
        self.norm = nn.LayerNorm(5)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.head = nn.Linear(5, 5, bias=False)
        self.head.weight = nn.Parameter(torch.eye(5))
        self.tied = nn.Linear(5, 5, bias=False)
        self.tied.weight = self.head.weight
        self.copies = nn.ModuleList(copy.deepcopy(self.norm) for _ in range(2))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2, enable_nested_tensor=False)
        self.apply(self._initialise)
        with torch.no_grad():
            self.own[1] = 5.0
            self.blocks[0][0].weight.mul_(2)
            self.blocks[1][0].weight.data.copy_(self.blocks[0][0].weight.data)
            self.blocks[2][0].weight.add_(self.blocks[1][0].weight.sum(), alpha=0.5)
            alias, other = self.blocks[2][2].weight.data, self.blocks[1][2].weight
            other.div_(3)
            alias[0] = 9.0
        self.encoder.requires_grad_(False)
        self.total = float(sum(p.detach().sum() for p in self.parameters()))

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.2)
            nn.init.trunc_normal_(module.weight, std=0.1)
            if module.bias is not None:
                nn.init.constant_(module.bias, 0.25)


def test_a_partitioned_model_has_the_values_of_a_whole_one() -> None:
    context = hpctrain.start()
    torch.manual_seed(5)
    whole = Initialised().double()
    torch.manual_seed(5)
    with hpctrain.torch.partitioned(context):
        module = Initialised().double()
        assert module.head.weight is module.tied.weight
    assert module.total == whole.total
    names = dict(whole.named_parameters())
    size = sum(p.__dict__["_hpctrain_part"].own.numel() for p in module.parameters())
    assert sum(context.world.exchange(size)) == sum(p.numel() for p in whole.parameters())
    assert [(n, p.shape, p.dtype, p.requires_grad) for n, p in module.named_parameters()] == [
        (n, p.shape, p.dtype, p.requires_grad) for n, p in names.items()]
    with pytest.raises(UnsupportedError, match=r"made within hpctrain\.torch\.partitioned.*gathered\(module\)"):
        module.head.weight.sum()
    assert "partitioned" in repr(module.own)
    twin = copy.deepcopy(module)
    for made in (module, twin):
        with hpctrain.torch.gathered(made):
            for name, parameter in made.named_parameters():
                assert torch.equal(parameter, names[name]), name
    with hpctrain.torch.gathered(module, ["own"]):  # nobody may change it
        module.own.data.zero_()
        with pytest.raises(UnsupportedError):
            module.scalar.item()
    root = context.size - 1
    with hpctrain.torch.gathered(module, ["scalar", "norm.bias"], modify=root):
        if context.rank == root:
            module.scalar.data.fill_(7)
    with hpctrain.torch.gathered(module):
        assert torch.equal(module.own, whole.own) and module.scalar.item() == 7
    with pytest.raises(ConfigError, match="did you mean 'own'"), hpctrain.torch.gathered(module, ["ow"]):
        pass


@pytest.mark.parametrize("zero", [Zero(0), Zero(1), Zero(2), Zero(3, "auto"), Zero(3, "none", threshold=0)],
                         ids=lambda z: f"{z.stage}-{z.share}")
@pytest.mark.parametrize("name", ["stack", "odd", "attention"])
def test_a_partitioned_model_trains_as_one_process(name: str, zero: Zero) -> None:
    context = hpctrain.start()
    batches = torch_models.batches(2, 5)
    torch.manual_seed(6)
    module = torch_models.MODULES[name]().double()
    truth = parity.reference(module, torch_models.loss, batches, torch.optim.SGD(
        (p for p in module.parameters() if p.requires_grad), lr=0.1), 0.5)
    torch.manual_seed(6)
    with hpctrain.torch.partitioned(context.world):
        module = torch_models.MODULES[name]().double()
    model = hpctrain.torch.adapt(module, torch_models.loss)
    trace = parity.train(context, model, batches, 2, optimizer=hpctrain.SGD(lr=0.1), clip_norm=0.5, zero=zero)
    parity.assert_same(trace, truth, 1e-10)
    assert not any("_hpctrain_part" in p.__dict__ for p in module.parameters())


def test_ranks_with_other_random_numbers_are_told() -> None:
    context = hpctrain.start()
    if context.size == 1:
        pytest.skip("one rank differs from none")
    torch.manual_seed(context.rank)
    with pytest.raises(ConfigError, match="random numbers on rank 1"), hpctrain.torch.partitioned(context):
        pass
    torch.manual_seed(0)
