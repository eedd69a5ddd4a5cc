"""hpctrain: train large models on supercomputers, started by mpirun or srun.

    context = hpctrain.start()                                  # MPI, launch checks, threads
    model = hpctrain.torch.adapt(module, loss)                  # loss(module, batch) -> (loss_sum, weight)
    trainer = context.trainer(model, optimizer=hpctrain.AdamW(lr=3e-4))
    result = trainer.step([micro_batch, ...])

Importing this package loads neither MPI nor any array library. It installs the hook that ends the whole job, with the
traceback of the rank that failed, when one rank fails (`hpctrain.runtime.abort`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpctrain.optim.loss_scale import LossScale
from hpctrain.optim.options import LAMB, SGD, Adam, AdamW, Muon, ParameterGroup
from hpctrain.optim.precision import Precision
from hpctrain.optim.schedule import Constant, Plateau, WarmupCosine, WarmupLinear
from hpctrain.runtime import abort
from hpctrain.runtime.limits import Watch
from hpctrain.runtime.pipeline_options import Pipeline
from hpctrain.zero.offload import Offload
from hpctrain.zero.options import Zero

if TYPE_CHECKING:
    from hpctrain.runtime.context import Context

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Constant", "LossScale", "Muon", "Offload", "ParameterGroup", "Pipeline",
           "Plateau", "Precision", "WarmupCosine", "WarmupLinear", "Watch", "Zero", "start"]

__version__ = "0.1.0"

abort.install()


def start(**options: Any) -> Context:
    """Starts hpctrain in this process (see `hpctrain.runtime.context.start`). Collective over the job."""
    from hpctrain.runtime.context import start as start_context

    return start_context(**options)
