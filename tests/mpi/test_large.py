"""More elements than a 32-bit count can hold (case bank, 9)."""

from __future__ import annotations

import numpy as np
import psutil
import pytest
from mpi4py import MPI

from hpctrain.arrays import arrays_of
from hpctrain.collectives import Group
from hpctrain.transport.mpi import MpiTransport


def test_two_to_the_31_and_5_bytes() -> None:
    # One answer for all ranks, as the rest is collective.
    available = MPI.COMM_WORLD.bcast(psutil.virtual_memory().available)
    if MPI.COMM_WORLD.size != 2 or available < 6 << 30:
        pytest.skip("needs 2 ranks and 6 GiB of free memory")
    count = 2**31 + 5
    group = Group(MpiTransport(), arrays_of)
    array = np.frombuffer(group.transport.allocate(count), np.int8)
    places = [0, 1, 2**30 - 1, 2**30, 2**30 + 2, 2**30 + 3, 2**31 - 1, 2**31, count - 1]
    array[places] = np.arange(1, 10) * (group.rank + 1)
    group.all_reduce(array)
    assert array[places].tolist() == [3 * i for i in range(1, 10)]
    assert int(np.count_nonzero(array)) == len(places)
    # One message of that length: cut below the limit of the library.
    if group.rank == 0:
        array[places] = range(9)
        group.send(array, 1)
    else:
        group.recv(array, 0)
        assert array[places].tolist() == list(range(9))
    group.close()
