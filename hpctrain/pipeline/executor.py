"""Runs a schedule: maps each action to the method that does it, and nothing else.

Knows the actions of `plan.schedule`; what they do is given by the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hpctrain.plan.schedule import Action

__all__ = ["execute"]


def execute(actions: Iterable[Action], methods: Mapping[type, Callable[[Any], None]]) -> None:
    """Calls `methods[type(action)](action)` for each action in order. Local; the methods may be collective."""
    for action in actions:
        methods[type(action)](action)
