"""Scatter/gather between tensor-parallel stages: parity with one process, what travels, what is cut and refused."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import parity
import pytest
import tensor_stages as ts
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.arrays import arrays_of
from hpctrain.errors import MismatchError
from hpctrain.pipeline.buffers import Buffers
from hpctrain.pipeline.messages import GradientReceiver, GradientSender, Link, Receiver, Sender
from hpctrain.pipeline.nest import Form, Leaf, describe
from hpctrain.pipeline.pieces import LEAST_BYTES, Replicas
from hpctrain.plan.mesh import Mesh
from hpctrain.transport.threads import run_threads

ROWS = (3, 3, 3, 2, 0, 0, 4, 4)  # shapes change between micro-batches, and stay; no length divides all


def on_threads(size: int, function: Callable[[Any], Any]) -> list[Any]:
    return run_threads(size, lambda transport: function(parity.context_of(transport)))


@pytest.mark.parametrize("hidden", [4, 2])  # on 3 ranks of 2 units the last one owns nothing
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", None), ("zb-h1", None), ("interleaved", 2)])
@pytest.mark.parametrize(("stages", "tensor"), [(2, 1), (2, 2), (3, 2), (2, 3), (1, 2)])
def test_split_stages_equal_one_process(stages: int, tensor: int, name: str, chunks: int | None, hidden: int) -> None:
    on_threads(stages * tensor, lambda context: ts.case(context, tensor, name, ROWS, chunks=chunks, hidden=hidden,
                                                        least_bytes=0, checked=hidden == 2))


@pytest.mark.parametrize(("stages", "tensor", "least_bytes"), [(3, 2, 0), (2, 3, 50), (2, 2, LEAST_BYTES)])
def test_whole_stages_on_each_tensor_rank_equal_one_process(stages: int, tensor: int, least_bytes: int) -> None:
    on_threads(stages * tensor, lambda context: ts.case(context, tensor, "1f1b", ROWS, split=False,
                                                        least_bytes=least_bytes, checked=True))


# What travels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor", [1, 2, 3])
@pytest.mark.parametrize("least_bytes", [100, 1000])
def test_each_tensor_rank_sends_its_part_of_the_bytes(tensor: int, least_bytes: int) -> None:
    """Between two stages x, of 3 x 5 float64, is cut; the mask is small, and hidden values are split already."""
    sent: dict[int, Counter[int]] = {}

    def run(context: Any) -> None:
        def watch(pipeline: Any, group: Any) -> None:
            lengths = sent[context.rank] = Counter()
            send = pipeline.transport.send
            pipeline.transport.send = lambda data, *to: lengths.update([len(data)]) or send(data, *to)

        ts.case(context, tensor, "1f1b", (3,) * 4, watch=watch, least_bytes=least_bytes)

    on_threads(2 * tensor, run)
    for t in range(tensor):
        x = {1: [15], 2: [8, 7], 3: [5, 5, 5]}[tensor][t] if least_bytes == 100 else 15
        own = {1: [4], 2: [2, 2], 3: [2, 1, 1]}[tensor][t]
        backwards, forwards = 2 * 4, 4 * 4  # messages of two steps, each with an evaluation
        gradients = Counter({8 * x: backwards}) + Counter({8 * 3 * own: backwards})
        assert sent[tensor + t] == gradients, "the second stage sends gradients"
        activations = (Counter({8 * x: forwards}) + Counter({8 * 3 * own: forwards}) + Counter({3 * 8: forwards})
                       + Counter({8: 2 * forwards}))  # the frame, the number of the rank
        text = sent[t] - activations
        assert activations - sent[t] == Counter() and list(text.values()) == [1], "the form, once"


def test_the_next_message_is_awaited_before_pieces_are_put_together() -> None:
    seen: dict[int, list[str]] = {}

    def run(context: Any) -> None:
        def watch(pipeline: Any, group: Any) -> None:
            calls = seen[context.rank] = []
            recv, gather = pipeline.transport.recv, group.all_gather_into
            pipeline.transport.recv = lambda data, *rest: calls.append(f"{len(data)}") or recv(data, *rest)
            group.all_gather_into = lambda *args, **named: calls.append("gather") or gather(*args, **named)

        ts.case(context, 2, "1f1b", (3,) * 3, watch=watch, least_bytes=100)

    on_threads(4, run)
    first = seen[2].index("gather")
    # All receives of the second message are posted before the first is put together: frame, x, hidden, mask, rank.
    assert seen[2][first - 5:first] == ["8", str(8 * 8), str(8 * 3 * 2), "24", "8"]
    # So are those of the second gradient, whose form is known by then: x and hidden values.
    assert "".join(f"{call} " for call in seen[1]).startswith("56 48 56 48 gather")


# Nests ---------------------------------------------------------------------------------------------------------------


def converse(tensor: int, sequence: list[Any], marks: Any, *, least_bytes: int = 0, checked: bool = False,
             arrays: Any = ts.NUMPY) -> list[Any]:
    """2 x tensor ranks: stage 0 sends all, stage 1 sends doubled gradients back; gives what each rank got.

    `sequence` holds functions of the tensor rank.
    """

    def run(context: Any) -> list[Any]:
        mesh = Mesh({"pipeline": 2, "tensor": tensor})
        pipeline, group = (context.world.subgroup(mesh.group(context.rank, axis)) for axis in ("pipeline", "tensor"))
        replicas = Replicas(group, arrays_of, least_bytes, checked)
        there, back = (Link(pipeline, arrays, Buffers(arrays), 1 - pipeline.rank, channel, deque(), replicas)
                       for channel in (0, 1))
        if pipeline.rank == 0:
            out, grads = Sender(there, arrays_of, _is_float, marks), GradientReceiver(back)
            forms = [out.send(make(group.rank)) for make in sequence]
            found = [grads.receive(form, after) for form, after in zip(forms, [*forms[1:], None], strict=True)]
            out.link.finish()
            return found
        come, gradients = Receiver(there), GradientSender(back, arrays_of)
        got = [come.receive(ahead=i + 1 < len(sequence)) for i in range(len(sequence))]
        for nest, form in got:
            gradients.send(_doubled(nest), form)
        gradients.link.finish()
        return [nest for nest, _ in got]

    return on_threads(2 * tensor, run)


def _is_float(dtype: str) -> bool:
    return "float" in dtype


def _doubled(nest: Any) -> Any:
    if isinstance(nest, dict):
        return {key: _doubled(value) for key, value in nest.items()}
    if not _is_float(str(nest.dtype)):
        return None
    return np.asarray(2 * nest) if isinstance(nest, np.ndarray) else 2 * nest


def same(a: Any, b: Any) -> None:
    assert list(a) == list(b)
    for key, value in a.items():
        if value is None or b[key] is None:
            assert value is b[key]
        else:
            assert value.dtype == b[key].dtype and value.shape == b[key].shape
            assert bool((value == b[key]).all()), key


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
leaves = st.tuples(st.sampled_from("abc"), st.sampled_from(["float64", "float16", "int64", "bool"]), shapes,
                   st.integers(0, 9))


@settings(max_examples=40, deadline=None)
@given(tensor=st.integers(2, 3), sequence=st.lists(st.tuples(st.lists(leaves, max_size=4), st.integers(1, 3)),
                                                   min_size=1, max_size=3),
       marks=st.booleans() | st.dictionaries(st.integers(0, 4), st.booleans()), least=st.sampled_from([0, 8, 30]))
def test_every_nest_arrives_as_it_was(tensor: int, sequence: list[Any], marks: Any, least: int) -> None:
    """Replicated arrays in pieces, and others, which differ in values and shapes, from rank to rank."""

    def make(content: list[Any], rank: int) -> dict[int, Any]:
        nest = {}
        for key, (_, dtype, shape, start) in enumerate(content):
            if not (marks if isinstance(marks, bool) else marks.get(key, False)):
                shape, start = (*shape, rank), start + rank
            nest[key] = (np.arange(start, start + int(np.prod(shape))) % 9).astype(dtype).reshape(shape)
        return nest

    makes = [lambda rank, content=content: make(content, rank) for content, again in sequence for _ in range(again)]
    found = converse(tensor, makes, marks, least_bytes=least)
    for rank in range(tensor):
        for i, function in enumerate(makes):
            same(found[tensor + rank][i], function(rank))
            same(found[rank][i], _doubled(function(rank)))


def test_what_is_cut_may_change_while_shapes_stay() -> None:
    """`a` is replicated and `b` is not: nests of one array, which is now the one and now the other."""
    sequence = [lambda rank, i=i: {"ab"[i]: np.arange(5.0) + i * rank} for i in (0, 0, 0, 1, 1, 1, 0)]
    found = converse(2, sequence, {"a": True})
    for rank in range(2):
        for nest, make in zip(found[2 + rank], sequence, strict=True):
            same(nest, make(rank))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32])
def test_tensors_of_any_layout(dtype: torch.dtype) -> None:
    x = (torch.arange(15) % 7).reshape(3, 5).to(dtype)
    found = converse(2, [lambda rank: {"x": x.T, "y": x[:, ::2]}] * 2, {"x": True, "y": True}, checked=True,
                     arrays=arrays_of(x))
    for nest in found[2] + found[3]:
        same(nest, {"x": x.T, "y": x[:, ::2]})


def test_parts_of_nests_are_marked_by_key_and_position() -> None:
    x = np.ones(1)
    nest = {"a": [x, x, {"b": x}], "c": (x, x), 3: x}
    for marks, expected in ((True, [1] * 6), (False, [0] * 6), ({}, [0] * 6), ({"a": True}, [1, 1, 1, 0, 0, 0]),
                            ({"a": {0: True, 2: {"b": True}}, "c": {1: True}, 3: False}, [1, 0, 1, 0, 1, 0])):
        form = Form(describe(nest, arrays_of, _is_float, marks)[0])
        assert [leaf.replicated for leaf in form.leaves] == expected


def test_only_large_replicated_arrays_are_cut() -> None:
    def run(context: Any) -> None:
        replicas = Replicas(context.world, arrays_of)
        for count, replicated, cut in ((LEAST_BYTES // 8, True, True), (LEAST_BYTES // 8 - 1, True, False),
                                       (LEAST_BYTES, False, False)):
            leaf = Leaf("float64", (count,), True, replicated)
            array = np.empty(count)
            assert replicas.cuts(leaf) == cut
            assert replicas.piece(array, leaf).size == (count // 2 if cut else count)

    on_threads(2, run)


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["value", "shape", "type", "number"])
def test_replicated_arrays_that_differ_are_found_when_asked(wrong: str) -> None:
    def make(rank: int) -> dict[str, Any]:
        x = np.arange(6.0)
        return {"x": {"value": x + 1e-15 * rank, "shape": x[rank:], "type": x.astype("float32" if rank else "float64"),
                      "number": x}[wrong], **({"y": x} if wrong == "number" and rank else {})}

    with pytest.raises(MismatchError, match="replicated differ between tensor ranks 0 and 1"):
        converse(2, [make], True, checked=True)


def test_gradients_that_differ_are_found_when_asked() -> None:
    def run(context: Any) -> None:
        form = Form(describe({"x": np.ones(3)}, arrays_of, _is_float, True)[0])
        replicas = Replicas(context.world, arrays_of, checked=True)
        sender = GradientSender(Link(context.world, ts.NUMPY, Buffers(ts.NUMPY), 0, 0, deque(), replicas), arrays_of)
        with pytest.raises(MismatchError, match="float64 of shape"):
            sender.send({"x": np.ones(3) * context.rank}, form)

    on_threads(3, run)
