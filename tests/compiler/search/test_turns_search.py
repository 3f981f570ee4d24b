"""The search takes turns on a link that devices share where that is faster; plan, programs and report say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.compiler.strategies import STRATEGIES
from penstock.ir.program import takes_turns
from penstock.tests.compiler.eager_baseline import SGD
from penstock.tests.compiler.reasons import reasons_of

WIDTH, LAYERS, ROWS = 128, 8, 64
GAIN = 0.01  # of a step, which is more than noise


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def plan_for(link: str, **options: Any) -> penstock.Job:
    """A plan for four devices that must fetch weights, through a root complex with this rate."""
    machine = penstock.Hardware.cpu(4, memory="300kB", h2d="8MB/s", d2h="1GB/s", link="1GB/s")
    machine = machine.with_(root_complex_bandwidth=link, peak_flops={"fp32": "0.3GFLOPS"})
    batch = {"x": torch.zeros(ROWS, WIDTH)}
    return penstock.compile(Layers(), machine, example_inputs=batch, optimizer=SGD, micro_batches=4, **options)


@pytest.mark.slow
def test_the_search_takes_turns_where_they_help_by_more_than_noise() -> None:
    found = plan_for("8MB/s")
    assert found.plan.decisions.link_turns and all(takes_turns(program) for program in found.programs)
    code = "".join(found.code(device) for device in range(4))
    assert code.count("link_turn=0)") == 2  # the first fetch of a step, and of an evaluation
    assert "turns on links\n" in reasons_of(found)
    fair = plan_for("8MB/s", strategy=found.plan.passes.replace(", take-turns", ""))  # as a user fixes it
    assert not fair.plan.decisions.link_turns and "turns on links" not in reasons_of(fair)
    assert found.plan.predicted is not None and fair.plan.predicted is not None
    assert found.plan.predicted.step_s < (1 - GAIN) * fair.plan.predicted.step_s
    again = plan_for("8MB/s", plan=found.plan)
    assert [again.code(device) for device in range(4)] == [found.code(device) for device in range(4)]


@pytest.mark.slow
def test_the_search_takes_none_where_a_link_holds_all_that_devices_fetch() -> None:
    found = plan_for("80MB/s")
    assert found.plan.decisions.fetch and not found.plan.decisions.link_turns


@pytest.mark.slow
def test_mobius_takes_turns_by_itself_and_a_user_may_fix_them() -> None:
    passes = STRATEGIES["mobius"].replace("partition-mip", "partition-balanced{stages=8}")
    always = passes.replace("take-turns", "take-turns{always=true}")
    cases = (("8MB/s", passes), ("80MB/s", passes), ("80MB/s", always))
    found = [plan_for(link, strategy=line).plan.decisions.link_turns for link, line in cases]
    assert found == [True, False, True]
