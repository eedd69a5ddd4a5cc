"""The model of a config as a chain of layers that pipeline stages are cut from.

Owns the joining of the models that come along with stages and profilers. Must not know schedules or ranks. Only the
library of the model that is asked for is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.arrays import arrays_of
from hpctrain.config.records import Config
from hpctrain.contracts import Arrays, Model
from hpctrain.plan.pipeline.partition import Layer
from hpctrain.train.recipe import NO_DECAY, make_gpt, make_shape, row_maker

__all__ = ["Staged", "make_staged"]


@dataclass(frozen=True)
class Staged:
    """A whole model that can be cut. Let go of it once the stages are made, so that other ranks' stages are freed.

    `stage(bounds, number)` makes the Model of a stage. `profile(micro_batch)` measures every layer here. `micro_batch`
    as in `recipe.Recipe`. `arrays` is the model's library.
    """

    arrays: Arrays
    stage: Callable[[Sequence[int], int], Model]
    profile: Callable[[Any], list[Layer]]
    micro_batch: Callable[[Any], Any]


def make_staged(config: Config) -> Staged:
    """Builds the model with its initial values. Local; the same values on every rank."""
    return _gpt(config) if config.model.kind == "gpt" else _mlp(config)


def _gpt(config: Config) -> Staged:
    module = make_gpt(config)
    import hpctrain.torch
    from hpctrain.models.gpt import loss_of_logits, tokens_of

    chain = hpctrain.torch.layers(module, module.steps())

    def stage(bounds: Sequence[int], number: int) -> Model:
        return hpctrain.torch.stage(chain, bounds, number, loss_of_logits, inputs=tokens_of, no_decay=NO_DECAY)

    def profile(micro_batch: Any) -> list[Layer]:
        return hpctrain.torch.profile(chain, micro_batch, loss_of_logits, inputs=tokens_of)

    return Staged(arrays_of(module.embedding.weight), stage, profile, lambda sample: sample)


def _mlp(config: Config) -> Staged:
    import hpctrain.numpy
    from hpctrain.models.mlp import make_layers

    layers = make_layers(make_shape(config), seed=config.run.seed, dtype=config.run.dtype)

    def stage(bounds: Sequence[int], number: int) -> Model:
        return hpctrain.numpy.stage(layers, hpctrain.numpy.cross_entropy, bounds, number)

    def profile(micro_batch: Any) -> list[Layer]:
        return hpctrain.numpy.profile(layers, hpctrain.numpy.cross_entropy, micro_batch)

    return Staged(arrays_of(np.empty(0)), stage, profile, row_maker(config))
