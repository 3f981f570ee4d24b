"""A directory of `save_pretrained` as one file of GGUF, which llama.cpp runs: by the library `gguf`, tensor by tensor.

The library has the names of tensors, the packed types and the form of the file. What a model's computation means there
is known here of the architectures in `ARCHITECTURES` alone; the script of llama.cpp knows all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...ir.documents import read_json
from ...ir.errors import PlanError
from ...runtime.quantised.libraries import why_missing
from ...runtime.state.weight_files import open_files

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # model_type: theirs
TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}  # of matrices; all else is F32
ROTATED = (".q_proj.weight", ".k_proj.weight", ".q_proj.bias", ".k_proj.bias")
ROPE_FREQUENCIES = "rope_freqs.weight"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {  # how text is split before its bytes are merged, and whether words of the vocabulary need no merges
    (_WORDS % r"\p{N}{1,3}", True): "llama-bpe",
    (_WORDS % r"\p{N}", False): "qwen2",
    ("", False): "gpt-2",
}
Config = Mapping[str, Any]


def write_gguf(directory: Path, file: Path, kind: str) -> Path:
    """Write the weights, configuration and tokenizer of a directory to a file, with matrices of a type of `TYPES`.

    One tensor is in memory at a time. Raises `PlanError` for what this file could not say of the model.
    """
    gguf = library()
    config = read_json(directory / "config.json")
    require_type(kind)
    arch = require_known(config)
    stored = open_files(directory)
    count = config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), count)
    places = {key: names.get_name(key, try_suffixes=(".weight", ".bias")) for key in stored}
    unknown = [key for key, name in places.items() if name is None]
    if unknown:
        raise PlanError(f"GGUF: {unknown[0]} has no place in llama.cpp's {arch!r}; {_script(directory)}")
    part = file.with_name(f".{file.name}.part")
    writer = gguf.GGUFWriter(part, arch)
    try:
        _describe(writer, gguf, config, kind)
        _add_tokenizer(writer, gguf, directory, config["vocab_size"])
        tensors: dict[str, Callable[[], Tensor]] = {}
        factors = rope_factors(config)
        if factors is not None:
            tensors[ROPE_FREQUENCIES] = lambda factors=factors: factors  # type: ignore[misc]
        for key, place in stored.items():
            heads = _heads(config, key) if arch == "llama" else 0
            tensors[places[key]] = lambda place=place, heads=heads: rotated_in_pairs(place.read(), heads)  # type: ignore[misc]
        shapes = {places[key]: place.shape for key, place in stored.items()}
        types = {name: _type_of(gguf, shapes.get(name, (1,)), kind) for name in tensors}
        for name, read in tensors.items():
            shape = shapes.get(name) or tuple(read().shape)
            block, num_bytes = gguf.GGML_QUANT_SIZES[types[name]]
            writer.add_tensor_info(
                name, shape, np.dtype(np.float32), math.prod(shape) // block * num_bytes, raw_dtype=types[name]
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, read in tensors.items():
            writer.write_tensor_data(_pack(gguf, name, read(), types[name]))
        writer.close()
        part.replace(file)
    finally:
        writer.close()
        part.unlink(missing_ok=True)
    return file


def library() -> Any:
    """The library `gguf`. Raises `PlanError` where it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise PlanError(f"GGUF: its library gguf is {why_missing('gguf', error, 'gguf')}") from error
    return gguf


def require_type(kind: str) -> None:
    """Raise `PlanError` for an unknown type of matrices."""
    if kind not in TYPES:
        allowed = ", ".join(TYPES)
        raise PlanError(f"gguf={kind!r}; allowed are {allowed}; llama-quantize of llama.cpp makes smaller files")


def require_known(config: Config) -> str:
    """The architecture of llama.cpp for a configuration. Raises `PlanError` for a model whose computation this file
    could not say."""
    model_type = str(config.get("model_type"))
    if model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise PlanError(f"GGUF: {model_type} models are not written here, but {known}; {_script(None)}")
    rope = _rope(config)
    own = {
        "hidden_act": config.get("hidden_act", "silu") == "silu",
        "rope_type": rope.get("rope_type", "default") in ("default", "linear", "llama3"),
        "partial_rotary_factor": rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) in (None, 1.0),
        "layer_types": set(config.get("layer_types") or ["full_attention"]) == {"full_attention"},
    }
    wrong = [name for name, is_known in own.items() if not is_known]
    if wrong:
        value = rope.get(wrong[0], config.get(wrong[0]))
        raise PlanError(f"GGUF: {wrong[0]} {value!r} of this {model_type} model is not written here; {_script(None)}")
    return ARCHITECTURES[model_type]


def rotated_in_pairs(tensor: Tensor, heads: int) -> Tensor:
    """Rows of a query or key in the order of llama.cpp, which turns neighbours where transformers turns halves.
    heads=0: the tensor as it is."""
    if not heads:
        return tensor
    halves = tensor.view(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def rope_factors(config: Config) -> Tensor | None:
    """The divisors of the rotary frequencies of Llama 3.1 and later; None for other models."""
    rope = _rope(config)
    if rope.get("rope_type") != "llama3":
        return None
    size, factor, original = _head_size(config), rope["factor"], rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = original / (2 * math.pi * rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float64) / size))
    share = ((turns - low) / (high - low)).clamp(0, 1)
    found: Tensor = 1 / ((1 - share) / factor + share)
    return found.float()


def _describe(writer: Any, gguf: Any, config: Config, kind: str) -> None:
    rope, size = _rope(config), _head_size(config)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_file_type(getattr(gguf.LlamaFileType, "ALL_F32" if kind == "f32" else f"MOSTLY_{TYPES[kind]}"))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(_kv_heads(config))
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _rope(config: Config) -> dict[str, Any]:
    """The rotary embedding, in either form in which configurations have it."""
    found = config.get("rope_parameters")
    if found is None:
        found = {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}
        found.setdefault("rope_type", found.get("type", "default"))
    return dict(found)


def _head_size(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _kv_heads(config: Config) -> int:
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def _heads(config: Config, key: str) -> int:
    """The heads whose rows a tensor has, where their order is another one in llama.cpp."""
    if not key.endswith(ROTATED):
        return 0
    return int(config["num_attention_heads"]) if ".q_proj." in key else _kv_heads(config)


def _type_of(gguf: Any, shape: tuple[int, ...], kind: str) -> Any:
    """The type of a tensor in the file: F32 for vectors, F16 for rows that are no multiple of a block."""
    types = gguf.GGMLQuantizationType
    wished = types[TYPES[kind]]
    if len(shape) < 2:
        return types.F32
    return wished if shape[-1] % gguf.GGML_QUANT_SIZES[wished][0] == 0 else types.F16


def _pack(gguf: Any, name: str, tensor: Tensor, kind: Any) -> np.ndarray[Any, Any]:
    types = gguf.GGMLQuantizationType
    if kind == types.BF16:
        return tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    if kind == types.F16:
        half = tensor.to(torch.float16)
        if not bool(half.isfinite().all()):
            raise PlanError(f"GGUF: {name} has numbers beyond the range of F16; write it with gguf='bf16'")
        return half.contiguous().numpy()
    found: np.ndarray[Any, Any] = gguf.quants.quantize(tensor.float().contiguous().numpy(), kind)
    return found


def _add_tokenizer(writer: Any, gguf: Any, directory: Path, vocab_size: int) -> None:
    """The tokens and the rules of the tokenizer in a directory. Raises `PlanError` for a tokenizer without a known name
    of its rules."""
    tokenizer = directory / "tokenizer.json"
    document = read_json(tokenizer) if tokenizer.is_file() else {}
    split = _byte_level_split(document)
    if split is not None:
        if not document["model"].get("merges"):
            raise PlanError(f"GGUF: the tokenizer of {directory} has no merges, without which llama.cpp reads no file")
        rows = list(_byte_level_tokens(gguf, document, vocab_size))
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(split)
    elif (directory / "tokenizer.model").is_file():
        rows = _sentencepiece_tokens(gguf, directory, document, vocab_size)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores([score for _, score, _ in rows])
    else:
        found = "no tokenizer" if not document else "a tokenizer whose rules have no name that is known here"
        raise PlanError(
            f"GGUF: {directory} has {found}; known are byte-level ones of Llama 3, Qwen and GPT-2 (tokenizer.json), "
            f"and those of sentencepiece (tokenizer.model); {_script(directory)}"
        )
    writer.add_token_list([text for text, _, _ in rows])
    writer.add_token_types([kind for _, _, kind in rows])
    special = gguf.SpecialVocab(directory, load_merges=split is not None, n_vocab=len(rows))
    special.add_to_gguf(writer, quiet=True)


def _byte_level_split(document: Mapping[str, Any]) -> str | None:
    """The name in llama.cpp of a byte-level tokenizer's way to split a text; None for another tokenizer."""
    model, before = document.get("model") or {}, document.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", [before])
    last = steps[-1] if steps else {}
    if model.get("type") != "BPE" or last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    patterns = [step.get("pattern", {}).get("Regex") for step in steps[:-1]]
    if bool(patterns) == bool(last.get("use_regex", True)) or len(patterns) > 1:
        return None
    return SPLITS.get((patterns[0] if patterns else "", bool(model.get("ignore_merges"))))


def _byte_level_tokens(gguf: Any, document: Mapping[str, Any], vocab_size: int) -> Iterator[tuple[str, float, Any]]:
    kinds = gguf.TokenType
    added = {row["id"]: row for row in document.get("added_tokens", ())}
    texts = {index: text for text, index in document["model"]["vocab"].items()}
    for index in range(vocab_size):
        if index in added:
            yield added[index]["content"], 0.0, kinds.CONTROL if added[index]["special"] else kinds.USER_DEFINED
        elif index in texts:
            yield texts[index], 0.0, kinds.NORMAL
        else:
            yield f"[PAD{index}]", 0.0, kinds.UNUSED


def _sentencepiece_tokens(
    gguf: Any, directory: Path, document: Mapping[str, Any], vocab_size: int
) -> list[tuple[Any, float, Any]]:
    kinds = gguf.TokenType
    rows: list[tuple[Any, float, Any]] = list(gguf.SentencePieceVocab(directory).all_tokens())
    rows += [(f"[PAD{index}]", -10000.0, kinds.UNUSED) for index in range(len(rows), vocab_size)]
    for row in document.get("added_tokens", ()):
        if row["id"] < len(rows) and rows[row["id"]][2] in (kinds.NORMAL, kinds.UNUSED, kinds.USER_DEFINED):
            rows[row["id"]] = (row["content"], -1000.0, kinds.CONTROL if row["special"] else kinds.USER_DEFINED)
    return rows[:vocab_size]


def _script(directory: Path | None) -> str:
    return f"`python convert_hf_to_gguf.py {directory or 'DIRECTORY'}` of llama.cpp may know it"
