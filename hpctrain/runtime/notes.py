"""Notes between ranks that cannot use MPI at this moment: small files in a directory that all of them see.

Owns the files' names and the order of their appearance. The directory exists only while somebody is alarmed:

    rank 3   makes DIR, and DIR/alarm with the name of the round          it is the judge of this round
    others   see DIR/alarm, write DIR/rank-N.json once a round
    rank 3   reads them, removes DIR

Knows nothing of what notes say. Every call is local and none waits. Where the file system fails there are no notes;
only the judge is told.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["Notes"]


class Notes:
    """The directory of one job, as one rank uses it. `path` must be the same on all ranks."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self._rank = path, rank
        self._num_rounds = 0

    def round(self) -> str | None:
        """The name of the round that is under way, or None."""
        try:
            return (self.path / "alarm").read_text() or None
        except OSError:
            return None

    def call(self, *, stale: float) -> str | None:
        """Starts a round and gives its name; None where one is under way that began less than `stale` seconds ago.

        Raises:
            OSError: the directory cannot be made or written.
        """
        self._num_rounds += 1
        name = f"{self._rank}.{self._num_rounds}"
        alarm = self.path / "alarm"
        self.path.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if time.time() - alarm.stat().st_mtime < stale:
                return None
            alarm.unlink()  # its judge did not come to an end
        try:
            with alarm.open("x") as file:
                file.write(name)
        except FileExistsError:
            return None
        return name

    def write(self, name: str, note: Mapping[str, Any]) -> None:
        """Leaves this rank's note for the round `name`."""
        target = self.path / f"rank-{self._rank}.json"
        temporary = self.path / f".rank-{self._rank}"
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps({"round": name, "note": note}))
            temporary.replace(target)

    def count(self) -> int:
        """How many ranks have left a note, be it of this round or an earlier one."""
        with contextlib.suppress(OSError):
            return sum(path.name.startswith("rank-") for path in self.path.iterdir())
        return 0

    def read(self, name: str) -> dict[int, dict[str, Any]]:
        """The notes of the round `name` that are there, by rank."""
        found = {}
        for path in self.path.glob("rank-*.json"):
            with contextlib.suppress(OSError, ValueError):
                content = json.loads(path.read_text())
                if content["round"] == name:
                    found[int(path.stem.removeprefix("rank-"))] = content["note"]
        return found

    def clear(self) -> None:
        """Ends the round."""
        for _ in range(3):  # a late note may come between the files and their directory
            shutil.rmtree(self.path, ignore_errors=True)
            if not self.path.exists():
                return
