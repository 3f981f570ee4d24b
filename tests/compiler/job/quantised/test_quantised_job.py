"""Quantised frozen weights with LoRA: a compiled job's steps are those of the libraries in eager, bit for bit.

With plain SGD and one micro-batch all sums run in the same order, so losses and adapters are equal, not close.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import PeftModel
from peft.utils.integrations import dequantize_bnb_weight
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import penstock
from penstock.compiler.job.job import Job
from penstock.errors import CaptureError, CheckpointError, PlanError
from penstock.runtime.quantised import libraries
from penstock.tests.compiler.job.quantised.models import (
    ADAPTED,
    LAYERS,
    QUANTISATIONS,
    SGD,
    STEPS,
    adapt,
    batch,
    eager_losses,
    load_model,
    on_meta,
    trained_params,
    write_whole,
)
from penstock.tests.shown_elsewhere import slow_but


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whole(tmp_path_factory.mktemp("whole"))


SWAPPING = "620kB"  # of a device: one layer has room, not all of them


def compile_job(model: nn.Module, memory: str = "64MB", **options: Any) -> Job:
    machine = penstock.Hardware.cpu(1, memory=memory, dram="1GB", ssd="1GB")
    chosen = {"optimizer": SGD, "micro_batches": 1, "strategy": "mobius", **options}
    return penstock.compile(model, machine, example_inputs=batch(0), **chosen)


def require_equal(own: nn.Module, theirs: nn.Module) -> None:
    expected = trained_params(theirs)
    assert expected
    for name, param in trained_params(own).items():
        assert torch.equal(param, expected[name]), name


SLOW = ("fp4", "int8", "nf4-bf16", "nf4-double")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind in SLOW else kind for kind in QUANTISATIONS]
)
def test_steps_are_those_of_the_library(whole: Path, kind: str) -> None:
    """Swapped from DRAM: packed bytes arrive before forward and again before backward."""
    theirs, own = adapt(load_model(whole, kind)), adapt(load_model(whole, kind))
    losses = eager_losses(theirs)
    with compile_job(own, SWAPPING) as job:
        assert "rt.fetch(" in job.folder.files[0]
        assert [float(job.step(batch(step))) for step in range(STEPS)] == losses
        unpacked = job.driver.session.state.workspaces["compute"].bytes  # type: ignore[attr-defined]
        assert unpacked == 192 * 64 * (2 if kind == "nf4-bf16" else 4)  # the largest, one after the other
        job.sync()
    require_equal(own, theirs)


@pytest.mark.slow
def test_resident_and_on_ssd(whole: Path, tmp_path: Path) -> None:
    theirs = adapt(load_model(whole, "nf4-double"))
    losses = eager_losses(theirs)
    for strategy, disks in (("gpipe", None), ("fuyou", [tmp_path])):
        own = adapt(load_model(whole, "nf4-double"))
        with compile_job(own, strategy=strategy, ssd_dirs=disks) as job:
            assert [float(job.step(batch(step))) for step in range(STEPS)] == losses
            job.sync()
        require_equal(own, theirs)


@pytest.mark.slow
def test_half_a_byte_a_parameter_travels(whole: Path) -> None:
    """What a step brings to the device is counted as it was predicted; of a quantised layer it is half a byte for each
    weight and an absmax of 8 bits for each 64, or of 32 without double quantisation, which adds little to a layer."""
    moved = {}
    for kind, absmax_bytes in (("nf4", 4), ("nf4-double", 1)):
        with compile_job(adapt(load_model(whole, kind)), SWAPPING) as job:
            job.step(batch(0))
            job.step(batch(1))
            assert job.last is not None and job.plan.predicted is not None
            moved[kind] = job.last.moved_bytes["dram0 -> cpu0"]
            assert moved[kind] == job.plan.predicted.moved_bytes["cpu0.down"]
            params = [p for spec in job.folder.interface.stages.values() for p in spec.params]
        packed = [p for p in params if "_proj" in p.name and "lora" not in p.name]
        assert {p.dtype for p in packed} == {"uint8"} and not any(p.requires_grad for p in packed)
        weights = LAYERS * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 192 * 64)
        nested_bytes = sum(p.bytes for p in packed if "nested" in p.name)
        assert nested_bytes == (0 if kind == "nf4" else LAYERS * 7 * 4 * (256 + 1 + 1))
        assert sum(p.bytes for p in packed) == weights // 2 + absmax_bytes * weights // 64 + nested_bytes
        whole_bytes = 4 * weights
        assert moved[kind] < 0.5 * (2 * whole_bytes)  # twice a step, and all else that a step moves


def test_an_unpacked_weight_counts_on_a_gpu() -> None:
    """A plan for GPUs has room for it while its layer computes, and counts the FLOPs of its products. All else in this
    model is far smaller."""
    import bitsandbytes

    def look(name: str, draft: Any) -> None:
        if name == "coarsen":
            costs.extend(block.cost for block in draft.blocks)

    flops = []
    for quantised in (False, True):
        costs: list[Any] = []
        wide = bitsandbytes.nn.Linear4bit(1024, 1024, quant_type="nf4") if quantised else nn.Linear(1024, 1024)
        model = nn.Sequential(nn.Linear(8, 1024), wide.requires_grad_(False).to("cpu"))
        penstock.compile(
            model, "rtx4090x1", example_inputs={"input": torch.zeros(4, 8)}, loss_fn=lambda out, _: out.mean(),
            optimizer=SGD, micro_batches=1, strategy="gpipe", dump=look,
        )  # fmt: skip
        flops.append(sum(cost.forward_flops + cost.backward_flops for cost in costs))
        assert not any("bitsandbytes" in operator for cost in costs for operator in cost.uncounted)
    assert flops[0] == flops[1]
    for way in ("forward", "light", "backward"):
        assert 2**22 <= max(getattr(cost, f"{way}_peak_bytes") for cost in costs) < 3 * 2**22


@pytest.mark.slow
@pytest.mark.multi
def test_two_devices(whole: Path) -> None:
    """Stages of one micro-batch on two workers, which import the libraries by themselves."""
    losses = eager_losses(adapt(load_model(whole, "nf4-double")))
    machine = penstock.Hardware.cpu(2, memory="64MB", dram="1GB")
    options: dict[str, Any] = {"optimizer": SGD, "micro_batches": 1, "strategy": "gpipe"}
    model = adapt(load_model(whole, "nf4-double"))
    with penstock.compile(model, machine, example_inputs=batch(0), **options) as job:
        assert [float(job.step(batch(step))) for step in range(STEPS)] == losses


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_no_precision_touches_packed_tensors(whole: Path, precision: str) -> None:
    """Losses differ from eager's, with autocast or in fp32, by no more than bf16's own rounding: under autocast as much
    as those of a model that is not quantised do (1e-4)."""
    own, theirs = adapt(load_model(whole, "nf4-double")), adapt(load_model(whole, "nf4-double"))
    losses = eager_losses(theirs, torch.bfloat16 if precision == "bf16-mixed" else None)
    with compile_job(own, precision=precision) as job:
        found = [float(job.step(batch(step))) for step in range(STEPS)]
        params = [p for spec in job.folder.interface.stages.values() for p in spec.params]
        assert {p.dtype for p in params if "_proj" in p.name and "lora" not in p.name} == {"uint8"}
    assert found == pytest.approx(losses, rel=3e-4 if precision == "bf16-mixed" else 2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "nf4-double", "int8"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_model_on_meta_reads_or_packs_what_from_pretrained_would(
    whole: Path, tmp_path: Path, kind: str, packed: bool
) -> None:
    directory = whole
    if packed:
        directory = tmp_path / "packed"
        load_model(whole, kind).save_pretrained(directory)
    live = adapt(load_model(whole, kind))
    with compile_job(live) as job:
        wanted = {name: tensor for _, weights, _ in job.states() for name, tensor in weights.items()}
    empty = adapt(on_meta(directory, kind, packed))
    with compile_job(empty, weights=directory) as job:
        with pytest.warns(UserWarning, match="start from their initialiser"):  # the adapters
            found = {name: tensor for _, weights, _ in job.states() for name, tensor in weights.items()}
        assert float(job.step(batch(0))) > 0
        job.sync()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert "lora" in name or torch.equal(found[name], tensor), name
    state = empty.state_dict()  # of the library's own layers, which have them now
    for name, tensor in live.state_dict().items():
        assert "lora" in name or torch.equal(state[name], tensor), name


@pytest.mark.parametrize("dtype", slow_but([torch.bfloat16], [torch.float32, torch.bfloat16]))
@pytest.mark.slow
def test_packed_from_the_type_of_the_files(tmp_path: Path, dtype: torch.dtype) -> None:
    directory = write_whole(tmp_path / "whole", dtype)
    layer = load_model(directory, "nf4").model.layers[0].mlp.up_proj  # type: ignore[union-attr, index]
    with compile_job(adapt(on_meta(directory, "nf4")), weights=directory) as job:
        job.step(batch(0))
        assert f"dtype=torch.{str(layer.weight.quant_state.dtype)[6:]}" in "".join(job.folder.files.values())
        weights = {name: t for _, row, _ in job.states() for name, t in row.items()}
    name = "base_model.model.model.layers.0.mlp.up_proj.weight"
    assert torch.equal(weights[name], layer.weight.data)


def without(directory: Path, part: str) -> None:
    from safetensors.torch import load_file, save_file

    file = directory / "model.safetensors"
    save_file({key: t for key, t in load_file(file).items() if not key.endswith(part)}, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda at: without(at, "layers.2.mlp.up_proj.weight.absmax"), r"layers\.2\.mlp\.up_proj'.* absmax is missing"),
        (lambda at: without(at, "layers.1.mlp.up_proj.weight"), r"layers\.1\.mlp\.up_proj'.* weight is missing"),
        (lambda at: cut_off(at / "model.safetensors"), "model.safetensors"),
    ],
)
def test_a_checkpoint_that_is_cut_off(
    whole: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    directory = tmp_path / "packed"
    load_model(whole, "nf4").save_pretrained(directory)
    damage(directory)
    with pytest.raises(CheckpointError, match=message):
        compile_job(adapt(on_meta(directory, "nf4", packed=True)), weights=directory)


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def test_a_checkpoint_quantised_otherwise(whole: Path, tmp_path: Path) -> None:
    load_model(whole, "fp4").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="quant_type 'fp4' in these files, but 'nf4' in the model"):
        compile_job(adapt(on_meta(tmp_path, "nf4", packed=True)), weights=tmp_path)


@pytest.mark.slow
def test_the_adapter_is_saved_and_read_back(whole: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    own = adapt(load_model(whole, "nf4"))
    with compile_job(own) as job:
        job.step(batch(0))
        job.save_pretrained(tmp_path)
        job.sync()
    read = PeftModel.from_pretrained(load_model(whole, "nf4"), tmp_path).train()  # type: ignore[arg-type]
    for name, param in trained_params(own).items():
        assert torch.equal(param, dict(read.named_parameters())[name]), name


def plain_base(whole: Path, kind: str) -> Any:
    """The model with its weights unpacked by bitsandbytes, in the type that they had before."""
    quantised, plain = load_model(whole, kind), load_model(whole, None)
    for path, layer in quantised.named_modules():
        if type(layer).__module__.startswith("bitsandbytes"):
            unpacked = dequantize_bnb_weight(layer.weight, state=getattr(layer, "state", None))
            weight: Any = plain.get_submodule(path).weight
            weight.data = unpacked.to(weight.dtype)
    return plain


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", QUANTISATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_merged_model_is_pefts_of_the_unpacked_base(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Bit for bit, in the type from before; and transformers reads it with nothing missing."""
    whole = write_whole(tmp_path / "whole", dtype)
    with compile_job(adapt(load_model(whole, kind)), SWAPPING) as job:
        job.step(batch(0))
        job.save_pretrained(tmp_path / "adapter")
        job.save_pretrained(tmp_path / "merged", merge=True)
    theirs: Any = PeftModel.from_pretrained(plain_base(whole, kind), tmp_path / "adapter").merge_and_unload()
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and merged.dtype == dtype
    assert not hasattr(merged.config, "quantization_config")
    before = load_file(whole / "model.safetensors")
    found, expected = load_file(tmp_path / "merged" / "model.safetensors"), theirs.state_dict()
    assert found.keys() == before.keys()
    for name, tensor in found.items():
        assert tensor.dtype == dtype and torch.equal(tensor, expected[name]), name
        assert torch.equal(tensor, before[name]) == ("_proj" not in name), name


KINDS: dict[str, Any] = {
    "ia3": lambda: peft.IA3Config(target_modules=ADAPTED, feedforward_modules=["down_proj"]),
    "oft": lambda: peft.OFTConfig(target_modules=ADAPTED, oft_block_size=4),
    "vera": lambda: peft.VeraConfig(target_modules=["q_proj"], r=4),
    "road": lambda: peft.RoadConfig(target_modules=ADAPTED, group_size=32),
    "randlora": lambda: peft.RandLoraConfig(target_modules=["q_proj"], r=4),
    "adalora": lambda: peft.AdaLoraConfig(target_modules=ADAPTED, init_r=4, target_r=2, total_step=10),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_adapters_of_every_kind_are_merged_into_an_unpacked_base(name: str, whole: Path, tmp_path: Path) -> None:
    kind = "int8" if name == "ia3" else "nf4"
    with compile_job(peft.get_peft_model(load_model(whole, kind), KINDS[name]()).train()) as job:  # type: ignore[arg-type]
        job.step(batch(0))
        job.save_pretrained(tmp_path / "adapter")
        job.save_pretrained(tmp_path / "merged", merge=True)
    theirs: Any = PeftModel.from_pretrained(plain_base(whole, kind), tmp_path / "adapter").merge_and_unload()
    expected = theirs.state_dict()
    changed = 0
    for key, tensor in load_file(tmp_path / "merged" / "model.safetensors").items():
        assert torch.equal(tensor, expected[key]), key
        changed += not torch.equal(tensor, plain_base(whole, kind).state_dict()[key])
    assert changed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_gpt2s_transposed_layers_are_merged(tmp_path: Path) -> None:
    """bitsandbytes has their weights as a linear layer has them."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=1, n_head=4, use_cache=False)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "whole")
    lora = peft.LoraConfig(r=4, target_modules=["c_attn"], init_lora_weights=False)
    model = peft.get_peft_model(load_model(tmp_path / "whole", "nf4"), lora).train()  # type: ignore[arg-type]
    with compile_job(model) as job:
        job.step({name: value % 64 for name, value in batch(0).items()})
        job.save_pretrained(tmp_path / "adapter")
        job.save_pretrained(tmp_path / "merged", merge=True)
    theirs = load_model(tmp_path / "whole", None)
    for path, layer in load_model(tmp_path / "whole", "nf4").named_modules():
        if type(layer).__module__.startswith("bitsandbytes"):
            theirs.get_submodule(path).weight.data = dequantize_bnb_weight(layer.weight).T.contiguous()  # type: ignore
    expected: Any = PeftModel.from_pretrained(theirs, tmp_path / "adapter").merge_and_unload()  # type: ignore[arg-type]
    for key, tensor in load_file(tmp_path / "merged" / "model.safetensors").items():
        assert torch.equal(tensor, expected.state_dict()[key]), key


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(["int8"], ["nf4-double", "int8"]))
def test_evaluation_is_that_of_the_library(whole: Path, kind: str) -> None:
    """int8: what exceeds the threshold is found in the real inputs and multiplied in 16 bits, as in eager. 4 bits: as
    the library computes where the CPU does not multiply in bf16, to which it would round inputs."""
    own = adapt(load_model(whole, kind))
    with compile_job(own) as job:
        found = float(job.evaluate(batch(0)).loss)
    for layer in own.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    with torch.no_grad():
        assert found == float(own.eval()(**batch(0)).loss)


@pytest.mark.slow
def test_compiled_stages(whole: Path) -> None:
    """torch.compile adds up in another order."""
    losses = eager_losses(adapt(load_model(whole, "nf4-double")))
    with compile_job(adapt(load_model(whole, "nf4-double")), strategy="gpipe", compile_stages=True) as job:
        found = [float(job.step(batch(step))) for step in range(STEPS)]
    assert found == pytest.approx(losses, rel=1e-5)


@pytest.mark.slow
def test_prepared_for_kbit_training(whole: Path) -> None:
    from peft import prepare_model_for_kbit_training

    theirs, own = (adapt(prepare_model_for_kbit_training(load_model(whole, "nf4"))) for _ in range(2))
    losses = eager_losses(theirs)
    with compile_job(own) as job:
        assert [float(job.step(batch(step))) for step in range(STEPS)] == losses


@pytest.mark.slow
def test_the_state_dict_is_the_librarys(whole: Path) -> None:
    for kind in ("nf4-double", "int8"):
        own = adapt(load_model(whole, kind))
        with compile_job(own) as job:
            job.step(batch(0))
            state = job.state_dict()
            job.sync()
        expected = own.state_dict()
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            assert state[name].dtype == tensor.dtype and torch.equal(state[name], tensor), name


@pytest.mark.slow
def test_a_written_job_runs_again(whole: Path, tmp_path: Path) -> None:
    """Its files are verified as a stranger's would be."""
    theirs = adapt(load_model(whole, "nf4-double"))
    losses = eager_losses(theirs)
    with compile_job(adapt(load_model(whole, "nf4-double"))) as job:
        job.write(tmp_path)
    with penstock.load(tmp_path, adapt(load_model(whole, "nf4-double"))) as again:
        assert [float(again.step(batch(step))) for step in range(STEPS)] == losses


def test_a_quantised_weight_is_not_trained() -> None:
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
    quantize_(model[0], Float8WeightOnlyConfig())
    model[0].weight.requires_grad_(True)
    with pytest.raises(PlanError, match=r"0\.weight is quantised by torchao and asks for a gradient.*requires_grad_"):
        penstock.compile(model, penstock.Hardware.cpu(1), example_inputs={"input": torch.zeros(4, 64)})


def test_a_library_that_is_missing_is_named(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(libraries.importlib, "import_module", missing)
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlanError, match=r"pip install 'penstock\[bitsandbytes\]'"):
        libraries.bitsandbytes()


@pytest.mark.slow
def test_a_model_without_adapters_is_saved_by_its_library(whole: Path, tmp_path: Path) -> None:
    model = load_model(whole, "nf4").train()
    with compile_job(model) as job, pytest.raises(PlanError, match=r"is quantised, and its library alone writes"):
        job.save_pretrained(tmp_path)


def test_layers_that_are_not_linear_are_refused() -> None:
    import bitsandbytes

    model = nn.Sequential(bitsandbytes.nn.Embedding4bit(64, 64).to("cpu"), nn.Linear(64, 4))
    with pytest.raises(PlanError, match=r"0\.weight is quantised by bitsandbytes in a Embedding4bit"):
        penstock.compile(model, penstock.Hardware.cpu(1), example_inputs={"input": torch.zeros(4, dtype=torch.int64)})


def test_weights_that_were_never_packed_are_refused() -> None:
    import bitsandbytes

    model = nn.Sequential(bitsandbytes.nn.Linear4bit(64, 64), nn.Linear(64, 4))
    with pytest.raises(PlanError, match=r'0\.weight is to be quantised.*model\.to\("cpu"\)'):
        penstock.compile(model, penstock.Hardware.cpu(1), example_inputs={"input": torch.zeros(4, 64)})


OTHER_KINDS: dict[str, dict[str, Any]] = {
    "ADALORA": {"init_r": 4, "target_r": 2, "total_step": 10},
    "IA3": {"feedforward_modules": ["down_proj"]},
    "VERA": {"r": 4},
}


def adapt_by(kind: str, model: nn.Module, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    config = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind)](**options)
    return peft.get_peft_model(model, config).train()  # type: ignore[arg-type, return-value]


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_other_kinds_of_adapters_train_as_in_eager(kind: str, whole: Path) -> None:
    targets = ["q_proj", "v_proj", *(["down_proj"] if kind == "IA3" else [])]
    own, theirs = (
        adapt_by(kind, load_model(whole, "nf4"), target_modules=targets, **OTHER_KINDS[kind]) for _ in range(2)
    )
    with compile_job(own) as job:
        assert [float(job.step(batch(step))) for step in range(STEPS)] == eager_losses(theirs)
        job.sync()
    require_equal(own, theirs)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_an_adapter_that_reads_the_quantised_weight_is_refused(kind: str, whole: Path) -> None:
    model = adapt_by("LORA", load_model(whole, kind), r=4, target_modules=["q_proj"], use_dora=True)
    with pytest.raises(CaptureError, match=r"q_proj.base_layer.weight, a quantised weight .* LoRA without use_dora"):
        compile_job(model)
