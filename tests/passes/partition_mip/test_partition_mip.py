"""partition-mip on drafts: what it predicts, proves and says, with a solver, without one, and where nothing fits."""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
import re
import sys
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch

from penstock.compiler.capture.trace import trace
from penstock.compiler.models.named import find_model
from penstock.graph.blocks import Block, BlockCost
from penstock.graph.opgraph import OpGraph
from penstock.graph.turn_seconds import TurnSeconds
from penstock.ir.errors import DoesNotFit, PassError, PlanError
from penstock.ir.machine.hardware import Hardware
from penstock.passes.draft import Draft, Options
from penstock.passes.mapping.map_round_robin import MapRoundRobin
from penstock.passes.memory.insert_fetch import InsertFetch
from penstock.passes.memory.insert_remat import InsertRemat
from penstock.passes.optimizer.insert_optimizer import InsertOptimizer
from penstock.passes.partition_mip import partition_mip
from penstock.passes.partition_mip.partition_mip import PartitionMip, candidates
from penstock.passes.partition_mip.proof import model as mip_model
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.passes.schedule.schedule_pipeline import SchedulePipeline
from penstock.runtime.simulate import simulate
from penstock.tests.passes.running import apply, assert_trains_like_eager, chain, draft_of, trace_case
from penstock.tests.shown_elsewhere import slow_but

BEHIND = (MapRoundRobin(), SchedulePipeline(), InsertRemat(), InsertFetch(), InsertOptimizer())
NAME = PartitionMip.name


@functools.cache
def gpt(model: str, micro: int) -> tuple[OpGraph, list[Block]]:
    named = find_model(model)
    spec = named.batch_spec(micro, 512)
    half = torch.float16
    graph = trace(named.on_meta(), spec, autocast=half, device_kind="cuda", param_dtype=half)
    draft = Draft(graph, Hardware.preset("mobius-topo4"), Options(precision="fp16"))
    apply(draft, Coarsen())
    return graph, draft.blocks


def make_draft(model: str, micro: int, machine: str, micro_batches: int, precision: str = "fp16") -> Draft:
    graph, blocks = gpt(model, micro)
    options = Options(micro_batches=micro_batches, precision=precision)
    return Draft(graph, Hardware.preset(machine), options, blocks=list(blocks))


def simulated_s(draft: Draft, decision: dict) -> float:
    trial = Draft(draft.graph, draft.machine, draft.options, blocks=draft.blocks)
    PartitionMip().rewrite(trial, decision)
    for p in BEHIND:
        p.rewrite(trial, p.plan(trial))
    return simulate(trial.programs, trial.lane_hardware, precision=trial.options.precision).step_s


def small(depth: int = 5, machine: Hardware | None = None, **options: object) -> Draft:
    draft = draft_of(chain(depth, width=64, rows=64), machine, **{"micro_batches": 4, **options})
    return apply(draft, Coarsen())


def assert_predicted(model: str, micro: int, machine: str, micro_batches: int, precision: str) -> None:
    draft = make_draft(model, micro, machine, micro_batches, precision)
    for found in candidates(draft, PartitionMip(deadline_s=1.0), most=2):
        seconds = simulated_s(draft, found.decision)
        assert found.seconds == pytest.approx(seconds, rel=0.03), (len(found.cuts) - 1, found.seconds / seconds)


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["mobius-topo4", "mobius-topo2+2", "mobius-topo1+3", "mobius-8gpu"])
def test_the_objective_is_what_the_simulator_says(machine: str) -> None:
    assert_predicted("mobius-8b", 2, machine, 4, "fp16")


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["mobius-topo4", "mobius-topo2+2", "mobius-topo1+3", "mobius-8gpu"])
@pytest.mark.parametrize("model", ["mobius-3b", "mobius-8b", "mobius-15b"])
@pytest.mark.parametrize("micro_batches", [4, 8])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_objective_on_all_models(model: str, machine: str, micro_batches: int, precision: str) -> None:
    assert_predicted(model, 1 if model == "mobius-15b" else 2, machine, micro_batches, precision)


@pytest.mark.slow
def test_the_plan_beats_one_block_a_stage_and_says_what_is_proven() -> None:
    draft = make_draft("mobius-8b", 2, "mobius-topo4", 4)
    decision = PartitionMip(deadline_s=2.0, prove=True).plan(draft)
    names = [block.name for block in draft.blocks]
    assert [name for stage in decision["stages"] for name in stage] == names
    every = {"stages": [[name] for name in names], "planned_for": [j % 4 for j in range(len(names))]}
    assert simulated_s(draft, decision) < simulated_s(draft, every)
    said = draft.notes[NAME]
    assert re.search(r"objective with contention is [\d.]+ s in \d+ stages, at least [\d.]+ s \(gap [\d.]+%\)", said)
    assert "linear relaxations" in said


@pytest.mark.parametrize("model", slow_but(["gpt2"], ["gpt2", "t5"]))
def test_trains_like_eager(model: str) -> None:
    graph, batches = trace_case(model)
    draft = draft_of(graph, Hardware.cpu(num_devices=2), micro_batches=3)
    apply(draft, Coarsen(), PartitionMip(stages=3), *BEHIND)
    assert len(draft.stages) == 3
    assert_trains_like_eager(draft, batches, tolerance=2e-6)


def test_few_blocks_are_all_tried() -> None:
    draft = small()
    decision = PartitionMip().plan(draft)
    assert "gap 0.00%" in draft.notes[NAME] and "trying every partition" in draft.notes[NAME]
    assert [name for stage in decision["stages"] for name in stage] == [block.name for block in draft.blocks]


def test_literal_objective() -> None:
    draft = small(16)
    PartitionMip(literal=True, deadline_s=1.0, prove=True).plan(draft)
    assert draft.notes[NAME].startswith("the paper's own objective") and "by closed form" in draft.notes[NAME]


def test_without_prove_nothing_is_said_to_be_proved() -> None:
    for literal in (False, True):
        draft = small(16)
        PartitionMip(literal=literal, deadline_s=1.0).plan(draft)
        said = draft.notes[NAME]
        assert "at least" not in said and said.endswith(
            " stages; its gap to the optimum is not proved: penstock plan --prove, or partition-mip{prove=true}"
        )


def test_without_prove_no_file_of_the_proof_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path(partition_mip.__file__).parent
    names = {f"{partition_mip.__package__}.proof", "mip"}
    names |= {f"{partition_mip.__package__}.proof.{file.stem}" for file in (home / "proof").glob("*.py")}
    draft, other = small(16), small(16)
    proved = PartitionMip(deadline_s=1.0, prove=True).plan(draft)
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)  # an import of it raises
    found = PartitionMip(deadline_s=1.0).plan(other)
    assert found == proved  # of blocks so much alike the search finds the best partition by itself
    with pytest.raises(ImportError):
        PartitionMip(deadline_s=1.0, prove=True).plan(other)
    statements = [node for file in home.glob("*.py") for node in ast.parse(file.read_text("utf-8")).body]
    imports = [ast.unparse(node) for node in statements if isinstance(node, ast.Import | ast.ImportFrom)]
    assert len(imports) > 20 and not [text for text in imports if "proof" in text or "import mip" in text]


def test_without_a_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    draft, again = small(16), small(16)
    with_solver = PartitionMip(stages=4, prove=True).plan(draft)
    monkeypatch.setitem(sys.modules, "mip", None)
    found = PartitionMip(stages=4, prove=True).plan(again)
    assert "the solver is missing" in again.notes[NAME] and "local search's answer" in again.notes[NAME]
    assert len(found["stages"]) == len(with_solver["stages"]) == 4


def test_a_solver_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("highs went away")

    monkeypatch.setattr(mip_model, "CountModel", fails)
    draft = small(16)
    assert len(PartitionMip(stages=4, prove=True).plan(draft)["stages"]) == 4
    assert "the solver failed (RuntimeError: highs went away)" in draft.notes[NAME]


def test_a_solver_that_has_no_time() -> None:
    draft = small(16)
    assert PartitionMip(deadline_s=1e-6, prove=True).plan(draft)["stages"]
    assert "the proof ended where its work did" in draft.notes[NAME]


def test_bad_numbers_and_options() -> None:
    draft = small()
    for value in (math.nan, 0.0, math.inf, -1.0):
        block = draft.blocks[2]
        name = draft.lane_hardware.devices[0].name
        broken = dataclasses.replace(block, seconds={name: TurnSeconds(value, 1.0, 1.0)})
        draft.blocks = [*draft.blocks[:2], broken, *draft.blocks[3:]]
        with pytest.raises(PlanError, match=f"{block.name}.*forward"):
            PartitionMip().plan(draft)
    with pytest.raises(PassError, match="at most 6"):
        PartitionMip(stages=7).plan(small())
    with pytest.raises(PassError, match="deadline_s=0"):
        PartitionMip(deadline_s=0).plan(small())
    with pytest.raises(PassError, match="order='0 0'"):
        PartitionMip(order="0 0").plan(small())


@pytest.mark.parametrize("prove", [False, True])
def test_a_block_without_work(prove: bool) -> None:
    """An `nn.Identity` takes no time by the roofline."""
    draft = small()
    draft.blocks = [*draft.blocks[:2], draft.blocks[2].with_cost(BlockCost()), *draft.blocks[3:]]
    stages = PartitionMip(prove=prove).plan(draft)["stages"]
    assert [name for stage in stages for name in stage] == [block.name for block in draft.blocks]


def test_memory_of_each_device() -> None:
    with pytest.raises(DoesNotFit, match="alone needs"):
        PartitionMip().plan(small(machine=Hardware.cpu(num_devices=2, memory="20kB")))
    large = Hardware.cpu(num_devices=2, memory="4MB")
    devices = [large.devices[0], large.devices[1].model_copy(update={"memory_bytes": 700_000})]
    machine = large.model_copy(update={"devices": devices})
    draft = small(8, machine)
    apply(draft, PartitionMip(), *BEHIND, memory=True)
    held = [sum(len(stage.blocks) for stage in draft.stages_on(d)) for d in range(2)]
    assert held[0] > held[1]


@pytest.mark.parametrize("num_devices", [1, 9])
def test_one_device_and_more_devices_than_blocks(num_devices: int) -> None:
    draft = small(machine=Hardware.cpu(num_devices=num_devices))
    decision = PartitionMip().plan(draft)
    assert 1 <= len(decision["stages"]) <= len(draft.blocks)
    apply(draft, PartitionMip(), *BEHIND, memory=True)


def test_unequal_devices_in_an_order() -> None:
    slow = Hardware.cpu(num_devices=2)
    fast = slow.devices[0].model_copy(
        update={"peak_flops": {"fp32": 1e14}, "memory_bandwidth": 1e13, "op_overhead_s": 0}
    )
    machine = slow.model_copy(update={"devices": [slow.devices[1].model_copy(update={"name": "slow"}), fast]})
    draft = small(8, machine)
    for order in ("0 1", "1 0"):
        decision = PartitionMip(stages=2, order=order).plan(draft)
        assert decision["planned_for"] == [int(d) for d in order.split()]
        sizes = dict(zip(decision["planned_for"], (len(stage) for stage in decision["stages"])))
        assert sizes[1] > sizes[0]


@pytest.mark.slow
def test_candidates_differ_in_their_number_of_stages() -> None:
    draft = small(16)
    found = candidates(draft, PartitionMip(deadline_s=2.0))
    counts = [len(c.cuts) - 1 for c in found]
    assert len(set(counts)) == len(counts) >= 5
    assert len(draft.blocks) in counts and min(counts) <= 2
    assert [c.seconds for c in found[:5]] == sorted(c.seconds for c in found[:5])
    for c in found:
        assert list(accumulate(len(stage) for stage in c.decision["stages"])) == list(c.cuts[1:])
        assert all(a < b for a, b in pairwise(c.cuts))
