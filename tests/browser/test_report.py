"""The report in a browser: it shows all parts, zooms, tells of what is pointed at, by mouse and by keys."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.tests.browser.report_pages import MANY, job_of, many_spans

pytestmark = pytest.mark.browser

Open = Callable[..., Any]
PARTS = ("machine", "timeline", "memory", "spent", "whatif")
ZOOM = "drawn['timeline-chart'].getOption().dataZoom[0]"


def show(page: Any) -> float:
    """The share of the step that the timeline shows, in per cent."""
    return page.evaluate(f"{ZOOM}.end - {ZOOM}.start")  # type: ignore[no-any-return]


def place_of(page: Any, index: int) -> tuple[float, float]:
    """The place of a span on the page."""
    page.locator("#timeline-chart").scroll_into_view_if_needed()
    x, y = page.evaluate(
        "i => { const s = spans[i], c = drawn['timeline-chart'];"
        "const [x, y] = c.convertToPixel({seriesIndex: 0}, [(s.start + s.end) / 2, s.stream]);"
        "return [x, y + (facts.measured ? (s.measured ? 6 : -6) : 0)]; }",
        index,
    )
    box = page.locator("#timeline-chart").bounding_box()
    return box["x"] + x, box["y"] + y


def until(page: Any, expression: str) -> None:
    """Playwright's own wait runs text as code in the page, which the page's policy forbids."""
    for _ in range(100):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"never {expression}")


def longest(page: Any) -> int:
    return page.evaluate("spans.reduce((a, b) => b.end - b.start > a.end - a.start ? b : a).index")  # type: ignore[no-any-return]


def test_every_part_is_drawn(report: Path, opened: Open, screenshot: Callable[[Any, str], None]) -> None:
    page = opened(report)
    assert re.match(r"It fits\. A step takes .* tokens a second; bound by", page.text_content("#sentence"))
    for part in PARTS:
        drawn = page.evaluate(
            "id => { const c = document.querySelector(`#${id}-chart canvas`), d = c.getContext('2d')"
            ".getImageData(0, 0, c.width, c.height).data; return new Set(new Uint32Array(d.buffer)).size; }",
            part,
        )
        assert drawn > 3, part
    assert page.locator("#stage-table tr").count() > 2
    assert "measured" in page.text_content("#timeline-note")
    assert re.match("Predicted: .* held at most .*, as measured", page.text_content("#memory-note"))
    assert "lower bound" in page.text_content("#spent-note")
    screenshot(page, "report")
    screenshot(page.locator("#memory"), "report-memory")


def test_rivals_are_bars_with_their_reasons(report: Path, opened: Open) -> None:
    page = opened(report)
    assert "Nothing else was simulated" in page.text_content("#rivals-note")
    assert page.locator("#rivals-chart").is_hidden()
    rows = [
        {"name": "slow <b>", "step_s": 1.0, "reason": "too slow", "differs": "without insert-fetch"},
        {"name": "big", "step_s": None, "reason": "no room"},
    ]
    page.evaluate("rows => { facts.rivals = rows; rivals(); }", rows)
    assert page.evaluate("drawn['rivals-chart'].getOption().yAxis[0].data") == ["this plan", "slow <b>"]
    page.click("#rivals-why")
    assert "without insert-fetch" in page.inner_text("#rivals-table")
    assert "no room" in page.inner_text("#rivals-table") and "slow <b>" in page.inner_text("#rivals-table")


def test_a_wheel_buttons_and_keys_zoom(report: Path, opened: Open) -> None:
    page = opened(report)
    page.mouse.move(*place_of(page, longest(page)))
    before = page.evaluate("scrollY")
    page.mouse.wheel(0, 100)
    until(page, f"scrollY > {before}")
    assert show(page) == pytest.approx(100)  # the wheel alone is the page's own
    page.mouse.move(*place_of(page, longest(page)))
    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    until(page, f"{ZOOM}.end - {ZOOM}.start < 99")
    page.click("#whole")
    assert show(page) == pytest.approx(100)
    page.click("#in")
    assert show(page) == pytest.approx(50)
    page.focus("#timeline-chart")
    page.keyboard.press("+")
    assert show(page) == pytest.approx(25)
    before = page.evaluate(f"{ZOOM}.start")
    page.keyboard.press("ArrowRight")
    now = page.evaluate(f"{ZOOM}.start")
    assert now > before
    assert page.evaluate("window.memoryChart.getOption().dataZoom[0].start") == pytest.approx(now)
    page.evaluate("memoryChart.dispatchAction({type: 'dataZoom', start: 10, end: 20})")
    assert show(page) == pytest.approx(10)
    for _ in range(40):
        page.keyboard.press("+")
    assert 0 < show(page) < 0.01
    page.keyboard.press("0")
    assert show(page) == pytest.approx(100)


def test_pointing_at_a_span_tells_of_it_and_lights_its_line(report: Path, opened: Open) -> None:
    page = opened(report)
    index = longest(page)
    page.mouse.move(*place_of(page, index))
    text = page.evaluate("i => lineText[spans[i].line].trim()", index)
    tooltip = page.locator("#timeline-chart code")
    tooltip.wait_for()
    assert tooltip.text_content() == text
    assert page.locator("#code .lit").text_content().strip() == text


def test_a_line_lights_its_span_and_arrows_come_from_what_it_reads(
    report: Path, opened: Open, screenshot: Callable[[Any, str], None]
) -> None:
    page = opened(report)
    line = page.locator("#code .op", has_text="rt.backward").first
    line.hover()
    page.locator("#timeline-chart code").wait_for()
    line.click()
    chosen = page.evaluate("lineText[spans[chosen].line].trim()")
    assert chosen == line.text_content().strip()
    assert chosen in page.text_content("#chosen")
    producers = page.evaluate("producersOf(spans[chosen]).map(span => span.op)")
    assert "fetch" in producers or "forward" in producers
    arrows = "drawn['timeline-chart'].getOption().series[1].data.length"
    assert page.evaluate(arrows) == len(producers) + page.evaluate("consumersOf(spans[chosen]).length") > 0
    page.focus("#timeline-chart")
    page.keyboard.press("+")
    first, last = page.evaluate("view.map(share => share / 100 * wholeEnd)")
    assert first < page.evaluate("spans[chosen].start") < last  # zoomed in to what is chosen
    page.keyboard.press("0")
    page.mouse.move(0, 0)
    page.evaluate("document.activeElement.blur()")
    page.wait_for_timeout(500)  # until what was pointed at is told no more
    screenshot(page.locator("#timeline"), "report-timeline")


def test_keys_walk_through_ops_and_lines(report: Path, opened: Open) -> None:
    page = opened(report)
    page.focus("#timeline-chart")
    page.keyboard.press("n")
    page.keyboard.press("n")
    assert page.evaluate("chosen") == 1
    page.keyboard.press("p")
    assert page.evaluate("chosen") == 0
    page.focus("#code")
    before = page.locator("#code .lit").text_content()
    page.keyboard.press("ArrowDown")
    assert page.locator("#code .lit").text_content() != before
    page.keyboard.press("Escape")
    assert page.evaluate("chosen") == -1 and page.locator("#code .lit").count() == 0


def test_memory_tells_what_lies_in_it(report: Path, opened: Open) -> None:
    page = opened(report)
    page.locator("#memory-chart").scroll_into_view_if_needed()
    box = page.locator("#memory-chart").bounding_box()
    page.mouse.move(box["x"] + 140, box["y"] + box["height"] / 2)
    tooltip = page.locator("#memory-chart > div").last
    until(page, "document.querySelector('#memory-chart > div:last-child').innerText.includes(' at ')")
    assert re.search(r"cpu0.* at .*: .*(B|KiB|MiB)", tooltip.inner_text())
    page.select_option("#which", label="dram0")
    assert page.evaluate("memoryChart.getOption().series[0].data.length") > 1


def test_dark_and_print(report: Path, opened: Open, screenshot: Callable[[Any, str], None]) -> None:
    page = opened(report, color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    screenshot(page, "report-dark")
    page.emulate_media(color_scheme="light")
    until(page, f"{ground} !== '{dark}'")
    page.click("#theme")
    assert page.evaluate(ground) == dark
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(ground) == "rgb(255, 255, 255)"
    assert page.evaluate("Math.max(...Object.values(drawn).map(each => each.getWidth()))") <= 720
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(ground) == dark
    page.emulate_media(media="print")
    assert page.locator("nav").is_hidden() and page.locator("#timeline-chart canvas").is_visible()
    assert len(page.pdf()) > 10_000


def test_every_control_is_reached_by_tab_and_seen(report: Path, opened: Open) -> None:
    page = opened(report)
    seen = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id"))
    assert {"theme", "in", "out", "whole", "device", "timeline-chart", "code", "which"} <= seen


def test_a_job_that_has_made_no_step_says_so(tmp_path: Path, opened: Open) -> None:
    job, _ = job_of()
    page = opened(job.report(tmp_path / "report.html", what_if=False))
    assert "none yet" in page.text_content("#figures")
    assert page.text_content("#memory-note").endswith("Nothing was measured.")
    assert page.evaluate("spans.every(span => !span.measured)")


def test_a_notebook_shows_it_in_a_frame(tmp_path: Path, browser: Any) -> None:
    job, _ = job_of()
    (tmp_path / "notebook.html").write_text(f"<html><body>{job._repr_html_()}</body></html>")
    page = browser.new_page()
    page.goto((tmp_path / "notebook.html").as_uri())
    frame = page.frame_locator("iframe")
    frame.locator("#timeline-chart canvas").wait_for()
    assert "It fits" in frame.locator("#sentence").text_content()
    frame.locator("nav a", has_text="Memory").click()
    assert page.frames[1].evaluate("scrollY") > 0  # the frame has not left for the notebook's own anchor
    page.close()


@pytest.mark.parametrize("width", [390, 420])
def test_a_phone_shows_all_of_it(width: int, report: Path, browser: Any) -> None:
    page = browser.new_page(viewport={"width": width, "height": 844})
    page.goto(report.as_uri())
    page.wait_for_selector("html[data-ready=yes]")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    left = "drawn['whatif-chart'].convertToPixel({xAxisIndex: 0}, 0)"
    assert page.evaluate(left) < 200
    page.close()


@pytest.mark.slow
def test_ten_thousand_instructions(tmp_path: Path, opened: Open) -> None:
    path = tmp_path / "large.html"
    assert many_spans(path) >= MANY
    assert path.stat().st_size < 2_000_000
    page = opened(path)
    assert page.evaluate("spans.length") >= MANY
    page.click("#in")
    assert show(page) == pytest.approx(50)
