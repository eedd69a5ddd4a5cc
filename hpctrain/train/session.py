"""What a config becomes on a running job: data, model and trainer, at the place where an earlier run stopped.

Owns the set-up of a run, including every check that can be made before the first step. Must not know the loop or what
is shown. All of it runs under `agree`: a mistake is one error, the same on all ranks.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.config.read import to_dict
from hpctrain.config.records import Config
from hpctrain.data.sampler import Sampler
from hpctrain.data.store import TokenStore, locate, open_store
from hpctrain.data.text import TokenWindows, bigram_entropy
from hpctrain.errors import ConfigError
from hpctrain.plan.batch import Batch, solve_batch
from hpctrain.train.pipeline import check_axes, pipelining
from hpctrain.train.pipelined import Pipelined, make_pipelined
from hpctrain.train.recipe import (
    Write,
    make_loss_scale,
    make_optimizer,
    make_precision,
    make_recipe,
    make_schedule,
    make_shape,
    make_writer,
    make_zero,
)

if TYPE_CHECKING:
    from hpctrain.runtime.context import Context
    from hpctrain.runtime.step import Trainer

__all__ = ["Position", "Session", "describe", "prepare"]

#: What must be equal to go on from a checkpoint: the meaning of the sample counter.
SAME_SAMPLES = ("seed", "length", "tokens")


@dataclass
class Position:
    """Where training stands: the global sample counter; `seconds` and `tokens` are of the whole history."""

    counter: int = 0
    tokens: int = 0
    seconds: float = 0.0
    resumed_step: int = 0
    lines: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Session:
    """Everything that the loop works with; the same on every rank but for the rank's own samples.

    `micro_batch` turns samples into what the model takes. `write` is how a whole model on this rank writes text;
    `pipelined` is there where the model is cut into stages instead.
    """

    config: Config
    context: Context
    batch: Batch
    trainer: Trainer
    micro_batch: Callable[[Any], Any]
    write: Write | None
    pipelined: Pipelined | None
    train: TokenWindows
    validation: TokenWindows
    samples: dict[str, Any]
    position: Position
    bigram_entropy: float
    num_parameters: int

    @property
    def directory(self) -> Path:
        """Where the run writes."""
        return self.config.run.directory

    def sampler(self) -> Sampler:
        """The updates of this rank from the present position on."""
        return Sampler(len(self.train), self.batch.size, rank=self.trainer.rank, size=self.batch.data,
                       seed=self.config.run.seed, accumulation=self.batch.accumulation, start=self.position.counter,
                       tail=self.config.data.tail)

    @contextmanager
    def writing(self, wanted: bool) -> Iterator[Write | None]:
        """Within it rank 0 has what writes text with the trained model, where the model can. Collective.

        `wanted`, the same on all ranks: whether any text will be written; stages are brought together only then.
        """
        if self.pipelined is None:
            with self.trainer.gathered():
                yield self.write
        elif wanted and self.config.model.kind == "gpt":
            parameters = self.pipelined.trainer.whole_parameters()
            if self.context.rank == 0:
                yield make_writer(self.config, parameters)
            else:
                for _ in parameters:
                    pass
                yield None
        else:
            yield None

    def save(self) -> Path:
        """A checkpoint of trainer and position. Collective over the world."""
        p = self.position
        data = {"counter": p.counter, "tokens": p.tokens, "seconds": p.seconds, "samples": self.samples,
                "config": to_dict(self.config)}
        root = checkpoints(self.config)
        return root / self.trainer.save(root, keep=self.config.checkpoint.keep, data=data).name


def checkpoints(config: Config) -> Path:
    """The directory of the run's checkpoints."""
    return config.run.directory / "checkpoints"


def prepare(config: Config, context: Context, *, resume: str = "none", restart: bool = False) -> Session:
    """Sets the run up. Collective over the world; errors are the same on all ranks.

    Args:
        config: what to run.
        context: the job.
        resume: "none"; "auto" for the newest whole checkpoint of this run, if there is one; or the path of one.
        restart: with resume "none": delete the checkpoints that an earlier run left, instead of refusing.
    """
    world = context.world
    with world.agree():
        mesh = config.mesh.mesh(context.size)
        check_axes(mesh)
        batch = solve_batch(mesh.length("data"), size=config.batch.global_, micro=config.batch.micro,
                            accumulation=config.batch.accumulation)
        options = _trainer_options(config)
        pipeline = pipelining(config, mesh, batch)
    if resume == "none":
        world.on_root(lambda: clear_or_refuse(config, restart))
    found = world.on_root(lambda: locate(config.data.store))
    with world.agree():
        store = open_store(config.data.store, found)
        check_vocabulary(config, store)
        train, validation = (TokenWindows(tokens, config.length) for tokens in (store.train, store.validation))
    trainer: Trainer
    if pipeline is None:
        with world.agree():
            recipe = make_recipe(config)
        trainer, pipelined = context.trainer(recipe.model, **options), None
        micro_batch, write = recipe.micro_batch, recipe.write
    else:
        sample = train.batch(np.arange(min(batch.micro, len(train))))
        pipelined, micro_batch = make_pipelined(config, context, pipeline, sample, options)
        trainer, write = pipelined.trainer, None
    samples = {"seed": config.run.seed, "length": config.length, "tokens": store.hash}
    position = Position()
    if resume != "none":
        position = _resume(config, trainer, samples, resume)
        world.barrier()
    entropy = world.on_root(lambda: bigram_entropy(store.validation, store.vocabulary))
    return Session(config, context, batch, trainer, micro_batch, write, pipelined, train, validation, samples, position,
                   entropy, make_shape(config).num_parameters)


def _trainer_options(config: Config) -> dict[str, Any]:
    """What a trainer of any kind is told."""
    return {"optimizer": make_optimizer(config), "schedule": make_schedule(config),
            "clip_norm": config.optimizer.clip_norm or None, "zero": make_zero(config),
            "precision": make_precision(config), "loss_scale": make_loss_scale(config),
            "non_finite": config.precision.non_finite}


def check_vocabulary(config: Config, store: TokenStore) -> None:
    """Every token of the store must be one that the model knows."""
    if store.vocabulary > config.model.vocabulary:
        raise ConfigError(f"model.vocabulary = {config.model.vocabulary} must be at least {store.vocabulary}, the "
                          f"vocabulary of {store.path}")


def clear_or_refuse(config: Config, restart: bool) -> None:
    """A fresh run must not mix with the checkpoints of an older one. Local; for one rank."""
    root = checkpoints(config)
    if not root.is_dir() or not any(root.iterdir()):
        return
    if not restart:
        raise ConfigError(f"{root} holds checkpoints of an earlier run: go on with --resume auto, delete them and "
                          "start again with --restart, or take another directory with --set run.out=DIR")
    shutil.rmtree(root)


def _resume(config: Config, trainer: Trainer, samples: dict[str, Any], resume: str) -> Position:
    auto = resume == "auto"
    where = checkpoints(config) if auto else Path(resume)
    data = trainer.resume(where, policy="auto" if auto else "require")
    if data is None:
        return Position(lines=[f"no checkpoint in {where}; starting from the beginning"])
    for name in SAME_SAMPLES:
        if data["samples"][name] != samples[name]:
            raise ConfigError(f"the checkpoint in {where} was trained with {name} = {data['samples'][name]!r} of its "
                              f"samples, this run has {samples[name]!r}: its place in the data means nothing here")
    lines = [f"resumed at step {trainer.num_updates} ({data['counter']} samples seen)"]
    lines += _differences(data["config"], to_dict(config))
    return Position(data["counter"], data["tokens"], data["seconds"], trainer.num_updates, lines)


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Options that are not what they were; those of [log] and [checkpoint] change nothing that is learned."""
    changed = []
    for section in ("run", "model", "data", "batch", "optimizer", "schedule", "precision"):
        for key in {**old.get(section, {}), **new[section]}:
            before, now = old.get(section, {}).get(key), new[section].get(key)
            if before != now:
                changed.append(f"{section}.{key}: {before!r} before, {now!r} now")
    return [f"note: {line}" for line in changed]


def describe(session: Session) -> list[str]:
    """What is about to run, for people."""
    config, batch = session.config, session.batch
    length = session.train.length
    lines = [
        f"{config.model.kind} of {session.num_parameters:,} parameters ({config.run.dtype}), "
        f"{session.context.size} rank{'s' if session.context.size > 1 else ''}",
        f"batch {batch} samples of {length} tokens = {batch.size * length:,} tokens an update",
        *_pipeline_lines(session),
        f"text {len(session.train) * length:,} tokens, validation {len(session.validation) * length:,}, "
        f"bigram entropy {session.bigram_entropy:.4f} nats per byte",
    ]
    if session.position.resumed_step >= config.run.steps:
        lines.append(f"run.steps = {config.run.steps} is reached: nothing left to train (--restart begins anew)")
    return lines + session.position.lines


def _pipeline_lines(session: Session) -> list[str]:
    if session.pipelined is not None:
        return session.pipelined.describe()
    unused = session.config.pipeline != Config().pipeline
    return ["no pipeline: [pipeline] has no say where mesh.pipeline is 1"] if unused else []
