"""The forwards alone, with their messages."""

from __future__ import annotations

from dataclasses import replace

from hpctrain.plan.pipeline.catalogue import schedule
from hpctrain.plan.pipeline.forwards import forwards
from hpctrain.plan.pipeline.messages import with_messages
from hpctrain.plan.schedule import Forward


def test_all_messages_are_derived():
    for ranks, chunks, number in ((1, 1, 3), (2, 2, 5), (3, 1, 2), (3, 2, 7)):
        places = tuple(range(ranks)) * chunks
        orders = forwards(places, ranks, number)
        done = {(a.stage, a.micro_batch) for order in orders for a in order if isinstance(a, Forward)}
        assert done == {(s, i) for s in range(len(places)) for i in range(number)}
        assert with_messages(replace(schedule("gpipe", ranks, number, chunks=chunks), orders=tuple(
            tuple(a for a in order if isinstance(a, Forward)) for order in orders))) == orders
