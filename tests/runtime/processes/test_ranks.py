"""Ranks of one torchrun, here threads with connections of their own to one store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from penstock.ir.errors import WorkerError, error_to_data
from penstock.runtime.processes.ranks import Ranks, Told
from penstock.runtime.processes.rows import Failure, to_row
from penstock.runtime.processes.store_thread import StoreLost, StoreThread

TIMEOUT_S = 10.0
DATA = error_to_data(WorkerError("not of this run"))


@pytest.fixture
def server() -> Iterator[dist.TCPStore]:
    yield dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def client(server: dist.TCPStore) -> dist.TCPStore:
    timeout = timedelta(seconds=TIMEOUT_S)
    return dist.TCPStore("127.0.0.1", server.port, None, False, timeout=timeout, wait_for_workers=False)


def on_all(size: int, run: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def arrive(server: dist.TCPStore, size: int, **options: Any) -> list[Ranks]:
    return on_all(size, lambda rank: Ranks(client(server), rank, size, TIMEOUT_S, **options))


def test_all_get_what_all_give_round_after_round(server: dist.TCPStore) -> None:
    ranks = arrive(server, 3)

    def rounds(rank: int) -> list[Any]:
        return [ranks[rank].exchange({"rank": rank, "round": i}) for i in range(20)]

    expected = [[{"rank": rank, "round": i} for rank in range(3)] for i in range(20)]
    assert on_all(3, rounds) == [expected] * 3
    assert [member.rank for member in ranks[2].members] == [0, 1, 2]
    keys_of_rounds = server.num_keys()
    on_all(3, rounds)
    assert server.num_keys() <= keys_of_rounds + 4  # what was read goes; signs of life may have come
    on_all(3, lambda rank: ranks[rank].leave())


def test_what_an_earlier_attempt_left_counts_for_nothing(server: dist.TCPStore) -> None:
    """The second attempt has fewer ranks, and finds the arrivals, lists and failures of the first."""
    first = arrive(server, 3)
    first[1].report(Failure(1, error_to_data(WorkerError("an old failure"))))
    second = arrive(server, 2)
    assert on_all(2, lambda rank: second[rank].exchange(rank)) == [[0, 1]] * 2
    assert second[0].reported_failure() is None and first[0].members[0].id != second[0].members[0].id


def test_ranks_that_do_not_come_are_named(server: dist.TCPStore) -> None:
    def come(rank: int) -> str:
        with pytest.raises(WorkerError) as caught:
            Ranks(client(server), rank, 4, 0.5)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        messages = list(pool.map(come, (0, 2)))
    assert all("for 4 ranks: rank 1, 3 did not come" in message for message in messages)


def test_a_failure_reaches_whoever_waits(server: dist.TCPStore) -> None:
    heard: list[Failure] = []
    ranks = arrive(server, 3, alarm=heard.append)

    def run(rank: int) -> float:
        if rank == 1:
            time.sleep(0.2)
            ranks[1].report(Failure(1, error_to_data(WorkerError("the disk of rank 1 is full"))))
            return time.monotonic()
        with pytest.raises(Told, match="the disk of rank 1 is full"):
            ranks[rank].exchange({})
        return time.monotonic()

    told_s = on_all(3, run)
    assert max(told_s) - told_s[1] < 2.0
    assert [failure.rank for failure in heard] == [1, 1]


def test_leaving_matters_only_to_those_who_go_on(server: dist.TCPStore) -> None:
    ranks = arrive(server, 2)
    on_all(2, lambda rank: ranks[rank].exchange(rank))
    ranks[1].leave("ValueError: no such column")
    deadline_s = time.monotonic() + 5
    while ranks[0].reported_failure() is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    with pytest.raises(Told, match=r"rank 1 \(on .*\) has left: ValueError: no such column"):
        ranks[0].exchange("one more")
    after = Failure(1, error_to_data(WorkerError("left")), left_round=5)
    ranks[0]._heard.failures[:] = [after]  # rank 1 has finished rounds that this one is still in
    assert ranks[0].reported_failure() is None


def test_a_silent_rank_is_found_to_blame(server: dist.TCPStore) -> None:
    """It belongs to another node, so that its process cannot be looked at: only its signs of life are missing."""
    ranks = on_all(3, lambda rank: Ranks(client(server), rank, 3, TIMEOUT_S, node=str(rank), beat=lambda: "line 7"))
    time.sleep(0.3)
    ranks[2]._watch.close()  # its thread ends, nothing else is heard of it
    lost_peer = Failure(0, error_to_data(WorkerError("Connection closed by peer")), waited=True)
    found = ranks[0].cause(lost_peer)
    assert found.blamed == 2 and not found.waited
    assert "rank 2 (on " in found.error["message"] and "): no sign of life for" in found.error["message"]
    assert "seen last: line 7" in found.error["message"]


def watch(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch, moves: bool, step_s: float, search_s: float = 0.2
) -> list[Failure]:
    """Two ranks in a step that takes longer than their timeout; the second one goes on from place to place, or not."""
    heard: list[Failure] = []
    monkeypatch.setattr("penstock.runtime.processes.ranks.SEARCH_S", search_s)
    begin_s, both, found = time.monotonic(), threading.Barrier(2), list[Failure]()
    places = [lambda: [3], lambda: [int(10 * (time.monotonic() - begin_s)) if moves else 7]]

    def step(rank: int) -> None:
        mine = Ranks(client(server), rank, 2, TIMEOUT_S, node=str(rank), alarm=heard.append, beat=places[rank])
        mine.timeout_s = 1.0
        with mine.watch():
            end_s = time.monotonic() + step_s
            while time.monotonic() < end_s and not heard:
                time.sleep(0.05)
        both.wait(TIMEOUT_S)
        found.extend(heard)
        both.wait(TIMEOUT_S)  # leaving is heard, too
        mine.leave()

    on_all(2, step)
    return found


@pytest.mark.slow
def test_a_step_may_take_longer_than_the_timeout(server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert watch(server, monkeypatch, moves=True, step_s=3.0) == []


@pytest.mark.slow
def test_nobody_is_blamed_for_the_time_before_the_first_look(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert watch(server, monkeypatch, moves=True, step_s=2.0, search_s=1.3) == []


@pytest.mark.slow
def test_ranks_that_do_not_go_on_are_found(server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_ = watch(server, monkeypatch, moves=False, step_s=8.0)
    assert "no rank has gone on for 1 s" in first.error["message"] and "timeout_s" in first.error["message"]


def test_a_store_that_is_silent_is_to_blame(server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listening thread hangs in a call, as where the network to the first rank's host is cut."""
    ranks = on_all(2, lambda rank: Ranks(client(server), rank, 2, TIMEOUT_S, node=str(rank)))
    monkeypatch.setattr("penstock.runtime.processes.ranks.SEARCH_S", 0.5)
    over = threading.Event()
    ranks[1].beat = lambda: over.wait(30)
    ranks[1]._next_beat_s = 0.0
    time.sleep(0.3)
    found = ranks[1].cause(Failure(1, error_to_data(WorkerError("Timed out")), waited=True))
    assert found.rank == 1 and "has given no answer for 0.5 s: the host of rank 0" in found.error["message"]
    over.set()


def test_of_own_node_the_process_is_looked_at(server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = arrive(server, 2)
    monkeypatch.setattr("penstock.runtime.processes.ranks._process_state", lambda pid: "T")
    found = ranks[0].cause(Failure(0, error_to_data(WorkerError("Timed out")), waited=True))
    assert found.blamed == 1 and "is stopped (SIGSTOP)" in found.error["message"]
    own = Failure(0, error_to_data(WorkerError("my own fault")))
    assert ranks[0].cause(own) is own


JUNK = (b"", b"{", b"\xff\xfe", b"null", b"[" * 5000, b"7", b'{"run": "other", "value": 1}', b'{"value": {"rank": 9}}')


def test_what_others_write_into_the_store_ends_nothing(server: dist.TCPStore) -> None:
    """Rows of no run, of another run and of wrong types, where this run's rows are expected."""
    other = client(server)
    for number in range(len(JUNK)):
        for key in ("penstock/arrived/0", "penstock/arrived/1", "penstock/roster", "penstock/begun"):
            other.set(key, JUNK[(number + len(key)) % len(JUNK)])
    ranks = on_all(2, lambda rank: Ranks(client(server), rank, 2, TIMEOUT_S, node=str(rank), beat=lambda: [1, 2]))
    run = ranks[0].run
    assert len(run) == 32 and ranks[1].run == run
    room = f"penstock/{run}"
    for number, junk in enumerate([*JUNK, to_row(Failure(7, DATA), run), to_row(Failure(1, DATA), "other")], 1):
        other.set(f"{room}/failure/{number}", junk)
    for rank in (0, 1):
        other.set(f"{room}/beat/{rank}", to_row({"number": "x", "place": [["y"]]}, run))
    time.sleep(0.3)
    assert ranks[0].reported_failure() is None and ranks[1].last_place(0) == ""
    assert on_all(2, lambda rank: ranks[rank].exchange(rank)) == [[0, 1]] * 2
    ranks[1].report(Failure(1, error_to_data(WorkerError("a report after the others' rows"))))
    deadline_s = time.monotonic() + 5
    while ranks[0].reported_failure() is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert "after the others' rows" in ranks[0].reported_failure().error["message"]
    assert all(each._watch._thread.is_alive() and not each._watch.lost for each in ranks)
    on_all(2, lambda rank: ranks[rank].leave())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_strangers_row_in_an_exchange_is_an_error(rank: int, server: dist.TCPStore) -> None:
    ranks = arrive(server, 2)
    key = f"penstock/{ranks[0].run}/round/0" + ("/1" if rank == 0 else "")
    client(server).set(key, b'{"run": "other", "value": {"value": 1}}')
    with pytest.raises(WorkerError, match=f"{key} in the rendezvous store .* is not what this run writes"):
        ranks[rank].exchange("mine")


class Deaf(dist.HashStore):
    """A store whose host is out of reach: a call blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()

    def check(self, keys: list[str]) -> bool:
        return self.over.wait(30)


def test_a_store_out_of_reach_does_not_hold_anyone_up() -> None:
    deaf = Deaf()
    thread = StoreThread(deaf)
    began_s = time.monotonic()
    with pytest.raises(StoreLost, match=r"has given no answer for 0\.2 s"):
        thread.ask(lambda store: store.check(["anything"]), 0.2)
    with pytest.raises(StoreLost):
        thread.ask(lambda store: store.check(["more"]), 100.0)
    assert time.monotonic() - began_s < 2
    deaf.over.set()
