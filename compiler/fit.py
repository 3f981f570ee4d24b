"""Will it fit: every memory's peak against its budget, before anything starts. What would: see nearest.py."""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from ..passes.base import Draft, Options
from ..passes.stages import COMPUTE_DTYPES
from ..runtime import ops
from ..runtime.errors import DoesNotFit
from ..runtime.hardware import Hardware
from ..runtime.memory import MemoryProfile, profile_memory
from ..runtime.program import Program, dtype_bytes
from ..runtime.text import print_node
from ..runtime.units import format_bytes


def check_fit(draft: Draft) -> None:
    """Raise `DoesNotFit` naming the memory, what fills it and the missing bytes."""
    hardware = draft.hardware
    dram: dict[int, list[MemoryProfile]] = defaultdict(list)
    for program in draft.programs:
        device = hardware.devices[program.device]
        profile = profile_memory(program)
        dram[device.host].append(profile)
        peak, budget = profile.peak_bytes[ops.DEVICE], device.budget_bytes
        if peak > budget:
            raise DoesNotFit(
                _device_text(draft, program, profile, budget), memory=device.name, missing_bytes=peak - budget
            )
    for host, profiles in dram.items():
        need = sum(p.peak_bytes[ops.DRAM] for p in profiles)
        budget = hardware.dram_budget_bytes(host)
        if need > budget:
            raise DoesNotFit(
                _dram_text(draft, host, profiles, need, budget), memory=f"dram{host}", missing_bytes=need - budget
            )


def check_states_fit(model: nn.Module, hardware: Hardware, options: Options) -> None:
    """Raise `DoesNotFit` where what lasts between steps exceeds all memories together: no plan could help.

    A lower bound that needs no trace: weights, masters and optimizer states, each tensor once.
    """
    width = dtype_bytes(COMPUTE_DTYPES[options.precision])
    params = {id(p): p for p in model.parameters()}.values()
    trained = sum(p.numel() for p in params if p.requires_grad)
    parts = {
        "weights": width * sum(p.numel() for p in params),
        "masters": 0 if options.precision == "fp32" else 4 * trained,
        "optimizer states": int(options.state_bytes_per_param * trained),
    }
    drams = [hardware.dram_budget_bytes(host) for host in range(len(hardware.hosts))]
    need = sum(parts.values())
    missing = need - sum(drams) - sum(device.budget_bytes for device in hardware.devices)
    if missing <= 0:
        return
    text = ", ".join(f"{what} {format_bytes(n)}" for what, n in parts.items() if n)
    memories = ", ".join(f"dram{i} {format_bytes(budget)} usable" for i, budget in enumerate(drams))
    raise DoesNotFit(
        f"what lasts between steps needs {format_bytes(need)} ({text}); there is {memories}, and "
        f"{format_bytes(sum(device.budget_bytes for device in hardware.devices))} on the devices: missing "
        f"{format_bytes(missing)}. An optimizer with fewer states needs less (now "
        f"{options.state_bytes_per_param:g} bytes per parameter).",
        memory="dram0",
        missing_bytes=missing,
    )


def _device_text(draft: Draft, program: Program, profile: MemoryProfile, budget: int) -> str:
    device = draft.hardware.devices[program.device]
    peak = profile.peak_bytes[ops.DEVICE]
    at = profile.peak_at[ops.DEVICE]
    held = {**profile.persistent.device, "fetched weights": profile.arena_bytes}
    parts = ", ".join(f"{what} {format_bytes(n)}" for what, n in held.items() if n)
    where = f" at `{print_node(at)}`" if at is not None else ""
    count = draft.options.micro_batches
    return (
        f"{device.name} has {format_bytes(budget)} and needs {format_bytes(peak)}, missing "
        f"{format_bytes(peak - budget)}{where}; of that {parts or 'no weights'}. With {len(draft.stages)} stages and "
        f"{count} micro-batches."
    )


def _dram_text(draft: Draft, host: int, profiles: list[MemoryProfile], need: int, budget: int) -> str:
    parts: dict[str, int] = defaultdict(int)
    for profile in profiles:
        for what, num_bytes in profile.persistent.dram.items():
            parts[what] += num_bytes
    parts["gradients on their way"] = need - sum(parts.values())
    text = ", ".join(f"{what} {format_bytes(n)}" for what, n in parts.items() if n)
    return (
        f"dram{host} has {format_bytes(budget)} usable and needs {format_bytes(need)}, missing "
        f"{format_bytes(need - budget)}: {text}. An optimizer with fewer states needs less (now "
        f"{draft.options.state_bytes_per_param:g} bytes per parameter)."
    )
