"""How fast states must flow to keep a device busy: the efficiency model of ZeRO-Infinity (arXiv 2104.07857, section 4).

    efficiency = computing / (computing + moving) = intensity x bandwidth / (intensity x bandwidth + peak)

Intensities are floating-point operations per byte moved in one step, with activations computed again. Bandwidths are
bytes per second and rank, peaks operations per second. Pure, standard library only.
"""

from __future__ import annotations

__all__ = ["checkpoint_intensity", "efficiency", "gather_bandwidth", "parameter_intensity", "state_intensity",
           "step_operations"]


def step_operations(batch: int, length: int, num_parameters: float) -> float:
    """Operations of a step: forward 2, backward 4, forward again 2 for each parameter and token."""
    return 8.0 * batch * length * num_parameters


def parameter_intensity(batch: int, length: int) -> float:
    """Of parameters (read three times) and gradients (written once), 2 bytes each: length x batch."""
    return step_operations(batch, length, 1) / (4 * 2)


def state_intensity(batch: int, length: int) -> float:
    """Of optimizer states, 16 bytes a parameter read and written once: length x batch / 4."""
    return step_operations(batch, length, 1) / (2 * 16)


def checkpoint_intensity(width: int, *, interval: int = 1) -> float:
    """Of activation checkpoints, written and read once: 24 width x interval."""
    return 24.0 * width * interval


def efficiency(intensity: float, bandwidth: float, peak: float) -> float:
    """Share of the time in which the device computes when nothing overlaps."""
    return intensity * bandwidth / (intensity * bandwidth + peak)


def gather_bandwidth(link: float, num_ranks: int, *, sliced: bool) -> float:
    """Bytes per second at which a parameter comes from slow memory to all ranks, each having a `link` of its own.

    `sliced`: each rank reads its part, then all gather; else one owner reads the whole and broadcasts (section 6).
    The exchange between devices is taken to be no limit.
    """
    return link * num_ranks if sliced else link
