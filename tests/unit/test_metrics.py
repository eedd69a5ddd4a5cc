"""The metrics file, the learning curve, and what is shown along the way."""

import io
import json

import pytest
from rich.console import Console

from hpctrain.config.read import config_from
from hpctrain.errors import ConfigError
from hpctrain.train.curve import draw_curve
from hpctrain.train.metrics import Metrics, read_metrics
from hpctrain.train.progress import Bar, Lines, Shown, Silent, make_progress
from hpctrain.train.session import clear_or_refuse


def written(path, steps):
    metrics = Metrics(path)
    for step in steps:
        metrics.write(step=step, loss=float(step))
        if step % 2 == 0:
            metrics.write(step=step, val_loss=0.5)
    metrics.close()


def test_resumed_metrics_have_each_step_once(tmp_path):
    path = tmp_path / "runs" / "metrics.jsonl"
    written(path, range(1, 7))
    with path.open("a") as file:
        file.write('{"step": 7, "lo')  # killed while it wrote
    metrics = Metrics(path, resumed_step=4)
    for step in (5, 6):
        metrics.write(step=step, loss=10.0 * step)
    metrics.close()
    steps, validations = read_metrics(path)
    assert [(line["step"], line["loss"]) for line in steps] == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 50), (6, 60)]
    assert [line["step"] for line in validations] == [2, 4]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_fresh_run_begins_its_file_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    written(path, range(1, 7))
    Metrics(path).close()
    assert path.read_text() == ""


def test_numbers_that_are_not_finite_are_null_and_not_drawn(tmp_path):
    metrics = Metrics(tmp_path / "m.jsonl")
    metrics.write(step=1, loss=float("nan"), gradient_norm=float("inf"), skipped="not finite")
    metrics.write(step=1, loss=2.0)
    metrics.close()
    first = json.loads((tmp_path / "m.jsonl").read_text().splitlines()[0])
    assert first == {"step": 1, "loss": None, "gradient_norm": None, "skipped": "not finite"}
    assert [line["loss"] for line in read_metrics(tmp_path / "m.jsonl")[0]] == [2.0]


def test_curve_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    written(tmp_path / "metrics.jsonl", range(1, 20))
    draw_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png", title="t", bigram_entropy=2.0)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def shown(step):
    return Shown(step, 2.5, 1e-3, 0.25, 12345.6, 3671)


def test_plain_lines_come_every_k_steps_and_for_the_first_and_the_last():
    text = io.StringIO()
    lines = Lines(7, 3, Console(file=text, width=200))
    for step in range(2, 8):
        lines.show(shown(step))
    lines.note("[bold] is text")
    assert [line.split()[1] for line in text.getvalue().splitlines()[:-1]] == ["2/7", "3/7", "6/7", "7/7"]
    assert text.getvalue().splitlines()[0] == "step 2/7 loss 2.5000 lr 1.0e-03 |g| 0.25 12,346 tokens/s 1:01:11 left"
    assert text.getvalue().endswith("[bold] is text\n")


def test_a_bar_on_a_terminal_fits_80_columns():
    text = io.StringIO()
    bar = Bar(700, 0, Console(file=text, force_terminal=True, width=80))
    bar.show(shown(699))
    bar.note("validation")
    bar.show(shown(700))
    bar.close()
    bar.close()
    assert "700/700" in text.getvalue()
    assert "1:01:11 left" in text.getvalue()
    assert "validation" in text.getvalue()


def test_only_rank_0_shows():
    for rank, kind, expected in [(0, "lines", Lines), (1, "lines", Silent), (1, "bar", Silent), (0, "off", Silent),
                                 (0, "auto", Lines)]:
        display = make_progress(kind, rank=rank, total=3, done=0, every=1)
        assert type(display) is expected
        display.close()


def test_old_checkpoints_are_not_mixed_with_a_fresh_run(tmp_path):
    config = config_from({"run": {"out": str(tmp_path)}})
    clear_or_refuse(config, restart=False)  # nothing there
    (tmp_path / "checkpoints" / "step-0000000001").mkdir(parents=True)
    with pytest.raises(ConfigError, match="--restart"):
        clear_or_refuse(config, restart=False)
    clear_or_refuse(config, restart=True)
    assert not (tmp_path / "checkpoints").exists()
