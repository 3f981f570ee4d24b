"""Blocks timed on a GPU by its own events; no test looks at how long anything took."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from penstock import Hardware
from penstock.compiler.capture.trace import trace
from penstock.compiler.profile.cache import ProfileCache
from penstock.compiler.profile.profile import Profiler, parts_here
from penstock.ir.errors import HardwareError
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.tests.gpu.rehearsal import on_gpu
from penstock.tests.passes.running import apply, draft_of
from penstock.tests.zoo import token_batch, zoo

pytestmark = on_gpu


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_every_block_is_timed_on_the_gpu_that_is_here(precision: str, tmp_path: Path) -> None:
    hardware = Hardware.detect()
    assert parts_here(hardware)[0].kind == "cuda"
    low = torch.float16 if precision == "fp16" else None
    graph = trace(zoo()["gpt2"](dropout=0.1)[0], token_batch(2, 12), autocast=low, device_kind="cuda", param_dtype=low)
    blocks = apply(draft_of(graph, hardware, precision=precision), Coarsen()).blocks
    found = Profiler(ProfileCache(tmp_path), precision)(graph, blocks, hardware)
    for block in found:
        seconds = block.seconds["gpu0"]
        assert all(0 < x < math.inf for x in (seconds.forward_s, seconds.rematerialise_s, seconds.backward_s))


def test_a_gpu_of_another_size_is_not_here() -> None:
    with pytest.raises(HardwareError, match=r"gpu0 of .* is a GPU with 2.79 GiB; here is"):
        parts_here(Hardware.detect().with_(memory="3GB"))
