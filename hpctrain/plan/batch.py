"""The batch equation: global = micro x accumulation x data.

Owns the one place where batch sizes are derived from each other. `data` is the length of the *data* axis of the mesh,
never the world size: the ranks of a pipeline or of a tensor group work on the same samples.

    data axis 2     micro 2, accumulation 3    ->  global 12
                    global 12, micro 2         ->  accumulation 3
                    global 12, accumulation 3  ->  micro 2
                    micro 2                    ->  accumulation 1, global 4
                    global 12                  ->  accumulation 1, micro 6

Pure, standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.errors import ConfigError, choices

__all__ = ["Batch", "solve_batch"]

EQUATION = "batch.global = batch.micro x batch.accumulation x data axis"


@dataclass(frozen=True)
class Batch:
    """A solution of the equation. Sizes in samples; `accumulation` in micro-batches a rank and update."""

    micro: int
    accumulation: int
    data: int
    derived: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The global batch: samples that one update sees."""
        return self.micro * self.accumulation * self.data

    def __str__(self) -> str:
        return f"{self.size} = {self.micro} x {self.accumulation} x {self.data}"


def solve_batch(
    data: int, *, size: int | None = None, micro: int | None = None, accumulation: int | None = None
) -> Batch:
    """The batch for a data axis of `data` ranks from those of the three sizes that are given.

    Args:
        data: length of the data axis, at least 1.
        size: `batch.global`, samples an update over all ranks.
        micro: `batch.micro`, samples that a rank runs at once.
        accumulation: `batch.accumulation`, micro-batches a rank adds up before an update.

    Raises:
        ConfigError: a size below 1, too few sizes, or sizes that do not fit; says the equation and the nearest legal.
    """
    given = {"batch.global": size, "batch.micro": micro, "batch.accumulation": accumulation, "data axis": data}
    for name, value in given.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name} = {value!r} must be an integer of at least 1")
    if size is None and micro is None:
        raise ConfigError(f"give batch.micro or batch.global, so that {EQUATION} can be solved")
    if size is not None and micro is not None and accumulation is not None:
        if size != micro * accumulation * data:
            raise ConfigError(_conflict(size, micro, accumulation, data))
        return Batch(micro, accumulation, data)
    derived = []
    if size is None:
        assert micro is not None
        derived = ["global"] + ["accumulation"] * (accumulation is None)
        return Batch(micro, accumulation or 1, data, tuple(derived))
    if micro is not None:
        accumulation, rest = divmod(size, micro * data)
        if rest or not accumulation:
            raise ConfigError(_conflict(size, micro, None, data))
        return Batch(micro, accumulation, data, ("accumulation",))
    derived = ["micro"] + ["accumulation"] * (accumulation is None)
    accumulation = accumulation or 1
    micro, rest = divmod(size, accumulation * data)
    if rest or not micro:
        raise ConfigError(_conflict(size, None, accumulation, data))
    return Batch(micro, accumulation, data, tuple(derived))


def _conflict(size: int, micro: int | None, accumulation: int | None, data: int) -> str:
    """The equation filled in, and the nearest legal values of the global batch (and of a third size that was given)."""
    step = (micro or 1) * (accumulation or 1) * data
    filled = " x ".join(str(v) for v in (micro or "micro", accumulation or "accumulation", data))
    below = size // step * step
    legal = [value for value in (below, below + step) if value > 0]
    if micro and accumulation:  # all three given: exactly one global batch fits
        filled, legal = f"{filled} = {step}", [step]
        if size % (micro * data) == 0:
            hint = f", or batch.accumulation = {size // (micro * data)}"
        elif size % (accumulation * data) == 0:
            hint = f", or batch.micro = {size // (accumulation * data)}"
        else:
            hint = ""
    else:
        hint = ""
    return f"{EQUATION} does not hold: {size} != {filled}; nearest legal: batch.global = {choices(legal)}{hint}"
