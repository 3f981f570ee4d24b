"""Pytest plugin: a test that is skipped has failed. `make gpu-emulated` loads it, since all of its tests can run."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"skipped under emulation: {report.longrepr[2]}"
    return report
