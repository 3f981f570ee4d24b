"""A page of this machine that shows a run while it trains.

Only this machine reaches it, and only with the address, which holds a random token. Requests whose Host header names
another machine are refused, too: those of a page of the web whose name was made to lead here (DNS rebinding).
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import sys
import threading
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ...compiler.report.page.write import shared_script
from ..listener import Listener, OfferRecord, RunFacts, StepRecord
from .place import listen
from .plain import facts
from .state import RunState

PAGE = Path(__file__).with_name("page.html")
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
LOCAL = ("127.0.0.1", "localhost", "[::1]")
UPDATE_S = 0.5  # from one update of a page to the next
BEAT_S = 5.0  # without news, after which a page is told so: one that is closed is found out
SOCKET_S = 5.0  # for which a browser may keep a thread waiting
LOOK_S = 0.1  # from one look of the server to the next whether it shall stop


class PageServer(Listener):
    """Serves from its making until the run ends or `close`, in threads of its own. `address` is for a browser.

    `place` is HOST:PORT, see `place.listen`, with the `PlanError` that it raises.
    """

    def __init__(self, place: str, state: RunState | None = None):
        self.state = state or RunState()
        self._server: _Server | None = _Server(listen(place), self.state)
        self.address = self._server.address
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(LOOK_S,), name="penstock-page", daemon=True
        )
        self._thread.start()

    def begin(self, run: RunFacts) -> None:
        self.state.begin(run)

    def step(self, record: StepRecord) -> None:
        self.state.step(record)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self.state.evaluated(step, metrics)

    def offered(self, offer: OfferRecord) -> None:
        self.state.offered(offer)

    def end(self, interrupted: bool = False) -> None:
        self.state.end(interrupted)
        self.close()

    def close(self) -> None:
        """Tell open pages the last, and stop; may be called again."""
        server, self._server = self._server, None
        if server is not None:
            server.closing.set()
            server.shutdown()
            self._thread.join()
            for thread in list(server.updating):
                thread.join(SOCKET_S)
            server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # a browser that keeps a connection open does not keep the run from ending

    def __init__(self, listening: socket.socket, state: RunState):
        super().__init__(listening.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.state = listening, state
        self.token = secrets.token_urlsafe(24)
        self.closing = threading.Event()
        self.updating: set[threading.Thread] = set()  # threads that send updates
        host, port = listening.getsockname()[:2]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}/{self.token}/"
        self.hosts = {*LOCAL, host}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is no error."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = SOCKET_S

    def do_GET(self) -> None:
        token, slash, what = self.path.partition("?")[0].lstrip("/").partition("/")
        host = re.sub(r":\d*$", "", self.headers.get("Host", ""))  # any port: that of a tunnel is another
        if not (host in self.server.hosts and secrets.compare_digest(token.encode(), self.server.token.encode())):
            self._answer(HTTPStatus.FORBIDDEN, "the address that the run has printed is needed, with its token\n")
        elif not slash:  # the page's own requests are below it
            self._head(HTTPStatus.PERMANENT_REDIRECT, "text/plain", {"Location": f"/{token}/", "Content-Length": "0"})
        elif what == "":
            page = PAGE.read_text(encoding="utf-8").replace("<!--SHARED-->", shared_script())
            self._answer(HTTPStatus.OK, page, "text/html")
        elif what == "updates":
            self._update()
        else:
            self._answer(HTTPStatus.NOT_FOUND, "there is no such page\n")

    def _update(self) -> None:
        """Send the facts whenever there are new ones, until the run ends (server-sent events)."""
        thread, server = threading.current_thread(), self.server
        server.updating.add(thread)
        try:
            self._head(HTTPStatus.OK, "text/event-stream")
            sent, quiet_s = -1, 0.0
            is_last = False
            while not is_last:
                is_last = server.closing.is_set()  # before the snapshot, which is then the last one
                if server.state.version != sent:
                    now = server.state.snapshot()
                    self.wfile.write(f"data: {json.dumps(facts(now), allow_nan=False)}\n\n".encode())
                    sent, quiet_s = now.version, 0.0
                elif quiet_s >= BEAT_S:
                    self.wfile.write(b": nothing new\n\n")
                    quiet_s = 0.0
                if not is_last:
                    server.closing.wait(UPDATE_S)
                    quiet_s += UPDATE_S
        finally:
            server.updating.discard(thread)

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/plain") -> None:
        body = text.encode()
        self._head(status, kind, {"Content-Length": str(len(body))})
        self.wfile.write(body)

    def _head(self, status: HTTPStatus, kind: str, more: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, **(more or {}), "Content-Type": f"{kind}; charset=utf-8"}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are not printed: the terminal is the run's."""
