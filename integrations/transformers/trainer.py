"""`PenstockTrainer`: transformers' Trainer on the hardware that you name."""

from __future__ import annotations

from ...ir.errors import PlanError

try:
    from transformers import Trainer
except ImportError as error:
    raise PlanError("transformers is not installed; pip install 'penstock[hf]'") from error

from .steps import StepsByJob


class PenstockTrainer(StepsByJob, Trainer):
    """As `Trainer`; see `StepsByJob` for what it takes beside."""

    own_loss = Trainer.compute_loss
