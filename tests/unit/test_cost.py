"""Counts and times read from the plans equal the formulas of the cost table (Thakur, Rabenseifner, Gropp 2005)."""

from __future__ import annotations

from fractions import Fraction

import pytest

from hpctrain.plan import pairwise, ring
from hpctrain.plan.cost import Count, Machine, count, makespan, price
from hpctrain.plan.split import bounds
from tests.unit.test_ring import plans

# Times are compared exactly, so the machine's figures are whole numbers of some unit.
A, BETA, G = 1000, 3, 2
MACHINE = Machine(A, BETA, G)


@pytest.mark.parametrize("p", range(1, 18))
def test_rounds_and_volume(p: int) -> None:
    n = 60 * p
    b = bounds(n, p)
    share = Fraction(p - 1, p) * n
    for rank in range(p):
        for scatter in (ring.reduce_scatter(b), pairwise.reduce_scatter(b)):
            assert count(scatter, rank) == Count(p - 1, share, share, share)
        assert count(ring.all_gather(b), rank) == Count(p - 1, share, share, 0)
        for reduce in (ring.all_reduce(b), pairwise.all_reduce(b)):
            assert count(reduce, rank) == Count(2 * (p - 1), 2 * share, 2 * share, share)


@pytest.mark.parametrize("p", range(1, 18))
def test_times(p: int) -> None:
    n = 60 * p
    b = bounds(n, p)
    share = Fraction(p - 1, p) * n * 4  # bytes of float32
    expected = {
        "reduce_scatter": (p - 1) * A + share * (BETA + G),
        "all_gather": (p - 1) * A + share * BETA,
        "all_reduce": 2 * (p - 1) * A + 2 * share * BETA + share * G,
    }
    for plan in (ring.reduce_scatter(b), ring.all_gather(b), ring.all_reduce(b), pairwise.all_reduce(b)):
        assert makespan(plan, 4, MACHINE) == expected[plan.operation]
        assert all(price(plan, rank, 4, MACHINE) == expected[plan.operation] for rank in range(p))


@pytest.mark.parametrize("p", range(2, 18))
@pytest.mark.parametrize("num_pieces", [1, 2, 7])
def test_a_chain_takes_pieces_plus_ranks_minus_two_rounds(p: int, num_pieces: int) -> None:
    n = 60 * num_pieces
    plan = ring.broadcast(bounds(n, num_pieces), p, root=p - 1)
    assert makespan(plan, 1, MACHINE) == (num_pieces + p - 2) * (A + 60 * BETA)
    sent = [count(plan, rank).sent for rank in range(p)]
    assert sorted(sent) == [0] + [n] * (p - 1)


@pytest.mark.parametrize("p", range(1, 18))
def test_uneven_parts_cost_at_most_one_element_a_round_more(p: int) -> None:
    for n in (0, 1, p - 1, p, p + 1, 10**9 + 7):
        plan = ring.all_reduce(bounds(n, p))
        for rank in range(p):
            assert abs(count(plan, rank).sent - 2 * Fraction(p - 1, p) * n) < 2 * p
        ideal = 2 * (p - 1) * A + 2 * Fraction(p - 1, p) * n * BETA + Fraction(p - 1, p) * n * G
        assert makespan(plan, 1, MACHINE) <= ideal + 2 * (p - 1) * (BETA + G)


def test_what_is_sent_is_received() -> None:
    for plan in plans(bounds(1003, 5), 5):
        counts = [count(plan, rank) for rank in range(5)]
        assert sum(c.sent for c in counts) == sum(c.received for c in counts)


def test_the_whole_takes_at_least_as_long_as_any_of_its_ranks() -> None:
    for plan in plans(bounds(1003, 5), 5):
        assert makespan(plan, 4, MACHINE) >= max(price(plan, rank, 4, MACHINE) for rank in range(5))


def test_eighty_thousand_ranks_are_priced_in_seconds() -> None:
    plan = ring.all_reduce(bounds(10**10, 80_000))
    assert count(plan, 12_345).rounds == 2 * 79_999
    assert price(plan, 12_345, 4, MACHINE) == pytest.approx(159_998 * A + 4 * 125_000 * 79_999 * (2 * BETA + G))
