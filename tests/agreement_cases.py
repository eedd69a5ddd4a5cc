"""What values, errors and subgroups must do between ranks, as functions of a factory of groups (`collective_cases`)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.collective_cases import Make


def case_exchange_and_broadcast_of_values(make: Make) -> None:
    group = make()
    texts = ["", "short", "line\nbreak\u2028 and é", "x" * 5000, *("x" * n for n in range(485, 505))]
    for text in texts:
        told = group.exchange({"rank": group.rank, "text": text * (group.rank % 2 + 1)})
        assert told == [{"rank": r, "text": text * (r % 2 + 1)} for r in range(group.size)]
        for root in range(group.size):
            assert group.broadcast_value([group.rank, text], root) == [root, text]
    assert group.exchange(float("inf")) == [float("inf")] * group.size
    assert group.exchange((None, True, 2**80)) == [[None, True, 2**80]] * group.size
    bad = group.size - 1
    with pytest.raises(TypeError, match=f"rank {bad}: .*JSON"):
        group.exchange({1, 2} if group.rank == bad else 0)
    with pytest.raises(TypeError, match=f"rank {bad}: .*JSON"):
        group.broadcast_value({1, 2}, bad)
    group.barrier()


class Unknown(Exception):
    """A class that other ranks need not have."""


def case_an_error_on_one_rank_is_raised_on_all(make: Make) -> None:
    from hpctrain.errors import CheckpointError, RemoteError

    group = make()
    bad = group.size - 1
    raised: list[tuple[Exception, type[Exception], str]] = [
        (ValueError("no"), ValueError, f"rank {bad}: no"),
        (KeyError("no"), KeyError, f"rank {bad}: no"),
        (CheckpointError("no"), CheckpointError, f"rank {bad}: no"),
        (FileNotFoundError(2, "no"), FileNotFoundError, rf"\[Errno 2\] rank {bad}: \[Errno 2\] no"),
        (StopIteration("no"), StopIteration, f"rank {bad}: no"),
        (Unknown("no"), RemoteError, rf"rank {bad}: .*Unknown: no"),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "no"), RemoteError, f"rank {bad}: builtins.UnicodeDecodeError: .*no"),
    ]
    for error, kind, text in raised:
        with pytest.raises(kind, match=text) as caught, group.agree():
            if group.rank == bad:
                raise error
        assert type(caught.value) is kind
        assert (caught.value.__cause__ is error) == (group.rank == bad)
    with group.agree():
        pass
    with pytest.raises(ValueError, match="rank 0: mine is 0"), group.agree():
        raise ValueError(f"mine is {group.rank}")
    group.barrier()


def case_on_root_gives_value_or_error_to_all(make: Make) -> None:
    group = make()
    for root in range(group.size):
        calls: list[int] = []
        assert group.on_root(lambda calls=calls: calls.append(1) or {"id": group.rank}, root) == {"id": root}
        assert len(calls) == (group.rank == root)

        def fail() -> None:
            raise RuntimeError("no id")

        with pytest.raises(RuntimeError, match=f"rank {root}: no id"):
            group.on_root(fail, root)
        with pytest.raises(TypeError, match=f"rank {root}: .*JSON"):
            group.on_root(object, root)
    group.barrier()


# Groups -------------------------------------------------------------------------------------------------------------


def case_subgroups(make: Make) -> None:
    group = make()
    halves = [range(group.size)[::2], range(group.size)[1::2]]
    mine = halves[group.rank % 2]
    half = group.subgroup(mine)
    assert half is not None
    assert half.all_reduce(np.array([1.0 + group.rank])).tolist() == [sum(1.0 + r for r in mine)]
    assert half.exchange(group.rank) == list(mine)
    only = group.subgroup([group.size - 1])
    assert (only is not None) == (group.rank == group.size - 1)
    if only is not None:
        assert only.all_reduce(np.ones(3), "mean").tolist() == [1.0] * 3
        only.close()
    assert group.all_reduce(np.ones(3)).tolist() == [float(group.size)] * 3
    half.close()
