"""A rank that fails ends the whole job, within seconds and with its traceback first.

Without this, an exception on one rank lets its interpreter run into MPI's finalization, which waits for the other
ranks, which wait for this one: a hang until the wall-time limit. `install` (done by `import hpctrain`) changes that:

    uncaught exception, any thread    traceback, each line with [rank r/N host]; a short grace; MPI abort
    sys.exit(code), code not 0        the ranks that leave together, leave; if some are still at work: MPI abort(code)
    end of the program                waits for the other ranks; says so after 5 s

It acts before Python joins non-daemon threads, so a live one cannot delay it. With one rank, in forked children and
in an interactive interpreter Python behaves as ever; HPCTRAIN_EXCEPTION_HOOK=0 turns everything off. MPI is found
through `sys.modules`; this file must not import it, nor anything else that is heavy.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any, NoReturn

from hpctrain import env

__all__ = ["install", "label", "watch"]

GRACE = 0.5  # seconds for the other ranks to print their own tracebacks
TOGETHER = 1.0  # seconds within which ranks count as leaving together
SAY_AFTER = 5.0  # seconds of waiting for others at the end before a line says so
STUCK = 3.0  # seconds that an MPI abort may take before the process ends itself


def install() -> None:
    """Puts the hooks in place, once a process. Local."""
    if _guard.pid is None and env.exception_hook():
        _guard.install()


def watch(communicator: Any) -> None:
    """Hands over an MPI communicator of all ranks, used for nothing else, by which they leave together. Local."""
    _guard.communicator = communicator


def label() -> str:
    """`[rank r/N host]` of this process, from MPI if it runs and else from the launcher. Local."""
    rank, size, _ = _job()
    return f"[rank {rank}/{size} {socket.gethostname()}]"


def _job() -> tuple[int, int, Any]:
    """(rank, number of ranks, the running mpi4py.MPI or None)."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        return mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size(), mpi
    launch = env.launch()
    return (0, 1, None) if launch is None else (launch.rank, launch.size, None)


class _Leaving(SystemExit):
    """What `sys.exit` raises here. The interpreter reads `code` from no Python frame: then the program does end.

    Whoever catches it (argparse, click, pytest) reads `code` from a frame of his own, and nothing happens.
    """

    def __getattribute__(self, name: str) -> Any:
        if name == "code":
            try:
                sys._getframe(1)
            except ValueError:
                _guard.exit_code(super().__getattribute__("code"))
        return super().__getattribute__(name)


class _Guard:
    """The state of this process: which hooks were there before, and how far it is with leaving."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.communicator: Any = None
        self._goodbye: Any = None
        self._exception_hook: Any = None
        self._thread_hook: Any = None

    def install(self) -> None:
        self.pid = os.getpid()
        self._exception_hook, sys.excepthook = sys.excepthook, self._uncaught
        self._thread_hook, threading.excepthook = threading.excepthook, self._uncaught_in_thread
        sys.exit = _exit
        # Private in Python, there since 3.9, and the only call before non-daemon threads are joined.
        register = getattr(threading, "_register_atexit", None)
        if register is not None:
            register(self._end)

    def _is_ours(self) -> bool:
        interactive = hasattr(sys, "ps1") or sys.flags.interactive
        return self.pid == os.getpid() and not interactive and _job()[1] > 1

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not self._is_ours():
            self._exception_hook(kind, error, trace)
            return
        if self._exception_hook is sys.__excepthook__:
            _write("".join(traceback.format_exception(kind, error, trace)))
        else:
            _write("uncaught exception:")
            self._exception_hook(kind, error, trace)
        time.sleep(GRACE)
        self._abort(130 if issubclass(kind, KeyboardInterrupt) else 1)

    def _uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_type is SystemExit or issubclass(args.exc_type, SystemExit) or not self._is_ours():
            self._thread_hook(args)
            return
        name = args.thread.name if args.thread is not None else "?"
        error = args.exc_value
        _write(f"exception in thread {name}:\n"
               + "".join(traceback.format_exception(args.exc_type, error, args.exc_traceback)))
        time.sleep(GRACE)
        self._abort(1)

    def exit_code(self, code: object) -> None:
        """The interpreter is about to end with sys.exit's `code`."""
        number = code if isinstance(code, int) else 0 if code is None else 1
        if number == 0 or not self._is_ours() or _job()[2] is None or self._everybody_leaves(TOGETHER):
            return
        if number != code:
            _write(str(code))
        _write(f"left with exit code {number} while other ranks are at work; ending the job")
        self._abort(number)

    def _end(self) -> None:
        """The program has ended, in whatever way; non-daemon threads may still be alive."""
        if not self._is_ours() or _job()[2] is None:
            return
        if getattr(sys, "last_type", None) is not None and not self._everybody_leaves(TOGETHER):
            self._abort(1)  # an uncaught exception, printed by a hook that replaced ours
        if self.communicator is not None and not self._everybody_leaves(SAY_AFTER):
            _write(f"has ended and waits for other ranks, which did not end within {SAY_AFTER:.0f} s. If it should "
                   "not have: `raise SystemExit(code)` cannot be seen from here, sys.exit(code) ends the whole job")
            self._everybody_leaves(float("inf"))

    def _everybody_leaves(self, seconds: float) -> bool:
        """Whether all ranks come to their end within `seconds`. Collective over all ranks, never blocks in MPI."""
        if self.communicator is None:
            time.sleep(GRACE)
            return False
        if self._goodbye is None:
            self._goodbye = self.communicator.Ibarrier()
        give_up = time.monotonic() + seconds
        while not self._goodbye.Test():
            if time.monotonic() > give_up:
                return False
            time.sleep(0.01)
        return True

    def _abort(self, code: int) -> None:
        """Ends the job. Without MPI only this process: the launcher sees its exit code and ends the others."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        mpi = _job()[2]
        if mpi is not None:
            with contextlib.suppress(Exception):
                faulthandler.dump_traceback_later(STUCK, exit=True, file=2)
            mpi.COMM_WORLD.Abort(code)
        elif any(not t.daemon for t in threading.enumerate() if t is not threading.current_thread()):
            os._exit(code)


def _exit(status: object = None, /) -> NoReturn:
    """sys.exit, with an exception that tells when it ends the program."""
    raise _Leaving(status)


def _write(text: str) -> None:
    prefix = label()
    with contextlib.suppress(Exception):
        sys.stderr.write("".join(f"{prefix} {line}\n" for line in text.splitlines()))
        sys.stderr.flush()


_guard = _Guard()
