"""The request of a user: every wish once, checked, and the records that passes and search read."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..graph.operators.table import workspace_bytes
from ..ir.errors import CaptureError, PlanError
from ..ir.machine.hardware import Hardware
from ..ir.ops import DEVICE, DRAM
from ..ir.precision import BoundaryDtype, GradientDtype, Precision
from ..passes.base import Pass
from ..passes.draft import Draft, KernelChoice, Options, StepBytes
from ..runtime.measure.temporaries import step_bytes
from ..runtime.optimizer.spec import OptimizerSpec, rounds_itself
from ..runtime.optimizer.tiles import steps_in_tiles
from ..runtime.processes.joint_hardware import detect
from ..runtime.processes.torchrun import TorchrunDriver
from ..runtime.state.weights import with_bytes_of
from .arguments import (
    check_agrees,
    check_arguments,
    check_compilable,
    check_compile_stages,
    check_cuda_graphs,
    check_dynamic,
    check_float8,
    check_kernels,
    check_made,
    check_model,
    check_search_s,
    check_steps,
    check_timeout,
    check_types,
    count_of,
    warn_of_mode,
)
from .batches.dummy import dummy_batch
from .batches.dynamic_shapes import describe_tensors, largest, read_dynamic_shapes
from .batches.shape import BatchShape, as_dicts, join_example
from .batches.sizes import BatchSizes
from .capture.guard import TraceOptions
from .capture.inputs import takes_item_count
from .capture.prologue.prologue import Prologue
from .capture.recorder import NeedsValue
from .capture.trace import types_of
from .job.preflight import plain_directories
from .loss import refuse_item_count
from .own_copy import reserve_own_copy
from .packing.borders import most_documents, require_positions, with_unread
from .pipeline import parse_pipeline
from .plan import Plan
from .profile.profile import make_profiler
from .search.attempts import Wishes
from .search.candidate import Candidate
from .stale import level_of_user

IN_PLANS = ("micro_batches", "precision", "gradient_dtype", "boundary_dtype", "max_grad_norm")  # wishes that a plan has


@dataclass(frozen=True)
class ExampleBatch:
    """One global batch as capture takes it, the largest where sizes differ from step to step. `documents`: the most in
    a row of a packed batch, else 0."""

    inputs: Any
    shape: BatchShape
    sizes: BatchSizes | None
    documents: int

    @staticmethod
    def read(model: nn.Module, example_inputs: Any, dynamic_shapes: Any, one: bool = False) -> ExampleBatch:
        """one: whether it is one micro-batch. Raises `PlanError` for what cannot be a batch, or does not describe its
        sizes."""
        example_inputs, listed = join_example(as_dicts(example_inputs))
        refuse_item_count(example_inputs)
        require_positions(example_inputs)
        inputs, documents = with_unread(example_inputs), most_documents(example_inputs)
        if listed and dynamic_shapes is not None:
            raise PlanError("example_inputs is a list of micro-batches; with dynamic_shapes give one batch")
        shape = BatchShape.from_inputs(model, inputs, one and dynamic_shapes is None, listed)
        if dynamic_shapes is None:
            return ExampleBatch(inputs, shape, None, documents)
        sizes = read_dynamic_shapes(model, inputs, dynamic_shapes)
        shape = largest(sizes, shape)
        return ExampleBatch(describe_tensors(model, inputs, shape), shape, sizes, documents)

    def add_prologue(self, model: nn.Module, prologue: Prologue, one: bool) -> ExampleBatch:
        """The same batch with what a prologue makes of it. `one`: whether it is one micro-batch."""
        listed = prologue.rows if prologue.apart else 0
        inputs = prologue.add(self.inputs, listed or 1, listed or 1, prologue.parts)
        return replace(self, inputs=inputs, shape=BatchShape.from_inputs(model, inputs, one, listed))


@dataclass(frozen=True, eq=False)
class Request:
    """The arguments of `compile`.

    model: any nn.Module, also on the meta device; then `weights` names a directory of safetensors. Every module trains
        in its own mode: call `model.train()` first, as `from_pretrained` returns models in evaluation mode. What a
        model that is not on meta takes of a memory is left out of that memory's budget.
    hardware: a `Hardware`, a preset's name, a path to YAML, or "auto" to describe this machine (under torchrun the
        machines of all ranks). Every rank must call `compile`: the first one plans, the others carry its plan out.
    example_inputs: one global batch: dict or tuple of tensors, or of {"shape": [...], "dtype": "..."} for planning. Or
        a list of its micro-batches, each a dict of tensors, which need no common shape: the largest is planned for.
        If left out, the `dummy_inputs` of a transformers model.
    optimizer, lr_scheduler: a torch.optim class, or a partial of one; the same for torch.optim.lr_scheduler.
    param_groups: [{"params": parameters of `model`, or names or patterns ("*.bias"), "weight_decay": 0.0}, ...]: other
        arguments for some parameters, or with "optimizer": partial(torch.optim.Muon, lr=0.02) an optimizer of their
        own. Parameters in no group form the last one, with `optimizer` and its own arguments.
    loss_fn: `loss_fn(output, batch)`; default `output.loss`, or the output itself where that is a scalar.
    loss_weight: what a micro-batch counts in the mean of the losses, `loss_weight(rows) -> number` of its rows of the
        batch. It replaces what is counted otherwise: targets that a cross entropy does not ignore, class weights, sums
        of masks. A micro-batch that counts 0 adds nothing.
    strategy: "auto", a strategy's name, or a pipeline of passes as text. `plan` replays a saved plan instead.
    micro_batches: a divisor of the batch, or "auto".
    precision: "fp32"; "bf16-mixed" or "fp16-mixed" (autocast; fp16 with dynamic loss scaling); "bf16-true" (weights and
        activations in bf16, masters in fp32); "bf16-pure" (no masters: updates are rounded stochastically, unless the
        optimizer does that); "fp8-rowwise", "fp8-tensorwise" or "fp8-rowwise-gw-hp" (as bf16-true, with products of
        linear layers in float8 by torchao's recipe of this name, on cards that have it). "bf16" and "fp16" mean the
        mixed ones, "fp8" the first of its kind.
    gradient_dtype: in which the gradients of low weights are added up where a step has several micro-batches; "compute"
        for their own type, which takes less memory and loses small terms.
    boundary_dtype: of activations between stages that autocast leaves in fp32: "compute" casts them to the low type on
        their way, "fp32" leaves them as they are.
    stop_on_nan: raise `NonFiniteLoss` when a step's loss is NaN or infinite.
    search_s: seconds of work after which "auto" tries nothing new; candidates left are listed as rivals. Work is
        counted by what was done, so a busy machine finds the same plan.
    steps: how many steps the run will have: then the search also ends when all that it could still save in these steps
        is less than the computation that it has taken. In any case it ends where the best plan is within 1 % of what no
        plan undercuts.
    dump: called as `dump(pass name, draft)` after every pass.
    profile: True to time one block of each kind on this machine's own devices, in child processes, instead of computing
        its time from the hardware's rates. Earlier times come from a cache; a path instead of True is its directory.
    ssd_dirs: where a run puts its files, one directory per SSD; default: those of the hardware document. Only plans
        that keep something on SSD need any, and only when they run. ssd_verify: check all bytes read from SSD against
        the bytes written.
    kernels: "written" runs a model's calls one by one; "fused" each chain of pointwise calls as one (norms, rotary
        embeddings, gated activations), on GPUs by a kernel that torch.compile's backend makes and that is tried first.
    compile_stages: run repeated blocks by `torch.compile`: each class of the printed file is compiled
        once for all its blocks. Where that is not possible, a warning names the class and why it runs eagerly.
    cuda_graphs: launch forward and backward of a stage as one each, from graphs captured before the first step. Only
        stages that stay on their GPU, with memory for each micro-batch in flight; `explain` names the others.
    dynamic_shapes: which sizes of the batch differ from step to step, in torch.export's form, each a `Dim` with a max,
        for which memory is planned; a `Dim` by itself is the sequence of a tokenizer's batch, a pair its rows and its
        sequence. `step` then takes any batch in these ranges, or a list of micro-batches.
    timeout_s: after how many seconds without a sign of life a device, or a rank of torchrun, counts as lost. With local
        workers a step may last longer, but none of its instructions.
    check: compare the op graph with the model in eager, forward and backward on the first rows of `example_inputs`, and
        raise `CaptureError` where they differ. Only where weights and batch are in memory, and within 1e11 FLOPs;
        `explain` says whether it was done.
    """

    model: nn.Module
    hardware: Hardware | str | Path
    example_inputs: Any
    optimizer: Any
    lr_scheduler: Any
    param_groups: Sequence[Mapping[str, Any]] | None
    loss_fn: Callable[[Any, Any], Any] | None
    loss_weight: Callable[[Any], Any] | None
    strategy: str
    plan: Plan | str | Path | None
    micro_batches: int | str
    precision: str
    gradient_dtype: GradientDtype
    boundary_dtype: BoundaryDtype
    max_grad_norm: float | None
    seed: int
    weights: str | Path | None
    stop_on_nan: bool
    search_s: float
    steps: int | None
    dump: Callable[[str, Draft], None] | None
    profile: bool | str | Path | None
    ssd_dirs: Sequence[str | Path] | None
    ssd_verify: bool
    kernels: KernelChoice
    compile_stages: bool
    cuda_graphs: bool
    dynamic_shapes: Any
    timeout_s: float
    check: bool = True
    unpacked: str = ""  # which weights are packed in files and whole here, in words
    prologue: Prologue | None = None  # of a model that reads values of its batch

    def settle(self) -> Request:
        """The same request with the wishes that a given plan has decided. Raises `PlanError`, `HardwareError`."""
        check_model(self.model)
        model, unpacked = with_bytes_of(self.model, self.weights)
        check_arguments(model, self.max_grad_norm, self.strategy, self.seed)
        check_types(self.precision, self.gradient_dtype, self.boundary_dtype)
        warn_of_mode(model)
        check_timeout(self.timeout_s)
        check_steps(self.steps)
        check_search_s(self.search_s)
        check_compile_stages(self.compile_stages)
        batch = self.example_inputs
        batch = dummy_batch(model, needs_labels=self.loss_fn is None) if batch is None else batch
        plan = None if self.plan is None else Plan.from_any(self.plan)
        wishes = {name: getattr(self, name) for name in IN_PLANS}
        wishes["precision"] = Precision.of(self.precision).name
        if plan is not None:
            check_agrees(plan, strategy=self.strategy, **wishes)
            wishes = {name: getattr(plan, name) for name in IN_PLANS}
        listed = join_example(as_dicts(batch))[1]
        if listed and wishes["micro_batches"] not in ("auto", listed):
            raise PlanError(
                f"micro_batches={wishes['micro_batches']}, but example_inputs is a list of {listed} micro-batches"
            )
        wishes["micro_batches"] = listed or wishes["micro_batches"]
        directories = plain_directories(self.ssd_dirs)
        settled = {**wishes, "example_inputs": batch, "plan": plan, "ssd_dirs": directories}
        request = replace(self, model=model, unpacked=unpacked, **settled)
        check_float8(request.types, request.machine, self.compile_stages)
        check_cuda_graphs(self.cuda_graphs, self.compile_stages, request.machine)
        check_kernels(self.kernels, request._decided_passes, plan, self.compile_stages)
        if request.batch.sizes is not None:
            asked = {"cuda_graphs=True": self.cuda_graphs, "compile_stages=True": self.compile_stages}
            check_dynamic({**asked, 'kernels="fused"': self.kernels == "fused"})
        if plan is not None:
            check_made(plan, request._decided_passes)
        request._require_count()
        return request

    def _require_count(self) -> None:
        if self.count is None and self.candidate is not None and not self.candidate.is_synchronous:
            raise PlanError(
                f'micro_batches="auto" with strategy={self.strategy!r}: in asynchronous training every micro-batch, or '
                "every few of them, is a mini-batch with updates of its own, so that their number is yours to choose; "
                f"say, for instance, micro_batches={self.batch.shape.size}"
            )

    @cached_property
    def machine(self) -> Hardware:
        """The hardware without the memory that the user's own copy of the model takes."""
        machine = detect() if self.hardware == "auto" else Hardware.from_any(self.hardware)
        # Under torchrun the ranks' copies are counted together.
        return machine if TorchrunDriver.is_present() else reserve_own_copy(machine, self.model)

    @property
    def device_kind(self) -> str:
        return self.machine.devices[0].kind

    @cached_property
    def batch(self) -> ExampleBatch:
        batch = ExampleBatch.read(self.model, self.example_inputs, self.dynamic_shapes, self._is_one)
        return batch if self.prologue is None else batch.add_prologue(self.model, self.prologue, self._is_one)

    @property
    def _is_one(self) -> bool:
        """Whether a batch is one micro-batch, as the user says."""
        return self.micro_batches == 1 and self.micro_batches is not True

    def with_prologue(self, error: NeedsValue) -> Request:
        """The same request for a model whose trace ended in this error, as it reads values of the batch. Raises the
        error where no prologue can read them."""
        if self.prologue is not None or self.batch.sizes is not None:
            raise error
        count = self.loss_weight is None and takes_item_count(self.model)
        kind, types = self.device_kind, types_of(self.types)
        options = TraceOptions(loss_fn=self.loss_fn, device_kind=kind, count_items=count, **types)
        batch, apart = self.batch, bool(join_example(as_dicts(self.example_inputs))[1])
        try:
            found = Prologue.find(self.model, batch.inputs, batch.shape.size, options, error, self._is_one, apart)
        except CaptureError as miss:
            if self.micro_batches != "auto" or apart:
                raise
            whole = replace(self, micro_batches=1).with_prologue(error)
            warnings.warn(
                f'micro_batches="auto" means one micro-batch: {str(miss).splitlines()[0]}', stacklevel=level_of_user()
            )
            return whole
        return replace(self, prologue=found)

    def form_request(self, micro_batch: Mapping[str, Any], count: int) -> Request:
        """The same request for batches of `count` micro-batches of this form."""
        assert self.prologue is not None
        order = [name for name in self.prologue.example if name in micro_batch]  # that of the programs' inputs
        micro_batch = {**{name: micro_batch[name] for name in order}, **micro_batch}
        return replace(
            self, example_inputs=[micro_batch] * count, prologue=self.prologue.form_prologue(micro_batch, count)
        )

    @property
    def given_plan(self) -> Plan | None:
        """The plan that is given, read."""
        return None if self.plan is None else Plan.from_any(self.plan)

    @cached_property
    def count(self) -> int | None:
        """The number of micro-batches; None where the search chooses it."""
        return count_of(self.micro_batches, self.batch.shape)

    @cached_property
    def candidate(self) -> Candidate | None:
        """The strategy; None where the search chooses it."""
        return None if self.strategy == "auto" else Candidate.parse(self.strategy, self.machine.num_devices)

    @property
    def _decided_passes(self) -> tuple[Pass, ...]:
        """Those of the given plan or strategy; none where the search chooses them."""
        if self.given_plan is not None:
            return parse_pipeline(self.given_plan.passes, self.machine.num_devices)
        return () if self.candidate is None else self.candidate.passes

    @cached_property
    def types(self) -> Precision:
        return Precision.of(self.precision)

    @cached_property
    def _stepped_dtype(self) -> torch.dtype | None:
        """The dtype in which the optimizer steps parameters; None where they keep their own."""
        low = self.types.low_dtype
        return low if low is None or (rounds_itself(self.optimizer) and self.types.is_pure) else torch.float32

    @cached_property
    def optimizer_spec(self) -> OptimizerSpec:
        """Raises `PlanError` for an optimizer that cannot round in portions where nothing else does."""
        spec = OptimizerSpec.from_callable(
            self.optimizer,
            self.lr_scheduler,
            model=self.model,
            param_groups=self.param_groups,
            dtype=self._stepped_dtype,
        )
        if self.types.is_pure and not spec.rounds:
            spec.require_portions()
        return spec

    @cached_property
    def options(self) -> Options:
        """The wishes that passes read."""
        spec = self.optimizer_spec
        return Options(
            precision=self.precision,
            gradient_dtype=self.gradient_dtype,
            boundary_dtype=self.boundary_dtype,
            optimizer_rounds=spec.rounds,
            max_grad_norm=self.max_grad_norm,
            profiler=make_profiler(self.profile, self.precision),
            cuda_graphs=self.cuda_graphs,
            compile_stages=self.compile_stages,
            kernels=self.kernels,
            step_bytes_of=_step_bytes(spec, self.types.is_pure, self.device_kind),
            **_optimizer_facts(spec, self.model, self._stepped_dtype),
        )

    @property
    def wishes(self) -> Wishes:
        """The wishes that the search reads."""
        is_open = self.candidate is None and self.given_plan is None
        return Wishes(
            self.candidate,
            self.count,
            self.batch.shape.size,
            self.options,
            self.dump,
            self.given_plan,
            self.search_s,
            steps=self.steps,
            require=check_compilable if self.compile_stages and is_open else None,
        )


def _optimizer_facts(optimizer: OptimizerSpec, model: nn.Module, own: torch.dtype | None) -> dict[str, Any]:
    """The fields of `Options` about the optimizer. Bytes of states are of each parameter by itself, unless all have the
    same for each element."""

    @functools.cache
    def state_bytes_of(name: str, shape: tuple[int, ...], dtype: str) -> int:
        return optimizer.state_bytes({name: shape}, getattr(torch, dtype))

    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    kinds = {name: str(own or p.dtype).removeprefix("torch.") for name, p in trained.items()}
    found = {name: state_bytes_of(name, tuple(p.shape), kinds[name]) for name, p in trained.items()}
    numel = sum(p.numel() for p in trained.values())
    each = sum(found.values()) / numel if numel else 0.0
    whole = optimizer.whole_paths()
    is_even = not whole and all(found[name] == each * p.numel() for name, p in trained.items())
    return {
        "state_bytes_per_param": each,
        "state_bytes_of": None if is_even else state_bytes_of,
        "takes_whole": (lambda name: not optimizer.is_elementwise(name)) if whole else None,
        "whole_optimizer": whole[0] if whole else "",
        "optimizer_tiles": steps_in_tiles(optimizer),
    }


def _step_bytes(optimizer: OptimizerSpec, is_pure: bool, device_kind: str) -> StepBytes:
    """The bytes that an update takes in a memory, where devices are of this kind."""
    kinds, rounds = {DEVICE: device_kind, DRAM: "cpu"}, is_pure and not optimizer.rounds

    @functools.cache
    def bytes_of(rows: tuple[tuple[str, tuple[int, ...], str], ...], memory: str) -> int:
        params = [(name, shape, getattr(torch, dtype)) for name, shape, dtype in rows]
        held = workspace_bytes if kinds[memory] == "cuda" else None
        return step_bytes(optimizer, params, kinds[memory], rounds, held)

    return lambda rows, memory: bytes_of(tuple(rows), memory)
