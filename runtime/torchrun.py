"""One rank of a torchrun: this process is one device of the plan, the others run the same script.

All ranks make the same calls in the same order. Scalars and reports are exchanged through the rendezvous store, so
that every rank sees the loss; other results stay with the device that has them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from . import errors
from .commands import COMMANDS, Answer, Tensors
from .drivers import Driver, Setup
from .errors import BatchError, PenstockError, PlanError, WorkerError
from .program import Program
from .session import StepResult, check_batch
from .worker import build_session, describe_error


class TorchrunDriver(Driver):
    """Runs the device of this rank. Raises `PlanError` where the number of ranks is not that of the plan's devices."""

    def __init__(self, setup: Setup):
        super().__init__(setup)
        self.rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        devices = setup.interface.world_size
        if world != devices:
            raise PlanError(
                f"torchrun has started {world} processes, the plan has {devices} devices; use --nproc-per-node so that "
                f"there are {devices} in all"
            )
        self.store = dist.PrefixStore("penstock", _store())
        local = int(os.environ.get("LOCAL_RANK", "0"))
        self.session = build_session({**setup.for_device(self.rank), "gpu": local, "hostname": None}, self.store)
        self._round = 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @staticmethod
    def is_present() -> bool:
        """Whether this process was started by torchrun, among others."""
        return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ

    def call(
        self, command: str, device: int, args: Mapping[str, Any] | None = None, tensors: Tensors | None = None
    ) -> Answer:
        """As everywhere, but all ranks must call it; all get the answer."""
        self._require_open()
        mine: dict[str, Any] = {}
        found: Tensors = {}
        if device == self.rank:
            try:
                mine, found = COMMANDS[command](self.session, args or {}, tensors or {})
            except Exception as error:
                mine = {"error": describe_error(error, self.session)}
            rows = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in found.items()]
            mine = {**mine, "tensors": rows}
        header = self._exchange(mine)[device]
        if "error" in header:
            raise _error_of(device, header["error"])
        assert self.session.link is not None
        answer: Tensors = {}
        for name, dtype, shape in header.pop("tensors"):
            if device == self.rank:
                value = found[name].detach().cpu().contiguous()
            else:
                value = torch.empty(shape, dtype=getattr(torch, dtype))
            answer[name] = self.session.link.broadcast(value, device)
        return header, answer

    def agree_on_batch(self, what: str, kind: str, refused: PenstockError | None) -> None:
        rows = self._exchange({"what": what, "kind": kind, "refused": None if refused is None else str(refused)})
        said = [f"rank {rank}: {row['refused']}" for rank, row in enumerate(rows) if row["refused"]]
        kinds = {row["kind"]: f"rank {rank} was given {row['kind']}" for rank, row in enumerate(rows) if row["kind"]}
        if not said and len(kinds) > 1:
            said = ["; ".join(kinds.values())]
        if said:
            more = f" ({len(said) - 1} more ranks have such a batch)" if len(said) > 1 else ""
            raise BatchError(f"{said[0]}{more}. No rank has run `{what}`") from refused

    def gather(self, value: Any) -> list[Any]:
        """As everywhere, but all ranks must call it."""
        self._require_open()
        return [row["value"] for row in self._exchange({"value": value})]

    def _own_programs(self) -> list[dict[str, Program]]:
        return [self.setup.programs[self.rank]]

    def _check(self, function: str, batch: Mapping[str, Tensor]) -> None:
        whole = any(len(value) > self._lane_rows(name) for name, value in batch.items())
        check_batch(batch, self.setup.whole if whole else self.setup.interface, self.inputs[function])

    def _run_all(self, command: str, batch: Mapping[str, Tensor]) -> list[StepResult]:
        batch = self.part(batch, self.rank)
        own = self.session.step(batch) if command == "run_step" else self.session.evaluate(batch)
        scalars = {name: [float(v) for v in values if v.dim() == 0] for name, values in own.values.items()}
        results = []
        for rank, other in enumerate(self._exchange({"scalars": scalars, "report": own.report})):
            values = {name: [torch.tensor(v) for v in numbers] for name, numbers in other["scalars"].items()}
            results.append(own if rank == self.rank else StepResult(values, other["report"]))
        return results

    def _exchange(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's plain data. Nobody is more than one round ahead, so what lies two rounds back can go."""
        self.store.set(f"{self._round}/{self.rank}", json.dumps(mine))
        ranks = range(self.setup.interface.world_size)
        found = [json.loads(self.store.get(f"{self._round}/{rank}")) for rank in ranks]
        if self._round >= 2:
            self.store.delete_key(f"{self._round - 2}/{self.rank}")
        self._round += 1
        return found

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.session.close()


def _store() -> dist.Store:
    """The store of the script's own process group where it has one, else that of torchrun."""
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    store, _, _ = next(iter(rendezvous("env://")))
    return store


def _error_of(device: int, failure: dict[str, Any]) -> PenstockError:
    kind = getattr(errors, failure["type"], None)
    if isinstance(kind, type) and issubclass(kind, PenstockError) and kind is not WorkerError:
        found = kind(failure["message"])
        vars(found).update(failure["details"])
        return found
    return WorkerError(failure["message"], device=device, line=failure["line"], remote=failure["traceback"])
