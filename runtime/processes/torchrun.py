"""One rank of a torchrun: this process runs one device of the plan, and the other ranks run the same script.

All ranks make the same calls in the same order. Before anything runs they check that they have the same plan and files
(`agreement`). They exchange scalars through the rendezvous store, so that every rank sees the loss, and leave each
step's report there (`tail`). A rank that fails tells the others (`ranks`), so that all end with the same error at once,
not after a timeout.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...ir.errors import BatchError, PenstockError, PlanError, WorkerError, error_from_data, error_to_data
from ...ir.program import Program, place_of
from .. import scratch
from ..accelerator import gpu_of_rank, take_queues
from ..bad_step import BadStep
from ..device.named_streams import STREAM_SLOTS, describe_position
from ..device.pacing import Paces
from ..device.peers import INTERFACE_SETTING
from ..device.session import DeviceSession, StepResult
from ..simulate import Span
from ..turns import TurnServer
from .agreement import agree
from .commands import COMMANDS, Answer, Tensors
from .driver import DifferentCalls, Driver, merge_results
from .interrupt import RankInterrupt
from .ranks import Ranks, Told
from .rows import Failure
from .setup import RunSetup
from .store_thread import Waited, connect_store
from .tail import Tail
from .worker import build_session

# The call of a script that leads to each command.
CALLS = {name: "save" for name in ("begin_checkpoint", "write_shard", "commit_checkpoint", "abort_checkpoint")}
CALLS |= {"read_shard": "resume", "load_counters": "resume", "counters": "save"}
CALLS |= {"stage_state": "state_dict, save or weights that were changed"}
CALLS |= {"need_of_save": "save", "begin_save": "save"}
STUCK_S = 20.0  # how long after another rank's failure this process ends itself if it is still blocked


class TorchrunDriver(Driver):
    """Runs the device of this rank. `refused` is the error why this rank cannot run it; all ranks raise it.

    Raises `PlanError` if the number of ranks is not that of the plan's devices or the ranks do not agree (see
    `agreement`), `WorkerError` if they do not all arrive within `setup.timeout_s`.
    """

    def __init__(self, setup: RunSetup, refused: PenstockError | None = None):
        super().__init__(setup)
        self.rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        devices = setup.interface.world_size
        if world != devices:
            raise PlanError(
                f"torchrun has started {world} processes, the plan has {devices} devices; use --nproc-per-node so that "
                f"there are {devices} in all"
            )
        self._session: DeviceSession | None = None
        self._tail: Tail | None = None
        self._turn_server: TurnServer | None = None
        self._folder: scratch.Scratch | None = None  # of its address
        self._told: Exception | None = None  # the last error of this rank that the others know
        self._busy = self._failing = self._stops = self._save_failed = False
        self._stuck: threading.Timer | None = None
        self._clock = time.pthread_getcpuclockid(threading.get_ident())  # of the thread that runs the device
        self.ranks = Ranks(
            connect_store(setup.timeout_s),
            self.rank,
            world,
            setup.timeout_s,
            node=os.environ.get("GROUP_RANK", ""),
            beat=self._place,
            describe=self._describe_place,
            alarm=self._hear,
        )
        self._signal_before = _take_sigterm(self._on_sigterm)
        self._interrupt = RankInterrupt()
        atexit.register(self._leave)
        try:
            with self._together():
                reasons = self.ranks.exchange(None if refused is None else error_to_data(refused))
            self._raise_first(reasons)
            agree(self.ranks, setup)
            self._set_up()
        except BaseException:
            self.close()
            raise

    def _set_up(self) -> None:
        """Build the session of this rank's device, connected to all others; an error of any rank stops all of them."""
        hostname = None if INTERFACE_SETTING in os.environ else self.ranks.hostname
        failure: dict[str, Any] | None = None
        paces = Paces(turns=self._turns())
        with self._together():
            try:
                own = self.setup.for_device(self.rank)
                share = replace(own.share, hostname=hostname)
                if own.spec.kind == "cuda":
                    take_queues()
                    share = replace(share, gpu=gpu_of_rank(int(os.environ.get("LOCAL_RANK", "0"))))
                with self._watch():
                    setup = replace(own, share=share, paces=paces)
                    self._session = build_session(setup, self.ranks.store, bad_step=self._bad_step())
                self._session.shares_generators = own.spec.kind == "cpu"
                self._session.saver.tell = self._tell_saved
                self._tail = Tail(self._session, self.ranks, self._fail_between)
            except Exception as error:
                failure = error_to_data(error)
            rows = self.ranks.exchange(failure)
            self._bad_path.unlink(missing_ok=True)  # all have opened it
        self._raise_first(rows)

    def _bad_step(self) -> BadStep:
        """Ranks of several hosts ask the store once a step or more often; those of one share memory."""
        if len({member.node for member in self.ranks.members}) > 1:
            return BadStep(self.ranks.tell_step, self.ranks.told_steps)
        return BadStep.open(self._bad_path, self.rank, len(self.ranks.members))

    @property
    def _bad_path(self) -> Path:
        return Path(tempfile.gettempdir(), f"penstock-{self.ranks.run}-bad-step")

    def _turns(self) -> str | None:
        """The address of the server that gives fetches on this rank's host their turns, in its first rank; None if the
        plan's fetches have none."""
        if not self.setup.takes_turns:
            return None
        members = self.ranks.members
        first = next(other.rank for other in members if other.node == members[self.rank].node)
        with self._together():
            if first == self.rank:
                self._folder = scratch.temporary("turns")
                self._turn_server = TurnServer(str(self._folder.path / "turns"))
            rows = self.ranks.exchange(None if self._turn_server is None else self._turn_server.address)
        return str(rows[first])

    def _tell_saved(self, number: int, answer: dict[str, Any]) -> None:
        with contextlib.suppress(RuntimeError, WorkerError):  # without the store nobody publishes the save
            self.ranks.put(f"saved/{number}", answer)

    def _raise_first(self, failures: list[dict[str, Any] | None]) -> None:
        """Raise the first failure that is not about a connection, else the first: connecting fails if another rank
        failed."""
        wrong = [(rank, row) for rank, row in enumerate(failures) if row is not None]
        if wrong:
            rank, row = min(wrong, key=lambda each: each[1]["type"] in ("RuntimeError", "DistStoreError"))
            raise self._error_of(rank, row, f"{self.ranks.members[rank]}: ")

    @property
    def session(self) -> DeviceSession:
        assert self._session is not None
        return self._session

    @property
    def tail(self) -> Tail:
        assert self._tail is not None
        return self._tail

    @property
    def save_failed(self) -> bool:
        return self._save_failed

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @staticmethod
    def is_present() -> bool:
        """Whether this process is one of several that torchrun started."""
        return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ

    def call(
        self, command: str, device: int, args: Mapping[str, Any] | None = None, tensors: Tensors | None = None
    ) -> Answer:
        """As `Driver.call`, but all ranks must call it, and all get the answer."""
        self._require_open()
        mine: dict[str, Any] = {}
        found: Tensors = {}
        if device == self.rank:
            try:
                mine, found = COMMANDS[command](self.session, args or {}, tensors or {})
            except Exception as error:
                mine = {"error": error_to_data(error)}
            mine = {**mine, "tensors": _rows_of(found)}
        header = self._exchange(CALLS.get(command, command), mine)[device]
        with self._together():
            if "error" not in header:
                return header, self._spread(found, header.pop("tensors"), device)
        raise self._error_of(device, header["error"], f"{self.ranks.members[device]}: ")

    def call_all(self, command: str, requests: Mapping[int, tuple[Mapping[str, Any], Tensors]]) -> list[dict[str, Any]]:
        """As `Driver.call_all`, but all ranks must call it; each runs its own part."""
        self._require_open()
        try:
            mine, _ = COMMANDS[command](self.session, *requests[self.rank])
        except Exception as error:
            mine = {"error": error_to_data(error)}
        answers: list[dict[str, Any]] = self._exchange(CALLS.get(command, command), mine)
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise self._error_of(rank, answer["error"], f"{self.ranks.members[rank]}: ")
        return answers

    def await_saved(self, number: int) -> list[dict[str, Any]]:
        """As `Driver.await_saved`; only the first rank waits for the others."""
        return self.ranks.await_rows(f"saved/{number}", range(self.ranks.size)) if self.is_main else []

    def publish(self, number: int, finish: Callable[[], str]) -> str:
        name = f"published/{number}"
        if not self.is_main:
            (row,) = self.ranks.await_rows(name, [0])
            if "error" in row:
                raise self._error_of(0, row["error"])
            return str(row["path"])
        try:
            path = finish()
        except Exception as error:
            self.ranks.put(name, {"error": error_to_data(error)})
            raise
        self.ranks.put(name, {"path": path})
        return path

    def _spread(self, own: Tensors, rows: list[Any], source: int) -> dict[str, Tensor]:
        """Broadcast the tensors of rank `source`: it gives them as `own`, the others receive what `rows` describes."""
        link = self.session.link
        found: dict[str, Tensor] = {}
        assert link is not None
        for name, dtype, shape in rows:
            if source == self.rank:
                value = own[name].detach().cpu().contiguous()
            else:
                value = torch.empty(shape, dtype=getattr(torch, dtype))
            try:
                link.broadcast(value.view(-1).view(torch.uint8), source)
            except RuntimeError as error:
                raise Waited(f"rank {self.rank}: {name} has not come from rank {source}: {error}") from error
            found[name] = value
        return found

    def agree_on_batch(self, what: str, kind: str, refused: PenstockError | None, counts: Any = None) -> list[Any]:
        mine = {"kind": kind, "refused": None if refused is None else str(refused), "counts": counts}
        rows = self._exchange(what, mine)
        said = [f"rank {rank}: {row['refused']}" for rank, row in enumerate(rows) if row["refused"]]
        kinds = {row["kind"]: f"rank {rank} was given {row['kind']}" for rank, row in enumerate(rows) if row["kind"]}
        if not said and len(kinds) > 1:
            said = ["; ".join(kinds.values())]
        if said:
            more = f" ({len(said) - 1} more ranks have such a batch)" if len(said) > 1 else ""
            raise BatchError(f"{said[0]}{more}. No rank has run `{what}`") from refused
        return [row["counts"] for row in rows]

    def gather(self, value: Any) -> list[Any]:
        """As `Driver.gather`, but all ranks must call it."""
        self._require_open()
        return self._exchange("gather", value)

    def _exchange(self, what: str, mine: Any) -> list[Any]:
        """The data that every rank passes to the same call. Raises `DifferentCalls` on all ranks if their calls
        differ: then the data of one rank ended before that of the others."""
        with self._together():
            rows = self.ranks.exchange({"what": what, "given": mine})
        calls: dict[str, list[int]] = {}
        for rank, row in enumerate(rows):
            calls.setdefault(row.get("what", "step"), []).append(rank)
        if len(calls) > 1:
            where = ", ".join(f"`{call}` on rank {', '.join(map(str, who))}" for call, who in calls.items())
            raise DifferentCalls(
                f"the ranks make different calls: {where}. All make the same in the same order, also equally many "
                "steps; where the data of one rank ends earlier, cut the others' (job.sampler gives all ranks the same "
                "number of batches)"
            )
        return [row["given"] for row in rows]

    def _own_programs(self) -> list[dict[str, Program]]:
        return [self.setup.programs_of(self.rank)]

    def _check(self, function: str, batch: Mapping[str, Tensor]) -> None:
        interface = self.setup.interface
        own = interface.micro_batches_of(place_of(interface, self.rank)[0])
        whole = any(len(value) > own * interface.batch[name].shape[0] for name, value in batch.items())
        interface.check_batch(batch, self.inputs[function], interface.total_micro_batches if whole else own)

    def _run_all(self, command: str, batch: Mapping[str, Tensor], args: Mapping[str, Any]) -> list[StepResult]:
        """The results of every rank: of other ranks' steps only the scalars, of an evaluation everything."""
        stepping = command == "begin_step"
        part = self.part(batch, self.rank)
        part = self._own(part) if stepping else part
        with self._together():
            with self._watch():
                own = self.tail.begin(part, args["stop_on_nan"]) if stepping else self.session.evaluate(part, **args)
            flat = {f"{name} {i}": value for name, values in own.values.items() for i, value in enumerate(values)}
            scalars = {key: float(value) for key, value in flat.items() if value.dim() == 0}
            tensors = {} if stepping else {key: v for key, v in flat.items() if key not in scalars}
            mine = {"scalars": scalars, "tensors": _rows_of(tensors), "names": list(flat), "report": own.report}
            refusal = None if own.refusal is None else error_to_data(own.refusal)
            rows = self.ranks.exchange(
                {
                    **mine,
                    "refusal": refusal,
                    "interrupted": self._interrupt.is_noted,
                    "save_failed": self.save_failed_here,
                }
            )
            self._stops = any(row["interrupted"] for row in rows)
            self._save_failed = any(row["save_failed"] for row in rows)
            results = []
            for rank, other in enumerate(rows):
                given = {key: torch.tensor(number) for key, number in other["scalars"].items()}
                given |= self._spread(tensors, other["tensors"], rank)
                values: dict[str, list[Tensor]] = {}
                for key in other["names"]:
                    if key in given:
                        values.setdefault(key.rpartition(" ")[0], []).append(given[key])
                told = other["refusal"] and self._error_of(rank, other["refusal"])
                results.append(own if rank == self.rank else StepResult(values, other["report"], told))
        return results

    def finish_step(self) -> dict[str, Any]:
        """As `Driver.finish_step`; one rank may call it alone, as each rank's report comes when its device is done."""
        self._require_open()
        with self._together(alone=True):
            with self._watch():
                self.tail.finish()
            reports = self.tail.reports()
        return merge_results([StepResult({}, report) for report in reports], self.setup.hardware).report

    def _watch(self) -> AbstractContextManager[None]:
        """For messages that no timeout ends: gloo's have one, NCCL's none."""
        on_gpu = self.setup.hardware.devices[self.rank].kind == "cuda"
        return self.ranks.watch() if on_gpu else nullcontext()

    def stop_if_interrupted(self) -> None:
        if self._stops:
            self._interrupt.stop()

    def _spans(self) -> list[Span]:
        """The spans of all ranks, moved to rank 0's clock by the offset that the first rank of each host measured."""
        own = [[s.device, s.stream, s.op, s.text, s.start_s, s.end_s] for s in self.session.spans]
        with self._together():
            rows = self.ranks.exchange(own)
        found = []
        for spans, member in zip(rows, self.ranks.members, strict=True):
            of_host = next(other for other in self.ranks.members if other.node == member.node)
            ahead_s = of_host.clock_s - self.ranks.members[0].clock_s
            for device, stream, op, text, start_s, end_s in spans:
                found.append(Span(device, stream, op, text, start_s + ahead_s, end_s + ahead_s))
        return found

    # --- failures

    @contextmanager
    def _together(self, alone: bool = False) -> Iterator[None]:
        """Wraps what all ranks do at the same time: if one fails, all raise its error. `alone`: one may do it alone,
        also after another one has left."""
        self._busy = True
        try:
            if not alone:
                self.ranks.check()
            yield
        except Exception as error:
            self._fail(error)
        except KeyboardInterrupt:
            self._failing = True
            stopped = WorkerError(f"{self._own_name} was interrupted. All ranks stop.")
            self.ranks.report(Failure(self.rank, error_to_data(stopped)))
            raise
        finally:
            self._busy = False
            if self._stuck is not None:
                self._stuck.cancel()

    def _fail(self, error: Exception) -> NoReturn:
        """Raise the error of the rank that is to blame, and report it if this rank failed or found the cause."""
        self._failing = True
        atexit.register(_end_at_once)
        if isinstance(error, Told):
            raise self._error_of(error.failure.rank, error.failure.error) from None
        told = error_to_data(error)
        cause = self._tell(error, told)
        if cause.error is told:
            raise error
        found = self._error_of(cause.rank, cause.error)
        if isinstance(found, WorkerError):
            found.remote = found.remote or told["traceback"]  # the traceback of this rank's own error
        raise found from None

    def _tell(self, error: Exception, told: dict[str, Any]) -> Failure:
        """Find out what this rank's `error` comes from; report it if this rank failed, or found the cause."""
        waited = isinstance(error, Waited) or (self._session is not None and self._session.waited)
        cause = self.ranks.cause(Failure(self.rank, told, waited=waited))
        if cause.rank == self.rank and error is not self._told:
            self._told = error
            self.ranks.report(cause)
        return cause

    def _fail_between(self, error: Exception) -> None:
        """The failure at the end of a step, in the tail's thread: this rank's next call raises it, other ranks now."""
        if not isinstance(error, Told):
            self._tell(error, error_to_data(error))

    def _hear(self, failure: Failure) -> None:
        """The listening thread calls this when another rank has failed, to interrupt a step that runs here."""
        if self._busy and self._session is not None:
            self._session.streams.interrupt(Told(failure))
        if self._busy:
            self._stuck = threading.Timer(STUCK_S, self._give_up, [failure])
            self._stuck.daemon = True
            self._stuck.start()

    def _give_up(self, failure: Failure) -> None:
        """End this process: something that cannot be interrupted blocks it, such as a kernel that waits for a GPU."""
        if self._busy and not self.closed:
            sys.stderr.write(f"{self._own_name} ends: {failure.error['message']}\n")
            sys.stderr.flush()
            os._exit(1)

    def _on_sigterm(self, number: int, frame: object) -> None:
        """Say which rank failed, as torchrun ends a rank with SIGTERM when another has failed."""
        if self._failing:
            return  # already on the way out, with a better reason
        signal.signal(number, signal.SIG_DFL)
        stopped = f"{self._own_name} was stopped (SIGTERM)"
        if self._busy:
            raise Waited(stopped)
        self._failing = True
        cause = self.ranks.cause(Failure(self.rank, error_to_data(WorkerError(stopped)), waited=True))
        sys.stderr.write(f"{stopped}: {cause.error['message']}\n")
        sys.stderr.flush()
        self.ranks.leave(cause.error["message"])
        os.kill(os.getpid(), number)

    def _end_steps(self) -> None:
        """Be there for the last step until all ranks are done with it: they need this one's part of it."""
        if self._tail is not None and self._tail.number and not self._failing:
            with contextlib.suppress(Exception):  # whoever wants to hear of it has called `finish_step`
                self.finish_step()

    def _leave(self) -> None:
        self._end_steps()
        self.ranks.leave(_end_text(getattr(sys, "last_value", None)))  # an error that the script did not catch

    @property
    def _own_name(self) -> str:
        return str(self.ranks.members[self.rank])

    def _place(self) -> str | list[int]:
        """The place of this rank, for other ranks to report if it falls silent: the lines of its streams, or a text. At
        the start there are no lines: there what the thread has computed shows that it goes on."""
        if self._session is None:
            return f"its start, {time.clock_gettime(self._clock):.3f} s of computation in"
        at_work = self._busy or self._session.tail is not None
        return list(self._session.streams.board) if at_work else "its script, between two steps"

    def _describe_place(self, rank: int, shown: str | list[int] | None) -> str:
        if isinstance(shown, list) and len(shown) == len(STREAM_SLOTS):
            return describe_position(self.setup.file_of(rank), shown)[0]
        return shown if isinstance(shown, str) else ""

    def _error_of(self, rank: int, error: dict[str, Any], prefix: str = "") -> PenstockError:
        name = self.setup.hardware.devices[rank].name
        return error_from_data(error, f"{self.ranks.members[rank]}, device {name}", rank, prefix)

    def close(self) -> None:
        if self.closed:
            return
        self._end_steps()
        self.closed = True
        self._interrupt.end()
        self.ranks.leave(_end_text(sys.exc_info()[1]))  # the error that leaves a `with` of this driver, if any
        atexit.unregister(self._leave)
        if self._signal_before is not None and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._tail is not None:
            self._tail.close()
        if self._session is not None:
            self._session.close(abandon=self._failing)
        if self._turn_server is not None and self._folder is not None:
            self._turn_server.close()
            self._folder.remove()
        self.keeper.close()


def _end_text(error: BaseException | None) -> str:
    return "" if error is None else f"its script raised {type(error).__name__}: {error}".split("\n")[0]


def _end_at_once() -> None:
    """End after an uncaught failure without finalising the interpreter: threads may still wait for peers in gloo, and
    one that wakes up during finalisation would abort the process."""
    if getattr(sys, "last_value", None) is not None:
        atexit.unregister(_end_at_once)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _rows_of(tensors: Mapping[str, Tensor]) -> list[list[Any]]:
    """The name, dtype and shape of each tensor."""
    return [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]


def _take_sigterm(handler: Any) -> Any:
    """Set the handler if the script has none of its own. Returns the previous one, or None if nothing was changed."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        return None
    before = signal.getsignal(signal.SIGTERM)
    return signal.signal(signal.SIGTERM, handler) if before == signal.SIG_DFL else None
