"""`penstock train --serve`: the page is there while it trains and gone after, however the run ends."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import threading
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from rich.console import Console

from penstock.cli.training import train
from penstock.compiler.job.job import Job
from penstock.ir.errors import PenstockError, PlanError
from penstock.tests.cli.test_train_command import TEXT, options, run
from penstock.tests.shown_elsewhere import slow_but


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


class Browser:
    """Opens the page from the `Job.step` of its second step on, and notes what it is sent."""

    def __init__(self, screen: Console, monkeypatch: pytest.MonkeyPatch):
        self.screen, self.seen = screen, list[dict[str, Any]]()
        self.address = ""
        self.thread: threading.Thread | None = None
        step = Job.step

        def opening(job: Job, batch: Any) -> Any:
            if job.step_count == 1:
                self.open()
            return step(job, batch)

        monkeypatch.setattr(Job, "step", opening)

    def open(self) -> None:
        (self.address,) = re.findall(r"live page: (\S+)", self.screen.file.getvalue())  # type: ignore[attr-defined]
        parts = urlsplit(self.address)
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port or 0, timeout=20)
        connection.request("GET", f"{parts.path}updates")
        response = connection.getresponse()
        self.thread = threading.Thread(target=self.read, args=(response,))
        self.thread.start()

    def read(self, response: http.client.HTTPResponse) -> None:
        for line in response:
            if line.startswith(b"data: "):
                self.seen.append(json.loads(line[len(b"data: ") :]))

    def close(self) -> None:
        """Wait for the end of what is sent. The port is free then."""
        assert self.thread is not None
        self.thread.join(10)
        assert not self.thread.is_alive()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", urlsplit(self.address).port or 0), timeout=5)


def test_a_run_shows_itself_until_it_ends(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Console(file=StringIO(), width=200)
    browser = Browser(screen, monkeypatch)
    result = train(options(text, tmp_path / "out", serve="127.0.0.1:0", eval_fraction=0.1), screen)
    browser.close()
    assert browser.seen[0]["phase"] == "training"
    last = browser.seen[-1]
    assert (last["phase"], last["step"], last["total_steps"]) == ("ended", 6, 6)
    assert [loss for _, loss in last["curve"]] == pytest.approx(result.losses)
    assert [step for step, _ in last["evaluations"]] == [0, 6]
    assert last["evaluations"][1][1] == pytest.approx(result.after)


@pytest.mark.slow
def test_ctrl_c_stops_the_page_too(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Console(file=StringIO(), width=200)
    step = Job.step

    def interrupt(job: Job, batch: Any) -> Any:
        if job.step_count == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step(job, batch)

    monkeypatch.setattr(Job, "step", interrupt)
    browser = Browser(screen, monkeypatch)
    result = train(options(text, tmp_path / "out", serve="127.0.0.1:0"), screen)
    browser.close()
    assert result.interrupted and (browser.seen[-1]["phase"], browser.seen[-1]["step"]) == ("interrupted", result.steps)


@pytest.mark.slow
@pytest.mark.parametrize("broken", slow_but([PenstockError], [KeyboardInterrupt, PenstockError]))
def test_a_run_that_breaks_off_stops_its_page(
    broken: type[BaseException], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Console(file=StringIO(), width=200)
    step = Job.step

    def breaking(job: Job, batch: Any) -> Any:
        if job.step_count == 3:
            raise broken("broken")
        return step(job, batch)

    monkeypatch.setattr(Job, "step", breaking)
    browser = Browser(screen, monkeypatch)
    with pytest.raises(broken):
        train(options(text, tmp_path / "out", serve="127.0.0.1:0"), screen)
    browser.close()
    assert browser.seen[-1]["phase"] == "interrupted"


def test_a_port_in_use_stops_the_command_before_anything_is_read(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PlanError, match=f"port {port} is in use; the nearest free one is "):
            run(options(tmp_path / "absent.txt", tmp_path / "out", serve=f"127.0.0.1:{port}"))


def test_what_stops_before_the_first_step_frees_the_port(tmp_path: Path) -> None:
    screen = Console(file=StringIO(), width=200)
    with pytest.raises(PlanError, match="absent"):
        train(options(tmp_path / "absent.txt", tmp_path / "out", serve="127.0.0.1:0"), screen)
    (port,) = re.findall(r"live page: http://127.0.0.1:(\d+)/", screen.file.getvalue())  # type: ignore[attr-defined]
    socket.create_server(("127.0.0.1", int(port))).close()
