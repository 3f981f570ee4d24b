"""`compile(model, hardware, ...)`: capture, search, print. Pure: unless told to `profile`, it touches no device and
starts no process. On ranks of torchrun the first one searches."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from ..graph.follow.coupling import coupled_miss, find_facts, scaled_loss
from ..graph.follow.rows import MEAN_OVER_ROWS, RowFacts
from ..graph.operators.workspace.table import workspace_bytes
from ..graph.opgraph import OpGraph
from ..ir.errors import DoesNotFit, PassError, PlanError
from ..ir.machine.hardware import Hardware
from ..ir.ops import DEVICE, DRAM
from ..ir.precision import BoundaryDtype, GradientDtype, Precision
from ..ir.program import HookCall, Interface, Sizes, StageSpec
from ..passes.draft import Draft, Options, StepBytes
from ..passes.schedule.schedule_async import ScheduleAsync
from ..runtime.measure.temporaries import step_bytes
from ..runtime.model_names import ties_of
from ..runtime.optimizer.extrapolate import require_rule
from ..runtime.optimizer.hooks import hooked
from ..runtime.optimizer.spec import OptimizerSpec, rounds_itself
from ..runtime.optimizer.tiles import steps_in_tiles
from ..runtime.processes.joint_hardware import detect
from ..runtime.processes.setup import TIMEOUT_S
from ..runtime.processes.torchrun import TorchrunDriver
from ..runtime.quantised.model import with_bytes
from ..runtime.source.trust import OWN
from ..runtime.state.quantised import quantised_layers
from ..runtime.state.weights import settle_quantised
from .any_rows import any_rows
from .arguments import (
    check_agrees,
    check_arguments,
    check_compilable,
    check_compile_stages,
    check_cuda_graphs,
    check_dynamic,
    check_graphable,
    check_made,
    check_steps,
    check_timeout,
    check_types,
    count_of,
    warn_of_mode,
)
from .batch_sizes import BatchSizes
from .capture.dynamic import DynamicDims
from .changed_params import require_lasting
from .dynamic_shapes import GraphAt, any_count, described, largest, read_dynamic_shapes
from .folder import Folder, Settings, print_counts, print_files, print_smaller
from .garbage import rare_collections
from .job.batch import BatchShape, as_dicts, micro_batch_spec
from .job.job import Job
from .job.preflight import plain_directories
from .job.together import planned_once
from .loss import counted, refuse_item_count, traced
from .own_copy import beside_own_copy
from .packing.borders import most_documents, require_borders, require_positions, with_unread
from .plan import Plan
from .profile.profile import for_machines_like, make_profiler
from .search.attempts import SEARCH_S, SearchResult, Wishes
from .search.candidate import Candidate
from .search.candidates import micro_batch_counts
from .search.compiled import CompiledCandidate
from .search.fit import check_states_fit
from .search.nearest import with_nearest
from .search.offer import Offer, find_offer
from .search.prediction import make_plan
from .search.search import search
from .search.what_helps import Help, what_helps
from .stale import unmarked

Graphs: TypeAlias = "functools._lru_cache_wrapper[OpGraph]"  # a function that makes each graph once
DEFAULT_OPTIMIZER = functools.partial(torch.optim.AdamW, lr=5e-5)


@planned_once
def compile(
    model: nn.Module,
    hardware: Hardware | str | Path = "auto",
    *,
    example_inputs: Any,
    optimizer: Any = DEFAULT_OPTIMIZER,
    lr_scheduler: Any = None,
    param_groups: Sequence[Mapping[str, Any]] | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    loss_weight: Callable[[Any], Any] | None = None,
    strategy: str = "auto",
    plan: Plan | str | Path | None = None,
    micro_batches: int | str = "auto",
    precision: str = "fp32",
    gradient_dtype: GradientDtype = "fp32",
    boundary_dtype: BoundaryDtype = "compute",
    max_grad_norm: float | None = None,
    seed: int = 0,
    weights: str | Path | None = None,
    stop_on_nan: bool = True,
    search_s: float = SEARCH_S,
    steps: int | None = None,
    dump: Callable[[str, Draft], None] | None = None,
    profile: bool | str | Path | None = None,
    ssd_dirs: Sequence[str | Path] | None = None,
    ssd_verify: bool = False,
    compile_stages: bool = False,
    cuda_graphs: bool = False,
    dynamic_shapes: Any = None,
    timeout_s: float = TIMEOUT_S,
) -> Job:
    """Plan the training of `model` on `hardware` and print the program of every device.

    model: any nn.Module, also on the meta device; then `weights` names a directory of safetensors. Every module trains
        in its own mode: call `model.train()` first, as `from_pretrained` returns models in evaluation mode. What a
        model that is not on meta takes of a memory is left out of that memory's budget.
    hardware: a `Hardware`, a preset's name, a path to YAML, or "auto" to describe this machine (under torchrun the
        machines of all ranks). Every rank must call `compile`: the first one plans, the others carry its plan out.
    example_inputs: one global batch: dict or tuple of tensors, or of {"shape": [...], "dtype": "..."} for planning.
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
        optimizer does that). "bf16" and "fp16" mean the mixed ones.
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
    compile_stages: run repeated blocks by `torch.compile`: each class of the printed file is compiled
        once for all its blocks. Where that is not possible, a warning names the class and why it runs eagerly.
    cuda_graphs: launch forward and backward of a stage as one each, from graphs captured before the first step. Only
        stages that stay on their GPU, with memory for each micro-batch in flight; `explain` names the others.
    dynamic_shapes: which sizes of the batch differ from step to step, in torch.export's form, each a `Dim` with a max,
        for which memory is planned; a `Dim` by itself is the sequence of a tokenizer's batch, a pair its rows and its
        sequence. `step` then takes any batch in these ranges, or a list of micro-batches.
    timeout_s: after how many seconds without a sign of life a device, or a rank of torchrun, counts as lost. With local
        workers a step may last longer, but none of its instructions.

    Raises `CaptureError`, `HardwareError`, `PlanError`, `PassError`, or `DoesNotFit` with the nearest plan that fits.
    """
    model = with_bytes(model)
    if weights is not None:
        settle_quantised(model, weights)
    check_arguments(model, max_grad_norm, strategy, seed)
    check_types(precision, gradient_dtype, boundary_dtype)
    precision = Precision.of(precision).name
    warn_of_mode(model)
    check_timeout(timeout_s)
    check_steps(steps)
    check_compile_stages(compile_stages)
    example_inputs = as_dicts(example_inputs)
    refuse_item_count(example_inputs)
    require_positions(example_inputs)
    example_inputs, packed = with_unread(example_inputs), most_documents(example_inputs)
    directories = plain_directories(ssd_dirs)
    machine = detect() if hardware == "auto" else Hardware.from_any(hardware)
    check_cuda_graphs(cuda_graphs, compile_stages, machine)
    if not TorchrunDriver.is_present():  # where the ranks' copies are counted together
        machine = beside_own_copy(machine, model)
    shape = BatchShape.of(model, example_inputs)
    sizes = None if dynamic_shapes is None else read_dynamic_shapes(model, example_inputs, dynamic_shapes)
    if sizes is not None:
        shape = largest(sizes, shape)
        example_inputs = described(model, example_inputs, shape)
        check_dynamic(cuda_graphs, compile_stages)
    decided = Plan.from_any(plan) if plan is not None else None
    if decided is not None:
        check_agrees(
            decided,
            strategy=strategy,
            micro_batches=micro_batches,
            precision=precision,
            gradient_dtype=gradient_dtype,
            boundary_dtype=boundary_dtype,
            max_grad_norm=max_grad_norm,
        )
        check_made(decided, machine.num_devices)
        micro_batches, precision, max_grad_norm = decided.micro_batches, decided.precision, decided.max_grad_norm
        gradient_dtype, boundary_dtype = decided.gradient_dtype, decided.boundary_dtype
    count = count_of(micro_batches, shape)
    asked = None if strategy == "auto" else Candidate.of(strategy, machine.num_devices)
    if count is None and asked is not None and not asked.is_synchronous:
        raise PlanError(
            f'micro_batches="auto" with strategy={strategy!r}: in asynchronous training every micro-batch, or every '
            "few of them, is a mini-batch with updates of its own, so that their number is yours to choose; say, for "
            f"instance, micro_batches={shape.size}"
        )
    with _planning():
        kind = _stepped_dtype(precision, rounds_itself(optimizer))
        spec = OptimizerSpec.from_callable(optimizer, lr_scheduler, model=model, param_groups=param_groups, dtype=kind)
        options = Options(
            precision=precision,
            gradient_dtype=gradient_dtype,
            boundary_dtype=boundary_dtype,
            optimizer_rounds=spec.rounds,
            max_grad_norm=max_grad_norm,
            profiler=make_profiler(profile, precision),
            cuda_graphs=cuda_graphs,
            compile_stages=compile_stages,
            step_bytes_of=_step_bytes(spec, Precision.of(precision).is_pure, machine.devices[0].kind),
            **_optimizer_facts(spec, model, kind),
        )
        if Precision.of(precision).is_pure and not spec.rounds:
            spec.require_portions()
        by_user = loss_weight is not None
        capture_at = _capturer(
            model,
            example_inputs,
            loss_fn,
            options,
            machine.devices[0].kind,
            by_user,
            shape,
            sizes,
            packed,
            is_open=count is None,
        )
        capture = capture_at()
        wishes = Wishes(asked, count, shape.size, options, dump, decided, search_s, steps=steps)
        if compile_stages and asked is None and decided is None:
            wishes.require = check_compilable
        wishes, facts, find_graph = _know_rows(model, capture, machine, wishes)
        found = _find(find_graph, machine, wishes, facts, is_left_open=count is None)
    best = found.best
    if compile_stages:
        check_compilable(best.draft.programs)
    if cuda_graphs:
        check_graphable(best.draft.programs)
    made = make_plan(found, _model_name(model), decided.strategy if decided else strategy)
    require_lasting(best.draft.graph, best.draft.programs)
    _check_shards(made, best.draft.graph.hooks)
    schedule = best.candidate.find(ScheduleAsync)
    if schedule is not None and schedule.weights == "predict":
        require_rule(spec)
    settings = Settings(
        optimizer=spec.with_parts(best.draft.graph.part_names).to_json(),
        precision=precision,
        seed=seed,
        stop_on_nan=stop_on_nan,
        batch=[(name, dims, str(dtype).removeprefix("torch.")) for name, (dims, dtype) in shape.leaves.items()],
        flags=shape.flags,
        weights=None if weights is None else str(weights),
        ssd_dirs=directories,
        ssd_verify=ssd_verify,
        compile_stages=compile_stages,
        timeout_s=float(timeout_s),
        evaluation=best.no_evaluation,
        loss=best.draft.graph.loss.terms,
        counts=best.draft.graph.loss.rules,
        rows=facts,
        sizes=sizes,
    )
    folder = _folder(model, best, made, machine, settings)
    capture.cache_clear()
    find_graph.cache_clear()

    def helps() -> list[Help]:
        with _planning():
            found = what_helps(find_graph, machine, wishes, made)
        capture.cache_clear()
        find_graph.cache_clear()
        return found

    programs = best.draft.programs

    def offers(times: Mapping[int, float]) -> Offer | None:
        with _planning():
            found = find_offer(find_graph, machine, wishes, made, programs, times)
        capture.cache_clear()
        find_graph.cache_clear()
        return found

    def stages_at(other: Sizes) -> Mapping[str, StageSpec]:
        with _planning():
            plain = dataclasses.replace(wishes.options, profiler=None)
            decided = dataclasses.replace(wishes, options=plain, decided=made, dump=None)
            each = _accumulated(decided, machine)
            graphs = functools.cache(lambda count: scaled_loss(capture_at(other)(count), facts, each or count))
            return search(graphs, machine, decided).best.draft.programs[0].interface.stages

    _tell(shape, best.draft.graph.notes)
    return Job(
        model,
        folder,
        best.draft.programs,
        ties=ties_of(model),
        records=best.records,
        help_finder=helps,
        offer_finder=offers,
        stages_at=stages_at if sizes is not None else None,
        trust=OWN,
        loss_weight=loss_weight,
    )


def _folder(model: nn.Module, best: CompiledCandidate, made: Plan, machine: Hardware, settings: Settings) -> Folder:
    interface, graph = best.draft.programs[0].interface, best.draft.graph
    return Folder(
        made,
        machine,
        interface,
        settings,
        print_files(model, best.draft, best.evaluation, made),
        print_smaller(best.draft, best.evaluation, made),
        print_counts(graph.loss),
        _values(graph.constants, interface),
    )


def _tell(shape: BatchShape, notes: Sequence[str]) -> None:
    """Warn the caller of `compile` of what was understood, not asked for."""
    for name, each in shape.wide.items():
        warnings.warn(
            f"{name} has {each} entries for each of the {shape.size} rows of a batch: every micro-batch takes those of "
            "its rows, in order",
            stacklevel=4,
        )
    for note in notes:
        warnings.warn(note, stacklevel=4)


def _values(constants: Mapping[str, torch.Tensor], interface: Interface) -> dict[str, torch.Tensor]:
    """Copies of the constants that stages use, so that a later change of the user's tensors changes no program."""
    used = {row.name for spec in interface.stages.values() for row in spec.constants}
    return {name: t.detach().to("cpu", copy=True) for name, t in constants.items() if name in used and not t.is_meta}


def _check_shards(plan: Plan, hooks: Mapping[str, tuple[HookCall, ...]]) -> None:
    if plan.decisions.mesh is None or plan.decisions.mesh.shards == 1:
        return
    unkept = [name for name, hook in hooks.items() if bool(hooked(hook, torch.zeros(())))]
    if unkept:
        raise PassError(
            f"insert-shard: the gradient hook of {unkept[0]} makes something else of zero, with which the pieces of a "
            'parameter are filled up. Use a hook that keeps zeros, or another strategy, such as "mobius"'
        )


def _capturer(
    model: nn.Module,
    example_inputs: Any,
    loss_fn: Callable[[Any, Any], Any] | None,
    options: Options,
    kind: str,
    by_user: bool,
    shape: BatchShape,
    sizes: BatchSizes | None,
    packed: int,
    is_open: bool,
) -> Callable[..., Graphs]:
    """What makes functions from a number of micro-batches to the op graph of one micro-batch, the largest or one of
    given sizes. Where their number `is_open`, or sizes are dynamic, all of them come from one trace."""
    types = Precision.of(options.precision)

    def trace(num_micro_batches: int, dims: DynamicDims | None = None, rows: bool = False) -> OpGraph:
        inputs = micro_batch_spec(example_inputs, num_micro_batches)
        with unmarked(model):
            return traced(model, inputs, loss_fn, by_user, types, kind, dims, rows)

    def trace_rows(num_micro_batches: int) -> OpGraph:
        return trace(num_micro_batches, rows=True)

    at: GraphAt
    if sizes is not None:
        at = any_count(trace, sizes, shape)
    elif is_open and shape.size > 1:
        at = any_rows(trace_rows, trace, lambda count: micro_batch_spec(example_inputs, count))
    else:
        at = lambda count, other: trace(count)  # noqa: E731

    def capture_at(other: Sizes | None = None) -> Graphs:
        @functools.cache
        def capture(num_micro_batches: int) -> OpGraph:
            graph = counted(at(num_micro_batches, other), by_user)
            if packed:
                require_borders(graph)
            graph.packed = packed
            graph.sum_dtype = types.sum_dtype(num_micro_batches, options.gradient_dtype)
            graph.boundary_dtype = types.boundary_dtype(options.boundary_dtype)
            return graph

        return capture

    return capture_at


@contextmanager
def _planning() -> Iterator[None]:
    """Tensors are made on the CPU, whatever the script's default device is, and garbage is looked for rarely."""
    is_on_cpu = torch.empty(0).device.type == "cpu"  # then without a context, which each call of torch would pass
    with nullcontext() if is_on_cpu else torch.device("cpu"), rare_collections():
        yield


def _stepped_dtype(precision: str, rounds: bool) -> torch.dtype | None:
    """The dtype in which the optimizer, which `rounds` or not, steps parameters; None where they keep their own."""
    low = Precision.of(precision).low_dtype
    return torch.float32 if low is not None and not (rounds and Precision.of(precision).is_pure) else low


def _optimizer_facts(optimizer: OptimizerSpec, model: nn.Module, own: torch.dtype | None) -> dict[str, Any]:
    """What the passes know of the optimizer: the fields of `Options`. Bytes of states are those of each parameter by
    itself, unless all have the same for each element."""

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
    """What a step takes in a memory, where devices are of this kind."""
    kinds, rounds = {DEVICE: device_kind, DRAM: "cpu"}, is_pure and not optimizer.rounds

    @functools.cache
    def found(rows: tuple[tuple[str, tuple[int, ...], str], ...], memory: str) -> int:
        params = [(name, shape, getattr(torch, dtype)) for name, shape, dtype in rows]
        held = workspace_bytes if kinds[memory] == "cuda" else None
        return step_bytes(optimizer, params, kinds[memory], rounds, held)

    return lambda rows, memory: found(tuple(rows), memory)


def _know_rows(model: nn.Module, capture: Graphs, machine: Hardware, wishes: Wishes) -> tuple[Wishes, RowFacts, Graphs]:
    """Find out what rows have to do with each other. Returns wishes with what follows for the number of micro-batches,
    the facts, and a function to the graphs to plan with, whose losses average to that of the whole batch."""
    try:
        lasting_bytes = check_states_fit(model, machine, wishes.options)  # before the expensive work
    except DoesNotFit as miss:
        raise _nearest(miss, capture, machine, wishes) from None
    wishes = dataclasses.replace(wishes, lasting_bytes=lasting_bytes)
    each = _accumulated(wishes, machine)
    if each == 1:  # every micro-batch is a batch of its own
        return wishes, MEAN_OVER_ROWS, capture
    usual, more = micro_batch_counts(wishes.batch_size, machine)
    counts = [*usual, *more] if wishes.micro_batches is None else [wishes.micro_batches]
    facts = find_facts(capture, counts, wishes.batch_size, machine.devices[0].kind)
    if facts.couplings and wishes.micro_batches is None:
        has_lanes = wishes.asked is not None and wishes.asked.mesh is not None  # each has rows of its own
        wishes = dataclasses.replace(wishes, micro_batches=None if has_lanes else 1, fewest_first=has_lanes)

    @functools.cache
    def find_graph(count: int) -> OpGraph:
        return scaled_loss(capture(count), facts, each or count)

    return wishes, facts, find_graph


def _accumulated(wishes: Wishes, machine: Hardware) -> int | None:
    """The micro-batches of a mini-batch with an update of its own; None where all of them have one update."""
    candidate = wishes.asked
    if wishes.decided is not None:
        candidate = Candidate.of(wishes.decided.passes, machine.num_devices)
    schedule = None if candidate is None else candidate.find(ScheduleAsync)
    return None if schedule is None else schedule.accumulate


def _find(graphs: Graphs, machine: Hardware, wishes: Wishes, facts: RowFacts, is_left_open: bool) -> SearchResult:
    try:
        return search(graphs, machine, wishes)
    except DoesNotFit as miss:
        better = _nearest(miss, graphs, machine, wishes)
        raise (coupled_miss(better, facts.couplings) if facts.couplings and is_left_open else better) from None


def _nearest(miss: DoesNotFit, graphs: Graphs, machine: Hardware, wishes: Wishes) -> DoesNotFit:
    profiler = wishes.options.profiler and for_machines_like(wishes.options.profiler, machine)
    options = dataclasses.replace(wishes.options, profiler=profiler)
    return with_nearest(miss, graphs, machine, dataclasses.replace(wishes, options=options))


def _model_name(model: nn.Module) -> str:
    config = getattr(model, "config", None)
    name = getattr(config, "model_type", None) or type(model).__name__
    params = sum(p.numel() for p in model.parameters())
    params += sum(layer.more_params for _, layer in quantised_layers(model))
    return f"{name}, {params / 1e9:.4g} B parameters" if params >= 1e9 else f"{name}, {params / 1e6:.1f} M parameters"
