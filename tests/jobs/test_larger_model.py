"""A torch model that no rank could hold is built in parts and trained; without that the same limit is too low.

Jobs of their own: what earlier tests of a process have freed would be there for the model, whatever the limit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.jobs import mpirun

PROGRAM = '''
import ctypes
import gc
import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hpctrain
import hpctrain.torch
from hpctrain import Zero

MIB = 1 << 20


@contextmanager
def data_limit(num_bytes: int) -> Iterator[None]:
    """No more than so much new private memory for this process."""
    gc.collect()
    now = next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines()
               if line.startswith("VmData"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


class Large(nn.Module):
    """16 matrices of 4 MiB in blocks, and a list of them that only the end of the list makes children."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(1024, 1024), "b": nn.LayerNorm(8)})
                                    for _ in range(10))
        self.rest = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(6)])
        for part in self.modules():
            if isinstance(part, nn.Linear):
                part.weight.data.normal_(std=1 / math.sqrt(1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block["a"](x)
        return self.rest(x)


context = hpctrain.start()
ctypes.CDLL(None).mallopt(-3, MIB // 4)  # M_MMAP_THRESHOLD: freed blocks are no longer this process's
size = 64 * MIB
# Parts; two matrices that are made; and where a trainer is made, also its own part and two windows, or what is
# shared within the node, which is not private.
build, train = size // context.size + 14 * MIB, 2 * size // context.size + 34 * MIB
try:
    with data_limit(build):
        Large()
    raise SystemExit("the limit is none")
except RuntimeError as error:
    assert "memory" in str(error), error
gc.collect()
torch.manual_seed(7)
with data_limit(build), hpctrain.torch.partitioned(context):
    module = Large()

def loss(module: nn.Module, x: torch.Tensor) -> Any:
    return module(x).square().sum(), float(len(x))

x = torch.randn(2, 1024, generator=torch.Generator().manual_seed(8))
with data_limit(train):
    trainer = context.trainer(hpctrain.torch.adapt(module, loss), optimizer=hpctrain.SGD(lr=1e-3), clip_norm=1.0,
                              zero=Zero(3, "none", bucket_bytes=MIB))
    first = trainer.step([x])
    second = trainer.step([x])
assert second.loss < first.loss
print("built and trained", flush=True)
'''


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the limit is set from /proc")
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_model_larger_than_the_memory_of_a_rank_is_built_and_trained(script, tmp_path, num_ranks):
    job = mpirun(num_ranks, [script(PROGRAM)], tmp_path, environ={"OMP_NUM_THREADS": "1"}).finish()
    assert job.code == 0 and job.stdout.count("built and trained") == num_ranks, job.text
