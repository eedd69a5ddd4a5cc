"""The collectives over MPI, on as many ranks as mpirun started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpctrain.arrays import arrays_of
from hpctrain.collectives import Group
from hpctrain.collectives.group import SEGMENT_BYTES
from hpctrain.transport.mpi import MESSAGE_LIMIT, MpiTransport
from tests import agreement_cases, algorithm_cases, collective_cases, primitive_cases
from tests.collective_cases import cases_of

CASES = cases_of(agreement_cases, algorithm_cases, collective_cases, primitive_cases)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_mpi(case: Callable[[Any], None]) -> None:
    made = []

    def make(segment_bytes: int = SEGMENT_BYTES, message_limit: int = MESSAGE_LIMIT, **options: Any) -> Group:
        transport = MpiTransport(message_limit=message_limit)
        made.append(Group(transport, arrays_of, segment_bytes=segment_bytes, **options))
        return made[-1]

    case(make)
    for group in made:
        group.close()
