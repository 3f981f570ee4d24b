"""Teams and experts on families of transformers beyond the zoo: each trains as eager does, or is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest

from penstock.ir.errors import PassError
from penstock.tests.compiler import pairs
from penstock.tests.compiler.families import FAMILIES, family
from penstock.tests.compiler.pairs import TOLERANCE, Pair, by_reference

EXPERTS = ("Olmoe", "GraniteMoe", "GptOss")
CONTEXT = [name for name in FAMILIES if name not in EXPERTS]
CASES = [
    *((name, "width") for name in FAMILIES),  # of Falcon, whose heads share one of keys, and gpt-oss the vocabulary
    *((name, way) for name in CONTEXT for way in ("Ulysses", "ring")),
    *((name, "experts") for name in EXPERTS),
    *((name, way) for name in EXPERTS[:2] for way in ("Ulysses", "ring", "routing")),
]
REFUSED = {  # gpt-oss attends to sinks by plain products, and repeats them for each row
    ("GptOss", "Ulysses"): r"matmul \(.*\) lets tokens meet",
    ("GptOss", "ring"): r"matmul \(.*\) lets tokens meet",
    ("GptOss", "routing"): r"torch.cat\(\[attn_weights, sinks\], dim=-1\)\) cannot run on a part of the tokens",
}


@dataclass(frozen=True)
class Case(Pair):
    """One way on a family."""

    family: str = ""

    @property
    def model(self) -> str:
        return self.family

    @property
    def dropout(self) -> float:
        return 0.0


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FAMILIES:
        monkeypatch.setitem(pairs.MODELS, name, partial(family, name))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), CASES, ids=lambda value: value)
def test_a_family_trains_as_eager(name: str, way: str) -> None:
    found = by_reference(Case(way, way, 2, name))
    assert found.largest <= TOLERANCE, found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), REFUSED, ids=lambda value: value)
def test_what_cannot_be_divided_is_refused(name: str, way: str) -> None:
    with pytest.raises(PassError, match=REFUSED[name, way]):
        Case(way, way, 2, name).compiled()
