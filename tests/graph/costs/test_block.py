"""Costs on fake tensors against what a stage really does on the CPU: saved bytes, workspaces, FLOPs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from penstock.compiler.capture.trace import trace
from penstock.graph.costs import block as costs
from penstock.graph.layers import find_blocks
from penstock.ir.machine.hardware import Hardware
from penstock.passes.rewrite.chunk_loss import ChunkLoss
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.passes.rewrite.split_vocabulary import SplitVocabulary
from penstock.runtime.functions import chunked_cross_entropy, part_statistics
from penstock.tests.passes.running import apply, draft_of, trace_case
from penstock.tests.passes.stage_runs import Peak, assert_close, one_device, stages_of
from penstock.tests.shown_elsewhere import slow_but
from penstock.tests.zoo import mixtral, zoo

# Only oneDNN knows the workspace that its recurrent layers keep.
KNOWN = [name for name in zoo() if name != "lstm"]


@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.slow), 0], ids=["two", "most"])
@pytest.mark.parametrize("name", slow_but(("gpt2", "custom_function", "in_place"), KNOWN))
def test_saved_bytes_are_those_of_the_real_stage(name: str, stages: int) -> None:
    """To the byte: storages once, without inputs, parameters and buffers, and views of them."""
    graph, batches = trace_case(name)
    count = stages or len(Coarsen().plan(draft_of(graph)))
    for spec, runner, inputs in stages_of(one_device(graph, count), batches[0]):
        runner.forward(inputs, 0)
        assert spec.kept_bytes == runner.kept_bytes, spec.title


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "vit"])
def test_saved_bytes_of_fused_attention(name: str) -> None:
    """Without dropout, CPUs fuse attention as well: other kernels, which save other things."""
    graph, batches = trace_case(name, dropout=0.0)
    for spec, runner, inputs in stages_of(one_device(graph, 2), batches[0]):
        runner.forward(inputs, 0)
        assert spec.kept_bytes == runner.kept_bytes, spec.title


@pytest.mark.parametrize(
    "name", slow_but(("gpt2", "in_place"), ["gpt2", "llama", "bert", "t5", "vit", "mixtral", "wide_resnet", "in_place"])
)
def test_workspaces_hold_what_the_real_stage_needs(name: str) -> None:
    """Peaks of forward, light forward and backward, each from nothing, against kept bytes, results and workspace."""
    graph, batches = trace_case(name)
    for spec, runner, inputs in stages_of(one_device(graph, 2), batches[0], interpreted=True):
        outputs = sum(o.bytes for o in spec.outputs)
        runner.forward(inputs, 0)
        with Peak() as light:
            made = runner.forward(inputs, 0, keep=False)
        assert_close(spec.light_workspace_bytes + outputs, light.most, spec.title)
        with Peak() as full:
            made = runner.forward(inputs, 0)
        assert_close(spec.forward_workspace_bytes + spec.kept_bytes + outputs, full.most, spec.title)
        douts = [1.0 if o.name == spec.loss else torch.ones_like(x) for o, x in zip(spec.outputs, made[0])]
        grads = runner.backward(made[1], inputs, douts, None, 0)[1]
        del made
        with Peak() as again:
            runner.backward(None, inputs, douts, grads, 0)
        dinputs = sum(i.bytes for i in spec.inputs if i.requires_grad)
        forward = spec.forward_workspace_bytes + spec.kept_bytes + outputs
        backward = spec.backward_workspace_bytes + spec.kept_bytes + dinputs
        assert_close(max(forward, backward), again.most, spec.title)


@pytest.mark.parametrize("name", slow_but(("gpt2",), ["gpt2", "llama", "t5", "wide_resnet"]))
def test_flops_add_up_to_the_whole_models(name: str) -> None:
    graph, batches = trace_case(name)
    draft = apply(draft_of(graph), Coarsen())
    counter = FlopCounterMode(display=False)
    with torch.random.fork_rng(devices=[]), counter:
        loss = graph.module(**batches[0])["loss"]
        forward = counter.get_total_flops()
        loss.backward()
    graph.model.zero_grad()
    ours = [sum(b.cost.forward_flops for b in draft.blocks), sum(b.cost.backward_flops for b in draft.blocks)]
    theirs = [forward, counter.get_total_flops() - forward]
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_saved_bytes_under_autocast(name: str) -> None:
    """Parameters in bf16, as a bf16 plan holds them."""
    model, batch = zoo()[name]()
    graph = trace(model, batch, autocast=torch.bfloat16, param_dtype=torch.bfloat16)
    draft = one_device(graph, 3)
    assert {p.dtype for s in draft.stages for p in s.spec.params} == {"bfloat16"}
    full = sum(s.spec.kept_bytes for s in one_device(trace_case(name)[0], 3).stages)
    assert sum(s.spec.kept_bytes for s in draft.stages) < 0.8 * full
    for spec, runner, inputs in stages_of(draft, batch, "bf16"):
        runner.forward(inputs, 0)
        assert spec.kept_bytes == runner.kept_bytes, spec.title


def test_plans_for_gpus_count_what_gpus_save() -> None:
    """Dropout keeps one byte an element there, attention one number a row instead of all scores."""
    cpu, gpu = (
        draft_of(trace_case("gpt2")[0], hardware) for hardware in (Hardware.cpu(), Hardware.preset("mobius-v100"))
    )
    block = apply(cpu, Coarsen()).blocks[2]
    gpu_block = apply(gpu, Coarsen()).blocks[2]
    assert block.name == gpu_block.name == "transformer.h.0"
    width, rows = 32, 2 * 8
    dropout = 2 * rows * width * (4 - 1)
    assert block.cost.kept_bytes - gpu_block.cost.kept_bytes > dropout
    assert gpu_block.cost.forward_flops >= block.cost.forward_flops


@pytest.mark.slow
def test_experts_in_groups_cost_their_rows() -> None:
    """Torch knows neither shapes (but for bf16) nor FLOPs of products in groups; each row meets one expert's matrix."""
    model, batch = mixtral(experts="grouped_mm")
    draft = apply(draft_of(trace(model, batch)), Coarsen())
    layer = next(b for b in draft.blocks if b.name == "model.layers.0")
    rows, width, inner = 2 * 8 * 2, 32, 64
    assert layer.cost.forward_flops > 2 * rows * (width * 2 * inner + inner * width)
    assert layer.cost.backward_flops == pytest.approx(2 * layer.cost.forward_flops, rel=0.2)


@pytest.mark.slow
def test_frozen_experts_keep_no_rows() -> None:
    """Products in groups, of which backward needs the weights alone: to the byte what the real stage keeps."""
    model, batch = mixtral(experts="grouped_mm")
    model.requires_grad_(False)
    model.get_input_embeddings().requires_grad_(True)  # type: ignore[operator]
    trained = one_device(trace(*mixtral(experts="grouped_mm")), 2)
    draft = one_device(trace(model, batch), 2)
    for stage, (spec, runner, inputs) in zip(trained.stages, stages_of(draft, batch)):
        runner.forward(inputs, 0)
        assert spec.kept_bytes == runner.kept_bytes < stage.spec.kept_bytes, spec.title


def test_a_weight_that_two_blocks_share_keeps_a_part_of_its_gradient_alive() -> None:
    """From the last block that uses it back to the first: here GPT-2's embedding, in one stage."""
    draft = one_device(trace_case("gpt2")[0], 1)
    spec = draft.stages[0].spec
    tied = next(p.bytes for p in spec.params if p.name == "transformer.wte.weight")
    blocks = {b.name: b.cost.backward_peak_bytes for b in draft.blocks}
    assert spec.backward_workspace_bytes >= tied
    assert blocks["transformer.wte"] >= tied


def test_gaps_that_have_no_room_count_up_to_the_largest_tensor() -> None:
    """The logits, 64 kB, are by far the largest tensor, in each of the three runs."""
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 1024, bias=False))
    graph = trace(Loss(model), {"words": torch.zeros(2, 8, dtype=torch.long)})
    last, logits_bytes = find_blocks(graph)[-1], 2 * 8 * 1024 * 4

    def peaks(gaps_bytes: int | None) -> tuple[int, ...]:
        cost = costs.measure(graph, last, "cuda", gaps_bytes=gaps_bytes)
        return cost.forward_peak_bytes, cost.light_peak_bytes, cost.backward_peak_bytes

    bare = peaks(None)
    assert peaks(logits_bytes) == bare
    assert peaks(logits_bytes - 1000) == tuple(peak + 1000 for peak in bare)


class Loss(nn.Module):
    def __init__(self, layers: nn.Sequential):
        super().__init__()
        self.layers = layers

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (self.layers(words) ** 2).mean()
        return out


class Guess(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(300, 4), nn.Linear(4, 300, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.table(words))[0], words[0])


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
def test_costs_of_some_pieces_of_a_loss_are_those_of_all(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of tokens in forward, slices of classes in backward; some are smaller than the others."""
    draft = draft_of(trace(Guess(), {"words": torch.zeros(1, 29, dtype=torch.long)}))
    apply(draft, ChunkLoss(4), SplitVocabulary(parts), Coarsen())
    some = [costs.measure(draft.graph, block) for block in draft.blocks]
    monkeypatch.setattr(costs.FakeBlockRun, "some", lambda self, bounds: iter(bounds))
    assert some == [costs.measure(draft.graph, block) for block in draft.blocks]
    targets = [node.target for block in draft.blocks for node in block.nodes]
    assert (chunked_cross_entropy if parts == 1 else part_statistics) in targets
