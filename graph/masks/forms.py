"""The forms of masks that a kernel of attention computes itself, in place of the mask."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class KeyWindow(BaseModel):
    """The keys that the query at place i sees: from place i - `before` to place i + `after`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    before: Annotated[int, Field(ge=0)]
    after: Annotated[int, Field(ge=0)] = 0


class DocumentBorders(BaseModel):
    """Keys of the query's document alone, by torch's kernel for sequences of any length, with room for `most` documents
    in a micro-batch. `positions`: the input in which they begin anew."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    most: Annotated[int, Field(ge=1)]
    positions: str


# What an attention mask lets queries see. causal: keys up to their place; documents: those of their document alone.
MaskForm = Literal["all", "causal", "documents"] | KeyWindow | DocumentBorders
