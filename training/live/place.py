"""The address of a page: HOST:PORT of this machine alone."""

from __future__ import annotations

import errno
import ipaddress
import socket

from ...ir.errors import PlanError

HOST = "127.0.0.1"
FURTHEST = 200  # ports away from a port in use, to look for a free one
FIRST_FREE, LAST = 1024, 65535  # ports that any user may take


def listen(place: str) -> socket.socket:
    """A socket that listens there; port 0 finds a free one. Raises `PlanError` if it cannot."""
    host, port = parse(place)
    try:
        return _listen(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PlanError(f"--serve {place}: port {port} is in use; {_free_one(host, port)}") from error
        raise PlanError(f"--serve {place}: {error.strerror}; {_free_one(host, max(port, FIRST_FREE))}") from error


def parse(place: str) -> tuple[str, int]:
    """The host's address and the port of "127.0.0.1:8000", "localhost:0", "[::1]:8000" or "8000"."""
    host, _, port = place.rpartition(":")
    host = host.strip("[]") or HOST
    if not (port.isascii() and port.isdigit() and int(port) <= LAST):
        raise PlanError(f"--serve {place!r}: found no port from 0 to {LAST}; write {HOST}:8000, or {HOST}:0 for any")
    try:
        address = ipaddress.ip_address(HOST if host == "localhost" else host)
    except ValueError:
        raise PlanError(f"--serve {place!r}: {host} is no address of this machine; write {HOST}:{port}") from None
    if not address.is_loopback:
        raise PlanError(
            f"--serve {place}: other machines would reach {host}; write {HOST}:{port}, and on the machine to look "
            f"from: ssh -L {port}:{HOST}:{port} THIS-HOST"
        )
    return str(address), int(port)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


def _free_one(host: str, port: int) -> str:
    """Says which port is free, the nearest one."""
    for distance in range(FURTHEST):
        for near in (port + distance, port - distance):
            if FIRST_FREE <= near <= LAST:
                try:
                    _listen(host, near).close()
                except OSError:
                    continue
                return f"the nearest free one is {near}, and port 0 finds one"
    return "port 0 finds a free one"
