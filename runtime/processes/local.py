"""Local workers: one process per device on this machine, started, fed, watched and stopped by the script's process.

When one worker fails or vanishes, all are stopped at once and the error says which device, line and micro-batch failed.
Each worker has a session of its own, so that Ctrl-C reaches only this process, which then stops the workers. If this
process is killed, the workers see their channels close and end by themselves, and the keeper removes their files.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from torch import Tensor

from ...ir.errors import PenstockError, PlanError, WorkerError, error_from_data, error_to_data
from ...ir.machine.hardware import Hardware
from ...ir.program import Interface, Program
from .. import scratch
from ..accelerator import queues
from ..children import import_environment
from ..device.pacing import Paces
from ..device.peers import LOOPBACK
from ..device.session import StepResult
from ..emulate.link_server import LinkServer
from ..emulate.throttle import shared_transfers
from ..forks import fork
from ..scratch import Scratch
from ..simulate import simulate
from ..state.tensor_file import Reads
from ..turns import TurnServer
from .commands import COMMANDS, Answer, Tensors
from .driver import Driver, InProcessDriver, merge_results, result_of
from .local_worker import Worker
from .setup import RunSetup
from .torchrun import TorchrunDriver
from .watch import RUNS, SET_UP, Lost, WorkerWatch, meeting_lines
from .wire import LOOK_S, WANTED, Packed, pack, receive_message, send
from .worker import open_board

GRACE_S = 1.0  # how long to wait for the culprit's report when several workers fail
CLOSE_S = 5.0
NEVER_S = 1e7  # the timeout of connections between workers: this process judges who is lost


def start_driver(setup: RunSetup, refused: PenstockError | None = None) -> Driver:
    """Start the driver that fits: this rank of a torchrun, the only device in this process, or local workers, also for
    one device whose streams share a throttled link. `refused` is the error why this process cannot run its part; it is
    raised, under torchrun on all ranks.

    Raises `PlanError` if the plan has several hosts and this is no torchrun, or a torchrun of another size.
    """
    if refused is not None and not TorchrunDriver.is_present():
        raise refused
    if TorchrunDriver.is_present():
        return TorchrunDriver(setup, refused)
    if setup.interface.world_size == 1 and not setup.shared_transfers:  # an SSD reads and writes in turns
        return InProcessDriver(setup)
    return LocalWorkers(setup)


def runs_in_script(programs: Sequence[Program], hardware: Hardware, precision: str) -> bool:
    """Whether `start_driver` would run the devices of these programs in the script's own process."""
    if TorchrunDriver.is_present():
        return True
    steps = [{"step": program} for program in programs]
    return programs[0].interface.world_size == 1 and not shared_transfers(steps, hardware, precision)


class LocalWorkers(Driver):
    """Starts one worker per device on this host. Raises `WorkerError` if a worker does not start, `PlanError` for GPUs
    of several hosts. Several hosts of CPU devices are emulated here, with the network throttled if the document is."""

    several_hosts = False  # whether devices of several hosts may run here even if they are GPUs

    def __init__(self, setup: RunSetup):
        super().__init__(setup)
        devices = setup.hardware.devices[: setup.interface.world_size]
        hosts = {device.host for device in devices}
        if len(hosts) > 1 and not self.several_hosts and any(device.kind != "cpu" for device in devices):
            raise PlanError(
                f"the plan is for {len(hosts)} hosts: start the script with torchrun --nnodes={len(hosts)}, one "
                "process per device"
            )
        self._folder = scratch.temporary("workers")
        self.scratch = str(self._folder.path)
        self._source: Mapping[str, Tensor] = {}  # of the call under way, for what its workers ask for by name
        self._wanted: dict[int, str] = {}
        self._unread: PenstockError | None = None
        self.workers: list[Worker] = []
        self._watch = WorkerWatch(self.workers, meeting_lines(setup), self._patience_s())
        self.link_server: LinkServer | None = None
        self._servers: list[LinkServer | TurnServer] = []
        self._stop = weakref.finalize(
            self, _stop_all, os.getpid(), self.workers, self._servers, self._folder, setup.all_ssd_dirs
        )
        try:
            for device in range(setup.interface.world_size):
                self.workers.append(self._start(device))
            self.link_server = self._serve_links()
            self._servers += [] if self.link_server is None else [self.link_server]
            self.turns = self._serve_turns()
            self._servers += [] if self.turns is None else [self.turns]
            requests: dict[int, tuple[str, Mapping[str, Any], Tensors]]
            requests = {w.device: (SET_UP, self._for_device(w.device), {}) for w in self.workers}
            answers = self._exchange(requests)
        except BaseException:
            self._abandon()
            raise
        self._names = {device: header["batch_names"] for device, (header, _) in answers.items()}

    @property
    def process_ids(self) -> list[int]:
        return [worker.process.pid for worker in self.workers]

    def _start(self, device: int) -> Worker:
        ours, theirs = socket.socketpair()
        reports, their_reports = socket.socketpair()
        board_path, log = Path(self.scratch, f"board{device}"), Path(self.scratch, f"worker{device}.log")
        board = open_board(board_path, create=True)
        with open(log, "wb") as output:
            process = fork(
                f"{__package__}.worker",
                [str(board_path)],
                [theirs.fileno(), their_reports.fileno(), self.keeper.handle],
                output.fileno(),
                worker_environment(self.setup.num_threads(device)),
            )
        theirs.close()
        their_reports.close()
        name = self.setup.hardware.devices[device].name
        return Worker(device, name, process, ours, board, Path(self.setup.file_of(device)), log, reports)

    def _for_device(self, device: int) -> dict[str, Any]:
        """The arguments of a worker's first command, `set_up`."""
        own = self.setup.for_device(device)
        share = replace(own.share, hostname=LOOPBACK)
        setup = replace(own, share=share, paces=self._paces(device), timeout_s=NEVER_S)
        paths = {name: os.path.join(self.scratch, name) for name in ("store", "bad_step")}
        return {**paths, "setup": setup.to_json()}

    def _paces(self, device: int) -> Paces:
        hardware, found = self.setup.hardware, self.setup.shared_transfers
        return Paces(
            link_server=None if self.link_server is None else self.link_server.address,
            turns=None if self.turns is None else self.turns.address,
            shared=found.numbers[device] if hardware.throttled else {},
            collective_s=found.collective_s[device] if hardware.throttled else {},
        )

    def _serve_links(self) -> LinkServer | None:
        """The server that divides links among transfers; None unless throttled transfers share links."""
        shared = self.setup.shared_transfers
        if not shared:
            return None
        return LinkServer(os.path.join(self.scratch, "links"), self.setup.hardware.links(), shared.costs)

    def _serve_turns(self) -> TurnServer | None:
        """The server that gives fetches their turns; None if they have none, or the link server keeps them."""
        kept = not self.setup.takes_turns or self.link_server is not None
        return None if kept else TurnServer(os.path.join(self.scratch, "turns"))

    def _patience_s(self) -> float:
        """The time after which a silent worker counts as stalled. On throttled links an op lasts as long as the
        document says."""
        hardware = self.setup.hardware
        if not hardware.throttled:
            return self.setup.timeout_s
        programs = [programs["step"] for programs in self.setup.programs]
        return self.setup.timeout_s + simulate(programs, hardware, precision=self.setup.precision).step_s

    # --- commands

    def take_form(self, number: int, files: RunSetup, room: Interface) -> list[dict[str, Any]]:
        answers = super().take_form(number, files, room)
        self._names = {device: answer["batch_names"] for device, answer in enumerate(answers)}
        return answers

    def call(
        self, command: str, device: int, args: Mapping[str, Any] | None = None, tensors: Tensors | None = None
    ) -> Answer:
        self._require_open()
        if command in ("begin_checkpoint", "commit_checkpoint"):  # need no device, and a lock belongs to one process
            no_session: Any = None
            return COMMANDS[command](no_session, args or {}, tensors or {})
        return self._exchange({device: (command, args or {}, tensors or {})})[device]

    def call_all(self, command: str, requests: Mapping[int, tuple[Mapping[str, Any], Tensors]]) -> list[dict[str, Any]]:
        self._require_open()
        answers = self._exchange({device: (command, *request) for device, request in requests.items()})
        return [answers[device][0] for device in requests]

    def call_holders(
        self, command: str, devices: Sequence[int], args: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> None:
        self.call_all(command, {device: (args, tensors) for device in devices})

    def end_loading(self) -> None:
        super().end_loading()
        self.call_all("end_loading", {worker.device: ({}, {}) for worker in self.workers})

    def await_saved(self, number: int) -> list[dict[str, Any]]:
        return [self._receive_save(worker, number) for worker in self.workers]

    def _receive_save(self, worker: Worker, number: int) -> dict[str, Any]:
        while True:
            try:
                answer, _ = receive_message(worker.reports)
            except (EOFError, OSError):
                raise WorkerError(f"device {worker.device} ({worker.name}): its worker is gone") from None
            if answer["number"] == number:
                return answer

    def _run_all(self, command: str, batch: Mapping[str, Tensor], args: Mapping[str, Any]) -> list[StepResult]:
        requests: dict[int, tuple[str, Mapping[str, Any], Tensors]] = {}
        for device, names in self._names.items():
            requests[device] = command, args, self.part({name: batch[name] for name in names}, device)
        answers = self._exchange(requests)
        return [result_of(answers[worker.device]) for worker in self.workers]

    def finish_step(self) -> dict[str, Any]:
        self._require_open()
        answers = self._exchange({worker.device: ("finish_step", {}, {}) for worker in self.workers})
        return merge_results([result_of(answers[worker.device]) for worker in self.workers], self.setup.hardware).report

    def _exchange(self, requests: Mapping[int, tuple[str, Mapping[str, Any], Tensors]]) -> dict[int, Answer]:
        """Send each device its command and wait for all answers; if a run fails anywhere, stop all workers."""
        command = next(iter(requests.values()))[0]
        messages = {device: pack({**args, "command": name}, found) for device, (name, args, found) in requests.items()}
        tensors = next(iter(requests.values()))[2]  # the same for all devices, where they are read later
        self._wanted, self._unread, self._source = {}, None, tensors if isinstance(tensors, Reads) else {}
        try:
            return self._answers(command, messages)
        except Lost as lost:
            raise self._stopped_by({lost.device: {}}, lost.what) from None
        except PenstockError:
            raise
        except BaseException:
            self._abandon()
            raise

    def _answers(self, command: str, messages: Mapping[int, Packed]) -> dict[int, Answer]:
        waiting = {device: self.workers[device] for device in messages}
        answers: dict[int, Answer] = {}
        failures: dict[int, dict[str, Any]] = {}
        self._watch.begin(command)
        for device, message in messages.items():
            try:
                send(self.workers[device].channel, message, self._watch.idle(device))
            except OSError:
                failures[device] = {}  # the worker is gone; `_error_of` finds out why
        while waiting and not failures:
            self._collect(waiting, answers, failures)
        if failures and all(failures.values()) and command not in (*RUNS, SET_UP):
            while waiting:
                self._collect(waiting, answers, failures)
            raise self._unread or self._error_of(*next(iter(failures.items())))
        if failures:
            self._find_culprit(waiting, answers, failures)
            raise self._stopped_by(failures)
        return answers

    def _collect(
        self,
        waiting: dict[int, Worker],
        answers: dict[int, Answer],
        failures: dict[int, dict[str, Any]],
        timeout_s: float = LOOK_S,
    ) -> None:
        """Receive what has arrived: answers, and errors as `failures` (empty for a process that is gone). Raises `Lost`
        if waiting longer is in vain."""
        if waiting.keys() == self._wanted.keys():
            self._send_tensors()
        channels = {worker.channel: device for device, worker in waiting.items() if device not in self._wanted}
        ready = wait(channels, timeout_s)
        if not ready:
            self._watch.look(waiting)
        for channel in ready:
            device = channels[channel]  # type: ignore[index]
            try:
                header, tensors = receive_message(self.workers[device].channel, self._watch.idle(device))
            except EOFError:
                failures[device] = {}
                del waiting[device]
                continue
            if WANTED in header:
                self._wanted[device] = header[WANTED]
                continue
            del waiting[device]
            if "error" in header:
                failures[device] = header
            else:
                answers[device] = header, tensors

    def _send_tensors(self) -> None:
        """Send the workers the tensors that they wait for: together, so that each is read once."""
        for name in sorted(set(self._wanted.values())):
            try:
                message = pack({}, {name: self._source[name]})
            except PenstockError as error:
                self._unread, message = error, pack({"error": error_to_data(error)})
            for device in [device for device, wanted in self._wanted.items() if wanted == name]:
                with contextlib.suppress(OSError):  # the worker is gone, as its channel will say
                    send(self.workers[device].channel, message, self._watch.idle(device))
        self._wanted = {}

    # --- failure

    def _find_culprit(
        self, waiting: dict[int, Worker], answers: dict[int, Answer], failures: dict[int, dict[str, Any]]
    ) -> None:
        """Wait up to `GRACE_S` for the device that failed, as one that only lost its peer may report first."""
        deadline = time.monotonic() + GRACE_S
        while waiting and all(f and f["waited"] for f in failures.values()) and time.monotonic() < deadline:
            self._collect(waiting, answers, failures, 0.05)

    def _stopped_by(self, failures: dict[int, dict[str, Any]], what: str = "") -> PenstockError:
        """Stop all workers and return the error of the likeliest culprit: a worker that is gone, else one that failed
        by itself, else one that waited. For `what` see `_error_of`."""
        device = min(failures, key=lambda d: (bool(failures[d]), bool(failures[d]) and failures[d]["waited"]))
        worker = self.workers[device]
        if not failures[device] and not what:
            worker.process.wait(GRACE_S)
        error = self._error_of(device, failures[device], what)
        self._abandon()
        return error

    def _error_of(self, device: int, failure: dict[str, Any], what: str = "") -> PenstockError:
        """The error of a device from its own report, else of a process that is gone, or of which `what` is known."""
        worker = self.workers[device]
        if failure:
            return error_from_data(failure["error"], f"device {device} ({worker.name})", device)
        where, line = worker.position()
        tail = worker.log_tail()
        message = (
            f"device {device} ({worker.name}): its worker, process {worker.process.pid}, "
            f"{what or worker.end_text()}; it was at {where}. All workers have been stopped."
        )
        message += f"\nIts last output:\n{tail}" if tail else ""
        return WorkerError(message, device=device, line=line, remote=tail)

    def _abandon(self) -> None:
        self.closed = True
        self._stop()
        self.keeper.close()

    @staticmethod
    def _no_room(left_bytes: int) -> None:
        raise BlockingIOError

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for worker in self.workers:
            try:
                send(worker.channel, pack({"command": "close"}), self._no_room)
            except OSError:
                continue  # the worker is gone already, or stopped in the middle of a message
        deadline = time.monotonic() + CLOSE_S
        for worker in self.workers:
            worker.process.wait(max(0.0, deadline - time.monotonic()))
        self._abandon()


def worker_environment(num_threads: int) -> dict[str, str]:
    """This process's environment and import paths, settings that keep idle threads from spinning, and a hardware queue
    for every stream of a GPU (see `accelerator`)."""
    return {
        **import_environment(),
        **queues(),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
    }


def _stop_all(
    owner: int,
    workers: Iterable[Worker],
    servers: Iterable[LinkServer | TurnServer],
    folder: Scratch,
    ssd_dirs: Sequence[str],
) -> None:
    """Kill the workers, close the servers and remove the files of all of them. Also runs when the interpreter ends, but
    not in forks of this process."""
    if os.getpid() != owner:
        return
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.wait(CLOSE_S)  # one that the kernel cannot end now ends as soon as it can
        worker.channel.close()
        worker.reports.close()
    for server in servers:
        server.close()
    folder.remove()
    scratch.remove_left(ssd_dirs)
