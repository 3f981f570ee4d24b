"""Optimizers of bitsandbytes and torchao whose states have few bits, with steps on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import bitsandbytes
import pytest
import torch
import torchao.optim

LOW_BITS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "bitsandbytes AdamW8bit": partial(bitsandbytes.optim.AdamW8bit, lr=1e-2),
    "bitsandbytes PagedAdamW8bit": partial(bitsandbytes.optim.PagedAdamW8bit, lr=1e-2),
    "bitsandbytes SGD8bit": partial(bitsandbytes.optim.SGD8bit, lr=0.1, momentum=0.9),
    "bitsandbytes Lion8bit": partial(bitsandbytes.optim.Lion8bit, lr=1e-3),
    "bitsandbytes AdEMAMix8bit": partial(bitsandbytes.optim.AdEMAMix8bit, lr=1e-2),
    "bitsandbytes LAMB8bit": partial(bitsandbytes.optim.LAMB8bit, lr=1e-2),
    "bitsandbytes AdamW": partial(bitsandbytes.optim.AdamW, lr=1e-2),
    "torchao AdamW8bit": partial(torchao.optim.AdamW8bit, lr=1e-2),
    "torchao AdamW4bit": partial(torchao.optim.AdamW4bit, lr=1e-2),
    "torchao AdamWFp8": partial(torchao.optim.AdamWFp8, lr=1e-2),
}
USUAL = ("bitsandbytes AdamW8bit", "torchao AdamW4bit")  # in tests by default
EACH = [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in LOW_BITS]
# Bytes of the states of a matrix of 64 x 160 = 10240 elements: codes, fp32 scales of blocks, tables of 256 or 16.
BYTES = {
    "bitsandbytes AdamW8bit": 2 * (10240 + 4 * 40),
    "bitsandbytes PagedAdamW8bit": 2 * (10240 + 4 * 40),
    "bitsandbytes SGD8bit": 10240 + 4 * 40,
    "bitsandbytes Lion8bit": 10240 + 4 * 40,
    "bitsandbytes AdEMAMix8bit": 3 * (10240 + 4 * 40),
    "bitsandbytes LAMB8bit": 2 * (10240 + 4 * 40) + 4,
    "bitsandbytes AdamW": 8 * 10240,
    "torchao AdamW8bit": 2 * (10240 + 4 * 40 + 4 * 256),
    "torchao AdamW4bit": 2 * (10240 // 2 + 4 * 80 + 4 * 16),
    "torchao AdamWFp8": 2 * (10240 + 4 * 40),
}
