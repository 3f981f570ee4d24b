"""The page in a real browser, headless: what it shows, and that it asks for nothing from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.tests.training.live.told import Clock, facts_of_run, record, tell
from penstock.training.live import server as module
from penstock.training.live.server import PageServer
from penstock.training.live.state import RunState

pytestmark = pytest.mark.browser


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A tab that fails the test for an error on its console and for a request that leaves the page."""
    said, asked = list[str](), list[str]()
    page = browser.new_page(viewport={"width": 1000, "height": 1100})
    page.set_default_timeout(10_000)
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    yield page
    page.close()
    assert said == []
    assert {url.split("/")[2].split(":")[0] for url in asked if not url.startswith("data:")} == {"127.0.0.1"}


def test_it_shows_the_run_and_its_end(tab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UPDATE_S", 0.05)
    clock = Clock()
    server = PageServer("127.0.0.1:0", RunState(clock))
    tab.goto(server.address)
    phase = tab.locator("#phase")
    wait_for(phase, "preparing")
    server.begin(facts_of_run())
    tell(server, clock, range(1, 121))
    server.evaluated(100, {"loss": 2.3, "accuracy": 0.91})
    wait_for(phase, "training: step 120 of 200, 0:00:05 left")
    tab.wait_for_selector("#held td")
    shown = tab.inner_text("body")
    for part in (
        "chat", "plan 58afcb", "68,267", "50.0 ms (predicted 48.0 ms)", "5e-5", "31.0%", "steps 1 to 120",
        "Slowest device: gpu0, whose compute stream is busy 80% of a step", "18.0 GiB of 22.0 GiB, 82%", "0.9100",
    ):  # fmt: skip
        assert part.lower() in shown.lower(), part
    assert tab.locator("#busy tr.slowest th").inner_text() == "gpu0"
    points, held = tab.evaluate("chart.getOption().series.map(series => series.data)")
    assert [step for step, _ in points] == list(range(1, 121)) and held == [[100, 2.3]]
    drawn = tab.evaluate(
        "() => { const c = document.querySelector('#curve canvas');"
        "return new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size; }"
    )
    assert drawn > 3

    server.step(record(121, loss=float("nan")))
    wait_for(phase, "training: step 121 of 200, ")
    assert tab.title() == "61% chat"
    server.end()
    wait_for(phase, "ended: step 121 of 200")


def wait_for(element: Any, text: str) -> None:
    """Until the element's text begins so."""
    from playwright.sync_api import expect

    expect(element).to_have_text(re.compile(f"^{re.escape(text)}"), timeout=60_000)  # ms; other tests run beside it


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_in_light_and_dark(tab: Any, scheme: str) -> None:
    """At least 4.5 to 1, as the accessibility guidelines (WCAG AA) ask of text."""
    server = PageServer("127.0.0.1:0", RunState(Clock()))
    server.begin(facts_of_run())
    server.step(record(1))
    tab.emulate_media(color_scheme=scheme)
    tab.goto(server.address)
    tab.wait_for_selector("tr.slowest")
    for where in ("h1", "dt", "#slowest", "tr.slowest th"):
        both = "e => [getComputedStyle(e).color, getComputedStyle(document.body).backgroundColor]"
        colours = tab.eval_on_selector(where, both)
        light, dark = sorted((luminance(colour) for colour in colours), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (scheme, where)
    server.end()


def luminance(colour: str) -> float:
    """Of "rgb(1, 2, 3)", as WCAG defines it."""
    parts = [int(part) / 255 for part in colour[4:-1].split(",")]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))
