"""Ctrl-C while something must not be broken off: real signals to this process."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from penstock.runtime.processes import interrupt
from penstock.runtime.processes.interrupt import RankInterrupt, finishing


@pytest.fixture(autouse=True)
def handler_stays() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) == before


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_what_runs_is_finished_before_the_interrupt(capfd: pytest.CaptureFixture[str]) -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), finishing("step"):
        ctrl_c()
        done.append("the rest")
    assert done and "`step` is finished first; once more breaks it off" in capfd.readouterr().err


def test_a_second_interrupt_breaks_off() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), finishing("step"):
        ctrl_c()
        ctrl_c()
        done.append("the rest")
    assert not done


def test_a_handler_of_the_script_runs_at_once_and_what_it_raises_waits() -> None:
    seen = []

    def handler(number: int, frame: object) -> None:
        seen.append(number)
        if len(seen) == 2:
            raise ValueError("the script's own")

    before = signal.signal(signal.SIGINT, handler)
    try:
        with finishing("step"):
            ctrl_c()
            assert seen == [signal.SIGINT]
        with pytest.raises(ValueError, match="the script's own"), finishing("step"):
            ctrl_c()
            seen.append(0)
        assert seen[-1] == 0
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGALRM, signal.SIGTERM])
def test_all_that_a_handler_raises_waits(number: int) -> None:
    def handler(number: int, frame: object) -> None:
        raise TimeoutError(f"signal {number}")

    before, done = signal.signal(number, handler), []
    try:
        with pytest.raises(TimeoutError, match=f"signal {int(number)}") as caught, finishing("step"):
            for _ in range(3):
                os.kill(os.getpid(), number)
            done.append("the rest")
        assert done and (sys.version_info < (3, 11) or len(caught.value.__notes__) == 2)
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


def test_a_handler_that_is_set_meanwhile_stays() -> None:
    def once(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)

    before = signal.signal(signal.SIGUSR1, once)
    try:
        with finishing("step"):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_error_of_the_body_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, finishing("step"):
        ctrl_c()
        raise ValueError("in the step")
    assert isinstance(caught.value.__context__, ValueError)


def test_other_threads_and_ignored_signals_are_left_alone() -> None:
    found = []

    def look() -> None:
        with finishing("step"):
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with finishing("step"):
            ctrl_c()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_rank_notes_the_signal_and_its_echo_until_all_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = RankInterrupt()
    try:
        assert not rank.is_noted
        with finishing("step"):
            ctrl_c()
            ctrl_c()  # the launcher's
        assert rank.is_noted
        with pytest.raises(KeyboardInterrupt):
            rank.stop()
        assert not rank.is_noted
        ctrl_c()
        monkeypatch.setattr(interrupt, "ECHO_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()
    finally:
        rank.end()


def test_a_rank_that_starts_during_a_call_notes_signals_from_then_on() -> None:
    """A job's first step starts its rank."""
    before = signal.getsignal(signal.SIGINT)
    with finishing("step"), finishing("start"):
        rank = RankInterrupt()
        ctrl_c()
    try:
        assert rank.is_noted
    finally:
        rank.end()
    assert signal.getsignal(signal.SIGINT) is before
