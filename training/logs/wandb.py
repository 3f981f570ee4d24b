"""A log in Weights & Biases. Its own settings count: WANDB_MODE=offline writes files, WANDB_PROJECT names the project,
WANDB_RUN_ID with WANDB_RESUME=allow goes on with an earlier run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...ir.errors import PlanError
from ..listener import OfferRecord, RunFacts, StepRecord
from .queued import QueuedListener
from .scalars import offer_scalars, scalars

if TYPE_CHECKING:
    import wandb

PROJECT = "penstock"


class WandbLog(QueuedListener):
    """Its files are in DIRECTORY/wandb. Curves are drawn over "step", so that evaluations and resumed runs may come in
    any order."""

    name = "wandb"
    _run: wandb.Run

    def open(self, run: RunFacts) -> None:
        import wandb

        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=run.name,
                dir=str(self.directory),
                config={**run.config, "total_steps": run.total_steps, "predicted_s": run.predicted_s},
                settings=wandb.Settings(console="off", silent=True),  # the screen is not its own
            )
        except (wandb.Error, OSError) as error:
            raise PlanError(
                f"--log wandb: {error}; WANDB_MODE=offline writes files that `wandb sync` sends later"
            ) from error
        self._run.define_metric("*", step_metric="step")

    def write_step(self, record: StepRecord) -> None:
        self._run.log({"step": record.step, **scalars(record)})

    def write_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **{f"evaluation/{name}": value for name, value in metrics.items()}})

    def write_offer(self, offer: OfferRecord) -> None:
        self._run.log({"step": offer.step, **offer_scalars(offer)})

    def write_end(self, interrupted: bool) -> None:
        self._run.finish(exit_code=1 if interrupted else 0)
