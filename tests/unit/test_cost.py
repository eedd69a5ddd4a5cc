"""Counts and times read from the plans equal the formulas of the cost table (Thakur, Rabenseifner, Gropp 2005).

On any number of ranks; powers of two, and many ranks, are in `test_closed_forms`.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil, log2

import pytest

from hpctrain.plan import pairwise, ring
from hpctrain.plan.algorithms import make_plan
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


@pytest.mark.parametrize("p", [3, 5, 6, 7, 9, 12, 15, 17])
def test_any_other_number_of_ranks_within_the_stated_bounds(p: int) -> None:
    n = 60 * p * 16
    k = p.bit_length() - 1
    counts = [count(make_plan("all_reduce", "rabenseifner", p, n), rank) for rank in range(p)]
    assert max(c.rounds for c in counts) == 2 * k + 2
    assert max(c.sent for c in counts) <= (2 * Fraction(p - 1, p) + 2) * n
    counts = [count(make_plan("all_reduce", "recursive doubling", p, n), rank) for rank in range(p)]
    assert max(c.rounds for c in counts) == k + 2
    assert max(c.sent for c in counts) == (k + 1) * n
    for rank in range(p):
        assert count(make_plan("all_gather", "bruck", p, n), rank) == Count(
            ceil(log2(p)), Fraction(p - 1, p) * n, Fraction(p - 1, p) * n, 0
        )


@pytest.mark.parametrize("p", range(2, 18))
def test_trees_take_the_logarithm_of_the_ranks_in_rounds(p: int) -> None:
    n, rounds = 60 * p, ceil(log2(p))
    share = Fraction(p - 1, p) * n
    for operation, per_round in (("broadcast", BETA), ("reduce", BETA + G)):
        plan = make_plan(operation, "binomial tree", p, n, root=p - 1)
        assert makespan(plan, 1, MACHINE) == rounds * (A + n * per_round)
    assert count(make_plan("scatter", "binomial tree", p, n), 0) == Count(rounds, share, 0, 0)
    assert count(make_plan("gather", "binomial tree", p, n), 0) == Count(rounds, 0, share, 0)
    long = count(make_plan("broadcast", "scatter + all-gather", p, n), 0)
    assert (long.rounds, long.sent) == (rounds + p - 1, 2 * share)


@pytest.mark.parametrize("num_servers", [1, 2, 4])
def test_more_servers_share_the_load(num_servers: int) -> None:
    p, n = 8, 120
    plan = make_plan("all_reduce", "parameter server", p, n, num_servers=num_servers)
    share = n // num_servers
    client = num_servers - 1  # a server is a client of the others
    assert count(plan, 0) == Count(2, *[7 * share + client * share] * 2, 7 * share)
    assert count(plan, p - 1) == Count(2, n, n, 0)


def test_two_levels_send_little_between_nodes() -> None:
    nodes, g = 4, 8
    p, n = nodes * g, 3200
    plan = make_plan("all_reduce", "two-level", p, n, node_size=g)
    for rank in range(p):
        assert count(plan, rank).rounds == 20
        between = within = 0
        for step in plan.program(rank):
            for action in step:
                if type(action).__name__ == "Send":
                    far = action.peer // g != rank // g
                    between += far * (action.stop - action.start)
                    within += (not far) * (action.stop - action.start)
        assert (within, between) == (1.75 * n, 0.1875 * n)
