"""Pytest plugin: leaves out the tests that the file `LEFT_OUT` names. Each process of pytest-xdist loads it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from penstock.bench.gpu.device_tests import LEFT_OUT


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    named = set(Path(os.environ[LEFT_OUT]).read_text().splitlines())
    gone = [item for item in items if item.nodeid in named]
    items[:] = [item for item in items if item.nodeid not in named]
    config.hook.pytest_deselected(items=gone)
