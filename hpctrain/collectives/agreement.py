"""Small values between ranks, and errors that all ranks raise alike.

Owns the messages of JSON text by which ranks tell each other numbers, names and failures. Knows no arrays. Values are
what `json` carries: None, bool, int, float (inf and nan too), str, list, and dict with str keys; a tuple arrives as a
list. At most 64 MiB a value: this is for metadata, arrays go through the collectives.

A message is one frame of 512 bytes, length first, and the rest of the text in a second message where it does not fit.
"""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from types import TracebackType
from typing import Any

import hpctrain.errors
from hpctrain.contracts import Transport
from hpctrain.errors import RemoteError

__all__ = ["Agreement", "broadcast_value", "exchange", "on_root"]

_FRAME = 512  # bytes of the first message of a text
_LENGTH = 4  # bytes of the length in front of it
LIMIT = 64 * 1024 * 1024  # bytes of one value as text


def exchange(transport: Transport, tag: int, value: Any) -> list[Any]:
    """The values of all ranks in rank order. Collective over the transport's group.

    Bruck's all-gather: ceil(log2 p) rounds; in the round with distance d, a rank passes on the values of the d ranks
    from itself upwards. A value that is not JSON raises the same TypeError on all ranks.
    """
    rank, size = transport.rank, transport.size
    texts = [_encode(value)]  # of ranks rank, rank + 1, ...
    distance = 1
    while distance < size:
        num_sent = min(distance, size - distance)
        # JSON text has no raw line breaks, so they can separate.
        sent = _start_send(transport, tag, b"\n".join(texts[:num_sent]), (rank - distance) % size)
        texts += _receive(transport, tag, (rank + distance) % size).split(b"\n")
        for request in sent:
            request.wait()
        distance *= 2
    return [_decode(texts[(other - rank) % size], other) for other in range(size)]


def broadcast_value(transport: Transport, tag: int, value: Any, root: int) -> Any:
    """`value` of rank `root` on all ranks, by a binomial tree. Collective over the transport's group."""
    return _decode(_broadcast(transport, tag, _encode(value) if transport.rank == root else b"", root), root)


def on_root(transport: Transport, tag: int, function: Any, root: int) -> Any:
    """Runs `function()` on `root` and gives its value, or raises its error, on all ranks. Collective over the group."""
    text, cause = b"", None
    if transport.rank == root:
        try:
            text = _encode(function())
        except Exception as error:  # noqa: BLE001 - raised below, on all ranks alike
            cause = error
            text = _encode_error(error)
    return _decode(_broadcast(transport, tag, text, root), root, cause)


class Agreement:
    """Context manager: an exception in its body on any rank is raised on all ranks alike, at the end of the body.

    `tell` exchanges the values of all ranks. Collective over its group. The error is that of the lowest rank that
    failed; its class is kept where it is a builtin one or one of hpctrain.errors, and is RemoteError otherwise.
    SystemExit and KeyboardInterrupt are not errors and pass through on their rank alone.
    """

    def __init__(self, tell: Callable[[Any], list[Any]]) -> None:
        self._tell = tell

    def __enter__(self) -> Agreement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        failures = self._tell(_describe(error) if error is not None else None)
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise _rebuild(failure, rank) from error


def _broadcast(transport: Transport, tag: int, text: bytes, root: int) -> bytes:
    size = transport.size
    position = (transport.rank - root) % size
    # The lowest set bit of a position tells its parent; below it are the distances to its children.
    reach = position & -position if position else 1 << (size - 1).bit_length()
    if position:
        text = _receive(transport, tag, (transport.rank - reach) % size)
    sent = []
    distance = reach >> 1
    while distance:
        if position + distance < size:
            sent += _start_send(transport, tag, text, (transport.rank + distance) % size)
        distance >>= 1
    for request in sent:
        request.wait()
    return text


def _start_send(transport: Transport, tag: int, text: bytes, destination: int) -> list[Any]:
    room = _FRAME - _LENGTH
    frame = bytearray(_FRAME)
    frame[:_LENGTH] = len(text).to_bytes(_LENGTH, "little")
    frame[_LENGTH : _LENGTH + min(len(text), room)] = text[:room]
    requests = [transport.send(memoryview(frame), destination, tag)]
    if len(text) > room:
        requests.append(transport.send(memoryview(text)[room:], destination, tag))
    return requests


def _receive(transport: Transport, tag: int, source: int) -> bytes:
    room = _FRAME - _LENGTH
    frame = bytearray(_FRAME)
    transport.recv(memoryview(frame), source, tag).wait()
    length = int.from_bytes(frame[:_LENGTH], "little")
    head = bytes(frame[_LENGTH : _LENGTH + min(length, room)])
    if length <= room:
        return head
    rest = bytearray(length - room)
    transport.recv(memoryview(rest), source, tag).wait()
    return head + bytes(rest)


def _encode(value: Any) -> bytes:
    try:
        text = json.dumps({"value": value}, separators=(",", ":")).encode()
        if len(text) > LIMIT:
            raise ValueError(f"a value of {len(text)} bytes as text is too long; at most {LIMIT} may be exchanged")
        return text
    except Exception as error:  # noqa: BLE001 - the others are already waiting; this error is their answer
        return _encode_error(error)


def _encode_error(error: Exception) -> bytes:
    return json.dumps({"error": _describe(error)}).encode()


def _decode(text: bytes, rank: int, cause: Exception | None = None) -> Any:
    message = json.loads(text)
    if "error" in message:
        raise _rebuild(message["error"], rank) from cause
    return message["value"]


def _describe(error: BaseException) -> dict[str, Any]:
    kind = type(error)
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    number = error.errno if isinstance(error, OSError) else None
    return {"module": kind.__module__, "name": kind.__qualname__, "text": text, "errno": number}


def _rebuild(failure: dict[str, Any], rank: int) -> Exception:
    text, name = failure["text"], failure["name"]
    prefix = f"rank {rank}: "
    message = text if text.startswith(prefix) else prefix + text
    home = {"builtins": builtins, "hpctrain.errors": hpctrain.errors}.get(failure["module"])
    kind = getattr(home, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            if issubclass(kind, OSError) and failure["errno"] is not None:
                return kind(failure["errno"], message)
            return kind(message)
        except TypeError:  # a class that wants other arguments, such as UnicodeDecodeError
            pass
    return RemoteError(f"{prefix}{failure['module']}.{name}: {text}")
