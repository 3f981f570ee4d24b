"""A class of blocks run compiled and as written on made-up values, before any step: same results, in no more memory?

In: one call of the class, as a run of its stage on fake tensors makes it, and what runs it compiled. Out: why the class
has to run as written, or None. Weights and arguments get values of their own, so that neither the stage's weights nor a
batch need be there yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...ir.precision import Precision
from ...ir.program import StageSpec, TensorSpec
from ..accelerator import begin_peak, peak_bytes, storage_of, taken_bytes
from ..script_caches import kept_caches
from ..torch_names import tree_leaves, tree_map

FP32_TOLERANCE = 1e-4  # of the largest value: sums of up to thousands of terms in another order
SMALL_BYTE = 60  # of quantised weights: 0.01 where four of them are an fp32 number
LOW_TOLERANCE = 6e-2  # a few roundings to bf16, which fused kernels leave out
NO_ROOM = "the GPU has no room to try it"
Forward = Callable[..., Any]


@dataclass
class TriedCall:
    """A call of a block's forward; its `args` hold fake tensors."""

    block: nn.Module
    args: tuple[Any, ...]

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for calls that one compilation serves."""
        args = [_layout(leaf) if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(self.args)]
        return (*args, *(param.requires_grad for param in self.block.parameters()))


def fake_run(
    module: nn.Module,
    spec: StageSpec,
    inputs: Sequence[TensorSpec | None],
    params: Mapping[str, nn.Parameter],
    device: torch.device,
) -> None:
    """Run a stage's forward on fake tensors of the plan's shapes. `inputs`: its own, or those of its backward."""
    from ..torch_names import FakeTensorMode

    with kept_caches(module), FakeTensorMode(allow_non_fake_inputs=True):
        rows = (*spec.params, *spec.buffers)
        made = {row.name: torch.empty(row.shape, dtype=getattr(torch, row.dtype), device=device) for row in rows}
        for param in spec.params:
            made[param.name].requires_grad_(params[param.name].requires_grad)
        torch.func.functional_call(module, made, tuple(want and _fake_input(want, device) for want in inputs))


def _fake_input(want: TensorSpec, device: torch.device) -> Tensor:
    order = want.order or tuple(range(len(want.shape)))
    laid_out = torch.empty([want.shape[i] for i in order], dtype=getattr(torch, want.dtype), device=device)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return laid_out.permute(inverse).requires_grad_(want.requires_grad)


@dataclass
class BlockRun:
    """The findings of one run.

    `saved`: bytes saved for backward without the block's arguments and outputs, with arguments, with outputs, with
    both. The rest are bytes taken of a GPU above those before the run: `alive` once forward is over, and peaks, of
    forward, and up to the end of each of two backwards, where the second adds to the gradients of the first. They are 0
    on a CPU device, whose memory nobody counts.
    """

    outputs: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    saved: tuple[int, ...] = ()
    alive: int = 0
    forward_peak: int = 0
    whole_peaks: list[int] = field(default_factory=list)


class BlockTrial:
    """Tries blocks of one stage on its device. `shapes`: of the stage's parameters, by the id of each."""

    def __init__(
        self, spec: StageSpec, device: torch.device, precision: Precision, shapes: Mapping[int, tuple[int, ...]]
    ):
        self.spec, self.device, self.precision, self.shapes = spec, device, precision, shapes

    def reason(self, call: TriedCall, compiled: Forward, keep: bool) -> str | None:
        """The reason for which blocks with this call must run as written; None if they may run compiled. `keep`: with
        autograd."""
        runs = []
        try:
            with self._values(call.block):
                args = tree_map(lambda like: draw_like(like, self.device, keep), call.args)
                for forward in (type(call.block).forward, compiled):
                    self._run(call.block, forward, args, keep)  # compiles, chooses among kernels, takes workspaces
                    runs.append(self._run(call.block, forward, args, keep))
        except torch.OutOfMemoryError:
            return NO_ROOM
        return self._compare(runs[0], runs[1], keep)

    def _compare(self, written: BlockRun, found: BlockRun, keep: bool) -> str | None:
        rows = [("outputs", [a], [b]) for a, b in zip(written.outputs, found.outputs)]
        for what, expected, made in [*rows, ("gradients", written.gradients, found.gradients)]:
            if reason := difference(what, expected, made, self.precision):
                return reason
        for mine, theirs in zip(found.saved, written.saved, strict=True):
            if mine > theirs:
                return f"a block would save {mine} bytes for backward; as written it saves {theirs}"
        spec = self.spec
        most = written.alive + (spec.forward_workspace_bytes if keep else spec.light_workspace_bytes)
        sizes = [
            ("after forward", found.alive, written.alive),
            ("in forward", found.forward_peak, max(written.forward_peak, most)),
        ]
        most = written.alive + spec.backward_workspace_bytes
        for mine, theirs in zip(found.whole_peaks, written.whole_peaks, strict=True):
            sizes.append(("in backward", mine, max(theirs, most)))
        for what, taken, counted in sizes:
            if taken > counted:
                return f"a block would take {taken} bytes {what}; as written, and in the plan's account, {counted}"
        return None

    def _run(self, block: nn.Module, forward: Forward, args: tuple[Any, ...], keep: bool) -> BlockRun:
        """A forward and, with `keep`, its backward; then both again, which adds to the gradients that are there."""
        leaves = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        sources = [leaf for leaf in (*leaves, *block.parameters()) if leaf.requires_grad] if keep else []
        found = BlockRun()
        for _ in range(2 if sources else 1):
            self._pass(block, forward, args, keep, found)
        found.gradients = [torch.zeros(()) if leaf.grad is None else leaf.grad.cpu() for leaf in sources]
        for leaf in sources:
            leaf.grad = None
        return found

    def _pass(self, block: nn.Module, forward: Forward, args: tuple[Any, ...], keep: bool, found: BlockRun) -> None:
        begin_peak(self.device)
        before_bytes = taken_bytes(self.device)
        saved: dict[int, int] = {}
        with torch.set_grad_enabled(keep), self.precision.autocast(self.device), _noting(saved) if keep else _NOTHING:
            outputs = [leaf for leaf in tree_leaves(forward(block, *args)) if isinstance(leaf, Tensor)]
        found.alive = max(found.alive, taken_bytes(self.device) - before_bytes)
        found.forward_peak = max(found.forward_peak, peak_bytes(self.device) - before_bytes)
        found.saved = _sizes_of_parts(saved, block, args, outputs)
        found.outputs = [output.detach().cpu() for output in outputs]
        outputs = [output for output in outputs if output.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [draw_like(output, self.device) for output in outputs])
            found.whole_peaks.append(peak_bytes(self.device) - before_bytes)

    @contextmanager
    def _values(self, block: nn.Module) -> Iterator[None]:
        """Give a block's parameters and buffers memory and values, and take them away again."""
        generator = torch.Generator(self.device).manual_seed(1)
        params = {id(param): param for param in block.parameters()}
        before = {key: param.data for key, param in params.items()}
        buffers = [(m, name, b) for m in block.modules() for name, b in m._buffers.items() if b is not None]
        try:
            for key, param in params.items():
                shape = self.shapes[key]
                made = torch.empty(shape, dtype=param.dtype, device=self.device)
                about, spread = (1.0, 0.1) if len(shape) < 2 else (0.0, shape[-1] ** -0.5)
                is_float = param.is_floating_point()
                param.data = made.normal_(about, spread, generator=generator) if is_float else made.fill_(SMALL_BYTE)
            for module, name, buffer in buffers:
                module._buffers[name] = torch.ones(buffer.shape, dtype=buffer.dtype, device=self.device)
            yield
        finally:
            for key, param in params.items():
                param.data, param.grad = before[key], None
            for module, name, buffer in buffers:
                module._buffers[name] = buffer


_NOTHING = nullcontext()


def draw_like(like: Any, device: torch.device, keep: bool = False) -> Any:
    """A tensor of this layout, with values that follow from it, and with `keep` a leaf as it is; what is no tensor is
    itself."""
    if not isinstance(like, Tensor):
        return like
    shape = [1 if stride == 0 else size for size, stride in zip(like.shape, like.stride())]
    made = torch.empty_strided(shape, like.stride(), dtype=like.dtype, device=device)
    if like.is_floating_point():
        made.normal_(generator=torch.Generator(device).manual_seed(0))
    else:
        made.fill_(like.dtype == torch.bool)  # 0 is a token, and a place, of every model
    return made.expand(like.shape).requires_grad_(keep and like.requires_grad)


def difference(what: str, written: Sequence[Tensor], found: Sequence[Tensor], precision: Precision) -> str:
    """The difference between results that is more than rounding, in words; empty where there is none."""
    tolerance = FP32_TOLERANCE if precision.low_dtype is None else LOW_TOLERANCE
    written, found = ([t.float() if t.is_floating_point() else t for t in row] for row in (written, found))
    largest = _largest(written)  # some are zero but for rounding
    if all(_agree(*pair, largest, tolerance) for pair in zip(written, found, strict=True)):
        return ""
    return f"{what} differ from those as written by more than {tolerance:g} of the largest value"


def _noting(saved: dict[int, int]) -> saved_tensors_hooks:
    """Note the bytes of each storage that autograd saves."""

    def pack(tensor: Tensor) -> Tensor:
        saved[storage_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    return saved_tensors_hooks(pack, lambda tensor: tensor)


def _sizes_of_parts(
    saved: Mapping[int, int], block: nn.Module, args: Any, outputs: Sequence[Tensor]
) -> tuple[int, ...]:
    """See `BlockRun.saved`. Weights and buffers are there anyway."""
    lasting = {storage_of(tensor) for tensor in (*block.parameters(), *block.buffers())}
    given = {storage_of(leaf) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
    made = {storage_of(output) for output in outputs} - given
    without = [lasting | given | made, lasting | made, lasting | given, lasting]
    return tuple(sum(size for storage, size in saved.items() if storage not in left) for left in without)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _largest(tensors: Sequence[Tensor]) -> float:
    sizes = (t.nan_to_num(0.0, 0.0, 0.0).abs().max().item() for t in tensors if t.is_floating_point() and t.numel())
    return max(sizes, default=0.0)


def _agree(written: Tensor, compiled: Tensor, largest: float, tolerance: float) -> bool:
    if not written.is_floating_point() or not written.numel():
        return torch.equal(written, compiled)
    return torch.allclose(compiled, written, rtol=0.0, atol=tolerance * largest, equal_nan=True)
