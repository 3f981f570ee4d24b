"""`map-replicas`: stages on several devices, which take micro-batches in turn, train as one device does."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from penstock.compiler.capture.trace import trace
from penstock.compiler.pipeline import parse_pipeline
from penstock.graph.opgraph import OpGraph
from penstock.ir import ops
from penstock.ir.errors import PassError, VerifyError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.machine.overrides import with_slower
from penstock.ir.program import Program
from penstock.ir.verify import verify
from penstock.passes.draft import Draft
from penstock.passes.mapping.map_replicas import MapReplicas
from penstock.passes.schedule.evaluation import evaluation_programs
from penstock.runtime.simulate import simulate
from penstock.tests.passes.running import apply, assert_trains_like_eager, chain, draft_of, trace_case

TIERS = "insert-remat, insert-fetch, insert-optimizer"
LINE = f"coarsen, {{mesh}}partition-pipedream{{{{replicas=true}}}}, map-replicas, {{schedule}}, {TIERS}"
PLAIN = f"coarsen, partition-pipedream, map-round-robin, {{schedule}}, {TIERS}"
# Gradients are added on each device and then over devices, in eager one after the other: another order of additions.
TOLERANCE = 2e-6


class WideTable(nn.Module):
    """A table with nearly all parameters and little work, then layers with few parameters and nearly all work."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20000, 64)
        made = (nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 64)) for _ in range(2))
        self.layers = nn.ModuleList(made)

    def forward(self, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        h = self.table(ids)
        for layer in self.layers:
            h = h + layer(h)
        return nn.functional.mse_loss(h.mean(1), target)


@functools.cache
def wide_table() -> OpGraph:
    with torch.device("meta"):
        model = WideTable()
    ids, target = {"shape": [16, 128], "dtype": "int64"}, {"shape": [16, 64], "dtype": "float32"}
    return trace(model, {"ids": ids, "target": target})


def make_draft(
    graph: Any, devices: int = 4, stages: int = 0, mesh: str = "", schedule: str = "1f1b", **options: Any
) -> Draft:
    """`stages`: cut by balance into as many; 0: by PipeDream's planner."""
    balanced = f"partition-balanced{{{{stages={stages}}}}}"
    line = LINE.replace("partition-pipedream{{replicas=true}}", balanced) if stages else LINE
    draft = draft_of(graph, Hardware.cpu(num_devices=devices, link="50MB/s"), **{"micro_batches": 4, **options})
    return apply(draft, *parse_pipeline(line.format(mesh=mesh, schedule=f"schedule-{schedule}"), devices), memory=True)


def turns(program: Program, op: Any = ops.forward) -> list[tuple[str, int]]:
    return [(str(n.args[0]), n.kwargs["micro_batch"]) for n in program.ops() if n.target is op]  # type: ignore[misc]


def test_devices_join_the_slowest_stage_and_take_turns() -> None:
    draft = make_draft(wide_table(), micro_batches=12)
    assert draft.partition == [["table"], ["layers.0", "layers.1"]] and draft.copies == {"stage1": [1, 2, 3]}
    for first, program in enumerate(draft.programs[1:]):
        assert turns(program) == [("stage1", m) for m in range(first, 12, 3)]
    order = [node.target for node in draft.programs[1].ops()]
    sums = [node for node in draft.programs[1].ops() if node.target is ops.all_reduce]
    assert [node.kwargs["group"] for node in sums] == ["copies.stage1"]
    assert ops.send in order and ops.send not in order[order.index(ops.all_reduce) :]  # others wait for these to meet


@pytest.mark.parametrize(
    ("model", "devices", "stages", "mesh", "schedule", "max_norm"),
    [
        ("gpt2", 3, 2, "", "1f1b", 0.5),  # whose table is tied to its head, in the other stage
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("bert", 3, 2, "", "1f1b", 0.5),
                ("bert", 4, 2, "", "pipeline", None),
                ("bert", 4, 1, "mesh{depth=2}, ", "1f1b", 0.5),
                ("bert", 4, 3, "", "1f1b", 0.5),
                ("gpt2", 4, 3, "", "pipeline", None),
                ("gpt2", 6, 2, "mesh{depth=3}, ", "1f1b", 0.5),
            )
        ),
    ],
)
def test_training_is_eagers(
    model: str, devices: int, stages: int, mesh: str, schedule: str, max_norm: float | None
) -> None:
    graph, batches = trace_case(model)
    draft = make_draft(
        graph, devices, stages, mesh, schedule, max_grad_norm=max_norm, micro_batches=3 if not mesh else 4
    )
    assert draft.copies
    assert_trains_like_eager(draft, batches if not mesh else [*batches, batches[0]], TOLERANCE)


def test_evaluation_gives_results_in_the_order_of_the_batch() -> None:
    draft = make_draft(chain(depth=3), 3, 2)
    programs = evaluation_programs(draft, {})
    verify(programs, draft.lane_hardware)
    done = [m for program in programs for stage, m in turns(program, ops.evaluate) if stage == "stage1"]
    assert done == [0, 1, 2, 3]


def test_a_sum_that_is_missing_is_refused() -> None:
    draft = make_draft(wide_table(), micro_batches=12)
    program = draft.programs[2]
    node = next(n for n in program.ops() if n.target is ops.all_reduce)
    result, operand = next(iter(node.users)), node.args[0]
    result.replace_all_uses_with(operand)  # type: ignore[arg-type]
    program.graph.erase_node(result)
    program.graph.erase_node(node)
    with pytest.raises(VerifyError):
        verify(draft.programs, draft.lane_hardware)


@pytest.mark.slow
def test_what_stages_share_is_added_up_after_their_own_sums() -> None:
    """Only the first of a stage's devices adds to what it shares, which before its own sum is a part of it."""
    draft = make_draft(trace_case("gpt2")[0], 3, 2)
    (stage,) = draft.copies
    for device in draft.copies[stage]:
        program = draft.programs[device]
        own = next(n for n in program.ops() if n.kwargs.get("group") == f"copies.{stage}")
        total = next(iter(own.users))
        total.replace_all_uses_with(own.args[0])  # type: ignore[arg-type]
        program.graph.erase_node(total)
        program.graph.erase_node(own)
    with pytest.raises(VerifyError, match=r"stage\d were not summed with those of device \d before"):
        verify(draft.programs, draft.lane_hardware)


@pytest.mark.slow
def test_a_hybrid_is_faster_where_a_light_stage_has_most_parameters() -> None:
    """As a pipeline of one stage a device, and as data parallelism in all layouts, which sum the large table."""
    hardware, steps = Hardware.cpu(num_devices=4, link="50MB/s"), dict[str, float]()
    for line in (LINE, PLAIN, *(PLAIN.replace("coarsen", f"coarsen, mesh{{{{depth={depth}}}}}") for depth in (1, 2))):
        draft = draft_of(wide_table(), hardware, micro_batches=12)
        apply(draft, *parse_pipeline(line.format(mesh="", schedule="schedule-1f1b"), 4))
        steps[line] = simulate(draft.programs, hardware).step_s
    assert steps[LINE] < min(took_s for line, took_s in steps.items() if line != LINE)


def test_one_stage_on_all_devices_is_data_parallelism() -> None:
    hardware, steps = Hardware.cpu(num_devices=2), []
    for line in (LINE.replace("partition-pipedream{{replicas=true}}", "partition-balanced{{stages=1}}"),
                 PLAIN.replace("coarsen", "coarsen, mesh")):  # fmt: skip
        draft = draft_of(wide_table(), hardware, micro_batches=4)
        apply(draft, *parse_pipeline(line.format(mesh="", schedule="schedule-1f1b"), 2))
        steps.append(simulate(draft.programs, hardware).step_s)
    assert steps[0] == pytest.approx(steps[1])


@pytest.mark.slow
def test_changed_buffers_are_refused() -> None:
    with pytest.raises(PassError, match="changes a buffer in every forward"):
        make_draft(trace_case("wide_resnet")[0], 3, 2)


def test_what_cannot_be_copied_is_refused() -> None:
    with pytest.raises(PassError, match="use schedule-1f1b"):
        make_draft(chain(depth=3), 4, 2, schedule="zero-bubble")
    copied = draft_of(chain(depth=3), Hardware.cpu(num_devices=4), micro_batches=4)
    line = "coarsen, partition-balanced{stages=2}, map-replicas, schedule-async"
    with pytest.raises(PassError, match="schedule-async has every stage on one device, and stage0 runs on several"):
        apply(copied, *parse_pipeline(line, 4))
    with pytest.raises(PassError, match=r"one stage a device or fewer, such as partition-balanced\{stages=1\}"):
        make_draft(chain(depth=4), 2, 4)
    draft = draft_of(chain(depth=3), with_slower(Hardware.cpu(num_devices=3), {1: 2.0}), micro_batches=4)
    passes = parse_pipeline("coarsen, partition-balanced{stages=1}, map-replicas", 3)
    with pytest.raises(PassError, match=r"they differ; use mesh\{by_speed=true\}"):
        apply(draft, *passes)
    with pytest.raises(PassError, match="cuts stages for several devices each; put map-replicas after it"):
        parse_pipeline("coarsen, partition-pipedream{replicas=true}, map-round-robin", 3)


def test_an_edited_plan_is_checked() -> None:
    draft = draft_of(chain(depth=3), Hardware.cpu(num_devices=3), micro_batches=2)
    apply(draft, *parse_pipeline("coarsen, partition-balanced{stages=1}", 3))
    for copies, said in (
        ({"stage0": [1, 0]}, "the first is its device"),
        ({"stage7": [0, 1]}, "the stages are stage0"),
        ({"stage0": [0, 5]}, "names device 5; there are 0 to 2"),
        ({"stage0": [0, 1, 2]}, "3 devices for 2 micro-batches"),
    ):
        with pytest.raises(PassError, match=said):
            MapReplicas().rewrite(draft, {"devices": [0], "copies": copies})
