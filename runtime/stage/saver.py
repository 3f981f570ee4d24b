"""Saves of one device in the background: its stages are copied between two steps, and written while steps go on.

Tensors on the device or in DRAM are copied into one buffer in DRAM, which stays for the next save. Tensors on SSD are
read from there piece by piece; an update that would write over it waits until it has been read.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...ir.errors import error_to_data
from ...ir.program import PAGE, Account, StageSpec, aligned
from ..accelerator import settle
from ..state.checkpoint import names_to_save, write_shard
from .arena import allocate, pages
from .store import StagePart, StageStore

PIECE_BYTES = 16 << 20  # at most, of a file on SSD that is read at once
Tell = Callable[[int, dict[str, Any]], None]


class Saver:
    """Copies and writes the stages of `stores`; `specs` are the whole stages. The copy is charged to `account`, DRAM's,
    as `label`.

    `tell(number, answer)` is called in the writing thread when the save `number` is over here: "records" are those of
    `write_shard`, "waited_s" says how long a step has waited for it at most; "error" says why it failed.
    """

    def __init__(
        self,
        stores: Mapping[str, StageStore],
        specs: Mapping[str, StageSpec],
        device: torch.device,
        account: Account,
        label: str,
    ):
        self.stores, self.specs, self.device, self.account, self.label = stores, specs, device, account, label
        self.tell: Tell = lambda number, answer: None
        self._room = self._piece = allocate(0, torch.device("cpu"))
        self._thread: threading.Thread | None = None

    def needs(self, stage: str, with_frozen: bool) -> dict[str, Any]:
        """The DRAM that a save needs for a stage: "bytes" of its copy, and "piece_bytes", once a device, where it is
        read from SSD. And what a manifest says of its optimizer: "group" and "scheduler"."""
        state = self.stores[stage].state_on_ssd(self._piece)
        found = state.optimizer or {"group": {}, "scheduler": {}}
        return {
            "bytes": _copied_bytes(state, names_to_save(self.specs[stage], with_frozen)),
            "piece_bytes": piece_bytes([self.stores[stage]]),
            "group": copy.deepcopy(found["group"]),
            "scheduler": copy.deepcopy(found["scheduler"]),
        }

    def begin(
        self,
        number: int,
        temporary: Path,
        stages: Sequence[str],
        given: Mapping[str, StagePart],
        ties: Mapping[str, str],
        with_frozen: bool,
    ) -> None:
        """Copy these stages, and let a thread write them into the unfinished checkpoint `temporary`. Between steps.
        `given`: whole stages of which only a shard is here; nothing else may use their tensors."""
        self.close()
        owned = {stage: names_to_save(self.specs[stage], with_frozen) for stage in stages}
        files = [file for stage in stages if stage not in given and (file := self.stores[stage].file) is not None]
        whole = [self.stores[stage] for stage in stages if stage not in given]
        if piece_bytes(whole) > len(self._piece):
            self._piece = pages(piece_bytes(whole))
        states = {stage: self.stores[stage].state_on_ssd(self._piece) for stage in stages if stage not in given}
        self._take(sum(_copied_bytes(state, owned[stage]) for stage, state in states.items()) + len(self._piece))
        offset, copies = 0, dict[str, StagePart]()
        for stage, state in states.items():
            copies[stage], offset = self._copy_state(state, owned[stage], offset)
        settle(self.device)
        for file in files:
            file.hold()
        found = {stage: given.get(stage) or copies[stage] for stage in stages}

        def write() -> None:
            try:
                records = []
                for stage in sorted(found, key=lambda stage: self.stores[stage].file is None):  # steps may wait for SSD
                    state = found[stage]
                    rows = state.optimizer_rows()
                    spec, weights = self.specs[stage], state.weights
                    records.append(write_shard(temporary, spec, weights, state.buffers, rows, ties, with_frozen))
                    file = self.stores[stage].file
                    if file is not None:
                        file.release()
                waited_s = max((file.waited_s for file in files), default=0.0)
                answer = {"records": [asdict(record) for record in records], "waited_s": waited_s}
            except Exception as error:  # for the script, whose next call raises it
                answer = {"error": error_to_data(error)}
            finally:
                for file in files:
                    file.release()
            self.tell(number, answer)

        self._thread = threading.Thread(target=write, name="penstock-save", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for the thread that writes."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _take(self, num_bytes: int) -> None:
        """Make room for a copy of `num_bytes` with the piece that is read from SSD."""
        held_bytes = len(self._room) + len(self._piece)
        if self.label in self.account.live:
            self.account.give(self.label)
        self.account.take(self.label, max(num_bytes, held_bytes), "job.save(wait=False)")
        if num_bytes > held_bytes:
            self._room = allocate(0, torch.device("cpu"))  # give back the old one before the new one is taken
            num_bytes -= len(self._piece)
            self._room = allocate(num_bytes, torch.device("cpu"), pinned=self.device.type == "cuda")

    def _copy_state(self, state: StagePart, owned: set[str], offset: int) -> tuple[StagePart, int]:
        """A state whose tensors are in the buffer from `offset` on, and their end there."""

        def put(value: Any) -> Any:
            nonlocal offset
            if not isinstance(value, Tensor):
                return value  # on SSD
            place = self._room[offset : offset + value.nbytes].view(value.dtype).view(value.shape)
            offset += aligned(value.nbytes)
            return place.copy_(value.detach(), non_blocking=True)

        weights = {name: put(value) for name, value in state.weights.items() if name in owned}
        buffers = {name: put(value) for name, value in state.buffers.items() if name in owned}
        if state.optimizer is None:
            return StagePart(weights, buffers, None), offset
        rows = state.optimizer["states"].items()
        states = {name: {key: put(value) for key, value in row.items()} for name, row in rows if name in owned}
        scalars = copy.deepcopy(state.optimizer["scalars"])
        return StagePart(weights, buffers, {"states": states, "scalars": scalars}), offset


def piece_bytes(stores: Iterable[StageStore]) -> int:
    """The bytes that are read from SSD at once of these stages: whole pages, and no more than a file has."""
    files = [store.file.num_bytes for store in stores if store.file is not None]
    return aligned(min(PIECE_BYTES, max(files, default=0)), PAGE)


def _copied_bytes(state: StagePart, owned: set[str]) -> int:
    """The bytes that `Saver._copy_state` takes."""
    rows = [] if state.optimizer is None else [row for name, row in state.optimizer["states"].items() if name in owned]
    values = [value for kind in (state.weights, state.buffers) for name, value in kind.items() if name in owned]
    values += [value for row in rows for value in row.values()]
    return sum(aligned(value.nbytes) for value in values if isinstance(value, Tensor))
