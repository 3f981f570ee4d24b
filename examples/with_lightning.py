"""A module of Lightning over a job. Three lines differ from the module without Penstock; they are marked.

Run: python examples/with_lightning.py
"""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import penstock


class LanguageModel(lightning.LightningModule):
    def __init__(self, model: GPT2LMHeadModel, hardware: str | penstock.Hardware, example: dict[str, Tensor]):
        super().__init__()
        self.automatic_optimization = False  # 1: the job steps its optimizer
        optimizer = partial(torch.optim.AdamW, lr=1e-3)
        self.job = penstock.compile(model, hardware, example_inputs=example, optimizer=optimizer)  # 2: was self.model
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], _: int) -> None:
        loss = self.job.step(batch)  # 3: was `self.model(**batch).loss`
        self.losses.append(float(loss))
        self.log("loss", loss, prog_bar=True)

    def configure_optimizers(self) -> None:
        """None: the job has the optimizer."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = self.job.state_dict()

    def on_train_end(self) -> None:
        self.job.sync()
        self.job.close()


def main(hardware: str | penstock.Hardware = "auto", epochs: int = 2) -> tuple[GPT2LMHeadModel, list[float]]:
    lightning.seed_everything(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, n_positions=32, vocab_size=256)).train()
    ids = torch.randint(0, 256, (32, 32), generator=torch.Generator().manual_seed(1))
    loader = DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=8)  # type: ignore[arg-type]
    module = LanguageModel(model, hardware, next(iter(loader)))
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(module, loader)
    return model, module.losses


if __name__ == "__main__":
    main()
