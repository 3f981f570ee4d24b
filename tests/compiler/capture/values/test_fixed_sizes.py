"""Calls that have a size by a known value, and writes to the places of a mask, train as in eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.compiler.capture.trace import trace
from penstock.ir.errors import CaptureError, WorkerError

Forward = Callable[[Any, Tensor], Tensor]


class Known(nn.Module):
    """Tensors that are attributes, and so have the same values at every step, beside the activations of one layer for
    each function."""

    def __init__(self, **functions: Forward):
        super().__init__()
        self.layers, self.functions = nn.ModuleDict({name: nn.Linear(6, 6) for name in functions}), functions
        self.counts, self.keep = torch.tensor([1, 2, 0, 3]), torch.tensor([True, False, True, True])
        self.columns, self.number = torch.tensor([True, False, True, False, False, True]), torch.tensor(2)
        self.sizes = torch.tensor([[2, 3], [4, 1]])

    def forward(self, x: Tensor) -> Tensor:
        activations = {name: function(self, self.layers[name](x)) for name, function in self.functions.items()}
        return torch.stack([each.square().mean() for each in activations.values()]).sum()


def write(h: Tensor, key: Any, value: Any) -> Tensor:
    h = h.clone()
    h[key] = value
    return h


KNOWN: dict[str, Forward] = {
    "rows by a mask": lambda m, h: h[m.keep],
    "columns by a mask": lambda m, h: h[:, m.columns],
    "a mask and a slice": lambda m, h: h[m.keep, : m.number],
    "a mask of all": lambda m, h: h[m.keep[:, None] & m.columns],
    "masked_select": lambda m, h: torch.masked_select(h, m.keep[:, None]),
    "masked_select, a method": lambda m, h: h.masked_select(mask=m.columns),
    "a slice": lambda m, h: h[:, m.number - 1 : m.number + 2],
    "slices in a loop": lambda m, h: torch.cat([h[: size[0], : size[1]].flatten() for size in m.sizes]),
    "a slice that is written": lambda m, h: write(h, (slice(None), slice(0, m.number)), 0.0),
    "a slice that is given values": lambda m, h: write(h, (slice(None), slice(0, m.number)), h[:, : m.number].tanh()),
    "rows by a mask that are written": lambda m, h: write(h, m.keep, 0.0),
    "rows by a mask that are given values": lambda m, h: write(h, m.keep, h[:3].tanh()),
    "columns by a mask that are given values": lambda m, h: write(h, (slice(None), m.columns), h[:, :3].tanh()),
    "a place of a mask": lambda m, h: write(h, (m.keep, 1), h[:3, 0].tanh()),
    "repeat_interleave": lambda m, h: torch.repeat_interleave(h, m.counts, dim=0),
    "repeat_interleave, flat": lambda m, h: h[:, 0].repeat_interleave(m.counts),
    "repeat_interleave by a number": lambda m, h: h.repeat_interleave(m.number, dim=1),
    "view": lambda m, h: h.view(m.number, -1),
    "reshape": lambda m, h: h.reshape((m.number * 2, -1)),
    "view by a size": lambda m, h: h.view(torch.div(h.size(1), 3, rounding_mode="trunc"), -1),
    "narrow": lambda m, h: h.narrow(1, 0, m.number),
    "interpolate": lambda m, h: F.interpolate(h[None, None], size=(m.number, m.number)),
    "expand": lambda m, h: h[None].expand(m.number, -1, -1),
    "roll": lambda m, h: h.roll(m.number, 1) * h,
    "split": lambda m, h: h.split(m.number, dim=1)[1],
    "chunk": lambda m, h: h.chunk(int(m.number), dim=1)[0],
    "select": lambda m, h: h[:, m.number],
    "product": lambda m, h: h * m.number,
    "clamp": lambda m, h: h.clamp(max=m.number / 10),
    "pad": lambda m, h: F.pad(h, (0, m.number)),
    "cumulated": lambda m, h: h[m.counts.cumsum(0).clamp(max=3)],
}


def require_equal(model: nn.Module, batch: dict[str, Tensor], micro_batches: int = 1) -> None:
    """One step gives the loss and the weights of eager PyTorch."""
    eager, sgd = copy.deepcopy(model), partial(torch.optim.SGD, lr=0.1)
    optimizer, loss = sgd(eager.parameters()), eager(**batch)
    loss.backward()
    optimizer.step()
    hardware = penstock.Hardware.cpu(1, memory="64MB")
    with penstock.compile(
        model, hardware, example_inputs=batch, optimizer=sgd, strategy="balanced", micro_batches=micro_batches
    ) as job:  # fmt: skip
        torch.testing.assert_close(job.step(batch), loss.detach())
        state = job.state_dict()
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(state[name], value)


def test_known_values_beside_activations() -> None:
    """The weights of each function's layer are those of eager PyTorch."""
    require_equal(Known(**KNOWN), {"x": torch.randn(4, 6)})


def test_rows_stay_apart() -> None:
    apart = {name: KNOWN[name] for name in ("columns by a mask", "repeat_interleave by a number")}
    model = Known(**apart, columns=lambda m, h: h[:, : m.sizes[0, 1]])
    require_equal(model, {"x": torch.randn(4, 6)}, micro_batches=2)


def test_a_value_of_the_batch_is_still_refused() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.keep = nn.Linear(6, 6), torch.tensor([True, False, True, True])

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.layer(x)[self.keep & mask].mean()

    with pytest.raises(CaptureError, match="needs the value of a tensor"):
        trace(Net(), {"x": torch.zeros(4, 6), "mask": torch.ones(4, dtype=torch.bool)})


def test_a_mask_of_the_batch_after_other_dimensions_is_refused() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            h = self.layer(x)
            return write(h, (slice(None), mask[0]), h[:, :3]).mean()

    with pytest.raises(CaptureError, match="needs the value of a tensor"):
        trace(Net(), {"x": torch.zeros(4, 6), "mask": torch.ones(4, 6, dtype=torch.bool)})


class Mixed(nn.Module):
    """Features of images, which a function puts into the places of a mask among embeddings of words."""

    def __init__(self, function: Callable[[Any, Tensor, Tensor, Tensor], Tensor]):
        super().__init__()
        self.words, self.images, self.function = nn.Embedding(20, 8), nn.Linear(6, 8), function
        self.one = nn.Parameter(torch.randn(8))
        self.number = nn.Parameter(torch.randn(()))

    def forward(self, ids: Tensor, images: Tensor, mask: Tensor) -> Tensor:
        x = self.function(self, self.words(ids).clone(), self.images(images), mask)
        return (x * torch.linspace(0.5, 1.5, 40).view(5, 8)).square().mean()


def put(x: Tensor, key: Any, value: Any) -> Tensor:
    x[key] = value
    return x


PUTS: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    "assigned": lambda m, x, v, mask: put(x, mask, v.reshape(-1, 8)),
    "assigned with slices": lambda m, x, v, mask: put(x, (mask, slice(None)), v.reshape(-1, 8)),
    "assigned with an ellipsis": lambda m, x, v, mask: put(x, (mask, ...), v.reshape(-1, 8)),
    "one for all": lambda m, x, v, mask: put(x, mask, m.one),
    "one row for all": lambda m, x, v, mask: put(x, mask, m.one[None]),
    "a number for all": lambda m, x, v, mask: put(x, mask, m.number),
    "one for each": lambda m, x, v, mask: put(x, mask, v.reshape(-1, 8)[:, :1]),
    "elements": lambda m, x, v, mask: put(x, mask[..., None].expand_as(x), v.flatten()),
    "index_put": lambda m, x, v, mask: x.index_put((mask,), v.reshape(-1, 8)),
    "index_put_": lambda m, x, v, mask: x.index_put_((mask,), v.reshape(-1, 8)),
    "index_put of torch": lambda m, x, v, mask: torch.index_put(x, [mask], values=v.reshape(-1, 8)),
    "added": lambda m, x, v, mask: x.index_put((mask,), v.reshape(-1, 8), accumulate=True),
    "added in place": lambda m, x, v, mask: x.index_put_((mask,), m.one, accumulate=True),
    "constants": lambda m, x, v, mask: put(x, mask, torch.ones(8)),
    "nothing": lambda m, x, v, mask: put(x, mask, 0.0),
}


def mixed_batch() -> dict[str, Tensor]:
    mask = torch.zeros(4, 5, dtype=torch.bool)
    mask[:, 1:3] = True
    return {"ids": torch.randint(0, 20, (4, 5)), "images": torch.randn(4, 2, 6), "mask": mask}


class Several(nn.Module):
    """The sum of the losses of models with weights of their own."""

    def __init__(self, models: dict[str, nn.Module]):
        super().__init__()
        self.models = nn.ModuleDict(models)

    def forward(self, **batch: Tensor) -> Tensor:
        return torch.stack([model(**batch) for model in self.models.values()]).sum()


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_values_at_the_places_of_a_mask(micro_batches: int) -> None:
    require_equal(Several({name: Mixed(function) for name, function in PUTS.items()}), mixed_batch(), micro_batches)


def test_another_number_of_places_than_of_values_is_refused() -> None:
    """As eager PyTorch does, instead of dropping values, or of taking those of another micro-batch's rows."""
    model, batch = Mixed(PUTS["assigned"]), mixed_batch()
    more = batch | {"mask": batch["mask"].clone()}
    more["mask"][0, 4], more["mask"][3, 1] = True, False  # the same number in all, but not in each micro-batch
    with penstock.compile(
        model, penstock.Hardware.cpu(1, memory="64MB"), example_inputs=batch, strategy="balanced", micro_batches=2,
        optimizer=partial(torch.optim.SGD, lr=0.1),
    ) as job, pytest.raises(WorkerError, match="another number of places"):  # fmt: skip
        job.step(more)
