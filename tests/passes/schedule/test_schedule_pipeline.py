"""`schedule-pipeline`: fill and drain, values with several readers, evaluation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.ir import ops
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import plan_arena
from penstock.ir.verify import verify
from penstock.passes.schedule.evaluation import evaluation_programs
from penstock.passes.schedule.flow import Flow, Message
from penstock.passes.schedule.schedule import interface_of
from penstock.passes.schedule.schedule_pipeline import SchedulePipeline
from penstock.runtime.simulate import simulate
from penstock.tests.golden_text import Golden
from penstock.tests.passes.running import (
    all_passes,
    apply,
    chain,
    cut,
    draft_of,
    text_of,
    to_schedule,
    trace_case,
    traced_model,
)


def test_two_stages_two_micro_batches(golden: Golden) -> None:
    draft = apply(draft_of(chain(depth=2), micro_batches=2), *to_schedule())
    golden(text_of(draft), "gpipe")


def test_stages_alternate_on_their_device(golden: Golden) -> None:
    draft = apply(draft_of(chain(depth=3), micro_batches=2), *to_schedule(4))
    golden(text_of(draft), "four-stages")


def test_a_value_with_readers_on_several_devices_is_sent_to_each_once(golden: Golden) -> None:
    """T5's encoder output: gradients are added where they are made, sent back once, and added again."""
    hardware = Hardware.cpu(num_devices=3)
    draft = apply(draft_of(trace_case("t5")[0], hardware), *to_schedule(6))
    golden(text_of(draft), "t5")
    sends = [n.kwargs["tag"] for p in draft.programs for n in p.ops() if n.target is ops.send]
    assert all(sends.count(tag) <= 2 for tag in sends)  # one per other device


def test_evaluation(golden: Golden) -> None:
    draft = apply(draft_of(chain(depth=2), micro_batches=2), *all_passes(3))
    draft.programs = evaluation_programs(draft)
    golden(text_of(draft), "evaluation")
    draft.programs = evaluation_programs(draft, {"stage0": [], "stage2": []})
    golden(text_of(draft), "evaluation-fetched")


def test_evaluation_of_swapped_stages_keeps_the_budget() -> None:
    """Stages that training swaps do not fit together; nor do they in evaluation."""
    hardware = Hardware.cpu(num_devices=1, memory="20kB")
    draft = apply(draft_of(chain(depth=7), hardware, micro_batches=2), *all_passes(8), memory=True)
    fetch = {s.spec.name: {} for s in draft.stages}
    assert all(n.target is not ops.resident for n in draft.programs[0].ops())
    texts = []
    for memory in ("8kB", "20kB"):
        draft.machine = Hardware.cpu(num_devices=1, memory=memory)
        evaluation = evaluation_programs(draft, fetch)
        verify(evaluation, draft.lane_hardware)
        seen = [n for n in evaluation[0].ops() if n.target in (ops.fetch, ops.evaluate)]
        texts.append(["part" if n.kwargs.get("params") else n.target.name for n in seen])  # type: ignore
        assert plan_arena(evaluation[0])[1] <= plan_arena(draft.programs[0])[1]  # the arena of training is enough
    assert [text[:4] for text in texts] == [["fetch", "part", "evaluate", "evaluate"]] * 2  # as far as there is room


def test_micro_batches_overlap() -> None:
    """Four micro-batches through two stages take less than four times one, by the pipeline's own formula."""
    hardware = Hardware.cpu(num_devices=2)
    steps = {}
    for count in (1, 4):
        draft = apply(draft_of(chain(depth=8, width=256, rows=64), hardware, micro_batches=count), *to_schedule())
        steps[count] = simulate(draft.programs, hardware).step_s
    assert steps[4] < 0.75 * 4 * steps[1]
    assert steps[4] > (4 + 1) / 2 * steps[1] * 0.9  # M + N - 1 slots of half a step each


def test_more_devices_are_faster() -> None:
    graph = chain(depth=8, width=256, rows=64)
    steps = []
    for devices in (1, 2, 4):
        hardware = Hardware.cpu(num_devices=devices)
        draft = apply(draft_of(graph, hardware, micro_batches=4), *to_schedule())
        steps.append(simulate(draft.programs, hardware).step_s)
    assert steps[0] > steps[1] > steps[2]


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_cut_and_any_mapping_verifies(data: st.DataObject) -> None:
    """No deadlock, no lost message: on a model with skip connections, tied weights and shared values."""
    graph = trace_case("t5")[0]
    draft = draft_of(graph, micro_batches=data.draw(st.integers(1, 3)))
    apply(draft, *to_schedule()[:1])
    names = [block.name for block in draft.blocks]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(names) - 1))))
    num_devices = data.draw(st.integers(1, 4))
    draft.machine = Hardware.cpu(num_devices=num_devices)
    devices = data.draw(st.lists(st.integers(0, num_devices - 1), min_size=len(cuts) + 1, max_size=len(cuts) + 1))
    decisions = {"stages": cut(names, cuts), "devices": devices}
    apply(draft, *to_schedule()[1:], decisions=decisions)
    flow = Flow(interface_of(draft), devices)
    turns = SchedulePipeline().turns(flow, draft)
    for src in range(num_devices):
        done = [(n.kwargs["dst"], n.kwargs["tag"]) for n in draft.programs[src].ops() if n.target is ops.send]
        assert done == [(dst, message.tag) for at, turn in turns if at == src for dst, message in flow.sent_by(turn)]
    verify(evaluation_programs(draft), draft.lane_hardware)


def test_no_two_messages_share_a_tag() -> None:
    """Even where one value is called like the gradient of another."""
    messages = [Message(v, m, g) for v in ("x", "d_x", "grad_x", "x_m1") for m in (0, 1, 11) for g in (False, True)]
    assert len({message.tag for message in messages}) == len(messages)


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_losses_come_out_in_the_order_of_micro_batches(stages: int) -> None:
    draft = apply(draft_of(chain(), micro_batches=3), *to_schedule(stages))
    losses = [n for p in draft.programs for n in p.results().get("loss", [])]
    assert [n.args[0].kwargs["micro_batch"] for n in losses] == [0, 1, 2]  # type: ignore[union-attr]


class Fed(nn.Module):
    """Every block also reads the outputs of the first and the third, as decoder blocks read the encoder's."""

    def __init__(self, depth: int):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fed = [h := torch.tanh(self.first(x))]
        for i, layer in enumerate(self.layers):
            h = layer(h) + sum(fed)
            fed += [torch.tanh(h)] if i == 1 else []
        return h.sum()


@pytest.mark.parametrize(("depth", "num_devices"), [(7, 4), (11, 5)])
def test_gradients_of_two_values_from_many_devices_are_no_deadlock(depth: int, num_devices: int) -> None:
    """They come to their makers while these wait for other messages: all devices must agree on what comes first."""
    graph, _ = traced_model(Fed(depth), [{"x": torch.randn(2, 4)}])
    draft = draft_of(graph, Hardware.cpu(num_devices=num_devices), micro_batches=2)
    apply(draft, *to_schedule(depth + 1))
    verify(draft.programs, draft.lane_hardware)
    verify(evaluation_programs(draft), draft.lane_hardware)
