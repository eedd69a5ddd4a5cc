"""From the words of a config to the objects they name: model, optimizer, schedule.

Owns that translation, so that no other file of this room asks which kind of model it trains. Must not know the loop.
Only the library of the model that is asked for is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from hpctrain.config.records import Config
from hpctrain.contracts import Array, Model
from hpctrain.errors import ConfigError
from hpctrain.models.gpt_shape import GPTShape
from hpctrain.models.mlp_shape import MLPShape
from hpctrain.optim.loss_scale import LossScale
from hpctrain.optim.options import LAMB, SGD, Adam, AdamW, Muon, Optimizer
from hpctrain.optim.precision import Precision
from hpctrain.optim.schedule import Constant, Schedule, WarmupCosine, WarmupLinear
from hpctrain.zero.offload import Offload
from hpctrain.zero.options import Zero

__all__ = ["Recipe", "Write", "make_gpt", "make_loss_scale", "make_optimizer", "make_precision", "make_recipe",
           "make_schedule", "make_shape", "make_writer", "make_zero", "row_maker"]

#: Makes text: (prompt, number of bytes, temperature, seed) -> bytes.
Write = Callable[[bytes, int, float, int], bytes]

NO_DECAY = ("*.bias", "*norm.weight")


@dataclass(frozen=True)
class Recipe:
    """A model, what it wants to be fed, and how it writes.

    `micro_batch` turns (inputs, targets) of shape (batch, length) into what the model's loss takes. `write` is None for
    models that write no text.
    """

    model: Model
    micro_batch: Callable[[Any], Any]
    write: Write | None


def make_shape(config: Config) -> Any:
    """The shape of the model that the config asks for: a GPTShape or an MLPShape. Loads no array library."""
    m = config.model
    if m.kind == "gpt":
        return GPTShape(m.vocabulary, m.context, m.width, m.layers, m.heads, m.positions, m.tied)
    return MLPShape(m.vocabulary, m.context, m.width, m.layers)


def make_recipe(config: Config) -> Recipe:
    """Builds the model with its initial values. Local; the same values on every rank."""
    return _gpt(config) if config.model.kind == "gpt" else _mlp(config)


def make_gpt(config: Config) -> Any:
    """The torch module, with its initial values. Local.

    Raises:
        ConfigError: torch is not installed.
    """
    try:
        import torch
    except ImportError:
        raise ConfigError("model.kind = 'gpt' needs torch: pip install 'hpctrain[torch]'; legal without it is "
                          "'mlp'") from None
    from hpctrain.models.gpt import GPT

    return GPT(make_shape(config), seed=config.run.seed, dtype=getattr(torch, config.run.dtype))


def _gpt(config: Config) -> Recipe:
    module = make_gpt(config)
    from hpctrain.models.gpt import loss
    from hpctrain.torch import adapt

    return Recipe(adapt(module, loss, no_decay=NO_DECAY), lambda sample: sample, _write_with(module))


def _write_with(module: Any) -> Write:
    def write(prompt: bytes, count: int, temperature: float, seed: int) -> bytes:
        text: bytes = module.generate(prompt, count, temperature=temperature, seed=seed)
        return text

    return write


def make_writer(config: Config, parameters: Iterable[tuple[str, Array]]) -> Write:
    """Writes with a GPT of these parameters (name, flat values), which are all. Local."""
    module = make_gpt(config)
    homes = dict(module.named_parameters())
    for name, values in parameters:
        homes[name].data.copy_(values.view(homes[name].shape))
    return _write_with(module)


def _mlp(config: Config) -> Recipe:
    from hpctrain.models.mlp import make_mlp

    model = make_mlp(make_shape(config), seed=config.run.seed, dtype=config.run.dtype)
    return Recipe(model, row_maker(config), None)


def row_maker(config: Config) -> Callable[[Any], Any]:
    """How samples become rows of the NumPy network."""
    from hpctrain.models.mlp import rows

    return lambda sample: rows(sample, config.model.context)


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
    """The options of the [zero] and [zero.offload] sections."""
    return Zero(**asdict(config.zero), offload=Offload(**asdict(config.offload)))


def make_precision(config: Config) -> Precision:
    """The types of the [precision] section."""
    p = config.precision
    return Precision(compute=p.compute, accumulate=p.accumulate, reduce=p.reduce, master=p.master)


def make_loss_scale(config: Config) -> LossScale | None:
    """The loss scale of the [precision] section; None: as the types need it."""
    scale = config.precision.loss_scale
    return None if scale is None else LossScale.fixed(scale)
