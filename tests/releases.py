"""The tests that hold for new releases of a library alone."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version


def needs_transformers(least: str, why: str) -> pytest.MarkDecorator:
    """Skips a test with an older transformers, and says why it needs this one."""
    found = version("transformers")
    return pytest.mark.skipif(Version(found) < Version(least), reason=f"transformers {found}, not {least}: {why}")
