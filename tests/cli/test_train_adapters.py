"""`penstock plan` and `penstock train` with --adapter: what is planned, trained, resumed and written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import peft
import pytest
import torch
import transformers

from penstock.cli.main import main
from penstock.cli.options import JobOptions
from penstock.compiler.models.named import find_model
from penstock.errors import PlanError
from penstock.tests.cli.test_train_command import BERT, GPT, TEXT, options, run
from penstock.tests.compiler.export.gguf_models import write_model

ADAPTER = "lora:r=2,targets=c_attn"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    find_model(GPT).load(seed=3).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(32).view(2, 16)
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


@pytest.mark.parametrize("adapter", [ADAPTER, pytest.param(f"{ADAPTER},dora,rslora", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_the_adapter_and_the_merged_model_are_written_and_agree(
    adapter: str, base: Path, text: Path, tmp_path: Path
) -> None:
    given = {"model": str(base), "adapter": adapter, "merge": True, "dropout": False}
    result, said = run(options(text, tmp_path / "out", **given))
    assert result.losses[-1] < result.losses[0] and "model in" in said
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = logits(plain)
    adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "out" / "adapter")
    merged, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out" / "model", output_loading_info=True, dtype=torch.float32
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.allclose(logits(adapted), logits(merged), atol=1e-5)  # fp32 sums in another order
    assert not torch.allclose(before, logits(merged), atol=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_it_resumes_bit_for_bit_from_the_adapter_alone(base: Path, text: Path, tmp_path: Path) -> None:
    given = {"model": str(base), "adapter": ADAPTER}
    whole, _ = run(options(text, tmp_path / "whole", **given))
    run(options(text, tmp_path / "parts", max_steps=3, **given))
    rest, _ = run(options(text, tmp_path / "parts", resume=True, **given))
    assert whole.losses[3:] == rest.losses
    found, expected = (
        (tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes() for name in ("parts", "whole")
    )
    assert found == expected
    size = sum(file.stat().st_size for file in (tmp_path / "parts" / "checkpoint").glob("*.safetensors"))
    assert size < (base / "model.safetensors").stat().st_size / 3
    assert not (tmp_path / "parts" / "model").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_classifier_gets_its_head_trained_and_written(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    rows = [{"text": word * 3, "label": label} for word, label in (("good ", "up"), ("bad ", "down")) for _ in range(4)]
    data.write_text("\n".join(map(json.dumps, rows)))
    run(options(data, tmp_path / "out", model=BERT, head="classification", adapter="lora:r=2,rslora", max_steps=2))
    found = peft.PeftConfig.from_pretrained(tmp_path / "out" / "adapter")
    assert found.use_rslora and "classifier" in found.modules_to_save


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_4_bit_base_is_merged_into_a_file_for_llama_cpp(text: Path, tmp_path: Path) -> None:
    """From QLoRA on the command line to what vLLM and llama.cpp serve."""
    gguf = pytest.importorskip("gguf")
    base, out = tmp_path / "base", tmp_path / "out"
    write_model(base, "llama")
    given = {"model": str(base), "adapter": "lora:r=4", "base": "nf4", "merge": True, "gguf": "bf16", "max_steps": 2}
    _, said = run(options(text, out, **given))
    assert f"to serve it:\n  vllm serve {out}/model\n  llama-server -m {out}/model/model.gguf" in said
    merged = transformers.AutoModelForCausalLM.from_pretrained(out / "model")
    assert merged.dtype == torch.bfloat16
    (embedding,) = (t for t in gguf.GGUFReader(out / "model" / "model.gguf").tensors if t.name == "token_embd.weight")
    weight = merged.get_input_embeddings().weight.detach()
    assert torch.equal(torch.from_numpy(embedding.data.copy()).view(torch.bfloat16), weight)


def test_what_a_file_for_llama_cpp_needs(
    base: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", ModuleType("gguf"))
    with pytest.raises(PlanError, match=r"--gguf with --adapter: .* give --merge, too"):
        run(options(text, tmp_path / "out", adapter=ADAPTER, gguf="f16"))
    with pytest.raises(PlanError, match="GGUF: gpt2 models are not written here"):
        run(options(text, tmp_path / "out", model=str(base), gguf="f16"))
    with pytest.raises(PlanError, match=r"--gguf: written for models with the head causal-lm, .* has classification"):
        run(options(text, tmp_path / "out", model=str(base), head="classification", gguf="f16"))


def test_merge_needs_an_adapter(text: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="--merge without --adapter"):
        run(options(text, tmp_path / "out", merge=True))


@pytest.mark.slow
def test_a_plan_with_an_adapter_takes_less(tmp_path: Path) -> None:
    common = {"model": "gpt2:n_layer=4", "hardware": ["rtx4090x1"], "precision": "bf16-mixed", "sequence": 128}
    full, adapted = (JobOptions(**common, adapter=adapter).compile().plan for adapter in (None, "lora:r=16"))
    assert full.predicted is not None and adapted.predicted is not None
    assert adapted.predicted.peak_bytes["gpu0"] < 0.6 * full.predicted.peak_bytes["gpu0"]
    assert adapted.predicted.step_s < full.predicted.step_s


@pytest.mark.slow
def test_the_command_line_takes_it_and_check_recalls_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--model", GPT, "--hardware", "cpu", "--set", "num_devices=1", "--sequence", "16"]
    with pytest.raises(SystemExit) as ended:
        main(["plan", *place, "--adapter", ADAPTER, "--out", str(tmp_path / "job")])
    assert ended.value.code == 0
    assert json.loads((tmp_path / "job" / "model.json").read_text())["adapter"] == ADAPTER
    assert JobOptions.recall(tmp_path / "job").adapter == ADAPTER
    with pytest.raises(SystemExit):
        main(["plan", *place, "--adapter", "lora:targets=q_proj"])
    assert "targets=q_proj matches no layer" in capsys.readouterr().err
