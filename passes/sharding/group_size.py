"""The number of devices that share a stage's weights: as few as can hold them (MiCS 3.2).

The fewer members a group has, the less goes over slow links: a group inside one host gathers at the host's speed. What
p devices hold is estimated from the blocks, before stages are cut; the memory of the programs is verified later.
"""

from __future__ import annotations

from ...ir.machine.hardware import Hardware
from ...ir.precision import Precision
from ..draft import Draft

WHOLE = 4  # blocks that are whole at a time: the one that runs, the next, what is staged of it, and gradients


def smallest_group(draft: Draft, depth: int) -> int:
    """The smallest group size, of those that divide the machine's devices equally, with which a device holds its part
    of weights, gradients, masters and optimizer states beside what runs; where there is none, the smallest with which
    the hosts' DRAM holds the parts; else the largest."""
    able = _sizes(draft.machine, depth)
    lasting, running = _lasting_bytes(draft), _running_bytes(draft, depth)
    budget = min(device.budget_bytes for device in draft.machine.devices)
    on_device = (p for p in able if p * depth * (budget - running) >= lasting)
    in_dram = (p for p in able if _dram_holds(draft.machine, lasting / (p * depth)))
    return next(on_device, None) or next(in_dram, able[-1])


def _sizes(hardware: Hardware, depth: int) -> list[int]:
    """The group sizes that divide the lanes, from 2 on, and part no host or rack but into equal groups, if there are
    such; 1 where there is only one lane."""
    lanes = max(1, hardware.num_devices // depth)
    sizes = [p for p in range(2, lanes + 1) if lanes % p == 0] or [1]
    here = [device.host for device in hardware.devices].count(0)
    units = [here, here * hardware.racks.count(hardware.racks[0])] if hardware.racks else [here]
    whole = [p for p in sizes if all(unit % (p * depth) == 0 or (p * depth) % unit == 0 for unit in units)]
    return whole or sizes


def _dram_holds(hardware: Hardware, part_bytes: float) -> bool:
    for host in range(len(hardware.hosts)):
        devices = sum(device.host == host for device in hardware.devices)
        if devices * part_bytes > hardware.dram_budget_bytes(host):
            return False
    return True


def _lasting_bytes(draft: Draft) -> float:
    """Bytes of one model: weights in the dtype of the computation, gradients, masters, optimizer states."""
    ties = draft.graph.ties()
    own = [p for name, p in draft.graph.parameters().items() if ties.get(name, name) == name]
    trained = sum(p.numel() for p in own if p.requires_grad)
    size = Precision.of(draft.options.precision).dtype.itemsize
    gradient = size if draft.graph.sum_dtype is None else draft.graph.sum_dtype.itemsize
    return size * sum(p.numel() for p in own) + (gradient + draft.options.optimizer_bytes_per_param) * trained


def _running_bytes(draft: Draft, depth: int) -> int:
    """Bytes of the largest block while it runs, and of the inputs that a device's blocks hold where stages are
    rematerialised."""
    whole = max(block.param_bytes for block in draft.blocks)
    working = max(block.cost.kept_bytes + block.cost.backward_peak_bytes for block in draft.blocks)
    between = max(block.cost.forward_peak_bytes - block.cost.kept_bytes for block in draft.blocks)
    return WHOLE * whole + working + between * -(-len(draft.blocks) // depth)
