"""Drafts, generated stages and machines for tests of passes, and eager PyTorch with a plan's random numbers."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from penstock.codegen.file import Header, write_directory, write_file
from penstock.compiler.capture.trace import trace
from penstock.compiler.check.eager import Seeded
from penstock.graph.blocks import Block
from penstock.graph.opgraph import OpGraph
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import Program, parse_program, print_program
from penstock.ir.verify import verify
from penstock.passes.base import Pass
from penstock.passes.draft import Draft, Options
from penstock.passes.mapping.map_round_robin import MapRoundRobin
from penstock.passes.memory.insert_fetch import InsertFetch
from penstock.passes.memory.insert_remat import InsertRemat
from penstock.passes.optimizer.insert_optimizer import InsertOptimizer
from penstock.passes.partition.partition_balanced import PartitionBalanced
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.passes.schedule.schedule_pipeline import SchedulePipeline
from penstock.runtime.device.file import INTERFACE_FILE, open_directory
from penstock.runtime.modules import Stage as StageModule
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec
from penstock.runtime.reference.run import Reference
from penstock.runtime.stage.draws import Draws, micro_batch_seed
from penstock.tests.zoo import zoo

SEED = 7
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.5)
Batch = dict[str, Tensor]


# --- drafts ---------------------------------------------------------------------------------------------------------


def draft_of(graph: OpGraph, hardware: Hardware | None = None, **options: Any) -> Draft:
    return Draft(graph, hardware or Hardware.cpu(num_devices=2), Options(**options))


def apply(draft: Draft, *passes: Pass, decisions: Mapping[str, Any] | None = None, memory: bool = False) -> Draft:
    """Plan and rewrite one pass after the other; a decision in `decisions` replaces a plan. After each pass, programs
    are verified, and print and parse to the same. `memory`: after the last pass, budgets are verified, too."""
    for p in passes:
        made = (decisions or {}).get(p.fields()[0])
        if isinstance(p, Coarsen) and made is None:
            draft.blocks = _coarsen_graph(draft)
            continue
        p.rewrite(draft, p.plan(draft) if made is None else made)
        if draft.programs:
            verify(draft.programs, draft.lane_hardware, memory=memory and p is passes[-1])
            assert_prints_and_parses(draft.programs)
    return draft


@functools.cache
def _measured_blocks() -> dict[tuple[int, str], tuple[OpGraph, list[Block]]]:
    return {}


def _coarsen_graph(draft: Draft) -> list[Block]:
    """A graph's blocks with their costs, measured once for all tests. The graph is kept, so that its id stays taken."""
    key = (id(draft.graph), draft.lane_hardware.devices[0].kind)
    if key not in _measured_blocks():
        p = Coarsen()
        p.rewrite(draft, p.plan(draft))
        _measured_blocks()[key] = (draft.graph, draft.blocks)
    return list(_measured_blocks()[key][1])


@functools.cache
def _parsed_texts() -> set[str]:
    return set()


def assert_prints_and_parses(programs: Sequence[Program]) -> None:
    """Once per text: many tests begin with the same passes."""
    for program in programs:
        text = print_program(program, comments=True)
        if text in _parsed_texts():
            continue
        _parsed_texts().add(text)
        again = parse_program(text, program.interface, program.device, program.function)
        assert print_program(again, comments=True) == text


def to_schedule(stages: int = 0) -> list[Pass]:
    return [Coarsen(), PartitionBalanced(stages=stages), MapRoundRobin(), SchedulePipeline()]


def all_passes(stages: int = 0, prefetch: bool = True) -> list[Pass]:
    return [*to_schedule(stages), InsertRemat(), InsertFetch(prefetch=prefetch), InsertOptimizer()]


def cut(names: Sequence[str], cuts: Sequence[int]) -> list[list[str]]:
    """Block names as a partition, cut before these positions."""
    return [list(names[a:b]) for a, b in pairwise([0, *cuts, len(names)])]


def text_of(draft: Draft) -> str:
    """All programs, for golden texts."""
    return "\n".join(f"# device {p.device}\n{print_program(p, comments=True)}" for p in draft.programs)


# --- models ---------------------------------------------------------------------------------------------------------


@functools.cache
def trace_case(name: str, dropout: float = 0.1, double: bool = False) -> tuple[OpGraph, list[Batch]]:
    """A zoo model's op graph and three micro-batches; shared between tests, which do not change them."""
    make = zoo()[name]
    batches = [make(dropout=dropout, seed=seed)[1] for seed in range(3)]
    return traced_model(make(dropout=dropout)[0], batches, double)


def traced_model(model: nn.Module, batches: Sequence[Batch], double: bool = False) -> tuple[OpGraph, list[Batch]]:
    if double:
        model = model.double()
        batches = [{k: v.double() if v.is_floating_point() else v for k, v in b.items()} for b in batches]
    return trace(model, batches[0]), list(batches)


class Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(torch.relu(self.up(self.norm(h))))


class Chain(nn.Module):
    """A few equal blocks and a loss: small programs whose sizes can be chosen."""

    def __init__(self, depth: int = 4, width: int = 16, classes: int = 4):
        super().__init__()
        self.layers = nn.ModuleList(Residual(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@functools.cache
def chain(depth: int = 4, width: int = 16, rows: int = 2, classes: int = 4) -> OpGraph:
    with torch.device("meta"):
        model = Chain(depth, width, classes)
    shapes = {"x": {"shape": [rows, width], "dtype": "float32"}, "labels": {"shape": [rows], "dtype": "int64"}}
    return trace(model, shapes)


# --- running --------------------------------------------------------------------------------------------------------


def generate_stages(draft: Draft, evaluation: Sequence[Program] = ()) -> dict[str, type[StageModule]]:
    """The stages' classes, from the files that would be written."""
    files = {}
    for program in draft.programs:
        graphs = {stage.spec.name: stage.graph for stage in draft.stages_on(program.device)}
        also = evaluation[program.device] if evaluation else None
        files[program.device] = write_file(program, also, graphs, Header("a model", "a machine"))
    with tempfile.TemporaryDirectory() as folder:
        write_directory(folder, files, {INTERFACE_FILE: draft.programs[0].interface.to_json()})
        return {name: kind for file in open_directory(folder) for name, kind in file.stages.items()}


def reference(
    draft: Draft, optimizer: Callable[..., Any] | None = SGD, evaluation: Sequence[Program] = (), **fields: Any
) -> Reference:
    graph = draft.graph
    spec = OptimizerSpec.from_callable(optimizer) if optimizer else None
    whole = dict(graph.model.named_parameters(remove_duplicate=False))  # of what members of a team have parts
    weights = {name: p.detach() for name, p in (whole | graph.parameters()).items()}
    buffers = {**graph.buffers(), **graph.constants}
    stages = generate_stages(draft, evaluation)
    return Reference([*draft.programs, *evaluation], stages, weights, spec, buffers, seed=SEED, **fields)


def join_batches(batches: Sequence[Batch]) -> Batch:
    """Micro-batches as one global batch."""
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


class Eager(Seeded):
    """The whole op graph in recorded order on a copy of the user's model."""

    def __init__(self, draft: Draft, optimizer: Callable[..., Any] = SGD, max_norm: float | None = None):
        module = copy.deepcopy(draft.graph.module)
        super().__init__(module, Draws("eager", module, torch.device("cpu")))
        self.names, self.max_norm = list(draft.graph.inputs), max_norm
        self.ties = draft.graph.ties()
        found = self.module.named_parameters(remove_duplicate=False)
        self.params = {self.ties.get(name, name): p for name, p in found}
        self.optimizer = optimizer([p for p in self.params.values() if p.requires_grad])
        self.step_number = 0

    def step(self, batches: Sequence[Batch]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Losses per micro-batch, and the gradients of their mean by first name, as the optimizer took them."""
        losses = []
        self.optimizer.zero_grad()
        for m, batch in enumerate(batches):
            with self.draws.seed_draws(micro_batch_seed(SEED, self.step_number, m)):
                loss = self.run(*(batch[name] for name in self.names))["loss"]
            loss.backward(torch.full_like(loss, 1 / len(batches)))
            losses.append(loss.detach())
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.params.values(), self.max_norm)
        grads = {name: p.grad.clone() for name, p in self.params.items() if p.grad is not None}
        self.optimizer.step()
        self.step_number += 1
        return losses, grads


def assert_trains_like_eager(
    draft: Draft, batches: Sequence[Batch], tolerance: float = 0.0, steps: int = 2, optimizer: Any = SGD
) -> Reference:
    """Compare losses, gradients, weights and buffers of `steps` steps; `tolerance` 0 means bit for bit."""
    machine = reference(draft, optimizer)
    eager = Eager(draft, optimizer, draft.options.max_grad_norm)
    for _ in range(steps):
        losses, grads = eager.step(batches)
        results = machine.step(join_batches(batches))["results"]
        if draft.copies:  # devices that take turns return their losses one device after the other
            results["loss"], losses = sorted(results["loss"]), sorted(losses)
        _assert_equal(dict(enumerate(results["loss"])), dict(enumerate(losses)), tolerance)
        seen = {}
        for stage, rows in machine.stage_grads.items():
            own = {eager.ties.get(name, name): g for name, g in rows.items()}
            _assert_equal(own, {name: grads[name] for name in own}, tolerance, stage)
            seen |= own
        assert seen.keys() == grads.keys()
    for stage, rows in machine.stage_weights.items():
        weights = {eager.ties.get(name, name): w for name, w in rows.items()}
        _assert_equal(weights, {name: eager.params[name].detach() for name in weights}, tolerance, stage)
    buffers = dict(eager.module.named_buffers(remove_duplicate=False))
    mine = machine.buffers()
    _assert_equal(mine, {name: buffers[name] for name in mine}, tolerance)
    return machine


def _assert_equal(found: Mapping[Any, Tensor], want: Mapping[Any, Tensor], tolerance: float, where: str = "") -> None:
    assert found.keys() == want.keys()
    for name in found:
        place = f"{where} {name}"
        torch.testing.assert_close(
            found[name], want[name], rtol=0, atol=tolerance, msg=lambda text, place=place: f"{place}: {text}"
        )
