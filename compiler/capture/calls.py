"""Turns calls seen by the recorder into nodes of the graph, and tells what is known of a call without running it.

In: the function object that torch hands to a `TorchFunctionMode`. Out: a `RecordedCall` (node kind and target), whether
it draws random numbers, and whether a module is a leaf.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ...codegen.layers import layer_call
from ...ir.calls import function_name
from ...runtime.torch_names import DropoutNd, Loss


@dataclass(frozen=True)
class RecordedCall:
    """`kind` is an fx node op, or "query" (answered at once, never recorded), or "refuse" (`target` says why)."""

    kind: str
    target: Any
    reflected: bool = False  # arguments swapped: Tensor.__rsub__(x, 1) is 1 - x
    extra: tuple = ()  # arguments appended: getattr(x, "T")
    asks_gradient: bool = False  # x.requires_grad = True, x.requires_grad_()


_TENSOR_GETTERS = {"T", "mT", "H", "mH", "real", "imag", "data", "grad"}
_QUERIES = {"size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "is_floating_point"}
_QUERIES |= {"is_complex", "element_size", "is_contiguous", "get_device"}
_QUERIES |= {"__len__", "__repr__", "__format__", "__hash__"}
_REFUSED = {
    "backward": "runs backward() inside forward: return the loss and let the training step run backward",
    "register_hook": "registers a tensor hook, which a captured program would not call",
    "register_post_accumulate_grad_hook": "registers a gradient hook, which a captured program would not call",
}
_REFUSED |= dict.fromkeys(
    ("resize_", "resize_as_", "set_"),
    "gives a tensor other memory: make a new tensor (x[:n], x.reshape(...), torch.cat)",
)
_DIFFERENTIATES = (torch.autograd.grad, torch.autograd.backward)
_OWN_DERIVATIVE = (
    ", for which the graph of the whole model would have to be there: write the derivative as tensor operations, or "
    "put the computation and its derivative into a torch.autograd.Function, which is one call to a program"
)
# Python operators reach the recorder under the method's name; two plain arguments read better as the operator.
_OPERATORS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv}
_OPERATORS |= {"true_divide": operator.truediv, "matmul": operator.matmul}
_NOT_OPERATORS = {"__index__", "__contains__", "__call__"}
_DATA_DEPENDENT = {"item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "nonzero", "unique", "masked_select"}
_DATA_DEPENDENT |= {"__array__", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__"}


def classify(func: Callable[..., Any], num_args: int, has_kwargs: bool) -> RecordedCall:
    """The graph form of a torch function, method, operator or property."""
    name = getattr(func, "__name__", "")
    if func in _DIFFERENTIATES:
        return RecordedCall("refuse", f"differentiates inside forward ({name}){_OWN_DERIVATIVE}")
    if name == "__get__":
        attribute = func.__self__.__name__  # type: ignore[attr-defined]
        is_tensor = attribute in _TENSOR_GETTERS
        return (
            RecordedCall("call_function", getattr, extra=(attribute,))
            if is_tensor
            else RecordedCall("query", attribute)
        )
    if name == "__set__":
        attribute = func.__self__.__name__  # type: ignore[attr-defined]
        return RecordedCall(
            "refuse",
            f"assigns to a tensor's .{attribute}: use an in-place method such as copy_() instead",
            asks_gradient=attribute == "requires_grad",
        )
    if getattr(torch.Tensor, name, None) is not func:
        return RecordedCall("call_function", func)
    if name in _QUERIES:
        return RecordedCall("query", name)
    if name in _REFUSED:
        return RecordedCall("refuse", _REFUSED[name])
    if name == "requires_grad_":
        return RecordedCall("call_method", name, asks_gradient=True)
    if name in _OPERATORS and num_args == 2 and not has_kwargs:
        return RecordedCall("call_function", _OPERATORS[name])
    if name.startswith("__") and name not in _NOT_OPERATORS:
        if hasattr(operator, name):
            return RecordedCall("call_function", getattr(operator, name))
        if name.startswith("__r") and hasattr(operator, f"__{name[3:]}"):
            return RecordedCall("call_function", getattr(operator, f"__{name[3:]}"), reflected=True)
    return RecordedCall("call_method", name)


def is_data_dependent(func: Callable[..., Any]) -> bool:
    """True when a failure of `func` on fake tensors means that it wanted a tensor's value."""
    return getattr(func, "__name__", "") in _DATA_DEPENDENT


_RANDOM = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli"}
_RANDOM |= {"multinomial", "poisson", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "geometric_"}
_RANDOM |= {"cauchy_", "log_normal_", "gumbel_softmax", "trunc_normal_", "native_dropout"}
_RANDOM |= {"binomial", "_standard_gamma", "_sample_dirichlet"}  # those of torch.distributions
_RANDOM |= {f"fractional_max_pool{n}d{suffix}" for n in (2, 3) for suffix in ("", "_with_indices")}
_DROPOUTS = {"dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"}
_DROPOUTS |= {f"{name}_" for name in _DROPOUTS} | {"dropout1d", "dropout2d", "dropout3d"}


def is_random(call: RecordedCall, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a function or method call, traced in training mode, draws random numbers."""
    name = function_name(call.target)
    if name in _RANDOM:
        return True
    if name in _DROPOUTS:
        probability = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
        return bool(training) and probability > 0
    if call.target is F.scaled_dot_product_attention:
        return float(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)) > 0
    if call.target is F.multi_head_attention_forward:
        probability = float(kwargs["dropout_p"] if "dropout_p" in kwargs else args[10])
        return probability > 0 and bool(kwargs.get("training", True))
    if name in ("rrelu", "rrelu_"):
        return bool(kwargs.get("training", False))
    return False


def is_random_module(module: nn.Module) -> bool:
    """Whether a leaf module draws random numbers in the mode that it is in."""
    if isinstance(module, DropoutNd):
        return module.training and module.p > 0
    if isinstance(module, nn.RNNBase):
        return module.training and module.dropout > 0
    if isinstance(module, nn.RReLU):
        return module.training
    return isinstance(module, (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d))


SPARSE = (F.embedding, F.embedding_bag)


def densely(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any], bool]:
    """The arguments of an embedding without its wish for sparse gradients, and whether it had one."""
    bound = inspect.signature(func).bind(*args, **kwargs)
    if not bound.arguments.get("sparse"):
        return args, kwargs, False
    bound.arguments["sparse"] = False
    return bound.args, bound.kwargs, True


ZEROS: dict[Any, Any] = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    "new_empty": "new_zeros",
}


def take_zeros(module: fx.GraphModule) -> None:
    """Let calls that take memory as it is take zeros.

    A stage also runs on inputs of zeros, before training (`runtime/stage/warm.py`). A model that fills such memory at
    places which it computes, as the inverse of a permutation is made, then leaves some of it as it was, and an index
    that is whatever memory held stops a GPU. In training nobody reads what nobody has written.
    """
    for node in module.graph.nodes:
        called = node.op in ("call_function", "call_method") and node.kwargs.get("out") is None
        zeros = ZEROS.get(node.target) if called else None
        if zeros is not None and (node.kwargs.get("memory_format") is None or zeros is torch.zeros_like):
            node.target = zeros
            node._rename(node.name.replace("empty", "zeros"))
    module.recompile()


def leaf_modules(model: nn.Module) -> set[int]:
    """Ids of the modules that stay whole: torch.nn's own without children or hooks, whose calls build their like."""
    rebuilt: dict[str, nn.Module | None] = {}  # repr -> module built by that call on meta
    return {id(module) for module in model.modules() if _is_leaf(module, rebuilt)}


def _is_leaf(module: nn.Module, rebuilt: dict[str, nn.Module | None]) -> bool:
    kind = type(module)
    if getattr(nn, kind.__name__, None) is not kind or module._modules or "forward" in module.__dict__:
        return False
    if kind.__module__ == nn.Sequential.__module__:  # a container without modules, which is no layer
        return False
    if module._forward_hooks or module._forward_pre_hooks or isinstance(module, Loss):
        return False  # a loss module's repr leaves its options out
    if getattr(module, "sparse", False):
        return False  # an embedding whose gradients are to be dense
    text = repr(module)
    if text not in rebuilt:
        rebuilt[text] = _rebuild(module)
    twin = rebuilt[text]
    return twin is not None and repr(twin) == text and _shape_of(twin) == _shape_of(module)


def _rebuild(module: nn.Module) -> nn.Module | None:
    call = layer_call(module)
    try:
        return None if call is None else call.build()
    except (TypeError, ValueError, AttributeError):
        return None  # the call is not all that the layer was built by: trace through the module


def _shape_of(module: nn.Module) -> tuple:
    """The shapes and plain attributes that two modules of one repr share if they differ in nothing but weights."""
    tensors = [*module._parameters.items(), *module._buffers.items()]
    shapes = {name: None if tensor is None else tensor.shape for name, tensor in tensors}
    plain = {k: v for k, v in module.__dict__.items() if k != "training" and not k.startswith("_")}
    return shapes, {k: v for k, v in plain.items() if isinstance(v, (bool, int, float, str, tuple))}
