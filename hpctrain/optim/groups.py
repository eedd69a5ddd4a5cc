"""Which parameter belongs to which group, with which settings: resolved once, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from hpctrain.errors import ConfigError
from hpctrain.optim.options import Optimizer, ParameterGroup
from hpctrain.optim.schedule import Schedule
from hpctrain.plan.flat import FlatLayout
from hpctrain.plan.placement import Placement

__all__ = ["Member", "ResolvedGroup", "merged_ranges", "resolve_groups"]


@dataclass(frozen=True)
class Member:
    """A run of parameters of one group with one weight decay."""

    names: frozenset[str]
    weight_decay: float


@dataclass(frozen=True)
class ResolvedGroup:
    """A group with all settings filled in. `members`: its decaying and its not decaying parameters."""

    name: str
    lr: float
    schedule: Schedule
    members: tuple[Member, ...]


def resolve_groups(placements: Sequence[Placement], optimizer: Optimizer, groups: Sequence[ParameterGroup],
                   schedule: Schedule) -> tuple[ResolvedGroup, ...]:
    """Fills in the groups in their order and adds "default", which takes what no group matches. Local.

    A group without a schedule of its own (the `Constant` it starts with) follows `schedule`.
    """
    names = [group.name for group in groups]
    if len(set(names)) < len(names) or "default" in names:
        raise ConfigError(f"parameter group names {names} must differ from each other and from 'default'")
    groups = [g if g.schedule != ParameterGroup("").schedule else replace(g, schedule=schedule) for g in groups]
    groups.append(ParameterGroup("default", ("*",), schedule=schedule))
    taken: list[list[Placement]] = [[] for _ in groups]
    for placement in placements:
        index = next(i for i, group in enumerate(groups) if any(fnmatchcase(placement.name, p) for p in group.match))
        taken[index].append(placement)
    return tuple(_resolve(group, members, optimizer) for group, members in zip(groups, taken, strict=True))


def _resolve(group: ParameterGroup, placements: Sequence[Placement], optimizer: Optimizer) -> ResolvedGroup:
    decay = optimizer.weight_decay if group.weight_decay is None else group.weight_decay
    sorts = {decay: frozenset(p.name for p in placements if p.decay)}
    plain = frozenset(p.name for p in placements if not p.decay)
    sorts[0.0] = sorts.get(0.0, frozenset()) | plain
    members = tuple(Member(names, value) for value, names in sorts.items() if names)
    return ResolvedGroup(group.name, optimizer.lr if group.lr is None else group.lr, group.schedule, members)


def merged_ranges(layout: FlatLayout, names: frozenset[str]) -> tuple[tuple[int, int], ...]:
    """The ranges of the buffer that hold `names`, neighbours merged across the padding between them."""
    ranges: list[tuple[int, int]] = []
    joins = False
    for slot in layout.slots:
        if slot.name in names and slot.start < slot.stop:
            if joins:
                ranges[-1] = (ranges[-1][0], slot.stop)
            else:
                ranges.append((slot.start, slot.stop))
            joins = True
        elif slot.name not in names and slot.start < slot.stop:
            joins = False
    return tuple(ranges)
