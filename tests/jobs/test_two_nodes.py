"""Two nodes on one machine: network namespaces with a wire between them, host names and a /dev/shm of their own.

    node a: 10.77.0.1, mpirun, ranks 0 1   ----- veth -----   node b: 10.77.0.2, ranks 2 3

mpirun reaches node b by an "ssh" that enters its namespace. Needs root, as namespaces do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.jobs import Running, is_open_mpi

PROGRAM = """
import numpy as np
import hpctrain
from hpctrain.arrays import arrays_of

context = hpctrain.start()
group = context.world
rank, size, transport = group.rank, group.size, group.transport
near = transport.node_ranks()
nodes = group.exchange([context.host, list(near), context.local_rank, context.num_nodes])

token = np.full(300_000, rank, np.int32)  # once around, within the nodes and between them
into = np.empty_like(token)
requests = [transport.recv(memoryview(into).cast("B"), (rank - 1) % size, 1),
            transport.send(memoryview(token).cast("B"), (rank + 1) % size, 1)]
for request in requests:
    request.wait()
assert (into == (rank - 1) % size).all()

for count in (1, 1000, 300_000):
    memory = transport.allocate(8 * count)
    for x in (np.empty(count), arrays_of(token).from_memory(memory, "float64")):
        x[:] = np.arange(count) + rank
        group.all_reduce(x)
        assert (x == size * np.arange(count) + sum(range(size))).all(), count
    place = transport.place(memory)
    told = group.exchange(place)
    assert told == [list(place)] * size
    memory[0] = 10 + rank
    group.barrier()
    for other in range(size):
        if other in near:
            assert transport.view(other, place, 1)[0] == 10 + other
        else:
            try:
                transport.view(other, place, 1)
                raise SystemExit("the memory of another node was given out")
            except AssertionError:
                pass
    group.barrier()
if rank == 0:
    print(nodes)
context.close()
"""

NODE = "mount -t tmpfs tmpfs /dev/shm && hostname"


def administer(*command: str) -> None:
    """Runs one command, or skips the test where this machine does not allow it."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")
    if done.returncode:
        pytest.skip(f"no network namespaces here: {' '.join(command)}: {done.stderr.strip()}")


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two with a wire between them; both go with the test, the wire with them."""
    if os.geteuid():
        pytest.skip("no network namespaces here: they need root")
    names = f"hpct{os.getpid()}a", f"hpct{os.getpid()}b"
    administer("unshare", "--uts", "--mount", "sh", "-c", f"{NODE} node")
    try:
        for name in names:
            administer("ip", "netns", "add", name)
        administer("ip", "link", "add", "wire", "netns", names[0], "type", "veth", "peer", "wire", "netns", names[1])
        for number, name in enumerate(names, 1):
            administer("ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "wire")
            administer("ip", "-n", name, "link", "set", "wire", "up")
            administer("ip", "-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20, check=False)


def inside(namespace: str, host: str, command: str) -> str:
    """A line for sh that turns into `command` on a node."""
    return f"exec ip netns exec {namespace} unshare --uts --mount sh -c '{NODE} {host} && {command}' sh \"$@\"\n"


def test_two_nodes(namespaces: tuple[str, str], script, tmp_path: Path) -> None:
    launcher = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert launcher is not None, "these tests need mpirun"
    if not is_open_mpi(launcher):
        pytest.skip("the launch over an ssh of our own is written for Open MPI")
    remote, head = tmp_path / "remote", tmp_path / "head"
    remote.write_text("#!/bin/sh\nshift\n" + inside(namespaces[1], "nodeb", 'eval "$*"'))
    remote.chmod(0o755)
    head.write_text(inside(namespaces[0], "nodea", 'exec "$@"'))
    wire = "10.77.0.0/24"
    job = Running(
        ["sh", str(head), launcher, "--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", str(remote),
         "--prtemca", "prte_if_include", wire, "--mca", "btl_tcp_if_include", wire,
         "--host", "10.77.0.1:2,10.77.0.2:2", "--map-by", "ppr:2:node:OVERSUBSCRIBE", "-n", "4",
         sys.executable, script(PROGRAM)], {"OMP_NUM_THREADS": "1"}, tmp_path).finish()
    assert job.code == 0, job.text
    nodes = [["nodea", [0, 1], 0, 2], ["nodea", [0, 1], 1, 2], ["nodeb", [2, 3], 0, 2], ["nodeb", [2, 3], 1, 2]]
    assert job.stdout == f"{nodes}\n", job.text
