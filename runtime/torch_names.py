"""Every private name of PyTorch that Penstock uses, under a public one: a release that changes it fails in this file.

Most belong to modules that `import torch` loads. The modules of `LATE` take long to load, and are imported at the first
use of a name. Functions call what builds of PyTorch without GPUs or `torch.distributed` lack.
"""

# ruff: noqa: F401

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch._dispatch.python import enable_python_dispatcher  # symbolic sizes stay symbolic
from torch._functorch import apis as functorch_apis
from torch._ops import (
    OpOverload,  # an ATen operator
    OpOverloadPacket,  # all overloads of an ATen operator
)
from torch._ops import _OpNamespace as OpNamespace  # torch.ops.aten
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,  # reads a value
    DynamicOutputShapeException,  # has a size by it
    FakeTensor,  # a tensor without memory
    FakeTensorMode,  # where tensors have no memory
    unset_fake_temporarily,  # real tensors in that mode
)
from torch.amp.autocast_mode import _enter_autocast as enter_autocast  # autocast as a node of a graph
from torch.amp.autocast_mode import _exit_autocast as exit_autocast  # its end
from torch.autograd.graph import _engine_run_backward as engine_run_backward  # a backward from edges, into some inputs
from torch.export.dynamic_shapes import _DerivedDim as DerivedDim  # a Dim computed from another one
from torch.export.dynamic_shapes import _DimHint as DimHint  # Dim.AUTO and its like
from torch.export.dynamic_shapes import _DimHintType as DimHintType  # which of these
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule  # compiles its code at the first use
from torch.fx.experimental.proxy_tensor import make_fx  # the calls of a function, as a graph
from torch.library import _scoped_library as scoped_library  # kernels that are taken back
from torch.nn import _reduction as reduction  # the legacy arguments of losses
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # all modules of batch norm
from torch.nn.modules.batchnorm import _NormBase as NormBase  # modules with running statistics
from torch.nn.modules.dropout import _DropoutNd as DropoutNd  # all modules of dropout
from torch.nn.modules.loss import _Loss as Loss  # all modules of losses
from torch.optim import optimizer as optimizer_module
from torch.utils import checkpoint
from torch.utils._python_dispatch import (
    TorchDispatchMode,  # sees each ATen call
    is_traceable_wrapper_subclass,  # of quantised
)
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes  # none of these modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as current_dispatch_modes  # those that are on
from torch.utils._pytree import (
    tree_flatten,  # the leaves of nested containers, and what holds them
    tree_leaves,
    tree_map,  # a function of each leaf
    tree_map_only,  # of leaves of one type
)

from ..ir.errors import PlanError

if TYPE_CHECKING:
    from torch._dynamo import exc as dynamo_errors
    from torch._dynamo import lookup_backend
    from torch._dynamo.source import ConstantSource
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
    from torch.utils._sympy import functions as size_functions
    from torch.utils._sympy.printers import PythonPrinter
    from torch.utils._triton import has_triton_package

LATE = {  # a public name: its module and its name there
    "ConstantSource": ("torch._dynamo.source", "ConstantSource"),  # whence a symbolic size comes
    "PythonPrinter": ("torch.utils._sympy.printers", "PythonPrinter"),  # a size as Python text
    "dynamo_errors": ("torch._dynamo.exc", ""),  # what torch.compile raises
    "has_triton_package": ("torch.utils._triton", "has_triton_package"),  # whether torch.compile can write kernels
    "lookup_backend": ("torch._dynamo", "lookup_backend"),  # a backend of torch.compile by name
    "size_functions": ("torch.utils._sympy.functions", ""),  # what is computed of symbolic sizes
    "stage_backward_input": ("torch.distributed.pipelining._backward", "stage_backward_input"),  # half of a backward
    "stage_backward_weight": ("torch.distributed.pipelining._backward", "stage_backward_weight"),  # the other half
}


def __getattr__(name: str) -> Any:
    if name not in LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = LATE[name]
    try:
        found = import_module(module)
        return getattr(found, attribute) if attribute else found
    except (ImportError, AttributeError) as error:
        raise PlanError(
            f"torch {torch.__version__} has no {module}{attribute and '.'}{attribute}, which Penstock needs for what "
            "was asked: take a release that it is tested with (README.md)"
        ) from error


# Functions that models may call; records in `graph/operators` name the operators of ATen.
assert_async = torch._assert_async  # a check of a tensor's value, on its device
CHECKS = (assert_async, torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg)
# Conditions of checks, for which fake tensors want values -> the functions that compute the same without.
CONDITIONS: dict[Any, Any] = {torch._is_all_true: torch.all, torch._is_any_true: torch.any}
foreach_copy_ = torch._foreach_copy_  # many copies in one call
grouped_mm = torch._grouped_mm  # products of experts, each of its rows
set_grad_enabled = torch._C._set_grad_enabled  # torch.no_grad as a node of a graph

DisableAutocast = torch._C._DisableAutocast  # the body runs without autocast
DisableTorchFunction = torch._C.DisableTorchFunction  # the body's calls are not seen by modes of functions
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass  # nor by subclasses of tensors
FunctionBase = torch._C._FunctionBase  # a node of autograd that Python made
will_engine_execute_node = torch._C._will_engine_execute_node  # whether the backward under way comes to a node
is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor  # inside of vmap and its like
has_kernel_for_dispatch_key = torch._C._dispatch_has_kernel_for_dispatch_key  # whether an operator has one of its own
dispatch_key_parse = torch._C._dispatch_key_parse  # a dispatch key by name
dispatch_keyset_full_after = torch._C._dispatch_keyset_full_after  # the keys below one
include_dispatch_key = torch._C._dispatch_tls_set_dispatch_key_included  # switch a key on, in this thread
number_of_entries = torch.Tensor._nnz  # of a tensor by coordinates
storage_of_weak_ptr = torch.UntypedStorage._new_with_weak_ptr  # a storage by what does not keep it

FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")  # of calls that fail on fake tensors

# Attributes that are replaced for a while: the owner and the attribute's name.
CALL_OF_MODULES = (torch.nn.Module, "_call_impl")  # of `__call__`, Python would tell each of thousands of subclasses
BATCHED = (functorch_apis, "vmap_impl")  # what a call of torch.vmap(function) comes to
CHECKED = (torch, "_check_tensor_all_with")  # what torch._check_tensor_all comes to
CONVERTED = (torch.nn.Module, "_apply")  # what `module.to`, `module.half` and the like come to
# What torch.utils.checkpoint comes to: in 2.13 the first of these, in 2.15 the longer name.
CHECKPOINTED = (checkpoint, max(n for n in vars(checkpoint) if n.startswith("_checkpoint_without_reentrant_generator")))
FOREACH_DEVICES = (optimizer_module, "_get_foreach_kernels_supported_devices")  # of optimizers without loops
FOREACH_TYPES = (optimizer_module, "_foreach_supported_types")  # of their parameters


def clear_cublas_workspaces() -> None:
    """Give back the memory of the library of products of a GPU of CUDA."""
    torch._C._cuda_clearCublasWorkspaces()


def set_allocator_settings(settings: str) -> None:
    """Change settings of PyTorch's allocator of GPU memory, as its environment variable has them."""
    torch._C._accelerator_setAllocatorSettings(settings)


def gloo_options() -> Any:
    """New options of a process group of gloo."""
    return torch.distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]


def gather_into(group: Any, whole: torch.Tensor, own: torch.Tensor) -> Any:
    """The work of NCCL's gather into one tensor, in place if `own` is this member's part of it."""
    return group._allgather_base(whole, own)


def sum_into(group: Any, total: torch.Tensor, rows: torch.Tensor) -> Any:
    """The work of NCCL's sum of this member's part of `rows` over all members."""
    return group._reduce_scatter_base(total, rows, torch.distributed.ReduceScatterOptions())


@contextmanager
def one_launch(group: Any) -> Iterator[None]:
    """Launch the body's calls of a communicator of NCCL together; the current stream then waits for them."""
    group._start_coalescing()
    yield
    group._end_coalescing().wait()


def default_store() -> Any:
    """The store of the default process group."""
    return torch.distributed.distributed_c10d._get_default_store()
