"""What ran when: the record of a planned and of a real run alike, and its file for trace viewers.

    Span(rank=0, action=Forward(3), start=0.12, stop=0.15)

The file is in the Chrome trace format (chrome://tracing, Perfetto): one process a run, so that "planned" and "real" lie
one above the other, one thread a rank. Owns the record and that format; who measures is elsewhere. Pure, standard
library only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from hpctrain.errors import PlanError
from hpctrain.plan.schedule import Action, from_symbol, symbol

__all__ = ["Span", "Time", "from_chrome", "to_chrome"]

#: A time in seconds, or in any unit for a plan; exact when given as integers or fractions.
Time = float | Fraction


@dataclass(frozen=True)
class Span:
    """One action of one rank from `start` to `stop`, in seconds since the step began (the same moment on all ranks)."""

    rank: int
    action: Action
    start: Time
    stop: Time


def to_chrome(runs: Mapping[str, Iterable[Span]], unit: float = 1.0) -> str:
    """The trace file of some runs, {name: spans}; `unit` is how many seconds 1 of a span's time is."""
    events: list[dict[str, object]] = []
    for number, (name, spans) in enumerate(runs.items()):
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}})
        ranks = set()
        for span in spans:
            shown = symbol(span.action, stages=True)
            ranks.add(span.rank)
            events.append({"ph": "X", "name": shown, "cat": type(span.action).__name__, "pid": number,
                           "tid": span.rank, "ts": float(span.start) * unit * 1e6,
                           "dur": float(span.stop - span.start) * unit * 1e6})
        events += [{"ph": "M", "name": "thread_name", "pid": number, "tid": rank, "args": {"name": f"rank {rank}"}}
                   for rank in sorted(ranks)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=0)


def from_chrome(text: str) -> dict[str, tuple[Span, ...]]:
    """The runs in a file of `to_chrome`, times in seconds.

    Raises:
        PlanError: not such a file.
    """
    try:
        events = json.loads(text)["traceEvents"]
        names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
        runs: dict[str, list[Span]] = {name: [] for name in names.values()}
        for event in events:
            if event["ph"] == "X":
                start, length = event["ts"] / 1e6, event["dur"] / 1e6
                action = from_symbol(event["name"], None)
                runs[names[event["pid"]]].append(Span(event["tid"], action, start, start + length))
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(f"not a trace of a pipeline: {error!r}") from None
    return {name: tuple(spans) for name, spans in runs.items()}
