"""The code on docs/adapters.md runs, and its commands are the program's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "adapters.md").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_example_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names = {"directory": tmp_path}
    exec(code, names)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "checkpoint" / "manifest.json").is_file()
    plain, ids = names["plain"], torch.arange(8).view(1, 8)
    with torch.no_grad():
        assert torch.isfinite(plain(input_ids=ids).logits).all()  # type: ignore[operator]
