"""Draw timelines that `Timeline.to_chrome_trace` wrote, one below the other, as one SVG.

    python docs/draw_timeline.py OUT.svg "first caption=first.json" ["second caption=second.json" ...]

Every stream that was used is a lane; all panels share one scale of time. Boxes carry the number of their stage.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

WIDTH, LEFT, RIGHT, LANE, GAP = 1000, 92, 12, 18, 4
LANES = ("h2d", "compute", "d2h", "cpu", "comm", "send")  # receiving mirrors the other device's sending
LANE_NAMES = {"h2d": "fetch", "d2h": "offload", "cpu": "optimizer"}
COLOURS = {
    "forward": "#4c8bd6", "backward": "#e0863a", "fetch": "#3f9d64", "offload": "#8d68c9", "step": "#cf4a5c",
    "backward_input": "#e0863a", "backward_weight": "#b8621b",
    "send": "#8b96a3", "evaluate": "#4c8bd6",
}  # fmt: skip
OTHER_COLOUR = "#b9a15a"
LABEL_MIN_PX = 11


@dataclass(frozen=True)
class Box:
    """One op of a trace; milliseconds."""

    device: str
    lane: str
    op: str
    text: str
    start_ms: float
    length_ms: float


def read_trace(path: Path) -> list[Box]:
    """The ops of a trace, in the order of devices and time; those that take no time are left out."""
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    boxes = [
        Box(names[e["pid"]], e["cat"], e["name"], e["args"]["text"], e["ts"] / 1e3, e["dur"] / 1e3)
        for e in events
        if e["ph"] == "X" and e["cat"] in LANES
    ]
    return sorted(boxes, key=lambda box: (box.device, LANES.index(box.lane), box.start_ms))


def draw(panels: list[tuple[str, list[Box]]]) -> str:
    """SVG of captions with their boxes."""
    end_ms = max(box.start_ms + box.length_ms for _, boxes in panels for box in boxes)
    px_per_ms = (WIDTH - LEFT - RIGHT) / end_ms
    parts: list[str] = []
    y = 8
    for caption, boxes in panels:
        parts.append(f'<text x="8" y="{y + 14}" class="caption">{escape(caption)}</text>')
        y += 24
        for device in sorted({box.device for box in boxes}):
            rows = [box for box in boxes if box.device == device]
            y = _draw_device(parts, device, rows, y, px_per_ms)
        y += 10
    y = _draw_scale(parts, end_ms, px_per_ms, y)
    y = _draw_legend(parts, sorted({box.op for _, boxes in panels for box in boxes}, key=_op_order), y)
    style = (
        "text{font:11px ui-sans-serif,system-ui,sans-serif;fill:#333}.caption{font-size:13px;font-weight:600}"
        ".in{fill:#fff;font-size:10px;text-anchor:middle}.lane{text-anchor:end}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img">\n<style>{style}</style>\n'
        f'<rect width="{WIDTH}" height="{y}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _draw_device(parts: list[str], device: str, boxes: list[Box], y: int, px_per_ms: float) -> int:
    for lane in [lane for lane in LANES if any(box.lane == lane for box in boxes)]:
        parts.append(f'<text x="{LEFT - 6}" y="{y + 13}" class="lane">{device} {LANE_NAMES.get(lane, lane)}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{LANE}" fill="#f1f3f5"/>')
        for box in boxes:
            if box.lane == lane:
                parts.append(_draw_box(box, y, px_per_ms))
        y += LANE + 1
    return y + GAP


def _draw_box(box: Box, y: int, px_per_ms: float) -> str:
    x, width = LEFT + box.start_ms * px_per_ms, max(box.length_ms * px_per_ms, 0.4)
    colour = COLOURS.get(box.op, OTHER_COLOUR)
    edge = ' stroke="#fff" stroke-width=".6"' if width > 2 else ""
    title = f"<title>{escape(box.text)} ({box.length_ms:.1f} ms)</title>"
    shape = f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE}" fill="{colour}"{edge}>{title}</rect>'
    stage = re.search(r'rt\.\w+\("stage(\d+)', box.text)
    if stage is None or width < LABEL_MIN_PX:
        return shape
    return f'{shape}<text x="{x + width / 2:.1f}" y="{y + 13}" class="in">{stage[1]}</text>'


def _draw_scale(parts: list[str], end_ms: float, px_per_ms: float, y: int) -> int:
    step_ms = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10**9) if end_ms / s <= 10)
    for at_ms in range(0, int(end_ms) + 1, step_ms):
        x = LEFT + at_ms * px_per_ms
        anchor = "middle" if x < WIDTH - 30 else "end"
        parts.append(f'<text x="{x:.1f}" y="{y + 10}" text-anchor="{anchor}">{at_ms} ms</text>')
    return y + 24


def _draw_legend(parts: list[str], found: list[str], y: int) -> int:
    x = LEFT
    for op in found:
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS.get(op, OTHER_COLOUR)}"/>')
        parts.append(f'<text x="{x + 17}" y="{y + 10}">{op}</text>')
        x += 34 + 7 * len(op)
    return y + 22


def _op_order(op: str) -> int:
    return list(COLOURS).index(op) if op in COLOURS else len(COLOURS)


def main(arguments: list[str]) -> None:
    if len(arguments) < 2 or any("=" not in argument for argument in arguments[1:]):
        sys.exit(__doc__)
    out, *panels = arguments
    read = [(caption, read_trace(Path(path))) for caption, _, path in (panel.rpartition("=") for panel in panels)]
    Path(out).write_text(draw(read))


if __name__ == "__main__":
    main(sys.argv[1:])
