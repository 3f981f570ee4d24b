"""One class, trained two steps by eager PyTorch and by a plan on two devices, and how far the two are apart."""

from __future__ import annotations

import copy
import itertools
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, nn

import penstock
from penstock.errors import CaptureError, PenstockError, PlanError
from penstock.graph.follow.coupling import coupling_text
from penstock.runtime.torch_names import tree_map_only

from .batches import Batch, batches, left_out
from .exceptions import FOR_CLASS
from .others import TARGET, OtherModel, loss_of
from .registry import ModelClass
from .small import small_config

STEPS, DEVICES, MICRO_BATCHES = 2, 2, 2
TOLERANCE = 1e-5
MOST_PARAMS = 60_000_000
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
LIBRARY = str(Path(transformers.__file__).parent)
GOLDEN = 0.6180339887498949  # whose multiples, modulo 1, fill [0, 1) evenly
OWN = str(Path(penstock.__file__).parent)
Trained = dict[str, Any]  # "losses" and "state"


class FailsInEager(Exception):
    """The class cannot be built or trained by eager PyTorch; the message is the library's."""


def compare(model: ModelClass | OtherModel) -> dict[str, Any]:
    """The row of a class: `outcome` is equal, different, refused, "raw error" or "fails in eager"."""
    warnings.simplefilter("ignore")
    try:
        net, batch, eager = train_first(model)
    except FailsInEager as error:
        return {"outcome": "fails in eager", "detail": str(error)}
    found: dict[str, Any] = {"params": sum(p.numel() for p in net.parameters())}
    if isinstance(model, ModelClass) and (absent := left_out(model, batch)):
        found["without"] = absent
    try:
        found.update(_plan_differences(net, batch, eager))
        if not _is_equal(found):
            with fixed_draws():
                again = _plan_differences(net, batch, train(copy.deepcopy(net), batch), found["micro_batches"])
            found.update(again, detail="torch.rand gives fixed numbers")
        if not _is_equal(found):
            with fixed_draws(torch.float64):
                found.update(double_differences(net, batch, found, found["micro_batches"]))
    except PenstockError as error:
        return {**found, "outcome": "refused", "error": type(error).__name__, "detail": str(error)[:1500],
                "line": _line(error)}  # fmt: skip
    except Exception as error:
        text = f"{type(error).__name__}: {str(error)[:600]}"
        return {**found, "outcome": "raw error", "detail": text, "line": _line(error), "frames": _frames(error)}
    return {**found, "outcome": "equal" if _is_equal(found) else "different"}


def _plan_differences(net: nn.Module, batch: Batch, eager: Trained, most: int = MICRO_BATCHES) -> dict[str, Any]:
    """The differences of a plan, with one micro-batch where the class can have no more; then `detail` says why."""
    try:
        planned = train_plan(copy.deepcopy(net), batch, most)
        found: dict[str, Any] = {**differences(net, eager, planned), "micro_batches": most}
        if _is_equal(found) or most == 1 or not planned["couplings"]:
            return found
        why = f"rows are coupled: {planned['couplings'][0]}"
    except (CaptureError, PlanError) as error:
        if "micro_batches=1 takes" not in str(error):
            raise
        why = f"the batch cannot be cut: {error}"
    found = differences(net, eager, train_plan(copy.deepcopy(net), batch, 1))
    return {**found, "micro_batches": 1, "detail": why}


@contextmanager
def fixed_draws(usual: torch.dtype = torch.float32) -> Iterator[None]:
    """Let `torch.rand` give the same numbers in each call: a plan draws others than eager."""

    def rand(*sizes: Any, size: Any = None, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        shape = torch.Size(size if size is not None else sizes if sizes and isinstance(sizes[0], int) else sizes[0])
        numbers = torch.arange(1, shape.numel() + 1, dtype=torch.float64) * GOLDEN % 1
        return numbers.to(dtype or usual).view(shape)

    with patch.object(torch, "rand", rand):
        yield


def double_differences(
    net: nn.Module, batch: Batch, found: dict[str, Any], micro_batches: int, devices: int = DEVICES, steps: int = STEPS
) -> dict[str, Any]:
    """The differences in fp64, less a tenth of those `found` in fp32: what is wrong stays as it is, and rounding falls,
    also of a model that computes some of it in fp32 itself."""
    net = copy.deepcopy(net).double()
    batch = tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, batch)
    planned = train_plan(copy.deepcopy(net), batch, micro_batches, devices, steps)
    detail = f"in fp64; weights are {found['weights_apart']:.1e} apart in fp32, moves {found['moves_apart']:.1e}"
    apart = differences(net, train(copy.deepcopy(net), batch, steps), planned)
    return {"detail": detail, **{name: max(value - found[name] / 10, 0.0) for name, value in apart.items()}}


def _is_equal(apart: dict[str, Any]) -> bool:
    return apart["loss_apart"] <= TOLERANCE and apart["weights_apart"] <= TOLERANCE and apart["moves_apart"] <= 1e-3


def train_first(model: ModelClass | OtherModel) -> tuple[nn.Module, Batch, dict[str, Any]]:
    """The class at the smallest sizes that eager PyTorch trains, its batch, and what training gives."""
    first: Exception | None = None
    for made in _instances(model):
        if isinstance(made, Exception):
            first = first or made
            continue
        net, batch = made
        try:
            return net, batch, train(copy.deepcopy(net), batch)
        except Exception as error:
            first = first or error
    if first is None:
        raise FailsInEager("no batch is known for its arguments")
    frame = traceback.extract_tb(first.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    raise FailsInEager(f"{type(first).__name__}: {' '.join(str(first).split())[:300]} ({place})")


def _instances(model: ModelClass | OtherModel) -> Iterator[tuple[nn.Module, Batch] | Exception]:
    """Models of the class and their batches, the likeliest first; an exception where there is none."""
    if isinstance(model, OtherModel):
        try:
            net, batch = model.make()
            draw_vectors(net)
            yield net, batch
        except Exception as error:
            yield error
        return
    for without, widths in itertools.product(("", "features", "tokens"), ("small", "kept")):
        try:
            net = build(model, widths)
        except Exception as error:
            yield error
        else:
            found = batches(model, net, without=without)
            yield from (each if isinstance(each, Exception) else (net, each) for each in found)


def build(model: ModelClass, widths: str = "small") -> nn.Module:
    """A tiny instance in training mode, whose vectors are drawn: a bias that is added twice shows only if not zero."""
    config = small_config(model.cls.config_class, widths, **FOR_CLASS.get(model.name, {}))
    with torch.device("meta"):
        size = sum(p.numel() for p in model.cls(copy.deepcopy(config)).parameters())
    if size > MOST_PARAMS:
        raise ValueError(f"{size:,} parameters with the sizes that were kept")
    torch.manual_seed(0)
    net: nn.Module = model.cls(config).float().train()
    for module in net.modules():
        if isinstance(module, nn.Dropout):  # of a head, whose probability no field of the configuration states
            module.p = 0.0
    draw_vectors(net)
    return net


def draw_vectors(net: nn.Module) -> None:
    with torch.no_grad():
        for param in net.parameters():
            if param.dim() <= 1 or not param.any():
                param.add_(torch.randn_like(param), alpha=0.02)


def _loss(net: nn.Module, batch: Batch) -> Tensor:
    if TARGET in batch:
        return loss_of(net(**{name: value for name, value in batch.items() if name != TARGET}), batch)
    output = net(**batch)
    loss = output["loss"] if isinstance(output, dict) and "loss" in output else getattr(output, "loss", None)
    if loss is None:
        raise ValueError("forward returns no loss")
    return loss


def train(net: nn.Module, batch: Batch, steps: int = STEPS) -> Trained:
    """Train by eager PyTorch, in place: the losses and the state after them."""
    optimizer, losses = SGD([p for p in net.parameters() if p.requires_grad]), []
    for _ in range(steps):
        loss = _loss(net, copy.deepcopy(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if not all(abs(loss) < float("inf") for loss in losses):
        raise ValueError(f"losses of {losses}")
    return {"losses": losses, "state": net.state_dict()}


def train_plan(
    net: nn.Module, batch: Batch, micro_batches: int, devices: int = DEVICES, steps: int = STEPS
) -> Trained:
    """As `train`, by a plan; with its couplings of rows."""
    hardware = penstock.Hardware.cpu(num_devices=devices, memory="3GB", dram="6GB")
    job = penstock.compile(
        net, hardware, example_inputs=copy.deepcopy(batch), optimizer=SGD,
        strategy="gpipe" if devices > 1 else "balanced", micro_batches=micro_batches,
        loss_fn=loss_of if TARGET in batch else None,
    )  # fmt: skip
    with job:
        losses = [float(job.step(copy.deepcopy(batch))) for _ in range(steps)]
        job.sync()
        couplings = [coupling_text(each) for each in job.folder.settings.rows.couplings]
    return {"losses": losses, "state": net.state_dict(), "couplings": couplings}


def differences(net: nn.Module, eager: Trained, planned: Trained) -> dict[str, float]:
    """Of losses and weights, with buffers, relative; of moves, all of them together: a gradient that is wrong where
    moves are small would not show in weights. `net`: from which both began."""
    loss = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(planned["losses"], eager["losses"]))
    weights, apart, moved = 0.0, 0.0, 0.0
    for name, start in net.state_dict().items():
        wanted, found = eager["state"][name], planned["state"][name]
        if not start.is_floating_point():
            continue
        difference = (wanted - found).double()
        if difference.numel():
            weights = max(weights, float(difference.abs().max()) / max(float(wanted.abs().max()), 1e-2))
            apart += float(difference.square().sum())
            moved += float((wanted - start.detach()).double().square().sum())
    return {"loss_apart": loss, "weights_apart": weights, "moves_apart": (apart / max(moved, 1e-12)) ** 0.5}


def _frames(error: BaseException) -> list[str]:
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{_short(f.filename)}:{f.lineno} {f.line}" for f in frames if f.filename.startswith((OWN, LIBRARY))][-5:]


def _line(error: BaseException) -> str:
    """The library's last line that an error, or what it was made of, passed."""
    while error is not None:
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if frame.filename.startswith(LIBRARY) and "/models/" in frame.filename:
                return f"{_short(frame.filename)}:{frame.lineno}: {frame.line}"
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return ""


def _short(name: str) -> str:
    return name.replace(OWN, "penstock").replace(LIBRARY, "transformers")
