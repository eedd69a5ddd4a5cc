"""A planned timeline as files: PNG for people, a trace for viewers; for `hpctrain draw` and `hpctrain plan`."""

from __future__ import annotations

from pathlib import Path

from hpctrain.plan.pipeline.simulate import Timeline
from hpctrain.plan.pipeline.trace import to_chrome

__all__ = ["write_files"]


def write_files(timeline: Timeline, png: Path | None, trace: Path | None) -> None:
    """Writes those that have a path.

    Raises:
        ConfigError: a PNG is wanted and matplotlib is not installed.
    """
    if png is not None:
        from hpctrain.cli.schedule_picture import draw_schedule

        draw_schedule(timeline, png)
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        planned = [span for spans in timeline.spans for span in spans]
        trace.write_text(to_chrome({f"planned {timeline.plan.name}": planned}))
