"""Mobius's speed: figures 5, 8, 14 and 15, and what figure 5 hangs on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ...ir.machine.hardware import Hardware
from ..figures import Bars, Curves
from ..lab import SimulatedStep, exposed_share
from ..report import Finding
from ..rule import NEAR
from ..table import AT_LEAST_ONE, ELSEWHERE, FigureTable
from .experiments import GPIPE, Mobius, bound, narrow, rented, topology

FASTER = (3.8, 5.1)  # times as fast as ZeRO-3
STABLE = "almost the same"
ACROSS = "Mobius 3090 Ti / ZeRO-3 V100, time"
BY_EQ_3, WHOLE = "by eq. 3", "whole step, with Adam on the CPU"


def fig5(paper: Mobius) -> Finding:
    """Figure 5: step time against ZeRO-3 with CPU offload."""
    table = FigureTable()
    ratios: dict[str, list[float | None]] = {name: [] for name in paper.topologies}
    for model in paper.models:
        steps: dict[str, SimulatedStep] = {}
        for name in paper.topologies:
            ours, theirs = paper.rivals(model, topology(name))
            ratios[name].append(_against_zero3(table, f"{model}, Topo {name}", ours, theirs))
            steps |= {name: ours} if ours.timeline else {}
        if not steps:
            continue
        _over_topologies(table, model, steps)
        if {"4", "2+2"} <= ratios.keys():
            more, less = ratios["4"][-1], ratios["2+2"][-1]
            table.ratio(model, "gain on Topo 4 / gain on Topo 2+2", more, less, AT_LEAST_ONE, said="")
        _gpipe(table, paper, model)
    found = [ratio for values in ratios.values() for ratio in values if ratio]
    why = "ZeRO-3's time is that of its links, in which the models differ more than in Mobius's"
    table.ends("all models and topologies", f"ZeRO-3 / Mobius, {BY_EQ_3}", found, FASTER, "x", why=why)
    chart = Bars(
        "fig5", "Step time by eq. 3, ZeRO-3 offload / Mobius", "times as fast", list(paper.models),
        {f"Topo {name}": values for name, values in ratios.items()}, band=FASTER,
    )  # fmt: skip
    return Finding(
        "fig5",
        "time of a step",
        "3.8x to 5.1x less than DeepSpeed ZeRO-3 with CPU offload, nearly the same on all topologies, with a larger "
        "gain the more contention there is; GPipe fits the 3B model alone.",
        "simulated seconds as eq. 3 defines a step, until the last backward has ended, as many micro-batches as GPUs "
        "on both sides. Below it the whole step, in which both sides wait for Adam on the CPU, of which the paper says "
        "nothing.",
        table,
        "ZeRO-3's time is that of its links, which on Topo 4 have twice the load of Topo 2+2; the paper's range with "
        "nearly the same time of Mobius leaves it at most 1.34 times as long there.",
        [chart],
    )


def _against_zero3(table: FigureTable, where: str, ours: SimulatedStep, theirs: SimulatedStep) -> float | None:
    """Add and return the ratio by eq. 3; add that of whole steps beside it."""
    what = f"ZeRO-3 / Mobius, {BY_EQ_3}"
    found = table.ratio(where, what, theirs.computed_s, ours.computed_s, FASTER, apart=ELSEWHERE)
    table.ratio(where, f"the same, {WHOLE}", theirs.step_s, ours.step_s, FASTER, apart=ELSEWHERE)
    return found


def _over_topologies(table: FigureTable, model: str, steps: dict[str, SimulatedStep]) -> None:
    ranked = sorted(steps, key=lambda name: steps[name].computed_s or 0.0)
    fast, slow = steps[ranked[0]], steps[ranked[-1]]
    why = f"on Topo {ranked[0]} {bound(fast)}; on Topo {ranked[-1]} {bound(slow)}: more GPUs share that root complex"
    over = (slow.computed_s or 0.0) / (fast.computed_s or 1.0)
    said = STABLE if over <= 1 + NEAR else f"{over:.2f}x"
    table.words(model, f"Mobius over topologies, {BY_EQ_3}", STABLE, said, why)
    whole = [step.step_s or 0.0 for step in steps.values()]
    table.ratio(model, f"slowest / fastest topology, {WHOLE}", max(whole), min(whole))


def _gpipe(table: FigureTable, paper: Mobius, model: str) -> None:
    hardware = topology("2+2")
    step = paper.lab.trial(paper.work(model, hardware), hardware, GPIPE)
    swaps = any(t.op == "fetch" for t in step.transfers)
    fits = "fits" if step.timeline and not swaps else "out of memory"
    why = step.misses or f"{step.params / 1e9:.1f} B parameters of 4 bytes lie on {hardware.num_devices} GPUs"
    table.words(model, "GPipe, all on the GPUs", "fits" if model == "3B" else "out of memory", fits, why)


def fig8(paper: Mobius) -> Finding:
    """Figure 8: communication that computation does not hide."""
    table, most, where = FigureTable(), 0.0, ""
    bars: dict[str, list[float | None]] = {}
    for name in paper.topologies:
        for model in paper.models:
            own, other = (exposed_share(s) if s.timeline else None for s in paper.rivals(model, topology(name)))
            bars.setdefault(f"Mobius, {name}", []).append(own)
            bars.setdefault(f"ZeRO-3, {name}", []).append(other)
            if own is not None and other is not None:
                shares = f"points less (ZeRO-3 {other:.0%}, Mobius {own:.0%})"
                table.add(f"{model}, Topo {name}", shares, 100 * (other - own), "", 0)
                if (model, name) == (paper.scaled, "2+2"):
                    what, why = "ZeRO-3, share of its step (section 2.3)", "the rates fitted to figure 5 decide it"
                    table.add(f"{model}, Topo {name}", what, 100 * other, "%", 0, 70, why)
                if other - own > most:
                    most, where = other - own, f"{model}, Topo {name}: ZeRO-3 {other:.0%}, Mobius {own:.0%}"
    why = f"it is largest for {where}: Mobius hides nearly all where its links keep up"
    checks = {
        "slots of x8": lambda: _largest_reduction(paper, narrow),
        "slots of x8 and messages at the links' rate": lambda: _largest_reduction(paper, partial(narrow, staged=None)),
    }
    table.add("all", "largest reduction, points", 100 * most, "", 0, 46, why, checks=checks)
    chart = Bars("fig8", "Communication not hidden by computation", "share of the step", list(paper.models), bars)
    return Finding(
        "fig8",
        "communication that is not overlapped",
        "its share of the step falls by up to 46%; under ZeRO-3 it is about 70% (section 1).",
        "share of the step by eq. 3 in which a GPU moves something and computes nothing, the mean over GPUs; reduction "
        "in points of percent.",
        table,
        charts=[chart],
    )


def _largest_reduction(paper: Mobius, machine: Callable[[str], Hardware]) -> float:
    """Figure 8's largest reduction in points, on other machines."""
    pairs = (paper.rivals(model, machine(name)) for model in paper.models for name in paper.topologies)
    return max(100 * (exposed_share(theirs) - exposed_share(ours)) for ours, theirs in pairs
               if ours.timeline and theirs.timeline)  # fmt: skip


def fig14(paper: Mobius) -> Finding:
    """Figure 14: scaling from 2 to 8 GPUs."""
    table = FigureTable()
    curves: dict[str, list[tuple[float, float]]] = {"paper: more than linear": []}
    wide, thin = (_ratios_to_first(paper, machine) for machine in (topology, narrow))
    for label, found in (("slots of x16", wide), ("slots of x8", thin)):
        curves[label] = [(step.hardware.num_devices, over * step.hardware.num_devices) for step, over in found.values()]
    for name, (step, over) in list(wide.items())[1:]:
        why = f"2 GPUs take {bound(next(iter(wide.values()))[0])}; these {bound(step)}"
        checks = {"slots of x8": lambda name=name: thin[name][1] if name in thin else None}
        where = f"{step.hardware.num_devices} GPUs ({name})"
        table.add(where, "throughput / linear", over, "x", 2, AT_LEAST_ONE, why, checks=checks)
    curves["paper: more than linear"] = [(n, n) for n, _ in curves["slots of x16"]] or [(2, 2), (8, 8)]
    title = f"Throughput of {paper.scaled} over that of 2 GPUs, twofold"
    chart = Curves("fig14", title, "GPUs", "times one of 2 GPUs", curves, True)
    return Finding(
        "fig14",
        f"scaling of {paper.scaled} from 2 to 8 GPUs",
        "above linear; a little less where the GPUs cannot be halved between two root complexes.",
        "rows a second by eq. 3, as many micro-batches of 1 as GPUs, over the rate of 2 GPUs times N/2.",
        table,
        "weights move once a step whatever the batch, so more GPUs, with more micro-batches, spread that cost; but two "
        "root complexes stay two. Above linear takes a GPU that cannot fill its root complex alone: with the x8 slots "
        "that section 4 names.",
        [chart],
    )


def _ratios_to_first(paper: Mobius, machine: Callable[[str], Hardware]) -> dict[str, tuple[SimulatedStep, float]]:
    """By topology a step, and its rows a second and GPU over those of the first; each has a row a GPU."""
    steps = {name: paper.mobius(paper.scaled, machine(name), 1) for name in paper.scaling}
    fitting = {name: step for name, step in steps.items() if step.computed_s}
    first_s = next((step.computed_s for step in fitting.values()), None) or 0.0
    return {name: (step, first_s / (step.computed_s or 1.0)) for name, step in fitting.items()}


def fig15(paper: Mobius) -> Finding:
    """Figure 15: a rented server with NVLink."""
    table = FigureTable()
    there, own = rented(), topology("2+2")
    bars: dict[str, list[float | None]] = {"ZeRO-3, V100": [], "Mobius, V100": [], "Mobius, 3090 Ti": []}
    price = 0.57 / 1.42  # of an hour, from two numbers of the paper, which does not give the rent
    longer: list[float] = []
    for model in paper.rented:
        steps = paper.zero3(model, there, 2), paper.mobius(model, there, 2), paper.mobius(model, own, 2)
        for (name, values), step in zip(bars.items(), steps):
            values.append(step.computed_s)
            table.add(model, f"step {BY_EQ_3}, {name}", step.computed_s, " s")
            table.add(model, f"{WHOLE}, {name}", step.step_s, " s")
        theirs, moved, here = (step.computed_s for step in steps)
        whys = [bound(step) if step.timeline else "does not fit" for step in steps]
        between = f"ZeRO-3 on V100 takes {whys[0]}; Mobius there {whys[1]}"
        table.ratio(model, "Mobius / ZeRO-3, both V100", moved, theirs, AT_LEAST_ONE, "", why=between)
        found = table.ratio(model, ACROSS, here, theirs, 1.42, "", apart=ELSEWHERE)
        longer += [found] if found else []
    mean = sum(longer) / len(longer) if longer else None
    table.add("mean of the models", ACROSS, mean, "x", claim=1.42, why="see the models' rows")
    cost = price * mean if mean else None
    table.add("mean of the models", "the same, price of a step", cost, "x", claim=0.57, apart="the row above")
    chart = Bars("fig15", "Step time, rented V100 server against 3090 Ti", "seconds", list(paper.rented), bars)
    return Finding(
        "fig15",
        "a rented server with NVLink",
        "on 4 x V100 with NVLink Mobius is slower than DeepSpeed; Mobius on 3090 Ti takes 42% more time and 43% less "
        "money than DeepSpeed on V100.",
        "simulated steps by eq. 3, micro-batch 2. Price: the paper's two numbers imply that an hour of the 3090 Ti "
        f"server costs {price:.2f} of an hour of the V100 server; that ratio is taken as given.",
        table,
        "NVLink carries only what goes from GPU to GPU: every weight still comes over PCIe from DRAM and every "
        "gradient goes back. V100s of 16 GB also hold smaller stages.",
        [chart],
    )


def sensitivity(paper: Mobius) -> Finding:
    """The ratio of figure 5 with one assumption changed at a time."""
    table, base = FigureTable(), topology("2+2")
    host = base.hosts[0]
    variants: Sequence[tuple[str, Hardware]] = [
        ("as assumed", base),
        ("all calls as fast as they were measured", topology("2+2", share=1.0)),
        ("messages between GPUs at the links' rate", topology("2+2", staged=None)),
        ("Adam on the CPU 3 times as fast", base.with_(optimizer_params_per_s=3 * host.optimizer_params_per_s)),
        ("slots of x8", narrow("2+2")),
        ("1 ms to begin a transfer", base.with_(link_latency_s=1e-3)),
    ]
    for name, hardware in variants:
        ours, theirs = paper.rivals(paper.scaled, hardware)
        where = f"{paper.scaled}, {name}"
        table.ratio(where, f"ZeRO-3 / Mobius, {BY_EQ_3}", theirs.computed_s, ours.computed_s, FASTER, apart=ELSEWHERE)
        table.ratio(where, f"the same, {WHOLE}", theirs.step_s, ours.step_s, FASTER, apart=ELSEWHERE)
    return Finding(
        "sensitivity",
        "the ratio of figure 5 under other assumptions, Topo 2+2",
        "3.8x to 5.1x, judged in figure 5.",
        "as figure 5, one assumption changed at a time.",
        table,
    )
