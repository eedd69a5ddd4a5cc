"""docs/pipelines.md says what the code does: its examples, its table of schedules, its picture."""

from __future__ import annotations

import doctest
import re
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.config.read import config_from, tomllib
from hpctrain.plan.batch import solve_batch
from hpctrain.plan.pipeline.catalogue import SCHEDULES, schedule
from hpctrain.plan.pipeline.draw import draw
from hpctrain.plan.pipeline.simulate import Times, simulate
from hpctrain.plan.pipeline.stash import peaks
from hpctrain.train.pipeline import cut, layer_costs, pipelining

PAGE = Path(__file__).parents[2] / "docs" / "pipelines.md"

#: name -> (bubble, held) as in the table, from p, m, v, F, I, W.
FORMULAS = {
    "naive": lambda p, m, v, F, I, W: (m * (p - 1) * (F + I + W), 1),
    "gpipe": lambda p, m, v, F, I, W: ((p - 1) * (F + I + W) / v, m),
    "1f1b": lambda p, m, v, F, I, W: ((p - 1) * (F + I + W), p),
    "interleaved": lambda p, m, v, F, I, W: (
        (p - 1) * (F + I + W) / v, (2 * (p - 1) + (v - 1) * p + 1) / v if v > 1 else p),
    "zb-h1": lambda p, m, v, F, I, W: ((p - 1) * (F + I - W), p),
    "zb-h2": lambda p, m, v, F, I, W: ((p - 1) * max(F, F + I - 2 * W), 2 * p - 1),
    "zb-v": lambda p, m, v, F, I, W: ((p - 1) * F / 2, p),
    "dualpipe": lambda p, m, v, F, I, W: ((p / 2 - 1) * (F + 2 * (I + W) - 3 * W), p + 1),
    "dualpipe-v": lambda p, m, v, F, I, W: ((p - 1) * (F + 2 * (I + W) - 3 * W) / 2, p + 0.5),
    "pipedream": lambda p, m, v, F, I, W: ((p - 1) * (F + I + W), p),
}


def test_the_table_names_every_schedule_with_its_options() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| ([\w, ]*?) ?\|", PAGE.read_text(), re.MULTILINE)
    written = {name: set(options.split(", ")) - {""} for name, options in rows}
    assert written == {name: set(options) - {"weight_part"} for name, (_, options) in SCHEDULES.items()}


@given(st.sampled_from(sorted(FORMULAS)), st.integers(1, 4), st.integers(0, 2), st.integers(1, 3),
       st.integers(1, 4), st.integers(0, 3), st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_the_formulas_of_the_table(name, p, more, v, W, beyond, and_more) -> None:
    F, I = W + beyond, W + beyond + and_more
    if name == "zb-v":
        F = I = W
    if name == "dualpipe":
        p *= 2
    m = 2 * p * (1 + more)
    plan = schedule(name, p, m, **({"chunks": v} if "chunks" in SCHEDULES[name][1] else {}))
    times = replace(Times.even(plan, F, I, W), paired=1 if name.startswith("dual") else None)
    bubble, held = FORMULAS[name](p, m, v, F, I, W)
    assert abs(simulate(plan, times).bubble - bubble) < 1e-9
    assert max(peak.held for peak in peaks(plan)) * p / plan.depth == held


def test_the_picture() -> None:
    shown = draw(simulate(schedule("1f1b", 3, 4))).splitlines()
    assert "\n".join("    " + line for line in shown) in PAGE.read_text()


def test_the_examples() -> None:
    failed, tried = doctest.testfile(str(PAGE), module_relative=False)
    assert tried > 15
    assert failed == 0


def test_the_config() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    config = config_from(tomllib.loads(text))
    batch = solve_batch(2, size=config.batch.global_, accumulation=config.batch.accumulation)
    found = pipelining(config, config.mesh.mesh(4), batch)
    assert found is not None and (found.plan.num_ranks, found.plan.depth, batch.micro) == (2, 4, 2)
    sizes = [int(size) for size in re.findall(r"\[([\d, ]+)\]$", text, re.MULTILINE)[0].split(", ")]
    costs = layer_costs(config)
    assert cut(config_from({"pipeline": {"layers": sizes}}), 4, costs)[-1] == len(costs) == config.model.layers + 2
