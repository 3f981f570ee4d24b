"""Processes as forks of one that has done their imports, the fork server: `python -m penstock.runtime.forks`.

PyTorch and its optimizers take 4 CPU seconds and 220 MiB to import; a fork takes 0.05 s and shares this memory. The
fork server computes nothing, opens no GPU and has one thread, so that its forks are as good as new processes. It serves
all jobs of a script, and ends when the script closes its channel and the last fork has ended, or when the script ends.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

from ..ir.errors import WorkerError
from .children import start_module

PARENT_CHECK_S = 1.0
LOST = 255  # the exit code of a fork whose server is gone, which alone knew it
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # a fork sets its own number
NO_MATTER = {*ONE_THREAD, "PYTEST_CURRENT_TEST", "PWD", "OLDPWD", "SHLVL", "_"}  # no import depends on these
LIMITS = [value for name, value in vars(resource).items() if name.startswith("RLIMIT_")]
TAIL_BYTES = 4000
_CODE = struct.Struct("=i")
_MAX_DESCRIPTORS = 16
_lock = threading.Lock()
_servers: list[ForkServer] = []  # those with forks; only the last gets requests


def fork(
    module: str, arguments: Sequence[str], descriptors: Sequence[int], output: int, environment: Mapping[str, str]
) -> Fork:
    """Call `main(descriptors, arguments)` of a module in a process with a session and an environment of its own, its
    own numbers of these open files, and standard output and errors to `output`. The module's `prepare` has been called
    before the fork. Raises `OSError` where the process cannot be started, `WorkerError` where the imports fail."""
    with _lock:
        server = _server(module, environment)
        return server.fork({"arguments": list(arguments), "environment": dict(environment)}, [*descriptors, output])


def _server(module: str, environment: Mapping[str, str]) -> ForkServer:
    key = module, _inheritance(environment)
    _servers[:] = [server for server in _servers if server.is_running()]
    if not _servers or _servers[-1].closed or _servers[-1].key != key:
        for server in _servers:
            server.close()
        _servers.append(ForkServer(module, environment, key))
    return _servers[-1]


def _inheritance(environment: Mapping[str, str]) -> tuple[Any, ...]:
    """The inheritance of a new process from this one. A fork has that of the time when the fork server started."""
    variables = {name: value for name, value in environment.items() if name not in NO_MATTER}
    umask = re.findall(r"Umask:\s*(\w+)", Path("/proc/self/status").read_text())
    folder, groups = os.readlink("/proc/self/cwd"), Path("/proc/self/cgroup").read_text()
    limits = [resource.getrlimit(limit) for limit in LIMITS]
    priority, cores = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)
    return os.getpid(), variables, umask, folder, groups, limits, priority, cores


class Fork:
    """A process as the one that asked for it sees it. `status` is where its exit code will be."""

    def __init__(self, pid: int, status: int):
        self.pid = pid
        self._status = status
        self._code: int | None = None

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, or the number of the signal that ended the process, negative; None if it runs longer."""
        if self._code is None and wait([self._status], timeout_s):
            data = os.read(self._status, _CODE.size)
            self._code = _CODE.unpack(data)[0] if data else LOST
            os.close(self._status)
        return self._code

    def poll(self) -> int | None:
        return self.wait(0)

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """The fork server as the script sees it. `key` is what it was started with."""

    def __init__(self, module: str, environment: Mapping[str, str], key: object):
        self.key, self.closed = key, False
        self._channel, theirs = socket.socketpair()
        self._stream = self._channel.makefile("rwb")
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        with theirs:
            self._process = start_module(
                __name__,
                [module, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,
                environment={**environment, **ONE_THREAD},
            )

    def is_running(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End it as soon as its forks have ended."""
        self.closed = True
        with contextlib.suppress(OSError):  # of what could not be sent
            self._stream.close()
        self._channel.close()

    def fork(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> Fork:
        reading, writing = os.pipe()
        try:
            answer = self._ask(request, [*descriptors, writing])
        except BaseException:
            os.close(reading)
            self.close()
            raise
        finally:
            os.close(writing)
        return Fork(answer, reading)

    def _ask(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        line = b""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._channel, [b"+"], descriptors)
            self._stream.write(json.dumps(request).encode() + b"\n")
            self._stream.flush()
            line = self._stream.readline()
        if not line:
            code = self._process.wait()
            self._output.seek(0)
            tail = self._output.read()[-TAIL_BYTES:].decode(errors="replace")
            raise WorkerError(f"no worker started: the imports ended with exit code {code}:\n{tail}", remote=tail)
        answer = json.loads(line)
        if "errno" in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]))
        return int(answer["pid"])


# --- the process itself


class _Server:
    """Serves requests. `statuses` has, for each fork that runs, the file for its exit code."""

    def __init__(self, module: str, channel: socket.socket, parent: int):
        self.parent, self.statuses = parent, dict[int, int]()
        self.module = import_module(module)
        self.module.prepare()
        gc.collect()
        gc.freeze()  # no collection in a fork writes to the shared memory
        self.channel, self.stream = channel, channel.makefile("rwb")
        self.ended, self.wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake)

    def run(self) -> None:
        asked: list[Any] = [self.channel]
        while (asked or self.statuses) and os.getppid() == self.parent:
            ready = wait([self.ended, *asked], PARENT_CHECK_S)
            if self.ended in ready:
                os.read(self.ended, 1 << 16)
            self._report()
            if self.channel in ready and not self._serve():
                asked = []

    def _report(self) -> None:
        """Tell the exit codes of the forks that have ended. Until then their process ids belong to nobody else."""
        while self.statuses:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None:
                return
            status = self.statuses.pop(found.si_pid)
            code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            with contextlib.suppress(BrokenPipeError):  # nobody asks any more
                os.write(status, _CODE.pack(code))
            os.close(status)
            os.waitpid(found.si_pid, 0)

    def _serve(self) -> bool:
        """Serve one request. False at the end of the channel."""
        begin, descriptors, _, _ = socket.recv_fds(self.channel, 1, _MAX_DESCRIPTORS)
        line = self.stream.readline() if begin else b""
        if not line:
            return False
        request = json.loads(line)
        try:
            pid = os.fork()
        except OSError as error:
            answer = {"errno": error.errno}
            os.close(descriptors.pop())
        else:
            if pid == 0:
                self._become(request, descriptors)
            answer = {"pid": pid}
            self.statuses[pid] = descriptors.pop()
        for descriptor in descriptors:
            os.close(descriptor)
        self.stream.write(json.dumps(answer).encode() + b"\n")
        self.stream.flush()
        return True

    def _become(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> NoReturn:
        """In the fork: close what is the server's, and call the module."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            *own, output, status = descriptors
            for descriptor in (self.ended, self.wake, self.channel.detach(), status, *self.statuses.values()):
                os.close(descriptor)
            os.setsid()
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            os.environ.clear()
            os.environ.update(request["environment"])
            self.module.main(own, request["arguments"])
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        _Server(sys.argv[1], socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])).run()
    os._exit(0)
