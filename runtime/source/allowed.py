"""The names that a verified file may call and read: torch's functions and methods that compute on tensors, and few
others.

The list is torch's own (`torch.overrides`): every function through which a recorded model can reach a graph, less those
that touch files, memory, hooks or Python objects; and the functions that make tensors.
"""

from __future__ import annotations

import enum
import functools
import math
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.overrides import get_overridable_functions

from .. import functions
from ..modules import Stage
from ..torch_names import OpOverload, OpOverloadPacket
from .homes import HOMES

_DENIED = (
    "_*", "apply_", "autocast", "backward", "batch_norm_*", "choose_qparams*", "*data_ptr", "fake_quantize*",
    "fbgemm_*", "fused_moving*", "int_repr", "is_distributed", "map*_", "miopen_*", "mkldnn_*", "module_load", "numpy",
    "pin_memory", "q_*", "qscheme", "quantize*", "record_stream", "register_*", "resize*", "retain_grad", "set_",
    "share_memory_", "*storage", "storage_type", "sparse_resize*", "to_mkldnn", "triplet_margin_with_distance_loss",
)  # fmt: skip
# Functions that no tensor among their arguments could override: they make tensors or look at types.
_MORE_FUNCTIONS = {
    "torch": (
        "arange", "as_strided", "as_tensor", "bartlett_window", "blackman_window", "broadcast_shapes", "can_cast",
        "complex", "empty", "empty_permuted", "empty_strided", "eye", "full", "hamming_window", "hann_window",
        "is_floating_point", "is_grad_enabled", "is_tensor", "kaiser_window", "linspace", "logspace", "normal", "ones",
        "promote_types", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm",
        "result_type", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "vander", "zeros",
        "_grouped_mm", "_sym_sqrt",
    ),
    "F": ("grouped_mm", "hardsigmoid", "hardswish", "scaled_mm", "sigmoid", "tanh", "upsample"),
    "functions": tuple(functions.__all__),
    "torch.fft": ("fftfreq", "rfftfreq"),
    "operator": (
        "abs", "add", "and_", "contains", "eq", "floordiv", "ge", "getitem", "gt", "iadd", "iand", "ifloordiv",
        "ilshift", "imatmul", "imod", "imul", "index", "invert", "ior", "ipow", "irshift", "is_", "is_not", "isub",
        "itruediv", "ixor", "le", "lshift", "lt", "matmul", "mod", "mul", "ne", "neg", "not_", "or_", "pos", "pow",
        "rshift", "sub", "truediv", "truth", "xor",
    ),
}  # fmt: skip
_MORE_METHODS = {
    "is_contiguous", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "size", "stride", "unflatten",
}  # fmt: skip
_ARITHMETIC = {f"__{prefix}{name}__" for prefix in ("", "r") for name in (
    "add", "and", "div", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow", "rshift", "sub", "truediv", "xor",
)}  # fmt: skip
# ATen ops, which a model may call as torch.ops.aten.<name>, are allowed by their schema: they take tensors and plain
# data. Ops with these names are refused, and so are private ops other than these, which only compute.
OP_HOMES = ("aten", "prims")
_DENIED_OPS = ("from_file", "*nested*", "*pack*", "sparse*", "cudnn_*", "*_backward")
_PRIVATE_OPS = (
    "_adaptive_avg_pool*", "_assert_async", "_assert_tensor_metadata", "_cdist_forward", "_conj*", "_convolution",
    "_embedding_bag", "_fft_*", "_grouped_mm", "_log_softmax", "_native_batch_norm_legit*", "_neg_view",
    "_prelu_kernel", "_safe_softmax", "_scaled_dot_product_*", "_shape_as_tensor", "_softmax", "_to_copy", "_trilinear",
    "_unsafe_view", "_upsample_*", "_weight_norm*",
)  # fmt: skip
_PLAIN = re.compile(
    r"(Optional\[|List\[)*(Tensor|int|SymInt|float|bool|number|str|ScalarType|Layout|Device|MemoryFormat|Generator)\]*"
)

BUILTINS = (
    "abs", "bool", "complex", "divmod", "float", "frozenset", "int", "len", "list", "max", "min", "pow", "range",
    "round", "set", "slice", "sum", "tuple",
)  # fmt: skip
TYPES = ("bool", "complex", "float", "int")  # which may be values
VALUE_ATTRIBUTES = {
    "T", "mT", "H", "mH", "real", "imag", "data", "grad", "device", "dtype", "shape", "ndim",  # of tensors
    "type", "index",  # of devices
    "min", "max", "eps", "tiny",  # of torch.finfo
    "values", "indices",  # of torch.max and its like
}  # fmt: skip
CONSTRUCTORS = (torch.device, torch.Size, torch.finfo, torch.iinfo)
CONTEXTS = (torch.no_grad, torch.enable_grad, torch.autocast)
MODE = ("training", "device", "recomputing")  # what a stage has beside its members


@functools.cache
def _functions() -> frozenset[int]:
    """The ids of the functions that a file may call."""
    known = {id(function) for group in get_overridable_functions().values() for function in group}
    found: set[int] = set()
    for home, module in HOMES:
        for name, value in vars(module).items():
            plain = vars(module).get(name[:-1]) if name.endswith("_") else value  # `relu_` is as good as `relu`
            computes = id(plain) in known and not _is_like(name, _DENIED)
            if callable(value) and (computes or name in _MORE_FUNCTIONS.get(home, ()) or module is math):
                found.add(id(value))
    return frozenset(found)


@functools.cache
def methods() -> frozenset[str]:
    """The names of the methods of tensors that a file may call."""
    named = {getattr(method, "__name__", "") for method in get_overridable_functions()[torch.Tensor]}
    return frozenset({name for name in named if name and not _is_like(name, _DENIED)} | _MORE_METHODS | _ARITHMETIC)


def _is_like(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _is_op(op: OpOverload) -> bool:
    schema = op._schema
    home, _, name = schema.name.partition("::")
    if home not in OP_HOMES:
        return False
    if name.startswith("_"):
        return name in _ARITHMETIC or _is_like(name, _PRIVATE_OPS)
    if _is_like(name, (*_DENIED, *_DENIED_OPS)):
        return False
    types = [str(argument.type) for argument in schema.arguments]
    makes = name in _MORE_FUNCTIONS["torch"]
    return (makes or any("Tensor" in kind for kind in types)) and all(_PLAIN.fullmatch(kind) for kind in types)


def is_function(thing: Any) -> bool:
    """Whether a file may call this function of torch, Python's math or its operators, or this ATen op."""
    if isinstance(thing, OpOverload):
        return _is_op(thing)
    if isinstance(thing, OpOverloadPacket):
        return all(_is_op(getattr(thing, overload)) for overload in thing.overloads())
    return id(thing) in _functions()


def is_constant(thing: Any) -> bool:
    """Whether what a dotted name stands for may be a value: `torch.float32`, `math.pi`, a member of an enum."""
    return isinstance(thing, torch.dtype | torch.layout | torch.memory_format | enum.Enum | float)


def is_layer(thing: Any) -> bool:
    """Whether a file may build modules of this class: one of torch's own that computes, so that it holds no others."""
    return (
        isinstance(thing, type)
        and issubclass(thing, nn.Module)
        and thing.__module__.startswith("torch.nn.modules.")
        and thing.__module__ != nn.ModuleList.__module__
        and getattr(nn, thing.__name__, None) is thing
    )


@functools.cache
def _reserved_names() -> frozenset[str]:
    of_tensors = {name for name in dir(torch.Tensor) if name not in methods() and name not in VALUE_ATTRIBUTES}
    layers = [thing for thing in vars(nn).values() if is_layer(thing)]
    of_layers = {name for layer in layers for name in dir(layer) if callable(getattr(layer, name))}
    return frozenset({*of_tensors, *of_layers})


def is_member(name: str) -> bool:
    """Whether a part of the model may be an attribute called so: it hides, and reaches, nothing that modules and
    tensors have. A file reaches other parts by index."""
    return not name.startswith("__") and is_key(name) and name not in _reserved_names()


@functools.cache
def is_key(name: str) -> bool:
    """Whether a part of the model that is reached by index may be called so."""
    return not hasattr(Stage(), name)
