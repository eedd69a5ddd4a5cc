"""Which type is used for what: defaults, explicit choices, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.errors import ConfigError
from hpctrain.optim.precision import Precision

# options, the model's type -> parameter, compute, accumulate, reduce, master
RESOLVED: list[tuple[dict[str, str], str, str]] = [
    ({}, "float32", "float32 float32 float32 float32 float32"),
    ({}, "float64", "float64 float64 float64 float64 float64"),
    ({}, "bfloat16", "bfloat16 bfloat16 float32 float32 float32"),
    ({"compute": "bfloat16"}, "float32", "bfloat16 bfloat16 float32 float32 float32"),
    ({"compute": "float16"}, "float32", "float16 float16 float32 float32 float32"),
    ({"compute": "float64"}, "float32", "float64 float64 float64 float64 float64"),
    ({"parameter": "bfloat16"}, "float32", "bfloat16 bfloat16 float32 float32 float32"),
    ({"parameter": "float32", "compute": "bfloat16"}, "float64", "float32 bfloat16 float32 float32 float32"),
    ({"compute": "bfloat16", "reduce": "bfloat16"}, "float32", "bfloat16 bfloat16 float32 bfloat16 float32"),
    ({"compute": "bfloat16", "accumulate": "bfloat16"}, "float32", "bfloat16 bfloat16 bfloat16 bfloat16 float32"),
    ({"parameter": "bfloat16", "master": "bfloat16"}, "float32", "bfloat16 bfloat16 float32 float32 bfloat16"),
    ({"compute": "float32", "master": "float64"}, "float32", "float32 float32 float32 float32 float64"),
]


@pytest.mark.parametrize(("options", "dtype", "expected"), RESOLVED)
def test_resolve(options: Any, dtype: str, expected: str) -> None:
    r = Precision(**options).resolve(dtype)
    assert [r.parameter, r.compute, r.accumulate, r.reduce, r.master] == expected.split()
    assert r.has_master == (r.master != r.parameter)
    assert r.needs_loss_scale == (r.compute == "float16")


@pytest.mark.parametrize(("name", "meant"), [("bf16", "did you mean 'bfloat16'"), ("fp16", "did you mean 'float16'"),
                                             ("half", "or None")])
def test_a_wrong_name_is_answered_with_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"precision.reduce = '{name}'.*legal are.*'bfloat16'.*{meant}"):
        Precision(reduce=name)
    with pytest.raises(ConfigError, match="int32"):
        Precision(master="int32")


@pytest.mark.parametrize(("options", "says"), [
    ({"master": "float16"}, "precision.master = 'float16' cannot hold the values of precision.parameter = 'float32'"),
    ({"compute": "bfloat16", "accumulate": "float16"}, "accumulate = 'float16' cannot hold .*compute = 'bfloat16'"),
    ({"compute": "bfloat16", "reduce": "float64"}, "accumulate = 'float32' cannot hold .*reduce = 'float64'"),
    ({"parameter": "float16", "compute": "bfloat16"}, "legal are .*'float32'.*'bfloat16'"),
    ({"parameter": "float16", "master": "float16"}, "precision.master = 'float16' is not legal; .*'float32'"),
])
def test_types_that_lose_values_are_refused(options: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Precision(**options).resolve("float32")
