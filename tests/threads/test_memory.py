"""Planned memory is the memory that a trainer holds, and the report says where it is not."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import parity
import pytest
import torch

import hpctrain
import hpctrain.torch
from hpctrain.arrays import arrays_of
from hpctrain.models.gpt import GPT, loss
from hpctrain.models.gpt_shape import GPTShape
from hpctrain.models.mlp import make_mlp
from hpctrain.models.mlp_shape import MLPShape
from hpctrain.plan.memory import MemoryRow
from hpctrain.runtime.memory import compare, num_bytes, process, report
from hpctrain.runtime.step import Trainer
from hpctrain.transport.threads import run_threads


def mixed() -> torch.nn.Module:
    """Two types, a frozen parameter; nothing is a multiple of anything."""
    module = torch.nn.Sequential(torch.nn.Linear(301, 7), torch.nn.Linear(7, 203).double())
    module[0].weight.requires_grad_(False)
    return module


MODELS: dict[str, Callable[[], Any]] = {
    "gpt": lambda: hpctrain.torch.adapt(GPT(GPTShape(vocabulary=97, width=48, layers=2, heads=3)), loss),
    "mlp": lambda: make_mlp(MLPShape(vocabulary=31, width=33), dtype="float64"),
    "tiny": lambda: hpctrain.torch.adapt(parity.TinyNet(), parity.torch_loss),
    "mixed": lambda: hpctrain.torch.adapt(mixed(), parity.torch_loss),
    "nothing": lambda: hpctrain.torch.adapt(torch.nn.ReLU(), parity.torch_loss),
}
OPTIMIZERS = [(hpctrain.AdamW(), 2), (hpctrain.SGD(lr=0.1, momentum=0.9), 1), (hpctrain.SGD(lr=0.1), 0)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("model", MODELS)
def test_a_trainer_holds_what_was_planned(model: str, num_ranks: int) -> None:
    def run(transport: Any) -> None:
        for optimizer, num_moments in OPTIMIZERS:
            context = parity.context_of(transport)
            trainer = Trainer(context, MODELS[model](), optimizer=optimizer)
            held = list(trainer._held())
            rows = {r.name: r for r in compare(context.world, trainer._planned_memory(), held)}
            for name in ["parameters", "gradients"] + ["moments"] * (num_moments > 0):
                row = rows[name]
                if row.measured is None:
                    assert model == "nothing" and row.planned == (0, 0)
                elif row.planned[1]:
                    assert row.difference is not None and abs(row.difference) < 0.05, row
            assert rows["not planned"].measured == (0, 0)
            assert rows["together"].planned == rows["together"].measured
            if model == "gpt":
                count = GPTShape(vocabulary=97, width=48, layers=2, heads=3).num_parameters
                each = (1 + 1 + num_moments) * 4 * count
                assert rows["together"].planned[1] == pytest.approx(each, rel=0.01)

    run_threads(num_ranks, run)


STAGES = [{"stage": 1}, {"stage": 2}, {"stage": 2, "accumulate": "buffer"}, {"stage": 3, "share": "none"},
          {"stage": 3, "share": "none", "threshold": 0}, {"stage": 3, "share": "auto"}]
PRECISIONS = [{}, {"compute": "bfloat16"}, {"compute": "bfloat16", "accumulate": "bfloat16"},
              {"compute": "bfloat16", "reduce": "bfloat16"}]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("model", ["gpt", "mlp", "tiny"])
def test_every_stage_holds_what_was_planned(model: str, num_ranks: int) -> None:
    def run(transport: Any) -> None:
        for stage, types in product(STAGES, PRECISIONS if model == "gpt" else PRECISIONS[:1]):
            context = parity.context_of(transport)
            trainer = Trainer(context, MODELS[model](), optimizer=hpctrain.AdamW(),
                              zero=hpctrain.Zero(bucket_bytes=1 << 12, **stage), precision=hpctrain.Precision(**types))
            for row in compare(context.world, trainer._planned_memory(), trainer._held()):
                if row.name in ("unit in use", "gradient copy", "activations"):
                    assert row.measured is None
                elif row.measured is not None and row.planned[1]:
                    assert row.difference is not None and abs(row.difference) < 0.05, (stage, types, row)
                else:
                    assert row.planned == (0, 0) and row.measured in (None, (0, 0)), (stage, types, row)

    run_threads(num_ranks, run)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_what_is_on_disk_or_late_is_held_as_planned(num_ranks: int, tmp_path: Path) -> None:
    offloads = [{"states": "disk"}, {"states": "disk", "gradients": "disk"}, {"delay": True, "delay_start": 0},
                {"states": "disk", "gradients": "disk", "delay": True}]

    def run(transport: Any) -> None:
        for offload in offloads:
            context = parity.context_of(transport)
            zero = hpctrain.Zero(stage=2, bucket_bytes=1 << 12,
                                 offload=hpctrain.Offload(directory=tmp_path, **offload))
            trainer = Trainer(context, MODELS["gpt"](), optimizer=hpctrain.AdamW(), zero=zero)
            rows = {row.name: row for row in compare(context.world, trainer._planned_memory(), trainer._held())}
            places = {row.name: row.where for row in trainer._planned_memory()}
            assert places["moments"] == offload.get("states", "device")
            assert places["gradients"] == offload.get("gradients", "device")
            late = ["master", "late gradients"] if "delay" in offload else []
            for name in ("parameters", "gradients", "moments", *late):
                assert rows[name].difference is not None and abs(rows[name].difference) < 0.05, (offload, rows[name])
                assert rows[name].planned[1] > 0
            assert ("late gradients" in rows) == bool(late)

    run_threads(num_ranks, run)


@pytest.mark.parametrize("stage, whole, divided", [(0, 16, 0), (1, 4, 12), (2, 2, 14), (3, 0, 16)])
def test_bytes_per_parameter_on_four_ranks(stage: int, whole: int, divided: int) -> None:
    """16, 4 + 12/n, 2 + 14/n, 16/n bytes a parameter with gradients in half precision (arXiv 1910.02054, figure 1)."""
    shape = GPTShape(vocabulary=96, width=64, layers=4, heads=4)

    def run(transport: Any) -> float:
        trainer = Trainer(parity.context_of(transport), hpctrain.torch.adapt(GPT(shape), loss),
                          optimizer=hpctrain.AdamW(), zero=hpctrain.Zero(stage=stage, share="none", threshold=0),
                          precision=hpctrain.Precision(compute="bfloat16", accumulate="bfloat16", master="float32"))
        states = ("parameters", "gradients", "master", "moments")
        return sum(size for name, size in trainer._held() if name in states) / shape.num_parameters

    for found in run_threads(4, run):
        assert found == pytest.approx(whole + divided / 4, rel=0.03)


def test_moments_of_the_optimizer_are_counted() -> None:
    """The comparison can fail: one more buffer than planned is seen."""
    def run(transport: Any) -> None:
        context = parity.context_of(transport)
        trainer = Trainer(context, MODELS["gpt"](), optimizer=hpctrain.AdamW())
        more = [*trainer._held(), ("moments", num_bytes(trainer._arrays, trainer._flat.gradients.held[0].array))]
        rows = {r.name: r for r in compare(context.world, trainer._planned_memory(), more)}
        assert rows["moments"].difference == pytest.approx(0.5)
        assert rows["together"].difference == pytest.approx(0.25)

    run_threads(2, run)


def test_rows_of_all_ranks_side_by_side() -> None:
    """Rank r plans 100 (r + 1) bytes of a, has 10 % more on rank 2; b is not measured by rank 1; c nobody planned."""
    def run(transport: Any) -> list[Any]:
        context, r = parity.context_of(transport), transport.rank
        planned = [MemoryRow("a", 100 * (r + 1)), MemoryRow("b", 8), MemoryRow("unmeasured", 7)]
        measured = [("a", 100 * (r + 1) - 60), ("a", 90 if r == 2 else 60), ("c", 5 * r)]
        measured += [] if r == 1 else [("b", 8)]
        return [(x.name, x.planned, x.measured, x.difference) for x in compare(context.world, planned, measured)]

    a, b, unmeasured, other, together = run_threads(3, run)[0]
    assert a == ("a", (100, 300), (100, 330), pytest.approx(0.1))
    assert b[2] is None and b[3] is None
    assert unmeasured == ("unmeasured", (7, 7), None, None)
    assert other == ("not planned", (0, 0), (0, 10), None)
    assert together[1:3] == ((108, 308), (108, 348))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_report_is_a_table_that_all_ranks_have(num_ranks: int) -> None:
    def run(transport: Any) -> str:
        trainer = Trainer(parity.context_of(transport), MODELS["gpt"](), optimizer=hpctrain.AdamW())
        return trainer.memory_report()

    texts = run_threads(num_ranks, run)
    assert len(set(texts)) == 1
    lines = texts[0].splitlines()
    assert [line.split("  ")[0] for line in lines] == ["memory a rank", "parameters", "gradients", "moments",
                                                       "together", "process"]
    assert all("+0.0 %" in line for line in lines[1:5])
    assert re.search(r"resident [\d,. ]+ MiB, of that shared .* MiB, its share of all .* MiB, most so far", lines[-1])


def test_ranks_that_differ_are_shown_as_a_span() -> None:
    def run(transport: Any) -> str:
        planned = [MemoryRow("a", (2 + transport.rank) * 2**20)]
        return report(parity.context_of(transport).world, planned, [("a", 2 * 2**20)])

    line = run_threads(2, run)[0].splitlines()[1]
    assert re.split(" {2,}", line) == ["a", "2.00 .. 3.00 MiB", "2.00 MiB", "-33.3 %"]


def test_the_process_is_what_the_system_says() -> None:
    before = process()
    block = np.ones(4 << 20)  # 32 MiB
    after = process()
    assert after.resident - before.resident > 0.9 * block.nbytes
    assert after.peak >= after.resident and after.shared < after.resident
    private = after.resident - after.shared
    assert after.proportional == -1 or 0.9 * private <= after.proportional <= 1.01 * after.resident


def test_bytes_count_bytes_of_half_types_too() -> None:
    arrays = arrays_of(torch.zeros(0))
    assert num_bytes(arrays, torch.zeros(3, dtype=torch.bfloat16)) == 6 and num_bytes(arrays, torch.zeros(0)) == 0
