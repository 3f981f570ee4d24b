"""Mobius's partition and mapping: figures 9, 10 and 12."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ...ir.machine.hardware import Hardware
from ..figures import Bars
from ..lab import SimulatedStep, profile_s, share_of_bytes
from ..report import Finding
from ..rule import INFINITE, NEAR
from ..table import ELSEWHERE, SECONDS, FigureTable
from .experiments import FAIR_MIP, FAST, Mobius, bound, topology

CLOSE = "close"
MAXIMUM, MINIMUM = "maximum-stage", "minimum-stage"
BAND = (11.3, 18.1)  # % less time by cross mapping


def filled(paper: Mobius, hardware: Hardware) -> Hardware:
    """The machine with GPUs that one block of the largest model nearly fills at the largest micro-batch, as section 4
    says of its GPUs of 24 GiB, of which by our count of bytes several would fit one."""
    model, micro_batch = paper.partitioned[-1], max(paper.micro_batches)
    blocks = paper.blocks(paper.work(model, hardware, micro_batch), hardware)
    largest = max(blocks, key=lambda b: b.param_bytes)
    cost = largest.cost
    need = 2 * largest.param_bytes + cost.kept_bytes + max(cost.backward_peak_bytes, cost.forward_peak_bytes)
    for share in (1.1, 1.3, 1.6, 2.0, 2.5):  # inputs and embeddings need more than the block
        small = hardware.with_(memory=int(share * need / hardware.devices[0].usable_fraction))
        if paper.mobius(model, small, micro_batch, partition="partition-min-stage").timeline:
            return small
    return hardware


def fig9(paper: Mobius) -> Finding:
    """Figure 9: the MIP partition against maximum-stage and minimum-stage."""
    table, hardware = FigureTable(), topology("2+2")
    bars: dict[str, list[float | None]] = {MAXIMUM: [], MINIMUM: []}
    groups = [f"{model}\nx{micro_batch}" for model in paper.partitioned for micro_batch in paper.micro_batches]
    pairs = _partition_pairs(paper, hardware)
    for where, name, other, mip in pairs:
        said = f"{SECONDS}; {len(other.stages)} / {len(mip.stages)} stages"
        why = f"MIP {bound(mip)}; {name} {bound(other)}" if mip.timeline and other.timeline else ""
        what, never = f"{name} / MIP", (0.995, INFINITE)
        bars[name].append(table.ratio(where, what, other.computed_s, mip.computed_s, never, said, why=why))
    most, at = _largest_saving(pairs)
    why = f"it is largest for {at}, where the largest stages leave GPUs without work; the paper does not say for which"
    checks = {FILLED: lambda: _largest_saving(_partition_pairs(paper, filled(paper, hardware)))[0]}
    table.add("all", "largest reduction of the step", most, "%", 0, 51, why, checks=checks)
    chart = Bars("fig9", "Step time by partition / MIP partition, Topo 2+2", "times the MIP's", groups, bars)
    return Finding(
        "fig9",
        "MIP partition against maximum-stage and minimum-stage",
        "the MIP partition takes up to 51% less time; minimum-stage equals it where one block fills a GPU; "
        "maximum-stage is worst in most cases.",
        "simulated steps by eq. 3 with cross mapping, on the paper's GPUs of 24 GiB. A block of 9216 is the largest "
        "that these train in the paper, while by our count of bytes several fit. 'Never slower' is read as at least "
        "0.995.",
        table,
        charts=[chart],
    )


FILLED = "GPUs that a block of 9216 fills, as the paper says of its own"


def _partition_pairs(paper: Mobius, hardware: Hardware) -> list[tuple[str, str, SimulatedStep, SimulatedStep]]:
    """The setting, a partition's name, its step, and that of the MIP, for both partitions and all micro-batches."""
    return [
        (
            f"{model}, micro-batch {rows}", name,
            paper.mobius(model, hardware, rows, partition=f"partition-{name.replace('imum', '')}"),
            paper.mobius(model, hardware, rows),
        )
        for model in paper.partitioned for rows in paper.micro_batches for name in (MAXIMUM, MINIMUM)
    ]  # fmt: skip


def _largest_saving(pairs: Sequence[tuple[str, str, SimulatedStep, SimulatedStep]]) -> tuple[float, str]:
    """The most percent that the MIP saves of a step, and where."""
    return max(
        (100 * (1 - mip.computed_s / other.computed_s), where)
        for where, _, other, mip in pairs if mip.computed_s and other.computed_s
    )  # fmt: skip


def fig10(paper: Mobius) -> Finding:
    """Figures 10 and 11: cross mapping against sequential mapping."""
    table, groups = FigureTable(), []
    hardware = topology("4+4")
    fair = {**SEQUENTIAL, "partition": FAIR_MIP, "turns": ""}
    bars: dict[str, list[float | None]] = {"same priorities": [], "sequential in fair shares": []}
    for model in paper.mapped:
        for micro_batch in paper.micro_batches:
            groups.append(f"{model}\nx{micro_batch}")
            cross, plain, shared = (
                paper.mobius(model, hardware, micro_batch, **line) for line in ({}, SEQUENTIAL, fair)
            )
            where = f"{model}, micro-batch {micro_batch}"
            for (name, values), other in zip(bars.items(), (plain, shared)):
                if cross.computed_s is None or other.computed_s is None:
                    values.append(None)
                    continue
                values.append(100 * (1 - cross.computed_s / other.computed_s))
                what = f"less time than sequential mapping, {name} ({len(cross.stages)} stages)"
                table.add(where, what, values[-1], "%", 1, BAND, apart=ELSEWHERE)
            if cross.timeline and plain.timeline:
                fast = [100 * share_of_bytes(step, FAST) for step in (cross, plain)]
                why = f"{fast[0]:.0f}% of the bytes move that fast under cross mapping, {fast[1]:.0f}% under sequential"
                table.add(where, "points more bytes above 12 GB/s", fast[0] - fast[1], "", 0, (0, INFINITE), why)
    same = [value for value in bars["same priorities"] if value is not None]
    why = "the busiest GPU computes nearly all of the step, so that links which wait for each other cost little"
    quick = topology("4+4", share=1.0)
    checks = {
        "GPUs that compute as fast as was measured": partial(_saved_by_mapping, paper, quick),
        "that, and stages of one block that are fetched when they are due": partial(
            _saved_by_mapping, paper, quick, partition="partition-min-stage", fetch="swap=true, prefetch=false"
        ),
    }
    what = "less time than sequential mapping, same priorities"
    table.ends("all models and micro-batches", what, same, BAND, "%", 1, why, checks)
    chart = Bars("fig10", "Cross mapping against sequential, 8 GPUs (4+4)", "% less time", groups, bars, BAND)
    return Finding(
        "fig10",
        "cross mapping against sequential mapping (figures 10 and 11)",
        "11.3% to 18.1% less time a step on 8 GPUs, less so for large micro-batches and blocks; more bytes move fast.",
        "simulated steps by eq. 3 of equal partitions by the MIP, fetches of earlier stages "
        "before those of later ones on both sides. Beside it sequential mapping in fair shares, without these "
        "priorities, which section 3.3 introduces with the mapping. More bytes above 12 GB/s: figure 11.",
        table,
        "cross mapping helps where neighbouring stages upload at the same time. A partition into many small stages, "
        "which the MIP prefers here, spreads its uploads and leaves little to gain. Priority by stage order takes a "
        "part of the gain by itself.",
        [chart],
    )


SEQUENTIAL = {"mapping": "map-sequential"}


def _saved_by_mapping(paper: Mobius, hardware: Hardware, **line: str) -> list[float]:
    """The percent of a step that cross mapping saves, for all models and micro-batches."""
    found = []
    for model in paper.mapped:
        for micro_batch in paper.micro_batches:
            cross, plain = (paper.mobius(model, hardware, micro_batch, **line, **how) for how in ({}, SEQUENTIAL))
            if cross.computed_s and plain.computed_s:
                found.append(100 * (1 - cross.computed_s / plain.computed_s))
    return found


def fig12(paper: Mobius) -> Finding:
    """Figure 12: the cost of planning."""
    table, hardware, profiles = FigureTable(), topology("1+3"), {}
    for model in paper.models:
        step = paper.mobius(model, hardware)
        blocks = paper.blocks(paper.work(model, hardware), hardware)
        solve_s, map_s = (step.planning_cpu_s[name] for name in ("partition-mip", "map-cross"))
        why = "its deadline is in seconds of the clock"
        table.add(model, "MIP partition, processor time", solve_s, " s", 1, (0, 12), why)
        table.add(model, "cross mapping, processor time", map_s, " s", 3, (0, 1), why)
        profiles[model], all_s = profile_s(blocks, hardware, "fp16", repeats=10)
        count = len({b.hash for b in blocks})
        table.add(model, f"profile, {count} distinct blocks of {len(blocks)}, simulated", profiles[model], " s")
        table.add(model, "profile, every block, simulated", all_s, " s")
    if {"8B", "15B"} <= profiles.keys():
        why = (
            "the blocks differ in size (4096 and 5120) and micro-batch (2 and 1); the paper compares seconds that hold "
            "start-up costs, too"
        )
        over = profiles["15B"] / profiles["8B"]
        said = CLOSE if abs(over - 1) <= NEAR else f"{over:.2f}x"
        table.words("15B / 8B", "profile, distinct blocks", CLOSE, said, why)
    return Finding(
        "fig12",
        "what planning costs, Topo 1+3",
        "the MIP is solved in up to several seconds, more for small blocks and many layers; profiling depends on the "
        "distinct layers alone, so that 8B and 15B take about as long.",
        "processor seconds of the two passes on the machine that made this page (a deadline of 12 s is what 'several "
        "seconds' is taken to mean); profiling as simulated GPU seconds of 10 repetitions, weights uploaded first.",
        table,
    )
