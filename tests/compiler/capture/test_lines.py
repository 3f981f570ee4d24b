"""An error names the user's own line where there is one, then the library's."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from penstock.compiler.capture.trace import trace
from penstock.ir.errors import CaptureError

LIBRARY = """
def clipped(h):
    return h.sum() * scale(h)

def scale(h):
    return h.max().item()

def squared(h):
    return h.view(7, 7)
"""


@pytest.fixture
def library(tmp_path: Path) -> ModuleType:
    """A module that looks installed."""
    path = tmp_path / "site-packages" / "their_library.py"
    path.parent.mkdir()
    path.write_text(LIBRARY)
    spec = importlib.util.spec_from_file_location("their_library", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Own(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


def lines_of(model: nn.Module) -> list[str]:
    with pytest.raises(CaptureError) as caught:
        trace(model, torch.randn(3, 4))
    return str(caught.value).split("\n")


def test_a_refused_call_names_the_users_line_then_the_librarys(library: ModuleType) -> None:
    first, second, _ = lines_of(Own(lambda h: library.clipped(h)))
    assert first.startswith("test_lines.py:") and "library.clipped(h)" in first
    assert second == "  in their_library.py:6: return h.max().item()"


def test_so_does_an_error_that_the_library_raises(library: ModuleType) -> None:
    first, second, third, *_ = lines_of(Own(lambda h: library.squared(h)))
    assert first.startswith("test_lines.py:") and second == "  in their_library.py:9: return h.view(7, 7)"
    assert third.startswith("  Own.forward failed: RuntimeError")


def test_a_librarys_model_names_its_own_line_alone(library: ModuleType) -> None:
    """The line that calls the compiler is no part of the model."""

    class Model(nn.Module):
        forward = staticmethod(library.clipped)

    first, second, *_ = lines_of(Model())
    assert first == "their_library.py:6: return h.max().item()" and "needs the value" in second


def test_the_users_line_alone_where_no_library_is_further_in() -> None:
    first, second = lines_of(Own(lambda h: h.sum() * h.max().item()))
    assert first.startswith("test_lines.py:") and "needs the value" in second
