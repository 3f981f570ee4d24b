"""`unpack-once`: rematerialised stages unpack each weight once for both passes, and train as without it."""

from __future__ import annotations

import functools
from typing import Any

import bitsandbytes
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.graph.opgraph import OpGraph
from penstock.ir import ops
from penstock.ir.errors import PassError, VerifyError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import infer_all, profile_memory
from penstock.passes.base import Pass
from penstock.passes.draft import Draft
from penstock.passes.memory.insert_fetch import InsertFetch
from penstock.passes.memory.insert_remat import InsertRemat
from penstock.passes.memory.unpack_once import UnpackOnce
from penstock.passes.optimizer.insert_optimizer import InsertOptimizer
from penstock.runtime.quantised import linear_4bit, linear_8bit, pieces
from penstock.runtime.quantised.model import with_bytes
from penstock.runtime.simulate import simulate
from penstock.tests.golden_text import Golden
from penstock.tests.passes.running import (
    Batch,
    apply,
    assert_trains_like_eager,
    draft_of,
    text_of,
    to_schedule,
    traced_model,
)
from penstock.tests.passes.stage_runs import Peak, assert_close, one_device, stages_of

WIDTH, ROWS, DEPTH = 64, 4, 4
BYTES = 4 * WIDTH * WIDTH  # of an unpacked weight
PACKED: dict[str, Any] = {
    "nf4": lambda: bitsandbytes.nn.Linear4bit(
        WIDTH, WIDTH, bias=False, quant_type="nf4", compress_statistics=False
    ),
    "int8": lambda: bitsandbytes.nn.Linear8bitLt(WIDTH, WIDTH, bias=False, has_fp16_weights=False, threshold=6.0),
}


class Adapted(nn.Module):
    """A frozen quantised layer and a trained one of rank 2 beside it."""

    def __init__(self, kind: str):
        super().__init__()
        self.base = PACKED[kind]().requires_grad_(False).to("cpu")
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.base(x) + self.up(self.down(x)))


class Model(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(Adapted(kind) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


@functools.cache
def trace_of(kind: str) -> tuple[OpGraph, list[Batch]]:
    torch.manual_seed(0)
    model = with_bytes(Model(kind))
    return traced_model(model, [{"x": torch.randn(ROWS, WIDTH)} for _ in range(2)])


def plan_for(kind: str, *tail: Pass, memory: str = "64MB", always: bool = True, swap: bool = True) -> Draft:
    draft = draft_of(trace_of(kind)[0], Hardware.cpu(num_devices=1, memory=memory), micro_batches=2)
    passes = [*to_schedule(2), InsertRemat(always=always), *tail, InsertFetch(swap=swap), InsertOptimizer()]
    return apply(draft, *passes)


@pytest.fixture
def unpack_count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts weights that are unpacked on real tensors."""
    count = [0]

    def counting(function: Any, place: int) -> Any:
        def run(*args: Any) -> Any:
            count[0] += type(args[place].data) is Tensor
            return function(*args)

        return run

    monkeypatch.setattr(linear_4bit.Format4bit, "unpack", counting(linear_4bit.Format4bit.unpack, 1))
    monkeypatch.setattr(linear_8bit, "_unpack", counting(linear_8bit._unpack, 0))
    return count


def test_text(golden: Golden) -> None:
    golden(text_of(plan_for("nf4", UnpackOnce())), "both-stages")


@pytest.mark.parametrize("kind", PACKED)
def test_a_weight_is_unpacked_for_forward_and_once_for_backward(kind: str, unpack_count: list[int]) -> None:
    """Training is bit for bit the same; of two micro-batches in two steps, eager's unpack each weight twice."""
    weights, times = [], []
    for tail in ((), (UnpackOnce(),)):
        unpack_count[0] = 0
        weights.append(assert_trains_like_eager(plan_for(kind, *tail), trace_of(kind)[1], tolerance=1e-6).weights())
        times.append(unpack_count[0] / DEPTH / 4 - 2)
    assert times == [3, 2]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


@pytest.mark.parametrize("kind", PACKED)
def test_a_backward_takes_the_memory_that_is_planned(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 256)  # what the library allocates beside a weight is not counted
    graph, batches = trace_of(kind)
    for spec, runner, inputs in stages_of(one_device(graph, 2), batches[0], interpreted=True):
        made, _ = runner.forward(inputs, 0, keep=False)
        douts = [1.0 if o.name == spec.loss else torch.ones_like(x) for o, x in zip(spec.outputs, made)]
        grads = runner.backward(None, inputs, douts, None, 0)[1]
        assert spec.unpacked is not None
        twice_bytes = max(spec.backward_workspace_bytes, spec.forward_workspace_bytes) + spec.kept_bytes
        for once, planned_bytes in ((False, twice_bytes), (True, spec.unpacked.workspace_bytes)):
            with Peak() as peak:
                runner.backward(None, inputs, douts, grads, 0, unpack_once=once)
            dinputs = sum(i.bytes for i in spec.inputs if i.requires_grad)
            assert_close(planned_bytes + dinputs, peak.most, f"{spec.title} {once}")
        assert spec.unpacked.workspace_bytes > twice_bytes + 0.9 * BYTES


def test_a_step_reads_and_writes_less_memory() -> None:
    twice, once = plan_for("nf4"), plan_for("nf4", UnpackOnce())
    specs = [stage.spec for stage in once.stages]
    spared = [s.backward_traffic_bytes - s.unpacked.traffic_bytes for s in specs if s.unpacked is not None]
    assert sum(spared) >= BYTES * DEPTH
    hardware = twice.lane_hardware
    assert simulate(once.programs, hardware).step_s < simulate(twice.programs, hardware).step_s


def test_stages_without_room_unpack_again() -> None:
    """The finished program keeps to any memory: where stages come from DRAM, and where they stay."""
    whole = plan_for("nf4", UnpackOnce(), swap=False)
    most_bytes = profile_memory(whole.programs[0]).peak_bytes[ops.DEVICE]
    found = []
    for share in (0.6, 0.8, 0.99, 1.3):
        draft = plan_for("nf4", UnpackOnce(), memory=f"{round(share * most_bytes)}B", swap=False)
        (program,) = draft.programs
        assert profile_memory(program).peak_bytes[ops.DEVICE] <= draft.machine.devices[0].budget_bytes
        found.append(sum(bool(node.kwargs.get("unpack_once")) for node in backwards(draft)))
    assert found[0] == 0 < found[-1] == len(backwards(whole))


def backwards(draft: Draft) -> list[Any]:
    return [node for program in draft.programs for node in program.ops() if node.target is ops.backward]


def test_where_nothing_runs_again_nothing_is_decided() -> None:
    draft = plan_for("nf4", always=False, swap=False)
    assert UnpackOnce().plan(draft) == []
    with pytest.raises(PassError, match="unpacked names 'stage1'; the stages able to are none"):
        UnpackOnce().rewrite(draft, ["stage1"])


def test_an_op_that_keeps_says_why_it_cannot() -> None:
    draft = plan_for("nf4", always=False, swap=False)
    (program,) = draft.programs
    node = next(node for node in program.ops() if node.target is ops.backward)
    node.kwargs = {**node.kwargs, "unpack_once": True}
    with pytest.raises(VerifyError, match="keeps all that backward needs"):
        infer_all(program)
