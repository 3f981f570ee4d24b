"""The report of a step of 10,000 instructions in a headless Chromium: bytes of the file, time to its first paint, until
all of it is drawn, and to zoom in by half, each the median of several openings.

Needs Chromium. Run: python bench/report_page.py [--times N]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from penstock.bench.peers import rows
from penstock.tests.browser.report_pages import many_spans

PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime / 1e3"
# Two frames after the key: the first one draws, the second one comes when that is done.
ZOOM = """() => new Promise(done => {
  const began = performance.now();
  document.getElementById('in').click();
  requestAnimationFrame(() => requestAnimationFrame(() => done((performance.now() - began) / 1e3)));
})"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=7)
    args = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("no chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder, "report.html")
        spans = many_spans(path)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        found = [
            measured_blocks(browser.new_page(viewport={"width": 1400, "height": 1000}), path) for _ in range(args.times)
        ]
        paint, drawn, zoom = (statistics.median(each) for each in zip(*found))
        browser.close()
        figures = {"first_paint_s": paint, "all_drawn_s": drawn, "zoom_s": zoom}
        rows.save("report_page", {"spans": spans, "file_bytes": path.stat().st_size, **figures, "openings": args.times})


def measured_blocks(page: Page, path: Path) -> tuple[float, float, float]:
    began_s = time.perf_counter()
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready=yes]", timeout=60_000)
    drawn_s = time.perf_counter() - began_s
    found = page.evaluate(PAINT), drawn_s, page.evaluate(ZOOM)
    page.close()
    return found


if __name__ == "__main__":
    main()
