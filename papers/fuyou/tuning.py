"""What Fuyou chooses and what it costs: figures 9 and 10, table 5, and what the headline hangs on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...ir.machine.hardware import Hardware
from ..figures import Curves
from ..lab import Lab
from ..report import Finding, Row, between, near, number, same
from .bench import APART, FUYOU, Bench, Setup, machine, pipeline, rates, swap_coefficient, with_rates
from .equations import best, step

SERVER, SSD, GPU = 14_098, 308, {"A100": 14_177, "4090": 1_600}  # dollars, table 5
DGX, DGX_GPUS = 200_000, 8
LARGE_A100_TFLOPS = 173.0  # section 5.3
AGAINST_SERVERS = 0.75  # section 5.7: Fuyou's tokens per second and dollar over Megatron's, whole machines
WHY_FIG10 = (
    "the ratio follows from the step, and ours on the 4090 is half as long as the paper's (figure 5). Up to 12 disks "
    "of their datasheet rates the optimizer's bytes are its bound, so that each disk pays; the paper's 12 disks bring "
    "little more than 6, which agrees with disks that together reach at most half of their rates (figure 9). On the "
    "A100, with four times the batch, 6 disks suffice."
)


def fig9(lab: Lab, setup: Setup) -> Finding:
    """Step time by swap coefficient."""
    bench, rows = Bench(lab, setup), []
    curves: dict[str, Sequence[tuple[float, float]]] = {}
    hardware = machine("A100")
    for batch, positive in setup.swapped.items():
        where = f"{setup.small}, A100, batch {batch}"
        chosen = bench.trial(setup.small, batch, hardware)
        if chosen.step_s is None:
            rows.append(number(where, "step", None))
            continue
        coefficient = swap_coefficient(chosen)
        said = "positive" if coefficient > 0.005 else "zero"
        what = f"coefficient that the plan chooses ({coefficient:.2f})"
        rows.append(same(where, what, "positive" if positive else "zero", said))
        points = _by_share(bench, setup, batch, hardware)
        least_s = min(step_s for _, step_s in points)
        what = f"its step / the best of {len(points)} coefficients ({chosen.step_s:.2f} s / {least_s:.2f} s)"
        rows.append(between(where, what, chosen.step_s / least_s, 0.0, 1.05, "x", 3))
        load = bench.load(chosen)
        found = best(rates(hardware), load)
        rows.append(number(where, f"coefficient by eq. 1 to 12, step {found.step_s:.2f} s", found.coefficient))
        start = step(rates(hardware), load).backward_s
        what = "computation / disks in backward by eq. 7 and 8, checkpoints alone swapped"
        rows.append(number(where, what, start["computation"] / start["SSD"], "x"))
        curves[f"batch {batch}"] = points
        ends = [step(rates(hardware), load, load.swappable[:n]) for n in (0, len(load.swappable))]
        curves[f"paper: eq. 1 to 8, {batch}"] = [(end.coefficient, end.step_s) for end in (ends[0], found, ends[1])]
    title, across = f"Step by swap coefficient, {setup.small} on A100", "share of classes that is not computed again"
    chart = Curves("fig9", title, across, "seconds", curves, points=True)
    return Finding(
        "fig9",
        "step time by swap coefficient",
        "the predicted best coefficient is 0 at batch 32, positive at 64 and 80, and nearly the best measured.",
        "`choose-activations{share=...}` on classes of saved tensors (outputs of matrix products), the best against "
        f"{len(setup.shares)} fixed coefficients; the paper's coefficient counts all activations inside blocks.",
        rows,
        "the paper finds batch 32 bounded by communication. By its own equations with the disks' datasheet rates it is "
        "bounded by computation, which takes about twice the disks' time, so that swapping pays there too: the paper's "
        "12 disks must reach at most half of their datasheet rates. Our plan also moves to DRAM what has room there.",
        [chart],
    )


def _by_share(bench: Bench, setup: Setup, batch: int, hardware: Hardware) -> list[tuple[float, float]]:
    """(coefficient, seconds) of the fixed coefficients that fit."""
    found = []
    for share in setup.shares:
        trial = bench.trial(setup.small, batch, hardware, pipeline(f"share={share}"))
        if trial.step_s is not None:
            found.append((swap_coefficient(trial), trial.step_s))
    return found


@dataclass(frozen=True)
class Price:
    """Tokens per second and 1000 dollars of one GPU count of SSDs, for GPU and SSDs, and for the whole machine."""

    parts: float
    whole: float


def price(gpu: str, ssds: int, tokens_per_s: float) -> Price:
    parts = GPU[gpu] + ssds * SSD
    return Price(1000 * tokens_per_s / parts, 1000 * tokens_per_s / (parts + SERVER))


def megatron(flops_per_token: float) -> tuple[Price, float]:
    """Of a GPU in a DGX-2, and its TFLOPS. The paper gives neither; its ratio for whole machines and its throughput of
    Fuyou on an A100 with 12 SSDs give both."""
    fuyou = LARGE_A100_TFLOPS * 1e12 / flops_per_token
    whole = price("A100", 12, fuyou).whole / AGAINST_SERVERS
    tokens_per_s = whole * DGX / DGX_GPUS / 1000
    return Price(1000 * tokens_per_s / GPU["A100"], whole), tokens_per_s * flops_per_token / 1e12


def fig10(lab: Lab, setup: Setup) -> Finding:
    """Cost-effectiveness by SSD count."""
    bench, rows = Bench(lab, setup), []
    per_token = bench.flops(setup.large, 1) / setup.sequence
    rival, tflops = megatron(per_token)
    rows.append(number("Megatron-LM, DGX-2", "implied by the paper, per GPU", tflops, " TFLOPS", 0))
    curves: dict[str, Sequence[tuple[float, float]]] = {}
    ratios: dict[str, dict[int, tuple[float, float]]] = {}
    for gpu, batch in setup.priced.items():
        found = {}
        for ssds in setup.ssds:
            trial = bench.trial(setup.large, batch, machine(gpu, ssds=ssds))
            if trial.step_s is None:
                rows.append(number(f"{setup.large}, {gpu}, {ssds} SSDs", trial.misses_in, None))
                continue
            own = price(gpu, ssds, batch * setup.sequence / trial.step_s)
            found[ssds] = own.parts / rival.parts, own.whole / rival.whole
            what = f"throughput, step {trial.step_s:.0f} s"
            rows.append(number(f"{setup.large}, {gpu}, {ssds} SSDs", what, bench.tflops(trial), " TFLOPS", 0))
        ratios[gpu] = found
        curves[f"{gpu}, GPU and SSDs"] = [(ssds, row[0]) for ssds, row in found.items()]
        curves[f"{gpu}, server"] = [(ssds, row[1]) for ssds, row in found.items()]
    curves["paper: Megatron-LM"] = [(min(setup.ssds), 1.0), (max(setup.ssds), 1.0)]
    rows += _claims(ratios)
    title = f"Throughput per dollar over Megatron-LM's, {setup.large}"
    chart = Curves("fig10", title, "SSDs", "times", curves, points=True)
    return Finding(
        "fig10",
        "throughput per dollar, by SSD count",
        "4090, price of GPU and SSDs: at most 1.70x Megatron-LM on DGX-2, rising up to 6 SSDs, falling from 6 to 12. "
        "Price of the whole server: 75%.",
        "tokens/s over prices of table 5, Fuyou's by simulation at the batches of figure 5. Megatron-LM's from the "
        "paper's own numbers: 75% of it is taken as Fuyou's 173 TFLOPS on an A100 with 12 SSDs, at an eighth of a DGX "
        "for each GPU.",
        rows,
        WHY_FIG10,
        [chart],
    )


def _claims(ratios: dict[str, dict[int, tuple[float, float]]]) -> list[Row]:
    rows = []
    if cheap := ratios.get("4090"):
        top = max(cheap, key=lambda ssds: cheap[ssds][0])
        rows.append(near("4090", f"highest ratio, price of GPU and SSDs ({top} SSDs)", cheap[top][0], 1.70, "x"))
        if {6, 12} <= cheap.keys():
            rows.append(between("4090", "ratio with 12 SSDs / with 6", cheap[12][0] / cheap[6][0], 0, 1, "x"))
        if {3, 6} <= cheap.keys():
            rows.append(between("4090", "ratio with 6 SSDs / with 3", cheap[6][0] / cheap[3][0], 1, float("inf"), "x"))
    if ratios.get("A100"):
        rows.append(near("A100", "highest ratio, price of the server", max(r for _, r in ratios["A100"].values()),
                         AGAINST_SERVERS, "x"))  # fmt: skip
    return rows


def sensitivity(lab: Lab, setup: Setup) -> Finding:
    """How the figures move with each assumption."""
    bench, rows, base = Bench(lab, setup), [], machine("4090")
    variants = [
        ("as assumed", base),
        ("calls one by one at the preset's rates", machine("4090", block_rate=False)),
        ("SSDs at half their rates", with_rates(base, ssd=0.5)),
        ("CPU optimizer at half its rate", with_rates(base, optimizer=0.5)),
        ("all SSDs behind one x16 uplink", base.with_(ssd_uplink_bandwidth=26e9)),
        ("GPU link at half its rate", base.with_(h2d_bandwidth=13e9, d2h_bandwidth=13e9)),
    ]
    claims = setup.overlapped.get(setup.small, {})
    batch = 32 if 32 in claims else max(setup.batches[setup.small, "4090"])
    for name, hardware in variants:
        both = [bench.trial(setup.small, batch, hardware, line) for line in (APART, FUYOU)]
        value = bench.tflops(both[1])
        where = f"{setup.small}, 4090, batch {batch}, {name}"
        rows.append(number(where, "throughput", value, " TFLOPS", 0))
        if both[0].step_s and both[1].step_s and batch in claims:
            rows.append(near(where, "gain of the overlap", both[0].step_s / both[1].step_s, claims[batch], "x"))
    return Finding(
        "sensitivity",
        "throughput and gain of the overlap under other assumptions",
        "1.38x at batch 32 (figure 7).",
        "as figures 5 and 7, one assumption changed at a time.",
        rows,
        "each row says what the figures hang on; none of these is used elsewhere.",
    )
