"""Models of Hugging Face transformers as pipeline stages equal the whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import stage_cases
import torch

import hpctrain.torch

transformers = pytest.importorskip("transformers")

VOCABULARY, LAYERS = 13, 3


def gpt2() -> tuple[torch.nn.Module, list[Any]]:
    config = transformers.GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, n_positions=8, n_embd=8,
                                     n_layer=LAYERS, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                                     use_cache=False)

    def embed(tokens_table: Any, places: Any, drop: Any, tokens: torch.Tensor) -> torch.Tensor:
        return drop(tokens_table(tokens) + places(torch.arange(tokens.shape[1])))

    return transformers.GPT2LMHeadModel(config), [
        (("transformer.wte", "transformer.wpe", "transformer.drop"), embed),
        *(f"transformer.h.{i}" for i in range(LAYERS)),
        (("transformer.ln_f", "lm_head"), lambda norm, head, x: head(norm(x)))]


def llama() -> tuple[torch.nn.Module, list[Any]]:
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, hidden_size=8,
                                      intermediate_size=12, num_hidden_layers=LAYERS, num_attention_heads=2,
                                      num_key_value_heads=1, max_position_embeddings=8, use_cache=False)

    def embed(table: Any, rotary: Any, tokens: torch.Tensor) -> Any:
        x = table(tokens)
        return x, rotary(x, position_ids=torch.arange(tokens.shape[1])[None])

    def block(layer: Any, value: Any) -> Any:
        x, places = value
        return layer(x, position_embeddings=places), places

    return transformers.LlamaForCausalLM(config), [
        (("model.embed_tokens", "model.rotary_emb"), embed),
        *((f"model.layers.{i}", block) for i in range(LAYERS)),
        (("model.norm", "lm_head"), lambda norm, head, value: head(norm(value[0])))]


def loss(logits: torch.Tensor, micro_batch: Any) -> tuple[torch.Tensor, float]:
    targets = micro_batch[1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


class Logits(torch.nn.Module):
    """The whole model as a module that returns a tensor."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens).logits


#: LlamaRMSNorm and rotary positions compute in float32, whatever the model's type is.
@pytest.mark.parametrize(("make", "tolerance"), [(gpt2, 1e-10), (llama, 1e-6)])
def test_transformers_equal_the_whole(make: Callable[[], tuple[torch.nn.Module, list[Any]]], tolerance: float) -> None:
    model, steps = make()
    generator = torch.Generator().manual_seed(13)
    model.double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
    batches = [tuple(torch.randint(VOCABULARY, (2, 7), generator=generator) for _ in range(2)) for _ in range(2)]
    losses, gradients = stage_cases.whole(Logits(model), loss, batches)
    truth = losses, {name.removeprefix("model."): gradient for name, gradient in gradients.items()}
    assert len(truth[1]) == len(list(model.parameters()))
    chain = hpctrain.torch.layers(copy.deepcopy(model), steps)
    for num_stages in (1, 2, 3, 5):
        stages = hpctrain.torch.stages(chain, num_stages, loss)
        stage_cases.bind(stages)
        if make is gpt2 and num_stages > 1:
            assert stages[0].shared == {"transformer.wte.weight": (0, num_stages - 1)}
        for split in (False, True):
            stage_cases.assert_equal(stage_cases.by_hand(stages, batches, split=split), truth, tolerance)
        if num_stages == 2:
            later = {name.rsplit(".", 2)[-2] for name in _later(stages[0], batches[0])}
            assert {"c_attn", "c_proj", "c_fc"} <= later if make is gpt2 else {"q_proj", "down_proj"} <= later


def _later(stage: Any, micro_batch: Any) -> set[str]:
    """The parameters of a first stage whose gradients come in the second part."""
    outputs, stash = stage.forward(micro_batch)
    ones = torch.ones_like(outputs) if isinstance(outputs, torch.Tensor) else (torch.ones_like(outputs[0]), None)
    return {use.name for use in stage.backward_input(stash, ones)[1].kept}
