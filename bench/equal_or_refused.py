"""Small scripts that once trained something else in silence: on one and two devices, with one micro-batch, two, and the
number that "auto" takes, beside eager PyTorch over the whole batch.

One row a case: the largest difference of losses and of what `sync` brings back, or the error that refuses it. A case
that eager refuses must be refused. Run: python bench/equal_or_refused.py [--only WORD ...]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm

import penstock
from penstock.bench.peers import rows
from penstock.errors import PenstockError
from penstock.tests.runtime.optimizer.matrix_optimizers import Shampoo, Soap

ROWS, WIDTH, STEPS = 8, 8, 3
TOLERANCE = 1e-5
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


class Net(nn.Module):
    """Two layers, between which `use` does what a case is about."""

    def __init__(self, use: Callable[[Net, Tensor], Tensor] = lambda net, h: h, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(WIDTH, WIDTH), layer or nn.Linear(WIDTH, WIDTH)
        self.head, self.dropout, self.use = nn.Linear(WIDTH, WIDTH, bias=False), nn.Dropout(0.0), use
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        h = self.dropout(self.use(self, self.layer(x + self.embed(ids))))
        return F.cross_entropy(self.head(h.tanh()), ids)


class ByKeywords(nn.Module):
    """Takes part of its batch by **kwargs, and its loss from `loss_fn`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.tower = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, **kwargs: Tensor) -> Tensor:
        return self.layer(x) + self.tower(kwargs["image"])


@dataclass(frozen=True)
class Case:
    """One script. `between`: what it does after the first step; `around`: the state of torch around each step."""

    name: str
    build: Callable[[], nn.Module]
    between: Callable[[Any], None] = lambda net: None
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    optimizer: Any = SGD
    loss_fn: Any = None
    coupled: bool = False  # more than one micro-batch, if asked for, trains something else, and `explain` says so
    spoil: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None  # a bad batch before the second good one


def write_saved(net: Net, h: Tensor) -> Tensor:
    h = h.sigmoid()
    out = h * net.scale
    h.add_(1)
    return out + h


def count(net: Net, h: Tensor) -> Tensor:
    net.steps += 1
    return h / net.steps.clone()


def running_mean(net: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        net.mean.lerp_(h.mean(0), 0.1)
    return h - net.mean


def share_data(net: Net) -> Net:
    net.head.weight.data = net.embed.weight.data
    return net


def overlap(net: Net) -> Net:
    whole = torch.ones(WIDTH + 1)
    net.scale, net.layer.bias = nn.Parameter(whole[:WIDTH]), nn.Parameter(whole[1:])
    return net


def clamp(net: Net) -> None:
    with torch.no_grad():
        for param in net.parameters():
            param.clamp_(-0.2, 0.2)


def draw_with_own_seed(net: Net, h: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return h + torch.rand(WIDTH)


def matrices(net: Net, h: Tensor) -> Tensor:
    return h + torch.linalg.solve(torch.eye(2) * 2, h.view(-1, 4, 2, 1)).flatten(1)


def assign(net: Net, h: Tensor) -> Tensor:
    h = h.clone()
    h[h > 0.5] = 0.0
    return h


def row_wise(function: Callable[[Tensor], Tensor]) -> Callable[[], Net]:
    return lambda: Net(lambda net, h: h + function(h))


def load_smaller(net: Net) -> None:
    net.load_state_dict({name: tensor * 0.9 for name, tensor in net.state_dict().items()})


def double_results(net: Net) -> None:
    net.head.register_forward_hook(lambda module, args, output: output * 2)


def drop_all(net: Net) -> None:
    net.dropout.p = 1.0


def with_default_dtype() -> AbstractContextManager[Any]:
    stack = contextlib.ExitStack()
    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(torch.float64)
    return stack


CASES = (
    Case("1 a saved operand is written", lambda: Net(write_saved)),
    Case("2 a counter", lambda: Net(count)),
    Case("2 spectral_norm", lambda: Net(layer=spectral_norm(nn.Linear(WIDTH, WIDTH)))),
    Case("2 the old spectral_norm", lambda: Net(layer=old_spectral_norm(nn.Linear(WIDTH, WIDTH)))),
    Case("2 a running mean", lambda: Net(running_mean), coupled=True),
    Case("3 weights share data", lambda: share_data(Net())),
    Case("3 windows of one vector", lambda: overlap(Net(lambda net, h: h * net.scale))),
    Case("4 weights clamped", Net, between=clamp),
    Case("4 weights loaded", Net, between=load_smaller),
    Case("4 .data set", Net, between=lambda net: setattr(net.head.weight, "data", net.head.weight.data * 0.5)),
    Case("4 a buffer set", lambda: Net(count), between=lambda net: net.steps.fill_(5.0)),
    Case("4 a forward hook", Net, between=double_results),
    Case("4 dropout's p", Net, between=drop_all),
    Case("6 a seed in forward", lambda: Net(draw_with_own_seed)),
    Case("7 in autocast", Net, around=lambda: torch.autocast("cpu", torch.bfloat16)),
    Case("7 in inference_mode", Net, around=torch.inference_mode),
    Case("7 in no_grad", Net, around=torch.no_grad),
    Case("7 another default dtype", Net, around=with_default_dtype),
    Case("10 inputs by **kwargs", ByKeywords, loss_fn=lambda out, batch: F.cross_entropy(out, batch["ids"])),
    Case("12 hardswish", row_wise(F.hardswish)),
    Case("12 batched linalg", lambda: Net(matrices)),
    Case("12 fft", row_wise(lambda h: torch.fft.rfft(h).abs().sum(-1, keepdim=True))),
    Case("12 diag_embed", row_wise(lambda h: torch.diag_embed(h).sum(-1))),
    Case("12 cross", row_wise(lambda h: torch.cross(h[:, :3], h[:, 3:6], dim=-1).sum(-1, keepdim=True))),
    Case("12 an assignment by mask", lambda: Net(assign)),
    Case("14 states in lists: SOAP", Net, optimizer=partial(Soap, lr=0.01)),
    Case("14 states in lists: Shampoo", Net, optimizer=partial(Shampoo, lr=0.01)),
    Case("16 an id out of range", Net, spoil=lambda batch: {**batch, "ids": batch["ids"] + WIDTH}),
    Case("16 NaN in the inputs", Net, spoil=lambda batch: {**batch, "x": batch["x"] * float("nan")}),
    Case("16 another dtype", Net, spoil=lambda batch: {**batch, "x": batch["x"].long()}),
)  # fmt: skip


def batch_of(case: Case, seed: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    x, image = torch.randn(2, ROWS, WIDTH, generator=made, dtype=torch.float32)
    batch = {"ids": torch.randint(0, WIDTH, (ROWS,), generator=made), "x": x}
    return batch if case.loss_fn is None else {**batch, "image": image}


def train_eager(case: Case, net: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    optimizer, losses = case.optimizer(net.parameters()), []
    for step in range(STEPS):
        batch = batch_of(case, step)
        loss = net(**batch) if case.loss_fn is None else case.loss_fn(net(batch["x"], image=batch["image"]), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step == 0:
            case.between(net)
    return losses, {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def train_plan(case: Case, net: nn.Module, devices: int, micro_batches: Any) -> dict[str, Any]:
    hardware = penstock.Hardware.cpu(num_devices=devices, memory="64MB", dram="1GB")
    strategy = "balanced" if devices == 1 else "1f1b"
    if micro_batches == "auto":
        strategy = "auto"
    job = penstock.compile(
        net, hardware, example_inputs=batch_of(case, 0), optimizer=case.optimizer, loss_fn=case.loss_fn,
        strategy=strategy, micro_batches=micro_batches, search_s=1.0,
    )  # fmt: skip
    with job:
        losses = []
        for step in range(STEPS):
            if case.spoil is not None and step == 1:
                with contextlib.suppress(PenstockError):
                    job.step(case.spoil(batch_of(case, step)))
                    raise AssertionError("a bad batch trains")
            with case.around():
                losses.append(float(job.step(batch_of(case, step))))
            if step == 0:
                job.sync()
                case.between(net)
        job.sync()
        says = "forward updates the buffer" in " ".join(job.explain(full=True).split())
        return {"losses": losses, "state": net.state_dict(), "taken": job.plan.micro_batches, "says": says}


def compare(case: Case, devices: int, micro_batches: Any) -> str:
    """ "equal", with the largest difference; "refused", with the error; or what is wrong."""
    torch.manual_seed(0)
    net = case.build()
    try:
        wanted = train_eager(case, copy.deepcopy(net))
    except RuntimeError:
        wanted = None
    try:
        found = train_plan(case, net, devices, micro_batches)
    except PenstockError as error:
        who = "both refuse" if wanted is None else "refused"
        return f"{who}: {type(error).__name__}: {str(error).splitlines()[0][:160]}"
    if wanted is None:
        return "WRONG: trains what eager refuses"
    apart = max(abs(a - b) for a, b in zip(found["losses"], wanted[0]))
    apart = max(apart, *(float((found["state"][name] - t).abs().max()) for name, t in wanted[1].items()))
    if case.coupled and found["taken"] > 1:
        return f"coupled by request, {'said' if found['says'] else 'WRONG: unsaid'}; {apart:.1e} apart"
    text = f"equal, {apart:.1e} apart" if apart <= TOLERANCE else f"WRONG: {apart:.1e} apart"
    return f"{text}, {found['taken']} micro-batches"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="cases with these words in their names")
    args = parser.parse_args()
    for case in CASES:
        if args.only and not any(word in case.name for word in args.only):
            continue
        found = {f"{d} devices, M={m}": compare(case, d, m) for d in (1, 2) for m in (1, 2, "auto")}
        rows.save("equal_or_refused", {"case": case.name, **found})


if __name__ == "__main__":
    main()
