"""`PenstockTrainer`, `PenstockSeq2SeqTrainer`: transformers' trainers on the hardware that you name."""

from __future__ import annotations

from typing import Any

from ...ir.errors import PlanError
from ...runtime.quantised.libraries import why_missing

try:
    from transformers import Seq2SeqTrainer, Trainer
except ImportError as error:
    raise PlanError(f"PenstockTrainer: transformers is {why_missing('transformers', error, 'hf')}") from error

from .steps import StepsByJob


class PenstockTrainer(StepsByJob, Trainer):
    """As `Trainer`; see `StepsByJob` for what it takes beside."""

    own_loss = Trainer.compute_loss


class PenstockSeq2SeqTrainer(StepsByJob, Seq2SeqTrainer):
    """As `Seq2SeqTrainer`; with `predict_with_generate` the model itself is evaluated, on `args.device`."""

    own_loss = Trainer.compute_loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        if self.job is None or not self._generates(kwargs.get("prediction_loss_only")):
            return super().evaluation_loop(*args, **kwargs)
        with self._on_device():
            return super().evaluation_loop(*args, **kwargs)

    def prediction_step(
        self,
        model: Any,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> Any:
        if not self._generates(prediction_loss_only):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        return Seq2SeqTrainer.prediction_step(
            self, model, inputs, prediction_loss_only, ignore_keys=ignore_keys, **gen_kwargs
        )

    def _generates(self, prediction_loss_only: bool | None) -> bool:
        return bool(getattr(self.args, "predict_with_generate", False)) and not prediction_loss_only
