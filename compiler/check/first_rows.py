"""The model itself beside its op graph, once, on the first rows of the example batch.

A trace can differ from eager where forward asks whether it is traced, or depends on what nobody follows. In: a request
whose model and example batch are in memory, and its op graphs. Out: a line for `explain`. Both sides run in the model's
own types, on the device that it is on, forward and backward. The model is left as it was.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...graph.layers import is_inside
from ...graph.loss_terms import NUM_ITEMS
from ...graph.opgraph import OpGraph, build_module, is_check, value_tensors
from ...ir.errors import BatchError, CaptureError
from ...ir.units import format_bytes
from ...runtime.forced_eager import forced_eager
from ...runtime.optimizer.hooks import call_hooks
from ...runtime.stage.draws import Draws, micro_batch_seed
from ...runtime.torch_names import tree_leaves, tree_map
from ..batches.shape import BatchShape, as_dicts, flatten, join_example, micro_batch_spec, program_inputs
from ..capture.guard import Borrowed, TraceOptions, borrow
from ..capture.inputs import TraceInputs, forward_arguments, named_outputs, untaken_key
from ..capture.reference_code import reference_code
from ..graphs import Graphs
from ..job.counts import BatchCounts, part_of
from ..loss import capture
from ..packing.varying_inputs import Unread
from ..request import Request
from ..stale import hide_marks
from .borders import require_closed_borders
from .check import LIMITS, LOW_LIMITS
from .eager import Seeded
from .model_draws import ModelDraws

MOST_FLOPS = 1e11  # of both sides, forward and backward: some two seconds of two cores, where planning takes longer
FEW_FLOPS = 1e9  # take one core less time than to wake the others for each kernel
MOST_BYTES = 1 << 29  # of the trained parameters, of which each side makes gradients
FLOOR = 1e-6  # a difference below this is rounding, however small the numbers are
MODULE_LIMIT = 1e-4  # of what a module returns, once something is known to differ


@dataclass(frozen=True)
class _Side:
    """The numbers of one side; `failure` is the error in which it ended instead."""

    outputs: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    failure: Exception | None = None


class _NotCompared(Exception):
    """The reason why nothing can be compared."""


def compare_first_rows(request: Request, graphs: Graphs, count: int, step_flops: float) -> str:
    """Run the model and its op graph on the first of `count` micro-batches of the example batch, or on its first row
    where a micro-batch is too much, and compare all that they compute. Returns what was compared, or why nothing was.

    step_flops: of a whole batch, forward and backward. "" where nobody asked. Raises `CaptureError` naming the first
    module that differs.
    """
    if not request.check:
        return ""
    batch, listed = join_example(as_dicts(request.example_inputs))
    try:
        _require_values(request, flatten(request.model, batch)[0])
        rows = BatchShape.from_inputs(request.model, batch, request.batch.shape.is_whole, listed).size
        counts = [n for n in (count, rows) if rows % n == 0 and 2 * step_flops / n <= MOST_FLOPS]
        if not counts:
            raise _NotCompared(f"a row takes more than {MOST_FLOPS / 2:.0e} FLOPs, forward and backward")
        few = 2 * step_flops / counts[0] <= FEW_FLOPS
        with hide_marks(request.model), _one_thread() if few else nullcontext():
            return _Comparison(request, graphs, batch, counts[0], rows // counts[0]).run()
    except _NotCompared as reason:
        return f"the op graph was not compared with the model in eager: {reason}"


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch's kernels on the calling thread alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _require_values(request: Request, leaves: Mapping[str, Any]) -> None:
    tensors = _tensors(request.model)
    trained_bytes = sum(t.nbytes for t in tensors if t.requires_grad)
    if any(t.is_meta for t in tensors):
        raise _NotCompared("its weights are not in memory")
    if len({t.device for t in tensors}) > 1:
        raise _NotCompared("it is on several devices")
    if trained_bytes > MOST_BYTES:
        raise _NotCompared(f"gradients take {format_bytes(trained_bytes)}, more than {format_bytes(MOST_BYTES)}")
    if not all(type(leaf) in (Tensor, nn.Parameter) and not leaf.is_meta for leaf in leaves.values()):
        raise _NotCompared("example_inputs has no values")
    if any(isinstance(leaf, Unread) for leaf in tree_leaves(request.batch.inputs)):
        raise _NotCompared("the batch is packed for flash attention")
    count = inspect.signature(request.model.forward).parameters.get(NUM_ITEMS)
    if count is not None and count.default is count.empty:
        raise _NotCompared(f"forward needs {NUM_ITEMS}, which is counted over a whole batch")


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


class _Comparison:
    """Both sides on the first of `count` micro-batches of a batch, which has `rows` rows."""

    def __init__(self, request: Request, graphs: Graphs, batch: Any, count: int, rows: int):
        self.request, self.model, self.loss_fn = request, request.model, request.loss_fn
        self.count, self.rows = count, rows
        self.device = next((t.device for t in _tensors(self.model)), torch.device("cpu"))
        self.batch = part_of(batch, 0, count)
        self.graph, self.factor = self._trace(graphs, batch)
        self.counts = self._count()

    def _trace(self, graphs: Graphs, batch: Any) -> tuple[OpGraph, float]:
        """The op graph in the model's own types, and what its loss is multiplied by."""
        request, count, sizes = self.request, self.count, self.request.batch.sizes
        try:
            if request.types.name != "fp32":  # which rounds, and would hide differences
                inputs, by_user = micro_batch_spec(batch, count), request.loss_weight is not None
                return capture(self.model, inputs, loss_fn=self.loss_fn, by_user=by_user), 1.0
            if sizes is not None:
                graphs = graphs.with_sizes(sizes.micro_batch_of(flatten(self.model, batch)[0], count))
            return graphs(count), graphs.factor(count)
        except CaptureError as error:
            raise _NotCompared(f"such rows are not traced by themselves: {error}") from None

    def _count(self) -> dict[str, Tensor]:
        """The inputs of the graph that the batch does not have."""
        loss = self.graph.loss
        counter = BatchCounts(loss.rules, loss.counts, loss.divisors, loss_weight=self.request.loss_weight)
        try:
            return counter.inputs(counter.count(self.batch, self._inputs(self.batch), 1))
        except BatchError as error:
            raise _NotCompared(str(error)) from None

    def _inputs(self, batch: Any) -> dict[str, Tensor]:
        """The batch's tensors, with what a prologue makes of it."""
        prologue = self.request.prologue
        return program_inputs(
            flatten(self.model, batch if prologue is None else prologue.add(batch, 1, self.count))[0]
        )

    def run(self) -> str:
        proxies = _Proxies(set(self.graph.changes))
        with borrow(self.model, proxies, TraceOptions(loss_fn=self.loss_fn)) as held, forced_eager(), reference_code():
            self.leaves = held.leaves
            eager = self._side(held, proxies, self._model_outputs)
            graph = self._side(held, proxies, self._graph_outputs)
            differing = self._differences(eager, graph)
            if differing:
                raise CaptureError(self._complaint(differing, self._first_module(held, proxies)))
            closed = self.request.batch.documents and self._require_closed_borders(held, proxies)
        first = "the first row of " if self.rows == 1 else f"the first {self.rows} rows of "
        first = "" if self.request.batch.shape.is_whole else first
        text = f"the op graph computes what the model computes in eager, on {first}example_inputs"
        return f"{text}; no document changes what another computes" if closed else text

    def _side(self, held: Borrowed, proxies: _Proxies, run: Callable[[Any], dict[str, Tensor]]) -> _Side:
        """Run one side from the values that the model has."""
        held.restart()
        proxies.reset()
        params = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        try:
            outputs = run(tree_map(self._own, self.batch))
            loss = outputs["loss"].reshape(())
            found = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        except Exception as error:
            return _Side({}, {}, {}, error)
        gradients = {
            name: p.new_zeros(p.shape) if g is None else g.to_dense() for (name, p), g in zip(params.items(), found)
        }
        buffers = {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}
        return _Side({name: t.detach() for name, t in outputs.items()}, buffers, gradients)

    def _require_closed_borders(self, held: Borrowed, proxies: _Proxies) -> bool:
        def run(batch: Mapping[str, Any], nodes: Collection[fx.Node]) -> dict[fx.Node, Tensor]:
            held.restart()
            proxies.reset()
            seen: list[tuple[fx.Node, Tensor]] = []
            with torch.no_grad():
                self._graph_outputs(tree_map(self._own, batch), seen, nodes)
            return dict(seen)

        return require_closed_borders(self.graph, self.batch, run)

    def _own(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().to(self.device, copy=True).requires_grad_(leaf.requires_grad)

    def _model_outputs(self, batch: Any) -> dict[str, Tensor]:
        draws, for_loss = ModelDraws(self.model, self.device, leaves=self.leaves), set[str]()
        while True:
            args, kwargs = forward_arguments(self.model, batch, self.loss_fn is not None, for_loss)
            try:
                with draws.seed_draws([self._seed], batch):
                    return named_outputs(self.model, self.model(*args, **kwargs), TraceInputs(batch), self.loss_fn)
            except TypeError as error:
                key = None if self.loss_fn is None else untaken_key(self.model, error, kwargs)
                if key is None:
                    raise
                for_loss.add(key)

    def _graph_outputs(
        self, batch: Any, seen: list[tuple[fx.Node, Tensor]] | None = None, nodes: Collection[fx.Node] = ()
    ) -> dict[str, Tensor]:
        """The outputs of the graph. `seen` gets what its nodes compute: all, or these `nodes`."""
        params = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, change in self.graph.changes.items():
                params[name].copy_(call_hooks(change.calls, params[name]))
        module = build_module(self.model, self.graph.graph, self.graph.unregistered_tensors)
        leaves = self._inputs(batch) | self.counts
        draws = Draws("the op graph", module, self.device)
        with draws.seed_draws(self._seed):
            outputs = _Watched(module, draws, seen, {node.name for node in nodes}).run(
                *(leaves[name].to(self.device) for name in self.graph.inputs)
            )
        return {**outputs, "loss": outputs["loss"] / self.factor}

    @property
    def _seed(self) -> int:
        return micro_batch_seed(self.request.seed, 0, 0)

    def _differences(self, eager: _Side, graph: _Side) -> list[str]:
        """The differences of both sides, in words. Raises `_NotCompared` where both fail."""
        if eager.failure is not None and graph.failure is not None:
            raise _NotCompared(f"on example_inputs it fails: {_first_line(eager.failure)}")
        if eager.failure is not None:
            return [f"in eager it ends in {_first_line(eager.failure)}"]
        if graph.failure is not None:
            text = str(graph.failure).splitlines()[:1]
            if any(is_check(node) and [*node.args[1:2]] == text for node in self.graph.nodes):
                raise CaptureError(f"{text[0]} (found on the first rows of example_inputs)")
            return [f"the graph ends in {_first_line(graph.failure)}"]
        is_low = any(t.is_floating_point() and t.dtype.itemsize < 4 for t in _tensors(self.model))
        loss_limit, gradient_limit, _ = LOW_LIMITS if is_low else LIMITS["fp32"]
        if eager.outputs.keys() != graph.outputs.keys():
            return [f"it returns {', '.join(eager.outputs)} in eager, and {', '.join(graph.outputs)} in the graph"]
        loss, other = float(eager.outputs["loss"]), float(graph.outputs["loss"])
        found = []
        if not _close([(eager.outputs["loss"], graph.outputs["loss"])], loss_limit):
            found.append(f"the loss is {loss:.7g} in eager, and {other:.7g} in the graph")
        for what, ours, theirs in (
            ("output", graph.outputs, eager.outputs),
            ("buffer", graph.buffers, eager.buffers),
        ):
            names = [name for name in theirs if not _close([(theirs[name], ours[name])], gradient_limit)]
            found += [f"{what} {name!r} differs" for name in names if name != "loss"]
        if not _close([(g, graph.gradients[name]) for name, g in eager.gradients.items()], gradient_limit):
            apart = {name: float(_difference(g, graph.gradients[name]).norm()) for name, g in eager.gradients.items()}
            found.append(f"gradients differ, that of {max(apart, key=apart.__getitem__)} the most")
        return found

    def _first_module(self, held: Borrowed, proxies: _Proxies) -> str:
        """The path of the first module whose results in the graph are not among those in eager."""
        returned, computed = dict[str, list[Tensor]](), list[tuple[fx.Node, Tensor]]()
        path_of = {id(module): path for path, module in self.model.named_modules()}

        def note(module: nn.Module, _: Any, output: Any) -> None:
            if path := path_of.get(id(module)):
                tensors = [t.detach().clone() for t in tree_leaves(output) if isinstance(t, Tensor)]
                returned.setdefault(path, []).extend(tensors)

        handle = nn.modules.module.register_module_forward_hook(note)
        try:
            self._side(held, proxies, self._model_outputs)
        finally:
            handle.remove()
        self._side(held, proxies, lambda batch: self._graph_outputs(batch, computed))
        for path, values in returned.items():
            for node, result in computed:
                if is_inside(path, node) and not all(is_inside(path, user) for user in node.users):
                    alike = [value for value in values if value.shape == result.shape]
                    if alike and not any(_close([(value, result)], MODULE_LIMIT) for value in alike):
                        return path
        return ""

    def _complaint(self, differing: list[str], module: str) -> str:
        where = f"the first module whose result differs is {module!r}" if module else "all modules return the same"
        return (
            f"on the first rows of example_inputs the model does something else in eager than when it is traced: "
            f"{'; '.join(differing[:3])}; {where}. Forward may ask whether it is traced, or read what changes between "
            "its calls: let it do the same in both; check=False leaves this comparison out and trains the graph"
        )


class _Proxies:
    """Makes a model's proxies for a run: parameters that share memory with its own, and copies of what runs change.

    changed: the parameters, by name, that forward changes in place.
    """

    def __init__(self, changed: set[str]):
        self.changed = changed
        self.copies: list[tuple[Tensor, Tensor]] = []  # a proxy, and the tensor that it begins as

    def __call__(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) and not self.changed:
            return nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
        made = tensor.detach().clone()
        self.copies.append((made, tensor))
        return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    def reset(self) -> None:
        with torch.no_grad():
            for made, tensor in self.copies:
                made.copy_(tensor)


class _Watched(Seeded):
    """Runs a graph and notes what its nodes compute, if anybody wants to know."""

    def __init__(
        self, module: fx.GraphModule, draws: Draws, seen: list[tuple[fx.Node, Tensor]] | None, names: Collection[str]
    ):
        super().__init__(module, draws)
        self.seen, self.names = seen, names

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if self.seen is not None and n.op != "output" and (not self.names or n.name in self.names):
            self.seen += [(n, t.detach().clone()) for t in value_tensors(value)]
        return value


def _close(pairs: list[tuple[Tensor, Tensor]], limit: float) -> bool:
    """Whether tensors are the same but for rounding, all of them together by their 2-norms."""
    if any(a.shape != b.shape for a, b in pairs):
        return False
    apart = sum(float(_difference(a, b).square().sum()) for a, b in pairs) ** 0.5
    if not apart:
        return True
    norm = sum(float(a.abs().double().square().sum()) for a, _ in pairs) ** 0.5
    return bool(apart <= max(FLOOR, limit * norm))  # false for a NaN


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """The difference of two tensors in float64, zero where both are the same NaN or infinity."""
    if torch.equal(a, b):
        return torch.zeros((), dtype=torch.float64)
    a, b = ((torch.view_as_real(t) if t.is_complex() else t).double() for t in (a, b))
    return torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
