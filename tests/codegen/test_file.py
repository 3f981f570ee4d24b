"""The text of a whole file: as a person reads it, and its length as models grow."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from penstock.codegen.file import Header, write_file
from penstock.ir import ops
from penstock.ir.program import Program, TensorSpec, parse_program, place_frees, print_program
from penstock.tests.codegen.generated import Generated, generate, run
from penstock.tests.codegen.tiny import Tiny, tiny_batch
from penstock.tests.golden_text import Golden

HEADER = Header(
    model="tiny, 3 blocks, 260 parameters",
    hardware="a desk",
    device_name="gpu0, root complex 0",
    passes=("coarsen", "partition-balanced", "schedule-pipeline"),
    plan="9f31c2, micro-batches 1 x 2, fp32",
    predict="1.2 ms a step; gpu0 1.61 KiB of 22.5 GiB",
)


@pytest.fixture
def generated() -> Generated:
    torch.manual_seed(0)
    made = generate(Tiny(), tiny_batch(), 2)
    specs = {i.name: TensorSpec(i.name, i.shape, i.dtype) for s in made.stages for i in s.spec.inputs}
    batch = {name: specs[name] for name in ("ids", "labels")}
    made.interface = dataclasses.replace(made.interface, batch=batch)
    return made


def programs(generated: Generated) -> tuple[Program, Program]:
    """One device runs both stages, the first one's weights fetched anew for its backward pass."""
    first, second = (stage.spec for stage in generated.stages)
    interface = generated.interface
    step, predict = Program(0, interface), Program(0, interface, function="evaluate")
    for program in (step, predict):
        values = {i: program.emit(ops.load, program.batch, i, micro_batch=0, names=[i])[0] for i in ("ids", "labels")}
        (w0,) = program.emit(ops.fetch, "stage0.weights", names=["w0"])
        inputs = [values[i.name] for i in first.inputs]
        if program is predict:
            values |= zip_names(first.outputs, program.emit(ops.evaluate, "stage0", w0, *inputs, micro_batch=0))
            (w1,) = program.emit(ops.resident, "stage1.weights", names=["w1"])
            rest = [values[i.name] for i in second.inputs]
            loss, logits = program.emit(ops.evaluate, "stage1", w1, *rest, micro_batch=0, names=["loss", "logits"])
            program.returns({"loss": [loss], "logits": [logits]})
            continue
        values |= zip_names(first.outputs, program.emit(ops.forward, "stage0", w0, *inputs, micro_batch=0, keep=False))
        (w1,) = program.emit(ops.resident, "stage1.weights", names=["w1"])
        rest = [values[i.name] for i in second.inputs]
        loss, kept = program.emit(ops.forward, "stage1", w1, *rest, micro_batch=0, names=["loss", "kept"])
        dx, g1 = program.emit(ops.backward, "stage1", w1, kept, rest, [1.0], micro_batch=0, names=["dx", "g1"])
        (again,) = program.emit(ops.fetch, "stage0.weights", names=["w0_again"])
        (g0,) = program.emit(ops.backward, "stage0", again, None, inputs, [dx], micro_batch=0, names=["g0"])
        program.emit(ops.step, "stage1", g1)
        (g0_dram,) = program.emit(ops.offload, g0, names=["g0_dram"])
        program.emit(ops.step, "stage0", g0_dram)
        program.returns({"loss": [loss]})
    place_frees(step)
    place_frees(predict)
    return step, predict


def zip_names(specs, nodes):  # type: ignore[no-untyped-def]
    return dict(zip((s.name for s in specs), nodes))


def test_golden_file(generated: Generated, golden: Golden) -> None:
    step, predict = programs(generated)
    graphs = {stage.spec.name: stage.graph for stage in generated.stages}
    golden(write_file(step, predict, graphs, HEADER), "tiny")


def test_both_programs_are_parsed_back(generated: Generated) -> None:
    step, predict = programs(generated)
    text = write_file(step, predict, {s.spec.name: s.graph for s in generated.stages}, HEADER)
    for program in (step, predict):
        back = parse_program(text, generated.interface, 0, program.function)
        assert print_program(back) == print_program(program)


def test_header_survives_quotes_and_backslashes(generated: Generated) -> None:
    step, _ = programs(generated)
    header = dataclasses.replace(HEADER, model='a """quoted""" \\path', passes=tuple(f"pass-{i}" for i in range(40)))
    text = write_file(step, None, {s.spec.name: s.graph for s in generated.stages}, header)
    scope: dict[str, object] = {}
    exec(compile(text, "file", "exec"), scope)
    assert "\\path" in str(scope["__doc__"])
    assert max(map(len, str(scope["__doc__"]).splitlines())) <= 120


def test_only_the_public_base_classes_are_imported_from_penstock(generated: Generated) -> None:
    lines = [line for line in generated.text.splitlines() if "penstock" in line]
    assert lines == ["from penstock.runtime.modules import Scope, Stage, draw_at"]


def gpt(num_layers: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    import transformers

    config = transformers.GPT2Config(
        n_layer=num_layers, n_embd=8, n_head=2, vocab_size=32, n_positions=8, use_cache=False, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    batch = {name: torch.empty(2, 8, dtype=torch.long, device="meta") for name in ("input_ids", "labels")}
    return model, {**batch, "attention_mask": batch["labels"]}


@pytest.mark.slow
def test_length_does_not_grow_with_the_model() -> None:
    small, large = (generate(*gpt(layers), num_stages=2).text.splitlines() for layers in (4, 96))
    assert len(large) <= 1.1 * len(small)
    assert sum("class GPT2Block" in line for line in large) == 1


class Alternating(nn.Module):
    """Two kinds of layers in turn: one class each, and one loop over both."""

    def __init__(self, num_layers: int):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4) if i % 2 else nn.Tanh()) for i in range(num_layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def test_alternating_layers_are_one_loop(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = Alternating(8), {"x": torch.randn(2, 4)}
    generated = generate(model, batch)
    assert "for i in range(0, 8, 2):" in generated.text
    assert "self.layers[i + 1](" in generated.text
    assert len(generated.text.splitlines()) == len(generate(Alternating(4), batch).text.splitlines())
    result = run(generated, generated.load(tmp_path), batch, training=True)
    assert torch.equal(result["loss"], model(**batch))


class Residual(nn.Module):
    """The input of the loop is read again after it."""

    def __init__(self, num_layers: int = 3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_layers))
        self.first = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = h = self.first(x)
        for layer in self.layers:
            h = torch.relu(layer(h)) + 1
        return (h * start).mean()


def test_a_value_needed_behind_a_loop_is_kept(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = Residual(), {"x": torch.randn(2, 4)}
    generated = generate(model, batch)
    result = run(generated, generated.load(tmp_path), batch, training=True)
    assert torch.equal(result["loss"], model(**batch))
