"""Who watches a process: its recorder and its watchdog, from before MPI is loaded to the end of the job.

Owns their making and the place where ranks meet. A process that is alone has a recorder that nobody feeds, and no
watchdog.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpctrain import env
from hpctrain.collectives import Group
from hpctrain.collectives.fingerprint import CheckedChannel
from hpctrain.collectives.recorder import Observer, Recorder
from hpctrain.contracts import Transport
from hpctrain.runtime.limits import Watch
from hpctrain.runtime.watchdog import Watchdog

__all__ = ["Oversight"]

_GRACE = 2.0  # seconds for the watchdog to speak first


class Oversight:
    """Recorder and watchdog of one process.

    Attributes:
        watch: the options, with what the environment says.
        recorder: what the rank does; its phase is "init" until `join`.
    """

    def __init__(self, watch: Watch | None = None, promised: env.Launch | None = None) -> None:
        """Local. Watches from now on if the launcher promised other ranks."""
        self.watch = (watch or Watch()).overruled(env.hang_limit(), env.debug())
        self.recorder = Recorder()
        self._watchdog: Watchdog | None = None
        if promised is not None and promised.size > 1:
            self._begin(promised.rank, promised.size)

    def _begin(self, rank: int, size: int) -> Watchdog:
        self._watchdog = Watchdog(self.watch, self.recorder, rank=rank, size=size, host=socket.gethostname(),
                                  end=os._exit)
        self._watchdog.start()
        return self._watchdog

    def mpi_waits_for_all_ranks_to_start(self, load: Callable[[], Any]) -> Any:
        """What `load()` gives, MPI's module. Collective over all ranks.

        The load holds Python's lock until every rank of the job has come: no thread of Python can speak meanwhile. A
        thread of C prints the stacks, where this name tells what is waited for, and ends this process at the limit:
        later than the watchdog, which says more, would do if it could.
        """
        limit, report = self.watch.limit_of("init"), self.watch.report
        first = limit if limit is not None else report
        if self._watchdog is None or first is None or "mpi4py.MPI" in sys.modules:
            return load()
        faulthandler.dump_traceback_later(first + _GRACE, repeat=limit is None, file=2, exit=limit is not None)
        try:
            return load()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def observer(self, transport: Transport) -> Observer | None:
        """What the world's group reports to; None where there are no others. Collective over the world."""
        if transport.size == 1:
            return None
        channel = self.recorder.channel("world", range(transport.size))
        return CheckedChannel(channel, transport) if self.watch.debug else channel

    def join(self, world: Group) -> None:
        """From now on the ranks find each other; the start is over. Collective over `world`."""
        if world.size > 1:
            name = f"hpctrain-hang-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
            path = world.broadcast_value(str(Path(self.watch.directory or ".").absolute() / name))
            watchdog = self._watchdog or self._begin(world.rank, world.size)
            watchdog.join_ranks(world.rank, world.size, world.transport.abort, Path(path))
        self.recorder.enter("data")

    def close(self) -> None:
        """Ends the watch. Local."""
        if self._watchdog is not None:
            self._watchdog.close()
