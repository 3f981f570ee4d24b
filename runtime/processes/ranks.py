"""The processes of one torchrun, joined by its rendezvous store: which ranks are there, what each gives, which failed.

Ranks *arrive*: each writes an id that it has just drawn, the first rank writes the list of all ids, and the ranks begin
when every rank has confirmed its own id; so what an earlier attempt left in the store has no effect. From then on each
rank gives a sign of life every half second, and reads the reports of other ranks every tenth of a second.

A rank that fails by itself reports its error, and all others stop with the same error. A rank that only lost a peer
first looks for the rank that is to blame: one whose process on this host has ended or is stopped, or a silent one.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from ...ir.errors import WorkerError, error_to_data
from .rows import Beat, Failure, Given, Member, Roster, from_row, to_row
from .store_thread import (
    LOOPBACKS,
    StoreLost,
    StoreThread,
    Waited,
    address,
    agent_has_store,
    another_connection,
    local_address,
)

BEAT_S = 0.5  # between two signs of life
SILENT_BEATS = 5  # the number of missed signs of life after which a rank or its network counts as gone
POLL_S = 0.1
SEARCH_S = 5.0  # how long to look for the rank that is to blame
ENDED, STOPPED = ("", "Z", "X"), ("T", "t")  # what the kernel says of a process
LAST_WORDS_S = 5.0  # how long a report may take to reach the store
T = TypeVar("T")


@dataclass
class _Heard:
    failures: list[Failure] = field(default_factory=list)
    rows: int = 0  # the number of rows of failures that have been read
    beats: dict[int, tuple[Beat | None, float]] = field(default_factory=dict)  # per rank: its last one, and when
    moved_s: float = 0.0  # when a rank was last seen at another place than before


class Ranks:
    """This rank's connection to all ranks. `run` is their random identity, which all rows carry.

    `node` is the same for the ranks of one host. `patience_s` limits how long an exchange may take while all ranks
    live; a rank that gives no sign of life for `timeout_s` counts as lost.

    `beat` returns the data to send with each sign of life, and `describe` turns another rank's data into text. `alarm`
    is called, in another thread, with the first failure that ends the ranks' common work.
    Raises `WorkerError` naming the ranks that did not arrive within `timeout_s`.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout_s: float,
        *,
        node: str = "",
        patience_s: float | None = None,
        beat: Callable[[], Any] = lambda: None,
        describe: Callable[[int, Any], str] = lambda rank, shown: str(shown or ""),
        alarm: Callable[[Failure], None] | None = None,
    ):
        self.timeout_s, self.rank, self.size = timeout_s, rank, size
        self.patience_s = timeout_s if patience_s is None else patience_s
        self.node = node or socket.gethostname()
        self.beat, self.describe, self.alarm = beat, describe, alarm
        self.round = 0  # the number of exchanges that are over
        self.members: list[Member] = []
        self.left = False
        self._heard, self._looking, self._looks, self._beats, self._next_beat_s = _Heard(), False, 0, 0, 0.0
        self._watched_s: float | None = None  # since when `watched` runs
        self._lock = threading.Lock()
        self._asker = StoreThread(store)
        try:
            self.run = self._arrive(time.monotonic() + timeout_s)
        except BaseException:
            self._asker.close()
            raise
        self._room = f"penstock/{self.run}"
        self.store = dist.PrefixStore(self._room, store)  # for the connections between the devices
        self._watch = StoreThread(dist.PrefixStore(self._room, another_connection(store)), self._look_around, POLL_S)

    # --- arriving

    def _arrive(self, deadline_s: float) -> str:
        """Wait until all ranks have arrived. Returns a prefix for the store that no earlier attempt has used."""
        mine = Member(
            self.rank,
            uuid.uuid4().hex[:12],
            self.node,
            socket.gethostname(),
            os.getpid(),
            time.time() - time.perf_counter(),
            local_address(os.environ.get("MASTER_ADDR", "localhost")),
        )
        self._set(f"penstock/arrived/{self.rank}", mine)
        wait_s = 0.002
        while True:
            if self.rank == 0:
                self._list_arrivals()
            roster = self._get("penstock/roster", Roster)
            rows = [] if roster is None else roster.members
            if roster is not None and len(rows) == self.size and rows[self.rank] == mine:
                self._set(f"penstock/confirmed/{self.rank}", roster.run)
                if self._is_confirmed(roster.run):
                    self.members = rows
                    return roster.run
            if time.monotonic() > deadline_s:
                raise WorkerError(self._absent())
            wait_s = min(POLL_S, 1.5 * wait_s)
            time.sleep(wait_s)

    def _members(self) -> list[Member]:
        """The ranks that are there, in order."""
        found = [self._get(f"penstock/arrived/{rank}", Member) for rank in range(self.size)]
        return [member for rank, member in enumerate(found) if member is not None and member.rank == rank]

    def _list_arrivals(self) -> None:
        """Write a new list of ranks, with a new identity, whenever another process has arrived. Rank 0 calls it."""
        members, roster = self._members(), self._get("penstock/roster", Roster)
        if len(members) == self.size and (roster is None or members != roster.members):
            self._set("penstock/roster", Roster(secrets.token_hex(16), members))

    def _is_confirmed(self, run: str) -> bool:
        if self.rank == 0 and all(self._get(f"penstock/confirmed/{r}", str) == run for r in range(self.size)):
            self._set("penstock/begun", run)
        return self._get("penstock/begun", str) == run

    def _absent(self) -> str:
        here = [member.rank for member in self._members()]
        missing = [rank for rank in range(self.size) if rank not in here]
        who = f"rank {', '.join(map(str, missing))} did not come" if missing else "not all ranks began together"
        return (
            f"rank {self.rank} has waited {self.timeout_s:g} s at {address()} for {self.size} ranks: {who}. Start the "
            "number of processes that torchrun was told, and have all of them reach the first step of the same job"
        )

    # --- plain data in the store

    def _set(self, key: str, value: Any) -> None:
        self._asker.ask(lambda store: store.set(key, to_row(value)), self.timeout_s)

    def _get(self, key: str, kind: type[T]) -> T | None:
        """The present value of `key`, None if it has none of this kind."""
        return self._asker.ask(lambda store: from_row(_peek(store, key), kind), self.timeout_s)

    def exchange(self, mine: Any) -> list[Any]:
        """The plain data `mine` of every rank, in the ranks' order. All ranks must call it.

        The first rank collects and distributes the data, so that n ranks cost 3 n requests. Raises `Told` if a rank
        fails meanwhile, or `Waited` if one does not answer within `patience_s`.
        """
        number, prefix = self.round, f"{self._room}/round"
        text = to_row(Given(mine), self.run)
        own = json.loads(text)["value"]["value"]  # as the others will read it

        def collect(store: dist.Store) -> list[Any]:
            rows = [self._await_value(store, f"{prefix}/{number}/{rank}") for rank in range(1, self.size)]
            joined = [own, *rows]
            store.set(f"{prefix}/{number}", to_row(Given(joined), self.run))
            if number:  # all ranks have given their data now, so they have read the previous round's
                store.delete_key(f"{prefix}/{number - 1}")
            return joined

        def give(store: dist.Store) -> list[Any]:
            store.set(f"{prefix}/{number}/{self.rank}", text)
            joined: list[Any] = self._await_value(store, f"{prefix}/{number}")
            store.delete_key(f"{prefix}/{number}/{self.rank}")
            return joined

        try:
            found = self._asker.ask(collect if self.rank == 0 else give, self.patience_s, self._check_waiting())
        except StoreLost:
            raise
        except RuntimeError as error:  # the store's own timeout
            raise Waited(f"rank {self.rank} has waited {self.patience_s:g} s for the others") from error
        self.round += 1
        return found

    def _await_value(self, store: dist.Store, key: str) -> Any:
        """The value under `key`, as soon as there is one."""
        given = from_row(store.get(key), Given, self.run)
        if given is None:
            raise WorkerError(
                f"{key} in the rendezvous store {address()} is not what this run writes: another program uses the store"
            )
        return given.value

    def put(self, name: str, value: Any, old: str = "") -> None:
        """Leave the plain data `value` under `name`, for any rank that wants it; this rank's `old` goes. Any thread may
        call it, also while this rank is in an exchange."""

        def leave(store: dist.Store) -> None:
            store.set(f"{name}/{self.rank}", to_row(Given(value), self.run))
            if old:
                store.delete_key(f"{old}/{self.rank}")

        self._watch.ask(leave, self.timeout_s)

    def read(self, name: str) -> list[Any]:
        """The value that each rank has `put` under `name`, in the ranks' order, as soon as all have. One rank may call
        it alone.

        Raises `Told` if a rank fails or leaves before it has put its own, `Waited` if one has not within `patience_s`.
        """
        missing, found = set(range(self.size)), dict[int, Any]()
        check, told = self._check_waiting(), None
        deadline_s, wait_s = time.monotonic() + self.patience_s, 0.001

        def look(store: dist.Store) -> None:
            there = [rank for rank in missing if store.check([f"{self._room}/{name}/{rank}"])]
            found.update((rank, self._await_value(store, f"{self._room}/{name}/{rank}")) for rank in there)

        while True:
            self._asker.ask(look, self.timeout_s)
            missing -= found.keys()
            if not missing:
                return [found[rank] for rank in range(self.size)]
            if told is not None:  # and had not put it before
                raise told
            if time.monotonic() > deadline_s:
                who = ", ".join(str(self.members[rank]) for rank in sorted(missing))
                raise Waited(f"rank {self.rank} has waited {self.patience_s:g} s for what {who} gives to all")
            wait_s = min(POLL_S / 4, 1.5 * wait_s)
            time.sleep(wait_s)
            try:
                check()
            except Told as error:
                told = error

    def tell_step(self, number: int) -> None:
        """Let all ranks know this rank's cell (`BadStep`). Any thread may call it, also while this rank is in an
        exchange."""
        self._watch.ask(lambda store: store.set(f"told/{self.rank}", str(number)), self.timeout_s)

    def told_steps(self) -> list[int]:
        """The cells of all ranks, once each has told one. Any thread may call it."""
        names = [f"told/{rank}" for rank in range(self.size)]
        return [int(row) for row in self._watch.ask(lambda store: store.multi_get(names), self.timeout_s)]

    def await_rows(self, name: str, ranks: Sequence[int]) -> list[Any]:
        """The values that these ranks `put` under `name`, as soon as they have, however long that takes. A thread of
        its own may call it, also while this rank is in an exchange. Raises `Told` if a rank fails or is gone before."""
        missing, found = set(ranks), dict[int, Any]()
        check, told = self._check_waiting(), None

        def look(store: dist.Store) -> None:
            there = [rank for rank in missing if store.check([f"{name}/{rank}"])]
            found.update((rank, self._await_value(store, f"{name}/{rank}")) for rank in there)

        while True:
            if self.left:
                raise WorkerError(f"{self.members[self.rank]} has left")
            self._watch.ask(look, self.timeout_s)
            missing -= found.keys()
            if not missing:
                return [found[rank] for rank in ranks]
            if told is not None:
                raise told
            time.sleep(POLL_S / 2)
            try:
                check()
            except Told as error:
                told = error

    # --- failures

    def check(self) -> None:
        """Raise `Told` if a rank has failed or left."""
        failure = self.reported_failure()
        if failure is not None:
            raise Told(failure)

    @property
    def hostname(self) -> str | None:
        """The address by which other ranks reach this one; None leaves the choice to the system."""
        own = self.members[self.rank]
        if not own.address.startswith(LOOPBACKS):
            return own.address or None
        for other in self.members:  # the first rank's host may know its own name as loopback
            if other.node != own.node and not other.address.startswith(LOOPBACKS):
                return local_address(other.address) or None
        return own.address

    def _check_waiting(self) -> Callable[[], None]:
        """A function that calls `check`, and after a few seconds also checks that the other ranks still live."""
        began_s = time.monotonic()

        def check() -> None:
            self.check()
            if time.monotonic() > began_s + SEARCH_S:
                self._looking = True
                found = self._to_blame(began_s, self.timeout_s)
                if found is not None:
                    raise Told(found)

        return check

    def reported_failure(self) -> Failure | None:
        """The first reported failure whose cause is known and which concerns this rank."""
        with self._lock:
            for failure in self._heard.failures:
                gone_on = failure.left_round is None or self.round >= failure.left_round
                if not failure.waited and gone_on and failure.rank != self.rank:
                    return failure
        return None

    def report(self, failure: Failure) -> None:
        """Tell all ranks of a failure. Raises nothing if the store is out of reach: the others then find out alone."""
        with contextlib.suppress(RuntimeError, WorkerError):
            self._watch.ask(lambda store: self._post(store, failure), LAST_WORDS_S)

    def _post(self, store: dist.Store, failure: Failure) -> None:
        row = to_row(failure, self.run)
        for number in count(1):  # the first that is free; nothing else is taken for a row of ours
            if store.compare_set(f"failure/{number}", "", row) == row.encode():
                return

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """While the ranks work together and no timeout of a message tells them: report a rank that has ended or gives
        no sign of life, and ranks of which none has gone on for `timeout_s`. A step may take longer than that."""
        self._watched_s = time.monotonic()
        try:
            yield
        finally:
            self._watched_s = None

    def cause(self, own: Failure) -> Failure:
        """The failure that ends the ranks' work: `own`, or, if this rank only waited, another's report or a rank that
        is gone."""
        if not own.waited:
            return own
        began_s, looks = time.monotonic(), self._looks
        self._looking = True
        while time.monotonic() < began_s + SEARCH_S and not self._watch.lost:
            time.sleep(POLL_S)  # meanwhile the listening thread reads the others' last signs of life
            found = self._to_blame(began_s, SILENT_BEATS * BEAT_S)
            if found is not None:
                return found
        if self._watch.lost or self._looks <= looks + 1:  # one look may have been in progress
            lost = self._watch.lost or f"the rendezvous store {address()} has given no answer for {SEARCH_S:g} s"
            why = f"{lost}: the host of rank 0, or the network to it, is gone"
            return Failure(self.rank, error_to_data(WorkerError(f"{self.members[self.rank]} stops: {why}")))
        return Failure(self.rank, own.error)

    def _to_blame(self, since_s: float, limit_s: float) -> Failure | None:
        """The failure that another rank reported, else that of a rank that has ended or is silent (see `_silent`).
        None, too, where the store gives no answer: then others may have ended for the same reason."""
        looks = self._looks
        if self.reported_failure() is None and self._ended_rank() is None and self._silent(since_s, limit_s) is None:
            return None
        self._look_again()  # a rank that ended by itself has reported its reason before, and each one its place
        if self.reported_failure() is not None or self._looks <= looks + 1:
            return self.reported_failure()
        return self._ended_rank() or self._silent(since_s, limit_s)

    def _ended_rank(self) -> Failure | None:
        """The failure of a rank of this node whose process has ended or is stopped; None if there is none."""
        here = self.members[self.rank].node
        for member in self.members:
            state = _process_state(member.pid) if member.node == here and member.rank != self.rank else "R"
            if state in ENDED:
                return self._blame([member], "has ended")
            if state in STOPPED:
                return self._blame([member], "is stopped (SIGSTOP)")
        return None

    def _look_again(self) -> None:
        """Wait until all reports that were in the store at this call have been read."""
        enough, deadline_s = self._looks + 2, time.monotonic() + LAST_WORDS_S
        while self._looks < enough and time.monotonic() < deadline_s and not self._watch.lost:
            time.sleep(POLL_S / 2)

    def _silent(self, since_s: float, limit_s: float) -> Failure | None:
        """The failure of ranks that gave no sign of life for `limit_s` while this one was looking; None if there are
        none."""
        with self._lock:
            rows = self._heard.beats.items()
            ranks = [rank for rank, (_, at_s) in rows if time.monotonic() - max(at_s, since_s) > limit_s]
        if not ranks:
            return None
        members = [self.members[rank] for rank in sorted(ranks)]
        nodes = {member.node for member in members}
        whole = all(member.rank in ranks for member in self.members if member.node in nodes)
        why = "the host, or the network to it, is gone" if whole else "gone or stopped"
        return self._blame(members, f"no sign of life for {limit_s:g} s: {why}", ": ")

    def _blame(self, members: Sequence[Member], what: str, between: str = " ") -> Failure:
        names, place = " and ".join(str(member) for member in members), self.last_place(members[0].rank)
        text = f"{names}{between}{what}{f'; seen last: {place}' if place else ''}. All ranks stop."
        return Failure(self.rank, error_to_data(WorkerError(text)), blamed=members[0].rank)

    def last_place(self, rank: int) -> str:
        """The place of a rank at its last sign of life; empty if there was none."""
        with self._lock:
            beat, _ = self._heard.beats.get(rank, (None, 0.0))
        return "" if beat is None else self.describe(rank, beat.place)

    # --- the thread that listens

    def _look_around(self, store: dist.Store) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_beat_s:
            self._beats, self._next_beat_s = self._beats + 1, now_s + BEAT_S
            store.set(f"beat/{self.rank}", to_row(Beat(self._beats, self.beat()), self.run))
        before = self.reported_failure()
        for failure in self._new_failures(store):
            with self._lock:
                self._heard.failures.append(failure)
        if self._looking:
            self._read_beats(store)
        after = self.reported_failure()
        self._looks += 1
        if after is None and self._watched_s is not None and now_s > self._watched_s + SEARCH_S:
            self._look_after(store, self._watched_s)
        if after is not None and before is None and self.alarm is not None:
            self.alarm(after)

    def _look_after(self, store: dist.Store, since_s: float) -> None:
        """Report what `watched` is for. The first two ranks look at all, each other among them; all look at their
        host."""
        found = self._ended_rank()
        if found is None and self.rank < 2:
            if not self._looking:  # nothing is known of the others yet
                self._looking, self._heard.moved_s = True, time.monotonic()
            found = self._silent(since_s, self.timeout_s) or self._stall(since_s)
        if found is not None:
            self._watched_s = None
            self._post(store, found)
            if self.alarm is not None:
                self.alarm(found)

    def _stall(self, since_s: float) -> Failure | None:
        if time.monotonic() - max(since_s, self._heard.moved_s) <= self.timeout_s:
            return None
        places = [f"{member}: {place}" for member in self.members if (place := self.last_place(member.rank))]
        text = (
            f"no rank has gone on for {self.timeout_s:g} s; work that takes longer without a sign needs a larger "
            f"timeout_s. Seen last: {'; '.join(places) or 'nothing'}. All ranks stop."
        )
        return Failure(self.rank, error_to_data(WorkerError(text)))

    def _new_failures(self, store: dist.Store) -> Iterator[Failure]:
        while (row := _peek(store, f"failure/{self._heard.rows + 1}")) is not None:
            self._heard.rows += 1
            failure = from_row(row, Failure, self.run)
            if failure is not None and failure.rank in range(self.size):
                yield failure

    def _read_beats(self, store: dist.Store) -> None:
        for rank in range(self.size):
            beat, now_s = from_row(_peek(store, f"beat/{rank}"), Beat, self.run), time.monotonic()
            with self._lock:
                before, _ = self._heard.beats.get(rank, (None, 0.0))
                if beat is not None and before is not None and beat.place != before.place:
                    self._heard.moved_s = now_s
                if rank not in self._heard.beats or (beat is not None and before != beat):
                    self._heard.beats[rank] = beat, now_s

    # --- the end

    def leave(self, why: str = "") -> None:
        """End this rank's part; `why` says what ended its script. May be called twice."""
        if self.left:
            return
        self.left = True
        text = f"{self.members[self.rank]} has left: {why or 'its script has ended, or closed the job'}"
        self.report(Failure(self.rank, error_to_data(WorkerError(text)), blamed=self.rank, left_round=self.round))
        if self.rank == 0 and not agent_has_store():  # the store then ends with this process
            self._await_leaving(time.monotonic() + LAST_WORDS_S)
        self._watch.close()
        self._asker.close()

    def _await_leaving(self, deadline_s: float) -> None:
        while time.monotonic() < deadline_s and not self._watch.lost:
            with self._lock:
                if len({failure.rank for failure in self._heard.failures}) == self.size:
                    return
            time.sleep(POLL_S / 2)


class Told(WorkerError):
    """Another rank has reported `failure`."""

    def __init__(self, failure: Failure):
        super().__init__(str(failure.error["message"]))
        self.failure = failure


def _peek(store: dist.Store, key: str) -> bytes | None:
    """The row under `key`; None if there is none, or an empty one, which `compare_set` takes for none, too."""
    return store.get(key) or None if store.check([key]) else None


def _process_state(pid: int) -> str:
    """The kernel's letter for the state of a process of this host; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
