"""The face for NumPy users: layers, losses and `network`. Joins the NumPy adapter with the NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain.adapters.numpy.layers import Embedding, Gelu, Layer, Linear, Parameter, Tanh
from hpctrain.adapters.numpy.losses import cross_entropy, squared_error
from hpctrain.adapters.numpy.network import LossFunction, Network
from hpctrain.arrays import arrays_of

__all__ = ["Embedding", "Gelu", "Linear", "Network", "Parameter", "Tanh", "cross_entropy", "network", "squared_error"]


def network(layers: Sequence[Layer], loss: LossFunction) -> Network:
    """A Model of `layers` applied in order, then `loss` (`cross_entropy` or `squared_error`). Local."""
    return Network(layers, loss, arrays_of(np.empty(0)))
