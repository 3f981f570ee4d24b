"""Models that Python code makes, models of the hub's cache, and names as people type them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import penstock
from penstock.compiler.models.hub import cached_directory
from penstock.compiler.models.named import find_model
from penstock.ir.errors import PlanError

CODE = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel

def small():
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=16))

class Wide(GPT2LMHeadModel):
    def __init__(self):
        super().__init__(GPT2Config(n_layer=1, n_embd=64, n_head=4, vocab_size=64, n_positions=16))

def plain():
    return torch.nn.Linear(2, 2)

def number():
    return 3

def needs(size):
    return size

class Own(torch.nn.Module):

    def __init__(self, inputs=None):
        super().__init__()
        self.inputs = inputs
        self.to_q, self.back = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.blocks = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sequential(torch.nn.Linear(8, 8)))

    def example_inputs(self, rows):
        return self.inputs or {"x": {"shape": [rows, 8]}, "step": {"shape": [rows], "dtype": "int64"}}

    def forward(self, x, step):
        return (self.back(self.blocks(self.to_q(x))).sum(1) - step).square().mean()

def empty():
    return Own({"x": [3, 8]})

class Wrong(Own):
    def example_inputs(self):
        return {}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_models.py"
    path.write_text(CODE)
    return path


def test_a_function_of_a_file(file: Path) -> None:
    named = find_model(f"{file}:small")
    assert named.head == "causal-lm" and not named.weights
    model = named.on_meta()
    assert all(value.is_meta for value in model.parameters())
    assert named.batch_spec(2, 8)["input_ids"]["shape"] == [2, 8]
    torch.testing.assert_close(next(named.load(3).parameters()), next(named.load(3).parameters()), rtol=0, atol=0)


def test_adapters_on_it_are_planned_with_and_without_peft(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    named = find_model(f"{file}:small", adapter="lora:r=2")
    expected = {name: (p.shape, p.requires_grad) for name, p in named.describe().named_parameters()}
    assert type(named.describe()).__name__ == "PeftModelForCausalLM"
    monkeypatch.setitem(sys.modules, "peft", None)
    assert {name: (p.shape, p.requires_grad) for name, p in named.describe().named_parameters()} == expected
    assert any(is_trained for _, is_trained in expected.values())


def test_a_class_by_its_dotted_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(file.parent))
    for name in ("my_models.Wide", "my_models:Wide"):
        assert find_model(name).config.n_embd == 64


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{file}:smal", "no function or class 'smal' .* there are small"),
        ("{file}", "say which function: .*my_models.py:NAME; there are small, Wide, plain, number, needs, Own$"),
        ("{file}:number", "gives a int; allowed is a torch.nn.Module"),
        ("{file}:plain", r"has no `config` of transformers.*give it a method example_inputs\(rows\)"),
        ("{file}:empty", r"example_inputs\(1\) gives 'x': \[3, 8\]; allowed is a dict of shapes"),
        ("{file}:Wrong", r"example_inputs\(1\) fails: TypeError"),
        ("{file}:needs", "cannot be made: TypeError: .*missing 1 required positional argument"),
        ("a..b", "no model 'a..b'"),
        ("gone.py:small", "there is no file gone.py"),
        ("json.tool:nothing", "no function or class 'nothing'"),
        ("json.gone:nothing", "cannot be imported"),
    ],
)
def test_mistakes(file: Path, name: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        find_model(name.format(file=file))


@pytest.mark.slow
def test_a_model_that_says_itself_what_a_batch_holds(file: Path) -> None:
    named = find_model(f"{file}:Own")
    assert named.batch_spec(3, 512) == {
        "x": {"shape": [3, 8], "dtype": "float32"}, "step": {"shape": [3], "dtype": "int64"},
    }  # fmt: skip
    assert named.items(3, 512) == (3, "row")
    batch = named.random_batch(3, 512)
    assert batch["x"].shape == (3, 8) and batch["step"].dtype == torch.int64
    job = penstock.compile(named.on_meta(), "rtx4090", example_inputs=named.batch_spec(4, 512), search_s=0.1)
    assert job.plan.micro_batches in (1, 2, 4)
    for option, said in (({"head": "causal-lm"}, "--head"), ({"num_labels": 2}, "--labels")):
        with pytest.raises(PlanError, match=f"says itself what a batch holds .*leave {said} out"):
            find_model(f"{file}:Own", **option)


@pytest.mark.parametrize("library", ["peft", ""])
def test_adapters_on_such_a_model(file: Path, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if library:
        pytest.importorskip(library)
    else:
        monkeypatch.setitem(sys.modules, "peft", None)
    for text, layers in (("lora:r=2", 3), ("lora:r=2,targets=all-linear", 3), ("lora:r=2,targets=to_q", 1)):
        model = find_model(f"{file}:Own", adapter=text).describe()
        assert sum(p.requires_grad for p in model.parameters()) == 2 * layers
    with pytest.raises(PlanError, match="targets=to_k matches no layer; did you mean to_q"):
        find_model(f"{file}:Own", adapter="lora:r=2,targets=to_k").describe()


def test_the_example_of_a_video_model(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path(__file__).parents[3] / "examples" / "video_dit.py"
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(PlanError, match=r"wan_14b': cannot be made: .*diffusers"):
        find_model(f"{file}:wan_14b")
    monkeypatch.undo()
    pytest.importorskip("diffusers", reason="its class is of diffusers, which nothing else needs")
    named = find_model(f"{file}:wan_14b")
    assert sum(p.numel() for p in named.on_meta().parameters()) == 14_288_491_584
    assert named.batch_spec(2, 512)["video"]["shape"] == [2, 16, 21, 60, 104]


def test_a_file_that_fails(tmp_path: Path) -> None:
    for code, said in (("raise KeyError('x')", "KeyError: 'x'"), ("raise SystemExit('usage')", "SystemExit: usage")):
        (tmp_path / "broken.py").write_text(code)
        with pytest.raises(PlanError, match=f"cannot be run: {said}"):
            find_model(f"{tmp_path / 'broken.py'}:f")


def test_a_file_finds_its_neighbours_and_a_package_the_working_directory(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file.rename(file.with_name("beside_it.py"))
    (file.parent / "models_here").mkdir()
    (file.parent / "models_here" / "__init__.py").write_text("from beside_it import Wide")
    file.write_text("from beside_it import small")
    assert find_model(f"{file}:small").config.n_embd == 32
    monkeypatch.chdir(file.parent)
    assert find_model("models_here.Wide").config.n_embd == 64


def test_what_the_code_decides_is_not_dropped_in_silence(file: Path) -> None:
    with pytest.raises(PlanError, match="its code makes 2 labels, and 3 are needed"):
        find_model(f"{file}:small", num_labels=3)
    with pytest.raises(PlanError, match="its code says how much dropout it has"):
        find_model(f"{file}:small", dropout=False)


def test_what_the_hubs_cache_has_is_taken_with_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants
    from transformers import GPT2Config, GPT2LMHeadModel

    cache = tmp_path / "hub"
    snapshot = cache / "models--me--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (cache / "models--me--tiny" / "refs").mkdir()
    (cache / "models--me--tiny" / "refs" / "main").write_text("abc")
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32)).save_pretrained(snapshot)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(cache))
    assert cached_directory("me/tiny") == snapshot
    named = find_model("me/tiny")
    assert named.directory == snapshot and named.weights
    assert json.loads((snapshot / "config.json").read_text())["n_embd"] == named.config.n_embd
