"""Text to token ids and back to the marks around it: by a tokenizer, or as plain bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..compiler.models.hub import SETTINGS, TOKENIZER_FILES
from ..ir.errors import PlanError

NUM_BYTES = 256
VISION = "torchvision"

Encode = Callable[[str], list[int]]  # text to token ids


@dataclass(frozen=True)
class Codec:
    """Turns text into tokens, by a tokenizer or as plain bytes. `special` adds the marks around a classifier's rows."""

    encode: Encode
    special: Encode
    end_id: int | None  # between two texts of one stream
    pad_id: int
    vocab_size: int
    is_bytes: bool = False
    tokenizer: Any = None
    begin_ids: tuple[int, ...] = ()  # before a prompt
    directory: Path | None = None
    processor: Any = None  # of texts and images, of a model that sees
    image_size: tuple[int, int] | None = None  # height and width that images are brought to before

    @staticmethod
    def read(directory: Path | None, sees: bool = False, image_size: tuple[int, int] | None = None) -> Codec:
        """The tokenizer in a model's directory, or plain bytes if there is none; the processor of a model that sees.
        Never downloads."""
        names = (*TOKENIZER_FILES, SETTINGS[0])  # tokenizers of bytes have settings only
        if directory is None or not any((directory / name).is_file() for name in names):
            return Codec(_bytes, _bytes, end_id=10, pad_id=0, vocab_size=NUM_BYTES, is_bytes=True)
        from transformers import AutoProcessor, AutoTokenizer

        try:
            loader = AutoProcessor if sees else AutoTokenizer
            loaded: Any = loader.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
            processor = loaded if hasattr(loaded, "image_processor") else None
            tokenizer = loaded if processor is None else loaded.tokenizer
        except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
            what = "processor" if sees else "tokenizer"
            more = "; many processors need torchvision, which is missing" if sees and not find_spec(VISION) else ""
            raise PlanError(f"the {what} in {directory} cannot be loaded: {error}{more}") from error
        end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end
        marks = tokenizer("", add_special_tokens=True)["input_ids"]
        begins = marks[:1] if marks and marks[0] in (tokenizer.bos_token_id, tokenizer.cls_token_id) else []
        return Codec(
            lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
            lambda text: tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"],
            end_id=end,
            pad_id=0 if pad is None else pad,
            vocab_size=len(tokenizer),
            tokenizer=tokenizer,
            begin_ids=tuple(begins),
            directory=directory,
            processor=processor,
            image_size=image_size,
        )

    @property
    def end_ids(self) -> list[int]:
        return [] if self.end_id is None else [self.end_id]

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides on the tokens of a text."""
        found = hashlib.sha256(b"bytes" if self.is_bytes else b"tokenizer")
        found.update(str(self.image_size).encode())
        for name in (*TOKENIZER_FILES, *SETTINGS):
            path = None if self.directory is None else self.directory / name
            if path is not None and path.is_file():
                found.update(name.encode() + path.read_bytes())
        return found.hexdigest()


def _bytes(text: str) -> list[int]:
    return list(text.encode("utf-8"))
