"""Charts as PNG and SVG: grouped bars with a paper's range, and curves. Needs matplotlib, the extra `figures`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..ir.errors import PlanError

FAMILIES = {  # shades of one colour for series whose names begin with the same word
    "Mobius": ("#174a84", "#2f6db3", "#7aa9dc"),
    "ZeRO-3": ("#a35a10", "#d9822b", "#f0b983"),
    "paper": ("#c9ced6", "#a7aeb9", "#8a919c"),
}
PALETTE = ("#2f6db3", "#d9822b", "#3f9d64", "#8d68c9", "#cf4a5c", "#6b7683", "#b9a15a", "#4bb3c3")
SETTINGS: dict[Any, Any] = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e6e8ec",
    "axes.axisbelow": True, "legend.frameon": False, "figure.constrained_layout.use": True, "svg.fonttype": "none",
    "svg.hashsalt": "penstock",
}  # fmt: skip


@dataclass(frozen=True)
class Bars:
    """A bar per series in each group; None leaves a bar out. `band` is the paper's range, drawn below the bars."""

    name: str  # of the files, without suffix
    title: str
    ylabel: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    band: tuple[float, float] | None = None
    xlabel: str = ""


@dataclass(frozen=True)
class Curves:
    """Lines through points (x, y)."""

    name: str
    title: str
    xlabel: str
    ylabel: str
    curves: Mapping[str, Sequence[tuple[float, float]]]
    points: bool = False  # mark the points
    steps: bool = False  # a staircase instead of straight lines


Chart = Bars | Curves


def check_drawable() -> None:
    """Raise `PlanError` if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlanError("figures need matplotlib: pip install 'penstock[figures]'")


def draw(chart: Chart, folder: Path) -> list[Path]:
    """Write `<name>.png` and `<name>.svg`. Raises `PlanError` if matplotlib is not installed."""
    check_drawable()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(SETTINGS):
        wide = len(chart.groups) * len(chart.series) > 14 if isinstance(chart, Bars) else False
        figure, axes = pyplot.subplots(figsize=(8.0 if wide else 5.6, 3.2))
        if isinstance(chart, Bars):
            _bars(chart, axes)
        else:
            _curves(chart, axes)
        axes.set_title(chart.title, loc="left", fontsize=10)
        paths = [folder / f"{chart.name}.png", folder / f"{chart.name}.svg"]
        figure.savefig(paths[0], dpi=110, metadata={"Software": None})
        figure.savefig(paths[1], metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
    return paths


def _colours(names: Sequence[str]) -> list[str]:
    """The colours of series, in order: the shades of a series' family in turn, else those of the palette."""
    used: dict[str, int] = {}
    found = []
    for name in names:
        family = next((word for word in FAMILIES if name.startswith(word)), "")
        shades = FAMILIES.get(family, PALETTE)
        found.append(shades[used.get(family, 0) % len(shades)])
        used[family] = used.get(family, 0) + 1
    return found


def _bars(chart: Bars, axes: Any) -> None:
    width = 0.8 / len(chart.series)
    if chart.band is not None:
        axes.axhspan(*chart.band, color=FAMILIES["paper"][0], alpha=0.6, zorder=0, label="paper, range")
    colours = _colours(list(chart.series))
    for number, (name, values) in enumerate(chart.series.items()):
        places = [i + (number - (len(chart.series) - 1) / 2) * width for i in range(len(values))]
        drawn = [(x, y) for x, y in zip(places, values) if y is not None]
        axes.bar([x for x, _ in drawn], [y for _, y in drawn], 0.92 * width, color=colours[number], label=name)
    axes.set_xticks(range(len(chart.groups)), chart.groups)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel(chart.ylabel)
    axes.set_xlabel(chart.xlabel)
    if len(chart.series) > 1 or chart.band is not None:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _curves(chart: Curves, axes: Any) -> None:
    for (name, points), colour in zip(chart.curves.items(), _colours(list(chart.curves))):
        style: dict[str, Any] = {"color": colour, "linestyle": "--" if name.startswith("paper") else "-"}
        style |= {"marker": "o" if chart.points else None, "drawstyle": "steps-post" if chart.steps else "default"}
        axes.plot([x for x, _ in points], [y for _, y in points], label=name, markersize=3.5, **style)
    axes.set_xlabel(chart.xlabel)
    axes.set_ylabel(chart.ylabel)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
