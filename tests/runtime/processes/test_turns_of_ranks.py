"""Ranks of a torchrun take turns on the links of their host, train as eager does, and none waits for a dead one."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from penstock.tests.compiler.job.agents import agents
from penstock.tests.runtime.processes import ranks_in_turns
from penstock.tests.runtime.processes.ranks_in_turns import (
    CHUNK_BYTES,
    FAULT_STEP,
    LEARNING_RATE,
    MICRO_BATCHES,
    STEPS,
    WIDTH,
    batch_of,
    weights_at_first,
)

pytestmark = pytest.mark.multi
SCRIPT = Path(ranks_in_turns.__file__)
MOST_S = 90.0  # to start, and until a lost rank is named
TOLERANCE = 1e-6  # of a value; sums of gradients may come in another order


def eager(stages: int) -> tuple[list[list[float]], list[list[torch.Tensor]]]:
    """The losses of each micro-batch, and all weights after each step."""
    params = [torch.nn.Parameter(weight) for weight in weights_at_first(stages)]
    optimizer = torch.optim.SGD(params, lr=LEARNING_RATE)
    losses, weights = [], []
    for step in range(STEPS):
        losses.append([])
        for x in batch_of(step).chunk(MICRO_BATCHES):
            for param in params[:-1]:
                x = torch.tanh(torch.nn.functional.linear(x, param))
            loss = torch.nn.functional.linear(x, params[-1]).square().mean()
            losses[-1].append(loss.item())
            (loss / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append([param.detach().clone() for param in params])
    return losses, weights


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_take_turns_host_by_host_and_train_as_eager_does(nodes: int, tmp_path: Path) -> None:
    ranks, per_node = 4, 4 // nodes
    with agents(tmp_path, str(tmp_path), nodes=nodes, per_node=per_node, script=SCRIPT) as running:
        assert running.wait(200) == [0] * nodes, running.output()
        found = running.results()
    losses, weights = eager(2 * ranks)
    for row in found.values():
        assert row["losses"] == losses
        apart = [
            (torch.tensor(a) - b).abs().max()
            for own, step in zip(row["weights"], weights, strict=True)
            for a, b in zip(own, step, strict=True)
        ]
        assert max(apart) <= TOLERANCE  # after the first step they are the gradients of the whole batch
    addresses = [found[rank]["address"] for rank in range(ranks)]
    assert addresses == [addresses[rank // per_node * per_node] for rank in range(ranks)]
    assert len(set(addresses)) == nodes
    for address in set(addresses):
        rows = [row for row in found.values() if row["address"] == address]
        held = sorted((begin_s, end_s) for row in rows for _, begin_s, end_s in row["held"])
        chunks = -(-WIDTH * WIDTH * 4 // CHUNK_BYTES)
        assert len(held) == STEPS * per_node * 3 * chunks  # two fetches before forward, one before backward
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(held)), "two ranks held the link at the same time"


@pytest.mark.slow
@pytest.mark.parametrize("fault, victim", [("SIGKILL", "0"), ("SIGKILL", "1"), ("SIGSTOP", "1")])
def test_a_rank_that_is_lost_while_it_holds_the_link_is_named_by_the_others(
    fault: str, victim: str, tmp_path: Path
) -> None:
    """Rank 0 hands out the turns. What others hear is what they hear of any rank that is lost in a step."""
    options = ["--monitor-interval=30"]  # else the agent ends the others before they can say anything
    with agents(tmp_path, str(tmp_path), fault, victim, per_node=3, script=SCRIPT, options=options) as running:
        for rank in {0, 1, 2} - {int(victim)}:
            running.await_file(f"rank{rank}.json", MOST_S)
        found = running.results()
    assert len(found) == 2
    for row in found.values():
        assert len(row["losses"]) == FAULT_STEP and f"rank {victim} (on " in row["error"], row["error"]
