"""The watch over three ranks of one process, each with a recorder that a test leads by hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hpctrain.collectives.recorder import Channel, Recorder
from hpctrain.runtime.limits import Watch
from hpctrain.runtime.watchdog import Watchdog


class Ranks:
    """Recorders and watchdogs of a job in which each rank has done one all_reduce."""

    def __init__(self, watch: Watch, path: Any, size: int = 3) -> None:
        self.ended: list[int] = []
        self.over = threading.Event()
        self.channels: list[Channel] = []
        self.dogs = []
        self.path = path
        for rank in range(size):
            recorder = Recorder()
            channel = recorder.channel("world", range(size))
            channel.finished(channel.started("all_reduce sum", "float32", 101))
            recorder.enter("data")
            dog = Watchdog(watch, recorder, rank=rank, size=size, host="host", end=self.end)
            dog.join_ranks(rank, size, self.end, path / "hpctrain-hang-1")
            self.channels.append(channel)
            self.dogs.append(dog)

    def end(self, code: int) -> None:
        self.ended.append(code)
        for dog in self.dogs:
            dog.close()
        self.over.set()

    def wait(self, rank: int, operation: str = "all_reduce sum", count: int = 101) -> int:
        sequence = self.channels[rank].started(operation, "float32", count)
        self.channels[rank].waiting(sequence)
        return sequence

    def go(self) -> None:
        for dog in self.dogs:
            dog.start()

    def reports(self) -> list[Any]:
        return list(self.path.glob("hpctrain-hang-1.txt"))


@pytest.fixture
def ranks(tmp_path, monkeypatch) -> Iterator[Callable[..., Ranks]]:
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *args, **options: None)  # it would end the tests
    made = []

    def make(watch: Watch, **options: Any) -> Ranks:
        made.append(Ranks(watch, tmp_path, **options))
        return made[-1]

    yield make
    for job in made:
        for dog in job.dogs:
            dog.close()


def test_a_missing_rank_ends_the_job_with_a_report(ranks, capfd):
    job = ranks(Watch(limit=0.4))
    job.wait(0)
    job.wait(1)
    began = time.monotonic()
    job.go()
    assert job.over.wait(10)
    assert time.monotonic() - began < 5
    shown = capfd.readouterr().err
    assert job.ended[0] == 1
    assert "ranks 0-1: waiting in all_reduce sum of 101 x float32, operation 2 of group 'world'" in shown
    assert "rank 2: not in a collective (phase data, host)" in shown and "limit 0.4 s" in shown
    report = job.reports()[0].read_text()
    assert all(f"rank {rank} (host, process" in report for rank in range(3)) and "innermost call last" in report
    assert not (job.path / "hpctrain-hang-1").exists()


def test_one_judge_speaks_for_all(ranks, capfd):
    job = ranks(Watch(limit=0.4))
    job.end = lambda code: (job.ended.append(code), time.sleep(0.8), job.over.set())  # an abort that takes its time
    for dog in job.dogs:
        dog.join_ranks(job.dogs.index(dog), 3, job.end, job.path / "hpctrain-hang-1")
    job.wait(0)
    job.wait(1)
    job.go()
    assert job.over.wait(10)
    assert job.ended == [1] and capfd.readouterr().err.count("no progress") == 1
    assert [path.name for path in job.path.iterdir()] == ["hpctrain-hang-1.txt"]


def test_a_difference_ends_the_job_at_the_first_report(ranks, capfd):
    job = ranks(Watch(report=0.3))
    job.wait(0)
    job.wait(1)
    job.wait(2, "broadcast from 2")
    job.go()
    assert job.over.wait(10)
    shown = capfd.readouterr().err
    assert "the ranks differ" in shown and "rank 2: broadcast from 2 of 101 x float32" in shown


def test_without_a_limit_it_reports_and_goes_on(ranks, capfd):
    job = ranks(Watch(report=0.3))
    sequences = [job.wait(rank) for rank in (0, 1)]
    job.go()
    give_up = time.monotonic() + 10
    while not job.reports() and time.monotonic() < give_up:
        time.sleep(0.02)
    for rank, sequence in enumerate(sequences):
        job.channels[rank].finished(sequence)
    time.sleep(0.3)
    shown = capfd.readouterr().err
    assert "the job goes on" in shown and "no limit is set" in shown and job.ended == []


def test_work_on_root_has_no_limit_but_a_heartbeat(ranks, capfd):
    job = ranks(Watch(limit=0.3, heartbeat=0.5))
    for rank in range(3):
        sequence = job.channels[rank].started("on_root 0")
        (job.channels[rank].working if rank == 0 else job.channels[rank].waiting)(sequence)
    job.go()
    assert not job.over.wait(1.6)
    lines = capfd.readouterr().err.splitlines()
    assert 2 <= sum("rank 0 is at work alone" in line for line in lines) == len(lines) <= 4


def test_a_rank_that_works_in_a_phase_without_limit_is_not_ended(ranks, capfd):
    job = ranks(Watch(limit=0.3, report=None, phases={"checkpoint": None}))
    job.channels[2].recorder.enter("checkpoint")
    job.wait(0)
    job.wait(1)
    job.go()
    assert not job.over.wait(1.2) and capfd.readouterr().err == ""


def test_progress_is_never_reported(ranks, capfd):
    job = ranks(Watch(limit=1.0))
    job.go()
    for _ in range(16):  # longer than the limit, but no wait is
        sequences = [job.wait(rank) for rank in range(3)]
        time.sleep(0.1)
        for rank, sequence in enumerate(sequences):
            job.channels[rank].finished(sequence)
    assert capfd.readouterr().err == "" and job.ended == [] and list(job.path.iterdir()) == []


def test_a_rank_that_is_gone(ranks, capfd):
    job = ranks(Watch(limit=0.3))
    job.wait(0)
    job.wait(1)
    job.dogs.pop(2)  # it never starts
    job.go()
    assert job.over.wait(10)
    assert "rank 2: no answer" in capfd.readouterr().err


def test_no_directory_is_no_reason_to_be_silent(ranks, capfd, tmp_path):
    job = ranks(Watch(limit=0.3))
    (tmp_path / "file").write_text("")
    for rank, dog in enumerate(job.dogs):
        dog.join_ranks(rank, 3, job.end, tmp_path / "file" / "hpctrain-hang-1")
    job.wait(1)
    job.go()
    assert job.over.wait(10)
    shown = capfd.readouterr().err
    assert "ranks could not be asked" in shown and "no report could be written" in shown and "rank 1: waiting" in shown


def test_a_start_that_takes_too_long(capfd, monkeypatch):
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *args, **options: None)
    ended = threading.Event()
    dog = Watchdog(Watch(limit=0.5, report=0.2), Recorder(), rank=1, size=4, host="host", end=lambda code: ended.set())
    dog.start()
    assert ended.wait(5)
    dog.close()
    shown = capfd.readouterr().err
    assert "[rank 1/4 host] no progress: rank 1 has been in hpctrain.start" in shown
    assert "still trying" in shown and "the job is ended" in shown and "test_a_start_that_takes_too_long" in shown


def test_after_close_nothing_is_said(ranks, capfd):
    job = ranks(Watch(limit=0.3))
    job.wait(0)
    job.dogs[0].start()  # it alone: the others will not answer, and it asks for a while
    give_up = time.monotonic() + 5
    while not (job.path / "hpctrain-hang-1").exists() and time.monotonic() < give_up:
        time.sleep(0.01)
    job.dogs[0].close()
    job.dogs[0]._thread.join(5)
    assert not job.dogs[0]._thread.is_alive()
    assert capfd.readouterr().err == "" and job.ended == [] and list(job.path.iterdir()) == []


def test_nothing_runs_where_all_is_off():
    dog = Watchdog(Watch(report=None, heartbeat=None), Recorder(), rank=0, size=2, host="host", end=print)
    dog.start()
    assert not dog._thread.is_alive()
    dog.close()
