"""From the words of a config to the objects they name: model, optimizer, schedule.

Owns that translation, so that no other file of this room asks which kind of model it trains. Must not know the loop.
Only the library of the model that is asked for is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from hpctrain.config.records import Config
from hpctrain.contracts import Model
from hpctrain.errors import ConfigError
from hpctrain.models.gpt_shape import GPTShape
from hpctrain.models.mlp_shape import MLPShape
from hpctrain.optim.loss_scale import LossScale
from hpctrain.optim.options import LAMB, SGD, Adam, AdamW, Muon, Optimizer
from hpctrain.optim.precision import Precision
from hpctrain.optim.schedule import Constant, Schedule, WarmupCosine, WarmupLinear
from hpctrain.zero.options import Zero

__all__ = ["Recipe", "gpt_shape", "make_loss_scale", "make_optimizer", "make_precision", "make_recipe", "make_schedule",
           "make_zero", "mlp_shape"]

NO_DECAY = ("*.bias", "*norm.weight")


@dataclass(frozen=True)
class Recipe:
    """A model, what it wants to be fed, and how it writes.

    `micro_batch` turns (inputs, targets) of shape (batch, length) into what the model's loss takes. `write` makes text:
    (prompt, number of bytes, temperature, seed) -> bytes; None for models that cannot.
    """

    model: Model
    micro_batch: Callable[[Any], Any]
    write: Callable[[bytes, int, float, int], bytes] | None


def gpt_shape(config: Config) -> GPTShape:
    """The shape of the GPT that the config asks for. Loads no array library."""
    m = config.model
    return GPTShape(m.vocabulary, m.context, m.width, m.layers, m.heads, m.positions, m.tied)


def mlp_shape(config: Config) -> MLPShape:
    """The shape of the NumPy network that the config asks for. Loads no array library."""
    m = config.model
    return MLPShape(m.vocabulary, m.context, m.width, m.layers)


def make_recipe(config: Config) -> Recipe:
    """Builds the model with its initial values. Local; the same values on every rank."""
    return _gpt(config) if config.model.kind == "gpt" else _mlp(config)


def _gpt(config: Config) -> Recipe:
    try:
        import torch
    except ImportError:
        raise ConfigError("model.kind = 'gpt' needs torch: pip install 'hpctrain[torch]'; legal without it is "
                          "'mlp'") from None
    from hpctrain.models.gpt import GPT, loss
    from hpctrain.torch import adapt

    module = GPT(gpt_shape(config), seed=config.run.seed, dtype=getattr(torch, config.run.dtype))

    def write(prompt: bytes, count: int, temperature: float, seed: int) -> bytes:
        return module.generate(prompt, count, temperature=temperature, seed=seed)

    return Recipe(adapt(module, loss, no_decay=NO_DECAY), lambda sample: sample, write)


def _mlp(config: Config) -> Recipe:
    from hpctrain.models.mlp import make_mlp, rows

    model = make_mlp(mlp_shape(config), seed=config.run.seed, dtype=config.run.dtype)
    return Recipe(model, lambda sample: rows(sample, config.model.context), None)


_ADAMS: dict[str, Callable[..., Optimizer]] = {"adamw": AdamW, "adam": Adam, "lamb": LAMB, "muon": Muon}


def make_optimizer(config: Config) -> Optimizer:
    """The optimizer of the [optimizer] section."""
    o = config.optimizer
    if o.kind != "sgd":
        more = {"momentum": o.momentum} if o.kind == "muon" else {}
        return _ADAMS[o.kind](lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay, **more)
    return SGD(lr=o.lr, momentum=o.momentum, nesterov=o.nesterov, weight_decay=o.weight_decay)


def make_schedule(config: Config) -> Schedule:
    """The schedule of the [schedule] section."""
    s = config.schedule
    total = s.total or config.run.steps
    if s.kind == "constant":
        return Constant()
    return (WarmupCosine if s.kind == "cosine" else WarmupLinear)(s.warmup, total, s.floor)


def make_zero(config: Config) -> Zero:
    """The options of the [zero] section."""
    return Zero(**asdict(config.zero))


def make_precision(config: Config) -> Precision:
    """The types of the [precision] section."""
    p = config.precision
    return Precision(compute=p.compute, accumulate=p.accumulate, reduce=p.reduce, master=p.master)


def make_loss_scale(config: Config) -> LossScale | None:
    """The loss scale of the [precision] section; None: as the types need it."""
    scale = config.precision.loss_scale
    return None if scale is None else LossScale.fixed(scale)
