"""Pytest plugin: how this repository's tests are collected. Loaded by name from setup.cfg.

The repository root holds the package's `__init__.py`, so pytest would take it for a package of tests and import it once
more under the name of the folder. With this plugin it is a plain directory. Tests marked `gpu` are skipped, and
counted, if there is no CUDA GPU. Where several processes share the tests, each gets whole files, and whole folders of
tests that trace and measure the same models, or parse the same files, which a process does once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from xdist.scheduler import LoadFileScheduling

SOURCES = ("test_words", "test_import_direction", "test_names", "test_parameters", "runtime/test_torch_names")
ALIKE = {  # files and folders, and the name of what they share
    **{f"tests/{name}.py": "sources" for name in (*SOURCES, "graph/operators/test_knowledge")},
    **dict.fromkeys(("tests/passes", "tests/graph", "tests/codegen"), "graphs"),
    "tests/compiler/job": "jobs",
}


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if path == parent.config.rootpath:
        return pytest.Dir.from_parent(parent, path=path)
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", metavar="K/N", help="the K-th of N parts of the tests, drawn by name")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine, others = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        (mine if is_in_part(item.nodeid, config.getoption("part")) else others).append(item)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = mine
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def is_in_part(test: str, part: str) -> bool:
    """Whether a test, by its name, is in a part such as "3/10", the third of ten."""
    number, count = map(int, part.split("/"))
    return crc32(test.encode()) % count == number % count


def share_of(file: str) -> str:
    """The name of the tests that one process runs together with those of a file, by its path from the repository."""
    return next((share for path, share in ALIKE.items() if f"{file}/".startswith(f"{path}/")), file)


class WholeShares(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return share_of(super()._split_scope(nodeid))


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return WholeShares(config, log) if config.getoption("dist") == "loadfile" else None
