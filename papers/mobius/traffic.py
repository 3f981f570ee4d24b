"""The traffic of Mobius: figures 6 and 7."""

from __future__ import annotations

from collections.abc import Sequence

from ..figures import Bars, Curves
from ..lab import SimulatedStep, share_of_bytes
from ..report import Finding
from ..rule import INFINITE
from ..table import ELSEWHERE, FigureTable
from .experiments import FAST, HALF, Mobius, topology


def fig6(paper: Mobius) -> Finding:
    """Figure 6: bytes moved in a step."""
    table, hardware = FigureTable(), topology("2+2")
    bars: dict[str, list[float]] = {"Mobius": [], "ZeRO-3 offload": []}
    claims = dict(zip(bars, (1.8, 7.3)))
    for model in paper.models:
        for name, step in zip(bars, paper.rivals(model, hardware)):
            if step.timeline is None:
                continue
            once = sum(t.moved_bytes for t in step.transfers) / step.model_bytes
            down, up = (moved / step.model_bytes for moved in step.device_bytes)
            for what, value in (("each copy once", once), ("both directions of all links", down + up),
                                ("to the GPUs", down)):  # fmt: skip
                table.add(model, f"{name}, {what} / model", value, "x", claim=claims[name], apart=ELSEWHERE)
            bars[name].append(once)
    for name, values in bars.items():
        if values:
            why = _parts(paper.rivals(model, hardware)[list(bars).index(name)])
            mean = sum(values) / len(values)
            table.add("mean of the models", f"{name}, each copy once / model", mean, "x", claim=claims[name], why=why)
    chart = Bars("fig6", "Bytes a step, each copy once / model size", "model sizes", list(paper.models), bars)
    return Finding(
        "fig6",
        "bytes moved in a step",
        "about 1.8x the model's size against 7.3x (Topo 2+2); by equations 1 and 2 in theory 1.5x and 1.5N = 6x.",
        "as equations 1 and 2 count: each copy of a weight, a gradient or an activation once, wherever it goes, over "
        "the model's size in fp32. Beside it every byte that passes a GPU's own PCIe link, in either direction "
        "(without P2P what goes from GPU to GPU passes two such links), and those towards the GPUs alone.",
        table,
        charts=[chart],
    )


def _parts(step: SimulatedStep) -> str:
    """A text that says what of the model's size each kind of transfer moves."""
    moved: dict[str, float] = {}
    for transfer in step.transfers:
        moved[transfer.op] = moved.get(transfer.op, 0.0) + transfer.moved_bytes / step.model_bytes
    parts = ", ".join(
        f"{op} {share:.2f}x" for op, share in sorted(moved.items(), key=lambda kv: -kv[1]) if share > 0.005
    )
    return f"ours are {parts}; checkpoints, which the paper's equation counts too, stay on the GPUs here"


def fig7(paper: Mobius) -> Finding:
    """Figure 7: the bandwidth of transfers."""
    table = FigureTable()
    curves: dict[str, Sequence[tuple[float, float]]] = {}
    for model in paper.models:
        for name in paper.topologies:
            ours, theirs = paper.rivals(model, topology(name))
            if ours.timeline is None or theirs.timeline is None:
                continue
            where, most = f"{model}, Topo {name}", (50, INFINITE)
            fast, slow = share_of_bytes(ours, FAST), share_of_bytes(theirs, 0, HALF)
            table.add(where, "Mobius, bytes at more than 12 GB/s", 100 * fast, "%", 0, most, _by_kind(ours))
            table.add(where, "ZeRO-3, bytes at up to 6.6 GB/s", 100 * slow, "%", 0, most, _by_kind(theirs))
            if model == paper.scaled:
                curves[f"Mobius, Topo {name}"] = _cdf(ours)
                curves[f"ZeRO-3, Topo {name}"] = _cdf(theirs)
    chart = Curves(
        "fig7", f"Bandwidth of transfers, {paper.scaled}", "GB/s", "share of bytes at up to this", curves, steps=True
    )
    return Finding(
        "fig7",
        "bandwidth at which bytes move",
        "more than half of Mobius's bytes move at over 12 GB/s of 13.1; most of DeepSpeed's at less than 6.",
        "bytes of every fetch, offload, message and collective, by its bytes over the seconds it was under way; of "
        "a collective what a GPU sends to its neighbour. What waits for transfers with priority is under way all the "
        "while. 'Less than 6' is taken as half of 13.1 GB/s.",
        table,
        "a transfer that waits for one with priority counts as slow here, and on Topo 4 and Topo 1+3 three or four "
        "GPUs ask one root complex at the same time whatever the mapping.",
        [chart],
    )


def _by_kind(step: SimulatedStep) -> str:
    """A text that says how fast each kind of transfer was, on average."""
    kinds: dict[str, tuple[float, float]] = {}
    for transfer in step.transfers:
        moved, lasted_s = kinds.get(transfer.op, (0.0, 0.0))
        kinds[transfer.op] = moved + transfer.moved_bytes, lasted_s + transfer.end_s - transfer.start_s
    told = (f"{op} at {moved / lasted_s / 1e9:.1f} GB/s" for op, (moved, lasted_s) in kinds.items() if lasted_s)
    return f"on average, waiting included: {', '.join(told)}"


def _cdf(trial: SimulatedStep) -> list[tuple[float, float]]:
    """(GB/s, share of bytes at up to this rate), thinned to at most 200 points."""
    ranked = sorted(trial.transfers, key=lambda t: t.rate)
    total, seen, points = sum(t.moved_bytes for t in ranked), 0, []
    for transfer in ranked:
        seen += transfer.moved_bytes
        points.append((min(transfer.rate / 1e9, 14.0), seen / total))
    step = max(1, len(points) // 200)
    return [(0.0, 0.0), *points[::step], points[-1]]
