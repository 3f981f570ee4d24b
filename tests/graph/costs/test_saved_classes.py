"""Classes of saved tensors of real models: planned from fake tensors, executed exactly by printed stages."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from penstock.compiler.capture.trace import trace
from penstock.graph.opgraph import OpGraph
from penstock.graph.profile import with_seconds
from penstock.graph.stages import build_stages
from penstock.graph.turn_seconds import TurnSeconds
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import StageSpec, aligned
from penstock.passes.draft import Draft
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.passes.rewrite.drop_masks import DropMasks
from penstock.runtime.stage.draws import micro_batch_seed
from penstock.runtime.stage.kept import Kept
from penstock.runtime.stage.runner import StageRunner
from penstock.tests.passes.running import SEED, Batch, Eager, all_passes, apply, draft_of, trace_case, traced_model
from penstock.tests.passes.stage_runs import Peak, assert_close, one_device, stages_of
from penstock.tests.shown_elsewhere import slow_but
from penstock.tests.zoo import mixtral, zoo

# CPUs take no norms whose weights are bf16 and whose statistics are not.
IN_BF16 = ["gpt2", "bert", "llama", "t5", "vit"]
FAMILIES = [*IN_BF16, "mixtral", "wide_resnet", "encoder"]
Choice = Callable[[StageSpec, int], Sequence[str]]  # stage and micro-batch to the classes to keep
Stages = list[tuple[StageSpec, StageRunner]]


def everything(spec: StageSpec, micro_batch: int) -> list[str]:
    return [row.name for row in spec.saved]


def nothing(spec: StageSpec, micro_batch: int) -> list[str]:
    return []


def some(spec: StageSpec, micro_batch: int) -> list[str]:
    chosen = random.Random(f"{spec.name} {micro_batch}")
    return [row.name for row in spec.saved if chosen.random() < 0.5]


def train(stages: Stages, batches: list[Batch], choose: Choice | None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and summed gradients of two stages; all forwards come before the first backward. None keeps all."""
    runs = []
    for m, batch in enumerate(batches):
        values, kepts = dict(batch), []
        for spec, runner in stages:
            inputs = [values[i.name] for i in spec.inputs]
            keep = True if choose is None else choose(spec, m)
            outputs, kept = runner.forward(inputs, micro_batch_seed(SEED, 0, m), keep)
            values.update(zip((o.name for o in spec.outputs), outputs))
            kepts.append(away_and_back(kept) if choose is not None else kept)
        runs.append((values, kepts))
    sums: dict[str, dict[str, Tensor]] = {spec.name: {} for spec, _ in stages}
    for m, (values, kepts) in enumerate(runs):
        gradients: dict[str, Tensor | float] = {stages[-1][0].loss or "": 1 / len(batches)}
        for (spec, runner), kept in zip(reversed(stages), reversed(kepts)):
            inputs = [values[i.name] for i in spec.inputs]
            douts = [gradients.get(o.name) for o in spec.outputs]
            seed = micro_batch_seed(SEED, 0, m)
            dinputs, _ = runner.backward(kept, inputs, douts, sums[spec.name], seed)
            gradients.update(zip((i.name for i in spec.inputs if i.requires_grad), dinputs))
    grads = {f"{stage} {name}": g for stage, rows in sums.items() for name, g in rows.items()}
    return [values[stages[-1][0].loss or ""] for values, _ in runs], grads


def away_and_back(kept: Kept | None) -> Kept | None:
    """To other memory and back, while what was kept first is overwritten."""
    if kept is None:
        return None
    away = kept.copied_to(torch.empty(kept.num_bytes, dtype=torch.uint8))
    for tensor in kept.tensors.values():
        tensor.fill_(float("nan"))
    back = away.copied_to(torch.empty(kept.num_bytes + 512, dtype=torch.uint8)[512:])
    for tensor in away.tensors.values():
        tensor.fill_(float("nan"))
    return back


@functools.cache
def traced_in(name: str, precision: str) -> tuple[OpGraph, list[Batch]]:
    if precision == "fp32":
        return trace_case(name)
    model, batch = zoo()[name]()
    graph = trace(model, batch, autocast=torch.bfloat16, param_dtype=torch.bfloat16)
    return graph, [batch, zoo()[name](seed=1)[1]]


def fresh(draft: Draft, batch: Batch, precision: str = "fp32") -> Stages:
    return [(spec, runner) for spec, runner, _ in stages_of(draft, batch, precision, warm=False)]


@pytest.mark.parametrize(
    "name, choose",
    [
        *(pytest.param(name, some, marks=[pytest.mark.slow] * (name != "gpt2")) for name in FAMILIES),
        *(pytest.param(name, everything, marks=[pytest.mark.slow] * (name != "gpt2")) for name in FAMILIES),
        ("gpt2", nothing),
        pytest.param("bert", nothing, marks=pytest.mark.slow),
    ],
)
def test_losses_gradients_and_buffers_are_those_of_eager(name: str, choose: Choice) -> None:
    graph, batches = trace_case(name)
    draft = one_device(graph, 2)
    stages = fresh(draft, batches[0])
    losses, grads = train(stages, batches, choose)
    eager = Eager(draft)
    wanted, sums = eager.step(batches)
    assert [torch.equal(a, b) for a, b in zip(losses, wanted)] == [True] * len(batches)
    seen = set()
    for key, grad in grads.items():
        first = eager.ties.get(key.partition(" ")[2], key.partition(" ")[2])
        seen.add(first)
        is_tied_across = sum(eager.ties.get(k.partition(" ")[2], k.partition(" ")[2]) == first for k in grads) > 1
        assert is_tied_across or torch.equal(grad, sums[first]), key
    assert seen == sums.keys()
    buffers = dict(eager.module.named_buffers(remove_duplicate=False))
    assert all(torch.equal(b, buffers[n]) for _, runner in stages for n, b in runner.buffers().items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "mistral"])
def test_attention_is_kept_with_its_log_sum_exp(name: str) -> None:
    """Without dropout CPUs fuse attention, here also in a window; taken, it runs no more, and all bits are the same."""
    model, batch = zoo()[name](dropout=0.0)
    batches = [{"input_ids": batch["input_ids"], "labels": batch["input_ids"]} for _ in range(2)]
    graph = apply(draft_of(trace(model, batches[0])), DropMasks()).graph
    draft = one_device(graph, 2)
    wanted = train(fresh(draft, batches[0]), batches, None)
    for choose in (everything, some):
        losses, grads = train(fresh(draft, batches[0]), batches, choose)
        assert all(torch.equal(a, b) for a, b in zip(losses, wanted[0])) and grads.keys() == wanted[1].keys()
        assert all(torch.equal(grads[key], wanted[1][key]) for key in grads)
    for spec, runner, inputs in stages_of(draft, batches[0]):
        kept = runner.forward(inputs, 0, everything(spec, 0))[1]
        assert kept is not None and kept.num_bytes == sum(aligned(row.bytes) for row in spec.saved)
        rows = [n for n in kept.tensors if n.endswith("/1")]
        assert rows and all(n.partition("/")[0] in {row.name for row in spec.saved} for n in rows)
        with Calls() as calls, torch.enable_grad():
            runner._rematerialise(kept, inputs, 0)
        assert calls.count == 0


@pytest.mark.slow
def test_products_in_groups_are_kept() -> None:
    """Experts' products, two in a layer; taken, they run no more, and all bits are the same."""
    model, batch = mixtral(dropout=0.0, experts="grouped_mm")
    batches = [{"input_ids": batch["input_ids"], "labels": batch["input_ids"]} for _ in range(2)]
    draft = one_device(trace(model, batches[0]), 2)
    wanted = train(fresh(draft, batches[0]), batches, None)
    for choose in (everything, some):
        losses, grads = train(fresh(draft, batches[0]), batches, choose)
        assert all(torch.equal(a, b) for a, b in zip(losses, wanted[0])) and grads.keys() == wanted[1].keys()
        assert all(torch.equal(grads[key], wanted[1][key]) for key in grads)
    counts = []
    for spec, runner, inputs in stages_of(draft, batches[0]):
        for names in (everything(spec, 0), []):
            kept = Kept.partial({}) if not names else runner.forward(inputs, 0, names)[1]
            with Calls(torch.ops.aten._grouped_mm.default) as calls, torch.enable_grad():
                runner._rematerialise(kept, inputs, 0)
            counts.append(calls.count)
    assert sum(counts[::2]) == 0 and sum(counts[1::2]) == 4


class Calls(TorchDispatchMode):
    """Counts the calls of one op that run, of CPUs' fused attention if none is given."""

    def __init__(self, op: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default):
        super().__init__()
        self.op, self.count = op, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func is self.op
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(("gpt2",), IN_BF16))
def test_under_autocast_as_when_all_is_kept(name: str) -> None:
    graph, batches = traced_in(name, "bf16")
    draft = one_device(graph, 2)
    wanted = train(fresh(draft, batches[0], "bf16"), batches, None)
    for choose in (everything, some):
        losses, grads = train(fresh(draft, batches[0], "bf16"), batches, choose)
        assert all(torch.equal(a, b) for a, b in zip(losses, wanted[0])) and grads.keys() == wanted[1].keys()
        assert all(torch.equal(grads[key], wanted[1][key]) for key in grads)


@pytest.mark.parametrize(
    "name, precision",
    [
        *(
            pytest.param(name, "fp32", marks=[pytest.mark.slow] * (name != "gpt2"))
            for name in FAMILIES
            if name != "mixtral"
        ),
        ("gpt2", "bf16"),
        *(pytest.param(name, "bf16", marks=pytest.mark.slow) for name in ("llama", "vit")),
    ],
)
def test_bytes_and_flops_are_those_of_the_real_stage(name: str, precision: str) -> None:
    """Every call counts: what is kept has the planned bytes, and the second forward computes so much less."""
    graph, batches = traced_in(name, precision)
    draft = one_device(graph, 2)
    for spec, runner, inputs in stages_of(draft, batches[0], precision):
        keep = everything(spec, 0)
        outputs, kept = runner.forward(inputs, 0, keep)
        assert kept is not None and {n: t.nbytes for n, t in kept.tensors.items()} == {
            row.name: row.bytes for row in spec.saved
        }
        douts = [1.0 if o.name == spec.loss else torch.ones_like(x) for o, x in zip(spec.outputs, outputs)]
        counts = []
        for held in (None, kept):
            with FlopCounterMode(display=False) as counter:
                runner.backward(held, inputs, douts, None, 0)
            counts.append(counter.get_total_flops())
        assert spec.saved and counts[0] - counts[1] == sum(row.flops for row in spec.saved)
        assert len({row.name for row in spec.saved}) == len(spec.saved)


@pytest.mark.parametrize("level", ["layer", "operator"])
@pytest.mark.parametrize("name", slow_but(("gpt2",), ["gpt2", "llama", "wide_resnet"]))
def test_which_classes_autograd_saves_too(name: str, level: str) -> None:
    """Backward then needs that much less beside what was kept."""
    graph, batches = trace_case(name)
    draft = draft_of(graph, Hardware.cpu(num_devices=1))
    passes = [Coarsen(level=level), *all_passes(stages=2)[1:4]]
    for p in passes:
        p.rewrite(draft, p.plan(draft))
    for spec, runner, inputs in stages_of(draft, batches[0]):
        runner.weights_move = False  # so that the hooks here see what is saved
        runner.forward(inputs, 0)
        outputs, kept = runner.forward(inputs, 0, everything(spec, 0))
        assert kept is not None
        places = {name: t.untyped_storage().data_ptr() for name, t in kept.tensors.items()}
        saved: set[int] = set()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.add(t.untyped_storage().data_ptr()) or t.detach(), lambda t: t
        ):
            douts = [1.0 if o.name == spec.loss else torch.ones_like(x) for o, x in zip(spec.outputs, outputs)]
            runner.backward(kept, inputs, douts, None, 0)
        assert {row.name for row in spec.saved if row.is_saved} == {n for n, place in places.items() if place in saved}


@pytest.mark.parametrize("name", slow_but(("gpt2",), ["gpt2", "llama", "t5", "wide_resnet"]))
def test_workspaces_hold_what_a_partial_backward_needs(name: str) -> None:
    """Beside what was kept: everything that autograd saves, but for the classes themselves."""
    graph, batches = trace_case(name)
    for spec, runner, inputs in stages_of(one_device(graph, 2), batches[0], interpreted=True):
        runner.forward(inputs, 0)
        with Peak() as light:
            outputs, kept = runner.forward(inputs, 0, everything(spec, 0))
        out_bytes = sum(o.bytes for o in spec.outputs)
        assert light.most <= spec.light_workspace_bytes + out_bytes + sum(row.bytes for row in spec.saved)
        douts = [1.0 if o.name == spec.loss else torch.ones_like(x) for o, x in zip(spec.outputs, outputs)]
        grads = runner.backward(runner.forward(inputs, 0)[1], inputs, douts, None, 0)[1]
        with Peak() as again:
            runner.backward(kept, inputs, douts, grads, 0)
        rest = spec.kept_bytes - sum(row.bytes for row in spec.saved if row.is_saved)
        dinputs = sum(i.bytes for i in spec.inputs if i.requires_grad)
        most = max(spec.forward_workspace_bytes + out_bytes, spec.backward_workspace_bytes + dinputs)
        assert_close(most + rest, again.most, spec.title)


def test_classes_are_named_after_modules_and_numbered_through_the_stage() -> None:
    spec = one_device(trace_case("gpt2")[0], 2).stages[0].spec
    layer = ["attn.c_attn", "attn", "attn#2", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]  # dropout: attention is products
    names = [f"transformer.h.{i}.{name}" for i in range(2) for name in layer]
    found = {row.name: row.calls for row in spec.saved}
    assert list(found) == names[: len(found)] and len(found) >= 4
    assert list(found.values()) == [(i,) for i in range(len(found))]


@pytest.mark.parametrize("name", slow_but(("gpt2", "wide_resnet"), ["gpt2", "llama", "wide_resnet", "t5"]))
def test_operators_as_blocks_give_the_same_classes(name: str) -> None:
    graph, _ = trace_case(name)
    rows = [row for stage in one_device(graph, 1).stages for row in stage.spec.saved]
    draft = apply(draft_of(graph), Coarsen(level="operator"))
    calls = [call for block in draft.blocks for call in block.cost.calls or ()]
    assert sorted((c.bytes, c.flops) for c in calls if c.bytes >= 512) == sorted((r.bytes, r.flops) for r in rows)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_plans_for_gpus_number_the_same_calls(dropout: float) -> None:
    """Attention is one call there, also with dropout, for which it is two products here."""
    graph, _ = trace_case("gpt2", dropout)
    rows, others = [], []
    for hardware, count in ((Hardware.cpu(), 4 if dropout else 2), (Hardware.preset("mobius-v100"), 2)):
        draft = apply(draft_of(graph, hardware), Coarsen())
        calls = [(b.name, c, b.nodes[c.node].target) for b in draft.blocks for c in b.cost.calls or ()]
        rows.append([(name, c.node, c.flops) for name, c, _ in calls])
        attention = [c for _, c, target in calls if target is nn.functional.scaled_dot_product_attention]
        assert len(attention) == count and all(c.can_be_kept for c in attention)
        others.append([(n, c.node, c.bytes, c.flops) for n, c, _ in calls if c not in attention])
    assert others[0] == others[1] and (rows[0] == rows[1]) == (not dropout)
    out_bytes, rows_bytes = 2 * 8 * 32 * 4, 2 * 4 * 32 * 4  # CUDA's kernel pads 8 rows to 32
    assert {c.bytes for c in attention} == {out_bytes + rows_bytes} and all(c.is_saved for c in attention)


def test_measured_seconds_fall_with_what_is_kept() -> None:
    """From those of a whole rematerialisation to those of one that takes every class, by FLOPs."""
    draft = apply(draft_of(trace_case("gpt2")[0], Hardware.cpu(num_devices=1)), Coarsen())
    times = {b.hash: TurnSeconds(0.1, 0.2, 0.3, 0.05 if b.cost.calls else None) for b in draft.blocks}
    blocks = with_seconds(draft.blocks, {"cpu0": times})
    with_classes = sum(bool(b.cost.calls) for b in blocks)
    (stage,) = build_stages(draft.graph, blocks, [[b.name for b in blocks]])
    spec, whole_s, least_s = stage.spec, 0.2 * len(blocks), 0.2 * len(blocks) - 0.15 * with_classes
    assert with_classes >= 2 and spec.taking == (("cpu0", pytest.approx(least_s)),)
    every = sum(row.flops for row in spec.saved)
    assert spec.again_s("cpu0", whole_s, 0.0) == whole_s
    assert spec.again_s("cpu0", whole_s, every / 2) == pytest.approx((whole_s + least_s) / 2)
    assert spec.again_s("cpu0", whole_s, every) == pytest.approx(least_s)
    assert spec.again_s("gpu0", whole_s, every) == pytest.approx(whole_s * (1 - every / spec.forward_flops))


class InPlace(nn.Module):
    """Rectified in place: after a convolution, after a view of a product, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(4, 16, 1, bias=False), nn.Linear(16, 16, bias=False)
        self.third, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.relu(self.first(x)).transpose(1, 2)
        h = torch.relu_(self.second(h.contiguous()))
        return {"loss": nn.functional.cross_entropy(self.head(self.third(h).tanh()).mean(1), labels)}


def test_what_is_changed_in_place_is_no_class() -> None:
    batch = {"x": torch.randn(2, 4, 32), "labels": torch.tensor([0, 2])}
    graph, batches = traced_model(InPlace(), [batch])
    draft = one_device(graph, 1)
    (spec,) = (stage.spec for stage in draft.stages)
    assert [(row.name, row.calls) for row in spec.saved] == [("third", (2,)), ("head", (3,))]
    losses, grads = train(fresh(draft, batch), batches, everything)
    wanted, sums = Eager(draft).step(batches)
    assert torch.equal(losses[0], wanted[0])
    assert all(torch.equal(g, sums[key.partition(" ")[2]]) for key, g in grads.items()) and grads


class Filtered(nn.Module):
    """Multiplies the batch by a fixed matrix, which every stage that reads it does anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filters", torch.randn(8, 16))
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.head(x @ self.filters), labels)}


class Similar(nn.Module):
    """Compares the tokens of the batch by a product without parameters, in every stage that reads it."""

    def __init__(self, compare: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.compare, self.first, self.head = compare, nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.first(x)) * self.compare(x).mean()
        return {"loss": nn.functional.cross_entropy(self.head(h).mean(1), labels)}


@pytest.mark.parametrize(
    ("compare", "is_numbered"),
    [
        (lambda x: x @ x.mT, True),
        (lambda x: torch.einsum("bij,bkj->bik", x, x), True),
        (lambda x: x[0] @ x[1].T, False),
        (lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]), False),
    ],
)
def test_products_in_batches_of_the_batch_alone_are_numbered(
    compare: Callable[[Tensor], Tensor], is_numbered: bool
) -> None:
    batch = {"x": torch.randn(2, 4, 16), "labels": torch.tensor([0, 2])}
    graph, batches = traced_model(Similar(compare), [batch])
    draft = one_device(graph, 1)
    (spec,) = (stage.spec for stage in draft.stages)
    assert bool(spec.saved) == is_numbered
    losses, grads = train(fresh(draft, batch), batches, everything)
    wanted, sums = Eager(draft).step(batches)
    assert torch.equal(losses[0], wanted[0])
    assert all(torch.equal(g, sums[key.partition(" ")[2]]) for key, g in grads.items()) and grads


def test_no_classes_where_calls_cannot_be_numbered() -> None:
    lstm, _ = trace_case("lstm")
    assert all(stage.spec.saved == () for stage in one_device(lstm, 1).stages)
    filtered, _ = traced_model(Filtered(), [{"x": torch.randn(16, 8), "labels": torch.zeros(16, dtype=torch.long)}])
    assert all(stage.spec.saved == () for stage in one_device(filtered, 1).stages)
