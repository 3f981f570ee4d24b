"""llama.cpp computes from an exported file what the trained model computes. Skipped without `llama-cpp-python`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

import penstock
from penstock.tests.compiler.export.gguf_models import CONFIGS, write_model

pytest.importorskip("gguf")
llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: pip install llama-cpp-python")
LARGEST = {"f32": 1e-4, "f16": 5e-3}  # difference of a logit, where the largest is about 1


def logits_of(file: Path, tokens: list[int]) -> Tensor:
    exact = llama_cpp.GGML_TYPE_F32  # of keys and values, which are kept in half precision otherwise
    model = llama_cpp.Llama(str(file), n_ctx=64, logits_all=True, verbose=False, type_k=exact, type_v=exact)
    model.eval(tokens)
    return torch.from_numpy(model.scores[: len(tokens)].copy())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_an_exported_model(name: str, tmp_path: Path) -> None:
    write_model(tmp_path / "base", name, torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").train()
    ids = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(0))
    batch, machine = {"input_ids": ids, "labels": ids}, penstock.Hardware.cpu(1, memory="1GB")
    with penstock.compile(model, machine, batch, strategy="mobius", micro_batches=1) as job:
        job.step(batch)
        for kind in LARGEST:
            job.export(tmp_path / kind, gguf=kind)
    for kind, largest in LARGEST.items():
        trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / kind).eval()
        expected = trained(input_ids=ids[:1]).logits[0].detach().float()
        difference = (logits_of(tmp_path / kind / "model.gguf", ids[0].tolist()) - expected).abs().max()
        print(f"{name} {kind}: largest logit {float(expected.abs().max()):.3g}, difference {float(difference):.2g}")
        assert difference < largest, f"{kind}: {difference}"
