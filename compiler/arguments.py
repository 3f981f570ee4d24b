"""The arguments of `compile` that can be judged before anything is captured: what is wrong is said at once."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from ..ir import ops
from ..ir.errors import PlanError
from ..ir.machine.call_mix import FP8
from ..ir.machine.hardware import Hardware
from ..ir.precision import BoundaryDtype, GradientDtype, Precision
from ..ir.program import Program, graphs_of_stages, no_graphs_text, reasons_without_graphs
from ..passes.base import Pass
from ..passes.draft import KernelChoice
from ..passes.rewrite.fuse_pointwise import FusePointwise
from ..passes.table import PASSES
from ..runtime.quantised.libraries import float8
from .batches.shape import BatchShape
from .plan import Decisions, Plan

LEAST_TIMEOUT_S = 1.0


_WRAPPERS = (
    ("torch.nn.parallel", "DataParallel"),
    ("torch.nn.parallel", "DistributedDataParallel"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("deepspeed", "DeepSpeedEngine"),
)


def check_model(model: Any) -> None:
    """Raise `PlanError` for what is no model, or one that something else divides, or whose weights have no shape."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"model must be an nn.Module; found {type(model).__name__}")
    wrappers = tuple(filter(None, (_imported_type(*place) for place in _WRAPPERS)))
    parts = _imported_type("torch.distributed.tensor", "DTensor")
    for path, module in model.named_modules():
        what = f"model: {path!r}" if path else "model: it"
        if isinstance(module, wrappers):
            raise PlanError(
                f"{what} is wrapped in {type(module).__name__}; pass the model as it was before: Penstock itself "
                "divides batches, weights and work over the devices"
            )
        is_exported = isinstance(module, fx.GraphModule) and "eval" in vars(module)
        if is_exported or isinstance(module, torch.jit.ScriptModule):
            raise PlanError(
                f"{what} was compiled by torch.jit or torch.export, which leaves no Python code that can be read; pass "
                "the original module (load_state_dict takes the weights over)"
            )
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if is_lazy(tensor):
                raise PlanError(
                    f"{what} has {name!r} without a shape, as lazy modules have it until they have run: call the model "
                    "once on real inputs before compile"
                )
            if parts is not None and isinstance(tensor, parts):
                raise PlanError(
                    f"{what} has {name!r} as a DTensor, in parts, as fully_shard or parallelize_module makes it; pass "
                    "the model as it was before: Penstock itself divides weights and work over the devices"
                )


def _imported_type(module: str, name: str) -> Any:
    """An object of a module that the script has imported; None where it has not."""
    return getattr(sys.modules.get(module), name, None)


def check_arguments(model: nn.Module, max_grad_norm: Any, strategy: Any, seed: Any) -> None:
    if not any(p.requires_grad for p in model.parameters()):
        raise PlanError(f"model: {type(model).__name__} has no parameter that requires a gradient: nothing to train")
    _check_real(model)
    if not isinstance(strategy, str):
        raise PlanError(f"strategy={strategy!r}; it is a name or a pipeline of passes as text, a Plan goes to plan=...")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise PlanError(f"seed={seed!r}; it is a whole number")
    is_number = isinstance(max_grad_norm, (int, float)) and not isinstance(max_grad_norm, bool)
    if max_grad_norm is not None and not (is_number and 0 < max_grad_norm < math.inf):
        raise PlanError(f"max_grad_norm={max_grad_norm!r}; it must be a positive number, or None for no clipping")


def check_types(precision: Any, gradient_dtype: Any, boundary_dtype: Any) -> None:
    Precision.of(precision)
    if gradient_dtype not in get_args(GradientDtype):
        raise PlanError(
            f'gradient_dtype={gradient_dtype!r}; it is "fp32", or "compute" to add up in the type that gradients have'
        )
    if boundary_dtype not in get_args(BoundaryDtype):
        raise PlanError(
            f'boundary_dtype={boundary_dtype!r}; it is "compute", or "fp32" to send what autocast leaves in fp32 so'
        )


def check_float8(precision: Precision, machine: Hardware, compile_stages: bool) -> None:
    """Raise `PlanError` where products in float8 are asked for, and a GPU has none, torchao is not installed, or
    torch.compile would have to read them."""
    if not precision.float8:
        return
    if compile_stages:
        raise PlanError(
            f'compile_stages=True with precision="{precision.name}": torch.compile does not read the products in '
            "float8, whose casts are kernels anyway. Leave one of them out"
        )
    for device in machine.devices:
        if device.kind == "cuda" and FP8 not in device.peak_flops:
            near = "bf16-true" if "bf16" in device.peak_flops else "fp16-mixed"
            raise PlanError(
                f'precision="{precision.name}" needs products in float8, and {device.name} of {machine.name} has '
                f'{", ".join(device.peak_flops)}; the nearest is precision="{near}"'
            )
    float8()


def _check_real(model: nn.Module) -> None:
    found = [name for name, p in model.named_parameters() if p.is_complex() and p.requires_grad]
    if found:
        raise PlanError(
            f"model: {', '.join(found[:4])}{' and more' if len(found) > 4 else ''}: a complex parameter cannot be "
            "trained here. Make it real, with a last dimension of 2, and use torch.view_as_complex in forward"
        )


def warn_of_mode(model: nn.Module) -> None:
    if not any(module.training for module in model.modules()):
        warnings.warn(
            f"{type(model).__name__} is in evaluation mode as a whole, as from_pretrained returns it, and trains in "
            "it, as in eager PyTorch: dropout drops nothing, and BatchNorm neither uses nor updates the batch's "
            "statistics. Call model.train() before compile if they should.",
            stacklevel=5,
        )


def check_timeout(timeout_s: Any) -> None:
    is_number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not (is_number and LEAST_TIMEOUT_S <= timeout_s < math.inf):
        raise PlanError(f"timeout_s={timeout_s!r}; it is a number of seconds, at least {LEAST_TIMEOUT_S:g}")


def check_steps(steps: Any) -> None:
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise PlanError(f"steps={steps!r}; it is the number of steps of the run, 1 or more, or None where it is open")


def check_search_s(search_s: Any) -> None:
    if not isinstance(search_s, (int, float)) or isinstance(search_s, bool) or not search_s >= 0:
        raise PlanError(
            f"search_s={search_s!r}; it is seconds of work, 0 or more: 0 keeps the first plan that fits, 33 is usual"
        )


def check_agrees(plan: Plan, **given: Any) -> None:
    """Raise `PlanError` for an argument that contradicts the plan: it would be ignored in silence."""
    for name, value in given.items():
        decided = getattr(plan, name)
        if value not in ("auto", "fp32", None, decided):
            raise PlanError(f"{name}={value!r}, but plan={plan.hash} has {name}={decided!r}; leave one of them out")


def check_made(plan: Plan, passes: Sequence[Pass]) -> None:
    """Raise `PlanError` for a decision that none of the plan's passes makes: it would be ignored in silence."""
    made = {name for p in passes for name in p.fields()}
    for name, field in Decisions.model_fields.items():
        value = getattr(plan.decisions, name)
        if name in made or field.is_required() or value == field.get_default():
            continue
        makers = [kind.name for kind in PASSES.values() if name in kind.fields()]
        raise PlanError(
            f"plan={plan.hash}: decisions.{name} is {value!r}, which none of its passes makes; add "
            f"{' or '.join(makers)} to `passes`, or leave {name} out"
        )


def count_of(micro_batches: int | str, shape: BatchShape) -> int | None:
    if micro_batches == "auto":
        return None
    if not isinstance(micro_batches, int) or isinstance(micro_batches, bool):
        raise PlanError(f'micro_batches={micro_batches!r}; it is a whole number or "auto"')
    shape.check_divisible(micro_batches)
    return micro_batches


def check_compile_stages(compile_stages: object) -> None:
    """Raise `PlanError` for anything but True and False: modes of torch.compile are not offered."""
    if not isinstance(compile_stages, bool):
        raise PlanError(f"compile_stages={compile_stages!r}; it is True or False")


def check_kernels(kernels: object, passes: Sequence[Pass], plan: Plan | None, compile_stages: bool) -> None:
    """Raise `PlanError` for an unknown kind of kernels, for fused ones that the given plan has not, and for two kinds
    at once. `passes`: those of the plan or strategy, none where the search chooses them."""
    if kernels not in get_args(KernelChoice):
        raise PlanError(f'kernels={kernels!r}; it is "written", or "fused" for chains of pointwise calls as one kernel')
    has_chains = any(isinstance(p, FusePointwise) for p in passes)
    if plan is not None and kernels == "fused" and not has_chains:
        raise PlanError(f'kernels="fused", but plan={plan.hash} runs calls as written; leave one of them out')
    if compile_stages and (kernels == "fused" or has_chains):
        raise PlanError(
            'compile_stages=True with kernels="fused" or fuse-pointwise: compiled blocks choose their kernels '
            "themselves. Leave one of them out"
        )


def check_cuda_graphs(cuda_graphs: object, compile_stages: bool, machine: Hardware) -> None:
    """Raise `PlanError` where CUDA graphs are asked for and cannot be."""
    if not isinstance(cuda_graphs, bool):
        raise PlanError(f"cuda_graphs={cuda_graphs!r}; it is True or False")
    others = [device.name for device in machine.devices if device.kind != "cuda"]
    if cuda_graphs and others:
        raise PlanError(f"cuda_graphs=True needs CUDA devices, and {others[0]} is none. Leave it out")
    if cuda_graphs and compile_stages:
        raise PlanError(
            "cuda_graphs=True with compile_stages=True: what torch.compile makes was never tried in a graph. Leave "
            "one of them out"
        )


def check_dynamic(asked: Mapping[str, bool]) -> None:
    """Raise `PlanError` for an option that needs fixed sizes, beside dynamic ones. `asked`: by option, whether it is
    asked for."""
    for option, is_asked in asked.items():
        if is_asked:
            raise PlanError(
                f"{option} with dynamic_shapes: what it makes is for one size of each tensor. Leave one of them out"
            )


def check_graphable(programs: Sequence[Program]) -> None:
    """Raise `PlanError` for programs of which CUDA graphs can be made of no stage."""
    if any(node.target is ops.backward_input for program in programs for node in program.ops()):
        raise PlanError(
            "cuda_graphs=True with a schedule that splits backward: its halves share a graph of autograd's, which is "
            'in no CUDA graph. Leave it out, or use a strategy whose backward is whole, such as "mobius"'
        )
    if programs[0].interface.asynchronous:
        raise PlanError(
            "cuda_graphs=True in asynchronous training: a stage runs on versions of its weights, at other places. "
            "Leave it out"
        )
    if not any(graphs_of_stages(program) for program in programs):
        raise PlanError(
            no_graphs_text({s: reason for program in programs for s, reason in reasons_without_graphs(program).items()})
        )


def check_compilable(programs: Sequence[Program]) -> None:
    """Raise `PlanError` where compiled stages cannot keep what the programs promise."""
    if any(node.target is ops.backward_input for program in programs for node in program.ops()):
        raise PlanError(
            "compile_stages=True with a schedule that splits backward: the backward of a compiled block is one call. "
            'Leave it out, or use a strategy whose backward is whole, such as "mobius"'
        )
    if any(spec.pointwise_again for program in programs for spec in program.interface.stages.values()):
        raise PlanError(
            "compile_stages=True with a plan in which backward computes pointwise results again: compiled blocks "
            "choose what they save. Leave one of them out: recompute-pointwise, or compile_stages"
        )
