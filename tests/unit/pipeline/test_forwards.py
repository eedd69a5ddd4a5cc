"""Passes that go forward only, and of one micro-batch alone, with their messages."""

from __future__ import annotations

from dataclasses import replace

from hpctrain.plan.pipeline.alone import alone
from hpctrain.plan.pipeline.catalogue import schedule
from hpctrain.plan.pipeline.forwards import forwards
from hpctrain.plan.pipeline.messages import with_messages
from hpctrain.plan.schedule import Forward, to_text


def test_all_messages_are_derived():
    for ranks, chunks, number in ((1, 1, 3), (2, 2, 5), (3, 1, 2), (3, 2, 7)):
        places = tuple(range(ranks)) * chunks
        orders = forwards(places, ranks, number)
        done = {(a.stage, a.micro_batch) for order in orders for a in order if isinstance(a, Forward)}
        assert done == {(s, i) for s in range(len(places)) for i in range(number)}
        assert with_messages(replace(schedule("gpipe", ranks, number, chunks=chunks), orders=tuple(
            tuple(a for a in order if isinstance(a, Forward)) for order in orders))) == orders


def test_one_micro_batch_alone():
    assert [to_text(order, stages=True) for order in alone(schedule("zb-v", 2, 3), 2)] == [
        "0F2 0SA2 3RA2 3F2 3B2 3SG2 0RG2 0B2", "1RA2 1F2 2F2 2SA2 2RG2 2B2 1B2 1SG2"]


def test_one_micro_batch_passes_the_stages_of_its_copy():
    plan = schedule("dualpipe", 2, 4)
    for i, copy in ((0, {0, 1}), (3, {2, 3})):
        assert {a.stage for order in alone(plan, i) for a in order if isinstance(a, Forward)} == copy
