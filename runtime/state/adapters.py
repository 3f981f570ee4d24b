"""Adapters of PEFT, as `PeftModel.from_pretrained` reads them: PEFT chooses the tensors and writes the files."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...ir.errors import PlanError
from . import durable
from .weight_files import REPLACED
from .weights import WeightSource
from .wrapped import ModelPart

CARD = "README.md"  # PEFT adds its part to a card that is there


def save_adapters(
    directory: Path, stages: Iterable[tuple[Any, Mapping[str, Tensor], Mapping[str, Tensor]]], saved: ModelPart,
    source: WeightSource | None,
) -> Path:  # fmt: skip
    """Write every adapter of a PeftModel with the values that `stages` yield; those of its base model are not kept.

    Raises `PlanError`, before anything is read, where something is trained that PEFT does not save.
    """
    model: Any = saved.module
    own = model.state_dict(keep_vars=True)
    wanted = names_to_save(saved)
    values: dict[str, Tensor] = {}
    for _, weights, buffers in stages:
        for name, tensor in (*weights.items(), *buffers.items()):
            inner = saved.names[name]
            if inner in wanted:
                values[inner] = tensor.detach().to(own[inner].dtype, copy=True)
    shared = {id(own[inner]): tensor for inner, tensor in values.items()}  # layers may have one tensor under many names
    for inner in wanted - values.keys():
        if id(own[inner]) in shared:
            values[inner] = shared[id(own[inner])]
        else:
            values[inner] = own[inner].detach() if source is None else source.read(inner).to(own[inner].dtype)
    state = {name: tensor.detach() for name, tensor in own.items()} | values
    with durable.saving(directory, sum(t.numel() * t.itemsize for t in values.values())) as temporary:
        if (directory / CARD).is_file():
            shutil.copy2(directory / CARD, temporary / CARD)
        with _lend(model, values):
            model.save_pretrained(str(temporary), state_dict=state)
        durable.take_along(directory, temporary, REPLACED)
    return directory


def names_to_save(saved: ModelPart) -> set[str]:
    """The names of the tensors that PEFT writes. Raises `PlanError` where more than these is trained."""
    from peft import get_peft_model_state_dict

    model: Any = saved.module
    state = dict(model.state_dict(keep_vars=True))
    chosen: set[int] = set()
    for adapter in model.peft_config:
        written = get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter)
        chosen |= {id(tensor) for tensor in written.values()}
        # PEFT computes some of what it writes, under longer names, such as the largest entries of a tensor.
        for name, tensor in state.items():
            plain = name.replace(f".{adapter}", "")
            if tensor.requires_grad and any(key != plain and key.startswith(plain) for key in written):
                chosen.add(id(tensor))
    # Of a prompt PEFT writes what its encoder computes.
    encoder = model.prompt_encoder if model.active_peft_config.is_prompt_learning else nn.Module()
    chosen |= {id(tensor) for tensor in (*encoder.parameters(), *encoder.buffers())}
    lost = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in chosen]
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise PlanError(
            f"save_pretrained: {lost[0]}{more} is trained, and PEFT does not write it as it is with an adapter: "
            "call job.sync(), then torch.save(model.state_dict(), file), or merge the adapter and save the base model"
        )
    return {name for name, tensor in state.items() if id(tensor) in chosen}


@contextmanager
def _lend(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Let the model hold these values while the body runs: PEFT computes some of what it writes."""
    before = []
    try:
        for name, value in values.items():
            path, _, leaf = name.rpartition(".")
            owner = model.get_submodule(path)
            store: dict[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
            before.append((store, leaf, store[leaf]))
            store[leaf] = nn.Parameter(value, False) if store is owner._parameters else value
        yield
    finally:
        for store, leaf, old in reversed(before):
            store[leaf] = old
