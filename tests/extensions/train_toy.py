"""Train a small model with what `penstock_toys` adds, against eager PyTorch. `test_extensions.py` runs this script."""

from __future__ import annotations

import copy
import json
from functools import partial

import torch
from penstock_toys.soften import Soften
from torch import Tensor, nn

import penstock

STEPS, ROWS, WIDTH, MICRO_BATCHES = 3, 8, 16, 2
PIPELINE = (
    "add-twice, coarsen, partition-balanced{stages=2}, map-round-robin, schedule-one-by-one, insert-remat, "
    "insert-fetch, insert-optimizer"
)
SGD = partial(torch.optim.SGD, lr=0.1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.mul(Soften.apply(self.linear(x)), 2.0)


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return ((x - labels) ** 2).mean()


def main() -> None:
    torch.manual_seed(0)
    model, batch = Toy(), {"x": torch.randn(ROWS, WIDTH), "labels": torch.randn(ROWS, WIDTH)}
    eager = copy.deepcopy(model)
    options = {"example_inputs": batch, "optimizer": SGD, "micro_batches": MICRO_BATCHES}
    rivals = penstock.compile(model, "two-toys", search_s=1.0, **options).plan.rivals
    with penstock.compile(model, "two-toys", strategy=PIPELINE, **options) as job:
        losses = [float(job.step(batch)) for _ in range(STEPS)]
        state = job.state_dict()
        plan, text = job.plan, job.explain(full=True)
    optimizer, expected = SGD(eager.parameters()), list[float]()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = eager(**batch)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    error = max(float((state[name] - value).abs().max()) for name, value in eager.state_dict().items())
    print(
        json.dumps(
            {
                "losses": losses, "expected": expected, "error": error, "explain": text,
                "doubled": plan.decisions.doubled, "schedule": plan.decisions.schedule, "hardware": plan.hardware,
                "tried": [rival.passes for rival in rivals if rival.passes],
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
