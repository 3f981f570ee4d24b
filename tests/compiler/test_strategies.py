"""Strategies as text: parsed, printed, run pass by pass with a record of each."""

from __future__ import annotations

import pytest

import penstock
from penstock.compiler.capture.trace import trace
from penstock.compiler.pipeline import parse_pipeline, pipeline_text, run_passes
from penstock.compiler.strategies import STRATEGIES
from penstock.ir.errors import PassError
from penstock.passes.draft import Draft, Options
from penstock.passes.mapping.map_replicas import MapReplicas
from penstock.passes.memory.keep_stages import KeepStages
from penstock.passes.memory.unpack_once import UnpackOnce
from penstock.passes.partition.partition_balanced import PartitionBalanced
from penstock.passes.rewrite.fuse_pointwise import FusePointwise
from penstock.passes.rewrite.recompute_pointwise import RecomputePointwise
from penstock.passes.rewrite.split_context import SplitContext
from penstock.passes.rewrite.split_experts import SplitExperts
from penstock.passes.rewrite.split_linear import SplitLinear
from penstock.passes.rewrite.split_vocabulary import SplitVocabulary
from penstock.passes.rewrite.split_width import SplitWidth
from penstock.passes.rewrite.tile_sequence import TileSequence
from penstock.passes.rewrite.use_float8 import UseFloat8
from penstock.passes.table import PASSES
from penstock.tests.compiler.eager_baseline import zoo_case
from penstock.tests.zoo import zoo

LINE = STRATEGIES["balanced"]


@pytest.mark.parametrize("text", [*STRATEGIES, LINE, LINE.replace("balanced", "balanced{stages=4}"), "coarsen"])
def test_text_and_passes_are_the_same_thing(text: str) -> None:
    passes = parse_pipeline(text, num_devices=2)
    assert parse_pipeline(pipeline_text(passes), num_devices=2) == passes


def test_options() -> None:
    line = "coarsen ,  partition-balanced{ stages = 3 }, map-round-robin,schedule-pipeline,insert-remat,"
    line += " insert-fetch{prefetch=false}"
    found = parse_pipeline(line, num_devices=2)
    assert [p.name for p in found] == [part.partition("{")[0].strip() for part in line.split(",")]
    assert found[1].stages == 3 and found[5].prefetch is False  # type: ignore[attr-defined]
    (cut,) = (p for p in parse_pipeline("gpipe", num_devices=5) if isinstance(p, PartitionBalanced))
    assert cut.stages == 5
    assert pipeline_text(found).endswith("insert-fetch{prefetch=false}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mobious", "did you mean mobius"),
        ("", "neither a strategy"),
        ("coarsen, partition-balance", "no pass 'partition-balance'; did you mean partition-balanced"),
        ("coarsen; partition-balanced", "coarsen; partition-balanced"),
        ("coarsen, , partition-balanced", "'' is no pass"),
        ("coarsen, partition-balanced{stages=4", "stages=4"),
        ("coarsen, partition-balanced{stage=4}", "no option 'stage'; it has stages"),
        ("coarsen, partition-balanced{stages=many}", "stages='many' is not int"),
        ("coarsen, partition-balanced{stages}", "stages='' is not int"),
        ("coarsen, coarsen", "comes twice"),
        ("partition-balanced, coarsen", "needs blocks.*put coarsen before it"),
    ],
)
def test_text_that_means_nothing(text: str, said: str) -> None:
    with pytest.raises(PassError, match=said):
        parse_pipeline(text, num_devices=2)


def test_every_pass_is_named_like_its_file_and_used() -> None:
    for name, kind in PASSES.items():
        assert kind.__module__.rpartition(".")[2] == name.replace("-", "_")
    named = {p.name for text in STRATEGIES for p in parse_pipeline(text, num_devices=2)}
    # The search adds these where memory is short, or steps are long, or a wish asks for them.
    searched = {SplitVocabulary.name, SplitExperts.name, SplitLinear.name, RecomputePointwise.name}
    searched |= {SplitContext.name, SplitWidth.name, TileSequence.name, MapReplicas.name, KeepStages.name}
    searched |= {UnpackOnce.name, FusePointwise.name, UseFloat8.name}
    assert set(PASSES) == named | searched and not named & searched


def test_passes_are_recorded_dumped_and_replayed() -> None:
    model, batch = zoo()["gpt2"](dropout=0.0)
    graph, hardware = trace(model, batch), penstock.Hardware.cpu(num_devices=2, memory="250kB")
    draft, seen = Draft(graph, hardware, Options(micro_batches=2)), []
    passes = parse_pipeline("balanced", num_devices=2)
    decisions, records = run_passes(draft, passes, dump=lambda name, _: seen.append(name), record=True)
    assert seen == [r.name for r in records] == [p.name for p in passes]
    assert set(decisions) == {name for p in passes for name in p.fields()}
    assert [r.step_s is None for r in records] == [r.peak_bytes is None for r in records]
    before = [p.name for p in passes].index("schedule-pipeline")
    assert [r.step_s is None for r in records] == [i < before for i in range(len(passes))]
    assert all(r.took_s > 0 for r in records) and sum(r.ops_added for r in records) == sum(
        len(list(program.ops())) for program in draft.programs
    )
    again = Draft(graph, hardware, Options(micro_batches=2))
    replayed, _ = run_passes(again, passes, decisions)
    assert replayed == decisions
    assert [str(p.graph) for p in again.programs] == [str(p.graph) for p in draft.programs]


def test_a_whole_strategy_is_needed_for_a_job() -> None:
    """A line that stops early is a plan for nothing: said before anything is printed."""
    model, batch = zoo_case("mlp")
    short = LINE.rpartition(",")[0]
    with pytest.raises(PassError, match="insert-optimizer"):
        penstock.compile(model, penstock.Hardware.cpu(), example_inputs=batch, strategy=short, micro_batches=4)
