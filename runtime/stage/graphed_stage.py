"""A stage run from CUDA graphs: forward and backward of a micro-batch are one launch each.

Streams are captured once, before the first step: torch notes what they would do, and a launch does it.

A graph reads and writes at fixed places. What comes in is copied to the places of its slot, what goes out is copied
from there, so that values live as long as the program says, and a slot is free again once its backward was launched.
Gradients of parameters add up at one place for all slots, as all launches are on one stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...ir.errors import PlanError
from ...ir.program import StageGraphs, StageSpec, TensorSpec, aligned
from ..accelerator import GpuGraph, capturing, give_back, new_pool, pools_bytes, refusing_waits
from ..functions.document_borders import trial

if TYPE_CHECKING:
    from .runner import StageRunner

DRAWS = "it draws random numbers, and the host sets the seed of each draw"
CHANGES = "its forward changes its buffers"
SPARSE = "its gradients are sparse"
NOTHING_YET = -0.0  # what it is added to keeps its bits, also a zero's sign


class GraphSlot:
    """The places and graphs of one micro-batch between its forward and its backward. `kept`: the forward keeps what
    backward needs; else backward runs forward again."""

    def __init__(self, spec: StageSpec, device: torch.device, takes: Sequence[bool], keeps: bool):
        self.keeps, self.pool = keeps, new_pool()
        self.inputs = [_place(each, device) for each in spec.inputs]
        self.douts = [_place(each, device) if taken else None for each, taken in zip(spec.outputs, takes)]
        self.outputs: list[Tensor] = []
        self.dinputs: list[Tensor] = []
        self.forward, self.backward = GpuGraph(), GpuGraph()

    def capture(self, runner: StageRunner, grads: dict[str, Tensor]) -> None:
        try:
            with capturing(self.forward, self.pool):
                self.outputs, kept = runner.forward(self.inputs, 0, self.keeps)
            with capturing(self.backward, self.pool):
                self.dinputs, _ = runner.backward(kept, self.inputs, self.douts, grads, 0)
        except RuntimeError as error:  # what torch does not know of beforehand, such as copies of pageable memory
            name = runner.spec.name
            raise PlanError(
                f"cuda_graphs=True, but {name} cannot run from CUDA graphs: {_first_line(error)}"
            ) from error

    def take(self, inputs: Sequence[Tensor | None]) -> None:
        for place, value in zip(self.inputs, inputs, strict=True):
            if value is not None:
                place.copy_(value, non_blocking=True)

    @property
    def own_bytes(self) -> int:
        """Bytes of what was taken outside of its pool."""
        return sum(aligned(each.nbytes) for each in (*self.inputs, *self.douts) if each is not None)


class GraphedStage:
    """The slots of one stage, see `StageGraphs`."""

    def __init__(self, spec: StageSpec, device: torch.device, graphs: StageGraphs):
        self.spec, self.device = spec, device
        self.kept_bytes = 0
        self._graphs = graphs
        self._again: GraphSlot | None = None
        self._free: list[GraphSlot] = []
        self._flats: list[Tensor] = []
        self._grads: dict[str, Tensor] = {}
        self._reached: list[str] = []  # parameters that gradients reach

    def reason(self, runner: StageRunner) -> str:
        """The reason for which the stage cannot run from graphs, found by running it twice on zeros; "" if it can."""
        before = {name: buffer.clone() for name, buffer in runner.buffers().items()}
        slot = GraphSlot(self.spec, self.device, self._graphs.takes, True)
        for keep in [True] * bool(self._graphs.slots) + [False] * self._graphs.again:
            try:
                grads = self._run(runner, slot, keep)
            except torch.linalg.LinAlgError as error:
                return f"it does not run on zeros: {_first_line(error)}"
            if runner.draws.may_draw:
                return DRAWS
            if any(not torch.equal(buffer, before[name]) for name, buffer in runner.buffers().items()):
                for name, buffer in runner.buffers().items():
                    buffer.copy_(before[name])
                return CHANGES
            if any(gradient.layout is not torch.strided for gradient in grads.values()):
                return SPARSE
            self._reached = list(grads)
            try:
                with refusing_waits():
                    self._run(runner, slot, keep)
            except RuntimeError as error:
                return f"it waits for the device: {_first_line(error)}"
        return ""

    def _run(self, runner: StageRunner, slot: GraphSlot, keep: bool) -> dict[str, Tensor]:
        with trial():
            _, kept = runner.forward(slot.inputs, 0, keep)
            return runner.backward(kept, slot.inputs, [d if d is None else d.zero_() for d in slot.douts], None, 0)[1]

    def capture(self, runner: StageRunner) -> None:
        """Capture all slots on the calling thread's current stream, which has run the stage before."""
        give_back(self.device)
        self._place_grads()
        self._free = [GraphSlot(self.spec, self.device, self._graphs.takes, True) for _ in range(self._graphs.slots)]
        self._again = GraphSlot(self.spec, self.device, self._graphs.takes, False) if self._graphs.again else None
        for slot in self._slots():
            slot.capture(runner, dict(self._grads))
        self.kept_bytes = runner.kept_bytes or 0

    def _slots(self) -> list[GraphSlot]:
        return [*self._free, *([] if self._again is None else [self._again])]

    def _place_grads(self) -> None:
        rows: dict[str, list[tuple[str, tuple[int, ...], int]]] = {}
        for param in self.spec.params:
            if param.name in self._reached:
                size = aligned(param.grad_bytes) // getattr(torch, param.grad_dtype).itemsize
                rows.setdefault(param.grad_dtype, []).append((param.name, param.shape, size))
        for dtype, params in rows.items():
            sizes = [size for _, _, size in params]
            flat = torch.empty(sum(sizes), dtype=getattr(torch, dtype), device=self.device)
            self._flats.append(flat)
            for (name, shape, _), piece in zip(params, flat.split(sizes)):
                self._grads[name] = piece[: torch.Size(shape).numel()].view(shape)

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds, for good."""
        slots = self._slots()
        own = sum(slot.own_bytes for slot in slots) + sum(aligned(flat.nbytes) for flat in self._flats)
        return own + pools_bytes(self.device, {slot.pool for slot in slots})

    # --- in place of the runner's own

    def forward(self, inputs: Sequence[Tensor], keep: bool) -> tuple[list[Tensor], GraphSlot | None]:
        slot = self._free.pop() if keep else self._again
        assert slot is not None
        slot.take(inputs)
        slot.forward.replay()
        return [output.clone() for output in slot.outputs], slot if keep else None

    def backward(
        self,
        slot: GraphSlot | None,
        inputs: Sequence[Tensor | None],
        douts: Sequence[Tensor | float | None],
        grads: dict[str, Tensor] | None,
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        if slot is None:
            slot = self._again
            assert slot is not None
            slot.take(inputs)
        else:
            self._free.append(slot)
        if grads is None:
            grads = dict(self._grads)
            for flat in self._flats:
                flat.fill_(NOTHING_YET)
        for place, dout in zip(slot.douts, douts, strict=True):
            if place is not None and isinstance(dout, Tensor):
                place.copy_(dout)
            elif place is not None and dout is not None:
                place.fill_(dout)
        slot.backward.replay()
        return [dinput.clone() for dinput in slot.dinputs], grads


def _place(spec: TensorSpec, device: torch.device) -> Tensor:
    """Zeros, in the layout in which the stage takes them."""
    zeros = torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
    if not spec.order:
        return zeros
    inverse = sorted(range(len(spec.order)), key=spec.order.__getitem__)
    return zeros.permute(spec.order).contiguous().permute(inverse)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
