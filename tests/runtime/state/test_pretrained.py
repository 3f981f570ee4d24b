"""Saved models load in transformers with equal weights, nothing missing, nothing unexpected, one stage at a time."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from penstock.ir.errors import CheckpointError, PlanError
from penstock.ir.program import ParamSpec, StageSpec
from penstock.runtime.model_names import named_tensors, ties_of, unsaved_buffers
from penstock.runtime.state import pretrained, tensor_file
from penstock.runtime.state.pretrained import save_pretrained
from penstock.runtime.state.weights import open_directory, stage_weights
from penstock.tests.runtime.state.fresh_weights import FreshWeights
from penstock.tests.shown_elsewhere import slow_but

Stage = tuple[StageSpec, dict[str, Tensor], dict[str, Tensor]]


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


def llama(tied: bool = False) -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        vocab_size=50,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(num_layers=2, d_model=16, d_kv=8, d_ff=32, num_heads=2, vocab_size=50)
    return transformers.T5ForConditionalGeneration(config)


def bert(head: str = "SequenceClassification") -> nn.Module:
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=32, num_attention_heads=2, vocab_size=50
    )
    return getattr(transformers, f"BertFor{head}")(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        num_hidden_layers=1, hidden_size=16, intermediate_size=32, num_attention_heads=2, image_size=16, patch_size=8
    )
    return transformers.ViTForImageClassification(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        num_hidden_layers=1,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=50,
        num_local_experts=3,
    )
    return transformers.MixtralForCausalLM(config)


def stages_of(model: nn.Module, count: int, unused: tuple[str, ...] = ()) -> Iterator[Stage]:
    """The model's tensors as fp32 masters in `count` stages; a later name of a tie is owned by no stage."""
    tensors = {n: t for n, t in named_tensors(model).items() if n not in unused}
    params, ties = dict(model.named_parameters(remove_duplicate=False)), ties_of(model)
    for i in range(count):
        mine = [n for j, n in enumerate(tensors) if j * count // len(tensors) == i]
        rows = [ParamSpec(n, tuple(tensors[n].shape), "float32", owner=n not in ties) for n in mine]
        spec = StageSpec(
            f"stage{i}",
            (),
            (),
            tuple(r for r in rows if r.name in params),
            tuple(r for r in rows if r.name not in params),
        )
        weights = {n: tensors[n].detach().float() for n in mine if n in params}
        yield spec, weights, {n: tensors[n] for n in mine if n not in params}


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def assert_loads(directory: Path, model: nn.Module) -> nn.Module:
    loaded, info = type(model).from_pretrained(directory, output_loading_info=True, dtype="auto")
    assert {kind: list(keys) for kind, keys in info.items() if keys} == {}
    expected = model.state_dict()
    found = loaded.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, name
    assert ties_of(loaded) == ties_of(model)
    return loaded


@pytest.mark.parametrize(
    "make",
    [gpt2, llama, lambda: llama(tied=True), t5, bert, lambda: bert("MaskedLM"), vit, mixtral]
    + [lambda: gpt2().bfloat16(), lambda: llama().half()],
)
@pytest.mark.parametrize("max_shard_bytes", slow_but([8000], [10**9, 8000]))
def test_transformers_loads_it_with_nothing_missing(tmp_path: Path, make, max_shard_bytes: int) -> None:
    model = make()
    before = model.config.to_dict()
    save_pretrained(tmp_path / "m", stages_of(model, 3), model, max_shard_bytes=max_shard_bytes)
    assert model.config.to_dict() == before
    assert_loads(tmp_path / "m", model)
    files = sorted(p.name for p in (tmp_path / "m").glob("*.safetensors*"))
    if max_shard_bytes == 10**9:
        assert files == ["model.safetensors"]
        return
    assert "model.safetensors.index.json" in files and f"model-00001-of-{len(files) - 1:05d}.safetensors" in files
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    state = {
        n: t for n, t in named_tensors(model).items() if n not in unsaved_buffers(model) and n not in ties_of(model)
    }
    assert index["metadata"]["total_size"] == sum(t.numel() * t.itemsize for t in state.values())
    for file in {*index["weight_map"].values()}:
        rows = load_file(tmp_path / "m" / file)
        assert len(rows) == 1 or sum(t.numel() * t.itemsize for t in rows.values()) <= 8000


def test_the_same_files_hold_what_transformers_would_write(tmp_path: Path) -> None:
    model = gpt2()
    save_pretrained(tmp_path / "ours", stages_of(model, 2), model)
    model.save_pretrained(tmp_path / "theirs")
    assert {p.name for p in (tmp_path / "ours").iterdir()} == {p.name for p in (tmp_path / "theirs").iterdir()}
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "ours" / name).read_text() == (tmp_path / "theirs" / name).read_text()
    ours, theirs = (load_file(tmp_path / who / "model.safetensors") for who in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()


def test_a_model_on_meta_is_enough_and_an_auto_class_loads_it(tmp_path: Path) -> None:
    model = bert()
    save_pretrained(tmp_path, stages_of(model, 4), on_meta(bert))
    assert_loads(tmp_path, model)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(loaded.classifier.weight, model.classifier.weight)
    empty = on_meta(bert)  # and it can be trained again
    source = open_directory(tmp_path, empty)
    spec = next(stages_of(model, 1))[0]
    assert all(torch.equal(t, named_tensors(model)[n]) for n, t in stage_weights(source, spec).items())


def test_tensors_that_no_stage_uses_come_from_the_source(tmp_path: Path) -> None:
    model, unused = bert(), ("bert.pooler.dense.weight", "classifier.bias")
    save_pretrained(tmp_path / "live", stages_of(model, 2, unused), model)
    assert_loads(tmp_path / "live", model)
    empty = on_meta(bert)
    with pytest.raises(PlanError, match=r"'bert\.pooler\.dense\.weight' is on the meta device"):
        save_pretrained(tmp_path / "meta", stages_of(model, 2, unused), empty)
    assert not (tmp_path / "meta").exists()
    source = FreshWeights(empty, seed=1)
    save_pretrained(tmp_path / "meta", stages_of(model, 2, unused), empty, source=source)
    loaded = load_file(tmp_path / "meta" / "model.safetensors")
    assert torch.equal(loaded[unused[0]], source.read(unused[0]))


def test_stages_may_be_written_by_processes_of_their_own(tmp_path: Path) -> None:
    model = t5()
    layout = pretrained.plan_layout(model, 20000)
    temporary = pretrained.begin(tmp_path / "m", layout)
    written: set[str] = set()
    for _, weights, buffers in reversed(list(stages_of(model, 3))):
        elsewhere = pickle.loads(pickle.dumps(layout))
        written |= pretrained.write_stage(temporary, {**weights, **buffers}, elsewhere)
    pretrained.finish(temporary, tmp_path / "m", layout, written, model)
    assert_loads(tmp_path / "m", model)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("index", torch.arange(3), persistent=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("make", [Tied, lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))])
def test_a_plain_module_gets_a_file_for_its_state_dict(tmp_path: Path, make) -> None:
    model, other = make(), make()
    save_pretrained(tmp_path / "m", stages_of(model, 2), model)
    assert [p.name for p in (tmp_path / "m").iterdir()] == ["model.safetensors"]
    load_model(other, tmp_path / "m" / "model.safetensors")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in other.state_dict().items())
    third = make()
    missing, unexpected = third.load_state_dict(load_file(tmp_path / "m" / "model.safetensors"), strict=False)
    assert (missing, unexpected) == (list(ties_of(model)), [])
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in third.state_dict().items())


def test_an_existing_directory_is_replaced_and_other_files_are_kept(tmp_path: Path) -> None:
    first, second = gpt2(), gpt2()
    save_pretrained(tmp_path / "m", stages_of(first, 2), first, max_shard_bytes=8000)
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    (tmp_path / "m" / "extra").mkdir()
    (tmp_path / "m" / "extra" / "note.txt").write_text("kept")
    save_pretrained(tmp_path / "m", stages_of(second, 2), second)
    assert_loads(tmp_path / "m", second)
    kept = {"config.json", "extra", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert {p.name for p in (tmp_path / "m").iterdir()} == kept
    assert (tmp_path / "m" / "extra" / "note.txt").read_text() == "kept"


def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, worse = gpt2(), gpt2()
    save_pretrained(tmp_path / "m", stages_of(model, 2), model)

    def interrupt() -> Iterator[Stage]:
        yield next(stages_of(worse, 2))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_pretrained(tmp_path / "m", interrupt(), worse)
    real, calls = tensor_file._write_all, []

    def full(file, data: memoryview) -> None:
        calls.append(len(data))
        if len(calls) > 5:
            raise OSError(28, os.strerror(28))
        real(file, data)

    monkeypatch.setattr(tensor_file, "_write_all", full)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the disk is full: .* are needed, .* are free"):
        save_pretrained(tmp_path / "m", stages_of(worse, 2), worse)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    assert_loads(tmp_path / "m", model)


STREAM = """
import sys
import torch
from torch import nn
from penstock.runtime.state.pretrained import save_pretrained
from penstock.ir.program import ParamSpec, StageSpec

def peak():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) * 1024

shape, count = (4, 1280 << 10), 10  # 20 MiB a stage
with torch.device("meta"):
    model = nn.ParameterDict({f"w{i}": nn.Parameter(torch.empty(shape)) for i in range(count)})
torch.ones(10).numpy()

def stages():
    for i in range(count):
        spec = StageSpec(f"s{i}", (), (), (ParamSpec(f"w{i}", shape, "float32"),))
        yield spec, {f"w{i}": torch.full(shape, float(i))}, {}

before = peak()
save_pretrained(sys.argv[1], stages(), model)
print(peak() - before)
"""


@pytest.mark.slow
def test_saving_holds_one_stage_at_a_time(tmp_path: Path) -> None:
    """Ten stages of 20 MiB. A generator's last stage lives until it has made the next, hence two."""
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", STREAM, str(tmp_path / "m")]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    grown = int(result.stdout) / 2**20
    assert 18 < grown < 50, f"saving took {grown:.0f} MiB more"
    assert (tmp_path / "m" / "model.safetensors").stat().st_size > 200 * 2**20
