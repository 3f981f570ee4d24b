"""The gradient hooks of a model's parameters as data: `Tensor.register_hook`, `register_post_accumulate_grad_hook`.

Each hook is called once on a gradient without values, and the operators of torch that it calls are written down. A
gradient may be spread over several devices, so all of them must be element-wise; a hook that does anything else is
refused, because a program would not do it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...ir.errors import CaptureError
from ...ir.program import Earlier, HookCall, elementwise
from ...runtime.torch_names import TorchDispatchMode
from .lines import SourceLines
from .python_state import changes, values_of

_SAME = {"aten.detach.default", "aten.alias.default", "aten.clone.default", "aten.lift_fresh.default"}
_WRITES = {"aten.copy_.default"}  # whose result is another operand
_REMEDY = (
    "a program runs hooks on pieces of gradients, so they must be element-wise (g * 0.5, g.clamp(-1, 1)) and give the "
    "new gradient back; remove this one (handle.remove()), or do it to the loss, or freeze the parameter"
)


def hooks_of(model: nn.Module) -> dict[str, tuple[HookCall, ...]]:
    """The parameters that have hooks, by their first names, and what these do. Raises CaptureError for others."""
    found = {}
    for name, param in model.named_parameters():
        if param.requires_grad and own_hooks(param):
            found[name] = trace_hooks(name, param)
    return found


def own_hooks(param: Tensor) -> dict[tuple[str, int], Callable[..., Any]]:
    """A parameter's hooks in the order in which autograd runs them, each with a key that no other hook ever has."""
    kinds = {"register_hook": "_backward_hooks"}
    kinds["register_post_accumulate_grad_hook"] = "_post_accumulate_grad_hooks"
    return {(kind, key): hook for kind, where in kinds.items() for key, hook in (getattr(param, where) or {}).items()}


def trace_hooks(name: str, param: nn.Parameter) -> tuple[HookCall, ...]:
    """The calls by which a parameter's hooks change its gradient. Raises CaptureError naming parameter and hook."""
    gradient = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta")
    owner = nn.Parameter(torch.empty_like(gradient))
    tracer, index = Tracer(gradient), 0
    for (kind, _), hook in own_hooks(param).items():
        who = f"{name} has the gradient hook {getattr(hook, '__qualname__', type(hook).__name__)} ({kind})"
        before, calls, last = values_of(hook), len(tracer.calls), gradient
        try:
            with torch.no_grad(), tracer:
                gradient = _call_hook(kind, hook, gradient, owner)
                index = tracer.index_of(gradient)
        except Refused as error:
            raise CaptureError(f"{who}, which {error}: {_REMEDY}") from None
        except Exception as error:
            line = SourceLines().place_of_error(error.__traceback__)
            reason = f"fails on a gradient without values ({type(error).__name__}: {error})"
            raise CaptureError(f"{line}\n  {who}, which {reason}: {_REMEDY}") from error
        if gradient.shape != param.shape or gradient.dtype != param.dtype:
            raise CaptureError(f"{who}, which makes {gradient.dtype}{list(gradient.shape)} of it: {_REMEDY}")
        if (gradient is last and len(tracer.calls) == calls) or changes(before, values_of(hook)):
            raise CaptureError(f"{who}, which does something else than to change the gradient: {_REMEDY}")
    return tracer.calls_for(index)


def _call_hook(kind: str, hook: Callable[..., Any], gradient: Tensor, owner: nn.Parameter) -> Tensor:
    """Call a hook as autograd would, on a gradient of the parameter `owner`. Returns the gradient that it leaves."""
    if kind == "register_hook":
        given = hook(gradient)
        return gradient if given is None else given
    owner.grad = gradient
    if hook(owner) is not None:
        raise Refused("returns something, which autograd refuses")
    if owner.grad is None:
        raise Refused("takes the gradient away, as an optimizer does that steps during backward")
    return owner.grad


class Refused(Exception):
    """A hook does what no hook may; the message is the rest of a sentence."""


class Tracer(TorchDispatchMode):
    """Writes down the operators that work on a gradient. Numbers that a hook computes otherwise are constants."""

    def __init__(self, gradient: Tensor):
        super().__init__()
        self.shape = gradient.shape
        self.calls: list[HookCall] = []
        self.alive: list[Tensor] = [gradient]  # keeps storages from being reused
        self.index = {_storage(gradient): 0}  # storage -> the value that it holds now

    def index_of(self, value: Tensor) -> int:
        if not isinstance(value, Tensor) or _storage(value) not in self.index:
            raise Refused("gives back what is not made of the gradient")
        return self.index[_storage(value)]

    def calls_for(self, index: int) -> tuple[HookCall, ...]:
        """The calls that the value of this index needs, with it at the end."""
        needed, waiting = set[int](), [index]
        while waiting:
            current = waiting.pop()
            if current and current not in needed:
                needed.add(current)
                waiting += [arg.index for arg in self.calls[current - 1].args if isinstance(arg, Earlier)]
        place = {0: 0} | {old: new for new, old in enumerate(sorted(needed), 1)}
        kept = [self.calls[i - 1] for i in sorted(needed)]
        args = [tuple(Earlier(place[a.index]) if isinstance(a, Earlier) else a for a in call.args) for call in kept]
        return tuple(HookCall(call.op, own, call.options) for call, own in zip(kept, args))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = f"{func.namespace}.{func._schema.name.partition('::')[2]}.{func._overloadname}"
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
        if not any(_storage(t) in self.index for t in tensors):
            if all(t.dim() == 0 and not t.is_meta for t in tensors):
                return func(*args, **{**kwargs, "device": "cpu"} if kwargs.get("device") is not None else kwargs)
            raise Refused(f"uses a tensor of shape {list(tensors[0].shape)} that is not the gradient ({name})")
        lowered = tuple(self._lower(arg, name) for arg in args)
        result = func(*(arg.item() if self._is_constant(arg) else arg for arg in args), **kwargs)
        if not isinstance(result, Tensor) or result.shape != self.shape:
            raise Refused(f"calls {name}, which is not element-wise")
        self.alive.append(result)
        if name in _SAME or name in _WRITES:
            source = lowered[1] if name in _WRITES else lowered[0]
            same_dtype = not isinstance(args[-1], Tensor) or args[-1].dtype == result.dtype
            if not isinstance(source, Earlier) or not same_dtype:
                raise Refused(f"calls {name} on other than gradients of one dtype")
            self.index[_storage(result)] = source.index
            return result
        functional = _functional(func, name)
        if elementwise(functional) is None:
            raise Refused(f"calls {name}, which is not element-wise")
        self.calls.append(HookCall(functional, lowered, _options(kwargs)))
        self.index[_storage(result)] = len(self.calls)
        return result

    def _is_constant(self, arg: Any) -> bool:
        return isinstance(arg, Tensor) and arg.dim() == 0 and not arg.is_meta and _storage(arg) not in self.index

    def _lower(self, arg: Any, name: str) -> Any:
        if isinstance(arg, Tensor) and _storage(arg) in self.index:
            return Earlier(self.index[_storage(arg)])
        if self._is_constant(arg):
            return arg.item()
        if isinstance(arg, Tensor):
            raise Refused(f"uses a tensor of shape {list(arg.shape)} that is not the gradient ({name})")
        if isinstance(arg, torch.dtype):
            return str(arg).removeprefix("torch.")
        if isinstance(arg, (bool, int, float, str, type(None))):
            return arg
        raise Refused(f"gives {name} a {type(arg).__name__}")


def _functional(func: Any, name: str) -> str:
    """The operator that computes what an operator writes in place."""
    library, packet, overload = name.split(".")
    if not func._schema.is_mutable:
        return name
    if packet == "zero_":
        return "aten.zeros_like.default"
    return f"{library}.{packet.removesuffix('_')}.{overload}"


def _options(kwargs: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The keyword arguments that matter: a hook does not choose the device or layout of a tensor."""
    kept = []
    for key, value in kwargs.items():
        if key in ("device", "layout", "pin_memory", "memory_format", "non_blocking") or value is None:
            continue
        plain = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        if not isinstance(plain, (bool, int, float, str)):
            raise Refused(f"gives a {type(value).__name__} as {key}=")
        kept.append((key, plain))
    return tuple(kept)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
