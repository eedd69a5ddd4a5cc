"""The text of a schedule, written by a person."""

from __future__ import annotations

import pytest

from hpctrain.errors import PlanError
from hpctrain.plan.pipeline.classic import one_f_one_b
from hpctrain.plan.pipeline.stale import pipedream_2bw
from hpctrain.plan.pipeline.text import from_text, plan_to_text
from hpctrain.plan.schedule import BackwardWeight, Forward, from_symbol, symbol


def test_picture():
    assert plan_to_text(one_f_one_b(2, 2)) == (
        "schedule 1f1b\nstages 0 1\nmicro-batches 2\nrank 0: F0 F1 B0 B1* R U\nrank 1: F0 B0 F1 B1* R U\n")
    assert "weights double\n" in plan_to_text(pipedream_2bw(2, 2))


def test_stars_and_the_end_may_be_left_out():
    short = "\n# by hand\nschedule 1f1b\nstages 0 1 # places\nmicro-batches 2\nrank 1: F0 B0 F1 B1\n"
    assert from_text(short + "rank 0: F0 F1 B0 B1\n") == one_f_one_b(2, 2)


@pytest.mark.parametrize("old, new, complaint", [
    ("rank 0: F0", "rank 0: X0", r"line 4: rank 0, slot 0: 'X0' is not an action"),
    ("rank 0: F0", "rank 0: F0*", r"line 4: rank 0, slot 0: 'F0\*' is not an action"),
    ("rank 1", "rank 0", "line 5: rank 0 has an order already"),
    ("rank 1", "rank 2", "ranks must be numbered from 0 without a gap"),
    ("stages 0 1", "stages 0 1 3", "stage 2 is on rank 3, but there are 2 ranks"),
    ("stages 0 1", "stages 0 x", "stages: 'x' is not a number"),
    ("stages 0 1\n", "", "no line 'stages ...'"),
    ("stages 0 1", "stages 0 0", "line 4: rank 0, slot 0: 'F0' says no stage, and its rank does not hold exactly one"),
    ("micro-batches 2", "micro-batches 2\nmicro-batches 2", "line 4: 'micro-batches 2' is none of the lines"),
    ("micro-batches 2", "micro-batches 0", "micro-batches = 0 must be an integer of at least 1"),
    ("stages 0 1", "stages 0 1\ncopies 3", "2 stages do not make 3 equal copies"),
    ("schedule 1f1b", "scedule 1f1b", "line 1: 'scedule 1f1b' is none"),
])
def test_complaints(old, new, complaint):
    text = plan_to_text(one_f_one_b(2, 2))
    assert old in text
    with pytest.raises(ValueError, match=complaint):
        from_text(text.replace(old, new))


def test_symbols():
    for text in ("2F0", "0B11*", "1I2", "3W4", "3W4*", "1SA2", "1RA2", "1SG2", "1RG2", "R", "U"):
        assert symbol(from_symbol(text, None), stages=True) == text
    assert from_symbol("F3", 5) == Forward(3, 5)
    assert from_symbol("W3*", 5) == BackwardWeight(3, True, 5)
    with pytest.raises(PlanError, match="says no stage"):
        from_symbol("F3", None)
