"""An operator without a record is refused in the same words, wherever something must be known of it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.compiler.capture.trace import trace
from penstock.compiler.pipeline import parse_pipeline, run_passes
from penstock.graph.experts.layers import find_expert_layers
from penstock.graph.follow.coupling import coupling_text
from penstock.graph.follow.rows import row_facts
from penstock.graph.loss.head_loss import WholeLogits, head_losses
from penstock.graph.operators.pointwise import same
from penstock.graph.operators.record import OPERATORS, Operator, no_record, nothing
from penstock.graph.opgraph import OpGraph
from penstock.ir.errors import PassError
from penstock.ir.machine.hardware import Hardware
from penstock.passes.draft import Draft, Options
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.tests.graph.divide.mixtures import EXPERTS, Experts, Mixture
from penstock.tests.graph.divide.sequences import WORDS, batches_of

NAME = "penstock_tests::twist"


@torch.library.custom_op(NAME, mutates_args=())
def twist(x: Tensor) -> Tensor:
    """An operator of which nothing is known."""
    return x.clone()


twist.register_fake(torch.empty_like)
twist.register_autograd(lambda ctx, gradient: gradient)


class Twisted(nn.Module):
    """A head whose logits, or what it reads, go through the operator."""

    def __init__(self, logits: bool) -> None:
        super().__init__()
        self.logits, self.table, self.head = logits, nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.table(ids)
        if not self.logits:
            hidden = twist(hidden)
        logits = self.head(hidden)
        if self.logits:
            logits = twist(logits)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class TwistedExperts(Experts):
    def middle(self, rows: Tensor) -> Tensor:
        return twist(rows)


def twist_graph(logits: bool = False) -> OpGraph:
    return trace(Twisted(logits), batches_of(1)[0])


def rows() -> str:
    return "; ".join(map(coupling_text, row_facts(lambda count: twist_graph(), 1, 2).couplings))


def tokens() -> str:
    draft = Draft(twist_graph(), Hardware.cpu(num_devices=2), Options(micro_batches=1))
    try:
        run_passes(draft, parse_pipeline("split-context{by=heads, team=2}", 2))
    except PassError as error:
        return str(error)
    return ""


def workspace() -> str:
    draft, coarsen = Draft(twist_graph(), Hardware.from_any("rtx4090x1"), Options(micro_batches=1)), Coarsen()
    coarsen.rewrite(draft, coarsen.plan(draft))
    return draft.notes.get("coarsen", "")


def head() -> str:
    (found,) = head_losses(twist_graph(logits=True))
    return found.reason if isinstance(found, WholeLogits) else ""


def experts() -> str:
    graph = trace(Mixture((0.0,) * EXPERTS, experts=TwistedExperts), batches_of(1)[0])
    return "; ".join(layer.refusal for layer in find_expert_layers(graph).values())


@pytest.mark.parametrize("said", [rows, tokens, workspace, head, experts])
def test_an_operator_without_a_record_is_refused_in_the_same_words(
    said: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = said()
    line = re.search(r"test_unknown\.py:\d+: .*twist\(\w+\)", text)
    assert line is not None and no_record(NAME, line[0]) in text, text
    monkeypatch.setitem(OPERATORS, NAME, Operator(rows=same, workspace=nothing))
    assert NAME not in said()
