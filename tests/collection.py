"""Pytest plugin: how this repository's tests are collected. Loaded by name from setup.cfg.

The repository root holds the package's `__init__.py`, so pytest would take it for a package of tests and import it once
more under the name of the folder. With this plugin it is a plain directory. Tests marked `gpu` are skipped, and
counted, if there is no CUDA GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if path == parent.config.rootpath:
        return pytest.Dir.from_parent(parent, path=path)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
