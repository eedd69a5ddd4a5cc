"""The sections of a config, each a frozen dataclass whose fields are the options.

Owns names, defaults, limits and explanations of all options; `read` fills them, `describe` prints them. Paths are
relative to the directory in which the job is started, as everywhere in a shell. None as a value means "not given".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.config.mesh import fill_mesh
from hpctrain.plan.flat import BUCKET_BYTES
from hpctrain.plan.mesh import Mesh
from hpctrain.plan.pipeline.catalogue import RUNNABLE

__all__ = ["SECTIONS", "Batch", "Checkpoint", "Config", "Data", "Log", "MeshAxes", "Model", "Offload", "Optimizer",
           "Pipeline", "Precision", "Run", "Schedule", "Zero", "option"]


def option(
    default: Any, doc: str, *, legal: tuple[Any, ...] = (), low: float | None = None, high: float | None = None
) -> Any:
    """A field with its explanation and its legal values: a set of them or an interval [low, high]."""
    return field(default=default, metadata={"doc": doc, "legal": legal, "low": low, "high": high})


@dataclass(frozen=True)
class Run:
    """What is run, for how long, and where its files go."""

    name: str = option("run", "Name of the run; used in titles and, unless run.out is given, for its directory.")
    out: str | None = option(None, "Directory of everything that the run writes; runs/NAME when not given.")
    seed: int = option(0, "Initial values and the order of the samples are functions of this number.", low=0)
    steps: int = option(100, "Number of updates after which the run is finished.", low=1)
    dtype: str = option("float32", "Element type of parameters and arithmetic.", legal=("float32", "float64"))
    progress_thread: bool | None = option(None, "Whether a thread of each rank moves reductions on while the rank "
                                          "computes; when not given, where each rank has a core of its own.")

    @property
    def directory(self) -> Path:
        """Where the run writes: run.out, or runs/NAME."""
        return Path(self.out) if self.out else Path("runs") / self.name


@dataclass(frozen=True)
class Model:
    """The network. Both kinds predict the next byte."""

    kind: str = option("gpt", "gpt: a transformer in torch; mlp: a multi-layer network in NumPy.", legal=("gpt", "mlp"))
    vocabulary: int = option(256, "Number of different tokens; 256 for bytes.", low=2)
    context: int = option(128, "Tokens that the model can look back.", low=1)
    width: int = option(128, "Width of the residual stream (gpt) or of a hidden layer (mlp).", low=1)
    layers: int = option(4, "Number of transformer blocks (gpt) or of hidden layers (mlp).", low=1)
    heads: int = option(4, "Attention heads (gpt); must divide model.width.", low=1)
    positions: str = option("rotary", "How a gpt knows positions.", legal=("rotary", "learned"))
    tied: bool = option(True, "Whether a gpt's output head is its embedding.")


@dataclass(frozen=True)
class Data:
    """The text."""

    store: str = option("data.h5", "Token store, made by `hpctrain data prepare`.")
    length: int | None = option(None, "Tokens of one sample; model.context when not given.", low=1)
    tail: str = option("straddle", "Last, partial global batch of an epoch: run it short (keep), skip it (drop), or "
                       "fill it from the next epoch (straddle).", legal=("straddle", "keep", "drop"))
    validation_samples: int = option(256, "Samples of each validation during the run (the last one uses all); 0: all.",
                                     low=0)


@dataclass(frozen=True)
class MeshAxes:
    """The mesh: `axis = length`, slowest axis first; the last axis gets neighbouring ranks."""

    lengths: tuple[tuple[str, int], ...] = ()

    def mesh(self, num_ranks: int | None = None) -> Mesh:
        """The mesh of a job of `num_ranks`; a data axis that is left out or 0 takes the ranks that remain.

        Raises:
            ConfigError: an unknown axis, or lengths whose product is not the number of ranks.
        """
        return fill_mesh(self.lengths, num_ranks)


@dataclass(frozen=True)
class Pipeline:
    """How the ranks of a pipeline, mesh.pipeline of them, share the model and the micro-batches (docs/pipelines.md)."""

    schedule: str = option("1f1b", "Who runs which micro-batch when. The micro-batches of a step are "
                           "batch.accumulation.", legal=RUNNABLE)
    layers: str | tuple[int, ...] = option(
        "parameters", "How the model's layers are divided over the stages: as many in each (uniform), as many "
        "parameters, as much time, measured when training starts; or a list, as [3, 2, 1]: layers of each stage.",
        legal=("uniform", "parameters", "time"), low=0)
    chunks: int | None = option(None, "Stages a rank (gpipe, interleaved).", low=1)
    group: int | None = option(None, "Micro-batches that pass one chunk before the next one has its turn "
                               "(interleaved).", low=1)
    limit: float | None = option(None, "Micro-batches that a rank may hold (zb-auto).", low=1.0)
    trace: str | None = option(None, "File for trace viewers: one step, planned and real side by side. Costs a barrier "
                               "a step.")
    trace_step: int | None = option(None, "That step; the last one when not given.", low=1)


@dataclass(frozen=True)
class Batch:
    """global = micro x accumulation x length of the data axis. Give any; the others follow."""

    global_: int | None = option(None, "Samples of one update over all ranks.", low=1)
    micro: int | None = option(None, "Samples that a rank runs at once.", low=1)
    accumulation: int | None = option(None, "Micro-batches that a rank (or pipeline) adds up before an update.", low=1)


@dataclass(frozen=True)
class Optimizer:
    """The update rule."""

    kind: str = option("adamw", "adamw, adam (L2 in the gradient), lamb, muon (adamw for all but matrices), or "
                       "sgd with momentum.", legal=("adamw", "adam", "lamb", "muon", "sgd"))
    lr: float = option(1e-3, "Learning rate at schedule factor 1.", low=0.0)
    beta1: float = option(0.9, "First decay rate of moments, of all kinds but sgd.", low=0.0, high=1.0)
    beta2: float = option(0.95, "Second decay rate of moments, of all kinds but sgd.", low=0.0, high=1.0)
    eps: float = option(1e-8, "Added to the denominator, of all kinds but sgd.", low=0.0)
    weight_decay: float = option(0.1, "Decay of matrices (not of biases and norms).", low=0.0)
    momentum: float = option(0.9, "Momentum of sgd and of muon's matrices.", low=0.0, high=1.0)
    nesterov: bool = option(False, "Nesterov momentum for sgd; muon always has it.")
    clip_norm: float | None = option(1.0, "Gradients of a larger global norm are scaled down to it; 0: off.", low=0.0)


@dataclass(frozen=True)
class Schedule:
    """The learning rate over the updates; counts updates only, whatever ranks and accumulation are."""

    kind: str = option("cosine", "Shape after the warm-up.", legal=("cosine", "linear", "constant"))
    warmup: int = option(0, "Updates over which the rate rises linearly from 0 (cosine and linear).", low=0)
    total: int | None = option(None, "Updates until the floor is reached; run.steps when not given.", low=1)
    floor: float = option(0.1, "Lowest factor, at the end.", low=0.0, high=1.0)


@dataclass(frozen=True)
class Zero:
    """What a rank keeps for its own ranges only, of what all ranks need (docs/zero.md)."""

    stage: int = option(0, "0: everything is kept whole; 1: optimizer states are not; 2: nor gradients; 3: nor "
                        "parameters.", legal=(0, 1, 2, 3))
    share: str = option("auto", "Where stage 3 has parameters: once per node, in shared memory (node), or on their "
                        "owners alone (none).", legal=("auto", "node", "none"))
    accumulate: str = option("reduce", "Stages 2 and 3, several micro-batches: send each one's gradient to its owners "
                             "(reduce), or keep a whole one and send it once (buffer).", legal=("reduce", "buffer"))
    threshold: int = option(10_000, "Stage 3, share none: units of the model with fewer elements stay whole.", low=0)
    bucket_bytes: int = option(BUCKET_BYTES, "Gradients are reduced in pieces of at least this size.", low=1)


_PLACES = ("host", "disk")


@dataclass(frozen=True)
class Offload:
    """What each rank keeps in a file on a local disk, and updates one step late (docs/offload.md)."""

    states: str | None = option(None, "The optimizer's states, and masters; in memory (host) when not given.",
                                legal=_PLACES)
    gradients: str | None = option(None, "Sums of gradients: needs zero.stage 2 or 3, zero.accumulate reduce.",
                                   legal=_PLACES)
    parameters: str | None = option(None, "Needs zero.stage 3, zero.share none.", legal=_PLACES)
    directory: str | None = option(None, "On a local disk of each node.")
    window_bytes: int = option(256 << 20, "So much of a rank's file is in memory during an update.", low=1)
    delay: bool = option(False, "Whether the update from a step's gradients runs while the next step computes.")
    delay_start: int = option(40, "Ordinary updates before.", low=0)


_FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Precision:
    """Element types other than run.dtype; those not given follow from compute."""

    compute: str | None = option(None, "Of the model's parameters and arithmetic; run.dtype when not given.",
                                 legal=_FLOATS)
    accumulate: str | None = option(None, "In which gradients are added up; float32 for half types.", legal=_FLOATS)
    reduce: str | None = option(None, "In which gradients are sent; as accumulate when not given.", legal=_FLOATS)
    master: str | None = option(None, "Of the values that the optimizer updates, and its states; float32 for half "
                                "types.", legal=_FLOATS)
    loss_scale: float | None = option(None, "A fixed factor on the loss; dynamic for float16 when not given, else 1.",
                                      low=0.0)
    non_finite: str = option("skip", "A step whose loss or gradient is not finite: skip its update, stop, or ignore "
                             "it.", legal=("skip", "stop", "ignore"))


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoints, in OUT/checkpoints. There is one at the end of every run too."""

    every: int = option(0, "Updates between two checkpoints; 0: only at the end and at a stop signal.", low=0)
    keep: int = option(2, "Newest checkpoints that are kept.", low=1)


@dataclass(frozen=True)
class Log:
    """What is shown and written along the way."""

    progress: str = option("auto", "bar, plain lines, or by whether standard output is a terminal.",
                           legal=("auto", "bar", "lines", "off"))
    every: int = option(10, "Updates between two plain lines.", low=1)
    evaluate_every: int = option(0, "Updates between two validations; 0: only at the end.", low=0)
    curve: bool = option(True, "Whether OUT/curve.png is drawn at the end (needs matplotlib).")
    sample_bytes: int = option(0, "Bytes of text that a trained gpt writes to OUT/sample.txt; 0: none.", low=0)
    temperature: float = option(0.8, "Temperature of that text; below 1 is more careful.", low=0.0)


@dataclass(frozen=True)
class Config:
    """A whole config. `Config()` is legal and has every default."""

    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    mesh: MeshAxes = field(default_factory=MeshAxes)
    pipeline: Pipeline = field(default_factory=Pipeline)
    batch: Batch = field(default_factory=Batch)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    zero: Zero = field(default_factory=Zero)
    offload: Offload = field(default_factory=Offload)
    precision: Precision = field(default_factory=Precision)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    log: Log = field(default_factory=Log)

    @property
    def length(self) -> int:
        """Tokens of one sample."""
        return self.data.length or self.model.context


#: Section name -> its record; the last part of the name is a field of `Config`.
SECTIONS: dict[str, type] = {
    "run": Run, "model": Model, "data": Data, "mesh": MeshAxes, "pipeline": Pipeline, "batch": Batch,
    "optimizer": Optimizer, "schedule": Schedule, "zero": Zero, "zero.offload": Offload, "precision": Precision,
    "checkpoint": Checkpoint, "log": Log,
}
