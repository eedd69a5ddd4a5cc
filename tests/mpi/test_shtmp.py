"""Shared memory of a node: neighbours see it, it leaves no name behind, and without it messages do."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from hpctrain.arrays import arrays_of
from hpctrain.transport import shared
from hpctrain.transport.mpi import MpiTransport
from hpctrain.transport.places import Places, Table, address_of
from hpctrain.transport.shared import NodeMemory

several = pytest.mark.skipif(MPI.COMM_WORLD.size == 1, reason="one rank has no neighbours")


def leftovers(folder: Path = shared.FOLDER) -> list[Path]:
    return list(folder.glob(f"hpctrain-{os.getpid()}-*"))


def places() -> Places:
    comm = MPI.COMM_WORLD
    return Places(Table(comm.rank), range(comm.size), [0] * comm.size, comm.rank)


def files() -> list[os.stat_result]:
    """The nameless files of shared memory that this process has mapped; each once."""
    found = {}
    for path in Path("/proc/self/map_files").iterdir():
        if path.readlink().name.startswith("hpctrain-"):
            found[path.stat().st_ino] = path.stat()
    return list(found.values())


def test_nothing_keeps_a_name() -> None:
    transport = MpiTransport()
    memory = transport.allocate(1000)
    assert leftovers() == [] and len(memory) == 1000
    transport.close()


@several
def test_pages_go_with_the_last_view_and_mappings_when_all_have_told() -> None:
    size, num_bytes = MPI.COMM_WORLD.size, 1 << 20
    before = {f.st_ino for f in files()}

    def blocks() -> list[int]:
        return [512 * f.st_blocks for f in files() if f.st_ino not in before]

    memory = NodeMemory(MPI.COMM_WORLD, places())
    made = memory.allocate(num_bytes)
    assert isinstance(made, memoryview)
    view = made[10:20]
    del made
    assert memory._places.place(view) == (1, 10)
    assert blocks() == [size * num_bytes]
    MPI.COMM_WORLD.Barrier()
    if MPI.COMM_WORLD.rank == 0:
        del view
        assert memory._places.place(memoryview(bytearray(4))) is None
    MPI.COMM_WORLD.Barrier()
    assert blocks() == [(size - 1) * num_bytes]
    second = memory.allocate(10)  # here all learn that some still hold the first
    assert sorted(blocks()) == sorted([(size - 1) * num_bytes, size * 4096])
    MPI.COMM_WORLD.Barrier()
    view = None
    MPI.COMM_WORLD.Barrier()
    assert sorted(blocks()) == [0, size * 4096]
    third = memory.allocate(10)  # and here that nobody does
    assert blocks() == [size * 4096] * 2
    assert isinstance(second, memoryview) and isinstance(third, memoryview)
    assert memory._places.place(second) == (2, 0) and memory._places.place(third) == (3, 0)


@several
def test_memory_where_a_part_was_is_not_taken_for_it() -> None:
    # The mapping is closed by hand, and its address range used again, as the system may do.
    memory = NodeMemory(MPI.COMM_WORLD, places())
    addresses = set()
    for _ in range(20):
        made = memory.allocate(1 << 16)
        assert isinstance(made, memoryview)
        addresses.add(address_of(made))
        del made
        other = memoryview(mmap.mmap(-1, 1 << 16))
        assert memory._places.place(other) is None
    made = memory.allocate(1 << 16)
    assert memory._places.place(made) == (21, 0) and len(addresses) > 0


@several
def test_a_file_that_a_rank_cannot_open_means_messages() -> None:
    # As where ranks of what MPI takes for one node have different file systems.
    with tempfile.TemporaryDirectory() as own:
        made = NodeMemory(MPI.COMM_WORLD, places(), Path(own)).allocate(10)
        assert isinstance(made, str) and "No such file" in made
        assert list(Path(own).iterdir()) == []


@several
def test_a_subgroup_does_not_try_again_what_its_parent_could_not(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = MpiTransport()
    first = transport.allocate(50)
    monkeypatch.setattr(NodeMemory, "allocate", lambda self, num_bytes: "none")
    if transport.rank == 0:
        with pytest.warns(UserWarning, match="cannot share memory: none"):
            transport.allocate(400)
    else:
        transport.allocate(400)
    twin = transport.subgroup(range(transport.size))
    assert twin is not None
    assert len(twin.allocate(400)) == 400  # without a word
    assert twin.place(first) == transport.place(first) != None and twin.shares  # noqa: E711
    twin.close()
    transport.close()


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
    assert not transport.shares and transport.place(memory) is None and leftovers() == []
    x = arrays_of(np.empty(0)).from_memory(memory, "float32")
    x[:] = 1




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
    NodeMemory(MPI.COMM_WORLD, places(), folder).allocate(10)
    MPI.COMM_WORLD.Barrier()
    left = sorted(p.name for p in folder.iterdir())
    assert left == sorted(["another-999999999-x", f"hpctrain-{MPI.COMM_WORLD.bcast(os.getpid())}-alive",
                           "hpctrain-999999999-new", "hpctrain-x"])
