"""Sums over the members of a group: first those on this device, in the members' order, then over the devices."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from ...ir.program import StageSpec
from ..accelerator import current_stream, is_default_stream, settle
from ..optimizer.gradients import Grads
from .peers import PeerLink


def reduce_grads(
    grads: Sequence[dict[str, Tensor]],
    specs: Sequence[StageSpec],
    names: Sequence[str],
    adds: Sequence[bool],
    link: PeerLink | None,
    group: str,
) -> None:
    """Put the sum of a tied parameter's gradients into every member's dict. A missing gradient counts as zero, and so
    does that of a member that does not add (`Interface.adding`)."""
    here = [g[name] for g, name, counts in zip(grads, names, adds, strict=True) if counts and name in g]
    if here:
        total = here[0].clone(memory_format=torch.contiguous_format) if len(here) > 1 else here[0].contiguous()
        for grad in here[1:]:
            total += grad.to(total.device)
    else:
        param = next(p for p in specs[0].params if p.name == names[0])
        device = next((t.device for g in grads for t in g.values()), torch.device("cpu"))
        total = torch.zeros(param.shape, dtype=getattr(torch, param.grad_dtype), device=device)
    if link is not None:
        total = _sum_over_devices(total, link, group)
    for g, name in zip(grads, names, strict=True):
        if name not in g:
            g[name] = total.clone()
        elif g[name] is not total:
            g[name].copy_(total)
    _settle(total)


def reduce_whole(grads: Grads, link: PeerLink | None, group: str, without: Collection[str] = ()) -> None:
    """Replace a stage's gradients by their sums over the group, in place if they are in flat buffers. The graph fixes
    which parameters get a gradient, so that all devices hold the same names. `without`: names that stay as they are."""
    if link is None:
        return
    flats = () if without else grads.flats
    tensors = {name: g for name, g in grads.tensors.items() if name not in without}
    for dtype in sorted({g.dtype for g in tensors.values()}, key=str):
        names = [name for name, g in tensors.items() if g.dtype == dtype and not flats]
        values = [flat for flat in flats if flat.dtype == dtype] or [tensors[name].contiguous() for name in names]
        if values[0].is_cuda and not link.on_device(group):
            staged = [value.cpu() for value in values]
            link.sum_all(staged, group)
            values = [value.copy_(total) for value, total in zip(values, staged)]
        else:
            link.sum_all(values, group)
        for name, value in zip(names, values):
            if not grads.flats:
                grads.tensors[name] = value
            elif value is not tensors[name]:  # it is a copy, of one in a flat buffer
                tensors[name].copy_(value)
    _settle(next(iter(tensors.values()), torch.zeros(())))


def reduce_norms(values: Sequence[Tensor], link: PeerLink | None, group: str) -> Tensor:
    """The sum of all members' values, added in the group's order, so that every device gets the same bits."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    if link is None:
        return total
    if total.is_cuda and not link.on_device(group):
        total = total.cpu()
    parts = link.gather(total.reshape(1), group)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.reshape(())


def _sum_over_devices(total: Tensor, link: PeerLink, group: str) -> Tensor:
    if not total.is_cuda or link.on_device(group):
        link.sum(total, group)
        return total
    staged = total.cpu()  # some other member's gradients are in host memory
    link.sum(staged, group)
    return total.copy_(staged)


def _settle(total: Tensor) -> None:
    """Wait for the work that a host thread has put on its CUDA stream, because later ops wait for the thread only."""
    if total.is_cuda and is_default_stream(current_stream(total.device), total.device):
        settle(total.device)
