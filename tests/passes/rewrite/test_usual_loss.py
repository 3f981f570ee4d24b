"""The usual loss of language models, `logits[:, :-1]` against `labels[:, 1:]`, under a team that divides tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.ir.errors import PassError

LINE = (
    "split-context, coarsen, mesh{team=2}, partition-balanced, map-round-robin, schedule-pipeline, insert-remat, "
    "insert-fetch, insert-optimizer"
)


class Language(nn.Module):
    def __init__(self, moved: bool):
        super().__init__()
        self.words, self.heads, self.out = nn.Embedding(16, 8), nn.Linear(8, 24), nn.Linear(8, 16)
        self.moved = moved

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        rows, tokens = ids.shape
        q, k, v = self.heads(self.words(ids)).view(rows, tokens, 3, 2, 4).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, tokens, 8)
        logits = self.out(h)
        if self.moved:
            return F.cross_entropy(logits.flatten(0, 1), F.pad(labels[:, 1:], (0, 1), value=-100).flatten())
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.slow
def test_the_way_out_of_the_refusal_is_the_same_loss_and_can_be_planned() -> None:
    batch = {name: torch.randint(0, 16, (4, 8)) for name in ("ids", "labels")}
    usual, moved = Language(False), Language(True)
    moved.load_state_dict(usual.state_dict())
    torch.testing.assert_close(usual(**batch), moved(**batch))
    hardware = penstock.Hardware.cpu(2, memory="64MB")
    with pytest.raises(PassError, match=r"move its targets instead: F\.cross_entropy\(.*F\.pad\(labels"):
        penstock.compile(usual, hardware, example_inputs=batch, strategy=LINE, micro_batches=2)
    penstock.compile(moved, hardware, example_inputs=batch, strategy=LINE, micro_batches=2).close()
