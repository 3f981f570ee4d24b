"""Measure the costs of one block: it is run, forward and backward, on fake tensors.

In: a block of the op graph. Out: its `BlockCost`, which `measured.py` keeps for equal blocks. No weight is
materialised. FLOPs come from the operators' records or torch's own registry; saved bytes from `saved_tensors_hooks`,
each storage once; peaks from the births and deaths of storages. For plans on CUDA, attention and dropout are counted as
CUDA's kernels behave (`graph/kernels/attention.py`); dropout saves one byte per element; peaks have what operators hold
while they run (`graph/operators/table.py`), and the gaps that large tensors leave in the allocator's memory. Fake
tensors do not show the workspace that oneDNN's recurrent layers keep on CPU.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.flop_counter import flop_registry

from ...ir.machine.call_mix import AttentionCall, CallMix, Product
from ...ir.regions import FusedRegion, Region, TiledRegion, mark_of, region_inputs, unread_regions, with_regions
from ...runtime.functions import (
    attend_block,
    fuse,
    linear_4bit,
    linear_8bit,
    linear_float8,
    linear_packed,
    with_gradients,
)
from ...runtime.functions.chunked_loss import slices
from ...runtime.functions.tiles import in_tiles, tile_slices
from ...runtime.quantised.pieces import keep_unpacked_weights
from ...runtime.script_caches import kept_caches
from ...runtime.stage.operators import COSTLY, written_tensors
from ...runtime.stage.pointwise import PointwiseAgain, flat_tensor
from ...runtime.stage.saved_classes import Look, attention_bytes, look_of, parts_of, result_bytes
from ...runtime.torch_names import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    current_dispatch_modes,
    disable_current_modes,
    tree_leaves,
)
from ..blocks import AgainCost, Block, BlockCost, CostlyCall, UnpackedCost
from ..forwards.first_only import unread_by_gradients
from ..kernels.attention import cuda_attention
from ..kernels.call_rows import KernelCalls, MixRows
from ..kernels.cuda_autocast import autocast_as
from ..kernels.stand_ins import CUDA_STAND_INS, STAND_INS, cuda_dropout
from ..operators.calls import IN_PIECES
from ..operators.table import kernel_rows, workspace_bytes
from ..opgraph import OpGraph

UNPACKING = (linear_4bit, linear_8bit, linear_packed)  # their forward can leave backward the weight that it unpacks
_End = tuple[GradientEdge, torch.Size, torch.dtype]  # where a gradient enters backward


def measure(
    graph: OpGraph,
    block: Block,
    device_kind: str = "cpu",
    gaps_bytes: int | None = None,
) -> BlockCost:
    """Run the block forward with gradients, backward, and forward without gradients, on fake tensors.

    `gaps_bytes`: the gaps in the allocator's memory for which there is room in any case; None: for all. The allocator
    takes more memory where each of its gaps is smaller than the tensor that it has to place, so gaps of about the
    largest tensor are left, and what of that has no room counts in the peaks.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    run, caches = FakeBlockRun(graph, block, mode, device_kind), kept_caches(*(node.target for node in block.nodes))
    with (
        caches,
        mode,
        torch.random.fork_rng(devices=[]),
        autocast_as(device_kind, graph.autocast),
        _attention_of(device_kind),
    ):
        run.make_inputs()
        forward, ends, saved, saved_inputs, saved_outputs = run.forward()
        kept = sum(storage.nbytes() for storage in saved)
        backward = run.backward(ends, saved)
        light = run.light()
        again, unread = run.again(), run.unread()
        unpacked_forward, unpacked_backward, unpacked_bytes = run.unpacked_runs() or (None, None, kept)
    if gaps_bytes is not None:
        for meter in filter(None, (forward, backward, light, again, unread, unpacked_forward, unpacked_backward)):
            meter.peak_bytes += max(0, meter.largest_bytes - gaps_bytes)
    recurrent = any(_is_recurrent(graph, node) for node in block.nodes)
    tiles = {i for i, node in enumerate(block.nodes) if mark_of(node) is not None}  # whose calls are of one tile each
    return BlockCost(
        forward_flops=forward.flops,
        backward_flops=backward.flops,
        forward_traffic_bytes=forward.traffic_bytes,
        backward_traffic_bytes=backward.traffic_bytes,
        forward_mix=forward.mix(),
        backward_mix=backward.mix(),
        kept_bytes=kept,
        saved_inputs=saved_inputs,
        saved_outputs=saved_outputs,
        forward_peak_bytes=forward.peak_bytes,
        light_peak_bytes=light.peak_bytes,
        backward_peak_bytes=backward.peak_bytes,
        launches=forward.launches,
        again=None if again is None else _again_cost(again),
        unread=None if unread is None else _again_cost(unread),
        calls=None if recurrent else _costly_calls(forward.costly, light.costly, tiles),
        unpacked=None
        if unpacked_forward is None or unpacked_backward is None or unpacked_bytes == kept
        else UnpackedCost(
            unpacked_bytes,
            unpacked_forward.peak_bytes,
            unpacked_backward.peak_bytes,
            unpacked_backward.traffic_bytes,
            unpacked_backward.mix(),
        ),
        uncounted=tuple(sorted(forward.uncounted | backward.uncounted | light.uncounted)),
    )


def _attention_of(device_kind: str) -> AbstractContextManager[Any]:
    """Lets torch's own functions of many calls, such as `multi_head_attention_forward`, attend as the device does."""
    if device_kind != "cuda":
        return nullcontext()
    return mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", cuda_attention)


def _again_cost(again: _Meter) -> AgainCost:
    return AgainCost(again.flops, again.traffic_bytes, again.mix(), again.launches, again.peak_bytes)


def _is_recurrent(graph: OpGraph, node: fx.Node) -> bool:
    """Whether the calls that a node makes depend on the device: CUDA and oneDNN run a recurrent layer as one call."""
    if node.op == "call_module":
        return isinstance(graph.module.get_submodule(str(node.target)), torch.nn.RNNBase)
    return node.target in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def _costly_calls(
    forward: Sequence[_Costly], light: Sequence[_Costly], tiled: Collection[int]
) -> tuple[CostlyCall, ...] | None:
    """A block's costly calls, from its forwards with and without gradients; None where these make different calls.
    Those of tiles cannot be kept: backward would make them again."""
    if [(row.node, row.look[0]) for row in forward] != [(row.node, row.look[0]) for row in light]:
        return None
    found = []
    for a, b in zip(forward, light):
        can_be_kept = a.look == b.look and not (a.is_changed or b.is_changed or a.node in tiled)
        found.append(CostlyCall(a.node, a.bytes, a.flops, a.is_saved, can_be_kept))
    return tuple(found)


class FakeBlockRun:
    """One block on fake inputs and fake parameters of its own."""

    def __init__(self, graph: OpGraph, block: Block, mode: FakeTensorMode, device_kind: str):
        self.graph, self.block, self.mode, self.cuda = graph, block, mode, device_kind == "cuda"
        self.tensors: dict[int, torch.Tensor] = {}  # real or meta tensor's id -> fake
        self.inputs: dict[fx.Node, Any] = {}
        self.places = {node: i for i, node in enumerate(block.nodes)}
        self.parameters = {k: p for node in block.nodes for k, p in graph.node_parameters(node).items()}
        self.now = 0  # the number of the node that runs
        self.times = 1  # the number of calls that each call stands for

    def fake(self, tensor: torch.Tensor, requires_grad: bool | None = None) -> torch.Tensor:
        if id(tensor) not in self.tensors:
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            dtype = self.graph.compute_dtype(tensor) if is_parameter else tensor.dtype
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
            wants = tensor.requires_grad if requires_grad is None else requires_grad
            if wants and made.is_floating_point():
                made.requires_grad_()
                if is_parameter:
                    made.grad_dtype = self.graph.gradient_dtype(tensor)
                    made.grad = torch.empty_like(made, dtype=made.grad_dtype)  # as from the second micro-batch on
            self.tensors[id(tensor)] = made
        return self.tensors[id(tensor)]

    def make_inputs(self) -> None:
        for node in self.block.inputs:
            value = node.meta.get("val")
            self.inputs[node] = fx.node.map_aggregate(
                value, lambda v: self.fake(v) if isinstance(v, torch.Tensor) else v
            )
        for node in self.block.nodes:  # parameters exist before the block runs
            for parameter in self.graph.node_parameters(node).values():
                self.fake(parameter)

    def execute(self, without: Collection[fx.Node] = (), unread: Collection[str] = ()) -> dict[fx.Node, Any]:
        """The block's results, and inputs. `without`: nodes that do not run; `unread`: parts whose results nothing
        reads."""
        values = dict(self.inputs)
        last: dict[fx.Node, int] = {}
        keep = set(self.block.outputs)
        steps = with_regions(self.block.nodes)
        for i, step in enumerate(steps):
            for arg in _reads(step):
                last[arg] = i
        for i, step in enumerate(steps):
            if isinstance(step, Region):
                if isinstance(step, TiledRegion):
                    self.run_tiles(step, values, step.name in unread)
                elif isinstance(step, FusedRegion):
                    self.run_fused(step, values)
            elif step in without:
                values[step] = None
                continue
            else:
                self.run_node(step, values)
            for arg in _reads(step):
                if last[arg] == i and arg not in keep and arg not in self.inputs:
                    values.pop(arg, None)
        return values

    def run_node(self, node: fx.Node, values: dict[fx.Node, Any]) -> None:
        self.now = self.places[node]
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not node.meta.get("no_grad", False)), _inner(node):
            values[node] = self.call(node, args, kwargs)

    def body(self, region: Region, values: dict[fx.Node, Any]) -> Callable[..., tuple[torch.Tensor, ...]]:
        """A region as a function of what it reads."""
        held = {n: values[n] for node in region.nodes for n in node.all_input_nodes if n.op == "get_attr"}

        def run(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
            inside = {**held, **dict(zip(region.inputs, operands))}
            last = {arg: node for node in region.nodes for arg in node.all_input_nodes}
            for node in region.nodes:
                self.run_node(node, inside)
                for arg in node.all_input_nodes:
                    if last[arg] is node and arg not in region.outputs:
                        inside.pop(arg, None)
            return tuple(inside[node] for node in region.outputs)

        return run

    def run_fused(self, region: FusedRegion, values: dict[fx.Node, Any]) -> None:
        """Run a region as the printed stage does; its calls count as one where kernels are made for it."""
        body = self.body(region, values)
        operands = [values[n] for n in region.inputs]
        counting = self.one_call if self.cuda else None
        values[region.result] = fuse(lambda *given: body(*given)[0], operands, region.needed, counting)

    @contextmanager
    def one_call(self, read: Sequence[torch.Tensor]) -> Iterator[Callable[[Sequence[torch.Tensor]], None]]:
        """Count the calls within this as one, which reads and writes what it is told."""
        meters = [mode for mode in current_dispatch_modes() if isinstance(mode, _Meter)]
        made: list[torch.Tensor] = []
        for meter in meters:
            meter.is_inside = True
        try:
            yield made.extend
        finally:
            for meter in meters:
                meter.is_inside = False
                meter.note_moves(None, 0.0, sum(map(_num_bytes, (*read, *made))))

    def run_tiles(self, part: TiledRegion, values: dict[fx.Node, Any], unread: bool) -> None:
        """Run a region as the printed stage does."""
        body = self.body(part, values)
        operands = [values[n] for n in part.inputs]
        weights = [self.fake(self.parameters[name]) for name in part.weights]
        made = in_tiles(body, part.tokens, operands, part.dims, part.results, weights, self.some_tiles, unread)
        values.update(zip(part.outputs, made if isinstance(made, tuple) else (made,)))

    def some_tiles(self, length: int, tokens: int) -> Iterator[tuple[int, int]]:
        return self.some(tile_slices(length, tokens))

    def some_pieces(self, total: int, size: int) -> Iterator[slice]:
        bounds = ((part.start, part.stop - part.start) for part in slices(total, size))
        return (slice(start, start + number) for start, number in self.some(bounds))

    def some(self, bounds: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Of tiles, or pieces of a loss, the first, the second in place of all others of its size, and the last where
        it is smaller: the more there are, the more are alike."""
        first, *others = bounds
        alike = [row for row in others if row[1] == first[1]]
        yield first
        if alike:
            self.times = len(alike)
            yield alike[0]
        self.times = 1
        yield from others[len(alike) :]

    def some_of(self, rows: Sequence[tuple[slice, slice]]) -> Iterator[tuple[slice, slice]]:
        """Of tiles that are alike, or of which each is larger by as much, the first, the one or two in the middle in
        place of all between, and the last two, as what is made for one may be there while the next is computed."""
        first, between, last = rows[:1], rows[1:-2], rows[1:][-2:]
        half = (len(between) - 1) // 2
        middle = between[half : len(between) - half]
        yield from first
        for row in middle:
            self.times = len(between) // len(middle)
            yield row
        self.times = 1
        yield from last

    @contextmanager
    def repeat(self, times: int) -> Iterator[None]:
        """Count each call within this as `times` calls."""
        self.times = times
        try:
            yield
        finally:
            self.times = 1

    def call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.op == "get_attr":
            owner, _, name = str(node.target).rpartition(".")
            return self.fake(getattr(self.graph.module.get_submodule(owner), name))
        if node.op == "call_module":
            leaf = self.graph.module.get_submodule(str(node.target))
            if self.cuda and isinstance(leaf, torch.nn.Dropout) and leaf.training:
                return cuda_dropout(args[0], leaf.p)
            own = [*leaf.named_parameters(remove_duplicate=False), *leaf.named_buffers(remove_duplicate=False)]
            return torch.func.functional_call(leaf, {name: self.fake(t) for name, t in own}, args, kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.target in IN_PIECES:
            kwargs = {**kwargs, "pieces": self.some_pieces}
        if node.target is linear_float8 and self.cuda:
            kwargs = {**kwargs, "one_call": self.one_call}
        if node.target is linear_packed and self.cuda:
            kwargs = {**kwargs, "repeat": self.repeat}
        if node.target in (attend_block, with_gradients):
            kwargs = {**kwargs, "some": self.some_of}
        stand_ins = CUDA_STAND_INS if self.cuda else STAND_INS
        target: Any = stand_ins.get(node.target, node.target)
        return target(*args, **kwargs)

    def forward(self) -> tuple[_Meter, list[_End], list[torch.UntypedStorage], tuple[bool, ...], tuple[bool, ...]]:
        """Run with gradients. Returns meter, gradient edges, saved storages, which inputs and outputs are saved."""
        saved: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            saved[storage._cdata] = storage
            return tensor.detach()  # otherwise a saved result would hold the graph that saves it

        with _Meter(self) as meter, self.saving(pack):
            values = self.execute()
        own = {t.untyped_storage()._cdata for t in self.tensors.values()}

        def is_saved(value: Any) -> bool:
            return any(isinstance(t, torch.Tensor) and t.untyped_storage()._cdata in saved for t in tree_leaves(value))

        saved_inputs = tuple(is_saved(self.inputs[n]) for n in self.block.inputs)
        saved_outputs = tuple(is_saved(values[n]) for n in self.block.outputs)
        outputs = [t for n in self.block.outputs for t in tree_leaves(values[n]) if isinstance(t, torch.Tensor)]
        ends = [(get_gradient_edge(t), t.shape, t.dtype) for t in outputs if t.requires_grad]
        kept = [storage for key, storage in saved.items() if key not in own]
        for key, row in meter.outputs.items():
            row.is_saved = key in saved
        saved.clear()  # autograd holds `pack`, which holds `saved`
        return meter, ends, kept, saved_inputs, saved_outputs

    def saving(self, pack: Callable[[torch.Tensor], torch.Tensor]) -> AbstractContextManager[Any]:
        """A context that decides which tensors autograd saves; each goes through `pack`."""
        if not self.graph.pointwise_again:
            return torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
        params = (p for node in self.block.nodes for p in self.graph.node_parameters(node).values())
        weights = {self.fake(p).untyped_storage()._cdata for p in params}
        return PointwiseAgain(pack, lambda t: t, lambda t: t.untyped_storage()._cdata in weights, self.flat)

    def flat(self, storage: torch.UntypedStorage, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A fake tensor over all of a storage, which must not pass through the mode: that would hold it for good."""
        with disable_current_modes():
            return FakeTensor(self.mode, flat_tensor(storage, dtype, torch.device("meta")), device)

    def backward(self, ends: list[_End], saved: list[torch.UntypedStorage]) -> _Meter:
        """Run backward as a stage does: only the graph holds what was saved."""
        meter = _Meter(self)
        meter.watch(saved)
        if ends:
            gradients = [torch.empty(shape, dtype=dtype) for _, shape, dtype in ends]
            with meter:
                torch.autograd.backward([edge for edge, _, _ in ends], gradients)
        return meter

    def again(self) -> _Meter | None:
        """Run with gradients and without what only the first forward needs; None where that is nothing."""
        without = unread_by_gradients(self.block.nodes)
        if not without:
            return None
        meter = _Meter(self)
        with meter, self.saving(lambda tensor: tensor.detach()):
            values = self.execute(without)
        del values
        return meter

    def unread(self) -> _Meter | None:
        """Run with gradients, as where nothing reads the results of parts that end the block; None without such. Where
        only the first forward needs other nodes, too, that alone is left out."""
        parts = {part.name for part in unread_regions(self.block.nodes)}
        if not parts or unread_by_gradients(self.block.nodes):
            return None
        meter = _Meter(self)
        with meter, self.saving(lambda tensor: tensor.detach()):
            values = self.execute(unread=parts)
        del values
        return meter

    def unpacked_runs(self) -> tuple[_Meter, _Meter, int] | None:
        """Run forward and backward with the weights that forward unpacks kept between them: their meters, and the saved
        bytes; None where no call unpacks one."""
        if not any(node.target in UNPACKING for node in self.block.nodes):
            return None
        for leaf in tree_leaves([*self.inputs.values()]):
            if isinstance(leaf, torch.Tensor):
                leaf.grad = None  # that of the backward before
        with keep_unpacked_weights("cuda" if self.cuda else "cpu"):
            forward, ends, saved, _, _ = self.forward()
        kept_bytes = sum(storage.nbytes() for storage in saved)
        return forward, self.backward(ends, saved), kept_bytes

    def light(self) -> _Meter:
        meter = _Meter(self)
        with torch.no_grad(), meter:
            values = self.execute()
        del values
        return meter


def _reads(step: fx.Node | Region) -> list[fx.Node]:
    """The nodes that a step reads, with the weights that are read inside of a region."""
    return region_inputs(step.nodes) if isinstance(step, Region) else step.all_input_nodes


def _inner(node: fx.Node) -> AbstractContextManager[Any]:
    """The model's own `torch.autocast` that the node was recorded in."""
    setting = node.meta.get("autocast")
    if setting is None:
        return nullcontext()
    device, dtype, enabled, cache = setting
    return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)


@dataclass
class _Costly:
    """A costly call that a meter has seen."""

    node: int
    look: Look
    bytes: int
    flops: float
    is_saved: bool = False
    is_changed: bool = False  # in place, or it has gaps


class _Meter(TorchDispatchMode, KernelCalls):
    """Counts FLOPs, bytes read and written, calls by size, and the peak of live new storages; notes costly calls."""

    def __init__(self, run: FakeBlockRun) -> None:
        super().__init__()
        self.run = run
        self.costly: list[_Costly] = []
        self.outputs: dict[int, _Costly] = {}  # live storage -> the costly call that made it
        self.rows = MixRows()
        self.flops = 0.0
        self.traffic_bytes = 0.0
        self.launches = 0
        self.live_bytes = self.peak_bytes = 0
        self.largest_bytes = 0  # of one storage, or of what an operator holds
        self.uncounted: set[str] = set()  # operators of which is not known what they hold
        self.known: set[int] = set()
        self.is_inside = False  # of what counts as one call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        before = {t.untyped_storage()._cdata for t in read}
        new = [t for t in made if t.untyped_storage()._cdata not in before]
        rows, times = kernel_rows(func, args, kwargs, out), self.run.times
        if rows is None and func._overloadpacket in flop_registry:
            flops = float(flop_registry[func._overloadpacket](*args, **kwargs, out_val=out))
        else:
            flops = sum(row.flops for row in rows or ())
        self.flops += flops * times
        if func in COSTLY:
            self.note(look_of(func, args, kwargs, out), parts_of(out), result_bytes(out), flops)
        for tensor in written_tensors(func, args, kwargs):
            if tensor.untyped_storage()._cdata in self.outputs:
                self.outputs[tensor.untyped_storage()._cdata].is_changed = True
        if (new or func._schema.is_mutable) and not self.is_inside:
            self.note_moves(rows, flops, sum(_num_bytes(t) for t in read) + sum(_num_bytes(t) for t in made))
        for tensor in new:
            self.note_birth(tensor.untyped_storage())
        if self.run.cuda:
            held_bytes = workspace_bytes(func, args, kwargs, out)
            if held_bytes is None:
                self.uncounted.add(str(func._schema.name))
            else:
                self.note_workspace(held_bytes)
        return out

    def note_moves(self, rows: Sequence[Product | AttentionCall] | None, flops: float, moved_bytes: int) -> None:
        """A call that is these rows, if that is known, and reads and writes `moved_bytes`."""
        self.launches += self.run.times
        self.traffic_bytes += moved_bytes * self.run.times
        self.rows.note(rows, flops, moved_bytes, self.run.times)

    def note_workspace(self, num_bytes: int) -> None:
        self.largest_bytes = max(self.largest_bytes, num_bytes)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + num_bytes)

    def kernel(self, call: Product | AttentionCall) -> None:
        for _ in range(self.run.times):
            self.flops += call.flops
            self.rows.add(call)

    def note_results(self, call: Product | AttentionCall, results: tuple[torch.Tensor, ...]) -> None:
        num_bytes = attention_bytes(results[0]) if isinstance(call, AttentionCall) else result_bytes(results)
        self.note((call, *((t.dtype, tuple(t.shape), t.stride()) for t in results)), results, num_bytes, call.flops)

    def note(self, look: Look, results: Sequence[torch.Tensor], num_bytes: int, flops: float) -> None:
        """A costly call. Results with gaps cannot be kept, as no flat buffer holds them."""
        has_gaps = any(t.untyped_storage().nbytes() > t.nbytes for t in results)
        call = _Costly(self.run.now, look, num_bytes, flops, is_changed=has_gaps)
        self.costly += [call] * self.run.times
        self.outputs.update((part.untyped_storage()._cdata, call) for part in results)

    def mix(self) -> CallMix:
        return self.rows.mix(self.flops, self.traffic_bytes)

    def watch(self, storages: list[torch.UntypedStorage]) -> None:
        """Subtract the bytes of storages that exist already once they are freed. Empties the list."""
        for storage in storages:
            self.known.add(storage._cdata)
            weakref.finalize(storage, self.note_death, storage._cdata, storage.nbytes())
        storages.clear()

    def note_birth(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.live_bytes += size
        self.largest_bytes = max(self.largest_bytes, size)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self.note_death, key, size)

    def note_death(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.outputs.pop(key, None)
        self.live_bytes -= size


def _num_bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()
