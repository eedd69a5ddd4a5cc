"""Starts whole jobs as subprocesses, with a deadline, and leaves no process behind.

A job runs in a process group and session of its own. Its variables are this process's without those of any launcher,
so that a test behaves alike on a laptop, inside an allocation and under mpirun.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["DEADLINE", "Finished", "Running", "is_open_mpi", "mpirun", "python"]

#: Seconds after which a job has failed, whatever it was doing.
DEADLINE = 60.0

ROOT = Path(__file__).parents[2]
_LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL", "HYD", "SLURM_", "FLUX_", "PALS_", "JSM_")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_MARK = "HPCTRAIN_TEST_JOB"  # every process of a job inherits it


@dataclass(frozen=True)
class Finished:
    """A job that is over. `code` is the exit status of its launcher; `seconds` how long it ran."""

    code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def text(self) -> str:
        """Everything that it said, for messages."""
        return f"exit {self.code} after {self.seconds:.1f} s\n{self.stdout}\n{self.stderr}"


class Running:
    """A job under way: `kill` parts of it, then `finish`."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str | None], folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        self._start = time.monotonic()
        self._files = [open(folder / f"{self.mark}.{name}", "w+b") for name in ("out", "err")]
        # What a killed mpirun leaves in its TMPDIR would keep a later one of the same process number from starting.
        self._own = tempfile.TemporaryDirectory(prefix="job-")
        self.process = subprocess.Popen(
            command, cwd=folder, env=_environ({"TMPDIR": self._own.name, **environ}) | {_MARK: self.mark},
            start_new_session=True, stdin=subprocess.DEVNULL, stdout=self._files[0], stderr=self._files[1])

    def stdout(self) -> str:
        """What it has printed so far."""
        return self._read(0)

    def _read(self, index: int) -> str:
        return Path(self._files[index].name).read_text(errors="replace")

    def wait_for(self, condition: Callable[[], bool], *, seconds: float = DEADLINE) -> None:
        """Polls until `condition()`, or fails the test when the job ends or the time is over first."""
        give_up = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None or time.monotonic() > give_up:
                raise AssertionError(f"did not come to it\n{self.finish(seconds=0.0).text}")
            time.sleep(0.02)

    def ranks(self) -> list[psutil.Process]:
        """The python processes of the job that the launcher started, in the order of their rank."""
        found = []
        for process in self._alive():
            try:
                environ = process.environ()
                rank = environ.get("OMPI_COMM_WORLD_RANK", environ.get("PMI_RANK"))
                if rank is not None and "python" in process.name():
                    found.append((int(rank), process))
            except psutil.Error:
                continue
        return [process for _, process in sorted(found, key=lambda pair: pair[0])]

    def finish(self, *, seconds: float = DEADLINE) -> Finished:
        """Waits for the end; at the deadline everything is killed and the test fails. Checks that nothing is left."""
        try:
            code = self.process.wait(timeout=seconds)
            late = False
        except subprocess.TimeoutExpired:
            late = True
        ran = time.monotonic() - self._start
        left = self._wait_for_the_rest(0.0 if late else 5.0)
        for process in left:
            try:
                process.kill()
            except psutil.Error:
                continue
        if late:
            code = self.process.wait()
        result = Finished(code, self._read(0), self._read(1), ran)
        for file in self._files:
            file.close()
        self._own.cleanup()
        if late and seconds > 0:
            raise AssertionError(f"the job was not over within {seconds} s\n{result.text}")
        if left and not late:
            raise AssertionError(f"left behind: {left}\n{result.text}")
        return result

    def kill_all(self) -> None:
        """SIGKILL to every process of the job, at one moment."""
        for process in self._alive():
            process.send_signal(signal.SIGKILL)

    def _alive(self) -> list[psutil.Process]:
        """All processes that carry the job's mark, the launcher included."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def _wait_for_the_rest(self, seconds: float) -> list[psutil.Process]:
        give_up = time.monotonic() + seconds
        while (left := self._alive()) and time.monotonic() < give_up:
            time.sleep(0.05)
        return left


def mpirun(num_ranks: int, arguments: Sequence[str], folder: Path, *, command: Sequence[str] = (sys.executable,),
           environ: Mapping[str, str | None] | None = None) -> Running:
    """Starts `command arguments` on `num_ranks` ranks with the mpirun beside this python, else that of the PATH.

    `environ` changes variables; None removes one.
    """
    beside = Path(sys.executable).with_name("mpirun")
    launcher = str(beside) if beside.exists() else shutil.which("mpirun")
    assert launcher is not None, "these tests need mpirun"
    options = ["--oversubscribe"] if is_open_mpi(launcher) else []
    full = [launcher, *options, "-n", str(num_ranks), *command, *arguments]
    return Running(full, dict(environ or {}), folder)


def python(arguments: Sequence[str], folder: Path, *, environ: Mapping[str, str | None] | None = None) -> Running:
    """Starts this python without any launcher."""
    return Running([sys.executable, *arguments], dict(environ or {}), folder)


def is_open_mpi(launcher: str) -> bool:
    """Whether this mpirun is Open MPI's, which wants to be told that there may be more ranks than cores."""
    return "Open MPI" in subprocess.run([launcher, "--version"], capture_output=True, text=True, timeout=30,
                                        check=False).stdout


def _environ(changes: Mapping[str, str | None]) -> dict[str, str]:
    result = {name: value for name, value in os.environ.items()
              if not name.startswith(_LAUNCHERS) and name not in _THREADS}
    result |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PYTHONPATH": str(ROOT)}
    result |= {name: value for name, value in changes.items() if value is not None}
    return {name: value for name, value in result.items() if changes.get(name, "") is not None}
