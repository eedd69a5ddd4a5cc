"""The options of ZeRO that do not fit each other are refused by name."""

from __future__ import annotations

import pytest

from hpctrain.errors import ConfigError
from hpctrain.zero.offload import Offload
from hpctrain.zero.options import Zero

DISK = {"directory": "/d"}


def test_offload_as_options_or_as_a_record():
    assert Zero(2, offload={"gradients": "disk", **DISK}) == Zero(2, offload=Offload(gradients="disk", directory="/d"))
    assert Zero().offload == Offload() and not Offload(states="host").on_disk
    with pytest.raises(ConfigError, match=r"zero\.offload\.sates is unknown \(did you mean 'states'\?\)"):
        Zero(offload={"sates": "disk"})


@pytest.mark.parametrize(("zero", "offload"), [
    ({"stage": 1}, {"gradients": "disk"}), ({"stage": 2, "accumulate": "buffer"}, {"gradients": "disk"}),
    ({"stage": 2}, {"parameters": "disk"}), ({"stage": 3, "share": "node"}, {"parameters": "disk"}),
    ({"stage": 3, "share": "auto"}, {"parameters": "disk"}),
])
def test_what_must_be_in_memory_is_not_offloaded(zero, offload):
    with pytest.raises(ConfigError, match=rf"zero\.offload\.{next(iter(offload))} = 'disk' needs zero\.stage"):
        Zero(**zero, offload=offload | DISK)
