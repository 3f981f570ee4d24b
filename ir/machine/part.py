"""The base of all parts of a hardware document: their rules, and amounts with units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from .. import units

Dtype = Literal["fp32", "bf16", "fp16", "fp8"]
DTYPES: tuple[Dtype, ...] = ("fp32", "bf16", "fp16")  # which any device may have

Bytes = Annotated[
    int, BeforeValidator(units.parse_bytes), Field(gt=0), PlainSerializer(units.spell_bytes, when_used="json")
]
SomeBytes = Annotated[
    int, BeforeValidator(units.parse_bytes), Field(ge=0), PlainSerializer(units.spell_bytes, when_used="json")
]
Rate = Annotated[
    float, BeforeValidator(units.parse_rate), Field(gt=0), PlainSerializer(units.RATE.spell, when_used="json")
]
Flops = Annotated[
    float, BeforeValidator(units.parse_flops), Field(gt=0), PlainSerializer(units.FLOPS.spell, when_used="json")
]
Seconds = Annotated[
    float, BeforeValidator(units.parse_seconds), Field(ge=0), PlainSerializer(units.SECONDS.spell, when_used="json")
]
Fraction = Annotated[float, Field(gt=0, le=1)]


AnyPart = TypeVar("AnyPart", bound="MachinePart")


class MachinePart(BaseModel):
    """Common rules of all parts: immutable, and no key beyond those listed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def model_copy(self: AnyPart, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> AnyPart:
        """A copy with other fields, and without what the original has found out about its own."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied
