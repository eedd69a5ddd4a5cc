"""Nests as messages from stage to stage, and their gradients back.

    activations   frame | arrays, if the receiver awaits them | text of the form, if it is new | arrays, if not yet sent
    gradients     arrays                                        both ends know the form: that of the activation

The frame is the length of the text, 0 where the form is the one before. Each receiver awaits one message ahead.
Whether it awaits the arrays too, both ends know: it does where the last two messages had arrays of the same types and
shapes. If they have changed all the same, the sender first sends as much as is awaited, of no meaning. Where the form
of a gradient has no array that needs one, there is no message. Of arrays that a tensor group has alike each of its
ranks sends a piece (`pieces`): both ends know from the form which.

Owns this protocol, on one channel of a group each. Knows no schedule: who sends in which order is derived elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.collectives import Group
from hpctrain.contracts import Array, Arrays, ArraysOf, Replicated, Work
from hpctrain.pipeline.buffers import Buffers
from hpctrain.pipeline.nest import Form, Leaf, describe
from hpctrain.pipeline.pieces import Replicas

__all__ = ["GradientReceiver", "GradientSender", "Link", "Receiver", "Sender"]

_FRAME_BYTES = 8
_NOTHING = Form("null")


@dataclass(frozen=True)
class Link:
    """One direction between two ranks: a channel of `group` to or from rank `peer`, and what is under way on it.

    `replicas`: the tensor group, where there is one; `check` and `complete` are collective over it, all else is local.
    """

    group: Group
    arrays: Arrays
    buffers: Buffers
    peer: int
    channel: int
    pending: deque[Work]
    replicas: Replicas | None = None

    def send(self, array: Array) -> None:
        """Starts a message; forgets those that are through."""
        while self.pending and self.pending[0].done():
            self.pending.popleft()
        self.pending.append(self.group.start_send(array, self.peer, channel=self.channel))

    def send_all(self, arrays: Iterable[Array], leaves: Iterable[Leaf]) -> None:
        """Starts a message for each array, or this rank's piece of it."""
        for array, leaf in zip(arrays, leaves, strict=True):
            self.send(array if self.replicas is None else self.replicas.piece(array, leaf))

    def recv(self, leaf: Leaf) -> tuple[Array, Work]:
        """Starts to receive an array, or this rank's piece of it in its place, into memory of the pool."""
        array = self.buffers.take(leaf.dtype, leaf.shape)
        into = array if self.replicas is None else self.replicas.piece(array, leaf)
        return array, self.group.start_recv(into, self.peer, channel=self.channel)

    def check(self, arrays: Sequence[Array], leaves: Sequence[Leaf]) -> None:
        """Before a send: whether what is called replicated is."""
        if self.replicas is not None:
            self.replicas.check(arrays, leaves)

    def complete(self, arrays: Sequence[Array], leaves: Sequence[Leaf]) -> None:
        """When a message has landed: puts its pieces together."""
        if self.replicas is not None:
            self.replicas.complete(arrays, leaves)

    def finish(self) -> None:
        """Waits until all that was sent may be overwritten."""
        while self.pending:
            self.pending.popleft().wait()


class _History:
    """What both ends know: the form and the arrays of the last messages."""

    def __init__(self) -> None:
        self.form = _NOTHING
        self.known = False  # whether the arrays of the next message are awaited

    def add(self, form: Form) -> None:
        """A message was sent, or received."""
        self.known = self.form is _NOTHING or form.layout == self.form.layout
        self.form = form


class Sender:
    """Sends activations.

    `needs(dtype)` says whether arrays of that type need a gradient, `replicated` what `Model.replicated` does.
    """

    def __init__(self, link: Link, arrays_of: ArraysOf, needs: Callable[[str], bool],
                 replicated: Replicated = False) -> None:
        self.link, self._arrays_of, self._needs, self._replicated = link, arrays_of, needs, replicated
        self._history = _History()
        self._array: type | None = None  # of the last nest, where it was nothing but an array
        self._as_before = _frame(link.arrays, 0)

    def send(self, nest: Any) -> Form:
        """Starts to send; gives the form. The arrays must be left alone until the link has finished."""
        history, link = self._history, self.link
        form, arrays = self._form(nest)
        new = form is not history.form
        link.check(arrays, form.leaves)
        letters = form.text.encode() if new else b""
        link.send(_frame(link.arrays, len(letters)) if new else self._as_before)
        awaited = history.known and form.layout == history.form.layout
        if awaited:
            link.send_all(arrays, form.leaves)
        elif history.known:
            leaves = history.form.leaves
            link.send_all((link.buffers.take(leaf.dtype, leaf.shape) for leaf in leaves), leaves)
        if new:
            link.send(_bytes(link.arrays, letters))
        if not awaited:
            link.send_all(arrays, form.leaves)
        history.add(form)
        return form

    def _form(self, nest: Any) -> tuple[Form, list[Array]]:
        """The form of a nest, the one before if it is that, and its arrays."""
        last = self._history.form
        if type(nest) is self._array:
            backend, (leaf,) = self._arrays_of(nest), last.leaves
            if backend.shape(nest) == leaf.shape and backend.dtype(nest) == leaf.dtype:
                return last, [nest]
        text, arrays = describe(nest, self._arrays_of, self._needs, self._replicated)
        self._array = type(nest) if arrays and arrays[0] is nest else None
        return last if text == last.text else Form(text), arrays


class Receiver:
    """Receives what a `Sender` sends."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._history = _History()
        self._frame_memory = link.arrays.empty(_FRAME_BYTES, "uint8")
        self._frame: tuple[Array, Work] | None = None
        self._ahead: list[tuple[Array, Work]] = []

    def expect(self) -> None:
        """Posts the receives of the next message, as far as they are known. Local."""
        if self._frame is None:
            link = self.link
            self._frame = self._frame_memory, link.group.start_recv(self._frame_memory, link.peer, channel=link.channel)
            if self._history.known:
                self._ahead = [self.link.recv(leaf) for leaf in self._history.form.leaves]

    def receive(self, *, ahead: bool = False) -> tuple[Any, Form]:
        """The next message and its form; `ahead`: posts the receives of the one after it. Blocks until it is there."""
        self.expect()
        assert self._frame is not None
        history, link = self._history, self.link
        length = int.from_bytes(_wait(link.arrays, self._frame), "little")
        self._frame = None
        found = [_landed(pair) for pair in self._ahead]
        self._ahead = []
        form = history.form
        if length:
            form = Form(_wait(link.arrays, link.recv(Leaf("uint8", (length,), False))).decode())
        if not history.known or form.layout != history.form.layout:
            found = [_landed(pair) for pair in [link.recv(leaf) for leaf in form.leaves]]
        history.add(form)
        if ahead:  # before the pieces are put together, so that the next message can come meanwhile
            self.expect()
        link.complete(found, form.leaves)
        return form.build(found), form


class GradientSender:
    """Sends gradients of received activations back."""

    def __init__(self, link: Link, arrays_of: ArraysOf) -> None:
        self.link, self._arrays_of = link, arrays_of

    def send(self, nest: Any, form: Form) -> None:
        """Starts to send the gradient of a message of that form; what the nest leaves out is zero."""
        arrays, gradients = self.link.arrays, []
        for leaf, gradient in zip(form.needing, form.gradients(nest), strict=True):
            if gradient is None:
                gradient = self.link.buffers.take(leaf.dtype, leaf.shape)
                arrays.fill(gradient, 0)
            elif self._arrays_of(gradient).dtype(gradient) != leaf.dtype:
                wide, gradient = gradient, self.link.buffers.take(leaf.dtype, leaf.shape)
                arrays.assign(gradient, wide)
            gradients.append(gradient)
        self.link.check(gradients, form.needing)
        self.link.send_all(gradients, form.needing)


class GradientReceiver:
    """Receives gradients of sent activations, in the order in which they are expected."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._ahead: list[tuple[Array, Work]] | None = None

    def expect(self, form: Form) -> None:
        """Posts the receives of the next message: the gradient of a nest of that form. Local."""
        if self._ahead is None:
            self._ahead = [self.link.recv(leaf) for leaf in form.needing]

    def receive(self, form: Form, after: Form | None = None) -> Any:
        """The gradient of a nest of that form; posts the receives of one of form `after`. Blocks until it is there."""
        self.expect(form)
        assert self._ahead is not None
        found, self._ahead = [_landed(pair) for pair in self._ahead], None
        if after is not None:
            self.expect(after)
        self.link.complete(found, form.needing)
        return form.gradient_nest(found)


def _frame(arrays: Arrays, length: int) -> Array:
    return _bytes(arrays, length.to_bytes(_FRAME_BYTES, "little"))


def _bytes(arrays: Arrays, content: bytes) -> Array:
    array = arrays.empty(len(content), "uint8")
    arrays.memory(array)[:] = content
    return array


def _wait(arrays: Arrays, pair: tuple[Array, Work]) -> bytes:
    return bytes(arrays.memory(_landed(pair)))


def _landed(pair: tuple[Array, Work]) -> Array:
    array, work = pair
    work.wait()
    return array
