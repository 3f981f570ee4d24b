"""The tables and figures of Mobius (ASPLOS 2023, section 4) that a simulation can reproduce.

Mobius runs as in its paper: stages always come from DRAM and are recomputed in backward, and there are as many
micro-batches as GPUs. The rival is ZeRO-3 with CPU offload as programs of our own, on the same machine under the same
assumptions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..ir.machine.hardware import Hardware
from ..ir.units import format_seconds
from ..passes.graph.blocks import Block
from ..passes.stage_time import block_seconds
from .experiments import Experiments, said_memory, said_traffic, sizes_table
from .figures import Bars, Curves
from .lab import SimulatedStep, Workload, exposed_share, profile_s, share_of_bytes
from .report import Finding
from .table import AT_LEAST_ONE, INFINITE, SECONDS, FigureTable

FAST, HALF = 12e9, 6.6e9  # bytes/s: "more than 12 GB/s", and half of the 13.1 GB/s of a root complex
FASTER = (3.8, 5.1)  # times as fast as ZeRO-3
SWAPPED = "schedule-pipeline, insert-remat{always=true}, insert-fetch{swap=true}, insert-optimizer"
MIP = "partition-mip{deadline_s=4, swap=true}"
ZERO3 = "zero3-offload"
GPIPE = "gpipe"


def mobius(partition: str = MIP, mapping: str = "map-cross") -> str:
    """The pipeline of Mobius with this partition and mapping."""
    return f"coarsen, {partition}, {mapping}, {SWAPPED}"


def topology(name: str) -> Hardware:
    """A machine that orders its fetches as section 3.3 does."""
    return Hardware.preset(f"mobius-topo{name}", ordered_fetches=True)


class Mobius(Experiments):
    """Mobius's setup. `models` maps the paper's names to (our name, the micro-batch of table 3)."""

    title = "Mobius (ASPLOS 2023) in simulation"
    left_out = {
        "figure 13": "loss of GPT-2 on WikiText-2: a matter of values, not of time. A plan trains as one device does: "
        "`penstock check` compares losses and weights with plain PyTorch.",
        "figure 16": "the bandwidth of figure 15's transfers; its text gives no number.",
    }
    models: Mapping[str, tuple[str, int]] = {
        "3B": ("mobius-3b", 2), "8B": ("mobius-8b", 2), "15B": ("mobius-15b", 1), "51B": ("mobius-51b", 1)
    }  # fmt: skip
    presets = ("mobius-topo4", "mobius-topo2+2", "mobius-topo1+3", "mobius-topo4+4", "mobius-v100")
    billions: Mapping[str, float] = {"3B": 3, "8B": 8, "15B": 15, "51B": 51}  # parameters according to table 3
    partitioned: Sequence[str] = ("3B", "15B", "51B")  # of figure 9
    mapped: Sequence[str] = ("8B", "15B")  # of figure 10
    micro_batches: Sequence[int] = (1, 2, 4)  # of figures 9 and 10
    scaled = "15B"
    rented: Sequence[str] = ("8B", "15B")
    topologies: Sequence[str] = ("4", "2+2", "1+3")
    scaling: Sequence[str] = ("1+1", "2+1", "2+2", "3+2", "3+3", "4+3", "4+4")

    def small(self) -> Iterator[tuple[str, Workload, Hardware, str]]:
        work, hardware = self.workload("gpt2:n_layer=4,n_embd=1024,n_head=8,vocab_size=1024", 1, 4), topology("2+2")
        yield "Mobius", work, hardware, mobius("partition-balanced{stages=6}")
        yield "ZeRO-3", work, hardware, ZERO3

    def work(self, model: str, hardware: Hardware, micro_batch: int | None = None) -> Workload:
        name, usual = self.models[model]
        return self.workload(name, micro_batch or usual, hardware.num_devices)

    def mobius(self, model: str, hardware: Hardware, micro_batch: int | None = None, **line: str) -> SimulatedStep:
        return self.lab.trial(self.work(model, hardware, micro_batch), hardware, mobius(**line))

    def zero3(self, model: str, hardware: Hardware, micro_batch: int | None = None) -> SimulatedStep:
        return self.lab.trial(self.work(model, hardware, micro_batch), hardware, ZERO3)

    def rivals(self, model: str, hardware: Hardware) -> tuple[SimulatedStep, SimulatedStep]:
        return self.mobius(model, hardware), self.zero3(model, hardware)

    def assumptions(self) -> dict[str, str]:
        """The assumptions of all figures, taken from the preset and the workload that are simulated."""
        hardware = topology("2+2")
        device, host = hardware.devices[0], hardware.hosts[0]
        blocks = self.blocks(self.work(self.scaled, hardware), hardware)
        return {
            "GPU memory": said_memory(device),
            "GPU time": f"matrix products at {device.achieved_flops('fp16') / 1e12:.0f} TFLOPS (85% of 80), "
            f"{said_traffic(device)}; together {_achieved(blocks, hardware) / 1e12:.0f} TFLOPS over the blocks of "
            f"{self.scaled}",
            "links": f"{device.h2d_bandwidth / 1e9:.1f} GB/s per direction for each GPU and for each root complex, "
            f"shared fairly; {device.link_latency_s * 1e6:.0f} us to begin a transfer; no P2P: from GPU to GPU through "
            "DRAM, both links at the same time",
            "priority": "messages and collectives before weights and offloaded gradients; weights by the turn of their "
            "stage (section 3.3); the rest in fair shares",
            "optimizer": f"AdamW on the CPU at {host.optimizer_params_per_s / 1e9:.1f} B parameters/s for the whole "
            f"host ({format_seconds(1e9 / host.optimizer_params_per_s)} for 1e9), once all gradients are "
            "in DRAM and none has overflowed (fp16); the step ends when the last weight is updated",
            "bytes of a parameter": "2 for its weight and 2 for its gradient in fp16 on the GPU; 2 + 4 + 8 in DRAM "
            "(fp16, fp32 master, states)",
            "batch": f"as many micro-batches as GPUs, of {self.sequence} tokens; every stage computed again in "
            "backward",
            "Mobius": f"`{mobius()}`; stages always come from DRAM, also where all would fit the GPUs",
            "ZeRO-3": f"`{ZERO3}`: each GPU one micro-batch, weights gathered per block forward and backward, "
            "gradients reduced to shards, shards updated on the CPU, with the same links, rates and accounting",
        }


def _achieved(blocks: Sequence[Block], hardware: Hardware) -> float:
    """FLOP/s of one forward and backward of all blocks on one device."""
    flops = sum(b.cost.forward_flops + b.cost.backward_flops for b in blocks)
    return flops / sum(block_seconds(b, hardware.devices[0], "fp16").both_s for b in blocks)


def table3(paper: Mobius) -> Finding:
    """Table 3: the models."""
    table = sizes_table({model: name for model, (name, _) in paper.models.items()}, paper.billions)
    return Finding(
        "table3",
        "the models",
        "3 B, 8 B, 15 B and 51 B parameters with 64, 40, 40 and 50 layers of 2048, 4096, 5120 and 9216.",
        "every parameter once, the output layer tied to the token embedding, vocabulary 50257.",
        table,
        "the paper's 15B has 12.8 B parameters by its own dimensions (12 x 40 x 5120^2 and the embeddings). Its 80 "
        "heads do not divide 9216; the 51B model here has 72.",
    )


def fig5(paper: Mobius) -> Finding:
    """Figure 5: step time against ZeRO-3 with CPU offload."""
    table = FigureTable()
    ratios: dict[str, list[float | None]] = {name: [] for name in paper.topologies}
    for model in paper.models:
        times = []
        for name in paper.topologies:
            ours, theirs = (step.step_s for step in paper.rivals(model, topology(name)))
            ratios[name].append(table.ratio(f"{model}, Topo {name}", "ZeRO-3 / Mobius", theirs, ours, FASTER))
            times += [ours] if ours else []
        if not times:
            continue
        table.ratio(model, "Mobius, slowest / fastest topology", max(times), min(times), 1.0, said="")
        if {"4", "2+2"} <= ratios.keys():
            more, less = ratios["4"][-1], ratios["2+2"][-1]
            table.ratio(model, "gain on Topo 4 / gain on Topo 2+2", more, less, AT_LEAST_ONE, said="")
        _gpipe(table, paper, model)
    chart = Bars(
        "fig5", "Step time, ZeRO-3 offload / Mobius", "times as fast", list(paper.models),
        {f"Topo {name}": values for name, values in ratios.items()}, band=FASTER,
    )  # fmt: skip
    return Finding(
        "fig5",
        "time of a step",
        "3.8x to 5.1x less than DeepSpeed ZeRO-3 with CPU offload, nearly the same on all topologies, with a larger "
        "gain the more contention there is; GPipe fits the 3B model alone.",
        "simulated seconds of a whole step, the optimizer's part included, as many micro-batches as GPUs on both "
        "sides.",
        table,
        "the step holds Adam on the CPU, which both sides run at the same rate and the paper does not report; it is a "
        "large part of Mobius's step and lowers the ratio (see the sensitivity below). Our ZeRO-3 fetches ahead, "
        "gathers in a ring that uses both directions of a link, and loses no time between its calls; DeepSpeed's "
        "achieves less. Where one root complex feeds all GPUs (Topo 4), uploads and not computation bound Mobius, so "
        "that its time does depend on the topology.",
        [chart],
    )


def _gpipe(table: FigureTable, paper: Mobius, model: str) -> None:
    hardware = topology("2+2")
    step = paper.lab.trial(paper.work(model, hardware), hardware, GPIPE)
    swaps = any(t.op == "fetch" for t in step.transfers)
    fits = "fits" if step.timeline and not swaps else "out of memory"
    table.words(model, "GPipe, all on the GPUs", "fits" if model == "3B" else "out of memory", fits)


def fig6(paper: Mobius) -> Finding:
    """Figure 6: bytes moved in a step."""
    table, hardware = FigureTable(), topology("2+2")
    bars: dict[str, list[float | None]] = {"Mobius": [], "ZeRO-3 offload": [], "Mobius, to the GPUs": []}
    bars["ZeRO-3, to the GPUs"] = []
    for model in paper.models:
        for name, step, claim in zip(bars, paper.rivals(model, hardware), (1.8, 7.3)):
            if step.timeline is None:
                continue
            down, up = (moved / step.model_bytes for moved in step.device_bytes)
            table.add(model, f"{name}, both directions / model", down + up, "x", claim=claim)
            table.add(model, f"{name}, to the GPUs / model", down, "x")
            bars[name].append(down + up)
            bars[f"{name.split()[0]}, to the GPUs"].append(down)
    chart = Bars("fig6", "Bytes over the GPUs' links a step / model size", "model sizes", list(paper.models), bars)
    return Finding(
        "fig6",
        "bytes moved in a step",
        "about 1.8x the model's size against 7.3x (Topo 2+2); by equations 1 and 2 in theory 1.5x and 1.5N = 6x.",
        "every byte that passes a GPU's own PCIe link, in either direction, over the model's size in fp32. Without P2P "
        "what goes from GPU to GPU passes two such links. The count towards the GPUs alone stands beside it.",
        table,
        "the paper does not say how it counts. Equation 2 counts each copy of weights and gradients once, 1.5N; "
        "without P2P a gathered or reduced shard passes DRAM, and each copy is seen on two links: between the two "
        "counts lies the paper's 7.3x. Mobius adds its activations, staged through DRAM, to the 1.5x of equation 1, "
        "and the stages whose weights are still there when backward begins are fetched once instead of twice.",
        [chart],
    )


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
            table.add(where, "Mobius, bytes at more than 12 GB/s", 100 * fast, "%", 0, most)
            table.add(where, "ZeRO-3, bytes at up to 6.6 GB/s", 100 * slow, "%", 0, most)
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


def _cdf(trial: SimulatedStep) -> list[tuple[float, float]]:
    """(GB/s, share of bytes at up to this rate), thinned to at most 200 points."""
    ranked = sorted(trial.transfers, key=lambda t: t.rate)
    total, seen, points = sum(t.moved_bytes for t in ranked), 0, []
    for transfer in ranked:
        seen += transfer.moved_bytes
        points.append((min(transfer.rate / 1e9, 14.0), seen / total))
    step = max(1, len(points) // 200)
    return [(0.0, 0.0), *points[::step], points[-1]]


def fig8(paper: Mobius) -> Finding:
    """Figure 8: communication that computation does not hide."""
    table, most = FigureTable(), 0.0
    bars: dict[str, list[float | None]] = {}
    for name in paper.topologies:
        for model in paper.models:
            own, other = (exposed_share(s) if s.timeline else None for s in paper.rivals(model, topology(name)))
            bars.setdefault(f"Mobius, {name}", []).append(own)
            bars.setdefault(f"ZeRO-3, {name}", []).append(other)
            if own is not None and other is not None:
                shares = f"points less (ZeRO-3 {other:.0%}, Mobius {own:.0%})"
                table.add(f"{model}, Topo {name}", shares, 100 * (other - own), "", 0)
                most = max(most, other - own)
    table.add("all", "largest reduction, points", 100 * most, "", 0, 46)
    chart = Bars("fig8", "Communication not hidden by computation", "share of the step", list(paper.models), bars)
    return Finding(
        "fig8",
        "communication that is not overlapped",
        "its share of the step falls by up to 46%.",
        "share of the step in which a GPU moves something and computes nothing, the mean over GPUs; reduction in "
        "points of percent.",
        table,
        "the part of a step in which the CPU updates weights is neither communication nor computation of a GPU; it "
        "lowers both shares. The paper does not say whether its 46% are points or a ratio.",
        [chart],
    )


def fig9(paper: Mobius) -> Finding:
    """Figure 9: the MIP partition against maximum-stage and minimum-stage."""
    table, hardware, groups = FigureTable(), topology("2+2"), []
    bars: dict[str, list[float | None]] = {"maximum-stage": [], "minimum-stage": []}
    for model in paper.partitioned:
        for micro_batch in paper.micro_batches:
            mip = paper.mobius(model, hardware, micro_batch)
            groups.append(f"{model}\nx{micro_batch}")
            for name, ratios in bars.items():
                other = paper.mobius(model, hardware, micro_batch, partition=f"partition-{name.replace('imum', '')}")
                where, said = (
                    f"{model}, micro-batch {micro_batch}",
                    f"{SECONDS}; {len(other.stages)} / {len(mip.stages)} stages",
                )
                ratios.append(table.ratio(where, f"{name} / MIP", other.step_s, mip.step_s, (0.995, INFINITE), said))
    best = max(1 - 1 / ratio for ratios in bars.values() for ratio in ratios if ratio)
    table.add("all", "largest reduction of the step", 100 * best, "%", 0, 51)
    _one_block(table, paper)
    chart = Bars("fig9", "Step time by partition / MIP partition, Topo 2+2", "times the MIP's", groups, bars)
    return Finding(
        "fig9",
        "MIP partition against maximum-stage and minimum-stage",
        "the MIP partition takes up to 51% less time; minimum-stage equals it where one block fills a GPU; "
        "maximum-stage is worst in most cases.",
        "simulated steps with cross mapping. 'Never slower' is read as a ratio of at least 0.995.",
        table,
        "how bad maximum-stage is depends on how much of a GPU a stage may fill. With fp16 weights and gradients a "
        "block of 9216 takes 4 bytes a parameter, so that several fit a GPU; by the paper one block fills it, which "
        "takes about 16. The last rows give the GPU so little memory that one block fills it, as in the paper.",
        [chart],
    )


def _one_block(table: FigureTable, paper: Mobius) -> None:
    """Add a row for GPUs that hold little more than one block, on which the MIP's stages equal minimum-stage's."""
    model = paper.partitioned[-1]
    largest = max(paper.blocks(paper.work(model, topology("2+2")), topology("2+2")), key=lambda b: b.param_bytes)
    cost = largest.cost
    need = 2 * largest.param_bytes + cost.kept_bytes + max(cost.backward_peak_bytes, cost.forward_peak_bytes)
    for share in (1.1, 1.3, 1.6, 2.0):  # inputs and embeddings need more than the block
        small = topology("2+2").with_(memory=int(share * need / 0.94))
        mip, least = (paper.mobius(model, small, partition=name) for name in (MIP, "partition-min-stage"))
        if mip.step_s and least.step_s:
            where = f"{model}, GPUs of {small.devices[0].memory_bytes / 2**30:.1f} GiB"
            table.ratio(where, "minimum-stage / MIP", least.step_s, mip.step_s, 1.0, said="")
            return


def fig10(paper: Mobius) -> Finding:
    """Figures 10 and 11: cross mapping against sequential mapping."""
    table, hardware, groups, band = FigureTable(), topology("4+4"), [], (11.3, 18.1)
    bars: dict[str, list[float | None]] = {"MIP partition": [], "maximum-stage partition": []}
    for model in paper.mapped:
        for micro_batch in paper.micro_batches:
            groups.append(f"{model}\nx{micro_batch}")
            for name, partition in zip(bars, (MIP, "partition-max-stage")):
                cross, plain = (
                    paper.mobius(model, hardware, micro_batch, partition=partition, mapping=f"map-{kind}")
                    for kind in ("cross", "sequential")
                )
                less = 100 * (1 - cross.step_s / plain.step_s) if cross.step_s and plain.step_s else None
                bars[name].append(less)
                if less is None:
                    continue
                where = f"{model}, micro-batch {micro_batch}, {name}"
                table.add(where, f"less time ({len(cross.stages)} stages)", less, "%", 1, band)
                fast = [100 * share_of_bytes(step, FAST) for step in (cross, plain)]
                table.add(where, "points more bytes above 12 GB/s", fast[0] - fast[1], "", 0, (0, INFINITE))
    chart = Bars("fig10", "Cross mapping against sequential, 8 GPUs (4+4)", "% less time", groups, bars, band)
    return Finding(
        "fig10",
        "cross mapping against sequential mapping (figures 10 and 11)",
        "11.3% to 18.1% less time a step on 8 GPUs, less so for large micro-batches and blocks; more bytes move fast.",
        "simulated steps of equal partitions, fetches of earlier stages before those of later ones. More bytes above "
        "12 GB/s: figure 11.",
        table,
        "cross mapping helps where neighbouring stages upload at the same time. A partition into many small stages, "
        "which the MIP prefers here, spreads its uploads and leaves little to gain; one into few large stages leaves "
        "more. Priority by stage order takes a part of the gain by itself.",
        [chart],
    )


def fig12(paper: Mobius) -> Finding:
    """Figure 12: the cost of planning."""
    table, hardware, profiles = FigureTable(), topology("1+3"), {}
    for model in paper.models:
        step = paper.mobius(model, hardware)
        blocks = paper.blocks(paper.work(model, hardware), hardware)
        solve_s, map_s = (step.planning_cpu_s[name] for name in ("partition-mip", "map-cross"))
        table.add(model, "MIP partition, processor time", solve_s, " s", 1, (0, 12))
        table.add(model, "cross mapping, processor time", map_s, " s", 3, (0, 1))
        profiles[model], all_s = profile_s(blocks, hardware, "fp16", repeats=10)
        count = len({b.hash for b in blocks})
        table.add(model, f"profile, {count} distinct blocks of {len(blocks)}, simulated", profiles[model], " s")
        table.add(model, "profile, every block, simulated", all_s, " s")
    if {"8B", "15B"} <= profiles.keys():
        table.ratio("15B / 8B", "profile, distinct blocks", profiles["15B"], profiles["8B"], 1.0, said="")
    return Finding(
        "fig12",
        "what planning costs, Topo 1+3",
        "the MIP is solved in up to several seconds, more for small blocks and many layers; profiling depends on the "
        "distinct layers alone, so that 8B and 15B take about as long.",
        "processor seconds of the two passes on the machine that made this page (a deadline of 12 s is what 'several "
        "seconds' is taken to mean); profiling as simulated GPU seconds of 10 repetitions, weights uploaded first.",
        table,
        "the two models' blocks differ in size (4096 and 5120) and micro-batch (2 and 1); the paper compares seconds "
        "that hold start-up costs, too.",
    )


def fig14(paper: Mobius) -> Finding:
    """Figure 14: scaling from 2 to 8 GPUs."""
    table = FigureTable()
    curves: dict[str, list[tuple[float, float]]] = {"paper: more than linear": []}
    for label, narrow in (("slots of x16", False), ("slots of x8", True)):
        base = None
        for name in paper.scaling:
            hardware = topology(name)
            if narrow:
                half = hardware.devices[0].h2d_bandwidth / 2
                hardware = hardware.with_(h2d_bandwidth=half, d2h_bandwidth=half)
            step_s = paper.mobius(paper.scaled, hardware, 1).step_s
            if step_s is None:
                continue
            rate, gpus = hardware.num_devices / step_s, hardware.num_devices
            base = base or rate / gpus
            curves.setdefault(label, []).append((gpus, rate / base))
            if gpus > 2:
                where = f"{gpus} GPUs ({name}), {label}"
                table.add(where, "throughput / linear", rate / base / gpus, "x", claim=AT_LEAST_ONE)
    curves["paper: more than linear"] = [(n, n) for n, _ in next(iter(curves.values()), [])] or [(2, 2), (8, 8)]
    title = f"Throughput of {paper.scaled} over that of 2 GPUs, twofold"
    chart = Curves("fig14", title, "GPUs", "times one of 2 GPUs", curves, True)
    return Finding(
        "fig14",
        f"scaling of {paper.scaled} from 2 to 8 GPUs",
        "above linear; a little less where the GPUs cannot be halved between two root complexes.",
        "rows a second, as many micro-batches of 1 as GPUs, over the rate of 2 GPUs times N/2.",
        table,
        "weights move once a step whatever the batch, so more GPUs, with more micro-batches, spread that cost; but two "
        "root complexes stay two. Above linear takes a GPU that cannot fill its root complex alone: with the x8 slots "
        "that section 4 names. The CPU's optimizer takes as long for 2 GPUs as for 8, which also helps larger batches.",
        [chart],
    )


def fig15(paper: Mobius) -> Finding:
    """Figure 15: a rented server with NVLink."""
    table = FigureTable()
    rented, own = Hardware.preset("mobius-v100", ordered_fetches=True), topology("2+2")
    bars: dict[str, list[float | None]] = {"ZeRO-3, V100": [], "Mobius, V100": [], "Mobius, 3090 Ti": []}
    price = 0.57 / 1.42  # of an hour, from two numbers of the paper, which does not give the rent
    for model in paper.rented:
        steps = paper.zero3(model, rented, 2), paper.mobius(model, rented, 2), paper.mobius(model, own, 2)
        theirs, there, here = (step.step_s for step in steps)
        for (name, values), step_s in zip(bars.items(), (theirs, there, here)):
            values.append(step_s)
            table.add(model, f"step, {name}", step_s, " s")
        table.ratio(model, "Mobius / ZeRO-3, both V100", there, theirs, AT_LEAST_ONE, said="")
        table.ratio(model, "Mobius 3090 Ti / ZeRO-3 V100, time", here, theirs, 1.42, said="")
        table.ratio(model, "the same, price of a step", price * here if here else None, theirs, 0.57, said="")
    chart = Bars("fig15", "Step time, rented V100 server against 3090 Ti", "seconds", list(paper.rented), bars)
    return Finding(
        "fig15",
        "a rented server with NVLink",
        "on 4 x V100 with NVLink Mobius is slower than DeepSpeed; Mobius on 3090 Ti takes 42% more time and 43% less "
        "money than DeepSpeed on V100.",
        "simulated steps, micro-batch 2. Price: the paper's two numbers imply that an hour of the 3090 Ti server costs "
        f"{price:.2f} of an hour of the V100 server; that ratio is taken as given.",
        table,
        "NVLink carries only what goes from GPU to GPU. Every weight still comes over PCIe from DRAM and every "
        "gradient goes back, and the rented server's CPU has a third of the DRAM channels for Adam, which both sides "
        "wait for. V100s of 16 GB also hold smaller stages.",
        [chart],
    )


def sensitivity(paper: Mobius) -> Finding:
    """The ratio of figure 5 with one assumption changed at a time."""
    table, base = FigureTable(), topology("2+2")
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
        ours, theirs = (step.step_s for step in paper.rivals(paper.scaled, hardware))
        table.ratio(f"{paper.scaled}, {name}", "ZeRO-3 / Mobius", theirs, ours, FASTER)
    return Finding(
        "sensitivity",
        "the ratio of figure 5 under other assumptions, Topo 2+2",
        "3.8x to 5.1x.",
        "as figure 5, one assumption changed at a time.",
        table,
        "each row says what the ratio hangs on; none of these is used elsewhere.",
    )


EXPERIMENTS = Mobius
FITTED: Mapping[str, str] = {}  # a finding, or "finding: setting" -> what of the machine was fitted to it
FINDINGS = (table3, fig5, fig6, fig7, fig8, fig9, fig10, fig12, fig14, fig15, sensitivity)
