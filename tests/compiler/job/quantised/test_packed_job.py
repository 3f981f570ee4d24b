"""Bases in the bits of their files, with LoRA around them: steps are those of eager over the unpacked weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import penstock
from penstock.compiler.job.job import Job
from penstock.errors import CheckpointError, PlanError
from penstock.runtime.quantised import linear_packed
from penstock.tests.compiler.job.quantised.models import SGD, STEPS, batch, eager_losses, trained_params
from penstock.tests.compiler.job.quantised.packed_models import (
    CONFIGS,
    adapt,
    adapters,
    on_meta,
    plain_model,
    write_gpt_oss,
    write_llama,
    write_qwen2,
    write_qwen3_moe,
)
from penstock.tests.compiler.reasons import reasons_of
from penstock.tests.runtime.ssd.on_disk import directories, file_bytes
from penstock.tests.shown_elsewhere import slow_but

SWAPPED = (
    "drop-masks, chunk-loss, coarsen, partition-balanced{stages=4}, map-round-robin, schedule-pipeline, insert-remat, "
    "insert-fetch{swap=true}, insert-optimizer"
)
EQUAL: dict[str, float] = {"rtol": 1e-5, "atol": 1e-6}


def compile_job(model: nn.Module, directory: Path, memory: str = "64MB", **options: Any) -> Job:
    machine = penstock.Hardware.cpu(1, memory=memory, dram="1GB", ssd="1GB")
    chosen = {"optimizer": SGD, "micro_batches": 1, "strategy": SWAPPED, **options}
    return penstock.compile(model, machine, example_inputs=batch(0), weights=directory, **chosen)


def with_adapters(model: nn.Module) -> nn.Module:
    model.load_state_dict(adapters(model), strict=False)
    return model


def train(job: Job, model: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of the steps from the adapters of `adapters`, and the adapters after them."""
    job.load_state_dict(adapters(model), strict=False)
    losses = [float(job.step(batch(step))) for step in range(STEPS)]
    return losses, {name: t for name, t in job.state_dict().items() if "lora_" in name}


def require_close(own: dict[str, Tensor], theirs: nn.Module) -> None:
    expected = trained_params(theirs)
    assert expected and own.keys() == expected.keys()
    for name, param in expected.items():
        torch.testing.assert_close(own[name], param, **EQUAL, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", slow_but(["int4"], CONFIGS))
def test_steps_are_those_of_the_unpacked_model(tmp_path: Path, kind: str) -> None:
    """Swapped from DRAM: packed bytes arrive before forward and again before backward."""
    theirs = with_adapters(adapt(plain_model(tmp_path, write_llama(tmp_path, kind))))
    expected, model = eager_losses(theirs), adapt(on_meta(tmp_path))
    with compile_job(model, tmp_path, "700kB") as job:
        text = job.folder.files[0]
        assert "rt.fetch(" in text and "functions.linear_packed(" in text
        assert "are unpacked while they are read" not in reasons_of(job).replace("\n    ", " ")
        losses, trained = train(job, model)
        unpacked_bytes = job.driver.session.state.workspaces["compute"].bytes  # type: ignore[attr-defined]
        assert unpacked_bytes == 192 * 64 * 4  # the largest, one after the other
        assert job.last is not None and job.plan.predicted is not None
        assert job.last.moved_bytes["dram0 -> cpu0"] == job.plan.predicted.moved_bytes["cpu0.down"]
        params = [p for spec in job.folder.interface.stages.values() for p in spec.params]
    packed = [p for p in params if "_proj" in p.name and "lora" not in p.name]
    assert {p.dtype for p in packed} == {"uint8"} and not any(p.requires_grad for p in packed)
    assert losses == pytest.approx(expected, rel=1e-5)
    require_close(trained, theirs)


@pytest.mark.slow
def test_the_type_of_a_packed_weight_is_that_of_the_plain_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward casts to it, as T5's does."""

    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        found: Tensor = self.down_proj(h.to(self.down_proj.weight.dtype))
        return found

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    theirs = with_adapters(adapt(plain_model(tmp_path, write_llama(tmp_path, "fp8"))))
    expected, model = eager_losses(theirs), adapt(on_meta(tmp_path))
    with compile_job(model, tmp_path, strategy="balanced") as job:
        losses, trained = train(job, model)
    assert losses == pytest.approx(expected, rel=1e-5)
    require_close(trained, theirs)


@pytest.mark.slow
def test_a_bias_beside_a_packed_weight_is_trained_and_synced(tmp_path: Path) -> None:
    write_qwen2(tmp_path, "fp8")
    with torch.device("meta"):
        model = get_peft_model(on_meta(tmp_path), LoraConfig(r=4, target_modules=["q_proj"], bias="all")).train()
    with compile_job(model, tmp_path, strategy="balanced") as job:
        job.step(batch(0))
        job.sync()
        trained = job.state_dict()
    biases = {name: p for name, p in model.named_parameters() if name.endswith(".bias")}
    assert len(biases) == 3 * 2
    for name, param in biases.items():
        torch.testing.assert_close(param.detach(), trained[name], rtol=0, atol=0)


def test_a_packed_head_that_the_model_ties_is_refused(tmp_path: Path) -> None:
    write_qwen2(tmp_path, "fp8", lambda key: key.endswith(("_proj.weight", "lm_head.weight")))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(CheckpointError, match="one tensor in the model, and packed in the files"):
        compile_job(adapt(on_meta(tmp_path), ["q_proj"]), tmp_path)


@pytest.mark.slow
def test_a_scale_that_is_no_number_is_named(tmp_path: Path) -> None:
    write_llama(tmp_path, "fp8")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    tensors[name][0, 0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with (
        pytest.raises(CheckpointError, match=f"{name}.* has NaN in it"),
        compile_job(adapt(on_meta(tmp_path)), tmp_path) as job,
    ):
        job.step(batch(0))


def test_parameters_of_packed_linear_layers_take_no_adapter(tmp_path: Path) -> None:
    write_llama(tmp_path, "int4")
    lora = LoraConfig(r=4, target_modules=[], target_parameters=["q_proj.weight"])
    with torch.device("meta"):
        model = get_peft_model(on_meta(tmp_path), lora)
    with pytest.raises(PlanError, match=r"target_parameters of .*q_proj.*target_modules"):
        compile_job(model, tmp_path)


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gpt_oss_in_small(tmp_path: Path, micro_batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its experts stay in MXFP4; two of them are unpacked at a time."""
    monkeypatch.setattr(linear_packed, "GROUP_BYTES", 2 * 4 * 64 * 192)
    theirs = with_adapters(adapt(plain_model(tmp_path, write_gpt_oss(tmp_path, layers=3)), ATTENTION))
    expected, model = eager_losses(theirs), adapt(on_meta(tmp_path), ATTENTION)
    with compile_job(model, tmp_path, "900kB", micro_batches=micro_batches) as job:
        assert "rt.fetch(" in job.folder.files[0]
        losses, trained = train(job, model)
        unpacked_bytes = job.driver.session.state.workspaces["compute"].bytes  # type: ignore[attr-defined]
        assert unpacked_bytes == linear_packed.GROUP_BYTES
        assert job.last is not None and job.plan.predicted is not None
        assert job.last.moved_bytes["dram0 -> cpu0"] == job.plan.predicted.moved_bytes["cpu0.down"]
        params = [p for spec in job.folder.interface.stages.values() for p in spec.params]
    packed = {p.name.rpartition("experts.")[2]: p.bytes for p in params if "experts" in p.name and p.dtype == "uint8"}
    weights = {"gate_up_proj": 4 * 64 * 192, "down_proj": 4 * 96 * 64}
    assert packed == {
        f"{name}.weight_{part}": count // over
        for name, count in weights.items()
        for part, over in (("blocks", 2), ("scales", 32))
    }
    assert losses == pytest.approx(expected, rel=1e-5)
    require_close(trained, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_experts_one_after_another_in_files(tmp_path: Path, kind: str) -> None:
    """As Qwen3-MoE and DeepSeek-V3 are published: packed tensors are put together as the library does with weights."""
    plain = AutoModelForCausalLM.from_pretrained(write_qwen3_moe(tmp_path, kind))
    theirs = with_adapters(adapt(plain, ATTENTION))
    expected, model = eager_losses(theirs), adapt(on_meta(tmp_path / "packed"), ATTENTION)
    with compile_job(model, tmp_path / "packed") as job:
        assert "offsets=" in job.folder.files[0] and "grouped_mm" not in job.folder.files[0]
        losses, trained = train(job, model)
    assert losses == pytest.approx(expected, rel=1e-5)
    require_close(trained, theirs)


def test_experts_that_end_inside_of_a_block_are_refused(tmp_path: Path) -> None:
    """Two matrices of 56 rows are joined, whose last blocks of 32 rows have a scale each."""
    write_qwen3_moe(tmp_path, "fp8", width=56)
    with pytest.raises(CheckpointError, match=r"has 112 rows, and .* 56, which are no multiples of the 32 rows"):
        compile_job(adapt(on_meta(tmp_path / "packed"), ATTENTION), tmp_path / "packed")


@pytest.mark.slow
def test_full_fine_tuning_unpacks_what_it_reads(tmp_path: Path) -> None:
    """Each weight, when its stage is loaded, into the model's own type; the compiler and the report say so."""
    packed, saved = tmp_path / "packed", tmp_path / "saved"
    theirs = plain_model(packed, write_llama(packed, "fp8")).train()
    expected = eager_losses(theirs)
    with pytest.warns(UserWarning, match=r"28 weights .*\(fp8-blocks\) are unpacked .* float32: 28 ask for a gradient"):
        job = compile_job(on_meta(packed).train(), packed)
    with job:
        assert "are unpacked while they are read" in reasons_of(job).replace("\n    ", " ")
        assert [float(job.step(batch(step))) for step in range(STEPS)] == pytest.approx(expected, rel=1e-5)
        job.save_pretrained(saved)
    read = AutoModelForCausalLM.from_pretrained(saved)
    assert not hasattr(read.config, "quantization_config")
    for name, param in theirs.named_parameters():
        torch.testing.assert_close(dict(read.named_parameters())[name], param, **EQUAL)


@pytest.mark.slow
def test_full_fine_tuning_of_packed_experts(tmp_path: Path) -> None:
    theirs = plain_model(tmp_path, write_gpt_oss(tmp_path)).train()
    expected = eager_losses(theirs)
    with pytest.warns(UserWarning, match=r"4 weights .*\(mxfp4\) are unpacked .*: 4 ask for a gradient"):
        job = compile_job(on_meta(tmp_path).train(), tmp_path)
    with job:
        assert [float(job.step(batch(step))) for step in range(STEPS)] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_resident_on_ssd_and_compiled(tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    whole = write_gpt_oss(packed)
    theirs = with_adapters(adapt(plain_model(packed, whole), ATTENTION))
    expected = eager_losses(theirs)
    (disk,) = directories(tmp_path)
    for options in ({"strategy": "gpipe"}, {"strategy": "fuyou", "ssd_dirs": [disk]}, {"compile_stages": True}):
        model = adapt(on_meta(packed), ATTENTION)
        with compile_job(model, packed, **options) as job:  # type: ignore[arg-type]
            losses, trained = train(job, model)
            if "ssd_dirs" in options:  # read in place, but for pages that tensors share
                assert file_bytes(disk, "stage4") == 0 < file_bytes(disk, "stage1") < 49152  # of 98304
        assert losses == pytest.approx(expected, rel=1e-5)
        require_close(trained, theirs)


@pytest.mark.slow
@pytest.mark.multi
def test_two_devices_and_files_written(tmp_path: Path) -> None:
    """Workers unpack by themselves, and a written job is read back with the same base."""
    packed, written = tmp_path / "packed", tmp_path / "written"
    theirs = with_adapters(adapt(plain_model(packed, write_gpt_oss(packed)), ATTENTION))
    expected, model = eager_losses(theirs), adapt(on_meta(packed), ATTENTION)
    machine = penstock.Hardware.cpu(2, memory="64MB", dram="1GB")
    options: dict[str, Any] = {"optimizer": SGD, "micro_batches": 1, "strategy": "gpipe", "weights": packed}
    with penstock.compile(model, machine, example_inputs=batch(0), **options) as job:
        job.write(written)
    with penstock.load(written, adapt(on_meta(packed), ATTENTION)) as again:
        assert train(again, model)[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_no_precision_touches_packed_tensors(tmp_path: Path, precision: str) -> None:
    theirs = with_adapters(adapt(plain_model(tmp_path, write_llama(tmp_path, "int4"))))
    expected = eager_losses(theirs, torch.bfloat16 if precision == "bf16-mixed" else None)
    model = adapt(on_meta(tmp_path))
    with compile_job(model, tmp_path, precision=precision) as job:
        losses, _ = train(job, model)
        params = [p for spec in job.folder.interface.stages.values() for p in spec.params]
    assert {p.dtype for p in params if "_proj" in p.name and "lora" not in p.name} == {"uint8"}
    assert losses == pytest.approx(expected, rel=3e-4 if precision == "bf16-mixed" else 2e-2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", slow_but(["int4"], CONFIGS))
def test_adapters_are_saved_and_read_back_and_merged(kind: str, tmp_path: Path) -> None:
    """Onto the unpacked model, which the library makes of the same files; PEFT merges into the same bits."""
    packed, saved = tmp_path / "packed", tmp_path / "saved"
    whole = write_llama(packed, kind)
    model = adapt(on_meta(packed))
    with compile_job(model, packed) as job:
        _, trained = train(job, model)
        job.save_pretrained(saved)
        job.save_pretrained(tmp_path / "merged", merge=True)
        job.sync()
    for name, tensor in trained.items():
        assert torch.equal(model.get_parameter(name), tensor), name
    read: Any = PeftModel.from_pretrained(plain_model(packed, whole), saved).train()  # type: ignore[arg-type]
    for name, tensor in trained.items():
        assert torch.equal(dict(read.named_parameters())[name], tensor), name
    require_merged(tmp_path / "merged", read.merge_and_unload())


def require_merged(directory: Path, expected: Any) -> None:
    """Equal bits, and nothing missing."""
    merged, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert not hasattr(merged.config, "quantization_config")
    for name, tensor in expected.state_dict().items():
        assert torch.equal(merged.state_dict()[name], tensor), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("parameters", [None, ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]])
def test_a_mixture_is_merged(parameters: list[str] | None, tmp_path: Path) -> None:
    """Experts in MXFP4 are unpacked, with adapters of their own or without."""
    packed = tmp_path / "packed"
    plain = plain_model(packed, write_gpt_oss(packed))
    config = LoraConfig(r=4, lora_alpha=8, target_modules=ATTENTION, target_parameters=parameters)
    with torch.device("meta"):
        model = get_peft_model(on_meta(packed), config).train()
    with compile_job(model, packed) as job:
        train(job, model)
        job.save_pretrained(tmp_path / "saved")
        job.save_pretrained(tmp_path / "merged", merge=True)
    read: Any = PeftModel.from_pretrained(plain, tmp_path / "saved")  # type: ignore[arg-type]
    require_merged(tmp_path / "merged", read.merge_and_unload())


def exchange(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def say(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] |= changes
    (directory / "config.json").write_text(json.dumps(config))


UP = "model.layers.2.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda at: exchange(at, lambda tensors: tensors.pop(f"{UP}_scale_inv")),
            r"layers\.2\.mlp\.up_proj\.weight' is packed as fp8-blocks .*up_proj\.weight_scale_inv' is missing",
        ),
        (
            lambda at: say(at, weight_block_size=[64, 64]),
            r"weight_scale_inv' is float32 of shape \[2, 2\] in these files; .*block=\[64, 64\].* has .* \[1, 1\]",
        ),
        (lambda at: say(at, quant_method="hqq"), r"quant_method 'hqq' is not read here; known are awq, .*mxfp4"),
        (
            lambda at: exchange(at, lambda tensors: tensors.update({UP: tensors[UP].view(torch.int8)})),
            r"up_proj\.weight' is int8 of shape \[192, 64\] in these files; .*fp8-blocks",
        ),
        (
            lambda at: (at / "config.json").write_text(
                json.dumps({**json.loads((at / "config.json").read_text()), "quantization_config": None})
            ),
            r"is float8_e4m3fn in the files, .* of the model is float32",
        ),
    ],
)
def test_files_that_do_not_agree_with_their_config(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    write_llama(tmp_path, "fp8")
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message), compile_job(adapt(on_meta(tmp_path)), tmp_path) as job:
        job.step(batch(0))


@pytest.mark.slow
def test_adapters_on_packed_experts(tmp_path: Path) -> None:
    """LoRA on stacks of matrices (`target_parameters`): PEFT adds it to whole weights, here each product has it beside.
    It is saved as PEFT reads it."""
    packed, saved = tmp_path / "packed", tmp_path / "saved"
    config = LoraConfig(
        r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    )
    plain = plain_model(packed, write_gpt_oss(packed))
    theirs = with_adapters(get_peft_model(plain, config).train())  # type: ignore[arg-type]
    expected = eager_losses(theirs)
    with torch.device("meta"):
        model: Any = get_peft_model(on_meta(packed), config).train()  # type: ignore[arg-type]
    with compile_job(model, packed) as job:
        losses, trained = train(job, model)
        job.save_pretrained(saved)
    assert any(".experts.base_layer.lora_A." in name for name in trained)
    assert losses == pytest.approx(expected, rel=1e-5)
    require_close(trained, theirs)
    read = PeftModel.from_pretrained(plain_model(packed, write_gpt_oss(packed)), saved).train()  # type: ignore[arg-type]
    for name, tensor in trained.items():
        assert torch.equal(dict(read.named_parameters())[name], tensor), name
