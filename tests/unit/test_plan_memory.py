"""The memory tables of `hpctrain plan`."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from hpctrain.cli.memory import memory_tables, stages_table
from hpctrain.config.read import config_from
from hpctrain.errors import ConfigError
from hpctrain.models.gpt_shape import GPTShape
from hpctrain.plan.batch import solve_batch

GPT = {"vocabulary": 96, "width": 64, "layers": 3, "heads": 4, "context": 32}
COUNT = GPTShape(**GPT).num_parameters
ACTIVATIONS = GPTShape(**GPT).num_activations(2, 32)


def shown(table: Any) -> dict[str, list[str]]:
    """Cells of each row by its name, plain text."""
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    lines = [re.split(r"\s*[│┃]\s*", line.strip("│┃ ")) for line in console.file.getvalue().splitlines()
             if line.startswith(("│", "┃"))]
    return {cells[0].strip(): [c.strip() for c in cells[1:]] for cells in lines}


def tables(ranks: int, ranks_per_node: int = 1, accumulation: int = 1, **sections: Any) -> list[dict[str, list[str]]]:
    config = config_from({"model": GPT} | sections)
    batch = solve_batch(ranks, micro=2, accumulation=accumulation)
    found = [*memory_tables(config, batch, ranks_per_node), stages_table(config, batch, ranks_per_node)]
    return [shown(table) for table in found]


def kib(cell: str) -> float:
    number, unit = cell.split()
    return float(number) * {"B": 1 / 1024, "KiB": 1, "MiB": 1024}[unit]


def test_parameters_by_kind() -> None:
    kinds = tables(1)[0]
    assert kinds["blocks.*.qkv.weight"] == ["3", f"{3 * 3 * 64 * 64:,}"]
    assert kinds["embedding.weight"] == ["1", f"{96 * 64:,}"]
    assert kinds["together"] == [str(len(GPTShape(**GPT).parameters())), f"{COUNT:,}"]


def test_stage_0_keeps_everything_everywhere() -> None:
    memory = tables(4)[1]
    assert kib(memory["parameters"][0]) == pytest.approx(4 * COUNT / 1024, rel=0.01)
    assert memory["parameters"][2:] == ["4.000", "rank"] and memory["moments"][2] == "8.000"
    assert memory["parameters"][0] == memory["parameters"][1]
    assert "master" not in memory and "gather windows" not in memory
    assert kib(memory["activations (estimate)"][0]) == pytest.approx(4 * ACTIVATIONS / 1024, rel=0.01)


def test_stage_3_of_half_types_on_three_ranks() -> None:
    memory = tables(3, zero={"stage": 3, "threshold": 0}, precision={"compute": "bfloat16"})[1]
    each = [float(memory[name][2]) for name in ("parameters", "gradients", "master", "moments")]
    assert each == pytest.approx([2 / 3, 4 / 3, 4 / 3, 8 / 3], rel=0.01)
    block = 12 * 64 * 64 + 13 * 64
    assert kib(memory["gather windows"][0]) == pytest.approx(2 * 2 * block / 1024, rel=0.01)
    assert kib(memory["unit in use"][0]) == pytest.approx(2 * block / 1024, rel=0.01)
    assert kib(memory["activations (estimate)"][0]) == pytest.approx(2 * ACTIVATIONS / 1024, rel=0.01)
    assert list(tables(3)[1]) == ["what", "parameters", "gradients", "moments", "activations (estimate)", "together"]


@pytest.mark.parametrize("share, peers, where", [
    ("auto", 6, "node (its share)"), ("node", 8, "node (its share)"), ("none", 6, "rank"), ("auto", 5, "rank"),
    ("auto", 1, "rank")])
def test_sharing_of_a_node(share: str, peers: int, where: str) -> None:
    memory = tables(6, peers, zero={"stage": 3, "share": share})[1]
    assert memory["parameters"][3] == where
    assert ("gather windows" in memory) == (where == "rank")


def test_no_rank_has_more_than_rank_0_or_less_than_the_last() -> None:
    model = {"kind": "mlp", "vocabulary": 3, "width": 1, "layers": 1, "context": 1}
    memory = tables(50, model=model, zero={"stage": 1, "bucket_bytes": 1})[1]
    assert memory["what"][:2] == ["most: rank 0", "least: rank 49"]
    # Five buckets of 1 to 5 cache lines over 50 ranks: the first owns one of each, the last none; two moments.
    assert memory["moments"][:2] == [f"{5 * 64 * 2} B", "0 B"]


def test_a_node_that_has_not_all_ranks_cannot_share() -> None:
    with pytest.raises(ConfigError, match="zero.share = 'node' needs all 6 ranks on one node"):
        tables(6, 4, zero={"stage": 3, "share": "node"})


def test_small_units_stay_whole() -> None:
    none = {"stage": 3, "share": "none"}
    assert tables(4, zero=none | {"threshold": 10**9})[1]["parameters"][2] == "4.000"
    assert tables(4, zero=none | {"threshold": 0})[1]["parameters"][2] == "1.000"


def test_whole_gradients() -> None:
    assert tables(4, zero={"stage": 2, "accumulate": "buffer"})[1]["gradients"][2] == "4.000"
    assert tables(4, zero={"stage": 2})[1]["gradients"][2] == "1.000"


def test_no_moments_without_momentum() -> None:
    sgd = {"kind": "sgd", "momentum": 0.0}
    assert "moments" not in tables(2, optimizer=sgd)[1]


def test_stages_by_ranks() -> None:
    stages = tables(6, 2, zero={"stage": 1})[2]
    assert stages["stage"] == ["1", "2", "4", "6"]
    assert list(stages) == ["stage", "0", "1", "2", "3, share = none", "3, share = node"]
    assert stages["3, share = node"][2:] == ["-", "-"]
    whole = (16 * COUNT + 4 * ACTIVATIONS) / 2**20
    assert [float(x) for x in stages["0"]] == pytest.approx([whole] * 4, abs=0.02)
    assert [float(x) for x in stages["1"]] == pytest.approx(
        [(8 * COUNT + 8 * COUNT / n + 4 * ACTIVATIONS) / 2**20 for n in (1, 2, 4, 6)], abs=0.02)
    assert "3, share = node" not in tables(6)[2]
    planned = tables(6, 2, zero={"stage": 1})[1]["together"][0]
    assert kib(planned) / 1024 == pytest.approx(float(stages["1"][-1]), abs=0.01)
