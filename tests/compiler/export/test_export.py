"""An exported model has all its files, and the commands that serve it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import penstock
from penstock.compiler.export.export import Export
from penstock.errors import PlanError
from penstock.tests.compiler.eager_baseline import SGD
from penstock.tests.compiler.export.gguf_models import CONFIGS, write_model

IDS = torch.arange(64).view(4, 16)


def export(model: Any, base: Path | None, directory: Path, **options: Any) -> Export:
    batch = {"input_ids": IDS, "labels": IDS}
    with penstock.compile(
        model, penstock.Hardware.cpu(1), example_inputs=batch, optimizer=SGD, strategy="balanced", weights=base,
        micro_batches=1,
    ) as job:  # fmt: skip
        job.step(batch)
        return job.export(directory, **options)


def on_meta(base: Path) -> Any:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(base))


@pytest.mark.filterwarnings("ignore")
def test_a_model_with_its_files(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    base, out = tmp_path / "base", tmp_path / "out"
    write_model(base, "qwen3")
    (base / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    found = export(on_meta(base), base, out, gguf="q8_0")
    assert found == Export(out, out / "model.gguf", (f"vllm serve {out}", f"llama-server -m {out}/model.gguf"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (base / name).read_bytes()
    transformers.pipeline("text-generation", model=str(out))("the", max_new_tokens=2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_adapter(tmp_path: Path) -> None:
    """By the name of the model that it is for; llama.cpp's script makes its file."""
    base, out = tmp_path / "base", tmp_path / "out"
    write_model(base, "llama")
    lora = peft.LoraConfig(r=20, target_modules=["q_proj"])
    with torch.device("meta"):
        model = peft.get_peft_model(on_meta(base), lora)
    found = export(model, base, out)
    assert found.commands[0] == f"vllm serve {base} --enable-lora --max-lora-rank 32 --lora-modules out={out}"
    assert found.commands[1].startswith(f"python convert_lora_to_gguf.py {out} --base {base}")
    assert (out / "adapter_model.safetensors").is_file() and (out / "tokenizer.json").is_file()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_without_a_directory_it_says_what_is_missing(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"])
    found = export(model, None, tmp_path / "out")
    assert "has no tokenizer, which vLLM and llama.cpp need" in found.describe()
    assert found.commands[1] == (
        f"python convert_hf_to_gguf.py {tmp_path}/out --outfile {tmp_path}/out/model.gguf  # of llama.cpp"
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("is_adapted", "options", "said"),
    [
        pytest.param(
            True, {"gguf": "f16"}, "a file of GGUF has the whole model; give merge=True", marks=pytest.mark.slow
        ),
        pytest.param(False, {"gguf": "q4"}, "gguf='q4'; allowed are f32", marks=pytest.mark.slow),
        (False, {"gguf": "f16"}, "GGUF: gpt2 models are not written here"),
    ],
)
def test_refusals_before_anything_is_written(
    is_adapted: bool, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=32)
    model: Any = transformers.GPT2LMHeadModel(config)
    if is_adapted:
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn"]))
    with pytest.raises(PlanError, match=said):
        export(model, None, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
