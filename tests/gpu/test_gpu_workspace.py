"""The rules of `graph/operators/workspace` against what torch's own code takes from the caching allocator.

Within these bounds: the allocator hands out blocks of up to 1 MiB more than was asked for, two of them for a call; a
rule is at most a quarter too large where the call holds more than some MiB.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.graph.operators.record import GpuSize
from penstock.graph.operators.table import workspace_bytes
from penstock.graph.operators.workspace import attention
from penstock.graph.operators.workspace.sizes import round_up
from penstock.tests.gpu.operator_memory import ATTENTION, BF16, HOST_CODE_ONLY, OPERATORS, PACKED
from penstock.tests.gpu.rehearsal import needs_documents, on_gpu, only_on_gpu
from penstock.tests.shown_elsewhere import core_of

pytestmark = [*on_gpu, only_on_gpu]
MIB = 2**20


@functools.cache
def measured_blocks() -> dict[str, Any]:
    """Bytes by the name of the call; in a process of its own, since kernels that compute nothing may stand in it."""
    # From torch 2.15 on a product holds cuBLAS's workspace while it runs, where torch is not told to keep it.
    kept = {"TORCH_CUBLAS_WORKSPACE_CACHE": "1"}
    environment = {**os.environ, **kept, **(HOST_CODE_ONLY if "FAKECUDA_TORCH" in os.environ else {})}
    command = [sys.executable, "-m", "penstock.tests.gpu.operator_memory"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    return found


def gpu() -> GpuSize:
    properties = torch.cuda.get_device_properties(0)
    return GpuSize(properties.multi_processor_count, properties.max_threads_per_multi_processor)


def check(found_bytes: int, ruled_bytes: int, is_least: bool = True) -> None:
    assert found_bytes <= ruled_bytes + 2 * MIB, (found_bytes, ruled_bytes)
    assert not is_least or ruled_bytes <= 1.25 * found_bytes + MIB, (found_bytes, ruled_bytes)


def takes_cudnn(is_half: bool) -> bool:
    """Whether torch prefers cuDNN's kernel for attention, which takes less than the rules of the others say."""
    return is_half and "FAKECUDA_TORCH" not in os.environ and torch.cuda.get_device_capability() >= (9, 0)


# Without the operators that take nothing, and with every fourth run of attention.
@pytest.mark.parametrize("name", core_of([name for name in OPERATORS if "none for" not in name][::2], OPERATORS))
def test_operator(name: str) -> None:
    run = OPERATORS[name]
    with FakeTensorMode():
        arguments = run.on("cpu")
        ruled_bytes = workspace_bytes(run.operator, arguments, {}, run.operator(*arguments), gpu())
    check(measured_blocks()[name], ruled_bytes)


@pytest.mark.parametrize("name", core_of([*ATTENTION][::4], ATTENTION))
def test_attention(name: str) -> None:
    run = ATTENTION[name]
    forward_bytes, backward_bytes = measured_blocks()[name]
    heads, is_half = 2 * run.heads, run.dtype == BF16
    is_least = not takes_cudnn(is_half)
    if is_half and not run.masked:
        check(forward_bytes, attention.flash_forward(heads, run.rows, run.rows, run.width, gpu()), is_least)
        padded = round_up(run.rows, 128)
        check(backward_bytes, 4 * heads * padded * (1 + round_up(run.width, 32)), is_least)
    else:
        check(forward_bytes, attention.efficient_forward(heads, run.rows, run.width, is_half), is_least)
        sizes = (heads, run.rows, run.rows, run.width, run.width, is_half)
        check(backward_bytes, attention.efficient_backward(*sizes), is_least)


@needs_documents
@pytest.mark.parametrize("name", core_of([*PACKED][::4], PACKED))
def test_attention_of_documents(name: str) -> None:
    """Backward holds sums and gradients of queries in fp32, and of 128 places more for each document in the plan."""
    run = PACKED[name]
    forward_bytes, backward_bytes = measured_blocks()[name]
    check(forward_bytes, 0)
    tokens, wide = 2 * run.rows, round_up(run.width, 32 if run.width <= 128 else 64)
    expanded = 2 * 2 * tokens * run.heads * run.width if run.key_heads != run.heads else 0
    check(backward_bytes, 4 * run.heads * (tokens + 128 * run.most) * (1 + wide) + expanded)
