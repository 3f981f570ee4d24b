"""Attention of CUDA as a class of saved tensors: taken, kept on the device, moved or computed again, the same bits."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.compiler.capture.trace import trace
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import StageSpec, aligned
from penstock.runtime.stage.operators import CUDA_ATTENTION
from penstock.runtime.stage.runner import StageRunner
from penstock.tests.gpu.rehearsal import DEVICE, exact, on_gpu, only_on_gpu
from penstock.tests.passes.running import all_passes, apply, draft_of, generate_stages
from penstock.tests.shown_elsewhere import core_of

__all__ = ["exact"]  # a fixture
pytestmark = [*on_gpu, only_on_gpu]
EMULATED = "FAKECUDA_TORCH" in os.environ
ROWS = 40  # padded to 64 by one kernel
aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default


class Attending(nn.Module):
    """Attention in one layer that draws twice: in the kernel and after it."""

    def __init__(self, dropout: float, masked: bool):
        super().__init__()
        self.masked, self.dropout = masked, dropout
        self.words, self.attend, self.head = nn.Embedding(64, 32), nn.Linear(32, 96), nn.Linear(32, 64)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True)

    def forward(self, words: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.words(words)
        query, key, value = self.attend(x).view(*words.shape, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        mask = (words > 0)[:, None, None, :] if self.masked else None
        mixed = F.scaled_dot_product_attention(query, key, value, mask, self.dropout, is_causal=not self.masked)
        x = self.layer(x + F.dropout(mixed.transpose(1, 2).flatten(2), self.dropout))
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())}


class Attentions(TorchDispatchMode):
    """The attention kernels that run."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first call imports torch's compiler, which a stage's code may not

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in CUDA_ATTENTION:
            self.seen.append(func)
        return func(*args, **(kwargs or {}))


def runner_of(dropout: float, masked: bool, precision: str) -> tuple[StageSpec, StageRunner, list[Tensor]]:
    torch.manual_seed(0)
    model = Attending(dropout, masked)
    words = torch.randint(1, 64, (2, ROWS), generator=torch.Generator().manual_seed(1))
    words[1, ROWS // 2 :] = 0
    batch = {"words": words, "labels": (words * 7 + 3) % 64}
    autocast = torch.bfloat16 if precision == "bf16" else None
    graph = trace(model, batch, autocast=autocast, param_dtype=autocast)
    draft = apply(draft_of(graph, Hardware.preset("rtx4090x1")), *all_passes(1)[:4])
    ((_, kind),) = generate_stages(draft).items()
    spec = draft.stages[0].spec
    torch.cuda.init()
    device = torch.device(DEVICE, 0)
    with torch.device("meta"):
        module = kind()
    runner = StageRunner(spec, module, device, precision)
    runner.load_buffers({**graph.buffers(), **graph.constants})
    weights = graph.parameters()
    runner.bind({p.name: weights[p.name].detach().to(device, getattr(torch, p.dtype)) for p in spec.params})
    return spec, runner, [batch[i.name].to(device) for i in spec.inputs]


def away(kept: Any, place: str) -> Any:
    """In memory of its own, with what was kept first overwritten."""
    if place == "kept":
        return kept
    pinned = torch.empty(kept.num_bytes, dtype=torch.uint8, pin_memory=True)
    moved = kept.copied_to(pinned)
    torch.cuda.synchronize()
    for tensor in kept.tensors.values():
        tensor.fill_(float("nan"))
    return moved.copied_to(torch.empty(kept.num_bytes, dtype=torch.uint8, device=DEVICE))


KERNELS = [("bf16", False, FLASH), ("bf16", True, EFFICIENT), ("fp32", False, EFFICIENT)]
CASES = [(*kernel, dropout, place) for kernel in KERNELS for dropout in (0.0, 0.1) for place in ("kept", "moved")]


@pytest.mark.parametrize(
    ("precision", "masked", "kernel", "dropout", "place"), core_of([c for c in CASES if c[3:] == (0.1, "moved")], CASES)
)
def test_attention_that_is_taken_gives_the_same_bits(
    precision: str, masked: bool, kernel: Any, dropout: float, place: str
) -> None:
    """Also after other forwards have drawn, and with draws after the attention in the same module."""
    spec, runner, inputs = runner_of(dropout, masked, precision)
    names = [row.name for row in spec.saved]
    with Attentions() as calls:
        wanted, kept = runner.forward(inputs, 7)
    # Hopper takes cuDNN's kernel, which the emulator lacks, where others take these two in half precision.
    assert calls.seen and (calls.seen[0] is kernel or (not EMULATED and calls.seen[0] in CUDA_ATTENTION))
    grads = runner.backward(kept, inputs, [1.0], None, 7)[1]
    again = runner.backward(None, inputs, [1.0], None, 7)[1]
    first = "scaled_dot_product_attention"
    for keep in (names, [first], names[::2]):
        outputs, partial = runner.forward(inputs, 7, keep)
        assert partial is not None and torch.equal(outputs[0], wanted[0])
        assert partial.num_bytes <= sum(aligned(row.bytes) for row in spec.saved if row.name in keep)
        runner.forward(inputs, 8, False)
        with Attentions() as calls:  # those of the forward that is run again
            found = runner.backward(away(partial, place), inputs, [1.0], None, 7)[1]
        assert keep is not names or not calls.seen
        assert found.keys() == grads.keys() and all(torch.equal(found[n], grads[n]) for n in grads)
        assert all(torch.equal(again[n], grads[n]) for n in grads)
