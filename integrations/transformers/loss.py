"""The model with the loss that a trainer makes of its outputs, as the module that a job trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...compiler.packing.documents import IGNORED
from .evaluation import shifts_labels
from .features import overrides

Compute = Callable[[Any, dict[str, Tensor]], dict[str, Any]]


class TracedLoss(nn.Module):
    """`compute` makes the loss, and outputs by name, of the model and a batch. It is traced with the model. `frozen`:
    further models that it reads, such as a teacher."""

    def __init__(self, model: nn.Module, compute: Compute, **frozen: nn.Module):
        super().__init__()
        self.model, self.compute = model, compute
        for name, module in frozen.items():
            self.add_module(name, module)

    def forward(self, **batch: Tensor) -> dict[str, Any]:
        return self.compute(self.model, batch)


def makes_loss(trainer: Any) -> bool:
    """Whether a trainer's loss is another than its model's: by `compute_loss` of a subclass, `compute_loss_func`, label
    smoothing, or another count of labels than that of the model's loss, as `Trainer` has for GPT-2."""
    counts_first = shifts_labels(trainer.model) and not trainer._loss_shifts_labels
    is_own = overrides(trainer, "compute_loss") or type(trainer).compute_loss is not type(trainer).own_loss
    is_own = is_own or (counts_first and trainer.model_accepts_loss_kwargs)
    return is_own or trainer.compute_loss_func is not None or trainer.label_smoother is not None


def loss_of_trainer(trainer: Any, model: Any, batch: dict[str, Tensor]) -> dict[str, Any]:
    """The loss and the outputs of `trainer.compute_loss`. What it divides by is counted in the batch, so that the trace
    tells what the whole batch counts; the mean over ranks is the job's."""
    args, is_averaged = trainer.args, trainer.args.average_tokens_across_devices
    args.average_tokens_across_devices = False
    try:
        loss, outputs = trainer.compute_loss(
            model, dict(batch), return_outputs=True, num_items_in_batch=_count_items(trainer, batch)
        )
    finally:
        args.average_tokens_across_devices = is_averaged
    if not isinstance(outputs, Mapping):
        outputs = {f"output_{index}": value for index, value in enumerate(outputs[1:])}
    return {"loss": loss} | {name: value for name, value in outputs.items() if name != "loss" and value is not None}


def _count_items(trainer: Any, batch: Mapping[str, Tensor]) -> Tensor | None:
    """The number of labels that count, where `Trainer` hands it to the loss."""
    labels = batch.get("labels")
    if labels is None or not (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None):
        return None
    labels = labels[..., 1:] if trainer._loss_shifts_labels else labels
    return labels.ne(IGNORED).sum()


def add_noise(module: Any, inputs: Any, output: Tensor) -> Tensor:
    """NEFTune's noise in embeddings (Jain et al. 2023), as a hook that can be traced; `Trainer`'s reads its bound from
    a tensor. Drawn by keys, as dropout is."""
    if not module.training:
        return output
    bound: float = module.neftune_noise_alpha / (output.shape[1] * output.shape[2]) ** 0.5
    return output + (torch.rand_like(output) * 2 - 1) * bound
