"""The dynamic loss scale, step by step."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hpctrain.errors import ConfigError
from hpctrain.optim.loss_scale import LossScale, ScaleState, default_loss_scale


def run(options: LossScale, steps: str, state: ScaleState | None = None) -> list[float]:
    """The scale after each step: "." a clean one, "x" an overflow."""
    state = state or options.start()
    scales = []
    for step in steps:
        state = options.after(state, step == "x")
        scales.append(state.scale)
    return scales


def test_the_table_of_the_module() -> None:
    options = LossScale(initial=16, interval=3, hysteresis=2)
    assert run(options, "..xxx...xx") == [16, 16, 16, 8, 4, 4, 4, 8, 8, 4]


def test_hysteresis_is_not_reset_by_a_clean_step() -> None:
    options = LossScale(initial=64, interval=1000, hysteresis=2)
    assert run(options, "x.x.x.x") == [64, 64, 32, 32, 16, 16, 8]


def test_growth_resets_hysteresis_and_the_count() -> None:
    options = LossScale(initial=64, interval=2, hysteresis=3)
    assert run(options, "xxx..xxx..") == [64, 64, 32, 32, 64, 64, 64, 32, 32, 64]


def test_an_overflow_starts_the_count_of_clean_steps_anew() -> None:
    options = LossScale(initial=64, interval=3, hysteresis=9)
    assert run(options, "..x..x...") == [64] * 8 + [128]


def test_without_hysteresis_each_overflow_backs_off() -> None:
    options = LossScale(initial=2.0**16, interval=3, hysteresis=1)  # torch.amp.GradScaler's rule
    assert run(options, "x...x") == [2.0**15, 2.0**15, 2.0**15, 2.0**16, 2.0**15]


def test_floor_and_ceiling() -> None:
    assert run(LossScale(initial=4, hysteresis=1, floor=1), "xxxx") == [2, 1, 1, 1]
    assert run(LossScale(initial=5, hysteresis=1, floor=2), "xxx") == [2.5, 2, 2]
    assert run(LossScale(initial=2.0**1023, interval=1), "..") == [2.0**1023] * 2


def test_two_overflows_two_steps_apart_halve_once() -> None:
    assert run(LossScale(), "..x.x") == [2.0**16] * 4 + [2.0**15]


def test_factors() -> None:
    options = LossScale(initial=90, growth=3, backoff=0.1, interval=1, hysteresis=1)
    assert run(options, "x.") == pytest.approx([9, 27])


def test_fixed_and_off() -> None:
    assert run(LossScale.fixed(128.0), "xx" + "." * 5000) == [128.0] * 5002
    assert run(default_loss_scale(False), "x.x") == [1.0] * 3
    assert default_loss_scale(True) == LossScale()
    assert LossScale.fixed(0.25).start().scale == 0.25


def test_the_state_goes_through_a_checkpoint() -> None:
    options = LossScale(initial=64, interval=4, hysteresis=3)
    state = options.start()
    for step in "x..":
        state = options.after(state, step == "x")
    again = options.restore(json.loads(json.dumps(options.save(state))))
    assert again == state == ScaleState(64, 2, 2)
    assert options.restore(None) == options.start()
    assert LossScale.fixed(2.0).restore(options.save(state)).scale == 2.0
    assert LossScale(hysteresis=1).restore(options.save(state)).patience == 1


@pytest.mark.parametrize("bad", [{"initial": 0}, {"initial": float("inf")}, {"growth": 0.5}, {"backoff": 1.0},
                                 {"backoff": 0.0}, {"interval": 0}, {"hysteresis": 0}, {"floor": 0},
                                 {"initial": 1.0, "floor": 2.0}])
def test_bad_options_are_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match=f"loss_scale.{list(bad)[-1]} = "):
        LossScale(**bad)
