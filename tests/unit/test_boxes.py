"""Box arithmetic against brute force over every element."""

from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.plan import boxes

SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def shape_and_box(draw, num_boxes=1):
    shape = draw(SHAPES)
    drawn = []
    for _ in range(num_boxes):
        pairs = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
        drawn.append(tuple((a, b) for a, b in pairs))
    return (shape, *drawn)


def elements(box):
    return set(product(*(range(a, b) for a, b in box)))


def flat(box, shape):
    """Flat indices of a box's elements, in the box's own C order."""
    index = np.arange(prod(shape)).reshape(shape)
    return index[tuple(slice(a, b) for a, b in box)].reshape(-1).tolist()


@settings(max_examples=300, deadline=None)
@given(shape_and_box(2))
def test_intersection_is_the_set_of_common_elements(drawn):
    _, one, other = drawn
    common = boxes.intersect(one, other)
    expected = elements(one) & elements(other)
    assert (elements(common) if common is not None else set()) == expected
    assert boxes.volume(one) == len(elements(one))


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_range_is_few_boxes_in_order_without_overlap(data):
    shape = data.draw(SHAPES)
    start, stop = sorted((data.draw(st.integers(0, prod(shape))), data.draw(st.integers(0, prod(shape)))))
    found = boxes.range_boxes(shape, start, stop)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert [i for box in found for i in flat(box, shape)] == list(range(start, stop))
    assert all(boxes.volume(box) for box in found)


@settings(max_examples=500, deadline=None)
@given(shape_and_box())
def test_runs_are_the_box_and_cannot_be_joined(drawn):
    shape, box = drawn
    found = list(boxes.runs(box, shape))
    assert [i for offset, length in found for i in range(offset, offset + length)] == flat(box, shape)
    assert all(a + n < b for (a, n), (b, _) in pairwise(found))  # a gap between any two


@settings(max_examples=300, deadline=None)
@given(shape_and_box(2))
def test_runs_within_another_boxs_memory(drawn):
    shape, one, storage = drawn
    common = boxes.intersect(one, storage)
    if common is None:
        return
    memory = flat(storage, shape)  # what the storage holds, element by element
    found = [memory[i] for offset, length in boxes.runs_within(common, storage) for i in range(offset, offset + length)]
    assert found == flat(common, shape)


def test_the_picture_of_the_docstring():
    assert boxes.range_boxes((4, 6), 9, 21) == [((1, 2), (3, 6)), ((2, 3), (0, 6)), ((3, 4), (0, 3))]


def test_scalars_and_empty_tensors():
    assert boxes.range_boxes((), 0, 1) == [()]
    assert boxes.range_boxes((3, 0), 0, 0) == []
    assert list(boxes.runs((), ())) == [(0, 1)]
    assert list(boxes.runs(((0, 3), (0, 0)), (3, 0))) == []
    assert boxes.volume(()) == 1


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_a_range_outside_the_tensor_is_refused(start, stop):
    with pytest.raises(ValueError, match="must lie in"):
        boxes.range_boxes((2, 3), start, stop)
