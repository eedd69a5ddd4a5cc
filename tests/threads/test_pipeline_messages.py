"""Nests as messages: every structure, changes of it, types, gradients back, memory used again."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import parity
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.arrays import arrays_of
from hpctrain.collectives.group import NUM_CHANNELS
from hpctrain.errors import UnsupportedError
from hpctrain.pipeline.buffers import Buffers
from hpctrain.pipeline.messages import GradientReceiver, GradientSender, Link, Receiver, Sender
from hpctrain.pipeline.nest import Form, describe
from hpctrain.pipeline.run import channel_numbers
from hpctrain.transport.threads import run_threads

NUMPY = arrays_of(np.empty(0))
TYPES = ["float64", "float32", "float16", "int64", "int8", "uint8", "bool"]


def is_float(dtype: str) -> bool:
    return dtype.startswith("float")


shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
arrays = st.builds(lambda dtype, shape, start: (np.arange(start, start + int(np.prod(shape))) % 2).astype(dtype)
                   .reshape(shape), st.sampled_from(TYPES), shapes, st.integers(0, 9))
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
nests = st.recursive(plain | arrays, lambda inner: st.lists(inner, max_size=3)
                     | st.lists(inner, max_size=3).map(tuple)
                     | st.dictionaries(st.text(max_size=2) | st.integers(0, 3) | st.none(), inner, max_size=3),
                     max_leaves=8)


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert a == b


def doubled(nest: Any) -> Any:
    """What a backward gives: twice each array that needs a gradient, None for the rest."""
    if isinstance(nest, np.ndarray):
        return np.asarray(2 * nest) if nest.dtype.kind == "f" else None
    if isinstance(nest, dict):
        return {key: doubled(part) for key, part in nest.items()}
    if isinstance(nest, list | tuple):
        return type(nest)(doubled(part) for part in nest)
    return None


def link(context: Any, peer: int, channel: int) -> Link:
    return Link(context.world, NUMPY, Buffers(NUMPY), peer, channel, deque())


def converse(sequence: list[Any], *, ahead: bool = True) -> list[int]:
    """Rank 0 sends all, rank 1 gives the doubled gradients back; gives the messages that each rank started."""

    def run(transport: Any) -> int:
        context = parity.context_of(transport)
        calls = [0]
        for name in ("send", "recv"):
            setattr(transport, name, counting(getattr(transport, name), calls))
        if context.rank == 0:
            out, back = Sender(link(context, 1, 0), arrays_of, is_float), GradientReceiver(link(context, 1, 1))
            forms = [out.send(nest) for nest in sequence]
            for form, nest in zip(forms, sequence, strict=True):
                same(back.receive(form), doubled(nest))
            out.link.finish()
        else:
            come, back = Receiver(link(context, 0, 0)), GradientSender(link(context, 0, 1), arrays_of)
            got = []
            for i in range(len(sequence)):
                got.append(come.receive())
                if ahead and i + 1 < len(sequence):
                    come.expect()
            for (nest, form), sent in zip(got, sequence, strict=True):
                same(nest, sent)
                back.send(doubled(nest), form)
            back.link.finish()
        return calls[0]

    return run_threads(2, run)


def counting(function: Any, calls: list[int]) -> Any:
    def call(*args: Any) -> Any:
        calls[0] += 1
        return function(*args)

    return call


@settings(max_examples=60, deadline=None)
@given(sequence=st.lists(nests, min_size=1, max_size=4), again=st.integers(1, 2), ahead=st.booleans())
def test_every_nest_arrives_as_it_was(sequence: list[Any], again: int, ahead: bool) -> None:
    converse([nest for nest in sequence for _ in range(again)], ahead=ahead)


def test_shapes_that_change_in_every_way() -> None:
    x = [np.arange(float(i)) for i in range(6)]
    for order in ((1, 1, 1, 2, 2, 2, 1), (1, 2, 3, 4, 4, 4, 5, 0, 0, 0, 3), (0, 1, 0, 1)):
        converse([{"x": x[i], "n": i} for i in order])


def test_the_structure_is_sent_once_and_nothing_for_integers() -> None:
    ints = [np.arange(3), np.arange(3) > 1]
    first, second = converse([ints])
    assert (first, second) == (4, 4)  # frame, text, two arrays; no gradient
    assert converse([ints] * 5) == [4 + 4 * 3] * 2  # then a frame and two arrays
    x = np.ones(2)
    assert converse([[x, ints[0]]] * 3) == [3 * 3 + 1 + 3] * 2  # three gradients come back
    assert converse([None] * 3) == [3, 3]


def test_a_gradient_that_is_left_out_is_zero_and_types_are_those_of_the_activation() -> None:
    text, _ = describe({"a": np.ones(2, "float32"), "b": (np.ones(1), np.ones(3, "int32"))}, arrays_of, is_float)

    def run(transport: Any) -> None:
        context = parity.context_of(transport)
        form = Form(text)
        if context.rank == 0:
            sender = GradientSender(link(context, 1, 0), arrays_of)
            sender.send({"a": np.full(2, 3.0), "b": None}, form)
            sender.send(None, form)
            sender.link.finish()
        else:
            receiver = GradientReceiver(link(context, 0, 0))
            same(receiver.receive(form), {"a": np.full(2, 3, "float32"), "b": (np.zeros(1), None)})
            same(receiver.receive(form), {"a": np.zeros(2, "float32"), "b": (np.zeros(1), None)})

    run_threads(2, run)


@pytest.mark.parametrize(("nest", "where"), [
    ({"a": [1, {2, 3}]}, r"outputs\['a'\]\[1\] cannot be sent: a builtins.set"),
    ({(1, 2): 3}, "the key"),
    (b"text", "outputs cannot be sent: a builtins.bytes"),
])
def test_what_cannot_be_sent_is_named(nest: Any, where: str) -> None:
    with pytest.raises(UnsupportedError, match=where):
        describe(nest, arrays_of, is_float)


def test_channels_do_not_wait_for_each_other() -> None:
    def run(transport: Any) -> None:
        group = parity.context_of(transport).world
        if group.rank == 0:
            works = [group.start_send(np.array([float(c)]), 1, channel=c)
                     for c in (NUM_CHANNELS - 1, 0, 7)]
        else:
            works = [group.start_recv(np.zeros(1), 0, channel=c) for c in (0, 7, NUM_CHANNELS - 1)]
        for work in works:
            work.wait()
        if group.rank == 1:
            assert [float(work.wait()[0]) for work in works] == [0, 7, NUM_CHANNELS - 1]

    run_threads(2, run)


def test_more_channels_than_there_are_is_refused() -> None:
    numbers = channel_numbers((0, 1) * 128)
    for sender in (0, 1):
        mine = sorted(number for (_, stage), number in numbers.items() if stage % 2 == sender)
        assert mine == list(range(len(mine))) and len(mine) <= NUM_CHANNELS
    assert set(channel_numbers((0, 1, 0, 1), 2)) == {("activation", 0), ("activation", 2), ("grad", 1), ("grad", 3)}
    with pytest.raises(UnsupportedError, match="fewer chunks"):
        channel_numbers((0, 1) * 129)


def test_memory_comes_back_with_the_last_array_over_it() -> None:
    buffers = Buffers(NUMPY)
    first = buffers.take("float64", (2, 3))
    part = first[0, 1:]
    del first
    second = buffers.take("float64", (6,))
    assert buffers.num_made == 2  # `part` is still there
    part[...] = 1
    second[...] = 2
    assert np.array_equal(part, [1, 1])
    memory = NUMPY.memory(part)
    del part
    third = buffers.take("float32", (12,))
    assert buffers.num_made == 3  # its bytes are still looked at
    del memory, second, third
    kept = [buffers.take("int64", (6,)) for _ in range(3)]
    assert buffers.num_made == 3 and len({array.ctypes.data for array in kept}) == 3
    del kept
    buffers.tidy()
    buffers.take("float64", (5,))
    buffers.tidy()
    buffers.take("float64", (6,))
    assert buffers.num_made == 5  # what nobody took was let go


def test_a_pipeline_needs_no_new_memory_step_after_step() -> None:
    import pipeline_parity as pp

    from hpctrain.runtime.pipeline_options import Pipeline

    def run(context: Any) -> None:
        trainer = pp.pipelined(context, Pipeline("1f1b"))
        buffers = trainer._run._buffers
        made = []
        for _ in range(4):
            trainer.step(pp.global_batch(6, rows=1))
            made.append(buffers.num_made)
        assert made[0] > 0 and made[3] <= made[0] + 12  # of 60 messages; ranks are not always equally far

    pp.on_threads(3, run)
