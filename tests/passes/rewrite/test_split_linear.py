"""Linear layers in parts: jobs equal eager PyTorch, on devices that could not hold a layer; whatever is saved is
whole."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.export import Dim

import penstock
from penstock.cli.main import main
from penstock.compiler.capture.trace import trace
from penstock.compiler.job.job import Job
from penstock.compiler.strategies import STRATEGIES
from penstock.graph.layers import find_blocks
from penstock.ir.errors import PassError
from penstock.passes.draft import Draft, Options
from penstock.passes.rewrite.split_linear import SplitLinear
from penstock.tests.compiler.eager_baseline import (
    MICRO_BATCHES,
    SGD,
    Eager,
    assert_close,
    assert_trains_like_eager,
    zoo_case,
)
from penstock.tests.compiler.reasons import raises_misfit, reasons_of
from penstock.tests.golden_text import Golden
from penstock.tests.shown_elsewhere import slow_rows_but

BALANCED = STRATEGIES["balanced"]
# Parts add up the gradient of their common input, or their results, one after the other, and a product of another size
# may add up its terms in another order: as in test_job_parity.py.
REORDERED = 5e-6


class Layer(nn.Module):
    """Linear layers of all kinds, one of them frozen, two with the same weight, and an addition in place."""

    def __init__(self, width: int):
        super().__init__()
        self.q, self.k = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.tied, self.other = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.other.weight = self.tied.weight
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.raw = nn.Parameter(torch.randn(2 * width, width) / width)
        self.turned, self.shift = nn.Parameter(torch.randn(2 * width, width) / width), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x)
        q.mul_(0.5)
        x = x + self.other(torch.tanh(self.tied(q[..., 1::2] * k)))
        x = x + torch.relu(self.frozen(x))
        wide = F.linear(x, self.raw) + x @ self.turned.t()
        return x + torch.addmm(self.shift, wide.flatten(0, 1), self.turned).view_as(x)


class Model(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.table, self.layers = nn.Embedding(16, width), nn.ModuleList(Layer(width) for _ in range(2))
        self.head = nn.Linear(width, 3)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def case(width: int = 8) -> tuple[Model, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Model(width), {"ids": torch.randint(0, 16, (8, 6)), "labels": torch.randint(0, 3, (8, 6))}


class Perceptron(nn.Module):
    """Layers of two products, of 64 KiB each, beside which a micro-batch is small."""

    def __init__(self, layers: int = 2):
        super().__init__()
        wide = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(layers)]
        self.layers = nn.ModuleList(wide)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.mse_loss(x, y)


def wide_case(layers: int = 2) -> tuple[Perceptron, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Perceptron(layers), {"x": torch.randn(8, 64), "y": torch.randn(8, 64)}


def split(parts: int | str, strategy: str = BALANCED, stages: int = 0) -> str:
    cut = f"partition-balanced{{stages={stages}}}" if stages else "partition-balanced"
    made = strategy.replace("coarsen", f"split-linear{{parts={parts}}}, coarsen")
    return made.replace("partition-balanced", cut)


def job_of(model: nn.Module, batch: Any, memory: str = "64MB", num_devices: int = 1, **options: Any) -> Job:
    hardware = penstock.Hardware.cpu(num_devices=num_devices, memory=memory, dram="1GB")
    return penstock.compile(
        model,
        hardware,
        example_inputs=batch,
        **{"optimizer": SGD, "micro_batches": MICRO_BATCHES, "strategy": split(3), **options},
    )


@pytest.mark.parametrize(("parts", "stages"), slow_rows_but([(3, 12)], [(2, 0), (3, 12), (7, 20)]))
def test_linear_layers_of_all_kinds_in_parts_equal_eager(parts: int, stages: int) -> None:
    model, batch = case()
    job = job_of(model, batch, strategy=split(parts, stages=stages))
    names = [name.removeprefix("layers.0.") for name in job.plan.decisions.linear if name.startswith("layers.0")]
    assert names == ["q.weight", "k.weight", "tied.weight", "frozen.weight", "raw", "turned"]
    assert all(len(rows) - 1 == parts for rows in job.plan.decisions.linear.values())
    assert_trains_like_eager(job, batch, REORDERED)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "vit", "bert"])
def test_known_models_in_parts_equal_eager(name: str) -> None:
    model, batch = zoo_case(name)
    job = job_of(model, batch, strategy=split(3))
    specs = job.folder.interface.stages.values()
    wholes = {param.whole_name for spec in specs for param in spec.params if param.part}
    assert job.plan.decisions.linear.keys() <= wholes
    assert wholes.isdisjoint(param.name for spec in specs for param in spec.params)
    assert_trains_like_eager(job, batch, REORDERED)


def test_products_of_the_same_inputs_have_their_parts_one_after_the_other() -> None:
    """No block holds keys whole because a slice of the queries is made after them; what is changed in place after the
    first product is what the second one reads."""
    model, batch = case()
    graph = trace(model, batch)
    draft = Draft(graph, penstock.Hardware.cpu(), Options())
    p = SplitLinear(parts=2)
    p.rewrite(draft, p.plan(draft))
    names = [block.name.removeprefix("layers.0") for block in find_blocks(draft.graph)]
    assert names[1:6] == [".q[0:8]", ".q[8:16]", ".k[0:4]", ".k[4:8]", ""]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "balanced", "mobius"])
def test_a_layer_that_no_device_holds_is_trained(strategy: str) -> None:
    model, batch = wide_case()
    with raises_misfit(r"block 'layers.1' alone needs 339 KiB"):
        job_of(model, batch, "300kB", strategy=BALANCED)
    job = job_of(model, batch, "300kB", strategy=strategy, search_s=1.0)
    assert {len(rows) - 1 for rows in job.plan.decisions.linear.values()} == {2}
    assert job.plan.predicted is not None and job.plan.predicted.peak_bytes["cpu0"] <= 300_000
    assert "layers.0.0.weight and 3 more are in 2 parts" in reasons_of(job)
    assert_trains_like_eager(job, batch, REORDERED)


def test_layers_that_fit_stay_whole() -> None:
    model, batch = wide_case()
    job = job_of(model, batch, strategy=split("auto"))
    assert job.plan.decisions.linear == {}
    plain = job_of(model, batch, strategy=BALANCED)
    assert job.code(0).split('"""')[2] == plain.code(0).split('"""')[2]


@pytest.mark.parametrize(("memory", "counts"), [("2MB", []), ("600kB", [2]), ("300kB", [2, 2]), ("150kB", [4, 4])])
def test_as_few_weights_are_split_as_the_device_needs(memory: str, counts: list[int]) -> None:
    """A layer is held in 512 KiB and 2.5 KiB of biases: two weights and gradients of 64 KiB, and a gradient that is
    added to one of them, with a gap."""
    model, batch = wide_case()
    draft = Draft(trace(model, batch), penstock.Hardware.cpu(num_devices=1, memory=memory))
    found = SplitLinear().plan(draft)
    assert [len(rows) - 1 for name, rows in found.items() if name.startswith("layers.0")] == counts
    assert SplitLinear().divides(draft) == bool(counts)
    assert SplitLinear().must_divide(draft) == (memory in ("300kB", "150kB"))
    assert SplitLinear().has_room(draft, 1.0) and not SplitLinear().has_room(draft, 1000.0)


@pytest.mark.slow
@given(st.sets(st.integers(1, 255), min_size=1, max_size=4), st.sets(st.integers(1, 63), min_size=1, max_size=4))
@settings(max_examples=5, deadline=None)
def test_parts_of_any_rows_give_the_whole_result(first: set[int], second: set[int]) -> None:
    model, batch = wide_case()
    graph = trace(model.double(), {name: value.double() for name, value in batch.items()})
    draft = Draft(graph, penstock.Hardware.cpu())
    rows = {"layers.0.0.weight": [0, *sorted(first), 256], "layers.1.2.weight": [0, *sorted(second), 64]}
    SplitLinear().rewrite(draft, rows)
    inputs = {name: value.double() for name, value in batch.items()}
    torch.testing.assert_close(draft.graph.module(**inputs)["loss"], model(**inputs), rtol=1e-14, atol=0)


def test_the_file_fetches_named_parts(golden: Golden) -> None:
    model, batch = wide_case(layers=1)
    with job_of(model, batch, "300kB", strategy=split("auto", stages=6), micro_batches=1) as job:
        text = job.code(0)
        golden(text[text.index("class Stage0") : text.index("def evaluate")], "perceptron")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["balanced", "mobius-ssd", "fuyou"])
def test_dropout_and_states_on_every_tier(strategy: str, tmp_path: Path) -> None:
    """Dropout's seeds are of a module's place, which parts do not change; a job without parts draws the same."""
    model, batch = zoo_case("gpt2", dropout=0.1)
    hardware = penstock.Hardware.cpu(num_devices=1, memory="400kB", dram="1GB").with_(ssds=1)
    (tmp_path / "disk").mkdir()
    options: dict[str, Any] = {"example_inputs": batch, "optimizer": SGD, "micro_batches": MICRO_BATCHES}
    options |= {"ssd_dirs": [tmp_path / "disk"]}
    text = STRATEGIES[strategy]
    with penstock.compile(copy.deepcopy(model), hardware, strategy=text, **options) as job:
        wanted = {i: job.step(batch) for i in range(3)}
        trained = job.state_dict()
    with penstock.compile(model, hardware, strategy=split(3, text), **options) as job:
        assert job.plan.decisions.linear
        assert_close({i: job.step(batch) for i in range(3)}, wanted, 1e-6)
        assert_close(job.state_dict(), trained, REORDERED)


@pytest.mark.slow
@pytest.mark.multi
def test_in_real_processes_with_weights_in_dram_and_clipping() -> None:
    model, batch = wide_case()
    job = job_of(model, batch, "250kB", num_devices=2, strategy=split(4, stages=16), max_grad_norm=0.5)
    assert job.plan.decisions.fetch
    assert_trains_like_eager(job, batch, REORDERED, max_grad_norm=0.5)


@pytest.mark.slow
def test_two_devices_with_layers_that_neither_holds() -> None:
    """The search gives all parts of a layer to one device."""
    model, batch = wide_case()
    job = job_of(model, batch, "300kB", num_devices=2, strategy="auto", search_s=2.0)
    assert job.plan.decisions.linear
    assert_trains_like_eager(job, batch, REORDERED)


@pytest.mark.slow
def test_batches_of_any_length(tmp_path: Path) -> None:
    """Parts say of which sizes their results are."""
    model, batch = case()
    job = job_of(model, batch, strategy=split(2, stages=8), dynamic_shapes=Dim("tokens", min=2, max=6))
    eager = Eager(model)
    with job:
        for length in (6, 4):
            shorter = {name: value[:, :length].contiguous() for name, value in batch.items()}
            assert_close({"loss": job.step(shorter)}, {"loss": eager.step(shorter)}, 1e-6)


@pytest.mark.slow
def test_a_checkpoint_resumes_with_other_parts_or_none(tmp_path: Path) -> None:
    model, batch = case()
    with job_of(copy.deepcopy(model), batch, strategy=split(3, stages=8)) as job:
        job.step(batch)
        saved = job.save(tmp_path / "parts")
        wanted = {i: job.step(batch) for i in range(2)}
    for strategy in (split(4), BALANCED):
        with job_of(copy.deepcopy(model), batch, strategy=strategy) as job:
            job.resume(saved)
            assert_close({i: job.step(batch) for i in range(2)}, wanted, REORDERED)
            whole = job.save(tmp_path / "whole")
            last = job.step(batch)
        with job_of(copy.deepcopy(model), batch, strategy=split(5)) as job:
            job.resume(whole)
            assert_close({"loss": job.step(batch)}, {"loss": last}, REORDERED)


@pytest.mark.slow
def test_the_model_and_files_have_whole_weights(tmp_path: Path) -> None:
    model, batch = zoo_case("llama")
    eager = Eager(model)
    with job_of(model, batch, strategy=split(3, stages=9)) as job:
        job.step(batch)
        eager.step(batch)
        trained = job.state_dict()
        assert_close(trained, eager.model.state_dict(), REORDERED)
        job.save_pretrained(tmp_path / "weights")
        job.sync()
    assert_close(dict(model.state_dict()), trained, 0.0)
    assert_close(load_file(tmp_path / "weights" / "model.safetensors"), trained, 0.0)
    eager = Eager(model)
    with torch.device("meta"):
        empty = type(model)(model.config).train()
    with job_of(empty, batch, strategy=split(4), weights=tmp_path / "weights") as job:  # read by rows
        assert_close({"loss": job.step(batch)}, {"loss": eager.step(batch)}, 1e-6)


@pytest.mark.slow
def test_what_cannot_be_split_is_named() -> None:
    model, batch = wide_case()
    with raises_misfit(r"layers.0.0.weight and 3 more stay whole: its optimizer looks at whole"):
        job_of(model, batch, "300kB", strategy="mobius", optimizer=partial(torch.optim.Adafactor, lr=0.01))
    with pytest.raises(PassError, match=r"4 more|and 3 more stay whole: its optimizer looks at whole parameters"):
        job_of(model, batch, optimizer=partial(torch.optim.Adafactor, lr=0.01))
    with pytest.raises(PassError, match=r"layers.0.0.weight and 1 more stay whole: it has 256 rows only"):
        job_of(model, batch, strategy=split(257))
    model, batch = zoo_case("wide_resnet")
    with pytest.raises(PassError, match="split-linear"):
        job_of(model, batch, strategy=split(99))


class Regularised(Perceptron):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = super().forward(x, y)
        return loss + 1e-3 * self.layers[0][0].weight.square().mean()  # type: ignore[index,union-attr,operator]


def test_a_weight_that_something_else_reads_stays_whole() -> None:
    _, batch = wide_case()
    job = job_of(Regularised(), batch, strategy=split(2))
    assert list(job.plan.decisions.linear) == ["layers.0.2.weight", "layers.1.0.weight", "layers.1.2.weight"]
    assert "layers.0.0.weight stays whole: test_split_linear.py" in reasons_of(job)
    assert_trains_like_eager(job, batch, REORDERED)


@pytest.mark.parametrize(
    ("rows", "nearest"),
    [([0, 90, 30, 256], "[0, 30, 90, 256]"), ([0, 300], "[0, 128, 256]"), ([2, 30], "[0, 2, 30, 256]")],
)
def test_an_edited_plan_whose_parts_do_not_divide_is_refused(rows: list[int], nearest: str) -> None:
    model, batch = wide_case()
    plan = job_of(model, batch).plan
    plan.decisions.linear["layers.0.0.weight"] = rows
    with pytest.raises(PassError, match=r"layers.0.0.weight begin at rows .* 256 must end the list") as error:
        job_of(model, batch, strategy="auto", micro_batches="auto", plan=plan)
    assert str(error.value).endswith(f"nearest: {nearest}")


def test_an_edited_plan_with_an_unknown_weight_is_refused() -> None:
    model, batch = wide_case()
    plan = job_of(model, batch).plan
    plan.decisions.linear["layers.0.1.weight"] = [0, 1, 2]
    with pytest.raises(PassError, match=r"'layers.0.1.weight' is no weight of .*nearest: layers.0.2.weight, "):
        job_of(model, batch, strategy="auto", micro_batches="auto", plan=plan)


@pytest.mark.slow
def test_an_edited_plan_with_other_rows_is_carried_out(tmp_path: Path) -> None:
    model, batch = wide_case()
    plan = job_of(model, batch, strategy=split(2, stages=6)).plan
    names = {"layers.0.0[0:128]": "layers.0.0[0:5]", "layers.0.0[128:256]": "layers.0.0[5:256]"}
    decided = plan.decisions
    decided.linear["layers.0.0.weight"] = [0, 5, 256]
    decided.blocks = {names.get(name, name): count for name, count in decided.blocks.items()}
    decided.stages = [[names.get(name, name) for name in stage] for stage in decided.stages]
    job = job_of(model, batch, strategy="auto", micro_batches="auto", plan=plan)
    job.write(tmp_path)
    assert_trains_like_eager(penstock.load(tmp_path, model), batch, REORDERED)


@pytest.mark.slow
def test_a_model_of_805_billion_parameters_is_planned_on_one_card(capsys: pytest.CaptureFixture[str]) -> None:
    """Two layers of Fuyou's largest GPT-3, of which one takes 25.9 GiB: c_fc and c_proj in two parts are enough."""
    line = ["--hardware", "4090", "--dram", "1TB", "--search-seconds", "2", "--no-alternatives", "--json"]
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--model", "gpt3-805b:n_layer=2", *line])
    assert not ended.value.code
    linear = json.loads(capsys.readouterr().out)["decisions"]["linear"]
    names = [f"transformer.h.{i}.mlp.{name}.weight" for i in range(2) for name in ("c_fc", "c_proj")]
    assert {name: len(rows) - 1 for name, rows in linear.items()} == dict.fromkeys(names, 2)
