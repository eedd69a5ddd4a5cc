"""Learning-rate schedules, options and groups."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.errors import ConfigError
from hpctrain.optim.groups import merged_ranges, resolve_groups
from hpctrain.optim.options import LAMB, SGD, Adam, AdamW, Muon, ParameterGroup
from hpctrain.optim.schedule import Constant, Plateau, WarmupCosine, WarmupLinear
from hpctrain.plan.flat import flat_layouts
from hpctrain.plan.placement import Placement


def test_warmup_then_fall() -> None:
    linear, cosine = WarmupLinear(2, 6), WarmupCosine(2, 6, floor=0.2)
    assert [linear.factor(u, {}) for u in range(8)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert [cosine.factor(u, {}) for u in (2, 4, 6, 9)] == pytest.approx([1.0, 0.6, 0.2, 0.2])


def test_plateau_forgets_nothing_it_keeps_in_its_state() -> None:
    schedule, state = Plateau(shrink=0.5, patience=0), dict[str, Any]()
    for value in (1.0, 1.0, 0.5, 0.6):
        schedule.observe(value, state)
    assert schedule.factor(99, dict(state)) == 0.25


@pytest.mark.parametrize("bad", [lambda: WarmupLinear(5, 4), lambda: WarmupCosine(0, 4, floor=2), lambda: AdamW(lr=-1),
                                 lambda: AdamW(betas=(0.9, 1.0)), lambda: SGD(nesterov=True), lambda: SGD(momentum=-1),
                                 lambda: Adam(eps=-1), lambda: LAMB(weight_decay=-1), lambda: Muon(momentum=1.0),
                                 lambda: Muon(num_steps=0), lambda: Muon(lr=-1)])
def test_bad_options_are_refused(bad: Any) -> None:
    with pytest.raises(ConfigError):
        bad()


PLACEMENTS = [Placement("a.weight", (3,), "float32"), Placement("a.bias", (3,), "float32", decay=False),
              Placement("b.weight", (0,), "float32"), Placement("b.bias", (5,), "float32"),
              Placement("c.weight", (2,), "float32")]


def test_first_match_wins_and_empty_groups_stay() -> None:
    groups = [ParameterGroup("one", ("b.*",), lr=0.5), ParameterGroup("none", ("x",)),
              ParameterGroup("bias", ("*bias",))]
    one, none, bias, default = resolve_groups(PLACEMENTS, AdamW(lr=1.0, weight_decay=0.1), groups, Constant())
    assert [(m.names, m.weight_decay) for m in one.members] == [({"b.weight", "b.bias"}, 0.1)]
    assert none.members == () and (one.lr, none.lr) == (0.5, 1.0)
    assert [(m.names, m.weight_decay) for m in bias.members] == [({"a.bias"}, 0.0)]
    assert [(m.names, m.weight_decay) for m in default.members] == [({"a.weight", "c.weight"}, 0.1)]


def test_group_names_must_differ() -> None:
    with pytest.raises(ConfigError, match="differ"):
        resolve_groups(PLACEMENTS, AdamW(), [ParameterGroup("x"), ParameterGroup("x")], Constant())


def test_ranges_merge_across_padding_and_empty_slots_only() -> None:
    (layout,) = flat_layouts(PLACEMENTS)
    names = frozenset({"a.weight", "a.bias", "c.weight"})
    assert merged_ranges(layout, names) == ((0, 19), (48, 50))
    assert merged_ranges(layout, frozenset({"b.weight"})) == ()
    assert merged_ranges(layout, frozenset({"a.bias", "b.bias"})) == ((16, 37),)
