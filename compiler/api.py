"""`compile(model, hardware, ...)`: capture, search, print. Pure: unless told to `profile`, it touches no device and
starts no process. On ranks of torchrun the first one searches."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from ..codegen.imports import Imports
from ..graph.follow.coupling import coupled_miss, fact_lines
from ..graph.follow.rows import MEAN_OVER_ROWS, RowFacts
from ..graph.tables.picked_rows import PickRules, picked_rows
from ..ir.errors import DoesNotFit, PassError
from ..ir.machine.hardware import Hardware
from ..ir.precision import BoundaryDtype, GradientDtype
from ..passes.draft import Draft, KernelChoice
from ..passes.schedule.schedule_async import ScheduleAsync
from ..runtime.model_names import ties_of
from ..runtime.optimizer.extrapolate import require_rule
from ..runtime.optimizer.hooks import call_hooks
from ..runtime.processes.setup import TIMEOUT_S
from ..runtime.source.trust import Trust
from ..runtime.state.quantised import quantised_layers, unquantised_note
from .arguments import check_compilable, check_graphable
from .batches.shape import BatchShape
from .capture.recorder import NeedsValue
from .changed_params import require_lasting
from .check.first_rows import compare_first_rows
from .check.release import check_release
from .folder import Folder, Settings, print_all, print_counts
from .graphs import Graphs
from .job.forms import why_one_form
from .job.job import Job
from .job.together import check_call, planned_once
from .packing.borders import has_positions, open_border
from .packing.varying_inputs import ANY
from .plan import Plan
from .planning import planning
from .profile.profile import for_machines_like
from .replanner import Replanner
from .request import Request
from .search.attempts import SEARCH_S, SearchResult, Wishes
from .search.candidate import Candidate
from .search.candidates import micro_batch_counts
from .search.compiled import CompiledCandidate
from .search.fit import check_states_fit
from .search.nearest import with_nearest
from .search.prediction import make_plan
from .search.search import search

DEFAULT_OPTIMIZER = functools.partial(torch.optim.AdamW, lr=5e-5)


@planned_once
def compile(
    model: nn.Module,
    hardware: Hardware | str | Path = "auto",
    example_inputs: Any = None,
    *,
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
    kernels: KernelChoice = "written",
    compile_stages: bool = False,
    cuda_graphs: bool = False,
    dynamic_shapes: Any = None,
    timeout_s: float = TIMEOUT_S,
    check: bool = True,
) -> Job:
    """Plan the training of `model` on `hardware` and print the program of every device.

    Raises `CaptureError`, `HardwareError`, `PlanError`, `PassError`, or `DoesNotFit` with the nearest plan that fits.
    """
    given = dict(locals())
    check_release(torch.__version__)
    with planning():
        request, graphs, wishes, rows, result = _find(Request(**given).settle())
        best = result.best
        folder, trust = _folder(request, graphs, result, rows)
    graphs.forget()
    _tell(request, folder, best.draft.graph.notes)
    return Job(
        request.model, folder, best.draft.programs, ties=ties_of(request.model), records=best.records, trust=trust,
        replanner=Replanner(
            graphs, request.machine, wishes, folder.plan, best.draft.programs, loss_fn, request.prologue
        ),
        loss_weight=loss_weight,
    )  # fmt: skip


compile.__doc__ = f"{compile.__doc__}\n    {Request.__doc__}"  # `help` shows what each argument is


def find_plan(model: nn.Module, hardware: Hardware | str | Path, **wishes: Any) -> Plan:
    """The plan that `compile` would make of the same arguments; no file of a program is printed. Raises as that does,
    and warns of nothing."""
    check_call(compile, [model, hardware], wishes)
    given = inspect.signature(compile).bind(model, hardware, **wishes)
    given.apply_defaults()
    with planning(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        request = Request(**given.arguments).settle()
        _, graphs, _, _, result = _find(request)
        graphs.forget()
        return make_plan(result, _model_name(model), request.strategy)


def _find(request: Request) -> tuple[Request, Graphs, Wishes, RowFacts, SearchResult]:
    """The request, with the prologue of a model that reads values of its batch; its graphs, wishes and facts of rows,
    and what the search has found, which can run."""
    graphs = Graphs.find(request, _mini_batch_size(request.wishes, request.machine))
    try:
        wishes, rows = _learn_rows(request, graphs)
        result = _search(request, graphs, wishes, rows)
        if wishes.micro_batches is None and not rows.couplings and graphs.accumulate is None:
            rows = graphs.facts_at(result.best.count)
            if rows.couplings:
                wishes = _keep_rows_together(wishes, rows)
                result = _search(request, graphs, wishes, rows)
    except NeedsValue as error:
        return _find(request.with_prologue(error))
    _require_runnable(request, result.best)
    return request, graphs, wishes, rows, result


def _learn_rows(request: Request, graphs: Graphs) -> tuple[Wishes, RowFacts]:
    """Find out what rows have to do with each other. Returns the wishes with what follows for the number of
    micro-batches, and the facts, by which `graphs` scale the loss from then on."""
    machine, wishes = request.machine, request.wishes
    try:
        lasting_bytes = check_states_fit(request.model, machine, wishes.options)  # before the expensive work
    except DoesNotFit as miss:
        raise _nearest(miss, graphs, machine, wishes) from None
    wishes = dataclasses.replace(wishes, lasting_bytes=lasting_bytes)
    if graphs.accumulate == 1:  # every micro-batch is a batch of its own
        return wishes, MEAN_OVER_ROWS
    usual, more = micro_batch_counts(wishes.batch_size, machine)
    counts = [*usual, *more] if wishes.micro_batches is None else [wishes.micro_batches]
    rows = graphs.learn_rows(counts)
    return _keep_rows_together(wishes, rows), rows


def _keep_rows_together(wishes: Wishes, rows: RowFacts) -> Wishes:
    """The wishes, with the fewest micro-batches where rows meet and the number of them is open."""
    if not rows.couplings or wishes.micro_batches is not None:
        return wishes
    has_lanes = wishes.asked is not None and wishes.asked.mesh is not None  # each has rows of its own
    return dataclasses.replace(wishes, micro_batches=None if has_lanes else 1, fewest_first=has_lanes)


def _mini_batch_size(wishes: Wishes, machine: Hardware) -> int | None:
    """The micro-batches of a mini-batch with an update of its own; None where all of them have one update."""
    candidate = wishes.asked
    if wishes.decided is not None:
        candidate = Candidate.parse(wishes.decided.passes, machine.num_devices)
    schedule = None if candidate is None else candidate.find(ScheduleAsync)
    return None if schedule is None else schedule.accumulate


def _search(request: Request, graphs: Graphs, wishes: Wishes, rows: RowFacts) -> SearchResult:
    try:
        return search(graphs, request.machine, wishes)
    except DoesNotFit as miss:
        better = _nearest(miss, graphs, request.machine, wishes)
        is_coupled = rows.couplings and request.count is None
        raise (coupled_miss(better, rows.couplings) if is_coupled else better) from None


def _nearest(miss: DoesNotFit, graphs: Graphs, machine: Hardware, wishes: Wishes) -> DoesNotFit:
    profiler = wishes.options.profiler and for_machines_like(wishes.options.profiler, machine)
    options = dataclasses.replace(wishes.options, profiler=profiler)
    return with_nearest(miss, graphs, machine, dataclasses.replace(wishes, options=options))


def _require_runnable(request: Request, best: CompiledCandidate) -> None:
    """Raise an error of Penstock's where the programs cannot keep a wish, or what the model does to its parameters."""
    programs = best.draft.programs
    if request.compile_stages:
        check_compilable(programs)
    if request.cuda_graphs:
        check_graphable(programs)
    require_lasting(best.draft.graph, programs)
    _check_shards(best.draft)
    schedule = best.candidate.find(ScheduleAsync)
    if schedule is not None and schedule.weights == "predict":
        require_rule(request.optimizer_spec)


def _flops(best: CompiledCandidate) -> float:
    """Forward and backward of a whole batch."""
    costs = [block.cost for block in best.draft.blocks]
    return best.count * best.draft.graph.team * sum(cost.forward_flops + cost.backward_flops for cost in costs)


def _check_shards(draft: Draft) -> None:
    if draft.mesh.shards == 1:
        return
    unkept = [name for name, hook in draft.graph.hooks.items() if bool(call_hooks(hook, torch.zeros(())))]
    if unkept:
        raise PassError(
            f"insert-shard: the gradient hook of {unkept[0]} makes something else of zero, with which the pieces of a "
            'parameter are filled up. Use a hook that keeps zeros, or another strategy, such as "mobius"'
        )


def _picks(graphs: Graphs, shape: BatchShape, result: SearchResult) -> tuple[fx.GraphModule | None, PickRules]:
    """The check of a micro-batch of the plan, from the graph that no pass has rewritten."""
    name, value = next((name, value) for name, value in result.best.draft.graph.inputs.items() if name in shape.leaves)
    return picked_rows(graphs(shape.entries(name, shape.size) // value.shape[0]))


def _coupling_warning(folder: Folder) -> str:
    """The lines about rows that meet where several micro-batches part them; "" for none."""
    interface, facts = folder.interface, folder.settings.rows
    total = interface.micro_batches_of_update
    lines = fact_lines(facts, total, interface.asynchronous) if facts.couplings and total > 1 else ()
    return "\n".join(lines)


def _folder(request: Request, graphs: Graphs, result: SearchResult, rows: RowFacts) -> tuple[Folder, Trust]:
    """The files of the job, and trust in the user's own code in them."""
    best, shape = result.best, request.batch.shape
    picks = _picks(graphs, shape, result)
    may_be_packed = has_positions(shape.leaves) and not request.batch.documents
    draft, loss = best.draft, best.draft.graph.loss
    strategy = request.strategy if request.given_plan is None else request.given_plan.strategy
    plan = make_plan(result, _model_name(request.model), strategy)
    if request.unpacked:
        plan.notes["weights"] = request.unpacked
    settings = Settings(
        optimizer=request.optimizer_spec.with_parts(draft.graph.part_names).to_json(),
        precision=request.precision,
        seed=request.seed,
        stop_on_nan=request.stop_on_nan,
        batch=[(name, dims, str(dtype).removeprefix("torch.")) for name, (dims, dtype) in shape.leaves.items()],
        flags=shape.flags | dict.fromkeys(draft.graph.unread, ANY),
        weights=None if request.weights is None else str(request.weights),
        ssd_dirs=[str(path) for path in request.ssd_dirs or ()],
        ssd_verify=request.ssd_verify,
        compile_stages=request.compile_stages,
        timeout_s=float(request.timeout_s),
        evaluation=best.no_evaluation,
        loss=loss.terms,
        counts=loss.rules,
        picks=picks[1],
        rows=rows,
        one_document=open_border(graphs(best.count)) if may_be_packed else "",
        sizes=request.batch.sizes,
        reads=[] if request.prologue is None else sorted(request.prologue.reads),
    )
    own, imports = print_all(draft, best.evaluation, plan), Imports()
    counts = print_counts(loss, picks[0], imports)
    settings.comparison = compare_first_rows(request, graphs, best.count, _flops(best))
    folder = Folder(plan, draft.machine, own.interface, settings, own.files, own.smaller, counts, own.constants)
    return folder, own.trust.union(imports.trust())


def _model_name(model: nn.Module) -> str:
    wrapped = (model, getattr(model, "model", None))  # as trainers do, for a loss of their own
    named = (getattr(getattr(each, "config", None), "model_type", None) for each in wrapped)
    name = next(filter(None, named), type(model).__name__)
    params = sum(p.numel() for p in model.parameters())
    params += sum(layer.more_params for _, layer in quantised_layers(model))
    return f"{name}, {params / 1e9:.4g} B parameters" if params >= 1e9 else f"{name}, {params / 1e6:.1f} M parameters"


def _tell(request: Request, folder: Folder, notes: Sequence[str]) -> None:
    """Warn the caller of `compile` of what was understood, not asked for. `notes`: those of the trace."""
    shape, prologue = request.batch.shape, request.prologue
    made = [] if prologue is None else prologue.names
    for name, each in shape.wide.items():
        if name in made:
            continue
        warnings.warn(
            f"{name} has {each} entries for each of the {shape.size} rows of a batch: every micro-batch takes those of "
            "its rows, in order",
            stacklevel=4,
        )
    reads = "" if prologue is None else prologue.note(why_one_form(folder))
    is_listed = prologue is not None and prologue.apart  # each micro-batch is taken by itself, whatever its rows do
    coupled = "" if is_listed else _coupling_warning(folder)
    found = [*notes, reads, unquantised_note(request.model), request.unpacked, coupled]
    for note in filter(None, found):
        warnings.warn(note, stacklevel=4)
