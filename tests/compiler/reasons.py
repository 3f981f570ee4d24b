"""The page that explains a plan, for tests that read one line of it."""

from __future__ import annotations

from penstock.compiler.job.job import Job


def reasons_of(job: Job) -> str:
    """The text of `job.explain(full=True)` without what would help, which is eight searches on other machines."""
    job._pages.helps = []
    return job.explain(full=True)
