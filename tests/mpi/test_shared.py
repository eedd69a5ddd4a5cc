"""Shared memory of a node: neighbours see it, it leaves no name behind, and without it messages do."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from hpctrain.arrays import arrays_of
from hpctrain.collectives import Group
from hpctrain.transport import shared
from hpctrain.transport.mpi import MpiTransport
from hpctrain.transport.shared import NodeMemory

several = pytest.mark.skipif(MPI.COMM_WORLD.size == 1, reason="one rank has no neighbours")


def leftovers(folder: Path = shared.FOLDER) -> list[Path]:
    return list(folder.glob(f"hpctrain-{os.getpid()}-*"))


def test_neighbours_read_and_write_each_other() -> None:
    transport = MpiTransport()
    memory = transport.allocate(1000)
    assert bytes(memory) == bytes(1000)
    memory[:] = bytes([transport.rank + 1]) * 1000
    MPI.COMM_WORLD.Barrier()
    found = transport.shared(memory[100:200])
    assert (found is None) == (transport.size == 1)
    if found is not None:
        assert [bytes(v) for v in found.views] == [bytes([r + 1]) * 100 for r in range(transport.size)]
        MPI.COMM_WORLD.Barrier()
        found.views[(transport.rank + 1) % transport.size][3] = 77
        MPI.COMM_WORLD.Barrier()
        assert memory[103] == 77 and memory[102] == transport.rank + 1
        assert transport.shares
    assert leftovers() == []
    transport.close()


def test_a_stretch_is_found_only_inside_one_allocation() -> None:
    transport = MpiTransport()
    first, second = transport.allocate(5000), transport.allocate(300)
    assert transport.shared(memoryview(bytearray(10))) is None
    assert transport.shared(first[:0]) is None
    if transport.size > 1:
        places = [transport.shared(m).place for m in (first, first[64:], second)]
        assert len(set(places)) == 3
        assert MPI.COMM_WORLD.allgather(places) == [places] * transport.size
    transport.close()


@several
def test_memory_goes_with_its_last_view() -> None:
    memory = NodeMemory(MPI.COMM_WORLD)
    made = memory.allocate(1 << 20)
    assert isinstance(made, memoryview)
    view = made[10:20]
    del made
    assert memory.find(view) is not None
    del view
    assert memory.find(memoryview(bytearray(4))) is None and memory._regions == {}


@several
def test_no_room_means_messages_and_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = MpiTransport()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    if transport.rank == transport.size - 1:
        monkeypatch.setattr(shared.os, "posix_fallocate", full)
    if transport.rank == 0:
        with pytest.warns(UserWarning, match="No space left"):
            memory = transport.allocate(400)
    else:
        memory = transport.allocate(400)
    assert not transport.shares and transport.shared(memory) is None and leftovers() == []
    x = arrays_of(np.empty(0)).from_memory(memory, "float32")
    x[:] = 1
    Group(transport, arrays_of).all_reduce(x)
    assert x.tolist() == [transport.size] * 100


@several
def test_names_left_by_a_crash_are_cleared_away() -> None:
    with tempfile.TemporaryDirectory() as own:  # not tmp_path: many pytests at once disturb each other's cleaning
        check_clearing(Path(MPI.COMM_WORLD.bcast(own)))
        MPI.COMM_WORLD.Barrier()


def check_clearing(folder: Path) -> None:
    if MPI.COMM_WORLD.rank == 0:
        for name, age in (("hpctrain-999999999-old", 3600), ("hpctrain-999999999-new", 0),
                          (f"hpctrain-{os.getpid()}-alive", 3600), ("another-999999999-x", 3600), ("hpctrain-x", 3600)):
            (folder / name).touch()
            when = (folder / name).stat().st_mtime - age
            os.utime(folder / name, (when, when))
    MPI.COMM_WORLD.Barrier()
    NodeMemory(MPI.COMM_WORLD, folder).allocate(10)
    MPI.COMM_WORLD.Barrier()
    left = sorted(p.name for p in folder.iterdir())
    assert left == sorted(["another-999999999-x", f"hpctrain-{MPI.COMM_WORLD.bcast(os.getpid())}-alive",
                           "hpctrain-999999999-new", "hpctrain-x"])
