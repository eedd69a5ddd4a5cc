"""The collectives on threads: 1 to 5 ranks in one process, with rendezvous."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpctrain.arrays import arrays_of
from hpctrain.collectives import Group
from hpctrain.collectives.group import SEGMENT_BYTES
from hpctrain.transport.threads import run_threads
from tests import agreement_cases, algorithm_cases, collective_cases, primitive_cases
from tests.collective_cases import cases_of

CASES = cases_of(agreement_cases, algorithm_cases, collective_cases, primitive_cases)


@pytest.mark.parametrize("num_ranks", range(1, 6))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_threads(case: Callable[[Any], None], num_ranks: int) -> None:
    def run(transport: Any) -> None:
        def make(segment_bytes: int = SEGMENT_BYTES, message_limit: int = 0, **options: Any) -> Group:
            twin = transport.subgroup(range(transport.size))
            return Group(twin, arrays_of, segment_bytes=segment_bytes, **options)

        case(make)

    run_threads(num_ranks, run, timeout=30.0)
