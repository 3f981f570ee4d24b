"""`tile-sequence`: the same training in tiles of tokens, in the planned memory; what mixes tokens stays whole."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.compiler.capture.trace import trace
from penstock.compiler.strategies import PIPELINE
from penstock.graph import stages
from penstock.graph.costs import block as costs
from penstock.graph.follow.tokens import TokenFacts, token_facts
from penstock.graph.forwards.first_only import unread_in
from penstock.graph.layers import find_blocks
from penstock.graph.regions import token_wise as parts
from penstock.graph.regions.token_wise import token_parts
from penstock.ir import ops
from penstock.ir.calls import call_name
from penstock.ir.errors import PassError, VerifyError
from penstock.ir.program import work_of
from penstock.ir.regions import MARK, TiledRegion, mark_of, with_regions
from penstock.passes.rewrite.tile_sequence import TileSequence
from penstock.runtime.functions.tiles import tile_slices
from penstock.runtime.stage.runner import StageRunner
from penstock.tests.compiler.eager_baseline import MICRO_BATCHES
from penstock.tests.compiler.reasons import reasons_of
from penstock.tests.graph.divide import sequences
from penstock.tests.passes.rewrite import training
from penstock.tests.passes.rewrite.training import assert_trains_and_evaluates_like_eager
from penstock.tests.passes.running import all_passes, apply, draft_of
from penstock.tests.passes.stage_runs import Peak, stages_of
from penstock.tests.shown_elsewhere import slow_but
from penstock.tests.zoo import token_batch, zoo

TILED = "tile-sequence{tokens=3}, " + PIPELINE.replace("partition-balanced", "partition-balanced{stages=2}")
LENGTH = 11  # three tiles of three tokens, and one of two


class Layer(nn.Module):
    """Norms, products, attention and a gated MLP, of torch's own calls."""

    def __init__(self, width: int):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.gate, self.down = nn.Linear(width, 32), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(rows, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Attending(nn.Module):
    """A small language model of two such layers."""

    def __init__(self, width: int = 8, classes: int = 32):
        super().__init__()
        self.embedding, self.head = nn.Embedding(classes, width), nn.Linear(width, classes)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


def full_batch(rows: int = 8, length: int = LENGTH, classes: int = 32) -> dict[str, Tensor]:
    """Rows without padding: plain micro-batches have the loss of the batch."""
    ids = token_batch(rows, length)["input_ids"] % classes
    return {"input_ids": ids, "labels": ids}


job_of = partial(training.job_of, strategy=TILED)


def assert_trains_like_eager(model: nn.Module, batch: Any, tolerance: float = 2e-6, **options: Any) -> None:
    with job_of(model, batch, **options) as job:
        assert job.plan.decisions.tiles
        assert_trains_and_evaluates_like_eager(job, batch, tolerance)


class Scanning(Attending):
    """With a convolution and a state along the sequence in the place of attention, as wide as the sequence is long."""

    def __init__(self) -> None:
        super().__init__(LENGTH + 1)
        self.filters = nn.ModuleList(nn.Conv1d(LENGTH + 1, LENGTH + 1, 3, padding=2) for _ in self.layers)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for layer, mixed in zip(self.layers, self.filters):
            x = x + mixed(layer.norms[0](x).mT)[..., : x.shape[1]].mT
            state, states = torch.zeros_like(x[:, 0]), []
            for token in x.unbind(1):
                state = state / 2 + token.sigmoid()
                states.append(state)
            h = layer.norms[1](torch.stack(states, 1))
            x = x + layer.down(F.silu(layer.gate(h)) * layer.up(h))
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


class Mixing(Attending):
    """A weight is read by a part, and by what its own values make before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.share = nn.ModuleList(), nn.Parameter(torch.full((8,), 0.3))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        x = x * self.share + F.pad(x, (0, 0, 1, -1)) * (1 - self.share)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


@pytest.mark.slow
def test_a_weight_is_read_inside_of_a_part_after_its_last_use_outside() -> None:
    assert_trains_like_eager(Mixing(), full_batch())


def test_no_tile_carries_a_convolution_or_a_state() -> None:
    draft = apply(draft_of(trace(Scanning(), full_batch())), TileSequence(tokens=3))
    inside = [node for node in draft.graph.nodes if MARK in node.meta]
    marked = {node.target if node.op == "call_module" else call_name(node) for node in inside}
    assert "layers.0.down" in marked and marked.isdisjoint({"filters.0", "filters.1", "unbind", "stack"})


@pytest.mark.slow
@pytest.mark.parametrize("length", [LENGTH, LENGTH + 1])
def test_tiles_around_a_state_train_like_eager(length: int) -> None:
    """Of a square of numbers, tiles may be along the other side."""
    assert_trains_like_eager(Scanning(), full_batch(length=length))


def test_tiles_train_and_evaluate_like_eager() -> None:
    assert_trains_like_eager(Attending(), full_batch())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "opt", "llama", "qwen3", "mistral", "bert", "t5", "mixtral"])
def test_transformers_train_like_eager(name: str) -> None:
    model, batch = zoo()[name](dropout=0.0)
    wide = full_batch(classes=96)
    batch = {key: wide.get(key, torch.ones_like(wide["input_ids"])) for key in batch}
    if name == "bert":
        batch["labels"] = torch.zeros(len(wide["labels"]), dtype=torch.int64)
    assert_trains_like_eager(model, batch, 8e-6)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["schedule-pipeline", "schedule-1f1b", "schedule-zero-bubble"])
@pytest.mark.parametrize("remat", ["insert-remat", "insert-remat{always=true}", "choose-activations"])
@pytest.mark.parametrize("devices", [1, 2])
def test_schedules_and_rematerialisation_train_like_eager(schedule: str, remat: str, devices: int) -> None:
    if schedule == "schedule-zero-bubble" and remat == "choose-activations":
        pytest.skip("activations are chosen for whole backwards only")
    line = TILED.replace("schedule-pipeline", schedule).replace("insert-remat", remat)
    assert_trains_like_eager(Attending(), full_batch(), strategy=line, devices=devices)


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        TILED.replace("insert-remat", "insert-remat{swap=true}").replace("insert-fetch", "insert-fetch{swap=true}"),
        TILED.replace("insert-remat", "choose-activations{swap=true, tier=none}").replace(
            "insert-fetch", "insert-fetch{swap=true}"
        ),
        "recompute-pointwise, " + TILED,
        "chunk-loss{tokens=5}, " + TILED,
        TILED.replace("coarsen", "coarsen{level=operator}"),
    ],
)
def test_tiers_and_other_passes_beside_tiles_train_like_eager(line: str) -> None:
    assert_trains_like_eager(Attending(), full_batch(), strategy=line)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_low_precision_is_as_near_to_fp32_as_without_tiles(precision: str) -> None:
    """Sums over tiles are made in fp32; within a product they are rounded to bf16 once, here once a tile. So neither is
    nearer in general: of 12 random models the farthest parameter was 1.7 times as far, the nearest 0.2 times."""
    torch.manual_seed(0)
    model, batch, found = Attending(), full_batch(), []
    whole = TILED.partition(", ")[2]
    for strategy, own in ((whole, "fp32"), (whole, precision), (TILED, precision)):
        with job_of(model, batch, strategy=strategy, precision=own) as job:
            losses = [job.step(batch) for _ in range(2)]
            job.sync()
            found.append((losses, {n: p.detach().double() for n, p in job.model.named_parameters()}))
    (_, exact), (untiled_losses, untiled), (losses, tiled) = found
    torch.testing.assert_close(losses, untiled_losses, rtol=2e-3, atol=0)
    for name, want in exact.items():
        assert (tiled[name] - want).norm() <= 2 * (untiled[name] - want).norm(), name


def test_attention_stays_whole_and_a_part_stands_together() -> None:
    model, batch = Attending(), full_batch(2)
    draft = draft_of(trace(model, batch))
    before = [node.name for node in draft.graph.nodes]
    tiles = TileSequence(3)
    decision = tiles.plan(draft)
    tiles.rewrite(draft, decision)
    parts = [step for step in with_regions(draft.graph.nodes) if isinstance(step, TiledRegion)]
    assert {part.name: part.tokens for part in parts} == decision and len(parts) == 4
    assert sorted(node.name for node in draft.graph.nodes) == sorted(before)
    for name in ("scaled_dot_product_attention", "cross_entropy"):
        found = [node for node in draft.graph.nodes if call_name(node) == name]
        assert found and not any(map(mark_of, found))
    weights = {name for part in parts for name in part.weights}
    own = [name.removeprefix("layers.1.") for name in weights]
    assert {"qkv.weight", "out.weight", "up.bias", "down.weight", "norms.1.bias"} <= set(own)
    with torch.no_grad():  # the marked graph, run whole, is the same step
        torch.testing.assert_close(draft.graph.module(**batch)["loss"], model(**batch)["loss"])


class Drawing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.up(self.norms[0](x)).relu(), 0.5)
        h[:, 0] = 0.0  # the first token, in place
        return self.down((h + 1.0).tanh())


def test_what_is_drawn_or_written_in_place_ends_a_part() -> None:
    model = Attending()
    model.layers[0] = Drawing(8)
    first, second = token_parts(trace(model, full_batch(2)))[:2]
    assert [str(node.target).rpartition(".")[2] for node in first.nodes] == ["0", "up", "relu"]
    assert [call_name(node) or str(node.target) for node in second.nodes] == ["add", "tanh", "layers.0.down"]


@pytest.mark.slow
def test_the_peak_is_the_planned_one_and_tiles_lower_it() -> None:
    batch, found = full_batch(1, 512), []
    model = Attending(64)
    for tokens in (0, 32):
        draft = draft_of(trace(model, batch), penstock.Hardware.cpu(memory="1GB"))
        apply(draft, *([TileSequence(tokens)] if tokens else []), *all_passes(1))
        ((spec, runner, inputs),) = stages_of(draft, batch)
        grads = runner.backward(runner.forward(inputs, 0)[1], inputs, [1.0], None, 0)[1]
        with Peak() as peak:
            _, kept = runner.forward(inputs, 0)
            runner.backward(kept, inputs, [1.0], grads, 0)
        planned = spec.kept_bytes + max(spec.forward_workspace_bytes, spec.backward_workspace_bytes)
        assert 0.9 * planned <= peak.most <= 1.01 * planned
        found.append((peak.most, spec.kept_bytes))
    (most, kept_bytes), (least, tiled_bytes) = found
    assert least < 0.7 * most and tiled_bytes < 0.6 * kept_bytes


@pytest.mark.slow
def test_a_rematerialisation_does_not_make_the_results_of_its_last_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward computes each tile itself: but for one token, which shows the shapes, the last part's forward is not
    counted, and a step is shorter in the simulator. The second stage's head reads what its last part gives."""
    line, found = TILED.replace("insert-remat", "insert-remat{always=true}"), []
    for unread in (unread_in, lambda blocks, own: frozenset()):
        monkeypatch.setattr(stages, "unread_in", unread)
        job = job_of(Attending(), full_batch(), strategy=line)
        works = [work_of(job.programs[0], node) for node in job.programs[0].ops() if node.target is ops.backward]
        found.append((job.folder.interface.stages, sum(work.flops for work in works), job.plan.predicted))
    (specs, flops, predicted), (_, whole_flops, whole) = found
    part_flops = 2 * 2 * LENGTH * (8 * 8 + 3 * 8 * 32)  # of two rows
    assert specs["stage0"].again is not None and specs["stage1"].again is None
    spared_flops = specs["stage0"].forward_flops - specs["stage0"].again.flops
    assert spared_flops == part_flops * (LENGTH - 1) / LENGTH
    assert whole_flops - flops == MICRO_BATCHES * spared_flops
    assert predicted is not None and whole is not None and predicted.step_s < whole.step_s


def test_a_rematerialisation_runs_one_token_of_its_last_part() -> None:
    draft = draft_of(trace(Attending(), full_batch(2)))
    apply(draft, TileSequence(3), *all_passes(2))
    spec, runner, inputs = next(iter(stages_of(draft, full_batch(2))))
    ran: list[int] = []
    runner.module.layers[0].down.register_forward_pre_hook(lambda module, given: ran.append(given[0].shape[1]))
    outputs, kept = runner.forward(inputs, 0)
    ran.clear()
    douts = [torch.ones_like(outputs[0])]
    want = runner.backward(kept, inputs, douts, None, 0)[1]
    assert ran == [3, 3, 3, 2]
    found = runner.backward(None, inputs, douts, None, 0)[1]
    assert ran == [3, 3, 3, 2] + [1] + [3, 3, 3, 2] and spec.again is not None
    with pytest.raises(VerifyError, match=r"stage0: unread='layers.1' is no block of the stage; it has .*layers.0"):
        runner.module._unread = ["layers.1"]
        StageRunner(spec, runner.module, torch.device("cpu"), "fp32")
    assert want.keys() == found.keys() and all(torch.equal(found[name], grad) for name, grad in want.items())


@pytest.mark.slow
def test_costs_of_some_tiles_are_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = draft_of(trace(Attending(), full_batch(1, 29)))
    tiles = TileSequence(4)
    tiles.rewrite(draft, tiles.plan(draft))
    blocks = find_blocks(draft.graph)
    some = [costs.measure(draft.graph, block) for block in blocks]
    monkeypatch.setattr(costs.FakeBlockRun, "some_tiles", lambda self, length, tokens: tile_slices(length, tokens))
    for few, block in zip(some, blocks):
        all_ = costs.measure(draft.graph, block)
        assert dataclasses.replace(few, calls=None) == dataclasses.replace(all_, calls=None)
        assert few.calls is not None and all_.calls is not None
        assert sorted(map(repr, few.calls)) == sorted(map(repr, all_.calls))


@pytest.mark.slow
def test_the_printed_stage(golden: Any) -> None:
    with job_of(Attending(), full_batch(4), micro_batches=2, strategy="tile-sequence{tokens=4}, " + PIPELINE) as job:
        text = job.code(0)
        golden(text[text.index("class Layer") : text.index("class Stage0")], "attending")
        assert "token-wise parts run over tiles of tokens" in reasons_of(job)


@pytest.mark.parametrize("tokens", slow_but((11,), (11, 64)))
def test_tiles_that_are_no_smaller_are_refused(tokens: int) -> None:
    with pytest.raises(PassError, match=f"into tiles of {tokens} tokens: its sequences have 11 tokens"):
        TileSequence(tokens).plan(draft_of(trace(Attending(), full_batch(2))))


def test_an_edited_plan_names_parts_of_the_model() -> None:
    draft = draft_of(trace(Attending(), full_batch(2)))
    known = ", ".join(part.name for part in token_parts(draft.graph))
    with pytest.raises(PassError, match=f"'layers.9/1' is no token-wise part of this model; it has {known}"):
        TileSequence().rewrite(draft, {"layers.9/1": 3})


@pytest.mark.slow
def test_members_of_a_team_cut_their_own_tokens() -> None:
    graph = sequences.graph_of(lambda: sequences.Decoder(depth=1))
    line = sequences.lines("heads", 2).replace("coarsen", "tile-sequence{tokens=2}, coarsen", 1)
    draft = sequences.make_draft(graph, line, 2)
    assert any(isinstance(step, TiledRegion) for step in with_regions(draft.graph.nodes))
    sequences.assert_a_team_trains_as_eager(graph, draft)


def test_tokens_are_followed_once_for_plan_and_rewrite(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def count(*given: Any) -> TokenFacts:
        calls.append(1)
        return token_facts(*given)

    monkeypatch.setattr(parts, "token_facts", count)
    draft = draft_of(trace(Attending(), full_batch(2)))
    found = TileSequence(tokens=4).plan(draft)
    TileSequence(tokens=4).rewrite(draft, found)
    assert found and calls == [1]
