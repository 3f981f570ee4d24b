"""What one block costs: each distinct block hash is run once, forward and backward, on fake tensors.

In: blocks of the op graph. Out: the same blocks with a `BlockCost`. No weight is materialised. FLOPs come from torch's
own registry; saved bytes from `saved_tensors_hooks`, each storage once; peaks from the births and deaths of storages.
For plans on CUDA, attention and dropout are counted as CUDA's kernels behave: attention saves q, k, v, its output and
one fp32 row sum, dropout saves one byte per element.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from .blocks import Block, BlockCost
from .opgraph import OpGraph

SDPA = torch.nn.functional.scaled_dot_product_attention


def measure_blocks(graph: OpGraph, blocks: list[Block], device_kind: str = "cpu") -> list[Block]:
    """Blocks with costs; those of equal hash are measured once."""
    known: dict[str, BlockCost] = {}
    for block in blocks:
        if block.hash not in known:
            known[block.hash] = measure(graph, block, device_kind)
    return [block.with_cost(known[block.hash]) for block in blocks]


def measure(graph: OpGraph, block: Block, device_kind: str = "cpu") -> BlockCost:
    """Run the block forward with gradients, backward, and forward without, on fake tensors."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    run = _BlockRun(graph, block, mode, device_kind)
    with mode, torch.random.fork_rng(devices=[]):
        run.make_inputs()
        forward, outputs, kept, saved_inputs, saved_outputs = run.forward()
        backward = run.backward(outputs)
        light = run.light()
    return BlockCost(
        forward_flops=forward.flops,
        backward_flops=backward.flops,
        forward_traffic_bytes=forward.traffic_bytes,
        backward_traffic_bytes=backward.traffic_bytes,
        kept_bytes=kept,
        saved_inputs=saved_inputs,
        saved_outputs=saved_outputs,
        forward_peak_bytes=forward.peak_bytes,
        light_peak_bytes=light.peak_bytes,
        backward_peak_bytes=backward.peak_bytes,
        launches=forward.launches,
    )


class _BlockRun:
    """One block on fake inputs and fake parameters of its own."""

    def __init__(self, graph: OpGraph, block: Block, mode: FakeTensorMode, device_kind: str):
        self.graph, self.block, self.mode, self.cuda = graph, block, mode, device_kind == "cuda"
        self.tensors: dict[int, torch.Tensor] = {}  # real or meta tensor's id -> fake
        self.inputs: dict[fx.Node, Any] = {}

    def fake(self, tensor: torch.Tensor, requires_grad: bool | None = None) -> torch.Tensor:
        if id(tensor) not in self.tensors:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            wants = tensor.requires_grad if requires_grad is None else requires_grad
            if wants and made.is_floating_point():
                made.requires_grad_()
                if isinstance(tensor, torch.nn.Parameter):
                    made.grad = torch.empty_like(made)  # as from the second micro-batch on
            self.tensors[id(tensor)] = made
        return self.tensors[id(tensor)]

    def make_inputs(self) -> None:
        for node in self.block.inputs:
            value = node.meta.get("val")
            self.inputs[node] = fx.node.map_aggregate(  # type: ignore[assignment]
                value, lambda v: self.fake(v) if isinstance(v, torch.Tensor) else v
            )
        for node in self.block.nodes:  # parameters exist before the block runs
            for parameter in self.graph.node_parameters(node).values():
                self.fake(parameter)

    def execute(self) -> dict[fx.Node, Any]:
        values = dict(self.inputs)
        last: dict[fx.Node, int] = {}
        keep = set(self.block.outputs)
        for i, node in enumerate(self.block.nodes):
            for arg in node.all_input_nodes:
                last[arg] = i
        for i, node in enumerate(self.block.nodes):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            with torch.set_grad_enabled(torch.is_grad_enabled() and not node.meta.get("no_grad", False)):
                values[node] = self.call(node, args, kwargs)
            for arg in node.all_input_nodes:
                if last[arg] == i and arg not in keep and arg not in self.inputs:
                    values.pop(arg, None)
            del args, kwargs
        return values

    def call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.op == "get_attr":
            owner, _, name = str(node.target).rpartition(".")
            return self.fake(getattr(self.graph.module.get_submodule(owner), name))
        if node.op == "call_module":
            leaf = self.graph.module.get_submodule(str(node.target))
            if self.cuda and isinstance(leaf, torch.nn.Dropout):
                return _cuda_dropout(args[0], leaf.p)
            own = [*leaf.named_parameters(remove_duplicate=False), *leaf.named_buffers(remove_duplicate=False)]
            was_training = leaf.training
            leaf.train()
            try:
                return torch.func.functional_call(leaf, {name: self.fake(t) for name, t in own}, args, kwargs)
            finally:
                leaf.train(was_training)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        target: Any = node.target
        if self.cuda and target is SDPA:
            return _cuda_attention(*args, **kwargs)
        if self.cuda and target is torch.nn.functional.dropout:
            return _cuda_dropout(*args, **kwargs)
        return target(*args, **kwargs)

    def forward(self) -> tuple[_Meter, list[torch.Tensor], int, tuple[bool, ...], tuple[bool, ...]]:
        saved: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            saved[storage._cdata] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), _Meter() as meter:
            values = self.execute()
        outputs = [t for n in self.block.outputs for t in tree_leaves(values[n]) if isinstance(t, torch.Tensor)]
        own = {t.untyped_storage()._cdata for t in self.tensors.values()}
        kept = sum(s.nbytes() for key, s in saved.items() if key not in own)

        def is_saved(value: Any) -> bool:
            return any(isinstance(t, torch.Tensor) and t.untyped_storage()._cdata in saved for t in tree_leaves(value))

        saved_inputs = tuple(is_saved(self.inputs[n]) for n in self.block.inputs)
        saved_outputs = tuple(is_saved(values[n]) for n in self.block.outputs)
        return meter, outputs, kept, saved_inputs, saved_outputs

    def backward(self, outputs: list[torch.Tensor]) -> _Meter:
        ends = [t for t in outputs if t.requires_grad]
        meter = _Meter()
        if ends:
            gradients = [torch.empty_like(t) for t in ends]
            with meter:
                torch.autograd.backward(ends, gradients)
        return meter

    def light(self) -> _Meter:
        with torch.no_grad(), _Meter() as meter:
            values = self.execute()
        del values
        return meter


class _Meter(TorchDispatchMode):
    """Counts FLOPs, bytes read and written, calls, and the peak of live new storages."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0
        self.traffic_bytes = 0.0
        self.launches = 0
        self.live_bytes = self.peak_bytes = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        before = {t.untyped_storage()._cdata for t in read}
        new = [t for t in made if t.untyped_storage()._cdata not in before]
        self.flops += flops_of(func, args, kwargs, out)
        if new or func._schema.is_mutable:
            self.launches += 1
            self.traffic_bytes += sum(_num_bytes(t) for t in read) + sum(_num_bytes(t) for t in made)
        for tensor in new:
            self.born(tensor.untyped_storage())
        return out

    def born(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self.died, key, size)

    def died(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live_bytes -= size


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Multiply-adds counted twice, as torch counts them; attention on CPU is not in torch's registry."""
    packet = func._overloadpacket
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=out))
    name = packet.__name__
    if name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
        query, key = (args[1], args[2]) if name.endswith("backward") else (args[0], args[1])
        batch, heads, length, width = query.shape
        return 4.0 * batch * heads * length * key.shape[-2] * width * (2.5 if name.endswith("backward") else 1.0)
    return 0.0


def _num_bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()


class _Attention(torch.autograd.Function):
    """Shapes and saved tensors of a fused attention kernel; its arithmetic is two products of the same FLOPs."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any) -> Any:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        rows = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, rows, *([mask] if mask is not None else []))
        _count_attention(query, key, 1.0)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value = ctx.saved_tensors[:3]
        _count_attention(query, key, 2.5)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _count_attention(query: torch.Tensor, key: torch.Tensor, factor: float) -> None:
    flops = 4.0 * math.prod(query.shape[:-1]) * key.shape[-2] * query.shape[-1] * factor
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        if isinstance(mode, _Meter):
            mode.flops += flops


def _cuda_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: Any = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    return _Attention.apply(query, key, value, attn_mask)


def _cuda_dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return torch.native_dropout(input, p, training)[0] if p > 0 and training else input
