"""The checker rejects plans that are wrong, each in its own way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hpctrain.errors import PlanError
from hpctrain.plan import naive, pairwise, ring
from hpctrain.plan.algorithms import make_plan
from hpctrain.plan.check import check
from hpctrain.plan.steps import CollectivePlan, Finish, Program, Receive, Send
from hpctrain.plan.sums import Sums

B = (0, 10, 20, 30)
Change = Callable[[list[list[Any]]], object]


def changed(plan: CollectivePlan, rank: int, change: Change) -> CollectivePlan:
    """`plan` with `change` made to the program of one rank."""
    programs = {r: [list(step) for step in plan.program(r)] for r in range(plan.num_ranks)}
    change(programs[rank])
    return replace(plan, make=lambda r: iter(tuple(step) for step in programs[r]))


def put(step: int, action: int, value: Any) -> Change:
    return lambda program: program[step].__setitem__(action, value)


@pytest.mark.parametrize(
    ("plan", "rank", "change", "text"),
    [
        # a dropped step: its partners wait for ever
        (ring.all_reduce(B), 1, lambda program: program.pop(1), "rank 1, step 1 finishes .* ranks .1."),
        (ring.all_gather(B), 2, lambda program: program.pop(), "deadlock of .* rank"),
        (ring.all_gather(B), 2, lambda program: program[1].pop(0), "deadlock"),
        # the wrong peer
        (ring.all_gather(B), 0, put(0, 0, Send(2, 0, 10)), "deadlock"),
        (ring.all_gather(B), 0, put(0, 0, Send(0, 0, 10)), "no legal peer"),
        (ring.all_gather(B), 0, put(0, 0, Send(3, 0, 10)), "no legal peer"),
        # the wrong interval
        (ring.all_gather(B), 0, put(0, 0, Send(1, 10, 20)), r"rank 0, step 0 sends elements \[10, 20\) but rank 1"),
        (ring.all_gather(B), 0, put(0, 0, Send(1, 0, 9)), r"sends elements \[0, 9\)"),
        (ring.all_gather(B), 0, put(0, 0, Send(1, 0, 99)), "must name elements"),
        (ring.all_gather(B), 0, put(0, 0, Send(1, 5, 5)), "at least one"),
        # added where it should replace, and the other way round
        (ring.all_gather(B), 1, put(1, 1, Receive(0, 20, 30, combine=True)), "rank 1, step 1 adds to .* does not have"),
        (ring.reduce_scatter(B), 1, put(1, 1, Receive(0, 10, 20)), r"rank 1, step 2 finishes elements \[10, 20\)"),
        # finished too early, twice, never
        (ring.reduce_scatter(B), 1, lambda program: program.insert(0, program.pop()), "rank 1, step 0 finishes"),
        (ring.reduce_scatter(B), 1, lambda program: program.append(program[-1]), "step 3 finishes .* finished"),
        (ring.reduce_scatter(B), 1, lambda program: program.pop(), "at the end elements"),
        (pairwise.all_reduce(B), 0, lambda program: program.pop(2), r"rank 0 combines but never finishes .*\[0, 10\)"),
        # touched twice within a step
        (ring.all_gather(B), 0, lambda program: program[0].append(Finish(20, 30)), "touch the same"),
        (ring.all_gather(B), 0, lambda program: program[0].append(Receive(1, 5, 6)), "touch the same"),
        (ring.all_gather(B), 0, lambda program: program[0].append(Receive(1, 25, 26)), "touch the same"),
        (ring.all_gather(B), 0, lambda program: program[0].append(Send(1, 0, 5)), "taken for one another"),
    ],
)
def test_one_wrong_action_is_found(plan: CollectivePlan, rank: int, change: Change, text: str) -> None:
    check(plan)
    with pytest.raises(PlanError, match=text):
        check(changed(plan, rank, change))


def plan_of(operation: str, *programs: Program, bounds: tuple[int, ...] = (0, 1, 2)) -> CollectivePlan:
    return CollectivePlan(operation, "by hand", len(programs), bounds, lambda rank: iter(programs[rank]))


def test_a_contribution_may_be_added_once_only() -> None:
    swap = ((Send(1, 0, 1), Receive(1, 1, 2, combine=True)),)
    back = ((Send(0, 1, 2), Receive(0, 0, 1, combine=True)),)
    with pytest.raises(PlanError, match=r"rank 0, step 1 adds a contribution twice to elements \[1, 2\)"):
        check(plan_of("all_reduce", swap + swap, back + back))


def test_what_is_finished_is_not_changed_any_more() -> None:
    add = ((Receive(1, 0, 2, combine=True),), (Finish(0, 2),), (Receive(1, 0, 2),))
    give = ((Send(0, 0, 2),), (Send(0, 0, 2),))
    with pytest.raises(PlanError, match="rank 0, step 2 replaces elements .* which is finished"):
        check(plan_of("all_reduce", add, give))


def test_nobody_sends_what_it_does_not_have() -> None:
    with pytest.raises(PlanError, match="rank 0, step 0 sends .* which it does not have"):
        check(plan_of("all_gather", ((Send(1, 1, 2),),), ((Receive(0, 1, 2),),)))


def test_two_blocking_sends_are_a_deadlock() -> None:
    first = ((Send(1, 0, 1),), (Receive(1, 1, 2),))
    second = ((Send(0, 1, 2),), (Receive(0, 0, 1),))
    with pytest.raises(PlanError, match="deadlock of 2 ranks: rank 0, step 0"):
        check(plan_of("all_gather", first, second))


def test_ranks_need_not_be_in_lockstep() -> None:
    # Rank 1 has an idle step, and rank 0 sends in two messages what rank 1 receives in one step from two ranks.
    first = ((Send(1, 0, 1), Receive(1, 1, 2)),)
    second = ((), (), (Receive(0, 0, 1), Send(0, 1, 2)))
    check(plan_of("all_gather", first, second))


def test_a_broadcast_must_bring_the_roots_elements() -> None:
    with pytest.raises(PlanError, match=r"at the end elements \[0, 2\) on rank 1"):
        check(plan_of("broadcast", (), (), bounds=(0, 2)))


def test_sums_added_up_in_different_orders_are_not_the_same_bits() -> None:
    def plan(*first_two_of_rank_1: tuple[Any, ...]) -> CollectivePlan:
        return plan_of(
            "all_reduce",
            # rank 0 forms (0 + 1) + 2
            (
                (Send(1, 0, 1), Receive(1, 0, 1, combine=True)),
                (Receive(2, 0, 1, combine=True),),
                (Finish(0, 1),),
                (Send(2, 0, 1),),
            ),
            (*first_two_of_rank_1, (Finish(0, 1),)),
            ((Send(1, 0, 1),), (Send(0, 0, 1),), (Receive(0, 0, 1),)),
            bounds=(0, 1, 1, 1),
        )

    check(plan((Send(0, 0, 1), Receive(0, 0, 1, combine=True)), (Receive(2, 0, 1, combine=True),)))  # (1 + 0) + 2
    with pytest.raises(PlanError, match=r"on rank 1 .* added up in another order than on rank 0"):
        check(plan((Send(0, 0, 1), Receive(2, 0, 1, combine=True)), (Receive(0, 0, 1, combine=True),)))  # (1 + 2) + 0


def test_addition_is_commutative_but_not_associative() -> None:
    sums = Sums(3)
    a, b, c = (sums.of(rank) for rank in range(3))
    assert sums.add(a, b) == sums.add(b, a)
    assert sums.add(sums.add(a, b), c) != sums.add(a, sums.add(b, c))
    assert sums.is_complete(sums.add(sums.add(a, b), c))
    assert not sums.is_complete(sums.add(a, b))


def test_a_direct_plan_combines_untouched_contributions_only() -> None:
    with pytest.raises(PlanError, match="rank ., step 1 adds a partial sum to .* direct"):
        check(replace(ring.reduce_scatter(B), direct=True))


def test_what_comes_from_several_ranks_is_added_in_the_order_of_ranks() -> None:
    check(naive.all_reduce((0, 1, 2, 3)))  # and so is the same everywhere, see above


def test_messages_of_several_intervals() -> None:
    plan = make_plan("all_gather", "bruck", 5, 10)
    first = next(a for step in plan.program(4) for a in step if isinstance(a, Send) and a.rest)
    where = next((i, step.index(first)) for i, step in enumerate(plan.program(4)) if first in step)
    shorter = replace(first, rest=())
    with pytest.raises(PlanError, match="sends elements"):
        check(changed(plan, 4, put(*where, shorter)))
    twice = replace(first, rest=((first.start, first.stop),))
    with pytest.raises(PlanError, match="names an element twice"):
        check(changed(plan, 4, put(*where, twice)))
    with pytest.raises(PlanError, match="combines, so it must have one interval"):
        check(plan_of("all_reduce", ((Receive(1, 0, 1, combine=True, rest=((1, 2),)),),), ()))


def test_a_send_and_a_sum_may_share_a_step_but_a_store_may_not() -> None:
    def swap(combine: bool) -> CollectivePlan:
        programs = [((Send(1 - r, 0, 2), Receive(1 - r, 0, 2, combine)), (Finish(0, 2),)) for r in range(2)]
        return plan_of("all_reduce", *programs)

    check(swap(combine=True))
    with pytest.raises(PlanError, match="touch the same elements"):
        check(swap(combine=False))


@pytest.mark.parametrize("operation", ["scatter", "gather", "all_to_all", "reduce"])
def test_the_end_of_each_operation_is_looked_at(operation: str) -> None:
    right = make_plan(operation, "naive", 2, 4)
    check(right)
    with pytest.raises(PlanError, match="at the end elements"):
        check(replace(right, make=lambda rank: iter(())))
    other = {"scatter": 1, "gather": 1}.get(operation)
    if other is not None:
        with pytest.raises(PlanError, match="at the end|which it does not have"):
            check(replace(right, root=other))
