"""Capture: an `nn.Module` and a batch to an `OpGraph`. It runs the recorder.

In: any model, also on the meta device, and example inputs. Out: the whole training step, loss included, as a graph at
the level of torch functions and leaf modules, traced on fake tensors: no weight is read, made or changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn

from ...graph.dataflow import Dataflow
from ...graph.edit import GraphEdit, erase, replace_uses, set_evaluation
from ...graph.kernels.cuda_autocast import autocast_as
from ...graph.loss_terms import NUM_ITEMS
from ...graph.opgraph import OpGraph, build_module, missing_buffers
from ...ir.edges import reads, written_roots
from ...ir.errors import CaptureError
from ...ir.precision import Precision
from ...runtime.torch_names import FakeTensorMode, enable_python_dispatcher, set_grad_enabled, tree_map
from ..packing.varying_inputs import UnreadLeaf, ValueRead
from .calls import take_zeros
from .dynamic import LinedShapeEnv, require_any_size
from .gradient_hooks import hooks_of
from .guard import Borrowed, LossFn, TraceOptions, borrow, fakes_of
from .inputs import TraceInputs, fake_inputs, floating_as, forward_arguments, named_outputs, untaken_key
from .lines import SourceLines
from .param_changes import changes_of, take_out
from .prologue.nodes import read_made_inputs
from .python_state import state_of
from .recorder import NeedsValue, Recorder
from .reference_code import reference_note, require_own_forwards
from .refusals import add_way_out
from .refuse.adapter_kinds import require_trainable_adapters
from .refuse.left_out import require_own_parts
from .refuse.repeat import require_repeatable
from .refuse.saved_writes import require_unchanged
from .refuse.shared_memory import require_own_memory
from .replay import Misaligned, PlainEvaluation, Replay
from .rows.graphs import TracedRows
from .rows.sizes import RowTape
from .values.known import LARGEST
from .writer import has_tensor, number_draws, storage_of

_DENSE = (
    "an embedding has sparse=True; its gradients are dense here, which gives the same weights and takes the memory of "
    "a whole table"
)
_CHECKPOINTS = (
    "forward asks for gradient checkpointing (gradient_checkpointing_enable, torch.utils.checkpoint), which is "
    "ignored: the plan itself decides which stages run forward again in backward, and job.explain(full=True) names them"
)


def trace(model: nn.Module, example_inputs: Any, **options: Any) -> OpGraph:
    """Capture one training step of `model` on `example_inputs`. `options`: the fields of `TraceOptions`.

    example_inputs: dict, tuple or tensor; each leaf a tensor (real, fake or meta) or {"shape": [...], "dtype": "..."}.

    Every module trains in its own mode (`training`). The model is left exactly as it was. Raises CaptureError with the
    user's source line and what to do.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"model must be an nn.Module; found {type(model).__name__}")
    require_own_forwards(model)
    require_trainable_adapters(model)
    hooks, how = hooks_of(model), TraceOptions(**options)

    def finish(found: OpGraph) -> OpGraph:
        found.hooks = hooks
        _refuse_written_constants(found)
        _copy_written_inputs(found)
        found.changes = changes_of(found)
        require_own_memory(found)
        take_out(found)
        take_zeros(found.module)
        return found

    try:
        found: OpGraph = _record_all(model, example_inputs, how, _record)
    except CaptureError as error:
        raise add_way_out(error) from error.__cause__
    at_inputs = found.at_inputs
    if at_inputs is not None:
        found.at_inputs = lambda inputs: finish(at_inputs(inputs))
    return finish(found)


def trace_in(precision: Precision, model: nn.Module, example_inputs: Any, **options: Any) -> OpGraph:
    """`trace` with the types of a precision."""
    return trace(model, example_inputs, **types_of(precision), **options)


def types_of(precision: Precision) -> dict[str, Any]:
    """The options of a trace that a precision decides."""
    low, autocast = precision.low_dtype, precision.autocast_dtype
    return {"autocast": autocast, "param_dtype": low, "input_dtype": precision.input_dtype}


def _refuse_written_constants(graph: OpGraph) -> None:
    for node in graph.nodes:
        for root in written_roots(node):
            name = str(root.target)
            if name in graph.constants:
                raise CaptureError(
                    f"{node.meta['source']}\n  changes the tensor {name!r} in place, which the model does not "
                    "register, so that the change would be lost: make it a buffer (register_buffer) or change a clone"
                )


def _copy_written_inputs(graph: OpGraph) -> None:
    """Let forward change copies of the inputs that it changes in place: the batch is the caller's."""
    written = {root: node for node in reversed(graph.nodes) for root in written_roots(node) if root.op == "placeholder"}
    for placeholder, first in written.items():
        replace_uses(graph, {placeholder: GraphEdit(graph, placeholder, after=True).call(torch.clone, placeholder)})
        graph.notes += (
            f"forward changes {str(placeholder.target)!r} of the batch in place ({first.meta['source']}); a job "
            "changes a copy, so that the batch itself stays as it is",
        )


class ChangedBuffer(CaptureError):
    """Forward reads the value of a buffer that it changes."""


class _ForLoss(Exception):
    """A key of the batch that forward hands on to a module which does not take it."""


@dataclass(frozen=True)
class Recording:
    """A run of forward, which other batches can be held against. `prologue`: the nodes that it hands to the program;
    `unused`: those that nothing needs."""

    recorder: Recorder
    nodes: dict[str, fx.Node]
    prologue: list[fx.Node]
    unused: set[fx.Node]


def record_steps(model: nn.Module, example_inputs: Any, options: TraceOptions) -> Recording:
    """Run forward on an example. Raises as `trace` does."""
    recording: Recording = _record_all(model, example_inputs, options, _record_run)
    return recording


def _record_run(
    model: nn.Module, inputs: TraceInputs, options: TraceOptions, fake_mode: FakeTensorMode
) -> Recording:
    with borrow(model, fakes_of(fake_mode, options.param_dtype), options) as held, _dispatch(options):
        recorder = Recorder(held, fake_mode)
        outputs = run_forward(recorder, inputs, options.loss_fn)
        nodes = {name: recorder.tensor_node(value) for name, value in outputs.items()}
        recorder.graph.output(nodes)
    flow = Dataflow(recorder.graph.nodes)
    unused, removable = (flow.dead(draws=draws, writes=True) for draws in (False, True))
    return Recording(recorder, nodes, recorder.prologue.outputs(recorder.graph, removable), unused)


def record_again(recording: Recording, replay: Replay, batch: Any) -> None:
    """Run forward on another batch, against a recording. Raises `Misaligned` where it does something else."""
    held, fake_mode = recording.recorder.held, recording.recorder.fake_mode
    inputs = _inputs(held.model, batch, held.options, fake_mode)
    with held.again(), _dispatch(held.options):
        replay.finish(run_forward(replay, inputs, held.options.loss_fn), recording.nodes)


def _record_all(model: nn.Module, example_inputs: Any, options: TraceOptions, record: Callable[..., Any]) -> Any:
    """`record`, with forward given every key of the batch that it can take, and the texts and numbers that it reads.
    Where these cannot be told apart, as C code reads one, or as forward does something else with the values themselves
    (it asks for their types), they count as read."""
    fake_mode = FakeTensorMode(shape_env=None if options.dynamic is None else LinedShapeEnv())
    inputs = _inputs(model, example_inputs, options, fake_mode)
    try:
        found = record(model, inputs, options, fake_mode)
    except _ForLoss as error:
        for_loss = options.for_loss | {str(error)}
        return _record_all(model, example_inputs, replace(options, for_loss=for_loss), record)
    except CaptureError as error:  # what stands for texts and numbers may have caused it
        more = _buffers_with_values(model, error.buffers) if isinstance(error, NeedsValue) else {}
        if more.keys() - options.buffers.keys():
            try:
                return _record_all(model, example_inputs, replace(options, buffers={**options.buffers, **more}), record)
            except ChangedBuffer:
                raise error from None
        if not inputs.leaves:
            raise
        read = inputs.read_leaves() or {*inputs.leaves}
    else:
        read = inputs.read_leaves()
        if not read:
            return found
    return _record_all(model, example_inputs, replace(options, leaves=options.leaves | read), record)


def _buffers_with_values(model: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Those of the buffers that are in memory and small."""
    buffers = {name: model.get_buffer(name) for name in sorted(names)}
    return {name: buffer.cpu() for name, buffer in buffers.items() if not buffer.is_meta and buffer.numel() <= LARGEST}


def _inputs(model: nn.Module, batch: Any, options: TraceOptions, fake_mode: FakeTensorMode) -> TraceInputs:
    inputs = fake_inputs(model, batch, fake_mode, options.dynamic, options.leaves)
    if options.count_items:
        inputs.add_item_count(fake_mode)
    return inputs


def _record(model: nn.Module, inputs: TraceInputs, options: TraceOptions, fake_mode: FakeTensorMode) -> OpGraph:
    with borrow(model, fakes_of(fake_mode, options.param_dtype), options) as held, _dispatch(options):
        recorder, before = Recorder(held, fake_mode), state_of(held.modules)
        if options.any_rows:
            recorder.rows = RowTape(recorder.lines.where)
        outputs = run_forward(recorder, inputs, options.loss_fn)
        recorder.chosen.require_written_back()
        held.require_no_draws()
        held.require_own_tensors()
        require_unchanged(recorder, outputs["loss"])
        nodes = {name: recorder.tensor_node(value) for name, value in outputs.items()}
        _store_reassigned_buffers(recorder)
        _require_constant_buffers(recorder)
        recorder.graph.output(nodes)
        known = replace(inputs, batch=tree_map(lambda x: x.value if type(x) is UnreadLeaf else x, inputs.batch))
        require_repeatable(recorder, lambda again: run_forward(again, known, options.loss_fn), nodes, before)
        require_own_parts(recorder, lambda again: run_forward(again, known, options.loss_fn), nodes)
        number_draws(recorder.graph)
        flow = Dataflow(recorder.graph.nodes)
        unused, removable = (flow.dead(draws=draws, writes=True) for draws in (False, True))
        eval_error = "it was not asked for" if options.training else None
        if options.evaluation and options.training:
            eval_error = _align(recorder, inputs, options.loss_fn, nodes, unused)
            if recorder.rows is not None and eval_error is None:
                _require_plain(recorder, inputs, options.loss_fn, nodes, unused)
    if options.dynamic is not None:
        require_any_size(inputs.symbols, options.dynamic.ranges)
    items = {node: [(child, child.args[1]) for _, child in rows] for node, rows in recorder.items.items()}
    erase(recorder.graph, removable)
    _merge_grad_switches(recorder.graph)
    return _make_op_graph(recorder, inputs, nodes, eval_error, items)


def _make_op_graph(
    recorder: Recorder, inputs: TraceInputs, nodes: dict[str, fx.Node], eval_error: str | None,
    items: dict[fx.Node, list[tuple[fx.Node, Any]]],
) -> OpGraph:  # fmt: skip
    """The graph of a recording that was checked; with a tape, one that makes the graphs of other rows."""
    held, fake_mode, options = recorder.held, recorder.fake_mode, recorder.held.options
    constants = {name: tensor.detach() for name, tensor in recorder.constants.items()}
    unread = frozenset(inputs.leaves)

    def op_graph(graph: fx.Graph, inputs: TraceInputs, nodes: dict[str, fx.Node]) -> OpGraph:
        return OpGraph(
            module=build_module(held.model, graph, constants),
            inputs=inputs.tensors,
            outputs=nodes,
            model=held.model,
            eval_error=eval_error,
            missing_buffers=missing_buffers(held.model),
            constants=dict(constants),
            symbols=inputs.symbols,
            unread=unread,
            param_dtype=options.param_dtype,
            autocast=options.autocast,
            notes=_notes(recorder, inputs),
        )

    if recorder.rows is None:
        found = op_graph(recorder.graph, inputs, nodes)
        recorder.chosen.finish(found)
        if options.made:
            read_made_inputs(found, recorder.prologue, options.made)
        return found
    traced = TracedRows(recorder.graph, recorder.rows, items)

    def graph_at(example: Any) -> OpGraph:
        other = _inputs(held.model, example, options, fake_mode)
        with held.again(), fake_mode, _dispatch(options):
            graph, copies = traced.graph_for(other.tensors)
        return op_graph(graph, other, {name: copies[node] for name, node in nodes.items()})

    graph, copies = traced.graph_for()
    found = op_graph(graph, inputs, {name: copies[node] for name, node in nodes.items()})
    found.at_inputs = graph_at
    return found


def _notes(recorder: Recorder, inputs: TraceInputs) -> tuple[str, ...]:
    read = {str(arg.target) for node in recorder.graph.nodes for arg in reads(node) if arg.op == "placeholder"}
    options = recorder.held.options
    others = {NUM_ITEMS, *options.lent, *(each.name for each in options.made)}
    left = [name for name in inputs.tensors if name not in read and name not in others]
    unread = [f"neither forward nor the loss reads {name!r} of the batch" for name in left]
    kernels = [reference_note(recorder.left_out_kernels)] if recorder.left_out_kernels else []
    also = (*kernels, *recorder.chosen.notes(), *unread)
    return (_DENSE,) * recorder.has_sparse + (_CHECKPOINTS,) * recorder.has_checkpoints + also


@contextmanager
def _dispatch(options: TraceOptions) -> Iterator[None]:
    """Trace under autocast and, for symbolic sizes, torch's Python dispatcher: else some operators fix sizes."""
    python = nullcontext() if options.dynamic is None else enable_python_dispatcher()
    with python, autocast_as(options.device_kind, options.autocast):
        yield


def run_forward(recorder: Recorder, inputs: TraceInputs, loss_fn: LossFn | None) -> dict[str, torch.Tensor]:
    """Call the user's forward under the recorder; errors of the user's code name the user's line."""
    model, options = recorder.held.model, recorder.held.options
    if options.made:
        made = {each.name for each in options.made}
        inputs = replace(inputs, batch={key: value for key, value in inputs.batch.items() if key not in made})
    dtype, kwargs = options.input_dtype, dict[str, Any]()
    with torch.enable_grad():
        for name, fake in inputs.tensors.items():
            recorder.placeholder(name, fake)
        recorder.lend(options.lent, inputs.tensors)
        for fake in inputs.tensors.values():
            recorder.learn_sizes(fake)
        try:
            with recorder.values.from_the_start() if recorder.is_again else nullcontext(), recorder.recording():
                recorder.lend_buffers()
                inputs = inputs.take_entries()
                args, kwargs = forward_arguments(model, inputs.batch, loss_fn is not None, options.for_loss)
                args, kwargs = floating_as(dtype, (args, kwargs))
                output = model(*args, **inputs.item_count(), **kwargs)
                return named_outputs(model, output, inputs, loss_fn)
        except ValueRead as error:
            raise CaptureError(f"{SourceLines().place_of_error(error.__traceback__)}\n  {error}") from None
        except (CaptureError, Misaligned):
            raise
        except Exception as error:
            key = untaken_key(model, error, kwargs) if loss_fn is not None else None
            if key is not None:
                raise _ForLoss(key) from error
            line = SourceLines().place_of_error(error.__traceback__)
            reason = f"{type(model).__name__}.forward failed: {type(error).__name__}: {error}"
            raise CaptureError("\n  ".join([line, reason, *_longer_lists(inputs)])) from error


def _longer_lists(inputs: TraceInputs) -> Iterator[str]:
    """A way out for code that compares a list of the batch with the rows of a micro-batch."""
    rows = min((x.shape[0] for x in inputs.tensors.values() if x.dim() and isinstance(x.shape[0], int)), default=0)
    for name, value in inputs.batch.items() if isinstance(inputs.batch, dict) else ():
        if rows and isinstance(value, (list, tuple)) and len(value) > rows and not has_tensor(value):
            yield (
                f"A micro-batch has {rows} rows, and all {len(value)} entries of batch[{name!r}], which is no tensor: "
                "micro_batches=1 gives code that compares them the whole batch"
            )


def _align(
    recorder: Recorder, inputs: TraceInputs, loss_fn: LossFn | None, nodes: dict[str, fx.Node], unused: set[fx.Node]
) -> str | None:
    """Run in eval mode against the recording. Returns why it differs, or None."""
    recorder.held.restart()
    recorder.held.model.eval()
    replay = Replay(recorder, unused)
    try:
        replay.finish(run_forward(replay, inputs, loss_fn), nodes)
    except (Misaligned, CaptureError) as error:
        for step in recorder.steps:
            set_evaluation(step, None)
        return str(error)
    return None


def _require_plain(
    recorder: Recorder, inputs: TraceInputs, loss_fn: LossFn | None, nodes: dict[str, fx.Node], unused: set[fx.Node]
) -> None:
    """Raise `CaptureError` where evaluation does something else with plain numbers than with sizes that are
    followed."""
    recorder.held.restart()
    recorder.held.model.eval()
    evaluation = PlainEvaluation(recorder, unused)
    try:
        evaluation.finish(run_forward(evaluation, inputs, loss_fn), nodes)
    except Misaligned as error:
        raise CaptureError(str(error)) from None


def _merge_grad_switches(graph: fx.Graph) -> None:
    """Drop gradient switches that are overridden before any op, or that change nothing."""
    is_switch = set_grad_enabled
    pairs = pairwise(list(graph.nodes))
    erase(graph, [node for node, following in pairs if node.target is following.target is is_switch])
    enabled, idle = True, []
    for node in graph.nodes:
        if node.target is is_switch:
            idle += [node] if node.args[0] == enabled else []
            enabled = bool(node.args[0])
    erase(graph, idle)


def _store_reassigned_buffers(recorder: Recorder) -> None:
    """A buffer that forward replaced (`self.mean = 0.9 * self.mean + ...`) is written back at the end of the step."""
    held: Borrowed = recorder.held
    current = dict(held.model.named_buffers(remove_duplicate=False))
    for name, fake in held.buffers.items():
        new = current.get(name)
        if new is None or _is_same_memory(new, fake):  # `self.table = self.table.to(h.dtype)` may change nothing
            continue
        if new.shape != fake.shape or new.dtype != fake.dtype:
            raise CaptureError(
                f"forward replaces buffer {name!r} ({list(fake.shape)}, {fake.dtype}) by one of {list(new.shape)}, "
                f"{new.dtype}; keep its shape and dtype, or use a plain local variable. A table that grows with its "
                "inputs has its size once the model was called on such a batch before compile"
            )
        recorder.write_back(name, fake, new)


def _require_constant_buffers(recorder: Recorder) -> None:
    for node in recorder.graph.nodes:
        for name in recorder.held.options.buffers.keys() & node.meta.get("updates_buffers", ()):
            raise ChangedBuffer(f"forward reads the value of buffer {name!r}, which it changes")


def _is_same_memory(new: torch.Tensor, old: torch.Tensor) -> bool:
    layouts = [(storage_of(t), t.shape, t.stride(), t.storage_offset(), t.dtype) for t in (new, old)]
    return layouts[0] == layouts[1]
