"""The memories of one device's session: accounts with budgets, an arena in each memory, and the files on SSD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...ir import ops
from ...ir.errors import HardwareError
from ...ir.machine.hardware import Device, Hardware
from ...ir.program import Account
from ..ssd.file import SsdFile
from ..ssd.folder import SsdFolder
from ..stage.arena import Arena, pages
from .prepare import Issues

LASTING = "all steps' "  # no value of a program has such a name


class SessionMemory:
    """What the plans of a session's functions ("step", "evaluate") need, taken at the start.

    `host_device` is where DRAM's arena lies. Raises `BudgetExceeded` where what persists is already too much.
    """

    def __init__(
        self,
        spec: Device,
        hardware: Hardware,
        dram_budget_bytes: int,
        plans: Mapping[str, Issues],
        device: torch.device,
        host_device: torch.device | None = None,
    ):
        self.spec, self.hardware, self.plans = spec, hardware, plans
        self.accounts = {
            ops.DEVICE: Account(spec.name, spec.budget_bytes),
            ops.DRAM: Account(f"dram{spec.host}", dram_budget_bytes),
        }
        host_device = torch.device("cpu") if host_device is None else host_device
        self.device_arena = Arena(device)
        self.dram_arena = Arena(host_device, on_pages=True, pinned=device.type == "cuda")
        self.folder: SsdFolder | None = None
        self.ssd_arena: SsdFile | None = None
        for memory in (ops.DEVICE, ops.DRAM):
            for what, num_bytes in plans["step"].persistent.parts(memory).items():
                if num_bytes:
                    self.accounts[memory].take(f"{LASTING}{what}", num_bytes, "the start")
        self.grow(ops.DEVICE, plans["step"].arenas[ops.DEVICE])
        self.grow(ops.DRAM, max(plan.arenas[ops.DRAM] for plan in plans.values()))

    def grow(self, memory: str, num_bytes: int) -> None:
        """Let an arena be at least so large; only between steps."""
        arena, account = (self.device_arena if memory == ops.DEVICE else self.dram_arena), self.accounts[memory]
        if num_bytes > arena.bytes:
            if arena.bytes:
                account.give(f"{LASTING}arena")
            account.take(f"{LASTING}arena", num_bytes, "the start")
            arena.ensure(num_bytes)

    def take_files(self, directories: Sequence[str], verify: bool) -> None:
        """Take the space for activations on SSD, and open the folder in which each stage takes its own.

        Raises `HardwareError` for directories that are missing or cannot be used, `DoesNotFit` for lack of room.
        """
        arena_bytes = max(plan.arenas[ops.SSD] for plan in self.plans.values())
        kinds = self.plans["step"].persistent.ssd
        lasting = {what: max(plan.persistent.ssd[what] for plan in self.plans.values()) for what in kinds}
        if not arena_bytes and not any(lasting.values()):
            return
        name = f"ssd{self.spec.host}"
        account = self.accounts[ops.SSD] = Account(name, self.hardware.budget_bytes(name))
        for what, num_bytes in {**lasting, "arena": arena_bytes}.items():
            if num_bytes:
                account.take(f"{LASTING}{what}", num_bytes, "the start")
        self.open_files(directories, verify, arena_bytes)

    def open_files(self, directories: Sequence[str], verify: bool, arena_bytes: int) -> None:
        if not directories:
            raise HardwareError(
                f"the plan keeps a part of the model on ssd{self.spec.host}, but no directory is known; "
                'pass ssd_dirs=["/mnt/nvme0"], one directory per SSD, or name them in the hardware document'
            )
        self.folder = SsdFolder(directories, self.spec.name, verify=verify)
        if arena_bytes:
            self.ssd_arena = self.folder.reserve("activations", arena_bytes)

    def staging(self, num_bytes: int) -> Tensor:
        """The first part of DRAM's arena, in which nothing lies between steps."""
        if num_bytes > self.dram_arena.bytes:
            return pages(num_bytes)
        return self.dram_arena.range(0, num_bytes)

    def close(self) -> None:
        """Remove the files."""
        if self.folder is not None:
            self.folder.close()
