"""A small model of sequences, and a team that trains it in the reference runtime beside eager PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.compiler.capture.trace import trace
from penstock.compiler.pipeline import parse_pipeline, run_passes
from penstock.graph.opgraph import OpGraph
from penstock.ir.machine.hardware import Hardware
from penstock.passes.draft import Draft, Options
from penstock.passes.schedule.evaluation import evaluation_programs
from penstock.tests.passes.running import Eager, join_batches, reference

TOKENS, WIDTH, WORDS, HEADS, GROUPS = 16, 24, 11, 4, 2
PLAIN = "partition-balanced{stages=1}, map-round-robin, schedule-1f1b, insert-remat, insert-fetch, insert-optimizer"


class Layer(nn.Module):
    """Attention with heads of keys that serve two heads of queries each, positions by rotation, and an MLP."""

    def __init__(self, is_causal: bool = True):
        super().__init__()
        self.norm, self.is_causal, each = nn.LayerNorm(WIDTH), is_causal, WIDTH // HEADS
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * GROUPS * each)
        self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, h: Tensor, angle: Tensor, mask: Tensor | None = None) -> Tensor:
        rows, tokens, width = h.shape
        x = self.norm(h)
        q = self.q(x).view(rows, tokens, HEADS, -1).transpose(1, 2)
        k, v = self.kv(x).view(rows, tokens, 2 * GROUPS, -1).transpose(1, 2).chunk(2, dim=1)
        q, k = (t * angle.cos() + t.roll(1, -1) * angle.sin() for t in (q, k))
        is_causal = self.is_causal and mask is None
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=True)
        h = h + self.out(seen.transpose(1, 2).reshape(rows, tokens, width))
        return h + self.down(torch.relu(self.up(h)))


class Decoder(nn.Module):
    """Shifted labels, logits, and a loss that the middle of the sequence alone counts in."""

    def __init__(self, depth: int = 2, is_causal: bool = True):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.places = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer(is_causal) for _ in range(depth))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        positions = torch.arange(ids.shape[1])
        h = self.embed(ids) + self.places(positions)
        angle = positions[:, None] / 7.0
        mask = self.mask(ids)
        for layer in self.layers:
            h = layer(h, angle, mask)
        logits = self.head(h)
        wanted = F.pad(labels, (0, 1), value=-100)[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.reshape(-1), reduction="sum")
        return {"loss": loss / wanted.ne(-100).sum() + 1e-3 * logits.square().mean(), "logits": logits}

    def mask(self, ids: Tensor) -> Tensor | None:
        return None


class Masked(Decoder):
    """Attention with a mask, whose rows follow from the batch."""

    def __init__(self, kind: str):
        super().__init__(depth=1)
        self.kind = kind

    def mask(self, ids: Tensor) -> Tensor | None:
        place = torch.arange(ids.shape[1])
        causal = (place <= place[:, None])[None, None]
        padding = (place >= ids[:, :1] % 5)[:, None, None]  # on the left: causal queries there see no key
        window = (place > place[:, None] - 5)[None, None]
        if self.kind == "documents":
            numbers = ids.eq(0).cumsum(1)
            return causal & (numbers[:, None, :, None] == numbers[:, None, None])
        masks = {
            "padding": causal & padding,
            "padding alone": padding.expand(-1, 1, ids.shape[1], -1),
            "window": causal & window,
            "window, padding": causal & window & padding,
            "any": (ids[:, None, None] + place[:, None]) % 3 != 0,
            # A query sees itself: of one that sees no key by numbers, torch's kernel for CPUs has other gradients.
            "numbers": (place - place[:, None])
            .abs()
            .neg()
            .double()
            .masked_fill(~(causal & padding | (place == place[:, None])), torch.finfo(torch.float64).min),
        }
        return masks[self.kind]


MASKS = ("padding", "padding alone", "window", "window, padding", "documents", "any", "numbers")


def batches_of(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        ids = torch.randint(WORDS, (2, TOKENS), generator=made)
        found.append({"ids": ids, "labels": ids.where(ids > 1, -100)})
    return found


def graph_of(make: Callable[[], nn.Module] = Decoder) -> OpGraph:
    torch.manual_seed(3)
    return trace(make().double(), batches_of(1)[0])


@functools.cache
def small() -> OpGraph:
    """The graph of one layer, shared by tests, which do not change it."""
    return graph_of(lambda: Decoder(depth=1))


def make_draft(graph: OpGraph, line: str, devices: int, micro_batches: int = 2, **options: Any) -> Draft:
    draft = Draft(graph, Hardware.cpu(num_devices=devices), Options(micro_batches=micro_batches, **options))
    run_passes(draft, parse_pipeline(line, devices))
    return draft


def assert_a_team_trains_as_eager(
    graph: OpGraph, draft: Draft, micro_batches: int = 2, tolerance: float = 1e-12
) -> Any:
    """Losses, every gradient, weights after two steps, and what evaluation gives; in double precision, so that only the
    order of additions differs."""
    machine = reference(draft, evaluation=evaluation_programs(draft))
    eager, batches = Eager(Draft(graph, draft.machine, draft.options)), batches_of(micro_batches)
    own = draft.graph.part_names  # a member's part is put together under its own name
    for _ in range(2):
        losses, grads = eager.step(batches)
        results = machine.step(join_batches(batches))["results"]
        _close(dict(enumerate(results["loss"])), dict(enumerate(losses)), tolerance)
        _close({own.get(name, name): grad for name, grad in machine.grads.items()}, grads, tolerance)
    weights = {own.get(name, name): weight for name, weight in machine.weights().items()}
    _close(weights, {name: p.detach() for name, p in eager.params.items()}, tolerance)
    found = machine.evaluate(join_batches(batches))["results"]
    with torch.no_grad():
        whole = [eager.module(**batch) for batch in batches]
    _close(dict(enumerate(found["logits"])), dict(enumerate(out["logits"] for out in whole)), tolerance)
    return machine


def _close(found: dict[Any, Tensor], want: dict[Any, Tensor], tolerance: float) -> None:
    assert found.keys() == want.keys()
    for name in found:
        torch.testing.assert_close(found[name], want[name], rtol=0, atol=tolerance, msg=lambda t, n=name: f"{n}: {t}")


def lines(by: str, team: int, mesh: str = "mesh", rest: str = PLAIN) -> str:
    return f"split-context{{by={by}, team={team}}}, coarsen, {mesh}, {rest}"


def names_of(draft: Draft) -> Sequence[str]:
    """The ops of a lane's first program."""
    return [node.target.name for node in draft.programs[0].ops()]  # type: ignore[union-attr]
