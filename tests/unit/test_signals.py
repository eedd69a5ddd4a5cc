"""Signals set a flag, and call who was there before."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from hpctrain.runtime.signals import SIGNALS, Signals


@pytest.fixture
def signals():
    before = [signal.getsignal(number) for number in SIGNALS]
    watcher = Signals().install()
    yield watcher
    watcher.close()
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_flag(signals, number):
    assert not signals.requested
    os.kill(os.getpid(), number)
    assert signals.requested and signals.received == number.name
    signals.clear()
    assert not signals.requested


def test_second_interrupt_acts_at_once(signals):
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_second_term_does_not(signals):
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.received == "SIGTERM"


def test_the_users_handler_is_called():
    called = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
    watcher = Signals([signal.SIGUSR1]).install().install()
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert called == [signal.SIGUSR1] and watcher.requested
    finally:
        watcher.close()
        signal.signal(signal.SIGUSR1, before)


def test_not_from_another_thread():
    before = signal.getsignal(signal.SIGUSR1)
    thread = threading.Thread(target=lambda: Signals().install())
    thread.start()
    thread.join(10)
    assert signal.getsignal(signal.SIGUSR1) == before
