"""The words of the planner, without searches for more that most tests do not read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock.compiler.job.job import Job
from penstock.ir.errors import DoesNotFit


def reasons_of(job: Job) -> str:
    """The text of `job.explain(full=True)` without what would help, which is eight searches on other machines."""
    job._pages.helps = []
    return job.explain(full=True)


@contextmanager
def raises_misfit(match: str = "") -> Iterator[None]:
    """Expect a refusal for lack of memory, without the plans that are tried for what would fit."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(DoesNotFit, match=match):
        patch.setattr("penstock.compiler.search.nearest._tries", lambda *_: iter(()))
        yield
