"""Checkpoints that are written while training goes on: `job.save(directory, wait=False)`.

Between two steps each device copies what the next step changes (`runtime/stage/saver.py`); its own thread writes the
files. A thread of the script waits for all of them and publishes the checkpoint as `save` does: whole or not at all.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ...ir.errors import CheckpointError, NoRoomForCopy, PenstockError, error_from_data
from ...ir.program import Interface
from ...ir.units import format_bytes
from ...runtime.processes.commands import STAGE_SEPARATOR, Tensors, pack_state, shard_record
from ...runtime.processes.driver import Driver
from ...runtime.state import checkpoint
from ...runtime.state.base_identity import BaseIdentity
from ...runtime.state.manifest import RunPosition
from ...runtime.state.plain_json import decode, encode
from .run import JobRun
from .state import bytes_on_disk, progress_of, save_checkpoint, whole_state


class BackgroundSave:
    """A checkpoint that is being written while training goes on; `Job.save` with `wait=False` makes it.

    Begins in the constructor, between two steps: the devices have copied their state when it returns. Raises
    `NoRoomForCopy` where DRAM lacks the room, and `CheckpointError` for a directory that cannot be written.
    """

    def __init__(
        self,
        number: int,
        driver: Driver,
        interface: Interface,
        ties: Mapping[str, str],
        directory: str | Path,
        data: Mapping[str, Any],
        base: BaseIdentity | None,
    ):
        self.directory = Path(directory)
        self._number, self._driver, self._ties, self._base = number, driver, dict(ties), base
        self._over, self._error, self._waited_s, self._told = threading.Event(), "", 0.0, False
        self._path: Path | None = None
        began_s = time.perf_counter()
        requests: dict[int, tuple[dict[str, Any], Tensors]]
        own = {device: list[str]() for device in range(interface.world_size)}
        for stage, device in driver.setup.stage_devices.items():
            own[device].append(stage)
        holders = {stage: driver.setup.spread.get(stage, [device]) for device in own for stage in own[device]}
        asked = {device: [stage for stage, who in holders.items() if device in who] for device in own}
        requests = {device: ({"stages": asked[device], "with_frozen": base is None}, {}) for device in own}
        answers = driver.call_all("need_of_save", requests)
        self._require_room(answers)
        found = {stage: need for answer in answers for stage, need in answer["needs"].items()}
        groups = {name: value for need in found.values() for name, value in need["group"].items()}
        schedulers = {name: value for need in found.values() for name, value in (need["scheduler"] or {}).items()}
        self._progress = encode(progress_of(answers[0]["counters"], groups, schedulers, data), "checkpoint")
        need_bytes = bytes_on_disk(interface)
        begun, _ = driver.call("begin_checkpoint", 0, {"directory": str(directory), "need_bytes": need_bytes})
        self._temporary = Path(begun["temporary"])
        try:
            requests = {device: self._request(interface, stages) for device, stages in own.items()}
            driver.call_all("begin_save", requests)
        except BaseException:
            self._abort()
            raise
        self._copied_s = time.perf_counter() - began_s
        threading.Thread(target=self._finish, name="penstock-publish").start()  # the interpreter waits for it

    @property
    def done(self) -> bool:
        """Whether the checkpoint is there, or has failed."""
        return self._over.is_set()

    @property
    def longest_stall_s(self) -> float:
        """The longest pause of training for this save, as far as is known until `done`: the copy between two steps, or
        an update's wait until the state that it replaces on SSD has been read."""
        return max(self._copied_s, self._waited_s)

    def wait(self, timeout_s: float | None = None) -> Path:
        """The checkpoint's path, as soon as it is there. Raises `CheckpointError` where it has failed, and, without
        any effect on the save, `TimeoutError` after `timeout_s`."""
        if not self._over.wait(timeout_s):
            raise TimeoutError(f"{self.directory}: is not written after {timeout_s:g} s; it goes on")
        self._told, self._driver.save_failed_here = True, False
        if self._path is None:
            raise CheckpointError(self._error)
        return self._path

    def finish(self) -> None:
        """Wait for its end. Raises `CheckpointError` where it has failed and `wait` has not said so."""
        self._over.wait()
        if not self._told:
            self.wait()

    # --- its parts

    def _require_room(self, answers: list[dict[str, Any]]) -> None:
        """Raise `NoRoomForCopy` where a host's DRAM has no room for the copies beside what the plan takes."""
        setup, wanted = self._driver.setup, Counter[int]()
        for device, answer in enumerate(answers):
            host = setup.hardware.devices[device].host
            wanted[host] += max((need["piece_bytes"] for need in answer["needs"].values()), default=0)
            for stage, need in answer["needs"].items():  # of a sharded stage its first device gets all shards
                first = setup.stage_devices[stage]
                wanted[setup.hardware.devices[first].host] += need["bytes"]
        for host, need_bytes in wanted.items():
            free_bytes = setup.free_dram_bytes(host)
            if need_bytes > free_bytes:
                raise NoRoomForCopy(
                    f"dram{host}: a save in the background copies {format_bytes(need_bytes)} ({need_bytes} bytes) of "
                    f"state, and the plan leaves {format_bytes(max(free_bytes, 0))}: {need_bytes - free_bytes} bytes "
                    "are missing. job.save(directory, wait=True) needs no copy; a plan for less DRAM (with_(dram=...) "
                    "of the hardware) would leave room",
                    need_bytes - free_bytes,
                )

    def _request(self, interface: Interface, stages: list[str]) -> tuple[dict[str, Any], Tensors]:
        """The arguments of `begin_save` for the device that writes these stages."""
        given: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        for stage in stages:
            if stage in self._driver.setup.spread:
                given[stage], found = pack_state(whole_state(self._driver, interface.stages[stage]))
                tensors |= {f"{stage}{STAGE_SEPARATOR}{name}": tensor for name, tensor in found.items()}
        args = {
            "number": self._number,
            "temporary": str(self._temporary),
            "stages": stages,
            "given": given,
            "ties": self._ties,
            "with_frozen": self._base is None,
        }
        return args, tensors

    def _finish(self) -> None:
        """Wait for the devices and publish; the thread's function."""
        try:
            self._path = Path(self._driver.publish(self._number, self._commit))
        except Exception as error:  # for the script, whose next call raises it
            self._abort()
            self._error = (
                f"{self.directory}: the save in the background has failed; what was saved there before is untouched. "
                f"{'' if isinstance(error, PenstockError) else f'{type(error).__name__}: '}{error}"
            )
            self._driver.save_failed_here = True
        self._over.set()

    def _commit(self) -> str:
        answers = self._driver.await_saved(self._number)
        for device, answer in enumerate(answers):
            if "error" in answer:
                raise error_from_data(answer["error"], f"device {device}", device)
        self._waited_s = max(answer["waited_s"] for answer in answers)
        shards = [shard_record(row) for answer in answers for row in answer["records"]]
        progress = RunPosition(**decode(self._progress, "progress"))
        done = checkpoint.commit(self._temporary, self.directory, shards, progress, self._ties, self._base)
        return str(done)

    def _abort(self) -> None:
        if self._driver.is_main:
            checkpoint.abort(self._temporary)


class Saves:
    """The saves of a job, of which the last may still be under way in the background."""

    def __init__(self, run: JobRun, ties: Mapping[str, str]):
        self.run, self.ties = run, ties
        self._last: BackgroundSave | None = None
        self._count = 0  # of saves in the background, since the job began

    def save(self, directory: str | Path, data: Mapping[str, Any], wait: bool) -> Path | BackgroundSave:
        """Write a checkpoint, once the save before has ended."""
        self.wait()
        driver, state, interface = self.run.driver, self.run.feed.state(data), self.run.folder.interface
        if wait:
            return save_checkpoint(driver, interface, self.ties, directory, state, self.run.base)
        self._count += 1
        self._last = BackgroundSave(self._count, driver, interface, self.ties, directory, state, self.run.base)
        return self._last

    def wait(self, only_warn: bool = False) -> None:
        """Wait for the save in the background. Raises what went wrong with it, unless `wait()` has; only warns where
        something else went wrong before."""
        if self._last is None:
            return
        save, self._last = self._last, None
        try:
            save.finish()
        except CheckpointError as error:
            if not (only_warn or self.run.broken):
                raise
            warnings.warn(str(error), stacklevel=4)

    def tell_failed(self) -> None:
        """Raise what went wrong with the save in the background; under torchrun on all ranks at the same step."""
        if self.run.live_driver is not None and self.run.live_driver.save_failed:
            self.wait()
