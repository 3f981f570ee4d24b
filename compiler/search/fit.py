"""Compares every memory's peak with its budget, before anything starts. nearest.py finds what would fit."""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from ...ir import ops
from ...ir.errors import DoesNotFit
from ...ir.machine.hardware import Hardware
from ...ir.precision import Precision
from ...ir.program import MemoryProfile, ParamSpec, print_node, profile_memory, shown
from ...ir.units import format_bytes
from ...passes.draft import Draft, Options
from ...passes.staying import choose_staying, mark_staying
from .host_memory import MemoryNeed, host_needs, host_of, tier_of


def check_fit(draft: Draft) -> None:
    """Raise `DoesNotFit` naming the memory, what fills it and the missing bytes."""
    programs, hardware = shown(draft.programs, draft.machine)
    for program in programs:
        device = hardware.devices[program.device]
        profile = profile_memory(program)
        peak, budget = profile.peak_bytes[ops.DEVICE], device.budget_bytes
        if peak > budget:
            raise DoesNotFit(
                _device_text(draft, device.name, profile, budget), memory=device.name, missing_bytes=peak - budget
            )
    for need in host_needs(programs, hardware):
        budget = _budget_bytes(hardware, need.memory)
        if need.peak_bytes > budget:
            missing = need.peak_bytes - budget
            raise DoesNotFit(_host_text(draft, need, budget), memory=need.memory, missing_bytes=missing)


def _budget_bytes(hardware: Hardware, memory: str) -> int:
    host = host_of(memory)
    return hardware.dram_budget_bytes(host) if tier_of(memory) == ops.DRAM else hardware.ssd_budget_bytes(host)


def check_lasting(draft: Draft, staying: bool = True, resident: bool = False) -> None:
    """Raise `DoesNotFit` where what stages keep across steps exceeds their hosts' DRAM, before any program exists.

    It is a lower bound for plans without SSDs whose stages have one device each (of shared stages, a device counts its
    part): a device whose stages do not fit together has all of them in DRAM, but what is `staying` of them, and what
    the device has room for, where some may be `resident`.
    """
    hardware = draft.lane_hardware
    parts: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    room: dict[int, int] = defaultdict(int)
    specs = mark_staying(draft, choose_staying(draft) if staying else [])
    for index, device in enumerate(hardware.devices):
        whole = [spec for spec, at in zip(specs, draft.devices) if at == index]
        own = [spec.shard(draft.mesh.shards) for spec in whole] if draft.mesh.shards > 1 else whole
        lasts = [draft.options.lasting(spec.weight_bytes, () if spec.staying else spec.params) for spec in own]
        stays_bytes = sum(spec.staying_bytes + draft.options.optimizer_bytes(spec.staying) for spec in own)
        if sum(map(sum, lasts)) + stays_bytes + sum(spec.grad_bytes for spec in own) > device.budget_bytes:
            room[device.host] += device.budget_bytes if resident else 0
            for lasting in lasts:
                for what, num_bytes in lasting._asdict().items():
                    parts[device.host][what] += num_bytes
    for host, held in parts.items():
        missing = sum(held.values()) - hardware.dram_budget_bytes(host) - room[host]
        if missing > 0:
            need = MemoryNeed(f"dram{host}", dict(held))
            text = _host_text(draft, need, hardware.dram_budget_bytes(host))
            raise DoesNotFit(text, memory=need.memory, missing_bytes=missing)


def check_states_fit(model: nn.Module, hardware: Hardware, options: Options) -> int:
    """Raise `DoesNotFit` where what lasts between steps exceeds all memories together: no plan could help.

    A lower bound that needs no trace: weights, masters and optimizer states, each tensor once, whose bytes it returns.
    """
    width = Precision.of(options.precision).dtype.itemsize
    kind = str(Precision.of(options.precision).dtype).removeprefix("torch.")
    params = [ParamSpec(name, tuple(p.shape), kind, p.requires_grad) for name, p in model.named_parameters()]
    sizes = (p.numel() * (width if p.is_floating_point() else p.element_size()) for p in model.parameters())
    lasting = options.lasting(sum(sizes), params)
    hosts = range(len(hardware.hosts))
    budgets = {f"dram{host}": hardware.dram_budget_bytes(host) for host in hosts}
    need = sum(lasting)
    beyond = need - sum(budgets.values()) - sum(device.budget_bytes for device in hardware.devices)
    budgets |= {f"ssd{host}": hardware.ssd_budget_bytes(host) for host in hosts if hardware.hosts[host].ssds}
    missing = beyond - sum(hardware.ssd_budget_bytes(host) for host in hosts)
    if missing <= 0:
        return need
    parts = zip(("weights", "masters", "optimizer states"), lasting, strict=True)
    text = ", ".join(f"{what} {format_bytes(n)}" for what, n in parts if n)
    memories = ", ".join(f"{memory} {format_bytes(budget)} usable" for memory, budget in budgets.items())
    raise DoesNotFit(
        f"what lasts between steps needs {format_bytes(need)} ({text}); there is {memories}, and "
        f"{format_bytes(sum(device.budget_bytes for device in hardware.devices))} on the devices: missing "
        f"{format_bytes(missing)}. An optimizer with fewer states needs less (now "
        f"{options.state_bytes_per_param:g} bytes per parameter).",
        memory="ssd0" if "ssd0" in budgets else "dram0",
        missing_bytes=missing,
    )


def _device_text(draft: Draft, name: str, profile: MemoryProfile, budget: int) -> str:
    peak = profile.peak_bytes[ops.DEVICE]
    at = profile.peak_at[ops.DEVICE]
    held = {**profile.persistent.device, "fetched weights": profile.arena_bytes}
    parts = ", ".join(f"{what} {format_bytes(n)}" for what, n in held.items() if n)
    where = f" at `{print_node(at)}`" if at is not None else ""
    count = draft.programs[0].interface.total_micro_batches
    return (
        f"{name} has {format_bytes(budget)} and needs {format_bytes(peak)}, missing "
        f"{format_bytes(peak - budget)}{where}; of that {parts or 'no weights'}. With {len(draft.stages)} stages and "
        f"{count} micro-batches."
    )


def _host_text(draft: Draft, need: MemoryNeed, budget: int) -> str:
    text = ", ".join(f"{what} {format_bytes(num_bytes)}" for what, num_bytes in need.parts.items()) or "nothing"
    if need.loading_bytes > need.step_bytes:
        text = f"while weights are loaded {format_bytes(need.loading_bytes)}, in a step {text}"
    there = f"has {format_bytes(budget)} usable" if budget else "is not there"
    return (
        f"{need.memory} {there} and needs {format_bytes(need.peak_bytes)}, missing "
        f"{format_bytes(need.peak_bytes - budget)}: {text}. An optimizer with fewer states needs less (now "
        f"{draft.options.state_bytes_per_param:g} bytes per parameter)."
    )
