"""From the words of a config to an optimizer."""

from __future__ import annotations

import pytest

from hpctrain.config.read import config_from
from hpctrain.optim.options import LAMB, SGD, Adam, AdamW, Muon
from hpctrain.train.recipe import make_optimizer

ADAM = {"lr": 0.5, "betas": (0.8, 0.7), "eps": 0.25, "weight_decay": 0.0}
KINDS = {"adamw": AdamW(**ADAM), "adam": Adam(**ADAM), "lamb": LAMB(**ADAM), "muon": Muon(**ADAM, momentum=0.6),
         "sgd": SGD(lr=0.5, momentum=0.6, weight_decay=0.0)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_optimizer(kind: str) -> None:
    section = {"kind": kind, "lr": 0.5, "beta1": 0.8, "beta2": 0.7, "eps": 0.25, "weight_decay": 0.0, "momentum": 0.6}
    optimizer = make_optimizer(config_from({"optimizer": section}))
    assert optimizer == KINDS[kind] and type(optimizer) is type(KINDS[kind])
