"""Offload over MPI changes no bit: what was sent from shared memory is sent from the file's pages."""

from __future__ import annotations

import tempfile
from typing import Any

import parity
import pytest
import torch

import hpctrain
import hpctrain.torch


@pytest.mark.parametrize(("stage", "share", "places"), [
    (1, "auto", ["states"]), (2, "auto", ["states", "gradients"]), (3, "node", ["states", "gradients"]),
    (3, "none", ["states", "gradients", "parameters"])])
@pytest.mark.parametrize("delay", [False, True])
def test_on_disk_and_not_are_the_same(stage: int, share: str, places: list[str], delay: bool) -> None:
    context = hpctrain.start()
    batches = parity.global_batches(4, 7, torch.float64)
    late = {"delay": delay, "delay_start": 1}

    def train(offload: dict[str, Any]) -> parity.Trace:
        zero = hpctrain.Zero(stage, share, threshold=8, bucket_bytes=100, offload=late | offload)
        model = hpctrain.torch.adapt(parity.TinyNet(), parity.torch_loss)
        return parity.train(context, model, batches, 2, optimizer=hpctrain.AdamW(lr=0.02), clip_norm=0.5, zero=zero)

    with tempfile.TemporaryDirectory() as directory:
        disk = train(dict.fromkeys(places, "disk") | {"directory": directory, "window_bytes": 1})
    parity.assert_same(disk, train({}), 0 if context.size < 3 else 1e-12)
