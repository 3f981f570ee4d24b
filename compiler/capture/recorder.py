"""The recorder: run the model's own forward on fake tensors and write down the torch-level calls it makes.

In: a borrowed model (fake parameters) and fake inputs. Out: an fx graph with full node meta. Three hooks
see everything: a `TorchFunctionMode` (functions, methods, operators), a patched `Module._call_impl` (leaf modules,
paths) and a patched `Function.apply` (custom autograd).
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.utils.parametrize import is_parametrized
from torch.utils import checkpoint

from ...graph.edit import set_base, set_writes
from ...graph.kernels.stand_ins import SHAPE_RULES
from ...graph.opgraph import value_tensors
from ...ir.errors import CaptureError
from ...runtime import accelerator
from ...runtime.forced_eager import forced_eager
from ...runtime.script_caches import kept_caches
from ...runtime.torch_names import (
    BATCHED,
    CALL_OF_MODULES,
    CHECKED,
    CHECKPOINTED,
    CHECKS,
    CONDITIONS,
    CONVERTED,
    FAKE_LOG,
    DataDependentOutputException,
    DisableTorchFunction,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    assert_async,
    enter_autocast,
    exit_autocast,
    set_grad_enabled,
    tree_leaves,
    tree_map_only,
    unset_fake_temporarily,
)
from ..packing.varying_inputs import ValueRead
from .calls import (
    SPARSE,
    RecordedCall,
    classify,
    densely,
    is_data_dependent,
    is_random,
    is_random_module,
)
from .custom_functions import original_apply
from .guard import Borrowed, autocast_aliases, replace_functions
from .library_calls import library_calls
from .prologue.nodes import PrologueNodes
from .reference_code import reference_code
from .rows.sizes import ModeSwitch, OtherTrace, settle
from .values.branches import answer_if_finite, answer_of_draw, answer_without_error
from .values.chosen import NOT_CHOSEN, ChosenRows
from .values.coordinates import NO_COORDINATES, Coordinates
from .values.fixed_sizes import OtherCall, joined_numbers, map_leaves, masked_put, use_known_values
from .values.known import UNKNOWN
from .watch.buffers import note_buffers
from .watch.constructors import constructors
from .watch.gradients import SwitchedGradients
from .watch.modes import DrawWatch, EachFunction, EachPlainCall, ReadWatch
from .writer import ACCELERATORS, GraphWriter, has_tensor, storage_of

SEEDS = {  # functions that set the state of a generator of the process
    torch: ("manual_seed", "seed", "set_rng_state"),
    torch.random: ("manual_seed", "seed", "set_rng_state", "fork_rng"),
    **accelerator.SEEDS,
}
_OF_VALUES = (torch.tensor, torch.as_tensor)  # read the tensors of a list
_MOVES = (torch.Tensor.cpu, torch.Tensor.cuda)
_VIEWS = {  # methods that make a tensor a view of itself, and those that give the view
    getattr(torch.Tensor, f"{name}_"): getattr(torch.Tensor, name)
    for name in ("squeeze", "swapaxes", "swapdims", "t", "transpose", "unsqueeze")
}
_EFFECTS = (set_grad_enabled, *CHECKS)  # calls that give no tensor and are recorded all the same
_VALUE_ERRORS = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


class NeedsValue(CaptureError):
    """A line reads the value of a tensor. `inputs`: those of the batch from which alone the tensor follows; empty where
    it follows from anything else. `buffers`: those of the model from which it follows, too."""

    inputs: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()


class ClassOfOneCall(CaptureError):
    """An autograd function is another class in each forward."""


class Recorder(GraphWriter):
    """Records one run of a model into `graph`. Use `with recorder.recording(): model(...)`. `is_again`: it compares a
    later run."""

    is_again = False

    def __init__(self, held: Borrowed, fake_mode: FakeTensorMode):
        super().__init__(held, fake_mode)
        self.steps: list[fx.Node] = []  # recorded calls in order, without get_attr, getitem and size nodes
        self.num_calls = 0
        self.calls: dict[Any, RecordedCall] = {}
        self.gradients = SwitchedGradients(held.names, self.lines.where)
        self.has_sparse = False  # an embedding asks for sparse gradients, which are dense here
        self.left_out_kernels: dict[str, list[str]] = {}  # by package; their reference code is recorded
        self.has_checkpoints = False  # forward asks for recomputation, which passes decide here
        self.draws: DrawWatch | None = None  # watches the custom function being recorded
        self.batched_nodes: set[fx.Node] = set()  # those of the calls inside of the torch.vmap that runs
        self.prologue = PrologueNodes(self.values, self.lines)
        self.viewed: set[int] = set()  # the ids of values in place of tensors that became views of themselves
        self.coordinates = Coordinates()
        self.chosen = ChosenRows(self)

    def lend(self, values: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> None:
        """Let forward read the values of these inputs."""
        for name, value in values.items():
            self.values.know(inputs[name], value.clone(), of_batch=True)

    def lend_buffers(self) -> None:
        """Let forward read the values of the buffers of the options, with checks that they are the same in each
        step."""
        for name, value in self.held.options.buffers.items():
            fake, call = self.held.buffers[name], self._other_call
            with unset_fake_temporarily(), DisableTorchFunction():
                numbers, own = value.tolist(), value.clone()
            with DisableTorchFunction():
                is_same = call(torch.eq, fake, call(torch.tensor, numbers, dtype=value.dtype))
                text = f"forward reads numbers of buffer {name!r}, which has others than at compile: compile again"
                call(assert_async, call(torch.all, is_same), text)
                self.values.know(fake, own)

    def leaves_out(self, path: tuple[int, ...]) -> bool:
        """Whether a part that eager runs for chosen rows alone is left out."""
        return False

    # -- hooks ------------------------------------------------------------------------------------------------------

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Install the hooks; remove them on exit."""
        hooks: list[tuple[Any, str, Callable[..., Any]]] = [
            *((owner, name, partial(self.on_seed, owner, name)) for owner, names in SEEDS.items() for name in names),
            (*BATCHED, self.on_vmap),
            (*CHECKED, self.on_check),
            (*CHECKPOINTED, self.on_checkpoint),
            (*CONVERTED, self.on_conversion),
            (*CALL_OF_MODULES, self.on_module),
            (torch.autocast, "__enter__", self.on_autocast),
            (torch.autocast, "__exit__", self.on_autocast_exit),
            (FakeTensor, "tolist", self.on_list),
            (logging.Handler, "handleError", self.on_log_error),
            *((owner, name, partial(self.on_library_call, own)) for owner, name, own in library_calls()),
        ]
        changes = [
            *((owner, name, self._hook(getattr(owner, name), hook)) for owner, name, hook in hooks),
            (torch.autograd.Function, "apply", classmethod(self._hook(original_apply, self.on_autograd_function))),
            *autocast_aliases(self.held.model, torch.autocast),
        ]
        # Functions that the model compiled are traced through.
        with (
            forced_eager(), reference_code() as left_out, replace_functions(*changes), self.fake_mode, _quiet(FAKE_LOG),
            constructors(self.on_constructor), EachFunction(self.on_function),
        ):  # fmt: skip
            self.left_out_kernels = left_out
            yield
        self.gradients.require_none()

    def _hook(self, original: Callable[..., Any], on_call: Callable[..., Any]) -> Callable[..., Any]:
        """The function that calls `on_call(original, ...)`, and the original itself within a call that is recorded."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if self.busy else on_call(original, *args, **kwargs)

        return call

    def on_seed(self, owner: Any, name: str, *_: Any, **__: Any) -> NoReturn:
        """The state of a generator is to be set."""
        raise CaptureError(
            f"{self.lines.where()}\n  forward calls {owner.__name__}.{name}, which no step would call: each draw "
            "of a plan has a seed of its own, made of the job's seed, the step and the micro-batch; draw with the "
            "default generator and leave its state alone, or take what is drawn as an input"
        )

    def on_vmap(self, batched: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`torch.vmap` calls its function."""
        self.busy, self.batched_nodes, calls = True, set(), EachPlainCall(self.on_plain_call)
        try:
            with calls:
                return batched(*args, **kwargs)
        finally:
            self.busy = False
            if calls.error is not None:
                raise calls.error

    def on_check(
        self, check: Callable[..., Any], kind: type[Exception], condition: Any,
        message: Callable[[], str] | None = None,
    ) -> None:  # fmt: skip
        """A check of torch's (`torch._check`), which stays one where it looks at a tensor."""
        if not has_tensor(condition) or condition.dtype != torch.bool:
            check(kind, condition, message)
            return
        if self.values.knows(condition):
            with unset_fake_temporarily(), DisableTorchFunction():
                holds = bool(self.values.value(condition).all())
            if not holds:
                raise kind("" if message is None else message())
            return
        text = f"{kind.__name__}: {message()}" if message is not None else f"{kind.__name__} in {self.lines.current()}"
        assert_async(condition.all() if condition.dim() else condition, text)

    def _answer_of_check(self, condition: torch.Tensor) -> bool | None:
        """The truth of a tensor for which the program is recorded, with a check of it unless it is sure. None where
        forward may go on either way."""
        options = self.held.options
        node = self.node_of.get(id(condition))
        drawn = answer_of_draw(node) if node else None
        if drawn is not None:
            return drawn
        frames = dict.fromkeys((self.lines.asking(), *self.lines.frames(1)))
        found = next(filter(None, (answer_without_error(frame) for frame in frames if frame is not None)), None)
        if found is None and node and torch.float16 not in (options.autocast, options.param_dtype):  # which overflows
            truth = answer_if_finite(node)
            found = None if truth is None else (truth, "a number that is not finite, for which there is no program,")
        if found is None:
            return None
        answer, error = found
        holds = self._other_call(torch.ne if answer else torch.eq, condition, 0)
        text = f"{error} in {self.lines.current()}"
        self._other_call(assert_async, self._other_call(torch.Tensor.reshape, holds, ()), text)
        return answer

    def on_checkpoint(self, checkpointed: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        """Forward asks for recomputation, which passes decide, not the model: autograd saves as in any other part."""
        self.has_checkpoints = True
        forward_context, _ = inspect.signature(checkpointed).bind(*args, **kwargs).arguments["context_fn"]()
        with forward_context:
            yield

    def on_list(self, own: Callable[..., Any], tensor: torch.Tensor) -> Any:
        """A tensor is read as a list: in one call if its values are known, which is else one for each number."""
        known = self.values.knows(tensor) and not self.chosen.has(tensor)
        return self._other_call(torch.Tensor.tolist, tensor) if known else own(tensor)

    def on_log_error(self, tell: Callable[..., Any], handler: logging.Handler, record: logging.LogRecord) -> None:
        """A line of a log cannot be written. One with a value that is not known is left out: programs write no logs."""
        if not isinstance(sys.exc_info()[1], ValueRead):
            tell(handler, record)

    def on_library_call(self, own: Callable[..., Any], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A function of another library is called. With tensors it is `own`, the function of programs."""
        if not has_tensor((args, kwargs)):
            return call(*args, **kwargs)
        with DisableTorchFunction():
            return self.on_function(own, args, kwargs)

    def on_constructor(self, own: Callable[..., Any], dtype: torch.dtype | None, *args: Any, **kwargs: Any) -> Any:
        """A tensor is made by its type: of sizes, of another tensor, whose memory it shares, or of numbers."""
        if self.busy or kwargs:
            return own(*args, **kwargs)
        first, dtype = args[0] if args else 0, dtype or torch.get_default_dtype()
        with DisableTorchFunction():
            if isinstance(first, torch.Tensor):
                return self._other_call(torch.Tensor.view_as, first, first)
            if isinstance(first, torch.Size) or not hasattr(first, "__len__"):
                return self._other_call(torch.empty, *args or [0], dtype=dtype)
            return self._other_call(torch.tensor, first, dtype=dtype)

    def on_function(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """A torch function, method, operator or property was called."""
        if self.busy:
            return func(*args, **kwargs)
        func = CONDITIONS.get(func, func)
        call = self._call_of(func, args, kwargs)
        if call.kind == "query":
            return self.answer(call, func, args, kwargs)
        if call.asks_gradient:
            self.gradients.note(*args, **kwargs)
            return args[0] if func is torch.Tensor.requires_grad_ else None
        if self.gradients.found:
            self.gradients.require_unused(tree_leaves((args, kwargs)))
        if call.kind == "refuse":
            raise CaptureError(f"{self.lines.where()}\n  {call.target}")
        if func in _VIEWS:
            return self._view_in_place(func, args, kwargs)
        dense = self.coordinates.perform(func, args, kwargs, self._other_call)
        if dense is not NO_COORDINATES:
            return dense
        chosen = self.chosen.perform(func, args, kwargs)
        if chosen is not NOT_CHOSEN:
            return chosen
        if func is torch.Tensor.__iter__:
            return iter(self.on_function(torch.Tensor.unbind, (args[0], 0), {}))
        if func is torch.Tensor.expand_as:  # which reads the shape of the other alone, not its values
            func, args = torch.Tensor.expand, (args[0], self._other_call(torch.Tensor.size, *args[1:], **kwargs))
            kwargs = {}
            call = self._call_of(func, args, kwargs)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            args = (args[0], joined_numbers(args[1], self._other_call), *args[2:])
        if func in _MOVES:  # to the device of the program
            func, args, kwargs = torch.Tensor.to, (args[0], torch.device("cpu")), {}
            call = self._call_of(func, args, kwargs)
        if func in SPARSE:
            args, kwargs, was_sparse = densely(func, args, kwargs)
            self.has_sparse |= was_sparse
        if func is torch.Tensor.__bool__ and not self.values.knows(args[0]):
            answer = self._answer_of_check(args[0])
            if answer is not None:
                return answer
        put = masked_put(func, args, kwargs)
        if put is not None and put.begins_with_its_mask():
            return put.record(self._other_call, self.lines.current)
        if put is not None and not all(map(self.values.knows, put.masks)):
            raise self._needs_value(self.prologue.inputs_of(self.lower(put.masks)))
        known = self._call_of_known_values(func, args, kwargs) if put is None else put.use_places(self._other_call)
        if known is not None:
            func, args, kwargs = known
            call = self._call_of(func, args, kwargs)
        args = (*reversed(args),) if call.reflected else args + call.extra
        run = call.target if call.reflected or call.extra else SHAPE_RULES.get(func, func)
        return self.perform(call, self.lower(args), self.lower(kwargs), run, args, kwargs)

    def _view_in_place(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
        """A tensor becomes a view of itself. What is recorded is the view; what the tensor was before keeps its shape,
        of which forward asks again when it is called once more."""
        tensor: torch.Tensor = args[0]
        if not self.is_again:
            self._require_own(func, tensor)
        view = self.on_function(_VIEWS[func], args, kwargs)
        with DisableTorchFunction():
            if not self.is_again:
                kept = self._again(tensor)
                self.viewed.add(id(kept))
                self._replace(tensor, kept)
            self.run(func, args, kwargs)
        if not self.is_again:
            self._replace(view, tensor)
        self.alive += [tensor, view]
        self.node_of[id(tensor)] = self.node_of[id(view)]
        self.know_as(tensor, view)
        return tensor

    def _require_own(self, func: Callable[..., Any], tensor: torch.Tensor) -> None:
        """Raise CaptureError where the next call of forward would find a tensor with another shape."""
        node = self.node_of.get(id(tensor))
        if node is None or node.op in ("placeholder", "get_attr"):
            names = self.held.names.get(id(tensor), ()) if node is None else (node.target,)
            whose = next(map(repr, names), "a tensor of the model")
            raise CaptureError(
                f"{self.lines.where()}\n  {func.__name__} changes the shape of {whose} in place, and so for the next "
                f"call, too: take the view instead, as in x = x.{_VIEWS[func].__name__}(...)"
            )

    def know_as(self, tensor: torch.Tensor, other: torch.Tensor) -> None:
        """Know of a tensor what is known of another."""
        self.values.know_as(tensor, other)

    def _replace(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Let the nodes whose value, or one of their values, is a tensor hold another one."""
        self.know_as(new, old)
        for node in self.graph.nodes:
            if any(tensor is old for tensor in value_tensors(node.meta.get("val"))):
                node.meta["val"] = tree_map_only(torch.Tensor, lambda t: new if t is old else t, node.meta["val"])
                rows = self.items.get(node, [])
                rows[:] = [(new if item is old else item, child) for item, child in rows]

    def on_plain_call(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """An ATen call on plain tensors, below `torch.vmap`."""
        if func is torch.ops.aten.lift_fresh.default and not isinstance(args[0], FakeTensor):  # as in torch.tensor(2.0)
            with unset_fake_temporarily():
                values = args[0].tolist()
            return self._perform_below(torch.tensor, (values,), {"dtype": args[0].dtype})
        if torch.Tag.inplace_view in func.tags and self.node_of.get(id(args[0])) in self.batched_nodes:
            packet = getattr(torch.ops.aten, func._schema.name.removeprefix("aten::").removesuffix("_"))
            view = self.on_plain_call(getattr(packet, func._overloadname), args, kwargs)
            self.node_of[id(args[0])] = self.node_of[id(view)]
            return func(*args, **kwargs)
        given = list(value_tensors((args, kwargs)))
        if torch.is_grad_enabled() and any(t.requires_grad for t in given):
            raise CaptureError(f"{self.lines.where()}\n  needs a gradient through torch.vmap")
        if torch.Tag.nondeterministic_seeded in func.tags or func._schema.is_mutable:
            raise CaptureError(f"{self.lines.where()}\n  draws, or writes in place, inside of torch.vmap")
        if self.rows is not None and any(self.node_of.get(id(t)) in self.rows.follows for t in given):
            raise OtherTrace(f"{self.lines.where()}\n  torch.vmap asks for sizes that cannot be followed")
        return self._perform_below(func, args, kwargs)

    def _perform_below(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """As `perform`, for a call below `torch.vmap`."""
        call = RecordedCall("call_function", func)
        try:
            with DisableTorchFunction():
                result = self.perform(call, self.lower(args), self.lower(kwargs), func, args, kwargs)
        finally:
            self.busy = True
        result = tree_map_only(torch.Tensor, self._again, result)
        self.batched_nodes.update(self.node_of[id(tensor)] for tensor in value_tensors(result))
        return result

    def _again(self, recorded: torch.Tensor) -> torch.Tensor:
        """A tensor in place of a recorded one, which autograd takes for the result of a call only once, and whose shape
        no later call may change in place."""
        tensor: torch.Tensor = torch.ops.aten.alias.default(recorded)
        self.node_of[id(tensor)] = self.node_of[id(recorded)]
        self.alive.append(tensor)
        return tensor

    def _call_of(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> RecordedCall:
        key = (func, len(args), bool(kwargs))
        call = self.calls.get(key)
        if call is None:
            call = self.calls[key] = classify(func, len(args), bool(kwargs))
        return call

    def _call_of_known_values(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> OtherCall | None:
        """The call in a form of a fixed size, if it has a size by a value that is known; None for any other call."""
        leaves: list[Any] = []
        map_leaves(leaves.append, (args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        telling = [t for t in tensors if (t.dim() == 0 or not t.is_floating_point()) and self.values.knows(t)]
        name = getattr(func, "__name__", "")
        is_write = name.endswith("_") and name not in ("__getitem__", "__setitem__")
        if not telling or is_write or len(tensors) < 2:
            return None
        lowered = self.lower(args), self.lower(kwargs)
        self.touched = []
        reads = ReadWatch()
        try:
            with reads:
                self.run(SHAPE_RULES.get(func, func), *self._executable(*lowered, args, kwargs))
        except NeedsValue:
            reads.seen = True
        return use_known_values(func, args, kwargs, self._other_call, self.values.knows) if reads.seen else None

    def _other_call(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.on_function(func, args, kwargs)

    def answer(self, call: RecordedCall, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """The answer to a query of a tensor."""
        if call.target == "dtype" and (plain := self._plain_dtype(args[0])) is not None:
            return plain
        if self.rows is None:
            if call.target in _TEXTS:
                return self._text_of(func, *args)
            return self.chosen.answer(call.target, args[0], self.run(func, args, kwargs))
        args, kwargs = tuple(map(settle, args)), {name: settle(value) for name, value in kwargs.items()}
        node = self.node_of.get(id(args[0]))
        if call.target in _TEXTS:
            size = torch.Tensor.size
            for each in self.rows.answer("size", size, node, (), {}, self.run(size, args[:1], {})):
                settle(each)
            return _tensor_text(args[0])
        return self.rows.answer(call.target, func, node, args[1:], kwargs, self.run(func, args, kwargs))

    def _text_of(self, func: Callable[..., Any], tensor: torch.Tensor, *args: Any) -> str:
        """The text of a value that is the same at every step, such as a number in a name; of others a message's."""
        if not self.values.knows(tensor) or id(tensor) in self.values.of_batch:
            return _tensor_text(tensor)
        with unset_fake_temporarily(), DisableTorchFunction():
            return str(func(self.values.value(tensor), *args))

    def _plain_dtype(self, tensor: torch.Tensor) -> torch.dtype | None:
        """The type of a weight that files alone have packed, which is plain in the user's model: forward may cast to
        it. None for other tensors."""
        name = next((name for name in self.held.names.get(id(tensor), ()) if name in self.held.packed), "")
        layer: Any = self.held.modules.get(name.rpartition(".")[0]) if name else None
        if layer is None or not layer.is_of_files or name.rpartition(".")[2] != "weight":
            return None
        own: torch.dtype = layer.packing.dtype
        return self.held.options.param_dtype or own

    def on_module(self, call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """A module was called: record it whole if it is a leaf, else note where we are and let it run."""
        path = self.held.paths.get(id(module))
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{self.lines.where()}\n  calls {path or type(module).__name__!r}, a module that torch.jit.script or "
                "trace compiled, whose Python code is gone: put the original module there (load_state_dict takes the "
                "weights over)"
            )
        if path is None:  # made on the fly inside forward; its calls belong to the caller
            return call(module, *args, **kwargs)
        self.num_calls += 1
        self.chosen.close()
        self.modules.append((path, type(module).__name__, self.num_calls))
        try:
            is_whole = path and id(module) in self.held.leaves and not any(map(self.chosen.has, args))
            if is_whole and not is_parametrized(module):  # forward may parametrise it
                step = RecordedCall("call_module", path)
                self.gradients.require_unused(module.parameters())
                with DisableTorchFunction():
                    return self.perform(step, self.lower(args), self.lower(kwargs), call.__get__(module), args, kwargs)
            return call(module, *args, **kwargs)
        finally:
            self.modules.pop()

    def on_conversion(
        self, converted: Callable[..., Any], module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor],
        recurse: bool = True,
    ) -> nn.Module:  # fmt: skip
        """A module is converted (`module.to(dtype)`), which must change nothing: devices hold it as it was traced."""
        for name, tensor in [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)]:
            dtype = self.run(change, (tensor,), {}).dtype
            if dtype != tensor.dtype:
                path = self.held.paths.get(id(module)) or type(module).__name__
                raise CaptureError(
                    f"{self.lines.where()}\n  forward converts {path!r} from {tensor.dtype} to {dtype} ({name}): "
                    "convert it before compile, or convert what is computed of it (module.weight.to(dtype))"
                )
        return module

    def on_autograd_function(self, apply: Callable[..., Any], kind: type, *args: Any) -> Any:
        """A custom autograd function: one call, so that its own backward is kept."""
        if kind is checkpoint.CheckpointFunction:  # recomputation is decided by passes, not by the model
            self.has_checkpoints = True
            return args[0](*args[2:])
        self.chosen.close()
        call = self.calls.get(kind)
        if call is None:
            if self.is_again and any(_full_name(kind) == _full_name(other) for other in self.calls):
                raise ClassOfOneCall(
                    f"{self.lines.where()}\n  {kind.__qualname__} is defined while forward runs, so that each forward "
                    "has a class of its own, which no program can import: define it at the top of its file"
                )
            call = self.calls[kind] = RecordedCall("call_function", _apply_of(kind))
        self.draws = DrawWatch()
        self.fake_mode.allow_non_fake_inputs = True  # tensors of the script that the function itself reads
        try:
            with DisableTorchFunction():
                return self.perform(call, self.lower(args), {}, self.draws.watch(call.target), args, {})
        finally:
            self.fake_mode.allow_non_fake_inputs = False

    def on_autocast(self, enter: Callable[..., Any], context: torch.autocast) -> Any:
        device = "cpu" if context.device.startswith(ACCELERATORS) else context.device
        setting = (device, context.fast_dtype, context._enabled, context._cache_enabled)
        node = self.perform(RecordedCall("call_function", enter_autocast), setting, {}, None)
        self._note_mode(node, lambda: enter(context))
        self.autocasts.append((node, setting))
        return enter(context)

    def on_autocast_exit(self, leave: Callable[..., Any], context: torch.autocast, *exception: Any) -> Any:
        node, _ = self.autocasts.pop()
        node = self.perform(RecordedCall("call_function", exit_autocast), (node,), {}, None)
        self._note_mode(node, lambda: leave(context, None, None, None))
        return leave(context, *exception)

    def _note_mode(self, node: fx.Node, switch: Callable[[], Any]) -> None:
        if self.rows is not None and not self.is_again:
            self.rows.entries.append(ModeSwitch(switch))

    def bind(self, node: fx.Node, result: Any) -> None:
        self.chosen.note(node)
        super().bind(node, result)

    def perform(
        self, call: RecordedCall, args: Any, kwargs: Any, run: Callable[..., Any] | None,
        real_args: tuple = (), real_kwargs: dict[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Run a call on fake tensors and record it if it made or changed a tensor or a mode. Returns its result.

        With `run` None it records a switch of a mode that the caller itself makes, and returns the node.
        """
        touched, self.touched = self.touched, []
        if run is None:
            return self._record(call, args, kwargs, None, touched)
        exec_args, exec_kwargs = self._executable(args, kwargs, real_args, real_kwargs or {})
        result = self.outcome(run, exec_args, exec_kwargs, args, kwargs)
        mutated = tuple(dict.fromkeys(node for node, tensor, version in touched if tensor._version != version))
        parents = [node for node, _, _ in touched]
        if not mutated and call.target not in _EFFECTS and not has_tensor(result):
            if self.rows is not None:
                self.rows.note_outcome(run, args, kwargs, parents, result)
            return result
        result = self._fresh(result, mutated)
        node = self._record(call, args, kwargs, result, touched)
        set_writes(node, mutated)
        node.meta["random"] = self._is_random(call, real_args, real_kwargs or {})
        note_buffers(self.held, call, node, args, kwargs)
        if self.rows is not None:
            self.rows.note(node, run, args, kwargs, parents)
        self.bind(node, result)
        self._note_values(call, node, run)
        return result

    def _note_values(self, call: RecordedCall, node: fx.Node, run: Callable[..., Any]) -> None:
        written = [target.meta["val"] for target in node.meta["mutates"]]
        is_of_rows = self.rows is not None and node in self.rows.follows  # what is true for these rows alone
        if is_of_rows or node.meta["random"] or call.kind == "call_module":
            for target in written:
                self.values.forget(target)
            return
        self.busy = True
        try:
            if written:
                self.values.write(run, node.args, node.kwargs, written)
            else:
                self.values.note(run, node.args, node.kwargs, node.meta["val"], self.prologue.is_begun)
        finally:
            self.busy = False
        missing = self.prologue.add(node) - self.held.options.lent.keys()
        if missing:
            raise self._needs_value(missing)

    def outcome(self, run: Callable[..., Any], exec_args: tuple, exec_kwargs: dict, args: Any, kwargs: Any) -> Any:
        """The result of a call on fake tensors. One that needs values gives the real result, if these are known."""
        try:
            return self.run(run, exec_args, exec_kwargs)
        except NeedsValue:
            self.busy = True
            try:
                with unset_fake_temporarily(), torch.no_grad():
                    known = self.values.result(run, args, kwargs)
            finally:
                self.busy = False
            if known is UNKNOWN:
                error = self._needs_value(self.prologue.inputs_of((args, kwargs)))
                error.buffers = self.prologue.tensors_of((args, kwargs)) & self.held.buffers.keys()
                raise error from None
            if self.values.follows(args, kwargs):
                self.prologue.note_read(is_tensor=has_tensor(known))
            with DisableTorchFunction():
                return tree_map_only(torch.Tensor, self._as_fake, known)

    def _as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)

    def run(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call `func` without the hooks. Raises NeedsValue where it needs a tensor's value."""
        self.busy = True
        try:
            return func(*args, **kwargs)
        except _VALUE_ERRORS as error:
            raise NeedsValue(self._value_text()) from error
        except (RuntimeError, NotImplementedError, TypeError, AssertionError) as error:
            if is_data_dependent(func) or (func in _OF_VALUES and has_tensor((args, kwargs))):
                raise NeedsValue(self._value_text()) from error
            raise
        finally:
            self.busy = False

    def _needs_value(self, inputs: frozenset[str]) -> NeedsValue:
        error = NeedsValue(self._value_text())
        error.inputs = inputs
        return error

    def _value_text(self) -> str:
        return (
            f"{self.lines.where()}\n  this line needs the value of a tensor, but a program is compiled before any "
            "value is known. Use torch.where instead of `if`, keep numbers as tensors instead of .item(), .tolist() or "
            "numpy(), fixed-size masks instead of nonzero() or boolean indexing, and torch._check_tensor_all to check "
            "values. A value that is the same at every step may be a tensor attribute of the model instead of an "
            "input; where only the model's own loss needs it, pass loss_fn, and the labels under a name that forward "
            "does not take; in a mixture of experts choose a batched implementation (transformers: "
            'model.set_experts_implementation("batched_mm"))'
        )

    def _record(self, call: RecordedCall, args: Any, kwargs: Any, value: Any, touched: list) -> fx.Node:
        node = self.graph.create_node(call.kind, call.target, args, kwargs)
        self.annotate(node, value)
        self.steps.append(node)
        if isinstance(value, torch.Tensor):
            storage = storage_of(value)
            argument = next((n for n, t, _ in touched if storage_of(t) == storage), None)
            set_base(node, argument or self.storages.get(storage))
            self.storages.setdefault(storage, node)
        elif value is not None:
            storages = {storage_of(t) for t in value_tensors(value)}
            set_base(node, next((n for n, t, _ in touched if storage_of(t) in storages), None))
        return node

    def _fresh(self, result: Any, mutated: tuple[fx.Node, ...]) -> Any:
        """An op that handed its argument back unchanged (`x.float()` on floats) gets a value of its own.

        Otherwise later uses of the argument would read the op's result, which under autocast is not the same.
        """
        if isinstance(result, torch.Tensor):
            known = self.node_of.get(id(result))
            is_own = id(result) in self.held.names or known is not None
            if is_own and not (mutated and (known in mutated or id(result) in self.held.names)):
                return result.view_as(result)
        elif type(result) in (tuple, list):
            return type(result)(self._fresh(item, mutated) for item in result)
        return result

    def _is_random(self, call: RecordedCall, args: tuple, kwargs: dict[str, Any]) -> bool:
        if self.draws is not None:
            watch, self.draws = self.draws, None
            return watch.seen
        if call.kind == "call_module":
            return is_random_module(self.held.modules[call.target])
        return is_random(call, args, kwargs)

    def _executable(self, args: Any, kwargs: Any, real_args: tuple, real_kwargs: dict) -> tuple[tuple, dict]:
        """The user's own arguments, unless one of them must not run as it is (real tensors, accelerator devices)."""
        if not self.rebuild_args:
            return real_args, real_kwargs
        self.rebuild_args = False
        return fx.map_arg(args, lambda n: n.meta["val"]), fx.map_arg(kwargs, lambda n: n.meta["val"])


_TEXTS = ("__repr__", "__format__")


def _tensor_text(tensor: torch.Tensor) -> str:
    """The text of a message in place of a tensor's value."""
    return f"<{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}>"


def _full_name(value: Any) -> tuple[Any, Any]:
    return getattr(value, "__module__", value), getattr(value, "__qualname__", value)


@contextmanager
def _quiet(log: logging.Logger) -> Iterator[None]:
    """Leave out what torch logs of a call that fails: its error is told, or another trace does without the call."""
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _apply_of(kind: type) -> Callable[..., Any]:
    """`kind.apply` as a function with the name and module of the class, from which code generators import it."""

    def apply(*args: Any) -> Any:
        with kept_caches(kind):
            return kind.apply(*args)  # type: ignore[attr-defined]

    apply.__name__, apply.__qualname__, apply.__module__ = "apply", f"{kind.__qualname__}.apply", kind.__module__
    apply.__self__ = kind  # type: ignore[attr-defined]
    return apply
