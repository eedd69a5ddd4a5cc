"""Models cut at named submodules by torch's tracer equal one process in a pipeline: GPT-2, Llama, skip connections."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import parity
import pytest
import torch
import torch_skips

import hpctrain
import hpctrain.torch
from hpctrain.plan.pipeline.partition import uniform
from hpctrain.runtime.pipeline_options import Pipeline
from hpctrain.runtime.pipeline_trainer import PipelineTrainer
from hpctrain.runtime.step import Trainer
from hpctrain.transport.threads import run_threads, single

VOCABULARY = 13
OPTIONS = {"optimizer": hpctrain.AdamW(lr=0.02, weight_decay=0.1), "clip_norm": 0.4,
           "zero": hpctrain.Zero(1, bucket_bytes=1000)}


def gpt2() -> tuple[torch.nn.Module, list[str]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, n_positions=8, n_embd=8,
                                     n_layer=3, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                                     use_cache=False)
    return transformers.GPT2LMHeadModel(config), ["transformer.h.1", "transformer.h.2", "lm_head"]


def llama() -> tuple[torch.nn.Module, list[str]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, hidden_size=8,
                                      intermediate_size=12, num_hidden_layers=3, num_attention_heads=2,
                                      num_key_value_heads=1, max_position_embeddings=8, use_cache=False)
    model = transformers.LlamaForCausalLM(config)
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":  # computes in float32, so that a last bit of float64 may show
            model.set_submodule(name, torch.nn.RMSNorm(8, config.rms_norm_eps))
    return model, ["model.layers.1", "model.layers.2", "model.norm"]


def skips() -> tuple[torch.nn.Module, list[str]]:
    return torch_skips.make(), ["down.1", "up.0", "up.2"]


def tokens(sizes: Any) -> list[Any]:
    generator = torch.Generator().manual_seed(13)
    return [tuple(torch.randint(VOCABULARY, (n, 2 + n), generator=generator) for _ in range(2)) for n in sizes]


def language_loss(outputs: Any, batch: Any) -> tuple[torch.Tensor, float]:
    logits = outputs.logits.flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, batch[1].flatten(), reduction="sum"), batch[1].numel()


def squared_error(outputs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, float]:
    return (outputs - batch[1]).square().sum(), float(outputs.numel())


#: model and where it is cut, micro-batches of so many rows, loss
CASES: dict[str, tuple[Callable[[], tuple[torch.nn.Module, list[str]]], Callable[[Any], list[Any]], Any]] = {
    "gpt2": (gpt2, tokens, language_loss), "llama": (llama, tokens, language_loss),
    "skips": (skips, torch_skips.batches, squared_error)}


@cache
def made(name: str) -> tuple[torch.nn.Module, Any, list[list[Any]], Any]:
    """(model, chain, micro-batches of each update, what one process sees)."""
    make, batches, loss = CASES[name]
    model, at = make()
    model.double().train()
    generator = torch.Generator().manual_seed(13)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
    data = [batches(sizes) for sizes in ((2, 3, 4, 2, 3), (4, 3), (3, 2, 2))]
    chain = hpctrain.torch.split(copy.deepcopy(model), data[0][0][0], at)
    alone = hpctrain.torch.adapt(copy.deepcopy(model), lambda module, batch: loss(module(batch[0]), batch))
    return model, chain, data, observe(Trainer(parity.context_of(single()), alone, **OPTIONS), data)


def observe(trainer: Trainer, data: Any) -> Any:
    losses, norms, gradients = [], [], {}
    for batch in data:
        result = trainer.step(batch)
        losses.append(result.loss)
        norms.append(result.gradient_norm)
        gradients = gradients or {name: np.asarray(g).copy() for name, g in trainer.gradients()}
    weights = {name: np.asarray(w).copy() for name, w in trainer.parameters()}
    return losses, norms, trainer.evaluate(data[0]).loss, gradients, weights


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("size", [2, 3])
def test_equals_one_process(name: str, schedule: str, size: int) -> None:
    model, chain, data, truth = made(name)
    chains = [copy.deepcopy(chain) for _ in range(size)]
    cut = uniform(len(chain.layers), size)

    def run(transport: Any) -> list[str]:
        mine, loss = chains[transport.rank], CASES[name][2]
        trainer = PipelineTrainer(parity.context_of(transport), lambda s: hpctrain.torch.stage(mine, cut, s, loss),
                                  Pipeline(schedule), **OPTIONS)
        *numbers, gradients, weights = observe(trainer, data)
        for found, expected in zip(numbers, truth, strict=False):
            np.testing.assert_allclose(found, expected, rtol=1e-10)
        for found, expected in ((gradients, truth[3]), (weights, truth[4])):
            for key, value in found.items():
                np.testing.assert_allclose(value, expected[key], rtol=1e-10, atol=1e-10, err_msg=key)
        return list(weights)

    held = {name for names in run_threads(size, run) for name in names}
    assert held == set(truth[4]) == {name for name, _ in model.named_parameters()}
