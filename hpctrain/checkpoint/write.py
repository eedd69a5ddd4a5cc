"""The save: every rank writes its shard file, rank 0 commits.

Owns the Saver. The data path is raw writes straight from the pieces' memory at the offsets of a template. Other ranks
are known only through the group; sizes and hashes travel by it, so nobody looks at another rank's file.
"""

from __future__ import annotations

import operator
import os
import secrets
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_128_hexdigest

from hpctrain.checkpoint import commit, keep
from hpctrain.checkpoint.index import IndexTemplate, build_index
from hpctrain.checkpoint.layout import announce, check_pieces, join
from hpctrain.checkpoint.manifest import check_json, make_manifest
from hpctrain.checkpoint.schema import Piece, shard_name
from hpctrain.checkpoint.shard import write_shard
from hpctrain.checkpoint.system import System, remove_tree
from hpctrain.checkpoint.template import Template, build_shard
from hpctrain.checkpoint.together import agreed, on_root
from hpctrain.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from hpctrain.collectives import Group

__all__ = ["Saver"]


class Saver:
    """Writes checkpoints of one job into one root directory. One object a rank; two jobs must not share a root.

    The templates of the last layout are kept, so that a save with the same layout costs little more than its bytes.
    Synchronous: when `save` returns, the checkpoint survives a crash of the machine.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        group: Group,
        *,
        keep: int = 2,
        env: Mapping[str, Any] | None = None,
        system: System = os,
    ) -> None:
        """Local.

        Args:
            root: directory of the checkpoints, on a file system that all ranks see; made by the first save.
            keep: how many whole checkpoints stay, at least 1.
            env: facts for the manifest (versions, hosts, command line); rank 0's are stored.
            system: `os`, or an object with the same functions.
        """
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ConfigError(f"keep = {keep!r} must be an integer of at least 1")
        self.root = str(Path(root).absolute())
        self._group = group
        self._keep = keep
        self._env = dict(env or {})
        self._system = system
        self._template: tuple[str, Template] | None = None
        self._index: tuple[list[str], IndexTemplate | None] | None = None  # the digests of all ranks; rank 0's index

    def save(
        self,
        step: int,
        pieces: Sequence[Piece],
        *,
        user: Mapping[str, Any],
        rank_state: Mapping[str, bytes] | None = None,
        mesh: Mapping[str, int] | None = None,
    ) -> Path:
        """Writes one checkpoint; returns its directory. Collective over the group; blocks until it is durable.

        The pieces of all ranks must cover each tensor exactly once; `user` and `mesh` are rank 0's.
        Raises CheckpointError on all ranks alike, with older checkpoints untouched.
        """
        group = self._group
        states = dict(rank_state or {})
        with agreed(group):
            step = _checked_step(step)
            check_pieces(pieces)
            if group.rank == 0:
                check_json("user", user)
                check_json("env", self._env)
            pieces = _in_file_order(pieces)
            digest, template = self._own_template(pieces, states)
        self._exchange_layout(step, digest, template, pieces, states, dict(mesh or {"world": group.size}))

        save_id = group.broadcast_value(secrets.token_hex(16) if group.rank == 0 else None)
        temporary = commit.temporary_name(step, save_id)
        try:
            on_root(group, lambda: commit.prepare(self.root, temporary, self._system))
            with agreed(group):
                path = f"{self.root}/{temporary}/{shard_name(group.rank)}"
                root_hash = write_shard(path, template, _blobs(pieces, states), step, save_id, self._system)
            hashes = group.exchange([template.size, root_hash])
            files = {shard_name(rank): entry for rank, entry in enumerate(hashes)}
            facts = {"save_id": save_id, "step": step, "world_size": group.size, "user": user, "env": self._env}
            final = on_root(group, lambda: self._commit(temporary, facts, files, dict(mesh or {"world": group.size})))
        except BaseException:
            if group.rank == 0:
                self._remove(temporary)
            raise
        return Path(self.root, final)

    def _own_template(self, pieces: Sequence[Piece], states: Mapping[str, bytes]) -> tuple[str, Template]:
        """The template of this rank's shard and a digest of what it depends on; the last one is kept."""
        ranges = [(piece.tensor, piece.start, piece.stop) for piece in pieces]
        sizes = [(name, len(blob)) for name, blob in states.items()]
        digest = xxh3_128_hexdigest(repr((ranges, sizes)).encode())
        if self._template is None or self._template[0] != digest:
            full = [(tensor, start, stop) for tensor, start, stop in ranges if stop > start]
            self._template = digest, build_shard(self._group.rank, full, sizes)
        return self._template

    def _exchange_layout(
        self,
        step: int,
        digest: str,
        template: Template,
        pieces: Sequence[Piece],
        states: Mapping[str, bytes],
        mesh: Mapping[str, int],
    ) -> None:
        """Checks that ranks agree, and rebuilds the index where any rank's layout has changed."""
        group = self._group
        told = group.exchange([step, digest])
        for rank, (other, _) in enumerate(told):  # every rank sees the same list, so all raise alike
            if other != told[0][0]:
                raise CheckpointError(f"step differs: {told[0][0]} on rank 0 and {other} on rank {rank}")
        digests = [repr(mesh) if group.rank == 0 else "", *(digest for _, digest in told)]
        if not group.broadcast_value(self._index is None or self._index[0] != digests):
            return
        self._index = None
        rows = group.exchange(announce(pieces, states, template))
        built: list[IndexTemplate] = []
        on_root(group, lambda: built.append(build_index(join(rows), group.size, mesh)))
        self._index = digests, built[0] if built else None

    def _commit(
        self, temporary: str, facts: Mapping[str, Any], files: Mapping[str, Sequence[Any]], mesh: Mapping[str, int]
    ) -> str:
        """Rank 0: makes the checkpoint the newest one, then deletes old ones. Returns its directory's name."""
        assert self._index is not None
        assert self._index[1] is not None
        index = self._index[1].patched(facts["step"], bytes.fromhex(facts["save_id"]))
        sequence = keep.next_sequence(keep.entries(self.root, self._system))
        manifest = make_manifest({**facts, "sequence": sequence}, files, index, mesh)
        final = commit.free_name(self.root, facts["step"], self._system)
        commit.perform(commit.operations(self.root, temporary, final, index, manifest), self._system)
        try:
            keep.delete_old(self.root, final, self._keep, self._system)
        except OSError as error:  # the new checkpoint is safe; the old ones only take room
            warnings.warn(f"old checkpoints in {self.root} could not be deleted: {error}", stacklevel=2)
        return final

    def _remove(self, temporary: str) -> None:
        try:
            remove_tree(f"{self.root}/{temporary}", self._system)
        except OSError:
            return  # a leftover: the next save clears it away


def _checked_step(step: int) -> int:
    """The step as a plain integer, also of an array library's kind of integer."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 63 or isinstance(step, bool):
        raise CheckpointError(f"step = {step!r} must be an integer of at least 0")
    return number


def _in_file_order(pieces: Sequence[Piece]) -> list[Piece]:
    """By tensor in the order of first mention, then by start: the order in which a file numbers its pieces."""
    first: dict[str, int] = {}
    for piece in pieces:
        first.setdefault(piece.tensor.name, len(first))
    return sorted(pieces, key=lambda piece: (first[piece.tensor.name], piece.start))


def _blobs(pieces: Sequence[Piece], states: Mapping[str, bytes]) -> list[memoryview]:
    """What goes into the file, in the order of the template: non-empty pieces, then states."""
    return [piece.memory.cast("B") for piece in pieces if piece.stop > piece.start] + [
        memoryview(blob) for blob in states.values()
    ]
