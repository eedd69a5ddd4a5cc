"""The face for NumPy users: layers, losses and `network`. Joins the NumPy adapter with the NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpctrain.adapters.numpy.layers import Embedding, Gelu, Layer, Linear, Parameter, Tanh
from hpctrain.adapters.numpy.losses import cross_entropy, squared_error
from hpctrain.adapters.numpy.network import LossFunction, Network
from hpctrain.adapters.numpy.profile import profile as profile_layers
from hpctrain.arrays import arrays_of
from hpctrain.errors import ConfigError
from hpctrain.plan.pipeline import partition

__all__ = ["Embedding", "Gelu", "Linear", "Network", "Parameter", "Tanh", "cross_entropy", "network", "profile",
           "squared_error", "stage"]


def network(layers: Sequence[Layer], loss: LossFunction) -> Network:
    """A Model of `layers` applied in order, then `loss` (`cross_entropy` or `squared_error`). Local."""
    return Network(layers, loss, arrays_of(np.empty(0)))


def stage(layers: Sequence[Layer], loss: LossFunction, bounds: Sequence[int], number: int) -> Network:
    """Stage `number` of a pipeline: a Model of the layers from bounds[number] to bounds[number + 1]. Local.

    `layers` are all of the network's, of which a stage computes with its own only; a stage may have none. Parameters
    have the names that they have in `network(layers, loss)`.

    Raises:
        ConfigError: `bounds` do not ascend from 0 to the number of layers, or have no such stage.
    """
    if bounds[0] != 0 or bounds[-1] != len(layers) or sorted(bounds) != list(bounds):
        raise ConfigError(f"bounds = {tuple(bounds)} must ascend from 0 to {len(layers)}, the number of layers")
    if not 0 <= number < len(bounds) - 1:
        raise ConfigError(f"stage {number} is none of bounds = {tuple(bounds)}; legal are 0 to {len(bounds) - 2}")
    last = number == len(bounds) - 2
    return Network(layers, loss if last else None, arrays_of(np.empty(0)), (bounds[number], bounds[number + 1]))


def profile(layers: Sequence[Layer], loss: LossFunction, micro_batch: Any, *,
            repeats: int = 5) -> list[partition.Layer]:
    """Measures each layer on this machine for one micro-batch: what `plan.pipeline.partition.by_time` needs. Local.

    Times are medians of `repeats` runs after one more. The last layer's have the loss in them. Changes nothing in the
    layers.
    """
    return profile_layers(layers, loss, arrays_of(np.empty(0)), micro_batch, repeats)
