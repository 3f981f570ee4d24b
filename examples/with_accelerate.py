"""A loop of Hugging Face Accelerate over a job. Three lines differ from the loop without Penstock; they are marked.

Run: python examples/with_accelerate.py, or accelerate launch / torchrun with one process per device.
"""

from __future__ import annotations

from functools import partial

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import penstock


def main(hardware: str | penstock.Hardware = "auto", epochs: int = 2) -> tuple[GPT2LMHeadModel, list[float]]:
    accelerator = Accelerator()
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, n_positions=32, vocab_size=256)).train()
    ids = torch.randint(0, 256, (32, 32), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    optimizer = partial(torch.optim.AdamW, lr=1e-3)  # without Penstock: torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(rows, batch_size=8)  # type: ignore[arg-type]
    job = penstock.compile(model, hardware, example_inputs=next(iter(loader)), optimizer=optimizer)  # 1: was `prepare`
    losses = []
    for _ in range(epochs):
        for batch in loader:
            loss = job.step(batch)  # 2: was forward, `accelerator.backward(loss)`, `step` and `zero_grad`
            losses.append(float(loss))
        accelerator.print(f"loss {losses[-1]:.4f}")
    job.sync()  # 3: `model` has the trained weights, as `accelerator.unwrap_model` gives them
    job.close()
    return model, losses


if __name__ == "__main__":
    main()
