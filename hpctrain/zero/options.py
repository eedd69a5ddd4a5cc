"""The options of ZeRO: what each rank keeps for the ranges it owns only."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.errors import ConfigError, choices, nearest

__all__ = ["ACCUMULATE", "BUCKET_BYTES", "SHARE", "STAGES", "Zero"]

STAGES = (0, 1, 2, 3)
SHARE = ("auto", "node", "none")
ACCUMULATE = ("reduce", "buffer")
BUCKET_BYTES = 8 << 20


@dataclass(frozen=True)
class Zero:
    """What a rank keeps of what all ranks need: `hpctrain.Zero(stage=2)`. See docs/zero.md.

    Attributes:
        stage: 0 everything; 1 optimizer states for its own ranges only; 2 gradients too; 3 parameters too.
        share: with stage 3, "node": parameters exist once per node, in memory that its ranks share; "none": each rank
            keeps its own ranges and gathers a unit's parameters when it needs them; "auto": "node" where all ranks
            are on one node that has room for shared memory, else "none".
        accumulate: with stage 2 or 3 and several micro-batches, "reduce": each one's gradient goes to its owners at
            once; "buffer": each rank keeps a whole gradient and sends it once.
        threshold: with stage 3 and share "none", units of the model with fewer elements are kept whole.
        bucket_bytes: gradients are reduced, and parameters gathered, in pieces of at least this size.
    """

    stage: int = 0
    share: str = "auto"
    accumulate: str = "reduce"
    threshold: int = 10_000
    bucket_bytes: int = BUCKET_BYTES

    def __post_init__(self) -> None:
        for name, value, legal in (("stage", self.stage, STAGES), ("share", self.share, SHARE),
                                   ("accumulate", self.accumulate, ACCUMULATE)):
            if value not in legal or isinstance(value, bool):
                raise ConfigError(f"zero.{name} = {value!r}{nearest(str(value), map(str, legal))} is not legal; legal "
                                  f"are {choices(legal)}")
        if self.threshold < 0:
            raise ConfigError(f"zero.threshold = {self.threshold!r} is not legal; legal are numbers of at least 0")
        if self.bucket_bytes < 1:
            raise ConfigError(f"zero.bucket_bytes = {self.bucket_bytes!r} is not legal; legal are numbers of at least "
                              "1")
