"""Checks before a run starts that this machine is what the plan was made for. Planning itself needs none of it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from ...ir import ops
from ...ir.errors import HardwareError, PlanError
from ...ir.machine.hardware import Hardware
from ...ir.program import Program, bind, profile_memory
from ...ir.units import format_bytes, short_bytes
from ...runtime.accelerator import num_gpus
from ...runtime.measure.detect import ram_bytes
from ...runtime.processes.torchrun import TorchrunDriver
from ..folder import Folder

USABLE = 0.8  # part of the machine's memory that the advice gives: the system and the processes need the rest


def plain_directories(ssd_dirs: Sequence[str | Path] | None) -> list[str]:
    """The directories as absolute paths. Raises `PlanError` for anything but a list of paths."""
    if ssd_dirs is None:
        return []
    if isinstance(ssd_dirs, (str, Path)) or not all(isinstance(path, (str, Path)) and str(path) for path in ssd_dirs):
        raise PlanError(f'ssd_dirs={ssd_dirs!r}; it is a list of directories, one per SSD, such as ["/mnt/nvme0"]')
    return [os.path.abspath(path) for path in ssd_dirs]


def require_machine(hardware: Hardware, programs: Sequence[Program], ssd_dirs: Sequence[str] = ()) -> None:
    """Raise `HardwareError` where a run cannot be held to the plan here: GPUs, DRAM, directories for files."""
    programs = bind(programs)
    require_gpus(hardware, len(programs))
    host = hardware.devices[own_device()].host
    _require_dram(hardware, host)
    if not (ssd_dirs or hardware.ssd_directories(host)) and uses_ssd(hardware, programs, host):
        raise HardwareError(
            f"the plan keeps a part of the model on ssd{host}, but no directory is known for its files: give "
            'ssd_dirs=["/mnt/nvme0"], one directory per SSD, or '
            f"write `directory` under hosts[{host}].ssds of the hardware document"
        )


def require_kind_of_machine(hardware: Hardware) -> None:
    """Raise `HardwareError` where no plan for this hardware runs here: without a GPU, or with less DRAM. A plan may use
    fewer GPUs than there are; `require_machine` counts them."""
    require_gpus(hardware)
    if own_device() < len(hardware.devices):
        _require_dram(hardware, hardware.devices[own_device()].host)


def require_constants(folder: Folder) -> None:
    """Raise `PlanError` where the model uses an unregistered tensor that has no value, as it was made on meta."""
    used = {row.name for spec in folder.interface.stages.values() for row in spec.constants}
    missing = sorted(used - folder.constants.keys())
    if missing:
        raise PlanError(
            f"the model uses {', '.join(missing)}, tensors on the meta device that it does not register: they are in "
            "no file of weights. Make them under torch.device('cpu'), or register them (register_buffer)"
        )


def own_device() -> int:
    """The device that this process runs: under torchrun its rank's device, else the first device."""
    return int(os.environ["RANK"]) if TorchrunDriver.is_present() else 0


def uses_ssd(hardware: Hardware, programs: Sequence[Program], host: int) -> bool:
    own = (program for program in programs if hardware.devices[program.device].host == host)
    return any(profile_memory(program).peak_bytes[ops.SSD] for program in own)


def require_gpus(hardware: Hardware, num_devices: int = 1) -> None:
    """Raise `HardwareError` where the first devices are GPUs and this machine has fewer; any plan needs one."""
    per_host = Counter(device.host for device in hardware.devices[:num_devices] if device.kind == "cuda")
    wanted, present = max(per_host.values(), default=0), num_gpus()
    if TorchrunDriver.is_present():
        wanted = min(wanted, 1)  # a rank may see its own GPU only
    if wanted > present:
        raise HardwareError(
            f"{hardware.name}: the plan needs {wanted} GPU{'s' * (wanted > 1)} on a host, torch {torch.__version__} "
            f"sees {present} here. It can be planned and simulated (`penstock plan`), not run. hardware='auto' is "
            "this machine, and hardware='cpu' has CPU devices"
        )


def _require_dram(hardware: Hardware, host: int) -> None:
    budget_bytes, here_bytes = hardware.dram_budget_bytes(host) + hardware.shared_bytes(host), ram_bytes()
    if budget_bytes > here_bytes:
        most_bytes = int(USABLE * here_bytes / hardware.hosts[host].dram_usable_fraction)
        nearest = short_bytes(most_bytes, up=False)
        raise HardwareError(
            f"dram{host}: the plan may use {format_bytes(budget_bytes)}, this machine has {format_bytes(here_bytes)} "
            f'in all. Compile for what is here: hardware.with_(dram="{nearest}"), or --set dram={nearest}'
        )
