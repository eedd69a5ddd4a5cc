"""What `hpctrain train` does with the options of a config that concern the job, not the training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hpctrain
from hpctrain.cli.train import train


@pytest.mark.parametrize(("settings", "expected"), [([], None), (["run.progress_thread=false"], False),
                                                    (["run.progress_thread=true"], True)])
def test_the_progress_thread(settings: list[str], expected: bool | None, tmp_path: Path,
                             monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    world = SimpleNamespace(on_root=lambda function: function())
    context: Any = SimpleNamespace(world=world, progress=told.append, close=lambda: None)
    monkeypatch.setattr(hpctrain, "start", lambda: context)
    monkeypatch.setattr("hpctrain.train.session.prepare", lambda *args, **options: None)
    monkeypatch.setattr("hpctrain.train.loop.run", lambda session: None)
    path = tmp_path / "train.toml"
    path.write_text("")
    train(path, settings, resume="none", restart=False, help_config=False)
    assert told == [expected]
