"""Every test has a cache of tokens of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.data.cache import SETTING


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, str(tmp_path / "cache"))
