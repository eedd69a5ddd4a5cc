"""One rule divides everything."""

import pytest

from hpctrain.plan.split import bounds, intervals, part


def test_the_picture() -> None:
    assert bounds(10, 4) == (0, 3, 6, 8, 10)
    assert list(intervals(10, 4)) == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert bounds(2, 4) == (0, 1, 2, 2, 2)
    assert bounds(0, 3) == (0, 0, 0, 0)


@pytest.mark.parametrize("num_parts", range(1, 18))
def test_parts_tile_and_differ_by_at_most_one(num_parts: int) -> None:
    for count in (0, 1, num_parts - 1, num_parts, num_parts + 1, 10**12 + 7):
        parts = [part(count, num_parts, i) for i in range(num_parts)]
        assert parts[0][0] == 0
        assert parts[-1][1] == count
        assert all(parts[i][1] == parts[i + 1][0] for i in range(num_parts - 1))
        lengths = [stop - start for start, stop in parts]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] - lengths[-1] <= 1
        assert parts == list(intervals(count, num_parts))
        assert bounds(count, num_parts) == (*(start for start, _ in parts), count)


@pytest.mark.parametrize(
    ("arguments", "named"), [((3, 0, 0), "num_parts"), ((-1, 2, 0), "count"), ((3, 2, 2), "index")]
)
def test_illegal_arguments_are_named(arguments: tuple[int, int, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        part(*arguments)
