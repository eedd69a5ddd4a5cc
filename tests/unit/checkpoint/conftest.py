"""A root with two checkpoints that hold every dtype, for the tests of what lies on the disk."""

import shutil

import numpy as np
import pytest

from tests.unit.checkpoint.cases import CASES, numpy_type, save


@pytest.fixture(scope="module")
def values():
    rng = np.random.default_rng(0)
    made = {}
    for name, (dtype, shape) in CASES.items():
        raw = rng.integers(0, 256, int(np.prod(shape)) * numpy_type(dtype).itemsize, dtype=np.uint8)
        made[name] = (raw & 1 if dtype == "bool" else raw).view(numpy_type(dtype)).reshape(shape)
    return made


@pytest.fixture(scope="module")
def pristine(tmp_path_factory, values):
    root = tmp_path_factory.mktemp("pristine")
    save(root, values, (1, 2), mesh={"pipeline": 1, "data": 1})
    return root


@pytest.fixture
def root(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "root")
