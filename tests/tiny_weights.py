"""Tiny weights under the names of real models, and CPU devices under those of real cards: what a page shows runs so."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from penstock.cli.main import main

BLOCK = re.compile(r"^```([^\n`]*)\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
HUB_NAME = re.compile(r'"(?:meta-llama|Qwen|mistralai)/[\w.-]+"')
SEQUENCE = re.compile(r"(?<![\w.])(1024|2048)(?![\w.])")
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' }}{% generation %}{{ m['content'] + '|' }}{% endgeneration %}"
    "{% endfor %}"
)


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of every fenced block; the language is empty for a bare fence."""
    return BLOCK.findall(text)


def write_tiny_model(directory: Path) -> Path:
    """A Llama of two layers with random weights, and a tokenizer of bytes with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, pad_token_id=256, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={**{c: i for i, c in enumerate(letters)}, "<pad>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<pad>")
    whole.chat_template = TEMPLATE
    whole.save_pretrained(directory)
    return directory


def write_chats(path: Path, num_rows: int = 16) -> Path:
    """Conversations of one question and one answer."""
    rows = [
        {"messages": [{"role": "user", "content": f"{i}+{i}?"}, {"role": "assistant", "content": f"{2 * i}"}]}
        for i in range(num_rows)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def with_tiny_weights(code: str, model: Path, cards: Mapping[str, str]) -> str:
    """The code of a page with the directory of a tiny model for every name of the hub, Python for each card, and rows
    of 32 tokens."""
    code = SEQUENCE.sub("32", HUB_NAME.sub(repr(str(model)), code))
    for card, python in cards.items():
        assert f'"{card}"' in code, card
        code = code.replace(f'"{card}"', python)
    return code


def with_tiny_config(text: str, model: Path) -> str:
    """A file for `penstock train` with the tiny model, on one CPU device."""
    text = re.sub(r"(?<= model: ).*", str(model), text)
    text = re.sub(r"(?<= hardware: ).*", "cpu\n  set: num_devices=1", text)
    text = re.sub(r"(?<= sequence: ).*", "64", text)
    return re.sub(r"^  download: true\n", "", text, flags=re.MULTILINE)


def run_command(line: str, model: Path, *, num_devices: int = 1) -> str:
    """Run a `penstock` command of a page on CPU devices, with a tiny model and rows of 64 tokens. Returns what is
    printed; raises `AssertionError` where it fails."""
    words = shlex.split(line)
    assert words[0] == "penstock"
    instead = {"--model": str(model), "--hardware": "cpu", "--sequence": "64", "--dram": "2GB"}
    for option, value in instead.items():
        if option in words:
            words[words.index(option) + 1] = value
    words = [word for word in words[1:] if word != "--download"]
    if not any(word.endswith(".yaml") for word in words):
        words += [] if "--hardware" in words else ["--hardware", "cpu"]
        words += ["--set", f"num_devices={num_devices}"]
    out = io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out):
        try:
            main(words)
        except SystemExit as ended:
            code = int(ended.code or 0)
    assert code == 0, f"{line}: exit code {code}"
    return out.getvalue()
