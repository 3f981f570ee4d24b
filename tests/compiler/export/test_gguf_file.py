"""Files of GGUF hold the directory's weights bit for bit, in the order of llama.cpp, and say how to compute with them.

The files are read back by the library that writes them, and computed with where `llama-cpp-python` is installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from penstock.compiler.export.gguf_file import SPLITS, rope_factors, rotated_in_pairs, write_gguf
from penstock.errors import PlanError
from penstock.tests.compiler.export.gguf_models import CONFIGS, SHAPE, write_model, write_tokenizer

gguf = pytest.importorskip("gguf")
PLACES = {  # as transformers names a tensor of a layer: as llama.cpp does
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def place(key: str) -> str:
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
             "lm_head.weight": "output.weight"}  # fmt: skip
    if key in whole:
        return whole[key]
    number, _, rest = key.removeprefix("model.layers.").partition(".")
    path, _, leaf = rest.rpartition(".")
    return f"blk.{number}.{PLACES[path]}.{leaf}"


def turn_back(values: np.ndarray[Any, Any], heads: int) -> torch.Tensor:
    """The order of transformers, from pairs of neighbours."""
    rows = torch.from_numpy(values.astype(np.float32))
    pairs = rows.view(heads, rows.shape[0] // heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(rows.shape)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["bf16", "f16", "q8_0"])
def test_tensors_are_those_of_the_directory(name: str, kind: str, tmp_path: Path) -> None:
    """16 bits exactly; 8 bits within half a step of a block of 32."""
    weights = write_model(tmp_path, name)
    reader = gguf.GGUFReader(write_gguf(tmp_path, tmp_path / "model.gguf", kind))
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert sorted(found) == sorted(map(place, weights))
    config = CONFIGS[name]
    for key, tensor in weights.items():
        own = found[place(key)]
        assert own.tensor_type.name == ({"bf16": "BF16", "f16": "F16", "q8_0": "Q8_0"}[kind] if tensor.dim() > 1
                                        else "F32")  # fmt: skip
        values = gguf.quants.dequantize(own.data, own.tensor_type)
        expected = tensor.to({"bf16": torch.bfloat16, "f16": torch.float16}.get(kind, torch.float32)).float()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(key.split(".")[-2], 0)
        turned = heads and name in ("llama", "mistral")
        back = turn_back(values, heads) if turned else torch.from_numpy(values.astype(np.float32))
        if kind == "q8_0" and tensor.dim() > 1:
            step = expected.view(-1, 32).abs().amax(1, keepdim=True) / 127
            assert ((back.view(-1, 32) - expected.view(-1, 32)).abs() <= step * 0.51 + 1e-4).all(), key
        else:
            assert torch.equal(back.view(expected.shape), expected), key


@pytest.mark.parametrize("name", CONFIGS)
def test_llama_cpp_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    """In fp32, in another order."""
    llama_cpp = pytest.importorskip("llama_cpp")
    write_model(tmp_path, name, torch.float32)
    file = write_gguf(tmp_path, tmp_path / "model.gguf", "f32")
    ids = torch.randint(0, 256, (1, 48), generator=torch.Generator().manual_seed(0))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    plain = llama_cpp.GGML_TYPE_F32
    reader = llama_cpp.Llama(str(file), n_ctx=64, logits_all=True, type_k=plain, type_v=plain, verbose=False)
    reader.eval(ids[0].tolist())
    found = torch.from_numpy(np.array(reader.scores[:48]))
    torch.testing.assert_close(found, model(ids).logits[0].detach(), rtol=1e-4, atol=1e-5)


def test_a_tokenizer_without_merges_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "llama")
    file = tmp_path / "tokenizer.json"
    document = json.loads(file.read_text())
    document["model"]["merges"] = []
    file.write_text(json.dumps(document))
    with pytest.raises(PlanError, match="has no merges"):
        write_gguf(tmp_path, tmp_path / "model.gguf", "f16")


def fields(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def test_what_the_file_says_of_the_model(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3")
    found = fields(write_gguf(tmp_path, tmp_path / "model.gguf", "q8_0"))
    expected = {
        "general.architecture": "qwen3", "qwen3.context_length": 64, "qwen3.embedding_length": 64,
        "qwen3.block_count": 2, "qwen3.feed_forward_length": 96, "qwen3.attention.head_count": 4,
        "qwen3.attention.head_count_kv": 2, "qwen3.attention.key_length": 32, "qwen3.attention.value_length": 32,
        "qwen3.rope.dimension_count": 32, "qwen3.vocab_size": 320, "general.file_type": 7,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.ggml.merges": ["t h", "th e"], "tokenizer.ggml.eos_token_id": 258,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert found["qwen3.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    assert found["qwen3.rope.freq_base"] == CONFIGS["qwen3"].rope_parameters["rope_theta"]
    tokens, types = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == 320 and tokens[256:260] == ["th", "the", "<end>", "[PAD259]"]
    assert types[256:260] == [1, 1, 3, 5]


@pytest.mark.parametrize("name", SPLITS.values())
def test_the_names_of_splits(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, "llama")
    write_tokenizer(tmp_path, name)
    assert fields(write_gguf(tmp_path, tmp_path / "model.gguf", "f16"))["tokenizer.ggml.pre"] == name


def test_scores_differ_by_a_rotation_of_neighbours_only() -> None:
    """Attention of rotated halves (transformers) and of rotated neighbours (llama.cpp) over the turned rows is one."""
    heads, size, length = 2, 8, 5
    torch.manual_seed(0)
    weights = [torch.randn(heads * size, 16, dtype=torch.float64) for _ in range(2)]
    x = torch.randn(length, 16, dtype=torch.float64)
    angles = torch.arange(length)[:, None, None] / 100 ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    cos, sin = angles.cos(), angles.sin()

    def scores(rows: list[torch.Tensor], is_pairs: bool) -> torch.Tensor:
        turned = []
        for weight in rows:
            value = (x @ weight.T).view(length, heads, size)
            a, b = (value[..., ::2], value[..., 1::2]) if is_pairs else value.split(size // 2, -1)
            turned.append(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))
        return torch.einsum("ihd,jhd->hij", *turned)

    pairs = scores([rotated_in_pairs(weight, heads) for weight in weights], is_pairs=True)
    torch.testing.assert_close(pairs, scores(weights, is_pairs=False), rtol=1e-12, atol=1e-12)


def test_the_frequencies_of_llama_3() -> None:
    """Those of transformers, as divisors."""
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    config = transformers.LlamaConfig(**{**SHAPE, "hidden_size": 512, "max_position_embeddings": 131072},
                                      rope_parameters=rope)  # fmt: skip
    model = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    factors = rope_factors(config.to_dict())
    assert factors is not None and factors.max() == 8 and factors.min() == 1
    plain = 1 / 500000.0 ** (torch.arange(0, 128, 2) / 128)
    torch.testing.assert_close(plain / factors, model.inv_freq, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"model_type": "gemma"}, "f16", "gemma models are not written here, but llama, mistral, qwen2, qwen3; `py"),
        ({}, "q4_0", "gguf='q4_0'; allowed are f32, f16, bf16, q8_0; llama-quantize"),
        ({"hidden_act": "gelu"}, "f16", "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "f16", "rope_type 'yarn'"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "f16", "layer_types"),
    ],
)
def test_refusals(change: dict[str, Any], kind: str, said: str, tmp_path: Path) -> None:
    write_model(tmp_path, "llama")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(PlanError, match=said):
        write_gguf(tmp_path, tmp_path / "model.gguf", kind)
    assert not list(tmp_path.glob("*gguf*"))


def test_a_tokenizer_without_a_name_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "llama")
    path = tmp_path / "tokenizer.json"
    document = json.loads(path.read_text())
    document["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\w+"
    path.write_text(json.dumps(document))
    with pytest.raises(PlanError, match="whose rules have no name that is known here; known are byte-level"):
        write_gguf(tmp_path, tmp_path / "model.gguf", "f16")
    path.unlink()
    with pytest.raises(PlanError, match="has no tokenizer"):
        write_gguf(tmp_path, tmp_path / "model.gguf", "f16")
    assert not list(tmp_path.glob("*gguf*"))


def test_numbers_beyond_f16_are_refused(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["qwen2"])
    model.lm_head.weight.data[0, 0] = 1e6
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    with pytest.raises(PlanError, match=r"output\.weight has numbers beyond the range of F16; write .* gguf='bf16'"):
        write_gguf(tmp_path, tmp_path / "model.gguf", "f16")
