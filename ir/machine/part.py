"""What all parts of a hardware document have in common: their rules, and amounts with units."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from .. import units

Dtype = Literal["fp32", "bf16", "fp16"]
DTYPES: tuple[Dtype, ...] = ("fp32", "bf16", "fp16")

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


class MachinePart(BaseModel):
    """Common rules of all parts: immutable, and no key beyond those listed."""

    model_config = ConfigDict(frozen=True, extra="forbid")
