"""Who prints what."""

from __future__ import annotations

import pytest

from hpctrain import log


@pytest.fixture(autouse=True)
def back_to_one_rank():
    yield
    log.identify(0, 1, "")


def test_rank_0_speaks(capsys):
    log.identify(0, 2, "n1")
    log.info("going")
    log.warning("odd")
    assert capsys.readouterr().err == "going\nwarning: odd\n"


def test_others_only_warn_and_say_who_they_are(capsys):
    log.identify(1, 2, "n1")
    log.info("going")
    log.warning("two\nlines")
    assert capsys.readouterr().err == "[rank 1/2 n1] warning: two\n[rank 1/2 n1] warning: lines\n"


def test_once(capsys):
    log.identify(0, 1, "")
    for _ in range(3):
        log.once("a line that is said one time")
    assert capsys.readouterr().err == "a line that is said one time\n"
