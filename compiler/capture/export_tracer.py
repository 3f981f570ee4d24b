"""The fallback tracer: `torch.export` (strict=False), its ATen graph turned into the same `OpGraph`.

In: what the recorder takes. Out: an op graph whose calls are ATen overloads instead of torch functions and modules,
with the user's parameter names and the same node meta. It sees through what the recorder cannot represent (vmap and
other function transforms), at the price of unreadable ops; it is also the independent second capture of the tests.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import CheckpointFunction

from ...graph.opgraph import OpGraph, build_module, missing_buffers
from ...ir.errors import CaptureError
from ..packing.varying_inputs import Unread
from .guard import Borrowed, TraceOptions, borrowed, replaced
from .inputs import TraceInputs, fake_inputs, floating_as, forward_arguments, named_outputs
from .lines import SourceLines
from .python_state import require_kept, state_of
from .writer import number_draws

_ASSERTIONS = (torch.ops.aten._assert_tensor_metadata.default, torch.ops.aten._assert_scalar.default)


class _Names:
    """Names of the outputs, found while tracing; export undoes what is assigned to the module itself."""

    found: list[str]


class _Step(nn.Module):
    """The user's forward and loss as one module that returns a tuple."""

    def __init__(self, model: nn.Module, options: TraceOptions, unread: dict[str, Unread]):
        super().__init__()
        self.unread = unread  # of the batch: torch.export takes no such arguments
        self.model, self.loss_fn, self.input_dtype = model, options.loss_fn, options.input_dtype
        self.names = _Names()
        self.training = model.training

    def forward(self, batch: Any) -> tuple[torch.Tensor, ...]:
        modules = dict(self.model.named_modules())
        before = state_of(modules, depth=0)  # what models set while they are exported lies deeper
        batch = {**batch, **self.unread} if self.unread else batch
        given = forward_arguments(self.model, batch, self.loss_fn is not None)
        args, kwargs = floating_as(self.input_dtype, given)
        found = named_outputs(self.model, self.model(*args, **kwargs), TraceInputs(batch), self.loss_fn)
        require_kept(before, state_of(modules, depth=0))
        self.names.found = list(found)
        return tuple(found.values())


def export_trace(model: nn.Module, example_inputs: Any, options: TraceOptions) -> OpGraph:
    """Capture one training step through torch.export. Raises CaptureError with the user's source line."""
    fake_mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    inputs = fake_inputs(model, example_inputs, fake_mode, None)
    unread: dict[str, Unread] = {}
    if isinstance(inputs.batch, dict):
        unread = {name: value for name, value in inputs.batch.items() if isinstance(value, Unread)}
        inputs.batch = {name: value for name, value in inputs.batch.items() if name not in unread}
    with borrowed(model, fake_mode, options) as held:
        step = _Step(model, options, unread)
        training = _export(step, inputs)
        translation = _Translation(held, inputs, step.names.found)
        translation.translate(training)
        translation.run(fake_mode)
        held.restart()
        eval_error = "it was not asked for" if options.training else None
        if options.evaluation:
            eval_error = _evaluation(step, inputs, translation)
    return OpGraph(
        module=build_module(model, translation.graph, translation.constants),
        inputs=translation.inputs,
        outputs=translation.outputs,
        model=model,
        eval_error=eval_error,
        tracer="export",
        missing_buffers=missing_buffers(model),
        constants=translation.constants,
        param_dtype=options.param_dtype,
    )


def _export(step: _Step, inputs: TraceInputs) -> torch.export.ExportedProgram:
    def on_apply(kind: type, *args: Any) -> Any:
        if kind is CheckpointFunction:
            return args[0](*args[2:])
        raise CaptureError(
            f"{SourceLines().where()}\n  torch.export would trace through the custom autograd function "
            f"{kind.__name__} and lose its backward: let the recorder capture this model"
        )

    try:
        with (
            warnings.catch_warnings(),
            replaced((torch.autograd.Function, "apply", classmethod(on_apply))),
            torch.enable_grad(),
        ):
            warnings.filterwarnings("ignore", "The tensor attributes? .* assigned during export")  # we restore them
            return _plain_calls(torch.export.export(step, (inputs.batch,), strict=False))
    except CaptureError:
        raise
    except Exception as error:
        line = SourceLines().of_traceback(error.__traceback__)
        reason = " ".join(str(error).split())[:400]
        raise CaptureError(f"{line}\n  torch.export failed: {type(error).__name__}: {reason}") from error


def _plain_calls(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with what function transforms (vmap, jvp) left in it turned into plain calls."""
    transforms = torch._functorch.predispatch.__name__
    is_transformed = any(getattr(node.target, "__module__", "") == transforms for node in program.graph.nodes)
    return program.run_decompositions({}) if is_transformed else program


class _Translation:
    """Copies an exported graph: lifted parameters become get_attr nodes, mode regions become switches."""

    def __init__(self, held: Borrowed, inputs: TraceInputs, names: list[str]):
        self.held, self.wanted, self.names = held, list(inputs.tensors), names
        self.graph = fx.Graph()
        self.inputs: dict[str, torch.Tensor] = {}
        self.outputs: dict[str, fx.Node] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.steps: list[fx.Node] = []  # translated calls, in order
        self.first_of: dict[int, fx.Node] = {}  # id(fake parameter) -> first get_attr node
        self.no_grad = False
        self.autocast: tuple | None = None
        self.lines = SourceLines()

    def translate(self, program: torch.export.ExportedProgram) -> None:
        copies: dict[fx.Node, Any] = {}
        nodes = {node.name: node for node in program.graph.nodes}
        specs = program.graph_signature.input_specs
        users = [spec for spec in specs if spec.kind == InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument)]
        for name, spec in zip(self.wanted, users, strict=True):
            value = nodes[spec.arg.name].meta["val"]
            copies[nodes[spec.arg.name]] = self._add("placeholder", name, (), {}, value)
            self.inputs[name] = value
        for spec in specs:
            if spec.kind != InputKind.USER_INPUT:
                copies[nodes[spec.arg.name]] = self._held(spec, program, nodes[spec.arg.name])
        self._copy(program.graph_module, copies)
        results = list(program.graph.output_node().args[0])
        outputs = dict(zip((spec.kind for spec in program.graph_signature.output_specs), results))
        if OutputKind.BUFFER_MUTATION in outputs or OutputKind.USER_INPUT_MUTATION in outputs:
            raise CaptureError("torch.export made in-place writes functional here: let the recorder capture this model")
        self.outputs = {name: copies[node] for name, node in zip(self.names, results, strict=True)}
        self.graph.output(self.outputs)
        number_draws(self.graph)

    def run(self, fake_mode: FakeTensorMode) -> None:
        """Run the calls on the borrowed model, since export's own values do not say which of them need gradients."""
        values: dict[fx.Node, Any] = {}
        with fake_mode, torch.enable_grad():
            for node in self.graph.nodes:
                if node.op == "output":
                    break
                if node.op == "call_function":
                    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                    values[node] = node.meta["val"] = node.target(*args, **kwargs)
                    continue
                if node.op == "get_attr" and node.target not in self.constants:
                    owner, _, last = str(node.target).rpartition(".")
                    node.meta["val"] = getattr(self.held.model.get_submodule(owner), last)
                values[node] = node.meta["val"]

    def _held(self, spec: Any, program: torch.export.ExportedProgram, node: fx.Node) -> fx.Node:
        """A parameter or buffer of the user's model, or a constant of the graph."""
        name = spec.target.removeprefix("model.")
        if spec.kind == InputKind.CONSTANT_TENSOR:
            name = self.held.constant_names.take(program.constants[spec.target])
            self.constants[name] = program.constants[spec.target].detach()
        made = self._add("get_attr", name, (), {}, node.meta["val"])
        owner, _, last = name.rpartition(".")
        if name not in self.constants:
            fake = getattr(self.held.model.get_submodule(owner), last)
            made.meta["alias_of"] = self.first_of.get(id(fake))
            self.first_of.setdefault(id(fake), made)
        return made

    def _copy(self, module: fx.GraphModule, copies: dict[fx.Node, Any]) -> Any:
        """Copy the calls of a graph, going into regions under set_grad_enabled or autocast. Returns its outputs."""
        for node in module.graph.nodes:
            if node.op == "output":
                return fx.map_arg(node.args[0], copies.__getitem__)
            if node.op != "call_function" or node.target in _ASSERTIONS:
                continue
            name = str(node.target)
            if name == "wrap_with_set_grad_enabled":
                copies[node] = self._grad_region(module, node, copies)
            elif name == "wrap_with_autocast":
                copies[node] = self._autocast_region(module, node, copies)
            elif node.target is operator.getitem and not isinstance(copies[node.args[0]], fx.Node):
                copies[node] = copies[node.args[0]][node.args[1]]  # a result of a region; its calls are in line now
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
                copies[node] = self._call(node, args, kwargs)
        return ()

    def _grad_region(self, module: fx.GraphModule, node: fx.Node, copies: dict[fx.Node, Any]) -> Any:
        enabled, inner, *values = node.args
        before = self.no_grad
        self._switch(not enabled)
        results = self._inline(module, inner, values, copies)
        self._switch(before)
        return results

    def _switch(self, no_grad: bool) -> None:
        self.no_grad = no_grad
        self.steps.append(self._add("call_function", torch._C._set_grad_enabled, (not no_grad,), {}, None))

    def _autocast_region(self, module: fx.GraphModule, node: fx.Node, copies: dict[fx.Node, Any]) -> Any:
        *setting, inner = node.args[:5]
        before = self.autocast
        enter = self._add("call_function", _enter_autocast, tuple(setting), {}, None)
        self.autocast = tuple(setting)
        results = self._inline(module, inner, node.args[5:], copies)
        self.autocast = before
        self.steps += [enter, self._add("call_function", _exit_autocast, (enter,), {}, None)]
        return results

    def _inline(self, module: fx.GraphModule, inner: Any, values: Any, copies: dict[fx.Node, Any]) -> Any:
        region = getattr(module, inner.target)
        holders = [node for node in region.graph.nodes if node.op == "placeholder"]
        return self._copy(region, dict(zip(holders, fx.map_arg(tuple(values), copies.__getitem__))))

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        made = self._add("call_function", node.target, args, kwargs, node.meta.get("val"), node)
        self.steps.append(made)
        if isinstance(node.target, torch._ops.OpOverload):
            written, viewed = _schema_aliases(node.target, args, kwargs)
            made.meta["mutates"] = tuple(written)
            made.meta["alias_of"] = next(iter([*written, *viewed]), None)
            made.meta["random"] = torch.Tag.nondeterministic_seeded in node.target.tags
            names = [name for target in written for name in self._buffer_of(target)]
            if names:
                made.meta["updates_buffers"] = tuple(names)
        elif node.target is operator.getitem:
            made.meta["alias_of"] = args[0]
        return made

    def _buffer_of(self, node: fx.Node) -> list[str]:
        while node.meta["alias_of"] is not None:
            node = node.meta["alias_of"]
        return [str(node.target)] if node.op == "get_attr" and node.target in self.held.buffers else []

    def _add(
        self, op: str, target: Any, args: Any, kwargs: Any, value: Any, exported: fx.Node | None = None
    ) -> fx.Node:  # fmt: skip
        node = self.graph.create_node(op, target, args, kwargs)
        path, kind, call = self._position(exported)
        node.meta = {
            "val": value,
            "module_path": path,
            "module_type": kind,
            "module_call": call,
            "source": self._source(exported.meta.get("stack_trace") or "") if exported is not None else "",
            "no_grad": self.no_grad,
            "autocast": self.autocast,
            "mutates": (),
            "alias_of": None,
            "random": False,
        }
        return node

    def _position(self, exported: fx.Node | None) -> tuple[str, str, int]:
        """Module path, type and number of call, from export's module stack (keys end in @1 at a second call)."""
        stack = list((exported.meta.get("nn_module_stack") or {}).items()) if exported is not None else []
        if not stack:
            return "", type(self.held.model).__name__, 0
        key, (path, kind) = stack[-1]
        call = int(key.rpartition("@")[2]) if "@" in key else 0
        name = kind if isinstance(kind, str) else kind.__qualname__
        inside = path.partition("@")[0]
        return inside.removeprefix("model").removeprefix("."), name.rpartition(".")[2], call

    def _source(self, trace: str) -> str:
        """The innermost user line of a printed stack."""
        for line in reversed(trace.splitlines()):
            if line.strip().startswith('File "'):
                file, number = line.split('"')[1], line.partition(", line ")[2].partition(",")[0]
                if self.lines.is_shown_file(file):
                    return self.lines.text(file, int(number))
        return ""


def _schema_aliases(target: torch._ops.OpOverload, args: Any, kwargs: Any) -> tuple[list[fx.Node], list[fx.Node]]:
    """Arguments that an overload writes, and arguments that its results may share storage with."""
    written: list[fx.Node] = []
    viewed: list[fx.Node] = []
    returned = {mark for result in target._schema.returns if result.alias_info for mark in result.alias_info.before_set}
    for i, parameter in enumerate(target._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(parameter.name)
        if parameter.alias_info is None or value is None:
            continue
        nodes = list(_nodes(value))
        if parameter.alias_info.is_write:
            written += nodes
        elif parameter.alias_info.before_set & returned:
            viewed += nodes
    if target is torch.ops.aten.batch_norm.default and args[5]:  # its schema does not say so
        written += [node for node in args[3:5] if isinstance(node, fx.Node)]
    return written, viewed


def _nodes(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _nodes(item)


def _evaluation(step: _Step, inputs: TraceInputs, training: _Translation) -> str | None:
    """Export again in evaluation mode and compare call by call; note arguments that differ."""
    step.eval()
    try:
        other = _Translation(training.held, inputs, training.names)
        other.translate(_export(step, inputs))
    except CaptureError as error:
        return f"evaluation mode cannot be captured: {error}"
    twin = {b: a for a, b in zip(training.graph.nodes, other.graph.nodes) if a.op in ("placeholder", "get_attr")}
    left = iter(other.steps)
    expected = next(left, None)
    for step_node in training.steps:
        if expected is None or expected.target != step_node.target:
            if step_node.target in _KEEPS_VALUE:
                continue
            found = "nothing more" if expected is None else f"{expected.target} ({expected.meta['source']})"
            return f"{step_node.meta['source']}: training calls {step_node.target}, evaluation {found}"
        args, kwargs = fx.map_arg((expected.args, expected.kwargs), lambda node: twin[node])
        if list(map(_origin, _nodes(list(args)))) != list(map(_origin, _nodes(list(step_node.args)))):
            return f"{step_node.meta['source']}: {step_node.target} reads other values in evaluation than in training"
        if _plain(args, kwargs) != _plain(step_node.args, step_node.kwargs):
            step_node.meta["eval_args"], step_node.meta["eval_kwargs"] = args, kwargs
        twin[expected] = step_node
        expected = next(left, None)
    return None if expected is None else f"{expected.meta['source']}: evaluation goes on with {expected.target}"


# Calls that change at most the layout of a value in memory; export leaves them out where they change nothing.
_KEEPS_VALUE = (torch.ops.aten.contiguous.default, torch.ops.aten.alias.default)


def _origin(node: fx.Node) -> fx.Node:
    while node.target in _KEEPS_VALUE:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _plain(args: Any, kwargs: Any) -> Any:
    """Arguments with every node replaced by None, to compare the numbers and flags."""
    return fx.map_arg((tuple(args), dict(kwargs)), lambda node: None)
