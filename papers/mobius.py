"""What a simulation can say of the tables and figures of Mobius (ASPLOS 2023, section 4).

Mobius runs as its paper has it: stages always come from DRAM, are computed again in backward, as many micro-batches as
GPUs. The rival is ZeRO-3 with CPU offload as programs of our own, on the same machine under the same assumptions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..compiler.models.named import find_model
from ..ir.machine.hardware import Hardware
from ..ir.units import format_seconds
from ..passes.graph.blocks import Block
from ..passes.graph.coarsen import Coarsen
from ..passes.stage_time import block_seconds
from .figures import Bars, Chart, Curves
from .lab import Case, Lab, Trial, exposed_share, num_params, profile_s, share_of_bytes
from .report import Finding, Row, between, near, number, same

TITLE = "Mobius (ASPLOS 2023) in simulation"
FAST, HALF = 12e9, 6.6e9  # bytes/s: "more than 12 GB/s", and half of the 13.1 GB/s of a root complex
SWAPPED = "schedule-pipeline, insert-remat{always=true}, insert-fetch{swap=true}, insert-optimizer"
MIP = "partition-mip{deadline_s=4, swap=true}"
ZERO3 = "zero3-offload"
GPIPE = "gpipe"


@dataclass(frozen=True)
class Setup:
    """Models by the paper's names: our name, and the micro-batch of table 3. `sizes`: those of figures 9 and 10."""

    models: Mapping[str, tuple[str, int]]
    partitioned: Sequence[str]
    mapped: Sequence[str]
    scaled: str
    rented: Sequence[str]
    micro_batches: Sequence[int] = (1, 2, 4)
    sequence: int = 512
    topologies: Sequence[str] = ("4", "2+2", "1+3")
    scaling: Sequence[str] = ("1+1", "2+1", "2+2", "3+2", "3+3", "4+3", "4+4")
    billions: Mapping[str, float] = dataclasses.field(default_factory=dict)  # what table 3 calls them


FULL = Setup(
    {"3B": ("mobius-3b", 2), "8B": ("mobius-8b", 2), "15B": ("mobius-15b", 1), "51B": ("mobius-51b", 1)},
    partitioned=("3B", "15B", "51B"),
    mapped=("8B", "15B"),
    scaled="15B",
    rented=("8B", "15B"),
    billions={"3B": 3, "8B": 8, "15B": 15, "51B": 51},
)


def mobius(partition: str = MIP, mapping: str = "map-cross") -> str:
    """The pipeline of Mobius, with another partition or mapping in it."""
    return f"coarsen, {partition}, {mapping}, {SWAPPED}"


def topology(name: str) -> Hardware:
    """A machine whose fetches go by turns, as section 3.3 orders them."""
    return Hardware.preset(f"mobius-topo{name}", ordered_fetches=True)


@dataclass(frozen=True)
class Bench:
    """Trials of one setup."""

    lab: Lab
    setup: Setup

    def case(self, model: str, hardware: Hardware, micro_batch: int | None = None) -> Case:
        name, usual = self.setup.models[model]
        return Case(name, micro_batch or usual, hardware.num_devices, self.setup.sequence)

    def mobius(self, model: str, hardware: Hardware, micro_batch: int | None = None, **line: str) -> Trial:
        return self.lab.trial(self.case(model, hardware, micro_batch), hardware, mobius(**line))

    def zero3(self, model: str, hardware: Hardware, micro_batch: int | None = None) -> Trial:
        return self.lab.trial(self.case(model, hardware, micro_batch), hardware, ZERO3)


def table3(lab: Lab, setup: Setup) -> Finding:
    """Models."""
    rows = []
    for model, (name, _) in setup.models.items():
        billions = num_params(find_model(name).on_meta()) / 1e9
        named = setup.billions.get(model)
        row = near(model, "parameters", billions, named, " B") if named else number(model, "parameters", billions, " B")
        rows.append(row)
    return Finding(
        "table3",
        "the models",
        "3 B, 8 B, 15 B and 51 B parameters with 64, 40, 40 and 50 layers of 2048, 4096, 5120 and 9216.",
        "every parameter once, the output layer tied to the token embedding, vocabulary 50257.",
        rows,
        "the paper's 15B has 12.8 B parameters by its own dimensions (12 x 40 x 5120^2 and the embeddings). Its 80 "
        "heads do not divide 9216; the 51B model here has 72.",
    )


def fig5(lab: Lab, setup: Setup) -> Finding:
    """Step time against ZeRO-3 with CPU offload."""
    bench, rows = Bench(lab, setup), []
    ratios: dict[str, list[float | None]] = {name: [] for name in setup.topologies}
    for model in setup.models:
        times = []
        for name in setup.topologies:
            ours, theirs = bench.mobius(model, topology(name)), bench.zero3(model, topology(name))
            where = f"{model}, Topo {name}"
            if ours.step_s is None or theirs.step_s is None:
                ratios[name].append(None)
                rows.append(number(where, "ZeRO-3 / Mobius", None))
                continue
            ratio = theirs.step_s / ours.step_s
            ratios[name].append(ratio)
            steps = f"ZeRO-3 / Mobius ({theirs.step_s:.2f} s / {ours.step_s:.2f} s)"
            rows.append(between(where, steps, ratio, 3.8, 5.1, "x"))
            times.append(ours.step_s)
        if not times:
            continue
        rows.append(near(model, "Mobius, slowest / fastest topology", max(times) / min(times), 1.0, "x"))
        if {"4", "2+2"} <= ratios.keys():
            more, less = ratios["4"][-1], ratios["2+2"][-1]
            if more and less:
                what = "gain on Topo 4 / gain on Topo 2+2"
                rows.append(between(model, what, more / less, 1.0, float("inf"), "x"))
        rows.append(_gpipe(bench, model))
    chart = Bars(
        "fig5", "Step time, ZeRO-3 offload / Mobius", "times as fast", list(setup.models),
        {f"Topo {name}": values for name, values in ratios.items()}, band=(3.8, 5.1),
    )  # fmt: skip
    return Finding(
        "fig5",
        "time of a step",
        "3.8x to 5.1x less than DeepSpeed ZeRO-3 with CPU offload, nearly the same on all topologies, with a larger "
        "gain the more contention there is; GPipe fits the 3B model alone.",
        "simulated seconds of a whole step, the optimizer's part included, as many micro-batches as GPUs on both "
        "sides.",
        rows,
        "the step holds Adam on the CPU, which both sides run at the same rate and the paper does not report; it is a "
        "large part of Mobius's step and lowers the ratio (see the sensitivity below). Our ZeRO-3 fetches ahead, "
        "gathers in a ring that uses both directions of a link, and loses no time between its calls; DeepSpeed's "
        "achieves less. Where one root complex feeds all GPUs (Topo 4), uploads and not computation bound Mobius, so "
        "that its time does depend on the topology.",
        [chart],
    )


def _gpipe(bench: Bench, model: str) -> Row:
    hardware = topology("2+2")
    trial = bench.lab.trial(bench.case(model, hardware), hardware, GPIPE)
    swaps = any(t.op == "fetch" for t in trial.transfers)
    fits = "fits" if trial.timeline and not swaps else "out of memory"
    return same(model, "GPipe, all on the GPUs", "fits" if model == "3B" else "out of memory", fits)


def fig6(lab: Lab, setup: Setup) -> Finding:
    """Bytes moved."""
    bench, hardware, rows = Bench(lab, setup), topology("2+2"), []
    bars: dict[str, list[float | None]] = {"Mobius": [], "ZeRO-3 offload": [], "Mobius, to the GPUs": []}
    bars["ZeRO-3, to the GPUs"] = []
    for model in setup.models:
        for name, trial, claim in (
            ("Mobius", bench.mobius(model, hardware), 1.8),
            ("ZeRO-3 offload", bench.zero3(model, hardware), 7.3),
        ):
            if trial.timeline is None:
                continue
            down, up = (moved / trial.model_bytes for moved in trial.device_bytes)
            rows.append(near(model, f"{name}, both directions / model", down + up, claim, "x"))
            rows.append(number(model, f"{name}, to the GPUs / model", down, "x"))
            bars[name].append(down + up)
            bars[f"{name.split()[0]}, to the GPUs"].append(down)
    chart = Bars("fig6", "Bytes over the GPUs' links a step / model size", "model sizes", list(setup.models), bars)
    return Finding(
        "fig6",
        "bytes moved in a step",
        "about 1.8x the model's size against 7.3x (Topo 2+2); by equations 1 and 2 in theory 1.5x and 1.5N = 6x.",
        "every byte that passes a GPU's own PCIe link, in either direction, over the model's size in fp32. Without P2P "
        "what goes from GPU to GPU passes two such links. The count towards the GPUs alone stands beside it.",
        rows,
        "the paper does not say how it counts. Equation 2 counts each copy of weights and gradients once, 1.5N; "
        "without P2P a gathered or reduced shard passes DRAM, and each copy is seen on two links: between the two "
        "counts lies the paper's 7.3x. Mobius adds its activations, staged through DRAM, to the 1.5x of equation 1, "
        "and the stages whose weights are still there when backward begins are fetched once instead of twice.",
        [chart],
    )


def fig7(lab: Lab, setup: Setup) -> Finding:
    """Bandwidth of transfers."""
    bench, rows = Bench(lab, setup), []
    curves: dict[str, Sequence[tuple[float, float]]] = {}
    for model in setup.models:
        for name in setup.topologies:
            ours, theirs = bench.mobius(model, topology(name)), bench.zero3(model, topology(name))
            if ours.timeline is None or theirs.timeline is None:
                continue
            where, infinite = f"{model}, Topo {name}", float("inf")
            fast, slow = share_of_bytes(ours, FAST), share_of_bytes(theirs, 0, HALF)
            rows.append(between(where, "Mobius, bytes at more than 12 GB/s", 100 * fast, 50, infinite, "%", 0))
            rows.append(between(where, "ZeRO-3, bytes at up to 6.6 GB/s", 100 * slow, 50, infinite, "%", 0))
            if model == setup.scaled:
                curves[f"Mobius, Topo {name}"] = _cdf(ours)
                curves[f"ZeRO-3, Topo {name}"] = _cdf(theirs)
    chart = Curves(
        "fig7", f"Bandwidth of transfers, {setup.scaled}", "GB/s", "share of bytes at up to this", curves, steps=True
    )
    return Finding(
        "fig7",
        "bandwidth at which bytes move",
        "more than half of Mobius's bytes move at over 12 GB/s of 13.1; most of DeepSpeed's at less than 6.",
        "bytes of every fetch, offload, message and collective, by its bytes over the seconds it was under way; of "
        "a collective what a GPU sends to its neighbour. What waits for transfers with priority is under way all the "
        "while. 'Less than 6' is taken as half of 13.1 GB/s.",
        rows,
        "a transfer that waits for one with priority counts as slow here, and on Topo 4 and Topo 1+3 three or four "
        "GPUs ask one root complex at the same time whatever the mapping.",
        [chart],
    )


def _cdf(trial: Trial) -> list[tuple[float, float]]:
    """(GB/s, share of bytes at up to this rate), thinned to at most 200 points."""
    ranked = sorted(trial.transfers, key=lambda t: t.rate)
    total, seen, points = sum(t.moved_bytes for t in ranked), 0, []
    for transfer in ranked:
        seen += transfer.moved_bytes
        points.append((min(transfer.rate / 1e9, 14.0), seen / total))
    step = max(1, len(points) // 200)
    return [(0.0, 0.0), *points[::step], points[-1]]


def fig8(lab: Lab, setup: Setup) -> Finding:
    """Communication that computation does not hide."""
    bench, rows, most = Bench(lab, setup), [], 0.0
    bars: dict[str, list[float | None]] = {}
    for name in setup.topologies:
        for model in setup.models:
            trials = bench.mobius(model, topology(name)), bench.zero3(model, topology(name))
            own, other = (exposed_share(trial) if trial.timeline else None for trial in trials)
            bars.setdefault(f"Mobius, {name}", []).append(own)
            bars.setdefault(f"ZeRO-3, {name}", []).append(other)
            if own is not None and other is not None:
                shares = f"points less (ZeRO-3 {other:.0%}, Mobius {own:.0%})"
                rows.append(number(f"{model}, Topo {name}", shares, 100 * (other - own), "", 0))
                most = max(most, other - own)
    rows.append(near("all", "largest reduction, points", 100 * most, 46, "", 0))
    chart = Bars("fig8", "Communication not hidden by computation", "share of the step", list(setup.models), bars)
    return Finding(
        "fig8",
        "communication that is not overlapped",
        "its share of the step falls by up to 46%.",
        "share of the step in which a GPU moves something and computes nothing, the mean over GPUs; reduction in "
        "points of percent.",
        rows,
        "the part of a step in which the CPU updates weights is neither communication nor computation of a GPU; it "
        "lowers both shares. The paper does not say whether its 46% are points or a ratio.",
        [chart],
    )


def fig9(lab: Lab, setup: Setup) -> Finding:
    """MIP partition against maximum-stage and minimum-stage."""
    bench, hardware, rows, groups = Bench(lab, setup), topology("2+2"), [], []
    bars: dict[str, list[float | None]] = {"maximum-stage": [], "minimum-stage": []}
    best = 0.0
    for model in setup.partitioned:
        for micro_batch in setup.micro_batches:
            mip = bench.mobius(model, hardware, micro_batch)
            if mip.step_s is None:
                continue
            where = f"{model}, micro-batch {micro_batch}"
            groups.append(f"{model}\nx{micro_batch}")
            for name in bars:
                other = bench.mobius(model, hardware, micro_batch, partition=f"partition-{name.replace('imum', '')}")
                ratio = other.step_s / mip.step_s if other.step_s else None
                bars[name].append(ratio)
                if ratio is not None:
                    what = f"{name} / MIP ({other.step_s:.2f} s / {mip.step_s:.2f} s; {len(other.stages)} / "
                    what += f"{len(mip.stages)} stages)"
                    rows.append(between(where, what, ratio, 0.995, float("inf"), "x"))
                    best = max(best, 1 - 1 / ratio)
    rows.append(near("all", "largest reduction of the step", 100 * best, 51, "%", 0))
    rows += _one_block(bench, setup)
    chart = Bars("fig9", "Step time by partition / MIP partition, Topo 2+2", "times the MIP's", groups, bars)
    return Finding(
        "fig9",
        "MIP partition against maximum-stage and minimum-stage",
        "the MIP partition takes up to 51% less time; minimum-stage equals it where one block fills a GPU; "
        "maximum-stage is worst in most cases.",
        "simulated steps with cross mapping. 'Never slower' is read as a ratio of at least 0.995.",
        rows,
        "how bad maximum-stage is depends on how much of a GPU a stage may fill. With fp16 weights and gradients a "
        "block of 9216 takes 4 bytes a parameter, so that several fit a GPU; by the paper one block fills it, which "
        "takes about 16. The last rows give the GPU so little memory that one block fills it, as in the paper.",
        [chart],
    )


def _one_block(bench: Bench, setup: Setup) -> list[Row]:
    """On GPUs that hold one block and little more, the MIP's stages are those of minimum-stage."""
    model = setup.partitioned[-1]
    case = bench.case(model, topology("2+2"))
    blocks = bench.lab.draft(case, topology("2+2"), Coarsen()).blocks
    largest = max(blocks, key=lambda b: b.param_bytes)
    cost = largest.cost
    need = 2 * largest.param_bytes + cost.kept_bytes + max(cost.backward_peak_bytes, cost.forward_peak_bytes)
    for share in (1.1, 1.3, 1.6, 2.0):  # inputs and embeddings need more than the block
        small = topology("2+2").with_(memory=int(share * need / 0.94))
        mip, least = (bench.mobius(model, small, partition=name) for name in (MIP, "partition-min-stage"))
        if mip.step_s and least.step_s:
            where = f"{model}, GPUs of {small.devices[0].memory_bytes / 2**30:.1f} GiB"
            return [near(where, "minimum-stage / MIP", least.step_s / mip.step_s, 1.0, "x")]
    return []


def fig10(lab: Lab, setup: Setup) -> Finding:
    """Cross mapping against sequential mapping."""
    bench, hardware, rows, groups = Bench(lab, setup), topology("4+4"), [], []
    bars: dict[str, list[float | None]] = {"MIP partition": [], "maximum-stage partition": []}
    for model in setup.mapped:
        for micro_batch in setup.micro_batches:
            groups.append(f"{model}\nx{micro_batch}")
            for name, partition in zip(bars, (MIP, "partition-max-stage")):
                cross, plain = (
                    bench.mobius(model, hardware, micro_batch, partition=partition, mapping=f"map-{kind}")
                    for kind in ("cross", "sequential")
                )
                if cross.step_s is None or plain.step_s is None:
                    bars[name].append(None)
                    continue
                where = f"{model}, micro-batch {micro_batch}, {name}"
                less = 100 * (1 - cross.step_s / plain.step_s)
                bars[name].append(less)
                rows.append(between(where, f"less time ({len(cross.stages)} stages)", less, 11.3, 18.1, "%", 1))
                fast = [100 * share_of_bytes(trial, FAST) for trial in (cross, plain)]
                rows.append(
                    between(where, "points more bytes above 12 GB/s", fast[0] - fast[1], 0, float("inf"), "", 0)
                )
    chart = Bars(
        "fig10", "Cross mapping against sequential, 8 GPUs (4+4)", "% less time", groups, bars, band=(11.3, 18.1)
    )
    return Finding(
        "fig10",
        "cross mapping against sequential mapping (figures 10 and 11)",
        "11.3% to 18.1% less time a step on 8 GPUs, less so for large micro-batches and blocks; more bytes move fast.",
        "simulated steps of equal partitions, fetches of earlier stages before those of later ones. More bytes above "
        "12 GB/s: figure 11.",
        rows,
        "cross mapping helps where neighbouring stages upload at the same time. A partition into many small stages, "
        "which the MIP prefers here, spreads its uploads and leaves little to gain; one into few large stages leaves "
        "more. Priority by stage order takes a part of the gain by itself.",
        [chart],
    )


def fig12(lab: Lab, setup: Setup) -> Finding:
    """What planning costs."""
    bench, hardware, rows, profiles = Bench(lab, setup), topology("1+3"), [], {}
    for model in setup.models:
        trial = bench.mobius(model, hardware)
        blocks = lab.draft(bench.case(model, hardware), hardware, Coarsen()).blocks
        solve_s, map_s = (trial.planning_cpu_s[name] for name in ("partition-mip", "map-cross"))
        rows.append(between(model, "MIP partition, processor time", solve_s, 0, 12, " s", 1))
        rows.append(between(model, "cross mapping, processor time", map_s, 0, 1, " s", 3))
        distinct_s, all_s = profile_s(blocks, hardware, "fp16", repeats=10)
        profiles[model] = distinct_s
        count = len({b.hash for b in blocks})
        rows.append(number(model, f"profile, {count} distinct blocks of {len(blocks)}, simulated", distinct_s, " s"))
        rows.append(number(model, "profile, every block, simulated", all_s, " s"))
    if {"8B", "15B"} <= profiles.keys():
        rows.append(near("15B / 8B", "profile, distinct blocks", profiles["15B"] / profiles["8B"], 1.0, "x"))
    return Finding(
        "fig12",
        "what planning costs, Topo 1+3",
        "the MIP is solved in up to several seconds, more for small blocks and many layers; profiling depends on the "
        "distinct layers alone, so that 8B and 15B take about as long.",
        "processor seconds of the two passes on the machine that made this page (a deadline of 12 s is what 'several "
        "seconds' is taken to mean); profiling as simulated GPU seconds of 10 repetitions, weights uploaded first.",
        rows,
        "the two models' blocks differ in size (4096 and 5120) and micro-batch (2 and 1); the paper compares seconds "
        "that hold start-up costs, too.",
    )


def fig14(lab: Lab, setup: Setup) -> Finding:
    """From 2 to 8 GPUs."""
    bench, rows = Bench(lab, setup), []
    curves: dict[str, list[tuple[float, float]]] = {"paper: more than linear": []}
    for label, narrow in (("slots of x16", False), ("slots of x8", True)):
        base = None
        for name in setup.scaling:
            hardware = topology(name)
            if narrow:
                half = hardware.devices[0].h2d_bandwidth / 2
                hardware = hardware.with_(h2d_bandwidth=half, d2h_bandwidth=half)
            step_s = bench.mobius(setup.scaled, hardware, 1).step_s
            if step_s is None:
                continue
            rate, gpus = hardware.num_devices / step_s, hardware.num_devices
            base = base or rate / gpus
            where = f"{gpus} GPUs ({name}), {label}"
            curves.setdefault(label, []).append((gpus, rate / base))
            if gpus > 2:
                rows.append(between(where, "throughput / linear", rate / base / gpus, 1.0, float("inf"), "x"))
    curves["paper: more than linear"] = [(n, n) for n, _ in next(iter(curves.values()), [])] or [(2, 2), (8, 8)]
    chart: Chart = Curves(
        "fig14",
        f"Throughput of {setup.scaled} over that of 2 GPUs, twofold",
        "GPUs",
        "times one of 2 GPUs",
        curves,
        True,
    )
    return Finding(
        "fig14",
        f"scaling of {setup.scaled} from 2 to 8 GPUs",
        "above linear; a little less where the GPUs cannot be halved between two root complexes.",
        "rows a second, as many micro-batches of 1 as GPUs, over the rate of 2 GPUs times N/2.",
        rows,
        "weights move once a step whatever the batch, so more GPUs, with more micro-batches, spread that cost; but two "
        "root complexes stay two. Above linear takes a GPU that cannot fill its root complex alone: with the x8 slots "
        "that section 4 names. The CPU's optimizer takes as long for 2 GPUs as for 8, which also helps larger batches.",
        [chart],
    )


def fig15(lab: Lab, setup: Setup) -> Finding:
    """A rented server with NVLink."""
    bench, rows = Bench(lab, setup), []
    rented, own = Hardware.preset("mobius-v100", ordered_fetches=True), topology("2+2")
    bars: dict[str, list[float | None]] = {"ZeRO-3, V100": [], "Mobius, V100": [], "Mobius, 3090 Ti": []}
    price = 0.57 / 1.42  # of an hour, from the paper's own two numbers: it does not name the rent
    for model in setup.rented:
        trials = [bench.zero3(model, rented, 2), bench.mobius(model, rented, 2), bench.mobius(model, own, 2)]
        theirs, there, here = (trial.step_s for trial in trials)
        for values, step_s in zip(bars.values(), (theirs, there, here)):
            values.append(step_s)
        rows += [number(model, f"step, {name}", values[-1], " s") for name, values in bars.items()]
        if theirs and there:
            rows.append(between(model, "Mobius / ZeRO-3, both V100", there / theirs, 1.0, float("inf"), "x"))
        if theirs and here:
            rows.append(near(model, "Mobius 3090 Ti / ZeRO-3 V100, time", here / theirs, 1.42, "x"))
            rows.append(near(model, "the same, price of a step", price * here / theirs, 0.57, "x"))
    chart = Bars("fig15", "Step time, rented V100 server against 3090 Ti", "seconds", list(setup.rented), bars)
    return Finding(
        "fig15",
        "a rented server with NVLink",
        "on 4 x V100 with NVLink Mobius is slower than DeepSpeed; Mobius on 3090 Ti takes 42% more time and 43% less "
        "money than DeepSpeed on V100.",
        "simulated steps, micro-batch 2. Price: the paper's two numbers imply that an hour of the 3090 Ti server costs "
        f"{price:.2f} of an hour of the V100 server; that ratio is taken as given.",
        rows,
        "NVLink carries only what goes from GPU to GPU. Every weight still comes over PCIe from DRAM and every "
        "gradient goes back, and the rented server's CPU has a third of the DRAM channels for Adam, which both sides "
        "wait for. V100s of 16 GB also hold smaller stages.",
        [chart],
    )


def sensitivity(lab: Lab, setup: Setup) -> Finding:
    """How the headline moves with each assumption."""
    bench, rows, base = Bench(lab, setup), [], topology("2+2")
    device, host = base.devices[0], base.hosts[0]
    variants: list[tuple[str, Hardware]] = [
        ("as assumed", base),
        ("matrix products at 45 TFLOPS", base.with_(achieved_fraction=45e12 / device.peak_flops["fp16"])),
        ("Adam on the CPU 3 times as fast", base.with_(optimizer_params_per_s=3 * host.optimizer_params_per_s)),
        ("Adam on the CPU 100 times as fast", base.with_(optimizer_params_per_s=100 * host.optimizer_params_per_s)),
        ("slots of x8", base.with_(h2d_bandwidth=device.h2d_bandwidth / 2, d2h_bandwidth=device.d2h_bandwidth / 2)),
        ("1 ms to begin a transfer", base.with_(link_latency_s=1e-3)),
    ]
    for name, hardware in variants:
        ours, theirs = bench.mobius(setup.scaled, hardware), bench.zero3(setup.scaled, hardware)
        if ours.step_s and theirs.step_s:
            steps = f"ZeRO-3 / Mobius ({theirs.step_s:.2f} s / {ours.step_s:.2f} s)"
            rows.append(between(f"{setup.scaled}, {name}", steps, theirs.step_s / ours.step_s, 3.8, 5.1, "x"))
    return Finding(
        "sensitivity",
        "the ratio of figure 5 under other assumptions, Topo 2+2",
        "3.8x to 5.1x.",
        "as figure 5, one assumption changed at a time.",
        rows,
        "each row says what the ratio hangs on; none of these is used elsewhere.",
    )


FINDINGS: dict[str, Callable[[Lab, Setup], Finding]] = {
    f.__name__: f for f in (table3, fig5, fig6, fig7, fig8, fig9, fig10, fig12, fig14, fig15, sensitivity)
}
LEFT_OUT = (
    ("figure 13", "loss of GPT-2 on WikiText-2: a matter of values, not of time. A plan trains as one device does: "
     "`penstock check` compares losses and weights with plain PyTorch."),
    ("figure 16", "the bandwidth of figure 15's transfers; its text gives no number."),
)  # fmt: skip


def assumptions(lab: Lab, setup: Setup) -> list[tuple[str, str]]:
    """Out of the preset and the case, so that they say what was simulated."""
    hardware = topology("2+2")
    device, host = hardware.devices[0], hardware.hosts[0]
    case = Bench(lab, setup).case(setup.scaled, hardware)
    blocks = lab.draft(case, hardware, Coarsen()).blocks
    return [
        ("GPU memory", f"{device.memory_bytes / 2**30:.0f} GiB, {device.usable_fraction:.0%} of it usable"),
        (
            "GPU time",
            f"matrix products at {device.achieved_flops('fp16') / 1e12:.0f} TFLOPS (85% of 80), plus every call's "
            f"traffic at {device.memory_bandwidth / 1e9:.0f} GB/s, plus {device.op_overhead_s * 1e6:.0f} us a call; "
            f"together {_achieved(blocks, hardware) / 1e12:.0f} TFLOPS over the blocks of {setup.scaled}",
        ),
        (
            "links",
            f"{device.h2d_bandwidth / 1e9:.1f} GB/s per direction for each GPU and for each root complex, shared "
            f"fairly; {device.link_latency_s * 1e6:.0f} us to begin a transfer; no P2P: from GPU to GPU through "
            "DRAM, both links at the same time",
        ),
        (
            "priority",
            "messages and collectives before weights and offloaded gradients; weights by the turn of their stage "
            "(section 3.3); the rest in fair shares",
        ),
        (
            "optimizer",
            f"AdamW on the CPU at {host.optimizer_params_per_s / 1e9:.1f} B parameters/s for the whole host "
            f"({format_seconds(1e9 / host.optimizer_params_per_s)} for 1e9), once all gradients are "
            "in DRAM and none has overflowed (fp16); the step ends when the last weight is updated",
        ),
        (
            "bytes of a parameter",
            "2 for its weight and 2 for its gradient in fp16 on the GPU; 2 + 4 + 8 in DRAM (fp16, fp32 master, states)",
        ),
        ("batch", f"as many micro-batches as GPUs, of {setup.sequence} tokens; every stage computed again in backward"),
        ("Mobius", f"`{mobius()}`; stages always come from DRAM, also where all would fit the GPUs"),
        ("ZeRO-3", f"`{ZERO3}`: each GPU one micro-batch, weights gathered per block forward and backward, gradients "
         "reduced to shards, shards updated on the CPU, with the same links, rates and accounting"),
    ]  # fmt: skip


def _achieved(blocks: Sequence[Block], hardware: Hardware) -> float:
    """FLOP/s of one forward and backward of all blocks on one device."""
    flops = sum(b.cost.forward_flops + b.cost.backward_flops for b in blocks)
    return flops / sum(block_seconds(b, hardware.devices[0], "fp16").both_s for b in blocks)
