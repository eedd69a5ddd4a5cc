"""The picture of every algorithm, as it is kept in pictures.txt; and the pictures of odd messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.errors import PlanError
from hpctrain.plan import ring
from hpctrain.plan.algorithms import ALGORITHMS, make_plan
from hpctrain.plan.draw import draw
from hpctrain.plan.steps import CollectivePlan, Finish, Receive, Send

PICTURES = dict(picture.split("\n", 1) for picture in
                (Path(__file__).parent / "pictures.txt").read_text().strip("\n").split("\n\n"))


@pytest.mark.parametrize("title", PICTURES)
def test_picture(title: str) -> None:
    what, ranks = title.split(", ")
    algorithm, operation = what.rsplit(" ", 1)
    p = int(ranks.split()[0])
    drawn = draw(make_plan(operation, algorithm, p, 2 * p, node_size=2))
    assert drawn == f"{title}\n{PICTURES[title]}"


def test_every_algorithm_has_its_picture() -> None:
    drawn = {title.split(",")[0] for title in PICTURES}
    assert drawn == {f"{algorithm} {operation}" for operation, makers in ALGORITHMS.items() for algorithm in makers}


def test_what_does_not_end_with_a_part_is_drawn_by_its_elements() -> None:
    programs = {
        0: [(Send(1, 0, 3, ((5, 6),)),), (Receive(1, 2, 10, combine=True),), (Finish(2, 10),)],
        1: [(Receive(0, 0, 3, rest=((5, 6),)),), (Send(0, 2, 10),)],
    }
    plan = CollectivePlan("all_reduce", "odd", 2, (0, 5, 10), lambda rank: iter(programs[rank]))
    assert draw(plan).splitlines() == [
        "odd all_reduce, 2 ranks",
        "round   rank 0              rank 1",
        "    0   [0, 3) [5, 6) > 1",
        "    1                       [2, 10) +> 0",
        "        = [2, 10)",
    ]


def test_a_plan_that_cannot_be_played_cannot_be_drawn() -> None:
    plan = CollectivePlan("all_gather", "bad", 2, (0, 1, 2), lambda rank: iter([(Send(1 - rank, rank, rank + 1),)]))
    with pytest.raises(PlanError, match="deadlock"):
        draw(plan)


def test_one_rank() -> None:
    assert draw(ring.all_reduce((0, 4))).splitlines() == ["ring all_reduce, 1 rank", "round   rank 0", "        = 0"]
