"""Rows between members: flat and hierarchical gathers give the same, sums are added in the group's order."""

from __future__ import annotations

from collections import defaultdict
from queue import SimpleQueue
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.ir import ops
from penstock.ir.program import seats_of
from penstock.runtime.device.exchange import gather_rows, pass_on, sum_rows, trade_counted, trade_rows
from penstock.runtime.device.peers import LOOPBACK, PeerLink


class Post:
    """Messages between threads in place of gloo's, and the bytes between each two."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, int, int], SimpleQueue[Tensor]] = defaultdict(SimpleQueue)
        self.sent_bytes: dict[tuple[int, int], int] = defaultdict(int)

    def of(self, index: int) -> Any:
        return Member(self, index)


class Member:
    def __init__(self, post: Post, index: int):
        self.post, self.index = post, index

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        self.post.boxes[self.index, to, tag].put(tensors[0].clone())
        self.post.sent_bytes[self.index, to] += tensors[0].nbytes
        return Done(lambda: None)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        box = self.post.boxes[source, self.index, tag]
        return Done(lambda: tensors[0].copy_(box.get(timeout=10)))


class Done:
    def __init__(self, wait: Any):
        self.wait = wait


def together(count: int, member: Any) -> None:
    threads = [Thread(target=member, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def gather(hosts: list[int], hierarchical: bool, length: int = 3) -> tuple[list[Tensor], Post]:
    post, count = Post(), len(hosts)
    for key in [(a, b, tag) for a in range(count) for b in range(count) for tag in range(count)]:
        post.boxes[key]  # made here: a defaultdict is not to grow under several threads
    rows = [torch.zeros(count, length) for _ in hosts]

    def member(index: int) -> None:
        rows[index][index] = torch.arange(length) + 10.0 * index
        gather_rows(post.of(index), seats_of(hosts, index), rows[index], hierarchical)

    together(count, member)
    return rows, post


@settings(max_examples=40, deadline=None)
@given(hosts=st.lists(st.integers(0, 2), min_size=2, max_size=6), hierarchical=st.booleans())
def test_every_order_of_hosts_gathers_the_same(hosts: list[int], hierarchical: bool) -> None:
    rows, _ = gather(hosts, hierarchical)
    want = torch.arange(3) + 10.0 * torch.arange(len(hosts))[:, None]
    assert all(torch.equal(found, want) for found in rows)


@pytest.mark.parametrize(("hosts", "per_host"), [([0, 0, 1, 1], 2), ([0, 1, 0, 1], 2), ([0] * 4 + [1] * 4, 4)])
def test_what_goes_between_hosts(hosts: list[int], per_host: int) -> None:
    """MiCS 3.3: (p - 1) / p of the value over each host's link in a ring, (p - k) / p hierarchically."""
    count = len(hosts)
    crossing = {}
    for hierarchical in (False, True):
        rows, post = gather(hosts, hierarchical)
        value = rows[0].nbytes
        out = sum(n for (a, b), n in post.sent_bytes.items() if hosts[a] == 0 and hosts[b] == 1)
        crossing[hierarchical] = out / value
    assert crossing == {False: (count - 1) / count, True: (count - per_host) / count}


def sum_all(given_rows: Tensor, hosts: list[int], hierarchical: bool) -> tuple[dict[int, Tensor], Post]:
    post, count = Post(), len(hosts)
    for key in [(a, b, 0) for a in range(count) for b in range(count)]:
        post.boxes[key]
    found: dict[int, Tensor] = {}

    def member(index: int) -> None:
        rows, spare = given_rows[index].clone(), torch.full(given_rows.shape[2:], torch.nan)
        into = torch.full_like(spare, torch.nan) if index % 2 else None
        found[index] = sum_rows(post.of(index), rows, spare, into, seats_of(hosts, index), hierarchical)
        assert into is None or found[index] is into

    together(count, member)
    return found, post


@settings(max_examples=20, deadline=None)
@given(count=st.integers(2, 6), seed=st.integers(0, 99))
def test_sums_are_added_up_in_the_order_of_devices(count: int, seed: int) -> None:
    given_rows = torch.randn(count, count, 5, generator=torch.Generator().manual_seed(seed))
    found, _ = sum_all(given_rows, [0] * count, hierarchical=True)  # of one host there is no hierarchy
    for index in range(count):
        want = given_rows[0, index].clone()
        for other in range(1, count):
            want += given_rows[other, index]
        assert torch.equal(found[index], want)


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 0, 1], [0] * 3 + [1] * 3, [2, 2, 0, 0, 1, 1]])
def test_sums_go_between_hosts_once_for_each_place(hosts: list[int]) -> None:
    """Added up inside hosts first: every host sends (p - k) / p of the value, k times less than without."""
    count, per_host = len(hosts), hosts.count(0)
    given_rows = torch.randn(count, count, 7)
    sent = {}
    for hierarchical in (False, True):
        found, post = sum_all(given_rows, hosts, hierarchical)
        for index in range(count):
            torch.testing.assert_close(found[index], given_rows[:, index].sum(0))
        sent[hierarchical] = sum(n for (a, b), n in post.sent_bytes.items() if hosts[a] == 0 and hosts[b] != 0)
    value = given_rows[0].nbytes
    assert sent == {False: per_host * (count - per_host) / count * value, True: (count - per_host) / count * value}


def test_gloo_gathers_and_adds_up() -> None:
    store, hosts = dist.HashStore(), [0, 0, 1, 1]
    rows = torch.randn(4, 4, 5)
    found: dict[int, list[Tensor]] = {}

    def device(index: int) -> None:
        link = PeerLink(
            store, index, 4, {"all": [0, 1, 2, 3]}, torch.device("cpu"), hostname=LOOPBACK, timeout_s=30, hosts=hosts
        )
        link.connect({}, {"all": ops.DEVICE})
        plain, by_host = torch.zeros(4, 5), torch.zeros(4, 5)
        plain[index] = by_host[index] = rows[index, 0]
        link.gather_rows(plain, "all")
        link.gather_rows(by_host, "all", hierarchical=True)
        spare, into = torch.zeros(5), torch.zeros(5)
        sums = [rows[index][0].clone(), rows[index][1].clone()]
        link.sum_all(sums, "all")
        own = [link.sum_rows(rows[index].clone(), spare, into, "all")]
        own += [link.sum_rows(rows[index].clone(), spare, None, "all", hierarchical=True)]
        found[index] = [plain, by_host, *own, *sums]

    together(4, device)
    total = rows[0] + rows[1] + rows[2] + rows[3]
    for index in range(4):
        plain, by_host, own, own_by_host, *sums = found[index]
        assert torch.equal(plain, rows[:, 0]) and torch.equal(by_host, rows[:, 0])
        assert torch.equal(own, total[index])
        assert torch.equal(own_by_host, (rows[0] + rows[1] + (rows[2] + rows[3]))[index])
        assert torch.equal(sums[1], found[0][-1])
        torch.testing.assert_close(sums[0], total[0])


TEAM = 4


def test_a_teams_messages_are_as_many_bytes_as_theory_says() -> None:
    """An all-to-all sends (N - 1) / N of a member's value, a step of a ring all of it; nothing else moves."""
    post, values = Post(), torch.randn(TEAM, TEAM, 6)
    for key in [(a, b, 0) for a in range(TEAM) for b in range(TEAM)]:
        post.boxes[key]
    traded: dict[int, Tensor] = {}
    together(TEAM, lambda index: traded.update({index: trade_rows(post.of(index), index, values[index])}))
    assert all(torch.equal(traded[index], values[:, index]) for index in range(TEAM))
    for index in range(TEAM):
        sent = {b: n for (a, b), n in post.sent_bytes.items() if a == index}
        assert sent == {b: values[index].nbytes / TEAM for b in range(TEAM) if b != index}
    for back in (False, True):
        post.sent_bytes.clear()
        passed: dict[int, Tensor] = {}
        together(TEAM, lambda i: passed.update({i: pass_on(post.of(i), i, TEAM, values[i], back)}))  # noqa: B023
        step = 1 if back else -1
        assert all(torch.equal(passed[i], values[(i + step) % TEAM]) for i in range(TEAM))
        assert post.sent_bytes == {(i, (i - step) % TEAM): values[i].nbytes for i in range(TEAM)}


COUNTED = torch.tensor([[0, 3, 1, 0], [2, 0, 0, 5], [0, 0, 0, 0], [1, 1, 4, 2]])  # rows from each member for each


def counted_rows(index: int) -> Tensor:
    """The rows of a member, in the order of those that they are for; each knows both."""
    to = torch.arange(TEAM).repeat_interleave(COUNTED[index])
    return torch.stack([torch.full_like(to, index), to, torch.arange(len(to))], 1).float()


def counted_for(index: int) -> Tensor:
    """The rows that come to a member."""
    return torch.cat([rows[rows[:, 1] == index] for rows in map(counted_rows, range(TEAM))])


def test_rows_by_count_are_sent_once_each_and_none_where_there_are_none() -> None:
    post = Post()
    for key in [(a, b, 0) for a in range(TEAM) for b in range(TEAM)]:
        post.boxes[key]
    found = {index: torch.zeros(int(COUNTED[:, index].sum()), 3) for index in range(TEAM)}

    def member(i: int) -> None:
        trade_counted(post.of(i), i, counted_rows(i), COUNTED[i].tolist(), found[i], COUNTED[:, i].tolist())

    together(TEAM, member)
    assert all(torch.equal(found[index], counted_for(index)) for index in range(TEAM))
    rows = {(a, b): int(COUNTED[a, b]) for a in range(TEAM) for b in range(TEAM) if a != b}
    assert post.sent_bytes == {pair: count * 3 * 4 for pair, count in rows.items() if count}


def test_gloo_trades_and_passes_on_within_a_team() -> None:
    store, values, found = dist.HashStore(), torch.randn(TEAM, TEAM, 5), dict[int, list[Tensor]]()

    def device(index: int) -> None:
        link = PeerLink(
            store, index, TEAM, {"team": [*range(TEAM)]}, torch.device("cpu"), hostname=LOOPBACK, timeout_s=30
        )
        link.connect({}, {"team": ops.DEVICE})
        own = values[index].clone()
        found[index] = [link.exchange_rows(own, "team"), link.pass_on(own, "team"), link.pass_on(own, "team", True)]
        counted = torch.zeros(int(COUNTED[:, index].sum()), 3)
        given, taken = COUNTED[index].tolist(), COUNTED[:, index].tolist()
        link.exchange_counted(counted_rows(index), given, counted, taken, "team")
        found[index].append(counted)

    together(TEAM, device)
    for index in range(TEAM):
        want = [values[:, index], values[index - 1], values[(index + 1) % TEAM], counted_for(index)]
        assert all(torch.equal(a, b) for a, b in zip(found[index], want, strict=True))
