"""What each layer of a NumPy network costs, measured: for the partitioner.

Owns the timing. Must not know how a pipeline is cut.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from hpctrain.adapters.numpy.layers import Layer as NumpyLayer
from hpctrain.adapters.numpy.network import LossFunction, Network
from hpctrain.contracts import Arrays
from hpctrain.errors import ConfigError
from hpctrain.plan.pipeline.partition import Layer

__all__ = ["profile"]


def profile(layers: Sequence[NumpyLayer], loss: LossFunction, arrays: Arrays, micro_batch: Any,
            repeats: int = 5) -> list[Layer]:
    """One record a layer, for one micro-batch; medians of `repeats` runs after one more. Local."""
    if repeats < 1:
        raise ConfigError(f"repeats = {repeats}; legal are 1 and more")
    found: list[Layer] = []
    value: Any = None
    for i in range(len(layers)):
        last = i == len(layers) - 1
        stage = Network(layers, loss if last else None, arrays, (i, i + 1))
        runs = [_run(stage, micro_batch, value, last) for _ in range(repeats + 1)]
        forward, backward = (median(run[part] for run in runs[1:]) for part in (0, 1))
        value = runs[0][2]
        size = sum(parameter.value.nbytes for parameter in layers[i].parameters.values())
        found.append(Layer(forward, backward, 0 if last else value.nbytes, size))
    return found


def _run(stage: Network, micro_batch: Any, inputs: Any, last: bool) -> tuple[float, float, Any]:
    """(seconds forward, seconds backward, outputs)."""
    start = time.perf_counter()
    outputs, stash = stage.forward(micro_batch, inputs)
    middle = time.perf_counter()
    gradient = None if last else np.ones_like(outputs)
    begin = time.perf_counter()
    stage.backward(stash, gradient, lambda name, gradient: None)
    return middle - start, time.perf_counter() - begin, outputs
