"""The stale trajectory: what a plan does with its versions equals the delayed update of the papers, to 1e-12."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from hpctrain.errors import ConfigError, PlanError
from hpctrain.plan.pipeline.plan import make_plan
from hpctrain.plan.pipeline.stale import pipedream, pipedream_2bw
from hpctrain.plan.pipeline.versions import versions
from hpctrain.plan.schedule import Backward, Forward, OptimizerStep, ReduceGrads, to_text

LR = 0.05
START = [0.9, 1.1, -0.8, 1.2]


def sample(i):
    return 0.5 + 0.13 * (i % 5), -0.4 + 0.2 * (i % 3)


def gradient(weights, i):
    """Of 0.5 (w0 w1 ... x - y)^2 by each weight."""
    x, y = sample(i)
    error = prod(weights) * x - y
    return [error * x * prod(weights[:s] + weights[s + 1:]) for s in range(len(weights))]


def run(plan):
    """Carries out a plan whose stages are numbers, with the versions it prescribes; the newest weights at the end."""
    known, n = versions(plan), plan.depth
    store = [{0: START[s]} for s in range(n)]
    sums, at = [0.0] * n, [0] * n
    activations, grads = {}, {}
    while any(at[r] < len(plan.orders[r]) for r in range(n)):
        before = list(at)
        for s in range(n):
            while at[s] < len(plan.orders[s]):
                action = plan.orders[s][at[s]]
                i = getattr(action, "micro_batch", None)
                if isinstance(action, Forward):
                    if s and (s - 1, i) not in activations:
                        break
                    came = activations[s - 1, i] if s else sample(i)[0]
                    activations[s, i] = store[s][known.used[s][i]] * came
                elif isinstance(action, Backward):
                    if s < n - 1 and (s + 1, i) not in grads:
                        break
                    came = grads[s + 1, i] if s < n - 1 else activations[s, i] - sample(i)[1]
                    sums[s] += came * (activations[s - 1, i] if s else sample(i)[0])
                    grads[s, i] = came * store[s][known.used[s][i]]
                    assert known.made[s][i] == max(store[s]) + 1
                elif isinstance(action, OptimizerStep):
                    newest = max(store[s])
                    store[s][newest + 1] = store[s][newest] - LR * sums[s]
                    sums[s] = 0.0
                at[s] += 1
        assert at != before
    return [versions_of[max(versions_of)] for versions_of in store]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("vertical", [False, True])
def test_pipedream(n, vertical):
    """w(t+1) = w(t) - lr grad f(w1(t-n+1), w2(t-n+2), ..., wn(t)); with vertical sync all are w(t-n+1)."""
    history = [START[:n]]
    for t in range(11):
        seen = [history[max(0, t - n + 1 + (0 if vertical else s))][s] for s in range(n)]
        history.append([w - LR * g for w, g in zip(history[-1], gradient(seen, t))])
    assert run(pipedream(n, 11, vertical=vertical)) == pytest.approx(history[-1], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("n, per_update", [(1, 1), (1, 3), (2, 2), (3, 3), (4, 4), (4, 3), (3, 5)])
@pytest.mark.parametrize("micro_batches", [12, 13])
def test_two_versions_are_enough(n, per_update, micro_batches):
    """W(t+1) = W(t) - lr grad(W(t-1)), summed over the micro-batches of an update."""
    history = [START[:n]]
    for t, first in enumerate(range(0, micro_batches, per_update)):
        seen = history[max(0, t - 1)]
        rows = [gradient(seen, i) for i in range(first, min(first + per_update, micro_batches))]
        history.append([w - LR * sum(row[s] for row in rows) for s, w in enumerate(history[-1])])
    plan = pipedream_2bw(n, micro_batches, per_update)
    assert run(plan) == pytest.approx(history[-1], rel=1e-12, abs=1e-12)
    assert max(versions(plan).kept) <= 2


def test_every_update_has_its_star():
    assert to_text(pipedream(1, 2).orders[0]) == "F0 B0* R U F1 B1* R U"
    assert to_text(pipedream_2bw(2, 5, 2).orders[1]) == "F0 B0 F1 B1* R U F2 B2 F3 B3* R U F4 B4* R U"


def test_the_table():
    known = versions(pipedream(3, 5))
    assert [list(row.values()) for row in known.used] == [[0, 0, 0, 1, 2], [0, 0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert [list(row.values()) for row in known.made] == [[1, 2, 3, 4, 5]] * 3
    assert known.kept == (3, 2, 1)  # warm-up + 1
    assert versions(pipedream(3, 5, vertical=True)).kept == (3, 3, 3)


def test_refused():
    update = [ReduceGrads(), OptimizerStep()]
    torn = [Forward(0), *update, Backward(0), *update]
    with pytest.raises(PlanError, match=r"rank 0, stage 0, slot 0, 0F0.*an update comes between"):
        versions(make_plan("torn", 1, [0], [torn]))
    assert versions(make_plan("torn", 1, [0], [torn], weights="stash")).used == ({0: 0},)
    slow = [Forward(0), Forward(1), Backward(0), *update, Backward(1), *update]
    fast = [Forward(0), Backward(0), *update, Forward(1), Backward(1), *update]

    def two(first, second):
        orders = [[replace(a, stage=s) if isinstance(a, Forward | Backward) else a for a in order]
                  for s, order in enumerate((first, second))]
        return make_plan("two", 2, [0, 1], orders, weights="vertical")

    assert versions(two(slow, fast)).used == ({0: 0, 1: 0}, {0: 0, 1: 0})
    with pytest.raises(PlanError, match=r"stage 1, slot 1, 1F1: .*needs version 1 .*only version 0"):
        versions(two(fast, slow))
    with pytest.raises(ConfigError, match=r"per update = 2 must be at least ranks - 1 = 3"):
        pipedream_2bw(4, 8, 2)
    with pytest.raises(ConfigError, match=r"weights = 'none'.*'one', 'stash', 'vertical' or 'double'"):
        make_plan("x", 1, [0], [[]], weights="none")
