"""A progress thread for one test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpctrain.collectives.progress import Progress


@pytest.fixture
def progress() -> Iterator[Progress]:
    made = Progress()
    yield made
    made.close()
    assert made._thread is None or not made._thread.is_alive()
