"""Figure 4 of Mobius: four micro-batches through eight stages on four GPUs, two to a root complex."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from penstock.ir import ops
from penstock.ir.machine.hardware import Device, Hardware
from penstock.papers.lab import Lab, SimulatedStep, Workload
from penstock.runtime.simulate.costs import CostModel

WIDTH, STAGES = 64, 8
STAGE_BYTES = 4 * WIDTH * WIDTH
LOADS = 2.0  # time units of a stage's weights on a link that it has for itself


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(STAGES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


class NamedLine:
    def on_meta(self) -> nn.Module:
        with torch.device("meta"):
            return Line()

    def batch_spec(self, batch: int, sequence: int, targets: int | None = None) -> dict[str, dict[str, Any]]:
        return {"x": {"shape": [batch, WIDTH], "dtype": "float32"}}


@pytest.fixture
def unit_times(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A forward or a backward of a stage takes one time unit, as in the figure; a message takes none."""

    def compute_s(self: CostModel, owner: Device, work: ops.Work) -> float:
        return 1.0 if work.flops else 0.0

    monkeypatch.setattr(CostModel, "compute_s", compute_s)
    monkeypatch.setattr(CostModel, "transfer", _free_messages(CostModel.transfer))
    yield


def _free_messages(transfer: Any) -> Any:
    def own(self: CostModel, device: int, work: ops.Work, priority: int) -> Any:
        cost = transfer(self, device, work, priority)
        return type(cost)() if work.stream in (ops.SEND, ops.RECV) else cost

    return own


def step(mapping: str, prefetch: str = "false") -> SimulatedStep:
    rate = STAGE_BYTES / LOADS
    hardware = Hardware.preset("mobius-topo2+2").with_(
        h2d_bandwidth=rate, d2h_bandwidth=rate, root_complex_bandwidth=rate, link_latency_s=0.0
    )
    lab = Lab()
    lab.models["line"] = NamedLine()
    line = (
        f"coarsen, partition-balanced{{stages={STAGES}}}, {mapping}, schedule-pipeline, insert-remat{{always=true}}, "
        f"insert-fetch{{swap=true, prefetch={prefetch}}}, insert-optimizer"
    )
    found = lab.trial(Workload("line", 1, 4, precision="fp32"), hardware, line)
    assert found.timeline is not None, found.misses
    return found


def starts(found: SimulatedStep, op: str) -> dict[int, list[float]]:
    assert found.timeline is not None
    return {
        device: [span.start_s for span in found.timeline.spans if span.op == op and span.device == device]
        for device in range(4)
    }


@pytest.mark.usefixtures("unit_times")
def test_cross_mapping_saves_two_time_units() -> None:
    """Section 3.3: "it reduces 2 time units one training step in this example"."""
    cross, sequential = step("map-cross"), step("map-sequential")
    assert cross.computed_s is not None and sequential.computed_s is not None
    assert sequential.computed_s - cross.computed_s == pytest.approx(2.0, abs=1e-6)
