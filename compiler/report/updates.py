"""Lines on the updates of a plan's stages: their place, and how an update goes over the memory of a stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...ir import ops
from ...ir.machine.hardware import Hardware
from ...ir.program import Program
from ...runtime.accelerator import num_gpus
from ...runtime.optimizer.spec import OptimizerSpec
from ...runtime.optimizer.tiles import is_fused, lacks_for_tiles


def update_lines(programs: Sequence[Program], hardware: Hardware, optimizer: OptimizerSpec) -> list[str]:
    """For hosts and for GPUs: how many stages are updated there, and how."""
    found: dict[str, set[str]] = {}
    for program in programs:
        kind = hardware.devices[program.device].kind
        for node in program.ops():
            if node.target is ops.step:
                on_host = kind == "cpu" or node.args[1].meta["type"].memory == ops.DRAM  # type: ignore[union-attr]
                found.setdefault("host" if on_host else "GPU", set()).add(str(node.args[0]))
    threads = hardware.hosts[0].optimizer_threads
    ways = {"host": way_on_host, "GPU": way_on_gpu}
    return [
        f"{len(stages)} on the {where}"
        + ("" if threads is None or where == "GPU" else f", whose fastest number of threads is {threads}")
        + f": {ways[where](optimizer)}"
        for where, stages in found.items()
    ]


def way_on_host(spec: OptimizerSpec) -> str:
    """The way in which each class of optimizer steps on a host, and why not in tiles if it does not."""
    lacks = {spec.class_of(index)[0]: lacks_for_tiles(spec, index) for index in range(len(spec.all_groups))}
    usual = "in one pass over memory, in tiles where anything is converted"
    return "; ".join(f"{_name(path)} {f'by torch as it is, as {why}' if why else usual}" for path, why in lacks.items())


def way_on_gpu(spec: OptimizerSpec) -> str:
    """The way in which each class of optimizer steps on a GPU; without a GPU here to try, what depends on it."""
    ways = []
    for index in range(len(spec.all_groups)):
        name = _name(spec.class_of(index)[0])
        if num_gpus() == 0:
            ways.append(f"{name} by a fused kernel of torch where it has one for the GPU")
        elif is_fused(spec, index, torch.device("cuda")):
            ways.append(f"{name} by a fused kernel of torch")
        else:
            ways.append(f"{name} by torch as it is, as it has no fused kernel here")
    return "; ".join(dict.fromkeys(ways))


def _name(path: str) -> str:
    return path.rpartition(":")[2]
