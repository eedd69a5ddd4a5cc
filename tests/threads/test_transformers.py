"""Unmodified models of Hugging Face transformers at every stage of ZeRO equal one process."""

from __future__ import annotations

from typing import Any

import parity
import pytest
import torch

import hpctrain
import hpctrain.torch
from hpctrain.transport.threads import run_threads

transformers = pytest.importorskip("transformers")

VOCABULARY = 13
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel",
             {"n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
              "attn_pdrop": 0.0}),
    "llama": ("LlamaConfig", "LlamaForCausalLM",
              {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
               "num_key_value_heads": 1, "max_position_embeddings": 8}),
}
#: LlamaRMSNorm computes in float32, whatever the model's type is.
TOLERANCE = {"gpt2": 1e-10, "llama": 1e-6}


def make(name: str, *, checkpointing: bool = False) -> torch.nn.Module:
    """Values from a generator of its own: ranks on threads share torch's default one."""
    config, model, options = SHAPES[name]
    module = getattr(transformers, model)(getattr(transformers, config)(
        vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, use_cache=False, **options)).double()
    if checkpointing:
        getattr(module, "activation_checkpointing_enable", module.gradient_checkpointing_enable)()
    generator = torch.Generator().manual_seed(13)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
    return module.train()


def loss(module: torch.nn.Module, tokens: tuple[torch.Tensor]) -> tuple[torch.Tensor, float]:
    """Summed cross-entropy of the next token."""
    (tokens,) = tokens
    logits = module(input_ids=tokens[:, :-1]).logits
    targets = tokens[:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_equal_one_process(name: str) -> None:
    generator = torch.Generator().manual_seed(14)
    batches = [(torch.randint(VOCABULARY, (5, 7), generator=generator),) for _ in range(3)]
    module = make(name)
    truth = parity.reference(module, loss, batches, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), 0.5)
    Zero = hpctrain.Zero
    for zero, checkpointing in ((Zero(0), False), (Zero(1), True), (Zero(2), False), (Zero(3, "node"), False),
                                (Zero(3, "none", threshold=0), False), (Zero(3, "none", threshold=0), True)):
        modules = [make(name, checkpointing=checkpointing) for _ in range(2)]

        def run(transport: Any, modules: Any = modules, zero: Any = zero) -> int:
            model = hpctrain.torch.adapt(modules[transport.rank], loss)
            trace = parity.train(parity.context_of(transport), model, batches, 2, clip_norm=0.5, zero=zero,
                                 optimizer=hpctrain.SGD(lr=0.1, momentum=0.9))
            parity.assert_same(trace, truth, TOLERANCE[name])
            return len(model.units)

        assert run_threads(2, run)[0] >= 4  # two blocks, what is before and what is after
