"""Pytest plugin: every run of a property-based test tries the same examples, unless it is asked for random ones.

    pytest -m hypothesis --hypothesis-profile random --hypothesis-seed 7 --examples 10

tries ten times the number of examples that each test asks for, drawn from the seed 7. Loaded by name from setup.cfg.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

# Nothing that is timed makes a test fail: the machine may have other things to do.
UNTIMED = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
SETTINGS = "_hypothesis_internal_use_settings"  # where Hypothesis keeps what `@settings` said

settings.register_profile("repeatable", UNTIMED, derandomize=True)
settings.register_profile("random", UNTIMED, derandomize=False, print_blob=True)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--examples", type=int, default=1, help="times as many examples as a property-based test says")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    times = config.getoption("--examples")
    for test in {item.function for item in items if isinstance(item, pytest.Function)}:
        if times != 1 and is_hypothesis_test(test):
            said = getattr(test, SETTINGS, settings())
            setattr(test, SETTINGS, settings(said, max_examples=times * said.max_examples))
