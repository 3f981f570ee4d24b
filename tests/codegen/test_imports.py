"""The imports of a generated file, and user code that nothing can import: its source goes along."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from penstock.codegen import imports as imports_module
from penstock.codegen.imports import Imports, is_importable
from penstock.ir.errors import CaptureError, VerifyError
from penstock.runtime.source.trust import TRUSTED
from penstock.tests.codegen.generated import differences, generate

FACTOR = 0.5
TABLE = [1, 2]


def halve(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR * math.cos(0.0)


class Halved(torch.autograd.Function):
    factor: ClassVar[int] = 3  # ClassVar is no class, as Any is none on Python 3.10

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return halve(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return Halved.factor * grad


class ReadsTable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * TABLE[0]


class UsesHalved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": Halved.apply(self.linear(x)).sum()}


@pytest.fixture
def unimportable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this file were the user's script."""
    monkeypatch.setattr(imports_module, "is_importable", lambda name: name != __name__ and is_importable(name))


def test_the_source_of_a_script_s_class_goes_along(unimportable: None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = UsesHalved(), {"x": torch.randn(2, 3)}
    generated = generate(model, batch)
    assert "class Halved(torch.autograd.Function):" in generated.text
    assert "FACTOR = 0.5" in generated.text
    assert "import math" in generated.text
    assert "from typing import Any\nfrom typing import ClassVar\n" in generated.text
    with pytest.raises(VerifyError, match=r"typing\.(Any|ClassVar) is no class"):
        generated.load(tmp_path)
    file = generated.load(tmp_path, TRUSTED)
    assert differences(model, generated, file, batch) == []
    scope = file.stages["stage0"].forward.__globals__
    assert scope["Halved"] is not Halved


def test_a_global_that_is_no_constant_is_refused(unimportable: None) -> None:
    with pytest.raises(CaptureError, match=r"ReadsTable reads the global 'TABLE' \(list\).*module of its own"):
        Imports().function(ReadsTable.apply)


def test_a_closure_is_refused() -> None:
    factor = torch.ones(1)

    class Closed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * factor

    with pytest.raises(CaptureError, match=r"Closed reads 'factor' from around it"):
        Imports().function(Closed.apply)


@pytest.mark.parametrize("other", [None, "import torch\n", "class Other:\n    pass\n", "    return 1\n", "# text\n"])
def test_code_without_source_is_refused(other: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.13 gives other lines of the file for a class without source."""
    if other is not None:
        monkeypatch.setattr(inspect, "getsource", lambda thing: other)
    scope: dict[str, Any] = {"__name__": "__main__", "torch": torch}
    exec("class Typed(torch.autograd.Function):\n    pass", scope)
    with pytest.raises(CaptureError, match=r"Typed can be neither imported nor read as source.*module of its own"):
        Imports().reference(scope["Typed"])


def test_two_classes_of_one_name_are_told_apart() -> None:
    import decimal
    import fractions

    class First:
        __module__, __qualname__ = "decimal", "Context"

    found = Imports()
    assert found.reference(decimal.Context) == "Context"
    assert found.reference(fractions.Fraction) == "Fraction"
    found.homes["Decimal"] = First
    assert found.reference(decimal.Decimal) == "Decimal2"
    assert "from decimal import Decimal as Decimal2" in found.text()


@pytest.mark.parametrize("name", ["json.decoder", "sys", "torch.nn.functional", "penstock.ir.ops.table"])
def test_importable(name: str) -> None:
    assert is_importable(name)


@pytest.mark.parametrize("name", ["__main__", "no_such_module", "json.no_such_part"])
def test_not_importable(name: str) -> None:
    assert not is_importable(name)
