"""The speed of Fuyou's programs: figures 1 and 5 to 8."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..figures import Bars
from ..lab import SimulatedStep
from ..report import Finding
from ..table import AT_LEAST_ONE, ELSEWHERE, TENTHS, FigureTable
from .equations import Load, Rates, Serial, apart_s, best, serial, step
from .experiments import USEFUL, Fuyou
from .programs import (
    APART,
    COLOSSAL,
    FUYOU,
    PAGEABLE,
    ZERO_INFINITY,
    ZERO_OFFLOAD,
    busy_share,
    machine,
    optimizer_share,
    rates,
    with_rates,
)  # fmt: skip

FASTEST = {("13B", "A100"): 202.0, ("13B", "4090"): 156.0, ("175B", "A100"): 173.0, ("175B", "4090"): 86.0}
SYSTEMS = {"Fuyou": FUYOU, "ZeRO-Offload": ZERO_OFFLOAD, "ZeRO-Infinity": ZERO_INFINITY, "Colossal-AI": COLOSSAL}
DEEPSPEED = ("ZeRO-Offload", "ZeRO-Infinity")
GAINS = {  # Fuyou's highest throughput over that of each rival, 13B
    ("ZeRO-Offload", "A100"): 2.46, ("ZeRO-Infinity", "A100"): 3.42, ("Colossal-AI", "A100"): 6.73,
    ("ZeRO-Offload", "4090"): 2.36, ("ZeRO-Infinity", "4090"): 3.47,
}  # fmt: skip
EXTREME = {"276B": 168.0, "412B": 163.0}


def _parts(found: Serial) -> str:
    return (
        f"{found.step_s:.1f} s are {found.computed_s:.1f} s of computation, {found.moved_s:.1f} s of transfers and "
        f"{found.optimizer_s:.1f} s of the optimizer"
    )


def _backward(speed: Rates, load: Load) -> str:
    """A text with the seconds by resource of backward and optimizer, by equations 5 to 8."""
    found = step(speed, load).backward_s
    return "by eq. 5 to 8 backward and optimizer take " + ", ".join(f"{s:.1f} s of {name}" for name, s in found.items())


def fig1(paper: Fuyou) -> Finding:
    """Figure 1: what ZeRO-Infinity leaves idle."""
    table = FigureTable()
    batches = paper.batches[paper.usual, "A100"]
    for batch in batches:
        trial, found = paper.deepspeed(batch, "A100")
        where = f"{paper.usual}, A100, batch {batch}"
        table.add(where, "share of the optimizer stage", 100 * found.optimizer_s / found.step_s, "%", 0)
        busy = 100 * found.computed_s / found.step_s
        table.add(where, "GPU busy", busy, "%", 0, 28 if batch == 32 else None, _parts(found))
        if trial.timeline is not None:
            table.add(where, "our program, optimizer stage", 100 * optimizer_share(trial), "%", 0)
            table.add(where, "our program, GPU busy", 100 * busy_share(trial), "%", 0)
    shown = [batch for batch in batches if batch <= 32] or batches  # figure 1 shows no larger ones
    checks = {
        "disks at half their rates under DeepSpeed": lambda: _optimizer_shares(paper, shown, ssd=0.5),
        "a CPU optimizer at half its rate": lambda: _optimizer_shares(paper, shown, optimizer=0.5),
    }
    why = "the optimizer stage is reads and writes of 7 weights' bytes and the CPU's update"
    found_shares = _optimizer_shares(paper, shown)
    what = "share of the optimizer stage"
    table.ends(f"{paper.usual}, A100, batches to 32", what, found_shares, (40, 70), "%", 0, why, checks)
    if paper.halfway in paper.models:
        _add_halfway(table, paper)
    return Finding(
        "fig1",
        "what ZeRO-Infinity leaves idle",
        "the optimizer stage takes 40% to 70% of a step; the GPU is busy 28% of it at batch 32, and 26% with 65B on a "
        "4090 (section 1, without a batch).",
        "a step in which nothing overlaps, by arithmetic, as section 3.2 observes ZeRO-Infinity's. Beside it our "
        "program under its rules, which overlaps what they allow; the optimizer stage is what comes after the last "
        "computation.",
        table,
        "disks run here as under Fuyou, which reads and writes more at once than DeepSpeed does.",
    )


def _optimizer_shares(paper: Fuyou, batches: Sequence[int], **factors: float) -> list[float]:
    """The percent of a step that ZeRO-Infinity's optimizer stage takes, on a host with other rates."""
    found = []
    for batch in batches:
        trial, _ = paper.deepspeed(batch, "A100")
        parts = serial(rates(with_rates(trial.hardware, **factors)), paper.load(trial), PAGEABLE)
        found.append(100 * parts.optimizer_s / parts.step_s)
    return found


def _add_halfway(table: FigureTable, paper: Fuyou) -> None:
    """Add the share of its time in which a 4090 computes with a larger model, at the largest batch that fits."""
    for batch in sorted(paper.batches[paper.usual, "4090"], reverse=True):
        trial = paper.trial(paper.halfway, batch, machine("4090"), ZERO_INFINITY)
        if trial.timeline is not None:
            found = serial(rates(trial.hardware), paper.load(trial), PAGEABLE)
            busy = 100 * found.computed_s / found.step_s
            checks = {
                f"batch {less}": partial(_busy, paper, less) for less in (batch // 2, batch // 4) if less
            }  # fmt: skip
            where = f"{paper.halfway}, 4090, batch {batch}"
            table.add(where, "GPU busy", busy, "%", 0, 26, _parts(found), checks=checks)
            return


def _busy(paper: Fuyou, batch: int) -> float | None:
    trial = paper.trial(paper.halfway, batch, machine("4090"), ZERO_INFINITY)
    if trial.timeline is None:
        return None
    found = serial(rates(trial.hardware), paper.load(trial), PAGEABLE)
    return 100 * found.computed_s / found.step_s


def fig5(paper: Fuyou) -> Finding:
    """Figure 5: throughput by batch."""
    table, charts = FigureTable(), []
    for (model, gpu), batches in paper.batches.items():
        systems = [name for name in SYSTEMS if model == paper.usual or name == "Fuyou"]
        bars = {name: [_tflops(paper, name, model, gpu, batch) for batch in batches] for name in systems}
        for batch in batches:
            _own(table, paper, model, gpu, batch)
        top = {name: max((v for v in values if v), default=None) for name, values in bars.items()}
        best_batch = max(zip(bars["Fuyou"], batches), key=lambda row: row[0] or 0.0)[1]
        _highest(table, paper, model, gpu, top, best_batch)
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
        "useful work over the simulated step: three quarters of 96 b s l h^2 (1 + s/6h + V/16lh), which counts the "
        "recomputation of every block whether it is done or not. Beside it that formula, and what the GPU computes. "
        "'eq. 1 to 8': the paper's own model with the same rates. ZeRO-Offload and ZeRO-Infinity: steps in which "
        "nothing overlaps, as in figure 1.",
        table,
        "Colossal-AI does as well as its rules allow: full link rates, pinned memory, no time between calls, no DRAM "
        "but what it uses.",
        charts,
    )


def _tflops(paper: Fuyou, name: str, model: str, gpu: str, batch: int) -> float | None:
    if name not in DEEPSPEED:
        return paper.tflops(paper.trial(model, batch, machine(gpu), SYSTEMS[name]))
    trial, found = paper.deepspeed(batch, gpu, SYSTEMS[name])
    return USEFUL * paper.flops(model, batch) / found.step_s / 1e12 if trial.timeline else None


def _own(
    table: FigureTable, paper: Fuyou, model: str, gpu: str, batch: int, claim: float | None = None
) -> float | None:
    """Add and return the throughput of Fuyou; also add other ways to count it, and its step over the equations'."""
    trial = paper.trial(model, batch, machine(gpu))
    where, pieces = f"{model}, {gpu}, batch {batch}", trial.workload.micro_batches
    what, value = f"Fuyou, in {pieces} pieces" if pieces > 1 else "Fuyou", paper.tflops(trial)
    table.add(where, what, value, " TFLOPS", 0, claim, _why(paper, trial))
    if trial.step_s is not None:
        formula = paper.formula_tflops(trial) or 0.0
        table.add(where, "by the formula, every block computed again", formula, " TFLOPS", 0, claim, apart=ELSEWHERE)
        table.add(where, "what the GPU computes", paper.computed_tflops(trial), " TFLOPS", 0, claim, apart=ELSEWHERE)
        found = best(rates(trial.hardware), paper.load(trial))
        what = f"its step / eq. 1 to 8, bound by {found.bound}"
        table.ratio(where, what, trial.step_s, found.step_s, said=TENTHS)
    return value


def _why(paper: Fuyou, trial: SimulatedStep) -> str:
    if trial.step_s is None:
        return ""
    found = best(rates(trial.hardware), paper.load(trial))
    return (
        f"the GPU computes {busy_share(trial):.0%} of {trial.step_s:.1f} s; by the paper's own equations the step "
        f"takes {found.step_s:.1f} s, bound by {found.bound}"
    )


def _highest(table: FigureTable, paper: Fuyou, model: str, gpu: str, top: dict[str, float | None], batch: int) -> None:
    own, where = top.pop("Fuyou"), f"{model}, {gpu}"
    if own and (model, gpu) in FASTEST:
        why = f"at batch {batch} {_why(paper, paper.trial(model, batch, machine(gpu)))}"
        faster = partial(_faster_disks, paper, model, gpu, batch)
        checks = {f"disks {factor:g} times as fast": partial(faster, factor) for factor in (1.2, 1.5)}
        table.add(where, "Fuyou, highest", own, " TFLOPS", 0, FASTEST[model, gpu], why, checks=checks)
        if (name := "ZeRO-Infinity") in top and model == paper.usual and gpu == "4090":
            follows = f"{FASTEST[model, gpu]:g} / {GAINS[name, gpu]:g}"
            table.add(where, f"{name}, highest", top[name], " TFLOPS", 0, 45, apart=follows)
    for name, value in top.items():
        gain = GAINS.get((name, gpu)) if model == "13B" else None
        if gain and own and value:
            what = f"Fuyou / {name} ({value:.0f} TFLOPS), highest of each"
            rate = machine(gpu).devices[0].achieved_flops(paper.precision) / 1e12
            why = (
                f"useful work is {value / rate:.0%} of what its GPU could do at its best batch here; the paper's "
                f"number takes {own / gain / rate:.0%}"
            )
            checks = {"its transfers through pageable memory": partial(_pageable, paper, name, model, gpu, own)}
            table.ratio(where, what, own, value, gain, said="", why=why, checks=checks)
        elif gain is None and model == "13B":
            why = "only the checkpoints of small batches lie on the GPU"
            table.words(where, name, "does not fit", "does not fit" if value is None else "fits", why)
        else:
            table.add(where, f"{name}, highest", value, " TFLOPS", 0)


def _faster_disks(paper: Fuyou, model: str, gpu: str, batch: int, factor: float) -> float | None:
    return paper.tflops(paper.trial(model, batch, with_rates(machine(gpu), ssd=factor)))


def _pageable(paper: Fuyou, name: str, model: str, gpu: str, own: float) -> float | None:
    """Fuyou's highest throughput over that of a rival whose GPU link has the rate of pageable memory."""
    slow = machine(gpu).with_(h2d_bandwidth=PAGEABLE, d2h_bandwidth=PAGEABLE)
    found = (paper.tflops(paper.trial(model, batch, slow, SYSTEMS[name])) for batch in paper.batches[model, gpu])
    best_one = max((rate for rate in found if rate), default=None)
    return own / best_one if best_one else None


def _on_a_larger_model(table: FigureTable, paper: Fuyou) -> None:
    for gpu in paper.gpus:
        for name in ("ZeRO-Offload", "ZeRO-Infinity"):
            trial = paper.trial(paper.large, 1, machine(gpu), SYSTEMS[name])
            fits = "fits" if trial.timeline else "does not fit"
            why = "our program under its rules holds 2 bytes a parameter in DRAM and a few buffers, 350 GB of 768"
            table.words(f"{paper.large}, {gpu}, batch 1", name, "does not fit", fits, why)
    slow, fast = (paper.deepspeed(8, "A100", line)[1].step_s for line in (ZERO_INFINITY, ZERO_OFFLOAD))
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
        charts=[chart],
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
            speed, load = rates(ours.hardware), paper.load(ours)
            why = f"{_backward(speed, load)}; what overlaps saves the shorter of the two"
            checks = {
                f"disks at {factor:g} of their rates": partial(_gain, paper, model, batch, ssd=factor)
                for factor in (0.5, 1.5)
            }
            gain = table.ratio(where, what, apart.step_s, ours.step_s, claim, TENTHS, why=why, checks=checks)
            bars["ours"].append(gain)
            what = "the same by eq. 1 to 8, checkpoints alone swapped"
            table.ratio(where, what, apart_s(speed, load), step(speed, load).step_s, claim, "", apart=ELSEWHERE)
    chart = Bars("fig7", "Gain of overlapping backward and optimizer, 4090", "times as fast", groups, bars)
    return Finding(
        "fig7",
        "gain of overlapping backward and optimizer on 4090",
        "13B: 1.09x, 1.25x, 1.38x, 1.22x at batch 8, 16, 32, 64; 175B: 1.16x, 1.18x at batch 8, 16; less where the "
        "backward or the optimizer takes much longer than the other.",
        "`overlap-optimizer{overlap=false}` steps every stage behind the last backward, gradients in DRAM until then; "
        "the paper's variant writes them to SSD and reads them again.",
        table,
        charts=[chart],
    )


def _ratio_at(theirs: SimulatedStep, load: Load, pageable: float, ours_s: float | None) -> float | None:
    return serial(rates(theirs.hardware), load, pageable).step_s / ours_s if ours_s else None


def _gain(paper: Fuyou, model: str, batch: int, **factors: float) -> float | None:
    """The gain of the overlap on a 4090 whose host has other rates."""
    hardware = with_rates(machine("4090"), **factors)
    apart, ours = (paper.trial(model, batch, hardware, line).step_s for line in (APART, FUYOU))
    return apart / ours if apart and ours else None


def fig8(paper: Fuyou) -> Finding:
    """Figure 8: the gain of pipelined swapping alone."""
    table, groups = FigureTable(), []
    bars: dict[str, list[float | None]] = {"paper": [], "ours": []}
    for gpu, claims in paper.pipelined.items():
        for batch, claim in claims.items():
            (theirs, found), ours = (
                paper.deepspeed(batch, gpu),
                paper.trial(paper.usual, batch, machine(gpu), APART),
            )
            where, what = f"{paper.usual}, {gpu}, batch {batch}", "ZeRO-Infinity / Fuyou without overlap"
            groups.append(f"{gpu}\nx{batch}")
            bars["paper"].append(claim)
            why = f"ZeRO-Infinity's {_parts(found)}"
            load = paper.load(theirs)
            checks = {
                f"pageable memory at {rate / 1e9:.2g} GB/s": partial(_ratio_at, theirs, load, rate, ours.step_s)
                for rate in (PAGEABLE / 2, PAGEABLE / 1.5)
            }
            bars["ours"].append(
                table.ratio(where, what, found.step_s, ours.step_s, claim, TENTHS, why=why, checks=checks)
            )
            what = "the same, our program under its rules"
            table.ratio(where, what, theirs.step_s, ours.step_s, claim, TENTHS, apart=ELSEWHERE)
    title = f"Pipelined swap without optimizer overlap, {paper.usual}"
    chart = Bars("fig8", title, "times ZeRO-Infinity", groups, bars)
    return Finding(
        "fig8",
        "pipelined swap, without overlap of the optimizer, against ZeRO-Infinity",
        "A100: 1.66x, 1.88x, 1.97x at batch 8, 16, 32; 4090: 1.85x, 1.92x, 2.28x.",
        "ZeRO-Infinity as in figure 1: nothing overlaps, as section 3.2 observes. Beside it our program under its "
        "rules, which reads and fetches the weights of a block when the block is due, keeps only checkpoints, in DRAM, "
        "and steps after the backward.",
        table,
        charts=[chart],
    )
