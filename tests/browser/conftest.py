"""A headless Chromium, in which a page that says anything on its console, or asks for anything, fails its test."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.tests.browser.report_pages import job_of

Open = Callable[..., Any]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    found = shutil.which("chromium")
    assert found, "no chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Open]:
    """Opens a file as a page that has drawn everything."""
    wrong: list[str] = []
    contexts = []

    def open_page(path: Path, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": 1400, "height": 1000}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: wrong.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("request", lambda request: request.url.startswith(("file:", "data:")) or wrong.append(request.url))
        page.goto(path.resolve().as_uri())
        page.wait_for_selector("html[data-ready=yes]", timeout=20_000)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report after three steps, with what would help, of a model that two devices cannot hold."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    job, batch = job_of(layers=6, rows=8, width=192, sequence=64, memory="24MB")
    with job:
        for _ in range(3):
            job.step(batch)
        return job.report(path)


@pytest.fixture
def screenshot() -> Callable[[Any, str], None]:
    """Takes a picture of a page or a part of it for the documents, where they are asked for."""
    folder = os.environ.get("PENSTOCK_SCREENSHOTS")

    def take(part: Any, name: str) -> None:
        if folder:
            part.screenshot(path=str(Path(folder) / f"{name}.png"))

    return take
