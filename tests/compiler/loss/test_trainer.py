"""The weights are those of transformers' Trainer with gradient accumulation, on rows padded to one length."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler

from penstock.tests.compiler.loss.whole_batch import COUNTS, compile_job, token_rows
from penstock.tests.zoo import llama

STEPS = 3


class Rows(Dataset[dict[str, Tensor]]):
    """The rows of several batches, one after the other."""

    def __init__(self, batches: list[dict[str, Tensor]]):
        self.rows = [{name: value[i] for name, value in batch.items()} for batch in batches for i in range(len(COUNTS))]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches,strategy,devices", [(4, "balanced", 1), (8, "gpipe", 2)])
def test_weights_are_those_of_trainer(micro_batches: int, strategy: str, devices: int, tmp_path: Path) -> None:
    import transformers

    model = llama(dropout=0.0)[0]
    batches = [
        {**batch, "attention_mask": (batch["labels"] != -100).long()}
        for batch in (token_rows(COUNTS[i:] + COUNTS[:i], seed=i) for i in range(STEPS))
    ]

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args: object) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    theirs = copy.deepcopy(model)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=len(COUNTS) // 4, gradient_accumulation_steps=4,
        max_steps=STEPS, learning_rate=0.1, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0,
        weight_decay=0.0, use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    InOrder(theirs, arguments, train_dataset=Rows(batches)).train()
    sgd = partial(torch.optim.SGD, lr=0.1)
    with compile_job(model, batches[0], devices, strategy, micro_batches, optimizer=sgd) as job:
        for batch in batches:
            job.step(batch)
        found = job.state_dict()
    wanted, start = dict(theirs.named_parameters()), dict(model.named_parameters())
    moved = torch.stack([(wanted[name] - start[name]).square().sum() for name in start]).sum().sqrt()
    apart = torch.stack([(wanted[name] - found[name]).square().sum() for name in start]).sum().sqrt()
    assert moved > 0.01 and apart <= 1e-5 * moved
