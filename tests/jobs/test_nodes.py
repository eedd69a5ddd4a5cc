"""Nodes that are imitated by a setting: who is near, and a value that is none is refused everywhere."""

from __future__ import annotations

import json

import pytest

from tests.jobs.jobs import mpirun

NODES = """
import json
import hpctrain
context = hpctrain.start(ranks_per_node=2)
group = context.world
near = group.transport.node_ranks()
told = group.exchange((near, context.local_rank, context.local_size, context.num_nodes, context.threads))
if group.rank == 0:
    print(json.dumps(told))
"""


def test_ranks_per_node(script, tmp_path):
    job = mpirun(3, [script(NODES)], tmp_path).finish()
    assert job.code == 0, job.text
    told = json.loads(job.stdout)
    assert [row[:4] for row in told] == [[[0, 1], 0, 2, 2], [[0, 1], 1, 2, 2], [[2], 0, 1, 2]]
    # The three share the machine's cores all the same.
    plain = mpirun(3, [script(NODES.replace("2", "None", 1))], tmp_path).finish()
    assert [row[4] for row in json.loads(plain.stdout)] == [row[4] for row in told], plain.text


@pytest.mark.parametrize("value, words", [
    ("0", "ranks_per_node = 0 on rank 0; legal are whole numbers from 1 up"),
    ("True", "ranks_per_node = True on rank 0"),
    ("2 if MPI.COMM_WORLD.rank == 0 else -1", "ranks_per_node = -1 on rank 1; legal are"),
    ("2 if MPI.COMM_WORLD.rank == 0 else None", "ranks_per_node = None on rank 1, but 2 on rank 0"),
])
def test_what_is_no_number_of_ranks_is_refused_on_all_ranks(script, tmp_path, value, words):
    text = f"""
    import hpctrain
    from hpctrain.errors import ConfigError
    from mpi4py import MPI
    try:
        hpctrain.start(ranks_per_node={value})
    except ConfigError as error:
        told = MPI.COMM_WORLD.gather(str(error))
        if told is not None:
            assert len(set(told)) == 1
            print(told[0])
    """
    job = mpirun(2, [script(text)], tmp_path).finish()
    assert job.code == 0 and words in job.stdout, job.text
