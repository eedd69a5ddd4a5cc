"""Debug mode: ranks compare what they are about to do, before any data moves.

Owns the comparison and its error. It costs one exchange of small messages before every collective, on a transport of
its own, so that it meets neither the group's messages nor the sends and receives of the program.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.collectives import agreement
from hpctrain.collectives.recorder import Channel, Message
from hpctrain.contracts import Transport
from hpctrain.errors import MismatchError

__all__ = ["CheckedChannel", "describe_call", "name_ranks"]

Fingerprint = tuple[str, str, int]  # operation, dtype, count


class CheckedChannel:
    """A channel whose `started` compares (operation, dtype, count) of all ranks. Collective over the group.

    Made and closed on all ranks of `transport` together. Raises MismatchError with the same words on all ranks. A rank
    that does not come leaves the others waiting in the comparison, which the channel shows as any other wait.
    """

    def __init__(self, channel: Channel, transport: Transport) -> None:
        self._channel = channel
        own = transport.subgroup(range(transport.size))
        assert own is not None, "every rank is in it"
        self._transport = own

    def started(self, operation: str, dtype: str = "", count: int = 0, name: str = "") -> int:
        channel = self._channel
        sequence = channel.started(operation, dtype, count, name)
        by = str(channel.latest.by)
        channel.waiting(sequence)
        told = agreement.exchange(self._transport, 0, [[operation, dtype, count], name, by])
        if any(mine[0] != told[0][0] for mine in told):
            channel.finished(sequence)
            raise MismatchError(_difference(sequence, channel, told))
        channel.resumed(sequence)
        return sequence

    def waiting(self, sequence: int) -> None:
        self._channel.waiting(sequence)

    def working(self, sequence: int) -> None:
        self._channel.working(sequence)

    def finished(self, sequence: int) -> None:
        self._channel.finished(sequence)

    def message(self, operation: str, dtype: str, count: int) -> Message:
        return self._channel.message(operation, dtype, count)

    def subgroup(self, ranks: Sequence[int], transport: Transport | None) -> Channel | CheckedChannel:
        channel = self._channel.subgroup(ranks, transport)
        return channel if transport is None else CheckedChannel(channel, transport)

    def close(self) -> None:
        self._channel.close()
        self._transport.close()


def describe_call(operation: str, dtype: str, count: int, name: str) -> str:
    """`all_reduce of 101 x float32 "gradients 3"`."""
    what = f" of {count} x {dtype}" if dtype else ""
    return f"{operation}{what}" + (f' "{name}"' if name else "")


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans[:20]) + (", ..." if len(spans) > 20 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def _difference(sequence: int, channel: Channel, told: Sequence[tuple[Fingerprint, str, str]]) -> str:
    """One line for each different call, with the ranks (of the world) and their lines."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, (fingerprint, name, by) in zip(channel.ranks, told, strict=True):
        groups.setdefault((describe_call(*fingerprint, name), by), []).append(rank)
    lines = [f"  {name_ranks(ranks)}: {call}, called at {by}" for (call, by), ranks in groups.items()]
    return "\n".join([f"operation {sequence} of group {channel.group!r} ({name_ranks(channel.ranks)}) is not the same "
                      "on all its ranks; no data was moved", *lines])
