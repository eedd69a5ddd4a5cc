"""Ring and pairwise plans: their pictures, and the proof of each for every small number of ranks."""

from __future__ import annotations

import pytest

from hpctrain.errors import PlanError
from hpctrain.plan import pairwise, ring
from hpctrain.plan.check import check
from hpctrain.plan.split import bounds
from hpctrain.plan.steps import CollectivePlan, Finish, Receive, Send


def plans(b: tuple[int, ...], p: int) -> list[CollectivePlan]:
    """Every plan there is for one workspace."""
    block = max(1, b[-1] // p // 3)
    return [
        ring.reduce_scatter(b),
        ring.all_gather(b),
        ring.all_reduce(b),
        pairwise.reduce_scatter(b),
        pairwise.reduce_scatter(b, block),
        pairwise.all_reduce(b),
        pairwise.all_reduce(b, block),
        *(ring.broadcast(b, p, root) for root in {0, p // 2, p - 1}),
        ring.broadcast(bounds(b[-1], 1), p, p - 1),
        ring.broadcast(bounds(b[-1], 5), p, 0),
    ]


@pytest.mark.parametrize("p", range(1, 18))
def test_every_plan_is_right(p: int) -> None:
    for count in (0, 1, p - 1, p, p + 1, 10**12 + 7):
        for plan in plans(bounds(count, p), p):
            check(plan)


@pytest.mark.parametrize("p", range(1, 8))
def test_parts_of_any_length_are_right(p: int) -> None:
    lopsided = [tuple(min(i * i, 10) for i in range(p + 1)), (*[0] * p, 9), (0, *[9] * p), (0,) * (p + 1)]
    for b in lopsided:
        for plan in plans(b, p):
            check(plan)


def test_the_picture_of_the_reduce_scatter() -> None:
    plan = ring.reduce_scatter((0, 10, 20, 30, 40))
    sent = [[step[0].start // 10 for step in plan.program(rank) if isinstance(step[0], Send)] for rank in range(4)]
    assert list(map(list, zip(*sent))) == [[3, 0, 1, 2], [2, 3, 0, 1], [1, 2, 3, 0]]
    assert plan.program(1) == (
        (Send(2, 0, 10), Receive(0, 30, 40, combine=True)),
        (Send(2, 30, 40), Receive(0, 20, 30, combine=True)),
        (Send(2, 20, 30), Receive(0, 10, 20, combine=True)),
        (Finish(10, 20),),
    )


def test_the_picture_of_the_all_gather() -> None:
    plan = ring.all_gather((0, 10, 20, 30))
    assert plan.program(0) == (
        (Send(1, 0, 10), Receive(2, 20, 30)),
        (Send(1, 20, 30), Receive(2, 10, 20)),
    )


def test_the_picture_of_the_broadcast() -> None:
    plan = ring.broadcast((0, 10, 20), 3, root=1)
    assert plan.program(1) == ((Send(2, 0, 10),), (Send(2, 10, 20),))
    assert plan.program(2) == ((Receive(1, 0, 10),), (Send(0, 0, 10), Receive(1, 10, 20)), (Send(0, 10, 20),))
    assert plan.program(0) == ((Receive(2, 0, 10),), (Receive(2, 10, 20),))


def test_the_picture_of_the_pairwise_exchange() -> None:
    plan = pairwise.reduce_scatter((0, 10, 20, 30))
    assert plan.program(0) == (
        (Send(1, 10, 20), Receive(2, 0, 10, combine=True)),
        (Send(2, 20, 30), Receive(1, 0, 10, combine=True)),
        (Finish(0, 10),),
    )


def test_blocks_bound_what_is_open_at_a_time() -> None:
    program = pairwise.reduce_scatter((0, 7, 10), block=3).program(0)
    finishes = [action for step in program for action in step if isinstance(action, Finish)]
    assert finishes == [Finish(0, 3), Finish(3, 6), Finish(6, 7)]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ring.all_gather((0, 2, 1)), "bounds"),
        (lambda: ring.all_gather((1, 2)), "bounds"),
        (lambda: ring.broadcast((0, 1), 2, root=2), "root = 2"),
        (lambda: ring.broadcast((0, 1), 0), "num_ranks = 0"),
        (lambda: ring.all_gather((0, 1, 2)).program(2), "rank = 2"),
        (lambda: CollectivePlan("all_gather", "x", 3, (0, 1), lambda rank: iter(())), "num_ranks . 1 = 4"),
    ],
)
def test_illegal_plans_are_refused(make: object, named: str) -> None:
    with pytest.raises(PlanError, match=named):
        make()  # type: ignore[operator]
