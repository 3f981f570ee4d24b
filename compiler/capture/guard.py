"""Borrow the user's model for a trace, or another run of forward, and give it back exactly as it was.

While borrowed, every parameter and buffer is a proxy (one per object, so ties survive), every module is in its own
mode, none is compiled, and Hugging Face caches are off. All of it is undone on exit, also on errors, and so is what
forward keeps of fake tensors in caches of the script. For a trace the proxies are fake cpu tensors: no weight is read
or made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import Event, get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...ir.errors import CaptureError
from ...runtime.quantised.model import names_of_bytes
from ...runtime.script_caches import PLAIN_CONTAINERS, ScriptCaches
from ...runtime.torch_names import FakeTensorMode
from .calls import leaf_modules
from .constants import ConstantNames
from .custom_functions import TORCH_APPLY, original_apply, redirect_taken_functions
from .dynamic import DynamicDims
from .prologue.made_input import MadeInput
from .python_state import GlobalDraws

LossFn = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class TraceOptions:
    """The options of a trace.

    loss_fn: `loss_fn(output, batch) -> scalar`; default: output.loss, output["loss"], or the output itself if scalar.
    dynamic: which sizes of the batch stay symbolic, so that the graph runs at others.
    autocast: trace as under `torch.autocast(dtype=autocast)`, for a graph that will run under it. A graph traced
        without autocast may run under it, too, but a dtype that the model reads and casts back to stays as traced.
    device_kind: "cpu" or "cuda", where the graph will run: each has its own rules of autocast.
    param_dtype: trace floating parameters (not buffers) in this dtype instead of their own.
    input_dtype: cast the floating tensors that forward is given to this dtype first, as FSDP2 does. `loss_fn` gets the
        batch as it is.
    training: False captures evaluation mode itself, for a model whose `eval_error` says that it needs its own graph.
    evaluation: also find out which arguments differ in evaluation mode.
    count_items: give forward `num_items_in_batch`, a scalar that is an input of the graph.
    for_loss: the keys of the batch that forward's `**kwargs` must not get: they are for `loss_fn` alone.
    leaves: the texts and numbers of the batch that forward or the loss reads.
    lent: the values of inputs that forward may read; what it makes of them is a prologue.
    buffers: the values of buffers that forward reads, which a program checks in each step.
    made: the inputs that a prologue makes, which are in the batch, and which forward does not get.
    any_rows: follow sizes, so that `OpGraph.at_inputs` gives the graph of a batch with other rows.
    """

    loss_fn: LossFn | None = None
    dynamic: DynamicDims | None = None
    autocast: torch.dtype | None = None
    device_kind: str = "cpu"
    param_dtype: torch.dtype | None = None
    training: bool = True
    evaluation: bool = True
    count_items: bool = False
    input_dtype: torch.dtype | None = None
    any_rows: bool = False
    for_loss: frozenset[str] = frozenset()
    leaves: frozenset[str] = frozenset()
    lent: Mapping[str, torch.Tensor] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    made: tuple[MadeInput, ...] = ()


@dataclass
class Borrowed:
    """The model with proxies in it, which are called fakes, as they are in a trace."""

    model: nn.Module
    options: TraceOptions = field(default_factory=TraceOptions)
    paths: dict[int, str] = field(default_factory=dict)  # id(module) -> its first dotted path
    modules: dict[str, nn.Module] = field(default_factory=dict)  # first dotted path -> module
    names: dict[int, list[str]] = field(default_factory=dict)  # id(fake) -> all its dotted names
    fakes: dict[int, torch.Tensor] = field(default_factory=dict)  # id(user's tensor) -> fake
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # dotted name -> fake
    constant_names: ConstantNames = field(init=False)
    packed: set[str] = field(default_factory=set)  # the names of quantised weights
    leaves: set[int] = field(default_factory=set)  # ids of the modules that stay whole
    alive: list[Any] = field(default_factory=list)  # keeps the objects whose ids are used above
    saved: list[tuple[nn.Module, dict[str, Any]]] = field(default_factory=list)  # module -> attributes with fakes
    caches: ScriptCaches = field(init=False)
    configs: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)  # with what is set in them

    draws: GlobalDraws = field(default_factory=GlobalDraws)

    def require_no_draws(self) -> None:
        """Raise CaptureError if forward has drawn random numbers outside torch."""
        found = self.draws.drawn_from()
        if found:
            raise CaptureError(
                f"the model's forward draws from {found}: the outcome would be fixed for ever in the compiled program; "
                "draw with torch.rand and torch.where, or turn the feature (layerdrop?) off"
            )

    def require_own_tensors(self) -> None:
        """Raise CaptureError for a parameter or a buffer that forward has made and registered."""
        parameters = [name for name, each in self.model.named_parameters() if id(each) not in self.names]
        for name in [*parameters, *(name for name, _ in self.model.named_buffers() if name not in self.buffers)]:
            raise CaptureError(
                f"forward registers the tensor {name!r}, which no device would have: register it before compile, in "
                "__init__, or by calling the model once on real inputs"
            )

    def begin_again(self) -> None:
        """Put back the parameters, buffers and submodules that forward has replaced, but nothing else."""
        for module, attributes in self.saved:
            for store in ("_parameters", "_buffers", "_modules"):
                module.__dict__[store] = attributes[store].copy()

    def name_constants(self, loss_fn: LossFn | None) -> None:
        """Find the names of unregistered tensors, once the registered ones are replaced."""
        self.constant_names = ConstantNames(self.model, loss_fn)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Lend the model once more, with the attributes and proxies that it had."""
        before = [(owner, dict(owner.__dict__)) for owner, _ in (*self.saved, *self.configs)]
        try:
            self._reset_modules()
            for config, attributes in self.configs:
                config.__dict__.update(attributes)
            with torch.enable_grad():
                yield
        finally:
            for owner, attributes in before:
                owner.__dict__.clear()
                owner.__dict__.update(attributes)
            self.caches.put_back()

    def restart(self) -> None:
        """Forget what a run of forward has written into the modules, and kept elsewhere."""
        self._reset_modules()
        self.caches.put_back()

    def _reset_modules(self) -> None:
        for module, attributes in self.saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        _isolate(self.saved)


@contextmanager
def borrow(
    model: nn.Module, proxy_of: Callable[[torch.Tensor], torch.Tensor], options: TraceOptions
) -> Iterator[Borrowed]:
    """Put proxies into `model`, switch it to evaluation mode if asked, turn caches off; undo everything on exit.

    Raises CaptureError for lazy parameters and backward hooks, which no capture can represent.
    """
    _refuse(model)
    held = Borrowed(model, options, packed=names_of_bytes(model))
    held.caches = ScriptCaches([options.loss_fn], model.modules())
    saved = [(module, dict(module.__dict__)) for module in model.modules()]
    configs = _configs(model)
    saved_configs = [(config, dict(config.__dict__)) for config in configs]
    torch_state = torch.get_rng_state()
    try:
        _isolate(saved)
        for module, _ in saved:
            module.__dict__.pop("_compiled_call_impl", None)  # by `module.compile()`
        _insert_fakes(model, held, proxy_of)
        _substitute(saved, held)
        held.name_constants(options.loss_fn)
        held.configs = [(config, {"use_cache": False}) for config in configs if "use_cache" in config.__dict__]
        for config, attributes in held.configs:
            config.__dict__.update(attributes)
        if not options.training:
            model.eval()
        held.saved = [(module, dict(module.__dict__)) for module, _ in saved]
        held.restart()
        held.leaves = leaf_modules(model)
        yield held
        held.require_no_draws()
    finally:
        held.draws.restore()
        torch.set_rng_state(torch_state)
        for owner, attributes in [*saved, *saved_configs]:
            owner.__dict__.clear()
            owner.__dict__.update(attributes)
        held.caches.put_back()


def _refuse(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"module {path or 'root'!r} ({type(module).__name__}) has backward hooks, which a captured program "
                "would not call: remove them (handle.remove()) before compiling"
            )
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and is_lazy(tensor):
                raise CaptureError(
                    f"parameter {name!r} of module {path or 'root'!r} ({type(module).__name__}) has no shape yet: "
                    "run the model once on real inputs before compiling"
                )


def _isolate(saved: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    """Give modules copies of their plain containers, so that what forward writes into them is dropped afterwards."""
    copies: dict[int, Any] = {}
    for module, attributes in saved:
        for name, value in attributes.items():
            if type(value) in PLAIN_CONTAINERS:
                module.__dict__[name] = copies.setdefault(id(value), value.copy())


def _insert_fakes(model: nn.Module, held: Borrowed, proxy_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for path, module in model.named_modules(remove_duplicate=False):
        first_visit = held.paths.setdefault(id(module), path) == path
        held.modules.setdefault(held.paths[id(module)], module)
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is None:
                    continue
                if first_visit:
                    store[name] = tensor = _proxy(tensor, held, proxy_of)
                full_name = f"{path}.{name}" if path else name
                held.names.setdefault(id(tensor), []).append(full_name)
                if store is module._buffers:
                    held.buffers[full_name] = tensor


def _substitute(saved: list[tuple[nn.Module, dict[str, Any]]], held: Borrowed) -> None:
    """Put fakes for the parameters and buffers in modules' plain attributes and lists (the RNNs' flat weights), too."""
    for module, attributes in saved:
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor):
                module.__dict__[name] = held.fakes.get(id(value), value)
            elif type(value) is list and any(id(item) in held.fakes for item in value):
                module.__dict__[name][:] = [held.fakes.get(id(item), item) for item in value]


def _proxy(tensor: torch.Tensor, held: Borrowed, proxy_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    if id(tensor) not in held.fakes:
        held.fakes[id(tensor)] = made = proxy_of(tensor)
        held.alive += [tensor, made]
    return held.fakes[id(tensor)]


def fakes_of(fake_mode: FakeTensorMode, param_dtype: torch.dtype | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """The fake tensor for a parameter or a buffer; floating parameters in `param_dtype`, if there is one."""

    def fake_of(tensor: torch.Tensor) -> torch.Tensor:
        changed = param_dtype is not None and isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        dtype = param_dtype if changed else tensor.dtype
        with fake_mode:
            fake = torch.empty(tensor.size(), dtype=dtype, device="cpu")  # contiguous, as devices hold it
            return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake

    return fake_of


def _configs(model: nn.Module) -> list[Any]:
    """Every distinct Hugging Face style configuration object of the model, nested ones too."""
    found: dict[int, Any] = {}
    waiting = [module.__dict__.get("config") for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if id(config) not in found and hasattr(config, "__dict__") and hasattr(type(config), "to_dict"):
            found[id(config)] = config
            waiting += list(config.__dict__.values())
    return list(found.values())


@contextmanager
def replace_functions(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Set the function `owner.name = value` for each change; put back what was there on exit. Other threads, on which
    devices may be at work on a step, still get what was there. Where the `apply` of autograd functions is replaced, so
    are those that a script has taken from its classes before (`relu = Relu.apply`). What a script takes meanwhile, as a
    module does that forward imports, is afterwards whatever is there then."""
    before = [(owner, name, owner.__dict__[name]) for owner, name, _ in changes]
    with ExitStack() as stack:
        over = Event()
        stack.callback(over.set)
        for owner, name, old in before:
            stack.callback(setattr, owner, name, old)
        for (owner, name, old), (_, _, value) in zip(before, changes):
            if owner is torch.autograd.Function and name == "apply":
                old = classmethod(original_apply) if old is TORCH_APPLY else old
                stack.enter_context(redirect_taken_functions())
            setattr(owner, name, _function_of_thread(owner, name, value, old, over))
        yield


def _function_of_thread(owner: Any, name: str, new: Any, old: Any, over: Event) -> Any:
    """A function, or a class's method, that is `new` in the calling thread and `old` in others. After `over` it calls
    the owner's function of that name."""
    thread = get_ident()

    def choose() -> Any:
        return owner.__dict__[name] if over.is_set() else new if get_ident() == thread else old

    if isinstance(new, classmethod):

        def method(kind: type, *args: Any, **kwargs: Any) -> Any:
            return choose().__get__(None, kind)(*args, **kwargs)

        return classmethod(method)

    def function(*args: Any, **kwargs: Any) -> Any:
        return choose()(*args, **kwargs)

    return function


def autocast_aliases(model: nn.Module, always: Callable[..., Any]) -> list[tuple[Any, str, Any]]:
    """Changes that make transformers' `maybe_autocast` always enter autocast.

    It leaves autocast(enabled=False) out when no autocast is on, so a trace outside autocast would lose the
    full-precision region (rotary embeddings) and differ from eager when run under autocast.
    """
    owners = {"transformers.modeling_rope_utils", *(type(module).__module__ for module in model.modules())}
    return [
        (sys.modules[name], "maybe_autocast", always)
        for name in sorted(owners)
        if name in sys.modules and "maybe_autocast" in sys.modules[name].__dict__
    ]
