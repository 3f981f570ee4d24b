"""One program for every length: training equals eager PyTorch on the same batches, whatever their lengths and rows."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch.export import Dim
from zoo import without_cache, zoo

import penstock
from penstock.compiler.check.check import check
from penstock.compiler.strategies import PIPELINE
from penstock.ir import ops
from penstock.ir.errors import BatchError, CaptureError, PassError, PlanError
from penstock.tests.compiler.job.any_length.eager import CLOSE, SGD, Eager, assert_same_weights, tokens
from penstock.tests.compiler.reasons import reasons_of

SEQUENCE = Dim("sequence", min=4, max=48)
ROWS = Dim("rows", max=4)
ONE_LENGTH = [tokens(4, 32), tokens(4, 48, 1), tokens(4, 7, 2)]
MANY_LENGTHS = [[tokens(2, 5), tokens(2, 48, 1)], [tokens(2, 31, 2), tokens(2, 4, 3, ignored=0)]]
FEWER_ROWS = [tokens(3, 20, 4), [tokens(1, 9, 5), tokens(2, 17, 6)], tokens(2, 48, 7)]


def compile_job(name: str, devices: int = 1, memory: str = "64MB", **options: Any) -> tuple[penstock.Job, Eager]:
    model = without_cache(zoo()[name](dropout=0.0)[0])
    twin = Eager(model)
    arguments = {"example_inputs": tokens(4, 32), "optimizer": SGD, "micro_batches": 2, "strategy": "mobius"}
    hardware = penstock.Hardware.cpu(devices, memory=memory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return penstock.compile(model, hardware, **{"dynamic_shapes": SEQUENCE, **arguments, **options}), twin


@pytest.mark.parametrize(
    ("name", "devices", "memory"),
    [
        pytest.param("llama", 1, "64MB", marks=pytest.mark.slow),
        pytest.param("llama", 2, "64MB", marks=pytest.mark.slow),
        ("gpt2", 1, "730kB"),  # weights come from DRAM, forward runs again
        pytest.param("gpt2", 2, "64MB", marks=pytest.mark.slow),
        pytest.param("mixtral", 1, "64MB", marks=pytest.mark.slow),
        pytest.param("qwen3", 2, "64MB", marks=pytest.mark.slow),
        pytest.param("opt", 1, "64MB", marks=pytest.mark.slow),
        pytest.param("mistral", 1, "64MB", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_steps_of_any_length_equal_eager(name: str, devices: int, memory: str) -> None:
    job, twin = compile_job(name, devices, memory, dynamic_shapes=(ROWS, SEQUENCE))
    swaps = any(node.target is ops.fetch for program in job.programs for node in program.ops())
    assert swaps == (memory != "64MB")
    with job:
        for batch in [*ONE_LENGTH, *MANY_LENGTHS, *FEWER_ROWS]:
            torch.testing.assert_close(job.step(batch), twin.step(batch), **CLOSE)
        for batch in (tokens(4, 11), tokens(3, 48)):
            found = job.evaluate(batch)
            torch.testing.assert_close(found.loss, twin.loss(batch), **CLOSE)
            assert found.logits.shape[:2] == batch["input_ids"].shape
        job.sync()
    assert_same_weights(job.model, twin.model)


@pytest.mark.slow
def test_the_printed_code_says_sequence() -> None:
    job, _ = shared()
    code = job.code()
    assert "sequence = input_ids.size(1)" in code and "f32[2, sequence, 32]" in code
    assert "32, sequence" not in code.replace("[2, sequence, 32]", "")
    stage = job.programs[0].interface.stages["stage0"]
    assert stage.inputs[0].shape == (2, 48) and stage.inputs[0].dims == ("", "sequence")


@pytest.mark.slow
def test_the_plan_is_for_the_most() -> None:
    job, _ = shared()
    fixed, _ = compile_job("llama", dynamic_shapes=None, example_inputs=tokens(4, 48))
    longest, most = fixed.simulate().peak_bytes["cpu0"], job.simulate().peak_bytes["cpu0"]
    assert longest <= most < 1.01 * longest  # a trace with symbols has a copy more


@pytest.mark.slow
def test_written_files_take_any_length_too(tmp_path: Any) -> None:
    job, twin = compile_job("llama")
    job.write(tmp_path)
    again = penstock.load(tmp_path, job.model)
    with again:
        for batch in [*ONE_LENGTH[:2], MANY_LENGTHS[0]]:
            torch.testing.assert_close(again.step(batch), twin.step(batch), **CLOSE)


@pytest.mark.slow
def test_one_trace_serves_all_numbers_of_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.compiler.capture import trace as tracing

    traces: list[Any] = []
    record = tracing._record
    monkeypatch.setattr(tracing, "_record", lambda *args: traces.append(args) or record(*args))
    job, twin = compile_job("llama", micro_batches="auto", strategy="auto", dynamic_shapes=(ROWS, SEQUENCE))
    assert len(traces) == 1
    with job:
        torch.testing.assert_close(job.step(tokens(4, 20)), twin.step(tokens(4, 20)), **CLOSE)


@functools.cache
def shared() -> tuple[penstock.Job, Eager]:
    return compile_job("llama")


class Means(torch.nn.Module):
    """A loss that is a mean over all that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()


def test_rows_that_micro_batches_cannot_share_need_a_loss_that_counts() -> None:
    x = torch.randn(4, 6, 4)
    options: dict[str, Any] = {"micro_batches": 2, "strategy": "balanced", "dynamic_shapes": {"x": {0: ROWS}}}
    job = penstock.compile(Means(), "laptop-16gb", example_inputs={"x": x}, **options)
    with pytest.raises(BatchError, match=r"has 3 rows, which 2 micro-batches cannot share evenly.*hand over 2 rows"):
        job.step({"x": x[:3]})
    with pytest.raises(BatchError, match="1 rows for 2 micro-batches"):
        job.step({"x": x[:1]})


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (tokens(4, 49), "sequence is 49 in a micro-batch, compiled for 4 to 48; cut it to 48, or compile .*max=49"),
        (tokens(4, 3), r"sequence is 3 in a micro-batch, compiled for 4 to 48; pad it to 4"),
        ([tokens(2, 8)] * 3, "a list of 3 micro-batches, and 2 make a step; compile with micro_batches=3"),
        ([tokens(2, 8), tokens(2, 50)], "sequence is 50"),
        (tokens(3, 8), "has 3 rows, compiled for 4; fill it up, or give the first dimension a name"),
        ({**tokens(4, 8), "labels": tokens(4, 9)["labels"]}, "sequence is 9, and 8 in batch"),
        ({**tokens(4, 8), "labels": tokens(3, 8)["labels"]}, "4 rows and batch"),
    ],
)  # fmt: skip
def test_batches_that_no_program_takes_are_named_before_anything_runs(batch: Any, words: str) -> None:
    job, _ = shared()
    with pytest.raises(BatchError, match=words):
        job.step(batch)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (Dim("sequence"), r"sequence has no max, for which memory is planned.*max=\.\.\."),
        (Dim("sequence", max=16), "sequence is 1 to 16, and the example has 32"),
        ({"input_id": {1: SEQUENCE}}, r"'input_id'\]: the batch has input_ids.*nearest: 'input_ids'"),
        ({"input_ids": {2: SEQUENCE}}, "names dimension 2; 'input_ids' has 2"),
        ({"input_ids": {1: Dim.AUTO}}, "it is a torch.export.Dim with a name and a max"),
        ({"input_ids": {1: 31}}, "None, or the example's size, 32"),
        ({"input_ids": None}, "leaves every size fixed"),
        ("sequence", "allowed are torch.export's form"),
        ((ROWS, SEQUENCE, SEQUENCE), "3 dimensions for every input"),
    ],
)  # fmt: skip
def test_dynamic_shapes_that_say_nothing_usable_are_named(shapes: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        compile_job("gpt2", dynamic_shapes=shapes)


@pytest.mark.slow
def test_inputs_of_one_model_that_share_a_length_must_all_be_named() -> None:
    """The mask and the labels have the length of the ids."""
    with pytest.raises(CaptureError, match="leaves dimension 1 of 'attention_mask' at 48, the most of sequence"):
        compile_job("llama", dynamic_shapes={"input_ids": {1: SEQUENCE}}, example_inputs=tokens(4, 48))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"cuda_graphs": True}, "cuda_graphs=True needs CUDA devices"),
        ({"compile_stages": True}, "compile_stages=True with dynamic_shapes"),
        ({"kernels": "fused"}, 'kernels="fused" with dynamic_shapes'),
    ],
)
def test_what_needs_fixed_sizes_is_refused(option: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        compile_job("gpt2", **option)


@pytest.mark.slow
def test_chains_of_a_strategy_need_fixed_sizes() -> None:
    with pytest.raises(PassError, match="fuse-pointwise with dynamic_shapes"):
        compile_job("gpt2", strategy=f"fuse-pointwise, {PIPELINE}")


@pytest.mark.slow
def test_a_list_of_micro_batches_of_one_length_needs_no_dynamic_shapes() -> None:
    job, twin = compile_job("gpt2", dynamic_shapes=None)
    with job:
        found = job.step([tokens(2, 32), tokens(2, 32, 1)])
        torch.testing.assert_close(found, twin.step([tokens(2, 32), tokens(2, 32, 1)]), **CLOSE)
        with pytest.raises(BatchError, match="compile with dynamic_shapes for micro-batches of different lengths"):
            job.step([tokens(2, 32), tokens(2, 30)])


@pytest.mark.slow
def test_steps_are_simulated_at_any_length() -> None:
    job, _ = shared()
    most, half = job.simulate(), job.simulate(sequence=24)
    assert job.simulate(sequence=48).step_s == most.step_s > half.step_s > job.simulate(sequence=4).step_s
    longer = compile_job("llama", example_inputs=tokens(4, 24), dynamic_shapes=None, plan=job.plan, strategy="auto")[0]
    assert half.step_s == pytest.approx(longer.simulate().step_s, rel=0.02)  # the same plan, compiled for this length
    found = job.throughput([4, 24, 24, 48])
    assert found.mean_length == 25 and found.tokens_per_s > found.padded_tokens_per_s
    assert job.throughput([tokens(4, 24), tokens(4, 24)]).mean_step_s == pytest.approx(half.step_s)
    assert "steps of other lengths (4 to 48; memory is for the most)" in reasons_of(job)


@pytest.mark.slow
def test_sizes_that_a_plan_does_not_have_are_named(tmp_path: Any) -> None:
    job, _ = shared()
    with pytest.raises(PlanError, match=r"simulate\(length=8\): the sizes that differ are sequence"):
        job.simulate(length=8)
    with pytest.raises(PlanError, match="compiled for 4 to 48"):
        job.simulate(sequence=64)
    with pytest.raises(PlanError, match="lengths is empty"):
        job.throughput([])
    job.write(tmp_path)
    with pytest.raises(PlanError, match="ask the job that compile made"):
        penstock.load(tmp_path, job.model).simulate(sequence=8)
    fixed, _ = compile_job("gpt2", dynamic_shapes=None)
    with pytest.raises(PlanError, match="compiled without dynamic_shapes"):
        fixed.simulate(sequence=8)


@pytest.mark.slow
def test_what_a_pass_makes_of_unknown_size_is_refused_before_it_runs() -> None:
    passes = (
        "split-vocabulary, coarsen, partition-balanced{stages=4}, map-round-robin, schedule-pipeline, insert-remat, "
        "insert-fetch, insert-optimizer"
    )
    config = transformers.LlamaConfig(
        vocab_size=20000, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    with pytest.raises(PassError, match="is not known to follow sequence: leave dynamic_shapes out"):
        penstock.compile(
            model, penstock.Hardware.cpu(2, memory="7MB"), example_inputs=tokens(4, 32), optimizer=SGD,
            strategy=passes, micro_batches=2, dynamic_shapes=SEQUENCE,
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("tokens_of_chunk", [7, 40])
def test_a_loss_in_chunks_takes_any_length(tokens_of_chunk: int) -> None:
    passes = f"chunk-loss{{tokens={tokens_of_chunk}}}, coarsen, partition-balanced{{stages=2}}, map-round-robin, "
    passes += "schedule-pipeline, insert-remat, insert-fetch, insert-optimizer"
    job, twin = compile_job("llama", strategy=passes, dynamic_shapes=(ROWS, SEQUENCE))
    assert "chunked_cross_entropy" in job.code()
    with job:
        for batch in (tokens(4, 9), tokens(3, 48, 1)):
            torch.testing.assert_close(job.step(batch), twin.step(batch), **CLOSE)
        job.sync()
    assert_same_weights(job.model, twin.model)


@pytest.mark.slow
def test_a_check_is_of_one_length() -> None:
    job, twin = compile_job("llama")
    with pytest.raises(PlanError, match=r"'input_ids' is \[4, 48\] in the first batch, and \[4, 20\] in batch 1"):
        check(job, twin.model, [tokens(4, 48), tokens(4, 20)])
    with pytest.raises(PlanError, match="batch 0 is a list of micro-batches; hand over whole batches"):
        check(job, twin.model, [[tokens(2, 8), tokens(2, 8)]])
    assert check(job, twin.model, [tokens(4, 20)]).passed
