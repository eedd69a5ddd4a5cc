"""Sends and receives follow from the computation."""

from __future__ import annotations

import pytest

from hpctrain.errors import PlanError
from hpctrain.plan.pipeline.classic import gpipe, interleaved
from hpctrain.plan.pipeline.messages import channel, with_messages
from hpctrain.plan.pipeline.plan import make_plan
from hpctrain.plan.pipeline.text import from_text
from hpctrain.plan.pipeline.zero_bubble import zb_v
from hpctrain.plan.schedule import Forward, RecvActivation, RecvGrad, SendActivation, SendGrad, to_text


def test_pictures():
    assert [to_text(order) for order in with_messages(gpipe(2, 2))] == [
        "F0 SA0 F1 SA1 RG0 B0 RG1 B1* R U",
        "RA0 F0 RA1 F1 B0 SG0 B1* SG1 R U",
    ]
    assert to_text(with_messages(interleaved(2, 1, 2))[0], stages=True) == (
        "0F0 0SA0 2RA0 2F0 2SA0 2RG0 2B0* 2SG0 0RG0 0B0* R U")


def test_no_message_between_stages_of_one_rank():
    order = with_messages(zb_v(2, 1))[1]
    assert to_text(order, stages=True) == "1RA0 1F0 2F0 2SA0 2RG0 2I0 2W0* 1I0 1SG0 1W0* R U"


def test_receives_follow_the_order_of_the_sends():
    plan = from_text("schedule crossed\nstages 0 1\nmicro-batches 3\nrank 0: F2 F0 F1 B0 B1 B2\n"
                     "rank 1: F0 F2 F1 B2 B1 B0")
    assert [to_text(order) for order in with_messages(plan)] == [
        "F2 SA2 F0 SA0 F1 SA1 RG2 RG1 RG0 B0 B1 B2* R U",
        "RA2 RA0 F0 F2 RA1 F1 B2 SG2 B1 SG1 B0* SG0 R U",
    ]


def test_channels_pair_send_and_receive():
    assert channel(SendActivation(3, 1)) == channel(RecvActivation(3, 2))
    assert channel(SendGrad(3, 2)) == channel(RecvGrad(3, 1))
    assert channel(SendActivation(3, 1)) != channel(SendGrad(3, 1))


def test_what_is_never_sent():
    plan = make_plan("lonely", 2, [0, 1], [[Forward(0, 0)], [Forward(0, 1), Forward(1, 1)]])
    with pytest.raises(PlanError, match="lonely: rank 1, slot 1: 1F1 needs micro-batch 1 of stage 0, which never"):
        with_messages(plan)
