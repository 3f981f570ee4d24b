"""Experts in parts: jobs equal eager PyTorch, on devices that could not hold a layer; whatever is saved is whole."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import penstock
from penstock.compiler.capture.trace import trace
from penstock.compiler.job.job import Job
from penstock.compiler.strategies import STRATEGIES
from penstock.graph.costs.measured import measure_blocks
from penstock.graph.edit import copy_graph
from penstock.graph.experts.layers import find_expert_layers
from penstock.graph.layers import find_blocks
from penstock.ir import ops
from penstock.ir.errors import DoesNotFit, PassError
from penstock.passes.draft import Draft
from penstock.passes.rewrite.split_experts import SplitExperts, split_layers
from penstock.runtime.experts.split_experts import join_part, member_result, member_rows, part_rows
from penstock.tests import zoo
from penstock.tests.compiler.eager_baseline import MICRO_BATCHES, SGD, assert_close, assert_trains_like_eager
from penstock.tests.compiler.reasons import raises_misfit

BALANCED = STRATEGIES["balanced"]
MODELS = {"mixtral": zoo.mixtral, "qwen3_moe": zoo.qwen3_moe, "deepseek_v3": zoo.deepseek_v3}


def split(parts: int | str, strategy: str = BALANCED, stages: int = 0) -> str:
    cut = f"partition-balanced{{stages={stages}}}" if stages else "partition-balanced"
    made = strategy.replace("coarsen", f"split-experts{{parts={parts}}}, coarsen")
    return made.replace("partition-balanced", cut)


def case(name: str = "mixtral") -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model without dropout, and a batch of eight rows."""
    model, _ = MODELS[name](dropout=0.0)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, zoo.VOCABULARY, (8, 8), generator=generator)
    return model, {"input_ids": ids, "labels": ids.clone()}


def job_of(model: nn.Module, batch: Any, memory: str = "64MB", num_devices: int = 1, **options: Any) -> Job:
    hardware = penstock.Hardware.cpu(num_devices=num_devices, memory=memory, dram="1GB")
    return penstock.compile(
        model,
        hardware,
        example_inputs=batch,
        **{"optimizer": SGD, "micro_batches": MICRO_BATCHES, "strategy": split(2), **options},
    )


@pytest.mark.parametrize(
    "name, parts",
    [
        pytest.param("mixtral", 3, marks=pytest.mark.slow),
        pytest.param("mixtral", 4, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 5, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 2, marks=pytest.mark.slow),
    ],
)
def test_experts_in_parts_are_bit_for_bit_the_whole_layer(name: str, parts: int) -> None:
    """Each row meets the matrix of its expert in one part, so that no sum has another order."""
    model, batch = case(name)
    job = job_of(model, batch, strategy=split(parts, stages=6))
    assert {len(experts) - 1 for experts in job.plan.decisions.experts.values()} == {parts}
    assert len(job.plan.decisions.stages) == 6
    assert_trains_like_eager(job, batch)


@given(st.lists(st.integers(0, 3), min_size=6, max_size=6), st.integers(0, 2), st.sampled_from([(), (2,), (2, 1)]))
@settings(max_examples=20, deadline=None)
def test_results_of_all_parts_are_in_the_places_of_their_rows(
    counts: list[int], after: int, shape: tuple[int, ...]
) -> None:
    """Also where an expert has no rows, and where rows belong to none. Parts are those of a device in turn (`begin` and
    `end`), or those of members of a team, whose results are added up."""
    offsets = torch.tensor(counts).cumsum(0)
    rows = torch.rand(int(offsets[-1]) + after + 1, *shape) + 1
    whole = rows.clone()
    whole[offsets[-1] :] = 0
    for members in (1, 2, 3, 6):
        sums, found = torch.zeros_like(rows), None
        for member in range(members):
            number, begin, end = torch.tensor([member]), member * 6 // members, (member + 1) * 6 // members
            sums += member_result(member_rows(rows, offsets, number, members), offsets, number, members)
            found = join_part(found, part_rows(rows, offsets, begin), offsets, begin, end)
        assert found is not None and torch.equal(sums, whole) and torch.equal(found, whole)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices, cut", [(2, ""), (4, ""), (2, ", together=true")])
def test_parts_on_several_devices(num_devices: int, cut: str) -> None:
    model, batch = case("qwen3_moe")
    strategy = split(4, stages=8).replace("stages=8", f"stages=8{cut}")
    job = job_of(model, batch, num_devices=num_devices, strategy=strategy)
    held = {part for spec in job.folder.interface.stages.values() for part in (p.part for p in spec.params) if part}
    assert len(held) == 4 * 2 * 2  # parts, matrices of an expert, layers
    assert_trains_like_eager(job, batch, 1e-7)  # gradients of stages on other devices are added in another order


def wide_case() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """One layer whose experts, 768 KiB, are large beside what a micro-batch of four tokens makes."""
    sizes = {"intermediate_size": 512, "num_hidden_layers": 1}
    config = transformers.MixtralConfig(**{**zoo.mixtral()[0].config.to_dict(), **sizes, "attention_dropout": 0.0})
    torch.manual_seed(0)
    ids = torch.randint(0, zoo.VOCABULARY, (4, 4))
    return transformers.MixtralForCausalLM(config).train(), {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "balanced", "mobius"])
def test_a_layer_that_no_device_holds_is_trained(strategy: str) -> None:
    """Three times 768 KiB are more than the device has."""
    model, batch = wide_case()
    with raises_misfit():
        job_of(model, batch, "1.5MB", strategy=BALANCED.replace("coarsen", "coarsen{level=operator}"))
    job = job_of(model, batch, "1.5MB", strategy=strategy, search_s=1.0)
    assert list(job.plan.decisions.experts) == ["model.layers.0.mlp.experts"]
    assert_trains_like_eager(job, batch)


def test_whole_experts_that_no_device_holds_are_not_tried() -> None:
    """768 KiB of experts have gradients of the same size; a micro-batch of four tokens has rows of 27 KiB."""
    model, batch = wide_case()
    graph = trace(model, {name: rows[:1] for name, rows in batch.items()})
    for memory, must, times, has_room in (("1.5MB", True, 1.0, True), ("4MB", False, 1.0, True),
                                          ("1.5MB", True, 100.0, False)):  # fmt: skip
        draft = Draft(graph, penstock.Hardware.cpu(num_devices=1, memory=memory, dram="1GB"))
        assert SplitExperts().must_divide(draft) == must
        assert SplitExperts().has_room(draft, times) == has_room


@pytest.mark.slow
def test_parts_that_would_wait_for_each_other_for_ever_are_refused_with_the_pass_that_fits() -> None:
    """Rows for the parts on other devices fill a device. Where one device has all parts of a layer, there is room."""
    sizes = {"intermediate_size": 512, "num_hidden_layers": 4, "num_local_experts": 8, "attention_dropout": 0.0}
    config = transformers.MixtralConfig(**{**zoo.mixtral()[0].config.to_dict(), **sizes})
    ids = torch.randint(0, zoo.VOCABULARY, (32, 64))
    model, batch = transformers.MixtralForCausalLM(config).train(), {"input_ids": ids, "labels": ids.clone()}
    ending = "map-round-robin, schedule-pipeline, choose-activations, insert-fetch, insert-optimizer"

    def plan_for(cut: str) -> Job:
        strategy = f"split-experts{{parts=8}}, coarsen, {cut}, {ending}"
        return job_of(model, batch, "9MB", 4, micro_batches=8, strategy=strategy)

    apart = r"for ever: the parts of model\.layers\.\d\.mlp\.experts are on several devices.*\{together=true\}"
    with pytest.raises(DoesNotFit, match=apart):
        plan_for("partition-min-stage{inputs_leave=true}")
    assert plan_for("partition-balanced{stages=43, inputs_leave=true, together=true}").plan.decisions.experts


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["mobius-ssd", "fuyou"])
def test_parts_on_every_tier(strategy: str, tmp_path: Path) -> None:
    model, batch = case()
    hardware = penstock.Hardware.cpu(num_devices=1, memory="500kB", dram="1GB").with_(ssds=1)
    options: dict[str, Any] = {"example_inputs": batch, "optimizer": SGD, "micro_batches": MICRO_BATCHES}
    with penstock.compile(
        model, hardware, strategy=split(4, STRATEGIES[strategy]), ssd_dirs=[tmp_path], **options
    ) as job:
        assert job.plan.decisions.experts
        assert_trains_like_eager(job, batch)


@pytest.mark.slow
def test_what_is_saved_is_whole_and_resumes_with_other_parts_or_none(tmp_path: Path) -> None:
    model, batch = case()
    options: dict[str, Any] = {"optimizer": partial(torch.optim.AdamW, lr=1e-3)}
    with job_of(copy.deepcopy(model), batch, strategy=split(4, stages=4), **options) as job:
        job.step(batch)
        saved = job.save(tmp_path / "saved")
        job.save_pretrained(tmp_path / "weights")
        assert_close(load_file(tmp_path / "weights" / "model.safetensors"), job.state_dict(), 0.0)
        wanted = job.step(batch)
    for strategy in (split(3), BALANCED):
        with job_of(copy.deepcopy(model), batch, strategy=strategy, **options) as job:
            job.resume(saved)
            assert job.step(batch) == wanted


@pytest.mark.slow
def test_parts_cost_together_what_the_layer_does() -> None:
    """FLOPs are those of the layer; each part is a block of its own, as is what comes after the layer."""
    model, batch = case()
    graph = trace(model, batch)
    whole = measure_blocks(graph, find_blocks(graph), "cpu", None)
    name = "model.layers.0.mlp.experts"
    found = copy_graph(graph)
    split_layers(found, [(find_expert_layers(found)[name], [0, 1, 3, 4])])
    found = copy_graph(found)
    blocks = measure_blocks(found, find_blocks(found), "cpu", None)
    own = [block for block in blocks if block.name.startswith("model.layers.0")]
    ends = ["", ".mlp.experts[0:1]", ".mlp.experts[1:3]", ".mlp.experts[3:4]", "#2"]
    assert [block.name for block in own] == [f"model.layers.0{end}" for end in ends]
    for cost in ("forward_flops", "backward_flops"):
        assert sum(getattr(b.cost, cost) for b in blocks) == sum(getattr(b.cost, cost) for b in whole)
    assert sum(block.param_bytes for block in blocks) == sum(block.param_bytes for block in whole)
    products = [call for block in own if "[" in block.name for call in block.cost.calls or ()]
    assert products and not any(call.can_be_kept for call in products)  # rows of other parts become zeros after it


@pytest.mark.slow
def test_what_parts_gave_lies_nowhere_until_backward() -> None:
    """The second part of a layer takes what the first one gave, and what reads both parts takes what the second one
    gave. Backward needs values of the latter alone, and the gradient of each is that of the whole layer to the bit."""
    model, batch = wide_case()
    job = job_of(model, batch, "1.5MB", strategy=split(2, stages=5))
    stages = list(job.folder.interface.stages.values())
    passing = [spec.passing for spec in stages]
    assert [len(names) for names in passing] == [0, 0, 0, 1, 0]
    second = stages[3]
    assert [i is None for i in second.backward_inputs] == [i.name in second.passing for i in second.inputs]
    assert next(i for i in second.inputs if i.name in second.passing).requires_grad
    backward = next(n for n in job.programs[0].ops() if n.target is ops.backward and n.args[0] == second.name)
    assert [value is None for value in backward.args[3]] == [i is None for i in second.backward_inputs]
    assert_trains_like_eager(job, batch)


def test_parts_are_small_where_all_devices_update_theirs_through_dram() -> None:
    """Where states come from SSD, those of two parts of each device lie in DRAM at a time. Here the layer has 3.1 MB
    with gradients and states, of which a device would hold a third: each expert becomes a part of its own."""
    model, batch = wide_case()
    graph = trace(model, batch)
    for dram, ssds, parts in (("300kB", 1, 4), ("300kB", 0, 3), ("1GB", 1, 3)):
        hardware = penstock.Hardware.cpu(num_devices=1, memory="2.5MB", dram=dram).with_(ssds=ssds)
        found = SplitExperts().plan(Draft(graph, hardware))
        assert {len(experts) - 1 for experts in found.values()} == {parts}


@pytest.mark.slow
def test_whoever_asks_for_what_cannot_be_hears_why() -> None:
    model, batch = case()
    with pytest.raises(PassError, match=r"layers.0.mlp.experts and 1 more stay whole: it has 4 experts only"):
        job_of(model, batch, strategy=split(5))
    with pytest.raises(PassError, match="its optimizer looks at whole parameters"):
        job_of(model, batch, strategy=split(2), optimizer=partial(torch.optim.Adafactor, lr=1e-3))
    model.set_experts_implementation("batched_mm")  # type: ignore[operator]
    with pytest.raises(PassError, match="set_experts_implementation"):
        job_of(model, batch, strategy=split(2))


@pytest.mark.slow
@pytest.mark.parametrize("experts", [[0, 3, 2, 4]])
def test_an_edited_plan_with_a_gap_or_an_overlap_is_refused(experts: list[int]) -> None:
    model, batch = case()
    plan = job_of(model, batch).plan
    plan.decisions.experts["model.layers.1.mlp.experts"] = experts
    with pytest.raises(PassError, match=r"layers.1.mlp.experts begin at experts .* 4 must end the list"):
        job_of(model, batch, strategy="auto", micro_batches="auto", plan=plan)
