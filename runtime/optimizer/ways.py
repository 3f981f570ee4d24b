"""How an optimizer's step goes over the memory of its parameters, as a person reads it."""

from __future__ import annotations

import torch

from .importable import resolve
from .probe import FAILURES, tiny
from .spec import OptimizerSpec
from .tiles import CLASSES


def steps_in_tiles(spec: OptimizerSpec) -> bool:
    """Whether all groups are stepped on a host in tiles (see `tiles.py`)."""
    return all(_lacks_for_tiles(spec, index) == "" for index in range(len(spec.all_groups)))


def way_on_host(spec: OptimizerSpec) -> str:
    """How each class of optimizer steps on a host, and why not in tiles if it does not."""
    lacks = {spec.class_of(index)[0]: _lacks_for_tiles(spec, index) for index in range(len(spec.all_groups))}
    ways = [
        f"{_name(path)} "
        + (
            "in one pass over memory, in tiles where anything is converted"
            if not why
            else f"by torch as it is, as {why}"
        )
        for path, why in lacks.items()
    ]
    return "; ".join(ways)


def way_on_gpu(spec: OptimizerSpec) -> str:
    """How each class of optimizer steps on a GPU. Without a GPU here to try, this says what depends on it."""
    ways = []
    for index in range(len(spec.all_groups)):
        path, name = spec.class_of(index)[0], _name(spec.class_of(index)[0])
        if not torch.cuda.is_available():
            ways.append(f"{name} by a fused kernel of torch where it has one for the GPU")
        elif _fused(spec, index, torch.device("cuda")):
            ways.append(f"{name} by a fused kernel of torch")
        else:
            ways.append(f"{name} by torch as it is, as {path} has no fused kernel here")
    return "; ".join(dict.fromkeys(ways))


def _lacks_for_tiles(spec: OptimizerSpec, index: int) -> str:
    """Why a group is not stepped in tiles; "" if it is."""
    path = spec.class_of(index)[0]
    if resolve(path) not in CLASSES:
        return "only " + ", ".join(cls.__name__ for cls in CLASSES) + " can be divided"
    return "" if _fused(spec, index, torch.device("cpu")) else "its options choose no fused kernel"


def _fused(spec: OptimizerSpec, index: int, device: torch.device) -> bool:
    try:
        (group,) = spec.build_alone(index, [tiny((2,), device)]).param_groups
    except FAILURES:  # an optimizer for matrices only
        return False
    return bool(group.get("fused"))


def _name(path: str) -> str:
    return path.rpartition(":")[2]
