"""Rounds, elements and time of every algorithm equal its closed form, read from the plan, up to 65,536 ranks.

p = 2^k ranks, n elements of the whole vector, s = (p - 1) / p n: everything but one part. Any other number of ranks is
in `test_cost`.
"""

from __future__ import annotations

import time
from fractions import Fraction
from typing import NamedTuple

import pytest

from hpctrain.plan.algorithms import ALGORITHMS, make_plan
from hpctrain.plan.cost import Count, Machine, count, price

A, BETA, G = 1000, 3, 2
NODE = 8  # ranks of a node
SERVERS = 4
SECONDS = 20.0  # for one algorithm on 65,536 ranks; they take a few


class Form(NamedTuple):
    """What `rank` does. `wire` is what it sends or receives, whichever is more, added up over its rounds."""

    rank: int
    rounds: int
    sent: Fraction | int
    received: Fraction | int
    combined: Fraction | int
    wire: Fraction | int


def forms(p: int, n: int) -> dict[tuple[str, str], list[Form]]:
    """{(operation, algorithm): one rank, or the busiest rank and one at the other end}; the root is rank 0."""
    k, s, part, last = p.bit_length() - 1, Fraction(p - 1, p) * n, Fraction(n, p), p - 1
    g = min(NODE, p)
    nodes = p // g
    levels = Fraction(g - 1, g) * n + Fraction(nodes - 1, nodes) * Fraction(n, g)
    servers = min(SERVERS, p)
    share = Fraction(n, servers)
    client, server = (servers - 1) * share, (p - 1) * share

    def same(rounds: int, moved: Fraction | int, combined: Fraction | int = 0) -> list[Form]:
        return [Form(last // 2, rounds, moved, moved, combined, moved)]

    return {
        ("all_reduce", "naive"): same(1, (p - 1) * n, (p - 1) * n),
        ("all_reduce", "parameter server"): [
            Form(0, 2, client + server, client + server, server, 2 * max(client, server)),
            Form(last, 2, n, n, 0, 2 * n) if servers < p else
            Form(last, 2, client + server, client + server, server, 2 * max(client, server))],
        ("all_reduce", "ring"): same(2 * (p - 1), 2 * s, s),
        ("all_reduce", "bidirectional ring"): same(p, 2 * s, s),
        ("all_reduce", "recursive doubling"): same(k, k * n, k * n),
        ("all_reduce", "rabenseifner"): same(2 * k, 2 * s, s),
        ("all_reduce", "binomial tree"): [Form(0, 2 * k, k * n, k * n, k * n, 2 * k * n),
                                          Form(last, 2, n, n, 0, 2 * n)],
        ("all_reduce", "pairwise"): same(2 * (p - 1), 2 * s, s),
        ("all_reduce", "two-level"): same(2 * (g - 1) + 2 * (nodes - 1), 2 * levels, levels),
        ("reduce", "naive"): [Form(0, 1, 0, (p - 1) * n, (p - 1) * n, (p - 1) * n), Form(last, 1, n, 0, 0, n)],
        ("reduce", "binomial tree"): [Form(0, k, 0, k * n, k * n, k * n), Form(last, 1, n, 0, 0, n)],
        ("reduce", "rabenseifner"): [Form(0, 2 * k, s, 2 * s, s, 2 * s), Form(last, k + 1, s + part, s, s, s + part)],
        ("reduce_scatter", "naive"): same(1, s, s),
        ("reduce_scatter", "ring"): same(p - 1, s, s),
        ("reduce_scatter", "bidirectional ring"): same(p // 2, s, s),
        ("reduce_scatter", "rabenseifner"): same(k, s, s),
        ("reduce_scatter", "pairwise"): same(p - 1, s, s),
        ("all_gather", "naive"): same(1, s),
        ("all_gather", "ring"): same(p - 1, s),
        ("all_gather", "bidirectional ring"): same(p // 2, s),
        ("all_gather", "recursive doubling"): same(k, s),
        ("all_gather", "bruck"): same(k, s),
        ("broadcast", "naive"): [Form(0, 1, (p - 1) * n, 0, 0, (p - 1) * n), Form(last, 1, 0, n, 0, n)],
        ("broadcast", "ring"): [Form(0, p, n, 0, 0, n), Form(last, p, 0, n, 0, n)],  # as many pieces as ranks
        ("broadcast", "binomial tree"): [Form(0, k, k * n, 0, 0, k * n), Form(last, 1, 0, n, 0, n)],
        ("broadcast", "scatter + all-gather"): [Form(0, k + p - 1, 2 * s, s, 0, 2 * s),
                                                Form(last, p, s, s + part, 0, s + part)],
        ("scatter", "naive"): [Form(0, 1, s, 0, 0, s), Form(last, 1, 0, part, 0, part)],
        ("scatter", "binomial tree"): [Form(0, k, s, 0, 0, s), Form(last, 1, 0, part, 0, part)],
        ("gather", "naive"): [Form(0, 1, 0, s, 0, s), Form(last, 1, part, 0, 0, part)],
        ("gather", "binomial tree"): [Form(0, k, 0, s, 0, s), Form(last, 1, part, 0, 0, part)],
        ("all_to_all", "naive"): same(1, s),
        ("all_to_all", "pairwise"): same(p - 1, s),
        ("all_to_all", "bruck"): same(k, Fraction(n, 2) * k),
    }


def test_every_algorithm_has_a_form() -> None:
    assert set(forms(4, 64)) == {(operation, name) for operation, makers in ALGORITHMS.items() for name in makers}


@pytest.mark.parametrize("p", [2, 4, 8, 32, 65_536])
@pytest.mark.parametrize(("operation", "algorithm"), forms(4, 64), ids=lambda name: name)
def test_counts_and_time_equal_the_closed_form(operation: str, algorithm: str, p: int) -> None:
    n, start = 64 * p, time.monotonic()
    plan = make_plan(operation, algorithm, p, n, node_size=NODE, num_servers=min(SERVERS, p))
    for form in forms(p, n)[operation, algorithm]:
        assert count(plan, form.rank) == Count(form.rounds, form.sent, form.received, form.combined), form
        expected = form.rounds * A + 4 * (form.wire * BETA + form.combined * G)
        assert price(plan, form.rank, 4, Machine(A, BETA, G)) == expected, form
    assert time.monotonic() - start < SECONDS
