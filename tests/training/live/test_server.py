"""The page of a run: who may see it, what it is sent, and that it stops."""

from __future__ import annotations

import http.client
import json
import math
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from penstock.compiler.report.page.write import shared_script
from penstock.ir.errors import PlanError
from penstock.tests.training.live.told import OFFER, Clock, facts_of_run, record, tell
from penstock.training.live import server as module
from penstock.training.live.server import PAGE, PageServer
from penstock.training.live.state import RunState


@pytest.fixture
def page() -> Iterator[PageServer]:
    made = PageServer("127.0.0.1:0", RunState(Clock()))
    yield made
    made.close()


def get(page: PageServer, path: str = "", host: str | None = None) -> tuple[int, http.client.HTTPResponse]:
    """The answer to a request of the page's address and `path`; with a path that begins with a slash, of that alone."""
    parts = urlsplit(page.address)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port or 0, timeout=10)
    headers = {} if host is None else {"Host": host}
    connection.request("GET", path if path.startswith("/") else parts.path + path, headers=headers)
    response = connection.getresponse()
    return response.status, response


def updates(page: PageServer) -> Iterator[dict[str, Any]]:
    status, response = get(page, "updates")
    assert status == 200 and response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    for line in response:
        if line.startswith(b"data: "):
            yield json.loads(line[len(b"data: ") :])


def test_the_page_needs_nothing_from_elsewhere(page: PageServer) -> None:
    status, response = get(page)
    assert status == 200
    assert response.read().decode() == PAGE.read_text().replace("<!--SHARED-->", shared_script())
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert response.headers["Cache-Control"] == "no-store" and response.headers["Referrer-Policy"] == "no-referrer"
    assert re.findall(r"https?://[^\"' ]+", PAGE.read_text()) == []


def test_without_the_token_nothing_is_told(page: PageServer) -> None:
    token = urlsplit(page.address).path.strip("/")
    another = PageServer("127.0.0.1:0")
    another.close()
    assert len(token) >= 32 and token not in another.address
    for path in ("/", "/updates", f"/{token[:-1]}/", f"/{token}x/", "//", f"/x/{token}/"):
        status, response = get(page, path)
        assert status == 403 and token not in response.read().decode(), path
    assert get(page, f"/{token}/elsewhere")[0] == 404
    status, response = get(page, f"/{token}")
    assert (status, response.headers["Location"]) == (308, f"/{token}/")
    assert get(page, f"/{token}/?from=mail")[0] == 200
    with socket.create_connection(("127.0.0.1", urlsplit(page.address).port or 0), timeout=5) as connection:
        connection.sendall("GET /é/ HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.0 403 ")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example:8000", 403), ("evil.example", 403), ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example:1", 403), ("", 403),
        ("localhost:9", 200), ("127.0.0.1:9", 200), ("localhost", 200), ("[::1]:9", 200),
    ],
)  # fmt: skip
def test_another_hosts_name_is_refused(page: PageServer, host: str, status: int) -> None:
    """As a page of the web would send it, whose name was made to lead here. The port is that of a tunnel."""
    assert get(page, "", host)[0] == status


def test_each_step_reaches_an_open_page(page: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UPDATE_S", 0.02)
    clock = Clock()
    found = updates(page)
    assert next(found)["phase"] == "preparing"
    page.begin(facts_of_run())
    begun = next(found)
    assert (begun["phase"], begun["total_steps"], begun["name"]) == ("training", 200, "chat")
    assert begun["about"] == {"plan": "58afcb", "hardware": "rtx4090x2"}
    tell(page, clock, range(1, 4))
    page.step(record(4, loss=math.nan))
    page.evaluated(4, {"loss": math.inf, "accuracy": 0.5})
    page.offered(OFFER)
    seen = begun
    while not seen.get("offer"):
        seen = next(found)
    assert seen["step"] == 4 and [step for step, _ in seen["curve"]] == [1, 2, 3, 4]
    assert seen["curve"][3] == [4, None] and seen["curve"][0][1] == pytest.approx(record(1).loss)
    assert seen["evaluations"] == [[4, {"loss": None, "accuracy": 0.5}]]
    assert seen["slowest"] == {"device": "gpu0", "stream": "compute", "share": pytest.approx(0.8)}
    assert seen["peak_bytes"]["gpu1"] == 17 * 2**30 and seen["limit_bytes"]["gpu1"] == 22 * 2**30
    assert (seen["step_s"], seen["predicted_s"], seen["learning_rate"]) == (0.05, 0.048, 5e-5)
    assert seen["offer"] == {"step": 75, "text": OFFER.text, "how": OFFER.how}
    assert "secret" not in json.dumps(seen)


def test_open_pages_hear_of_the_end_and_the_port_is_free_again(page: PageServer) -> None:
    found = updates(page)
    assert next(found)["phase"] == "preparing"
    page.begin(facts_of_run())
    start_s = time.monotonic()
    page.end(interrupted=True)
    assert time.monotonic() - start_s < 3
    assert [seen["phase"] for seen in found][-1] == "interrupted"
    port = urlsplit(page.address).port
    assert not [thread for thread in threading.enumerate() if "penstock-page" in thread.name]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    page.close()
    PageServer(f"127.0.0.1:{port}").close()


def test_a_connection_without_a_request_keeps_no_run_from_ending(page: PageServer) -> None:
    with socket.create_connection(("127.0.0.1", urlsplit(page.address).port or 0), timeout=5):
        time.sleep(0.2)
        start_s = time.monotonic()
        page.end()
        assert time.monotonic() - start_s < 3


def test_a_browser_that_goes_away_is_no_error(
    page: PageServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "UPDATE_S", 0.01)
    parts = urlsplit(page.address)
    with socket.create_connection((str(parts.hostname), parts.port or 0), timeout=5) as connection:
        connection.sendall(f"GET {parts.path}updates HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert connection.recv(100)
    server = page._server
    assert server is not None
    end_s = time.monotonic() + 10
    step = 0
    while server.updating and time.monotonic() < end_s:
        step += 1
        page.step(record(step))
        time.sleep(0.02)
    assert not server.updating and capfd.readouterr().err == ""


def test_a_port_in_use_names_the_nearest_free_one(page: PageServer) -> None:
    port = urlsplit(page.address).port or 0
    with pytest.raises(PlanError, match=rf"--serve 127.0.0.1:{port}: port {port} is in use; the nearest free one") as e:
        PageServer(f"127.0.0.1:{port}")
    (near,) = re.findall(r"free one is (\d+)", str(e.value))
    PageServer(f"127.0.0.1:{near}").close()
    assert 0 < abs(int(near) - port) <= 200


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("0.0.0.0:8000", r"other machines would reach 0.0.0.0; write 127.0.0.1:8000, .* ssh -L 8000:127.0.0.1:8000"),
        ("192.168.0.7:8000", "other machines would reach"),
        ("[::]:8000", "other machines would reach ::"),
        ("example.org:8000", "example.org is no address of this machine; write 127.0.0.1:8000"),
        ("127.0.0.1", "found no port from 0 to 65535; write 127.0.0.1:8000"),
        ("127.0.0.1:http", "found no port"),
        ("127.0.0.1:65536", "found no port"),
        ("127.0.0.1:-1", "found no port"),
        ("", "found no port"),
    ],
)
def test_other_places_are_refused(place: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        PageServer(place)


@pytest.mark.parametrize("place", ["localhost:0", "0", ":0", "127.0.0.2:0"])
def test_places_of_this_machine(place: str) -> None:
    page = PageServer(place)
    try:
        assert get(page)[0] == 200
    finally:
        page.close()
