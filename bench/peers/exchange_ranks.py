"""A rank of `bench/peers/exchanges.py`, run by torchrun for each GPU: it prints a line of JSON for each figure that it
has a part in. What runs are the functions that train: `PeerLink` and its communicators."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from penstock.bench.peers.exchanges import BY_HOST, GATHER, MESSAGE, SUM
from penstock.ir.ops import DEVICE
from penstock.runtime.accelerator import settle
from penstock.runtime.device import peers
from penstock.runtime.device.peers import LOOPBACK, PeerLink, Use
from penstock.runtime.measure.communicators import communicator_bytes
from penstock.runtime.measure.links import message_seconds, undisturbed_s

REPEATS = 4
ALL = "all"


class Rank:
    """This process's place among all."""

    def __init__(self, settings: Mapping[str, Any]):
        self.settings = settings
        self.index, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        self.store = dist.FileStore(settings["path"], self.world)
        torch.cuda.set_device(self.device)

    def say(self, exchange: str, members: list[int], **figures: Any) -> None:
        row = {"rank": self.index, "exchange": exchange, "members": members, "speakers": len(members), **figures}
        sys.stdout.write(json.dumps(row) + "\n")  # at once: the ranks share a pipe
        sys.stdout.flush()

    def memory(self) -> None:
        """Communicators of two GPUs, then of all: the kernels of NCCL come with the first of a process."""
        for count in dict.fromkeys((2, self.world)):
            if self.index < count:
                store = dist.PrefixStore(f"memory of {count}", self.store)
                self.say("memory", list(range(count)), taken=communicator_bytes(store, self.index, count, self.device))

    def gathers(self) -> None:
        members, hosts = list(range(self.world)), self.settings["hosts"]
        ways = [peers.GATHER, peers.SCATTER]
        uses = [Use(way, num_bytes) for way in ways for num_bytes in self.settings["gathered"]]
        uses += [Use(peers.GATHER, num_bytes, True) for num_bytes in self.settings["gathered"] if hosts]
        store = dist.PrefixStore("gathers", self.store)
        link = PeerLink(store, self.index, self.world, {ALL: members}, self.device, hostname=LOOPBACK, hosts=hosts)
        link.connect({}, {ALL: DEVICE}, {ALL: uses})
        for num_bytes in self.settings["gathered"]:
            rows = torch.zeros(self.world, num_bytes // self.world // 4, device=self.device)
            spare = torch.empty_like(rows[0])
            works: dict[str, Callable[[], Any]] = {
                GATHER: lambda rows=rows: link.gather_rows(rows, ALL),
                BY_HOST: lambda rows=rows: link.gather_rows(rows, ALL, hierarchical=True),
                SUM: lambda rows=rows, spare=spare: link.sum_rows(rows, spare, None, ALL),
            }  # fmt: skip
            for exchange, work in works.items():
                if exchange == BY_HOST and not hosts:
                    continue
                seconds = undisturbed_s(lambda work=work: (work(), settle(self.device)), REPEATS)
                self.say(exchange, members, bytes=rows.nbytes, seconds=seconds)

    def messages(self) -> None:
        """One pair after another, so that no link has two pairs' messages."""
        for pair in combinations(range(self.world), 2):
            done = f"messages are over/{pair}"
            if self.index in pair:
                store = dist.PrefixStore(f"messages of {pair}", self.store)
                sizes = self.settings["messages"]
                _, took_s = message_seconds(store, pair.index(self.index), sizes, LOOPBACK, self.device)
                for num_bytes, seconds in took_s.items() if self.index == pair[0] else ():
                    self.say(MESSAGE, list(pair), speakers=1, bytes=num_bytes, seconds=seconds)
                if self.index == pair[0]:
                    self.store.set(done, "")
            self.store.wait([done])


if __name__ == "__main__":
    rank = Rank(json.loads(sys.argv[1]))
    rank.memory()
    rank.gathers()
    rank.messages()
