"""Two hosts on one machine: network namespaces joined by a pair of virtual Ethernet devices.

Each namespace has its own address and loopback. All traffic between them passes one link, which is limited to a rate in
each direction and whose bytes the kernel counts; it adds no latency. The link can be cut and joined again. This module
needs root and Linux.

    with two_hosts(rate_bytes_s=125e6) as hosts:
        before = hosts.sent_bytes()
        agents = [hosts.popen(host, [sys.executable, "-m", "torch.distributed.run", ...]) for host in (0, 1)]
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INTERFACE = "link0"  # the name of a host's end of the link
PREFIX_BITS = 24
BURST_S = 0.005  # seconds of the given rate that may pass at once
LEAST_BURST_BYTES = 128 << 10  # so that one segment of the kernel's offloading passes whole
QUEUE_MS = 400
END_S = 5.0  # how long killed processes may take to end

_counter = itertools.count()


@dataclass(frozen=True)
class TwoHosts:
    """The two hosts. `names` are those of their namespaces, `addresses` those by which each reaches the other."""

    names: tuple[str, str]
    addresses: tuple[str, str]

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` on a host; its process becomes that of `argv`."""
        return [_ip(), "netns", "exec", self.names[host], *argv]

    def environment(self, host: int) -> dict[str, str]:
        """The environment variables by which torch.distributed finds the link."""
        return {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE, "TP_SOCKET_IFNAME": INTERFACE}

    def popen(
        self, host: int, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start `argv` on a host, in a session of its own. `env` is added to this process's environment, and may
        override the variables of `environment`."""
        found = {**os.environ, **self.environment(host), **(env or {})}
        return subprocess.Popen(self.command(host, argv), env=found, start_new_session=True, **options)

    def run(self, host: int, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run `argv` on a host to its end. Raises `CalledProcessError` if it fails."""
        return subprocess.run(self.command(host, argv), check=True, capture_output=True, text=True, **options)

    def sent_bytes(self) -> tuple[int, int]:
        """The bytes that each host has sent over the link so far, including headers (0.2 % of a large message)."""
        return self._sent_bytes(0), self._sent_bytes(1)

    def _sent_bytes(self, host: int) -> int:
        shown = _run([_ip(), "-n", self.names[host], "-s", "-j", "link", "show", "dev", INTERFACE])
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])

    def cut(self) -> None:
        """Cut the link: nothing passes it, while connections stay open and silent on both sides."""
        for name in self.names:
            _run([_ip(), "-n", name, "link", "set", "dev", INTERFACE, "down"])

    def join(self) -> None:
        """Join the link again after `cut`."""
        for name in self.names:
            _run([_ip(), "-n", name, "link", "set", "dev", INTERFACE, "up"])

    def pids(self, host: int) -> list[int]:
        """The processes that run on a host."""
        return [int(line) for line in _run([_ip(), "netns", "pids", self.names[host]]).split()]

    def kill(self, host: int) -> None:
        """Kill all processes of a host at once. Raises `TimeoutError` if one does not end."""
        deadline_s = time.monotonic() + END_S
        while found := self.pids(host):
            for pid in found:
                _kill(pid)
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"processes {found} of {self.names[host]} do not end")
            time.sleep(0.02)


@contextmanager
def two_hosts(rate_bytes_s: float | None = None) -> Iterator[TwoHosts]:
    """Make two hosts for as long as the context lasts; then kill all their processes and remove them.

    `rate_bytes_s` is the link's rate in each direction (None: no limit). Raises `RuntimeError` with the reason of
    `why_not` if this machine cannot make hosts.
    """
    reason = why_not()
    if reason:
        raise RuntimeError(reason)
    number = next(_counter)
    names = (f"penstock-{os.getpid()}-{number}a", f"penstock-{os.getpid()}-{number}b")
    hosts = TwoHosts(names, ("10.199.0.1", "10.199.0.2"))
    try:
        _make(hosts, rate_bytes_s)
        yield hosts
    finally:
        _remove(hosts)


@functools.cache
def why_not() -> str:
    """The reason why this machine cannot make two hosts, found by trying; empty if it can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"network namespaces need the programs {' and '.join(missing)} (package iproute2)"
    hosts = TwoHosts((f"penstock-{os.getpid()}-ta", f"penstock-{os.getpid()}-tb"), ("10.199.0.1", "10.199.0.2"))
    try:
        _make(hosts, 1e9)
    except subprocess.CalledProcessError as error:
        return f"this machine allows no network namespaces: {' '.join(error.cmd)}: {error.stderr.strip()}"
    finally:
        _remove(hosts)
    return ""


def _make(hosts: TwoHosts, rate_bytes_s: float | None) -> None:
    first, second = hosts.names
    for name in hosts.names:
        _run([_ip(), "netns", "add", name])
    pair = ["link", "add", INTERFACE, "netns", first, "type", "veth", "peer", "name", INTERFACE, "netns", second]
    _run([_ip(), *pair])
    for name, address in zip(hosts.names, hosts.addresses):
        _run([_ip(), "-n", name, "addr", "add", f"{address}/{PREFIX_BITS}", "dev", INTERFACE])
        for device in ("lo", INTERFACE):
            _run([_ip(), "-n", name, "link", "set", "dev", device, "up"])
        if rate_bytes_s is not None:
            burst_bytes = max(LEAST_BURST_BYTES, int(rate_bytes_s * BURST_S))
            limits = ["rate", f"{int(8 * rate_bytes_s)}bit", "burst", f"{burst_bytes}b", "latency", f"{QUEUE_MS}ms"]
            _run([_tc(), "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *limits])


def _remove(hosts: TwoHosts) -> None:
    """Remove the namespaces that exist. Every step is tried, even if an earlier one failed."""
    steps: list[Callable[[], object]] = []
    for host, name in enumerate(hosts.names):
        if Path("/var/run/netns", name).exists():
            steps.append(functools.partial(hosts.kill, host))
            steps.append(functools.partial(_run, [_ip(), "netns", "delete", name]))
    failures: list[Exception] = []
    for step in steps:
        try:
            step()
        except (subprocess.CalledProcessError, TimeoutError) as error:
            failures.append(error)
    if failures:
        raise failures[0]


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # gone already


def _run(argv: Sequence[str]) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=30).stdout


def _ip() -> str:
    return shutil.which("ip") or "/sbin/ip"


def _tc() -> str:
    return shutil.which("tc") or "/sbin/tc"
