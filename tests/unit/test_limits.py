"""The options of the watch: limits by phase, refusals, what the environment overrules."""

from __future__ import annotations

import pytest

from hpctrain.errors import ConfigError
from hpctrain.runtime.limits import Watch


def test_limits_by_phase():
    watch = Watch(limit=5, phases={"data": None, "checkpoint": 60.0})
    assert [watch.limit_of(p) for p in ("init", "data", "step", "checkpoint")] == [5, None, 5, 60.0]
    assert Watch().limit_of("step") is None, "nothing is ended unless asked for"


def test_all_off():
    assert Watch(report=None, heartbeat=None).shortest is None
    assert Watch(report=None, heartbeat=None, phases={"step": 7}).shortest == 7


@pytest.mark.parametrize("options, words", [
    ({"limit": 0}, "watch.limit = 0"), ({"report": -1.0}, "watch.report = -1.0"), ({"heartbeat": 0.0}, "heartbeat"),
    ({"phases": {"steps": 5}}, "did you mean 'step'"), ({"phases": {"step": 0}}, r"phases\['step'\] = 0"),
    ({"straggler": -1}, "watch.straggler = -1"),
])
def test_refusals(options, words):
    with pytest.raises(ConfigError, match=words):
        Watch(**options)


def test_the_environment_overrules():
    watch = Watch(limit=5, debug=True)
    assert watch.overruled(None, None) == watch
    assert watch.overruled(7.0, False) == Watch(limit=7.0, debug=False)
