"""Activation memory of a transformer by the formulas of the papers: bytes on one rank in 16-bit types.

Owns the closed forms of arXiv 2205.05198 (Megatron-LM 3, section 4, Table 2) and arXiv 2104.07857 (ZeRO-Infinity,
section 3). The network there has dropout and writes out its attention matrix; what the networks of `models` keep is
counted in their own shapes. Pure, standard library only.
"""

from __future__ import annotations

from hpctrain.errors import ConfigError, choices

__all__ = ["checkpoint_bytes", "layer_bytes", "num_transformer_parameters", "working_activation_bytes",
           "working_state_bytes"]

RECOMPUTE = ("none", "selective", "full")


def layer_bytes(batch: int, length: int, width: int, heads: int, *, tensor: int = 1, sequence: bool = False,
                recompute: str = "none") -> float:
    """What one layer keeps for backward (2205.05198, Table 2), with `tensor` ranks that divide it.

    `sequence`: norms and dropout are divided along the sequence too. `recompute`: "selective" computes the attention
    matrix again in backward, "full" the whole layer from its input.
    """
    if recompute not in RECOMPUTE:
        raise ConfigError(f"recompute = {recompute!r} is not legal; legal are {choices(RECOMPUTE)}")
    tokens = batch * length * width
    if recompute == "full":
        return 2 * tokens
    matrix = 0.0 if recompute == "selective" else 5 * heads * length / width
    whole = 0 if sequence else 10  # two norms' and two projections' inputs and two masks, not divided by `tensor`
    return tokens * (whole + (34 - whole + matrix) / tensor)


def num_transformer_parameters(layers: int, width: int) -> int:
    """12 layers width^2: the matrices of all layers (2104.07857, section 3)."""
    return 12 * layers * width**2


def checkpoint_bytes(batch: int, length: int, width: int, layers: int, *, interval: int = 1) -> float:
    """Layer inputs that are kept, one every `interval` layers (2104.07857, section 3)."""
    return 2 * batch * length * width * layers / interval


def working_state_bytes(width: int) -> int:
    """The largest operator's parameters and gradients: a width x 4 width matrix (2104.07857, section 3)."""
    return 4 * width * 4 * width


def working_activation_bytes(batch: int, length: int, width: int, heads: int, *, interval: int = 1) -> int:
    """What is computed again between two checkpoints (2104.07857, section 3)."""
    return batch * length * interval * (16 * width + 2 * heads * length)
