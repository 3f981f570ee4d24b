"""Fuyou's choices and costs: figures 9 and 10, table 5, and the sensitivity of the main result to assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ...ir.machine.hardware import Hardware
from ..figures import Curves
from ..report import Finding
from ..table import AT_LEAST_ONE, ELSEWHERE, FigureTable
from .equations import best, step
from .experiments import USEFUL, Fuyou
from .programs import APART, FUYOU, machine, pipeline, rates, swap_coefficient, with_rates

SERVER, SSD, GPU = 14_098, 308, {"A100": 14_177, "4090": 1_600}  # dollars, table 5
DGX, DGX_GPUS = 200_000, 8
LARGE_A100_TFLOPS = 173.0  # section 5.3
CHEAPEST = 1.70  # section 5.7: the same on the 4090, over prices of GPU and SSDs
AGAINST_SERVERS = 0.75  # section 5.7: Fuyou's tokens per second and dollar over Megatron's, whole machines


def fig9(paper: Fuyou) -> Finding:
    """Figure 9: step time by swap coefficient."""
    table = FigureTable()
    curves: dict[str, Sequence[tuple[float, float]]] = {}
    hardware = machine("A100")
    for batch, positive in paper.swapped.items():
        where = f"{paper.usual}, A100, batch {batch}"
        chosen = paper.trial(paper.usual, batch, hardware)
        if chosen.step_s is None:
            table.add(where, "step", None)
            continue
        coefficient = swap_coefficient(chosen)
        what = f"coefficient that the plan chooses ({coefficient:.2f})"
        load = paper.load(chosen)
        start = step(rates(hardware), load).backward_s
        why = (
            f"with checkpoints alone swapped backward and optimizer take {start['computation']:.1f} s of computation "
            f"and {start['SSD']:.1f} s of disks by eq. 7 and 8, so both bind them to disks; the plan moves what costs "
            "the disks nothing to DRAM, which the paper's equations do not know"
        )
        checks = {
            "activations to SSD alone": partial(_sign_of, paper, batch, hardware, "to=ssd"),
            "eq. 1 to 12 in place of the plan": partial(_sign, best(rates(hardware), load).coefficient),
        }
        table.words(where, what, "positive" if positive else "zero", _sign(coefficient), why, checks)
        points = _by_share(paper, batch, hardware)
        what = f"its step / the best of {len(points)} coefficients"
        table.ratio(where, what, chosen.step_s, min(step_s for _, step_s in points), (0.0, 1.05))
        found = best(rates(hardware), load)
        table.add(where, f"coefficient by eq. 1 to 12, step {found.step_s:.2f} s", found.coefficient)
        what = "computation / disks in backward by eq. 7 and 8, checkpoints alone swapped"
        table.ratio(where, what, start["computation"], start["SSD"], said="")
        curves[f"batch {batch}"] = points
        ends = [step(rates(hardware), load, load.swappable[:n]) for n in (0, len(load.swappable))]
        curves[f"paper: eq. 1 to 8, {batch}"] = [(end.coefficient, end.step_s) for end in (ends[0], found, ends[1])]
    title, across = f"Step by swap coefficient, {paper.usual} on A100", "share of classes that is not computed again"
    chart = Curves("fig9", title, across, "seconds", curves, points=True)
    return Finding(
        "fig9",
        "step time by swap coefficient",
        "the predicted best coefficient is 0 at batch 32, positive at 64 and 80, and nearly the best measured.",
        "`choose-activations{share=...}` on classes of saved tensors (outputs of matrix products), the best against "
        f"{len(paper.shares)} fixed coefficients; the paper's coefficient counts all activations inside blocks.",
        table,
        charts=[chart],
    )


def _sign(coefficient: float) -> str:
    return "positive" if coefficient > 0.005 else "zero"


def _sign_of(paper: Fuyou, batch: int, hardware: Hardware, choose: str) -> str:
    trial = paper.trial(paper.usual, batch, hardware, pipeline(choose))
    return _sign(swap_coefficient(trial)) if trial.timeline else "does not fit"


def _by_share(paper: Fuyou, batch: int, hardware: Hardware) -> list[tuple[float, float]]:
    """(coefficient, seconds of the step) for each fixed coefficient that fits."""
    found = []
    for share in paper.shares:
        trial = paper.trial(paper.usual, batch, hardware, pipeline(f"share={share}"))
        if trial.step_s is not None:
            found.append((swap_coefficient(trial), trial.step_s))
    return found


@dataclass(frozen=True)
class Price:
    """Tokens per second per 1000 dollars, for GPU and SSDs alone (`parts`) and for the whole machine."""

    parts: float
    whole: float


def price(gpu: str, ssds: int, tokens_per_s: float) -> Price:
    parts = GPU[gpu] + ssds * SSD
    return Price(1000 * tokens_per_s / parts, 1000 * tokens_per_s / (parts + SERVER))


def megatron(flops_per_token: float) -> tuple[Price, float]:
    """The price figures and TFLOPS of a GPU in a DGX-2. The paper gives neither; both follow from its ratio for whole
    machines and its throughput of Fuyou on an A100 with 12 SSDs."""
    fuyou = LARGE_A100_TFLOPS * 1e12 / flops_per_token
    whole = price("A100", 12, fuyou).whole / AGAINST_SERVERS
    tokens_per_s = whole * DGX / DGX_GPUS / 1000
    return Price(1000 * tokens_per_s / GPU["A100"], whole), tokens_per_s * flops_per_token / 1e12


def fig10(paper: Fuyou) -> Finding:
    """Figure 10: throughput per dollar by the number of SSDs."""
    table = FigureTable()
    rival, tflops = megatron(USEFUL * paper.flops(paper.large, 1) / paper.sequence)
    table.add("Megatron-LM, DGX-2", "implied by the paper, per GPU", tflops, " TFLOPS", 0)
    curves: dict[str, Sequence[tuple[float, float]]] = {}
    ratios: dict[str, dict[int, tuple[float, float]]] = {}
    steps: dict[str, dict[int, float]] = {}
    for gpu, batch in paper.priced.items():
        found = {}
        for ssds in paper.ssds:
            trial, where = (
                paper.trial(paper.large, batch, machine(gpu, ssds=ssds)),
                f"{paper.large}, {gpu}, {ssds} SSDs",
            )
            if trial.step_s is None:
                table.add(where, trial.misses_in, None)
                continue
            own = price(gpu, ssds, batch * paper.sequence / trial.step_s)
            steps.setdefault(gpu, {})[ssds] = trial.step_s
            found[ssds] = own.parts / rival.parts, own.whole / rival.whole
            table.add(where, f"throughput, step {trial.step_s:.0f} s", paper.tflops(trial), " TFLOPS", 0)
        ratios[gpu] = found
        curves[f"{gpu}, GPU and SSDs"] = [(ssds, row[0]) for ssds, row in found.items()]
        curves[f"{gpu}, server"] = [(ssds, row[1]) for ssds, row in found.items()]
    curves["paper: Megatron-LM"] = [(min(paper.ssds), 1.0), (max(paper.ssds), 1.0)]
    _claims(table, paper, ratios, steps)
    title = f"Throughput per dollar over Megatron-LM's, {paper.large}"
    chart = Curves("fig10", title, "SSDs", "times", curves, points=True)
    return Finding(
        "fig10",
        "throughput per dollar, by SSD count",
        "4090, price of GPU and SSDs: at most 1.70x Megatron-LM on DGX-2, rising up to 6 SSDs, falling from 6 to 12. "
        "Price of the whole server: 75%.",
        "tokens/s over prices of table 5, Fuyou's by simulation at the batches of figure 5. Megatron-LM's from the "
        "paper's own numbers: 75% of it is taken as Fuyou's 173 TFLOPS on an A100 with 12 SSDs, at an eighth of a DGX "
        "for each GPU.",
        table,
        charts=[chart],
    )


def _cheapest(paper: Fuyou, ratio_s: float, ssds: int, factor: float) -> float | None:
    """The ratio of prices with faster disks; `ratio_s` is a ratio times the seconds of its step."""
    hardware = with_rates(machine("4090", ssds=ssds), ssd=factor)
    step_s = paper.trial(paper.large, paper.priced["4090"], hardware).step_s
    return ratio_s / step_s if step_s else None


def _claims(
    table: FigureTable, paper: Fuyou, ratios: dict[str, dict[int, tuple[float, float]]],
    steps: dict[str, dict[int, float]],
) -> None:  # fmt: skip
    if cheap := {ssds: parts for ssds, (parts, _) in ratios.get("4090", {}).items()}:
        top = max(cheap, key=lambda ssds: cheap[ssds])
        took = steps["4090"]
        theirs_s = took[top] * cheap[top] / CHEAPEST
        why = f"a step takes {took[top]:.0f} s with {top} SSDs; the paper's ratio takes one of {theirs_s:.0f} s"
        what = f"highest ratio, price of GPU and SSDs ({top} SSDs)"
        checks = {
            f"disks {factor:g} times as fast": partial(_cheapest, paper, took[top] * cheap[top], top, factor)
            for factor in (1.5, 2.0)
        }
        table.add("4090", what, cheap[top], "x", claim=CHEAPEST, why=why, checks=checks)
        for more, less, claim in ((12, 6, (0, 1)), (6, 3, AT_LEAST_ONE)):
            if {more, less} <= cheap.keys():
                what = f"ratio with {more} SSDs / with {less}"
                why = f"a step takes {took[more]:.0f} s with {more} SSDs and {took[less]:.0f} s with {less}"
                table.ratio("4090", what, cheap[more], cheap[less], claim, "", why=why)
    if servers := {ssds: whole for ssds, (_, whole) in ratios.get("A100", {}).items()}:
        top = max(servers, key=lambda ssds: servers[ssds])
        follows = "Megatron-LM's throughput, which is taken from this number"
        what = "highest ratio, price of the server"
        table.add("A100", what, servers[top], "x", claim=AGAINST_SERVERS, apart=follows)


def sensitivity(paper: Fuyou) -> Finding:
    """Throughput and gain of the overlap with one assumption changed at a time."""
    table, base = FigureTable(), machine("4090")
    variants = [
        ("as assumed", base),
        ("calls one by one at the preset's rates", machine("4090", block_rate=False)),
        ("SSDs at half their rates", with_rates(base, ssd=0.5)),
        ("CPU optimizer at half its rate", with_rates(base, optimizer=0.5)),
        ("all SSDs behind one x16 uplink", base.with_(ssd_uplink_bandwidth=26e9)),
        ("GPU link at half its rate", base.with_(h2d_bandwidth=13e9, d2h_bandwidth=13e9)),
    ]
    claims = paper.overlapped.get(paper.usual, {})
    batch = 32 if 32 in claims else max(paper.batches[paper.usual, "4090"])
    for name, hardware in variants:
        apart, ours = (paper.trial(paper.usual, batch, hardware, line) for line in (APART, FUYOU))
        where = f"{paper.usual}, 4090, batch {batch}, {name}"
        table.add(where, "throughput", paper.tflops(ours), " TFLOPS", 0)
        if batch in claims:
            table.ratio(where, "gain of the overlap", apart.step_s, ours.step_s, claims[batch], "", apart=ELSEWHERE)
    return Finding(
        "sensitivity",
        "throughput and gain of the overlap under other assumptions",
        "1.38x at batch 32 (figure 7).",
        "as figures 5 and 7, one assumption changed at a time.",
        table,
    )
