"""Nests as messages from stage to stage, and their gradients back.

    activations   frame | arrays, if the receiver awaits them | text of the form, if it is new | arrays, if not yet sent
    gradients     arrays                                        both ends know the form: that of the activation

The frame is the length of the text, 0 where the form is the one before. Each receiver awaits one message ahead.
Whether it awaits the arrays too, both ends know: it does where the last two messages had arrays of the same types and
shapes. If they have changed all the same, the sender first sends as much as is awaited, of no meaning. Where the form
of a gradient has no array that needs one, there is no message.

Owns this protocol, on one channel of a group each. Knows no schedule: who sends in which order is derived elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hpctrain.collectives import Group
from hpctrain.contracts import Array, Arrays, ArraysOf, Work
from hpctrain.pipeline.buffers import Buffers
from hpctrain.pipeline.nest import Form, Leaf, describe

__all__ = ["GradientReceiver", "GradientSender", "Link", "Receiver", "Sender"]

_FRAME = 8  # bytes
_NOTHING = Form("null")


@dataclass(frozen=True)
class Link:
    """One direction between two ranks: a channel of `group` to or from rank `peer`, and what is under way on it."""

    group: Group
    arrays: Arrays
    buffers: Buffers
    peer: int
    channel: int
    pending: deque[Work]

    def send(self, array: Array) -> None:
        """Starts a message; forgets those that are through."""
        while self.pending and self.pending[0].done():
            self.pending.popleft()
        self.pending.append(self.group.start_send(array, self.peer, channel=self.channel))

    def recv(self, leaf: Leaf) -> tuple[Array, Work]:
        """Starts to receive into memory of the pool."""
        array = self.buffers.take(leaf.dtype, leaf.shape)
        return array, self.group.start_recv(array, self.peer, channel=self.channel)

    def finish(self) -> None:
        """Waits until all that was sent may be overwritten."""
        while self.pending:
            self.pending.popleft().wait()


class _History:
    """What both ends know: the form and the arrays of the last messages."""

    def __init__(self) -> None:
        self.form = _NOTHING
        self.known = False  # whether the arrays of the next message are awaited

    @property
    def layout(self) -> list[tuple[str, tuple[int, ...]]]:
        """Types and shapes of the last message's arrays."""
        return _layout(self.form)

    def add(self, form: Form) -> None:
        """A message was sent, or received."""
        self.known = self.form is _NOTHING or _layout(form) == self.layout
        self.form = form


def _layout(form: Form) -> list[tuple[str, tuple[int, ...]]]:
    return [(leaf.dtype, leaf.shape) for leaf in form.leaves]


class Sender:
    """Sends activations. `needs(dtype)`: whether arrays of that type need a gradient."""

    def __init__(self, link: Link, arrays_of: ArraysOf, needs: Callable[[str], bool]) -> None:
        self.link, self._arrays_of, self._needs = link, arrays_of, needs
        self._history = _History()

    def send(self, nest: Any) -> Form:
        """Starts to send; gives the form. The arrays must be left alone until the link has finished. Local."""
        text, arrays = describe(nest, self._arrays_of, self._needs)
        history, link = self._history, self.link
        form = history.form if text == history.form.text else Form(text)
        new = form is not history.form
        letters = text.encode() if new else b""
        link.send(_bytes(link.arrays, len(letters).to_bytes(_FRAME, "little")))
        awaited = history.known and _layout(form) == history.layout
        if awaited:
            _send_all(link, arrays)
        elif history.known:
            _send_all(link, (link.buffers.take(leaf.dtype, leaf.shape) for leaf in history.form.leaves))
        if new:
            link.send(_bytes(link.arrays, letters))
        if not awaited:
            _send_all(link, arrays)
        history.add(form)
        return form


class Receiver:
    """Receives what a `Sender` sends."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._history = _History()
        self._frame: tuple[Array, Work] | None = None
        self._ahead: list[tuple[Array, Work]] = []

    def expect(self) -> None:
        """Posts the receives of the next message, as far as they are known. Local."""
        if self._frame is None:
            self._frame = self.link.recv(Leaf("uint8", (_FRAME,), False))
            if self._history.known:
                self._ahead = [self.link.recv(leaf) for leaf in self._history.form.leaves]

    def receive(self) -> tuple[Any, Form]:
        """The next message and its form. Blocks until it is there."""
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
        if not history.known or _layout(form) != history.layout:
            found = [_landed(pair) for pair in [link.recv(leaf) for leaf in form.leaves]]
        history.add(form)
        return form.build(found), form


class GradientSender:
    """Sends gradients of received activations back."""

    def __init__(self, link: Link, arrays_of: ArraysOf) -> None:
        self.link, self._arrays_of = link, arrays_of

    def send(self, nest: Any, form: Form) -> None:
        """Starts to send the gradient of a message of that form; what the nest leaves out is zero. Local."""
        arrays = self.link.arrays
        needed = [leaf for leaf in form.leaves if leaf.gradient]
        for leaf, gradient in zip(needed, form.gradients(nest), strict=True):
            if gradient is None:
                gradient = self.link.buffers.take(leaf.dtype, leaf.shape)
                arrays.fill(gradient, 0)
            elif self._arrays_of(gradient).dtype(gradient) != leaf.dtype:
                wide, gradient = gradient, self.link.buffers.take(leaf.dtype, leaf.shape)
                arrays.assign(gradient, wide)
            self.link.send(gradient)


class GradientReceiver:
    """Receives gradients of sent activations, in the order in which they are expected."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._ahead: list[tuple[Array, Work]] | None = None

    def expect(self, form: Form) -> None:
        """Posts the receives of the next message: the gradient of a nest of that form. Local."""
        if self._ahead is None:
            self._ahead = [self.link.recv(leaf) for leaf in form.leaves if leaf.gradient]

    def receive(self, form: Form) -> Any:
        """The gradient of a nest of that form. Blocks until it is there."""
        self.expect(form)
        assert self._ahead is not None
        found, self._ahead = [_landed(pair) for pair in self._ahead], None
        return form.gradient_nest(found)


def _send_all(link: Link, arrays: Iterable[Array]) -> None:
    for array in arrays:
        link.send(array)


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
