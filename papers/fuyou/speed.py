"""The speed of Fuyou's programs: figures 1 and 5 to 8."""

from __future__ import annotations

from ..figures import Bars
from ..report import Finding
from ..table import AT_LEAST_ONE, TENTHS, FigureTable
from .equations import apart_s, best, serial_s, step
from .experiments import Fuyou
from .programs import (
    APART,
    COLOSSAL,
    FUYOU,
    ZERO_INFINITY,
    ZERO_OFFLOAD,
    busy_share,
    machine,
    optimizer_share,
    rates,
)  # fmt: skip

FASTEST = {("13B", "A100"): 202.0, ("13B", "4090"): 156.0, ("175B", "A100"): 173.0, ("175B", "4090"): 86.0}
SYSTEMS = {"Fuyou": FUYOU, "ZeRO-Offload": ZERO_OFFLOAD, "ZeRO-Infinity": ZERO_INFINITY, "Colossal-AI": COLOSSAL}
GAINS = {  # Fuyou's highest throughput over that of each rival, 13B
    ("ZeRO-Offload", "A100"): 2.46, ("ZeRO-Infinity", "A100"): 3.42, ("Colossal-AI", "A100"): 6.73,
    ("ZeRO-Offload", "4090"): 2.36, ("ZeRO-Infinity", "4090"): 3.47,
}  # fmt: skip
EXTREME = {"276B": 168.0, "412B": 163.0}
WHY_FIG5 = (
    "the count includes the recomputation of every block, which our plans mostly avoid: the link hides nearly all "
    "outputs of matrix products on their way to DRAM. A step that computes everything again reaches at most a block's "
    "own rate, 200 and 164 TFLOPS, of which the paper's highest numbers are 101%, 95%, 86% and 53%; ours is 196 for "
    "13B at batch 80 on A100 where nothing is kept (figure 9, left end). Our steps lie within 4% of the paper's "
    "equations but for 175B on the A100 at batch 32 and 64, where the plan keeps less than the equations do, which "
    "know no GPU memory. For 175B on the 4090 the equations give twice the paper's throughput; it names GPU memory, "
    "which leaves little to prefetch into, and ours cuts the batch inside a stage instead. The rivals are our "
    "programs under their rules and do as well as those allow: full link rates, pinned memory, no time between calls, "
    "no DRAM but what they use; Colossal-AI's checkpoints fit the 4090 at small batches."
)
WHY_FIG6 = (
    "as in figure 5, the count includes recomputation that the plan avoids. Computing everything again at a block's "
    "200 TFLOPS, without waiting for anything, would count as 200; the paper's 168 and 163 are 84% and 82% of that. "
    "At batch 64 computation takes several times as long as any transfer, in our programs and in the paper's "
    "equations, so that nearly everything that a forward computes can be kept in DRAM or on SSD."
)


def fig1(paper: Fuyou) -> Finding:
    """Figure 1: what ZeRO-Infinity leaves idle."""
    table = FigureTable()
    for batch in paper.batches[paper.usual, "A100"]:
        trial = paper.trial(paper.usual, batch, machine("A100"), ZERO_INFINITY)
        where = f"{paper.usual}, A100, batch {batch}"
        if trial.timeline is None:
            table.add(where, "step", None)
            continue
        share, busy = 100 * optimizer_share(trial), 100 * busy_share(trial)
        claim = (40, 70) if batch <= 32 else None  # figure 1 shows no larger batches
        table.add(where, "share of the optimizer stage", share, "%", 0, claim)
        table.add(where, "GPU busy", busy, "%", 0, 28 if batch == 32 else None)
        if batch == 32:
            implied_s = busy / 28 * (trial.step_s or 0)  # the same computation
            table.ratio(where, "step that the paper's 28% imply / ours", implied_s, trial.step_s, said="")
    return Finding(
        "fig1",
        "what ZeRO-Infinity leaves idle",
        "the optimizer stage takes 40% to 70% of a step; the GPU is busy 28% of it at batch 32.",
        "our program under ZeRO-Infinity's rules; the optimizer stage is what comes behind the last computation.",
        table,
        "our program uses every link at its full rate, so that its step is less than half of the one that the paper's "
        "28% imply at the same computation. 40% of that step for the optimizer would be a third of the 12 disks' rate. "
        "Pageable memory at half the link's rate, which the paper names, would add half a second each way at batch 32: "
        "the rest is no rule that a program could follow.",
    )


def fig5(paper: Fuyou) -> Finding:
    """Figure 5: throughput by batch."""
    table, charts = FigureTable(), []
    for (model, gpu), batches in paper.batches.items():
        systems = [name for name in SYSTEMS if model == paper.usual or name == "Fuyou"]
        bars = {
            name: [paper.tflops(paper.trial(model, batch, machine(gpu), SYSTEMS[name])) for batch in batches]
            for name in systems
        }
        for batch in batches:
            _own(table, paper, model, gpu, batch)
        _highest(
            table, model, gpu, {name: max((v for v in values if v), default=None) for name, values in bars.items()}
        )
        charts.append(Bars(f"fig5-{model}-{gpu}", f"Throughput, {model} on {gpu}", "TFLOPS", list(map(str, batches)),
                           bars, xlabel="batch"))  # fmt: skip
    if paper.usual == "13B":
        _on_a_larger_model(table, paper)
    return Finding(
        "fig5",
        "throughput by batch",
        "13B: at most 202 TFLOPS on A100, 2.46x ZeRO-Offload, 3.42x ZeRO-Infinity, 6.73x Colossal-AI at their best; "
        "156 on 4090, 2.36x and 3.47x, where Colossal-AI fails. 175B: 173 on A100 and 86 on 4090, where the others "
        "fail; at batch 8 ZeRO-Offload is faster than ZeRO-Infinity.",
        "96 b s l h^2 (1 + s/6h + V/16lh) FLOPs over the simulated step, which counts the recomputation of every block "
        "whether it is done or not. The paper does not say how it counts; 156 TFLOPS of useful work alone on a 4090, "
        "with every block computed again, would take 208 of its 165. 'eq. 1 to 8' beside it: the paper's own model "
        "with the same rates.",
        table,
        WHY_FIG5,
        charts,
    )


def _own(
    table: FigureTable, paper: Fuyou, model: str, gpu: str, batch: int, claim: float | None = None
) -> float | None:
    """Add and return the throughput of Fuyou; also add its step over that of the paper's equations."""
    trial = paper.trial(model, batch, machine(gpu))
    where, pieces = f"{model}, {gpu}, batch {batch}", trial.workload.micro_batches
    what, value = f"Fuyou, in {pieces} pieces" if pieces > 1 else "Fuyou", paper.tflops(trial)
    table.add(where, what, value, " TFLOPS", 0, claim)
    if trial.step_s is not None:
        found = best(rates(trial.hardware), paper.load(trial))
        what = f"its step / eq. 1 to 8, bound by {found.bound}"
        table.ratio(where, what, trial.step_s, found.step_s, said=TENTHS)
    return value


def _highest(table: FigureTable, model: str, gpu: str, top: dict[str, float | None]) -> None:
    own, where = top.pop("Fuyou"), f"{model}, {gpu}"
    if own and (model, gpu) in FASTEST:
        table.add(where, "Fuyou, highest", own, " TFLOPS", 0, FASTEST[model, gpu])
    for name, value in top.items():
        gain = GAINS.get((name, gpu)) if model == "13B" else None
        if gain and own and value:
            what = f"Fuyou / {name} ({value:.0f} TFLOPS), highest of each"
            table.ratio(where, what, own, value, gain, said="")
        elif gain is None and model == "13B":
            table.words(where, name, "does not fit", "does not fit" if value is None else "fits")
        else:
            table.add(where, f"{name}, highest", value, " TFLOPS", 0)


def _on_a_larger_model(table: FigureTable, paper: Fuyou) -> None:
    for gpu in paper.gpus:
        for name in ("ZeRO-Offload", "ZeRO-Infinity"):
            trial = paper.trial(paper.large, 1, machine(gpu), SYSTEMS[name])
            fits = "fits" if trial.timeline else "does not fit"
            table.words(f"{paper.large}, {gpu}, batch 1", name, "does not fit", fits)
    slow, fast = (paper.trial(paper.usual, 8, machine("A100"), line).step_s for line in (ZERO_INFINITY, ZERO_OFFLOAD))
    what = "ZeRO-Offload / ZeRO-Infinity, throughput"
    table.ratio(f"{paper.usual}, A100, batch 8", what, slow, fast, AT_LEAST_ONE, said="")


def fig6(paper: Fuyou) -> Finding:
    """Figure 6: extremely large models."""
    table, claims = FigureTable(), [EXTREME.get(model) for model in paper.larger]
    bars = [_own(table, paper, model, "A100", paper.extreme_batch, claim) for model, claim in zip(paper.larger, claims)]
    chart = Bars("fig6", "Throughput of the largest models, A100", "TFLOPS", list(paper.larger),
                 {"paper": claims, "ours": bars})  # fmt: skip
    return Finding(
        "fig6",
        "throughput of extremely large models on A100",
        "168 TFLOPS for 276B and 163 for 412B at batch 64.",
        "as figure 5.",
        table,
        WHY_FIG6,
        [chart],
    )


def fig7(paper: Fuyou) -> Finding:
    """Figure 7: the gain of overlapping optimizer and backward."""
    table, groups = FigureTable(), []
    bars: dict[str, list[float | None]] = {"paper": [], "ours": []}
    for model, claims in paper.overlapped.items():
        for batch, claim in claims.items():
            apart, ours = (paper.trial(model, batch, machine("4090"), line) for line in (APART, FUYOU))
            where, what = f"{model}, 4090, batch {batch}", "step without / with overlap"
            groups.append(f"{model}\nx{batch}")
            bars["paper"].append(claim)
            bars["ours"].append(table.ratio(where, what, apart.step_s, ours.step_s, claim, TENTHS))
            speed, load = rates(ours.hardware), paper.load(ours)
            what = "the same by eq. 1 to 8, checkpoints alone swapped"
            table.ratio(where, what, apart_s(speed, load), step(speed, load).step_s, said="")
    chart = Bars("fig7", "Gain of overlapping backward and optimizer, 4090", "times as fast", groups, bars)
    return Finding(
        "fig7",
        "gain of overlapping backward and optimizer on 4090",
        "13B: 1.09x, 1.25x, 1.38x, 1.22x at batch 8, 16, 32, 64; 175B: 1.16x, 1.18x at batch 8, 16; less where the "
        "backward or the optimizer takes much longer than the other.",
        "`overlap-optimizer{overlap=false}` steps every stage behind the last backward, gradients in DRAM until then; "
        "the paper's variant writes them to SSD and reads them again.",
        table,
        "at small batches, and for 175B, the optimizer takes longer than the backward; hiding one under the other then "
        "saves the backward, a third or more of the step, in our programs as in the paper's own equations with the "
        "disks' datasheet rates. That the paper gains less means that its overlapped stage takes longer than equation "
        "5 says. Disks that read and write at the same time are slower than by turns, which neither the equations nor "
        "our simplex model know: 1.4 times the disk time under overlap alone would give about 1.1x and 1.3x at batch 8 "
        "and 16, 1.2x for 175B at batch 8, and leave batches 32 and 64, where computation is the bound, as they are.",
        [chart],
    )


def fig8(paper: Fuyou) -> Finding:
    """Figure 8: the gain of pipelined swapping alone."""
    table, groups = FigureTable(), []
    bars: dict[str, list[float | None]] = {"paper": [], "ours": []}
    for gpu, claims in paper.pipelined.items():
        for batch, claim in claims.items():
            theirs, ours = (paper.trial(paper.usual, batch, machine(gpu), line) for line in (ZERO_INFINITY, APART))
            where, what = f"{paper.usual}, {gpu}, batch {batch}", "ZeRO-Infinity / Fuyou without overlap"
            groups.append(f"{gpu}\nx{batch}")
            bars["paper"].append(claim)
            bars["ours"].append(table.ratio(where, what, theirs.step_s, ours.step_s, claim, TENTHS))
            if bars["ours"][-1] is not None:
                least = serial_s(rates(theirs.hardware), paper.load(theirs))
                what = f"nothing overlapped ({least:.1f} s) / Fuyou w/o"
                table.ratio(where, what, least, ours.step_s, said="")
    title = f"Pipelined swap without optimizer overlap, {paper.usual}"
    chart = Bars("fig8", title, "times ZeRO-Infinity", groups, bars)
    return Finding(
        "fig8",
        "pipelined swap, without overlap of the optimizer, against ZeRO-Infinity",
        "A100: 1.66x, 1.88x, 1.97x at batch 8, 16, 32; 4090: 1.85x, 1.92x, 2.28x.",
        "both are programs of ours. ZeRO-Infinity's reads and fetches the weights of a block when the block is due, "
        "keeps only checkpoints, in DRAM, and steps behind the backward. Below it a step in which nothing overlaps at "
        "all, gradients over SSD included, by arithmetic.",
        table,
        "DeepSpeed gives up more than its rules ask for: checkpoints through pageable memory, gradients to SSD and "
        "back, and time between its calls. Our program under its rules still overlaps what goes from the GPU with what "
        "comes to it, and pins its memory.",
        [chart],
    )
