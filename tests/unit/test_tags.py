"""Tags tell collectives apart that must not meet."""

from __future__ import annotations

from itertools import pairwise

from hpctrain.collectives.core import NUM_CHANNELS, NUM_TAGS
from hpctrain.collectives.tags import tag_of


def test_neighbours_in_time_never_share_a_tag():
    tags = [tag_of(number, "all_reduce sum", "float32", 5) for number in range(5000)]
    assert all(len(set(tags[i : i + 1016])) == 1016 for i in range(0, 4000, 500))
    highest = max(tag_of(1015, "all_reduce sum", "float32", count) for count in range(1000))
    assert min(tags) >= 0 and max(*tags, highest) < NUM_TAGS - (NUM_CHANNELS - 1)  # that of the last channel


def test_different_calls_at_one_number_rarely_share_a_tag():
    calls = [("all_reduce sum", "float32", 101), ("all_reduce sum", "float32", 100), ("all_reduce sum", "int32", 101),
             ("broadcast from 2", "float32", 101), ("exchange", "", 0), ("agree", "", 0), ("on_root 0", "", 0)]
    assert len({tag_of(3, *call) for call in calls}) >= len(calls) - 1
    counts = [tag_of(3, "all_reduce sum", "float32", count) for count in range(1000)]
    assert sum(a == b for a, b in pairwise(counts)) < 60
