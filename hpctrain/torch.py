"""The face for torch users: `import hpctrain.torch`. Joins the torch adapter with the torch arrays."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpctrain.adapters.torch.module import Loss, TorchModel
from hpctrain.arrays import arrays_of

__all__ = ["adapt"]


def adapt(module: torch.nn.Module, loss: Loss, *, no_decay: Sequence[str] = ()) -> TorchModel:
    """Makes a Model of any module. Local.

    Args:
        module: the whole model; its parameters move into flat buffers when a trainer is made.
        loss: `loss(module, micro_batch) -> (loss_sum, weight)`: the *sum* of the loss terms of this micro-batch as a
            tensor of one element, and how many terms (tokens, samples) it sums.
        no_decay: glob patterns of parameter names that weight decay is not meant for.
    """
    return TorchModel(module, loss, arrays_of(torch.empty(0)), no_decay)
