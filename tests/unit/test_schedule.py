"""The schedule is its picture."""

from hpctrain.pipeline.executor import execute
from hpctrain.plan.schedule import Backward, Forward, OptimizerStep, ReduceGrads, accumulate, to_text


def test_pictures() -> None:
    assert to_text(accumulate(0)) == "R U"
    assert to_text(accumulate(1)) == "F0 B0* R U"
    assert to_text(accumulate(3)) == "F0 B0 F1 B1 F2 B2* R U"


def test_the_executor_calls_each_action_in_order() -> None:
    seen: list[object] = []
    kinds = (Forward, Backward, ReduceGrads, OptimizerStep)
    execute(accumulate(2), dict.fromkeys(kinds, seen.append))
    assert seen == list(accumulate(2))
