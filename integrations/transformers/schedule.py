"""transformers' learning rate schedules in a form that every worker can import."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


def make_schedule(optimizer: Optimizer, name: str, warmup_steps: int, total_steps: int, **kwargs: Any) -> Any:
    """The schedule of that name, as `TrainingArguments.lr_scheduler_type` has it."""
    from transformers import get_scheduler

    return get_scheduler(
        name,
        optimizer=optimizer,
        num_warmup_steps=warmup_steps,
        num_training_steps=total_steps,
        scheduler_specific_kwargs=kwargs,
    )
