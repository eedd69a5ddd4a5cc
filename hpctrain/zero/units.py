"""Parameters that are spread over the ranks: gathered when a unit of the model needs them, given up after it.

    model      before(0)          after(0)  before(1)          after(1) ...
    unit 0     |gather|copy| lent          |
    unit 1                  |gather ... while 0 computes |copy| lent |

Gathers, like all collectives, must be made by all ranks in one order, also by ranks without data. So a pass (forward
and backward of one micro-batch, or a forward alone) is learnt once: each of its events is told to all ranks, and those
without data follow. From then on every rank knows what comes next: it starts gathering the next unit while this one
computes, and a rank without data plays the pass.

Owns the order of a pass and the windows that units come through. Knows the Model contract and regions; no optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from hpctrain.collectives import Group
from hpctrain.contracts import Array, Model, Work
from hpctrain.errors import UnsupportedError
from hpctrain.zero.held import Held
from hpctrain.zero.lender import Lender
from hpctrain.zero.regions import Region
from hpctrain.zero.windows import Windows

__all__ = ["REDUCTION", "Units"]

NUM_WINDOWS = 2  # a unit that is copied out, and the next one that is gathered
REDUCTION, _END = -1, -2  # events besides the numbers of units


class _Part(NamedTuple):
    """A bucket of one region: the part of a unit that is gathered at once."""

    region: int
    bucket: int


class _Gather(NamedTuple):
    """A part under way."""

    part: _Part
    work: Work
    window: Array


class Units:
    """Gathers the spread units of a model. Collective over the group to make, after all parameters are bound.

    Within a pass, which all ranks begin together, the model may run on this rank; `reduces` is called on a rank that
    plays a pass where the others started a reduction. All methods are collective over the group.
    """

    def __init__(self, model: Model, group: Group, regions: Sequence[Region], held: Sequence[Held],
                 lender: Lender) -> None:
        self._model, self._group, self._arrays = model, group, model.arrays
        self._regions, self._held, self._lender = regions, held, lender
        self._parts: dict[int, list[_Part]] = {}
        sizes: dict[str, int] = {}
        for i, region in enumerate(regions):
            for number, unit in enumerate(region.units):
                self._parts.setdefault(unit, []).append(_Part(i, number))
                bucket = region.shards.buckets[number]
                dtype = region.layout.dtype
                sizes[dtype] = max(sizes.get(dtype, 0), bucket.stop - bucket.start)
        per_unit = max((len(parts) for parts in self._parts.values()), default=1)
        self._windows = {dtype: Windows(group, self._arrays, dtype, count, NUM_WINDOWS * per_unit)
                         for dtype, count in sizes.items()}
        self._depth = dict.fromkeys(self._parts, 0)
        self._passes: dict[str, list[int]] = {}  # kind: events of a pass that was learnt
        self._kind = ""  # of the pass under way
        self._events: list[int] = []
        self._at = 0
        self._heard: int | None = None  # an event that was listened to and not yet told
        self._ahead: tuple[int, list[_Gather]] | None = None
        model.watch(self.before, self.after)
        for unit in self._parts:
            model.close(unit)

    @property
    def windows(self) -> list[Array]:
        """The windows that are free: between passes all of them. Local."""
        return [block for windows in self._windows.values() for block in windows.blocks]

    # Passes -----------------------------------------------------------------------------------------------------------

    def begin(self, kind: str) -> None:
        """A pass of this kind begins, on a rank with data."""
        if self._ahead is not None:  # of a pass that ended in an error on all ranks
            self._take(self._ahead[0])
        self._kind, self._at = kind, 0
        self._events = self._passes.get(kind, [])

    def end(self) -> None:
        """The pass is over, on a rank with data."""
        self._tell(_END)
        self._passes[self._kind] = self._events
        self._kind = ""

    def abandon(self) -> None:
        """The pass ended in an error. Local."""
        self._kind, self._heard = "", None

    def play(self, kind: str, reduces: Callable[[], None]) -> None:
        """Takes part in a pass that others run, on a rank without data for it."""
        self.begin(kind)
        while True:
            event = self._events[self._at] if kind in self._passes else self._listen()
            if event == _END:
                break
            if event == REDUCTION:
                reduces()  # tells of it
                continue
            self._tell(event)
            self._take(event)
            self._look_ahead()
        self.end()

    def tell_reduction(self) -> None:
        """The next collective of this pass is a reduction."""
        if self._kind:
            self._tell(REDUCTION)

    def _tell(self, event: int) -> None:
        if self._kind in self._passes:
            expected = self._events[self._at]
            if event != expected:
                raise UnsupportedError(f"a pass through the model went another way than the first ({_words(event)} "
                                       f"instead of {_words(expected)}); zero.stage = 3 with zero.share = 'none' needs "
                                       "one order on all ranks in all steps")
            self._at += 1
            return
        self._agree(event)

    def _listen(self) -> int:
        """What the ranks with data do next; does not take part in it yet."""
        told = [event for event in self._group.exchange(None) if event is not None]
        self._check_alike(told)
        self._heard = told[0]
        return int(told[0])

    def _agree(self, event: int) -> None:
        if self._heard is None:
            self._check_alike([told for told in self._group.exchange(event) if told is not None])
        self._heard = None
        self._events.append(event)

    def _check_alike(self, told: Sequence[int]) -> None:
        if len(set(told)) != 1:
            raise UnsupportedError("ranks go different ways through the model: "
                                   f"{', '.join(sorted({_words(event) for event in told}))}; zero.stage = 3 with "
                                   "zero.share = 'none' needs one order on all ranks")

    # Units ------------------------------------------------------------------------------------------------------------

    def before(self, unit: int) -> None:
        """The model is about to read the unit."""
        if unit not in self._parts:
            return
        if self._depth[unit] == 0:
            self._need(unit)
        self._depth[unit] += 1

    def _need(self, unit: int) -> None:
        if not self._kind:
            raise UnsupportedError("the model ran outside of the trainer while its parameters were spread over the "
                                   "ranks (zero.stage = 3, zero.share = 'none'); run it within Trainer.gathered()")
        self._tell(unit)
        self._lend(unit)
        self._look_ahead()

    def after(self, unit: int) -> None:
        """The model has read the unit. Local."""
        if unit not in self._parts:
            return
        self._depth[unit] -= 1
        if self._depth[unit] == 0:
            self._model.close(unit)

    def open_all(self, units: Sequence[int]) -> None:
        """Lends these units, until `close_all`."""
        for unit in units:
            if unit in self._parts:
                self._depth[unit] += 1
                if self._depth[unit] == 1:
                    self._lend(unit)

    def close_all(self, units: Sequence[int]) -> None:
        """Takes these units back. Local."""
        for unit in units:
            self.after(unit)

    def _lend(self, unit: int) -> None:
        """The unit's values into memory of the model."""
        gathers = self._fetch(unit)
        homes = dict(zip(self._model.units[unit], self._model.open(unit), strict=True))
        for gather in gathers:
            region = self._regions[gather.part.region]
            bucket = region.shards.buckets[gather.part.bucket]
            for name in bucket.names:
                slot = region.layout.by_name[name]
                self._arrays.assign(homes[name], gather.window[slot.start - bucket.start : slot.stop - bucket.start])
        self._give_back(gathers)

    def _take(self, unit: int) -> None:
        """Takes part in the gathering of a unit that this rank does not need."""
        self._give_back(self._fetch(unit))

    def _fetch(self, unit: int) -> list[_Gather]:
        if self._ahead is None:
            gathers = self._start(unit)
        else:
            ahead, gathers = self._ahead
            assert ahead == unit, "the order was checked"
            self._ahead = None
        for gather in gathers:
            gather.work.wait()
            self._lender.release(self._own(gather.part))
        return gathers

    def _look_ahead(self) -> None:
        """Starts to gather the unit that comes next in this pass, once that is known."""
        if self._kind in self._passes:
            units = list(islice((event for event in self._events[self._at :] if event >= 0), 2))
            if units:
                self._ahead = units[0], self._start(units[0])
            for part in self._parts[units[-1]] if len(units) == 2 else ():
                self._lender.fetch(self._own(part))

    def _start(self, unit: int) -> list[_Gather]:
        gathers = []
        for part in self._parts[unit]:
            shards = self._regions[part.region].shards
            bucket = shards.buckets[part.bucket]
            window = self._windows[shards.layout.dtype].take()
            work = self._group.start_all_gather(self._own(part), counts=shards.counts(part.bucket),
                                                out=window[: bucket.stop - bucket.start], name=f"unit {unit}")
            gathers.append(_Gather(part, work, window))
        return gathers

    def _own(self, part: _Part) -> Array:
        return self._held[part.region].piece(*self._regions[part.region].shards.part(part.bucket, self._group.rank))

    def _give_back(self, gathers: Sequence[_Gather]) -> None:
        for gather in gathers:
            self._windows[self._regions[gather.part.region].layout.dtype].give(gather.window)


def _words(event: int) -> str:
    return {REDUCTION: "a reduction", _END: "the end"}.get(event, f"unit {event}")
