"""The user's request for data, as plain values."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

DataKind = Literal["auto", "text", "classification", "chat", "completion", "preference", "seq2seq"]
LongRows = Literal["truncate", "drop", "error"]


class DataSpec(BaseModel):
    """columns: the file's name for one of ours, where it has another. sequence: tokens of a row; targets: of a row of
    an encoder-decoder's labels."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    paths: tuple[Path, ...]
    kind: DataKind = "auto"
    columns: dict[str, str] = Field(default_factory=dict)
    sequence: int = Field(512, ge=1)
    targets: int | None = Field(None, ge=1)
    long_rows: LongRows = "truncate"
    pack: bool = False
    split: str = "train"
