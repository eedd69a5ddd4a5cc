"""A rank that is slow in each step is named once, with its host and the part; nobody is blamed for waiting."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import parity
import pytest

import hpctrain
import hpctrain.numpy as face
from hpctrain.runtime.step import Trainer
from hpctrain.transport.threads import run_threads

GOOD = (np.ones((2, 3)), np.ones((2, 3)))


def train(num_ranks: int, slow: int | None, part: str, steps: int) -> None:
    def run(transport: Any) -> None:
        context = parity.context_of(transport)
        late = context.rank == slow

        def loss(outputs: Any, targets: Any) -> Any:
            time.sleep(0.05 if late and part == "forward" else 0.002)
            return face.squared_error(outputs, targets)

        layers = [face.Linear(face.Parameter(np.eye(3)), face.Parameter(np.zeros(3))), face.Tanh()]
        trainer = Trainer(context, face.network(layers, loss), optimizer=hpctrain.SGD(lr=0.01))
        for _ in range(steps):
            time.sleep(0.05 if late and part == "data" else 0.0)
            trainer.step([GOOD])

    run_threads(num_ranks, run)


@pytest.mark.parametrize("part", ["forward", "data"])
def test_the_slow_rank_is_named_once(part, capfd):
    train(4, 2, part, 21)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert "rank 2 on host is slower than the others" in lines[0] and lines[0].endswith(f"most of it in {part}")
    factor = float(lines[0].split(" times their")[0].split()[-1])
    assert factor > 3


def test_ten_steps_are_enough_and_nine_are_not(capfd):
    train(2, 1, "data", 9)
    assert capfd.readouterr().err == ""
    train(2, 1, "data", 10)
    assert "rank 1 on host" in capfd.readouterr().err


def test_one_pause_is_no_slowness(capfd):
    def run(transport: Any) -> None:
        context = parity.context_of(transport)
        layers = [face.Linear(face.Parameter(np.eye(3)), face.Parameter(np.zeros(3))), face.Tanh()]
        trainer = Trainer(context, face.network(layers, face.squared_error), optimizer=hpctrain.SGD(lr=0.01))
        for step in range(10):
            time.sleep(0.5 if step == 4 and context.rank == 1 else 0.01)
            trainer.step([GOOD])

    run_threads(2, run)
    assert capfd.readouterr().err == ""
