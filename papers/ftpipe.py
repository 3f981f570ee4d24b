"""The tables and figures of FTPipe (ATC 2021, section 5) that a simulation can reproduce: times, not accuracies.

Seq-pipe gives each GPU one run of adjacent blocks, Mixed-pipe several runs, in fp32, with everything on the GPUs.
Synchronous pipelines fill and drain once a step and recompute every stage in backward. Asynchronous pipelines fill once
for many mini-batches, and their last stage recomputes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..ir.machine.hardware import Hardware
from ..ir.units import format_bytes
from .experiments import LAYERS, OPERATORS, Experiments, said_memory, said_traffic
from .figures import Bars, Curves
from .lab import SimulatedStep, Workload
from .report import Finding
from .table import SECONDS, FigureRow, FigureTable

REST = "map-round-robin, schedule-pipeline, insert-remat{always=true}, insert-fetch, insert-optimizer"
FREE = "map-cross, schedule-async"
SEQ = ("partition-pipedream", "partition-balanced{stages=devices}", "partition-acyclic")


@dataclass(frozen=True)
class FineTuning:
    """A task: rows of the global batch and of a micro-batch (table 4), tokens in encoder and decoder.

    `speedup` is that of Mixed-pipe over Seq-pipe, both synchronous (table 2); `more` is the ratio of their bytes
    between GPUs (5.3). `asynchronous` is the speedup of asynchronous Mixed-pipe over synchronous Seq-pipe (table 2),
    with the global batch divided into `parts` mini-batches (table 4).
    """

    batch: int
    micro_batch: int
    sequence: int
    targets: int
    speedup: float
    more: float
    asynchronous: float = 0.0
    parts: int = 1


class FtPipe(Experiments):
    """FTPipe's setup: T5 fine-tuned on several tasks."""

    title = "FTPipe (ATC 2021) in simulation"
    left_out = {
        "table 2 and 3, time to accuracy": "hangs on values, not on time; `bench/async_training.py` compares losses "
        "of asynchronous and synchronous fine-tuning of small models.",
        "table 2, GPT-2 1.5B and BERT": "sequential partitions only; the tasks above show what asynchrony gains there.",
        "figures 6, 7, 8": "time to accuracy: a matter of values, not of time. A synchronous plan trains as one "
        "device does: `penstock check` compares losses and weights with plain PyTorch.",
    }
    model = "t5-3b"
    large = "t5-11b"
    shallow = "t5-11b:num_layers=1,num_decoder_layers=1"  # `large` with one layer in each half
    precision, state_bytes = "fp32", 0.0
    tasks: Mapping[str, FineTuning] = {
        "WiC": FineTuning(128, 16, 64, 8, 1.19, 3.31, 2.48, 2),
        "RTE": FineTuning(40, 4, 320, 8, 1.2, 2.5, 2.71, 5),
        "BoolQ": FineTuning(20, 2, 512, 8, 1.08, 2.6, 2.13, 5),
        "MultiRC": FineTuning(8, 1, 512, 8, 1.11, 2.6, 3.32, 2),
    }
    task = "BoolQ"  # of the experiments with a single task
    preset = "ftpipe-2080ti"
    presets = ("ftpipe-2080ti", "mobius-v100")
    stages: Sequence[int] = (8, 16, 24, 32)  # figure 9
    batches: Sequence[tuple[int, int]] = ((4, 1), (8, 1), (4, 2), (8, 2), (10, 2), (5, 4))  # of `large`: count, rows
    volume: tuple[int, Sequence[int]] = (4, (64, 320, 512))  # micro-batch and lengths for section 3.2's bytes
    passing = 128  # the number of micro-batches of a simulated asynchronous pipeline, from its filling to its draining

    @property
    def machine(self) -> Hardware:
        return Hardware.preset(self.preset)

    def small(self) -> Iterator[tuple[str, Workload, Hardware, str]]:
        model = "t5-small:num_layers=2,num_decoder_layers=2,vocab_size=1024"
        work = self.workload(model, 4, 4, 64, 8)
        yield "synchronous", work, self.machine, f"{LAYERS}, partition-balanced{{stages=4}}, {REST}"
        yield "asynchronous", work, self.machine, f"{LAYERS}, partition-mixed{{stages=8, asynchronous=true}}, {FREE}"

    def work(self, task: FineTuning, model: str = "") -> Workload:
        count = task.batch // task.micro_batch
        return self.workload(model or self.model, task.micro_batch, count, task.sequence, task.targets)

    def run(self, work: Workload, hardware: Hardware, partition: str, level: str = LAYERS) -> SimulatedStep:
        return self.lab.trial(work, hardware, f"{level}, {partition}, {REST}")

    def seq(self, work: Workload, hardware: Hardware) -> SimulatedStep:
        """The best of the contiguous partitioners with one stage per GPU; plans entirely on the GPUs come first."""
        return min((self.run(work, hardware, partition) for partition in SEQ), key=_on_gpus_first)

    def mixed(self, work: Workload, hardware: Hardware, stages: int = 0, level: str = LAYERS) -> SimulatedStep:
        options = f"{{stages={stages}}}" if stages else ""
        return self.run(work, hardware, f"partition-mixed{options}", level)

    def asynchronous(self, task: FineTuning, partition: str, level: str = LAYERS, rows: int = 0) -> SimulatedStep:
        """An asynchronous pipeline's trial of a task, with FTPipe's micro-batches or with micro-batches of `rows`."""
        work = self.workload(self.model, rows or task.batch // task.parts, self.passing, task.sequence, task.targets)
        return self.lab.trial(work, self.machine, f"{level}, {partition}, {FREE}")

    def assumptions(self) -> dict[str, str]:
        """The assumptions of all figures, taken from the preset and the setup that are simulated."""
        device = self.machine.devices[0]
        lengths = ", ".join(f"{name} {task.sequence} + {task.targets}" for name, task in self.tasks.items())
        batches = ", ".join(f"{name} {t.batch // t.micro_batch} x {t.micro_batch}" for name, t in self.tasks.items())
        return {
            "GPU memory": said_memory(device),
            "GPU time": f"matrix products at {device.achieved_flops('fp32') / 1e12:.1f} TFLOPS in fp32, "
            f"{said_traffic(device)}",
            "links": f"{device.h2d_bandwidth / 1e9:.1f} GB/s per direction for each GPU and for each of two root "
            "complexes of 4 GPUs, no P2P: through DRAM. The paper says PCIe 3 and nothing else",
            "bytes of a parameter": "4 for its weight, 4 for its gradient; Adafactor's states count as nothing",
            "lengths": f"tokens of question + answer, not given in the paper: {lengths}",
            "batches": f"micro-batches x rows, table 4 for GPipe: {batches}",
            "Seq-pipe": f"one stage a GPU, the best of {', '.join(f'`{p}`' for p in SEQ)}; `{REST}`",
            "Mixed-pipe": "`partition-mixed`, which chooses L itself unless figure 9 asks; the rest the same",
            "asynchronous": f"`partition-mixed{{asynchronous=true}}`, {FREE}; {self.passing} micro-batches at a time",
        }


def on_gpus(trial: SimulatedStep) -> bool:
    """Whether the plan fits with everything on the GPUs, as FTPipe needs it."""
    return trial.timeline is not None and all(t.op != "fetch" for t in trial.transfers)


def sent_bytes(trial: SimulatedStep) -> float:
    """Bytes that one micro-batch sends from GPU to GPU, forward and backward."""
    return sum(t.moved_bytes for t in trial.transfers if t.op == "send") / trial.workload.micro_batches


def slowest_s(trial: SimulatedStep) -> float:
    """Seconds that the busiest GPU computes for one micro-batch."""
    return max(trial.compute_s()) / trial.workload.micro_batches


def table2(paper: FtPipe) -> Finding:
    """Mixed-pipe over Seq-pipe, both synchronous: with two stages per GPU as in the paper, and with its own choice of
    L."""
    table, paper_stages = FigureTable(), 2 * paper.machine.num_devices
    ways = {f"L = {paper_stages}": (OPERATORS, paper_stages), "layers": (LAYERS, paper_stages), "own L": (OPERATORS, 0)}
    bars: dict[str, list[float | None]] = {"paper": [], **{key: [] for key in ways}}
    for name, task in paper.tasks.items():
        seq = paper.seq(paper.work(task), paper.machine)
        bars["paper"].append(task.speedup)
        gains = {}
        for key, (level, stages) in ways.items():
            mixed = paper.mixed(paper.work(task), paper.machine, stages, level)
            claims = (task.speedup, task.more) if level == OPERATORS and stages else (None, None)
            said = f"{SECONDS}; {len(mixed.stages)} stages"
            gain = table.ratio(name, f"Seq-pipe / Mixed-pipe, {key}", seq.step_s, mixed.step_s, claims[0], said)
            bars[key].append(gain)
            if gain is not None:
                gains[key], more = gain, sent_bytes(mixed) / sent_bytes(seq)
                table.add(name, f"the same, bytes between GPUs, {key}", more, "x", claim=claims[1])
        if len(gains) == len(ways) and name == "WiC":
            fine = 100 * (gains[f"L = {paper_stages}"] / gains["layers"] - 1)
            table.add(name, "operators over layers (section 5.6: 1.6%)", fine, "%", 1)
    chart = Bars("table2", "Mixed-pipe over Seq-pipe, synchronous", "times as fast", list(paper.tasks), bars)
    return Finding(
        "table2",
        f"Mixed-pipe over Seq-pipe, {paper.model} on 8 GPUs, synchronous",
        "1.19x (WiC), 1.2x (RTE), 1.08x (BoolQ), 1.11x (MultiRC) the speed, at 2.5x to 3.3x the bytes between GPUs.",
        "simulated steps of one global batch as in table 4 for GPipe, the same micro-batches on both sides; Seq-pipe "
        "is the best of three contiguous partitioners. Mixed-pipe has two stages a GPU (L = 16), as in the paper, of "
        "operators or of layers, or its own choice of L. Bytes: of all messages of one micro-batch.",
        table,
        "the paper does not give the lengths of its rows, on which the imbalance of encoder and decoder hangs. With "
        "one fill and drain a step, P GPUs idle for (P-1)/(M+P-1) of a Seq-pipe's step however even it is, and "
        "several stages a GPU shorten that: this is the larger part of the gain here, and messages are hidden as far "
        "as the links allow, without the overheads of a real run. Of two attempts that are equally balanced ours "
        "takes the one that sends less. Position biases, which grow with the square of the length, pass every border "
        "of both pipes, so that the bytes differ by less than the number of borders does.",
        [chart],
    )


def table2_asynchronous(paper: FtPipe) -> Finding:
    """Asynchronous Mixed-pipe over synchronous Seq-pipe, by the time of an epoch."""
    table, stages = FigureTable(), 2 * paper.machine.num_devices
    mixed = f"L = {stages}"
    ways = {
        mixed: (f"partition-mixed{{stages={stages}, asynchronous=true}}", OPERATORS),
        "Seq-pipe": ("partition-balanced{stages=devices, asynchronous=true}", LAYERS),
    }
    bars: dict[str, list[float | None]] = {"paper": [], **{key: [] for key in ways}}
    for name, task in paper.tasks.items():
        seq = paper.seq(paper.work(task), paper.machine)
        bars["paper"].append(task.asynchronous)
        for key, (partition, level) in ways.items():
            trial = paper.asynchronous(task, partition, level)
            if trial.step_s is None and seq.step_s is not None:
                trial = paper.asynchronous(task, partition, level, task.micro_batch)
            bars[key].append(_add_gain(table, name, key, seq, trial, task.asynchronous if key == mixed else None))
            if key == mixed and bars[key][-1] is not None:
                bound = 1 + (paper.machine.num_devices - 1) / seq.workload.micro_batches
                table.add(name, "no idle time of filling and draining, alone (by arithmetic)", bound, "x")
                busy = max(trial.compute_s()) / (trial.step_s or 1.0)
                table.add(name, "its busiest GPU computes", 100 * busy, "% of the time", 0)
    chart = Bars("table2_asynchronous", "Asynchronous over GPipe's Seq-pipe", "times as fast", list(paper.tasks), bars)
    return Finding(
        "table2_asynchronous",
        f"asynchronous Mixed-pipe over GPipe's Seq-pipe, {paper.model} on 8 GPUs, time of an epoch",
        "2.48x (WiC), 2.71x (RTE), 2.13x (BoolQ), 3.32x (MultiRC).",
        "simulated seconds of a row. GPipe: a global batch as in table 4, the best of three contiguous partitioners. "
        f"Asynchronous: {paper.passing} micro-batches pass, filling and draining included, with the rows that table 4 "
        "has for FTPipe's Mixed-pipe (or, where these do not fit, GPipe's); an update for each; the paper adds up the "
        "gradients of 2 or 5. Mixed-pipe has two stages a GPU (L = 16), of operators, as in the paper; Seq-pipe one. "
        "Stale: updates that the first stage lacks.",
        table,
        "what an asynchronous pipeline gains in a simulation is what a synchronous one loses: (P-1)/M of its time for "
        "filling and draining, the imbalance of its stages, and one stage in P that is computed again; these alone "
        "give less than the paper's figures. The rest of the paper's gain may lie in its rows, of which a micro-batch "
        "has two to four times as many: on a real GPU small matrix products run far below the rate of large ones, here "
        "every product runs at the same share of the peak and only launches count for more. What is lost to messages "
        "that arrive later than the fixed order of turns expects shows in the share of time that the busiest GPU "
        "computes.",
        [chart],
    )


def _add_gain(
    table: FigureTable, name: str, key: str, seq: SimulatedStep, trial: SimulatedStep, claim: float | None
) -> float | None:
    """Add and return the seconds per row of GPipe's Seq-pipe over those of an asynchronous pipeline."""
    what, row_s, own_s = f"GPipe Seq-pipe / asynchronous, {key}", _row_s(seq), _row_s(trial)
    if row_s is None or own_s is None:
        table.append(FigureRow(name, what, "", f"does not fit: {trial.misses}"[:110]))
        return None
    stale = max(trial.decisions["staleness"].values())
    both = f"{1e3 * row_s:.1f} ms / {1e3 * own_s:.1f} ms a row"
    what += f" ({both}; {trial.workload.micro_batch} rows, {stale} stale)"
    return table.ratio(name, what, row_s, own_s, claim, said="")


def _row_s(trial: SimulatedStep) -> float | None:
    """Seconds per row of the batch."""
    work = trial.workload
    return trial.step_s / (work.micro_batch * work.micro_batches) if trial.step_s else None


def volume(paper: FtPipe) -> Finding:
    """Section 3.2: the bytes that pass between the stages of a whole pipe."""
    table = FigureTable()
    rows, lengths = paper.volume
    for length in lengths:
        trial = paper.seq(paper.work(FineTuning(8 * rows, rows, length, 8, 1.0, 1.0)), paper.machine)
        if trial.timeline is not None:
            moved = sent_bytes(trial) / 1e6
            table.add(f"rows of {length} tokens", "bytes of one micro-batch", moved, " MB", 1, 456.4)
    return Finding(
        "volume",
        f"bytes between GPUs for one micro-batch of {rows}, {paper.model}, 8 stages, fp32 (section 3.2)",
        "456.4 MB for one forward and backward across the whole pipe.",
        "bytes of all messages of one micro-batch, activations and gradients, under the best Seq-pipe.",
        table,
        "the paper does not say for how long a row. An activation of 4 rows is 16 KiB a token; the attention's "
        "position bias, 32 heads x length x length for the whole micro-batch, also passes every border of the "
        "encoder, so that the total grows with the square of the length; 456.4 MB lies between the lengths here. "
        "Masks are computed again by each stage instead of being sent.",
    )


def granularity(paper: FtPipe) -> Finding:
    """Section 5.6: operators against layers on two GPUs."""
    table, hardware, slowest = FigureTable(), paper.machine.with_(num_devices=2), {}
    work = paper.work(paper.tasks[paper.task], paper.shallow)
    for level, key in ((LAYERS, "layers"), (OPERATORS, "operators")):
        trial = paper.mixed(work, hardware, level=level)
        if trial.timeline is not None:
            slowest[key] = slowest_s(trial)
            count = len(paper.blocks(work, hardware, level))
            what = f"busiest GPU, {key} ({count} blocks, {len(trial.stages)} stages)"
            table.add(paper.shallow, what, 1e3 * slowest[key], " ms", 1)
    if len(slowest) == 2:
        better = 100 * (slowest["layers"] / slowest["operators"] - 1)
        table.add(paper.shallow, "operators better by", better, "%", 0, 45)
    return Finding(
        "granularity",
        "operator graph against layer graph, T5-11B cut to 1+1 layers on 2 GPUs (section 5.6)",
        "45% better min-max stage time; 535 M parameters.",
        "computation of the busiest GPU for one micro-batch, forward, forward again and backward; layers over "
        "operators, minus 1.",
        table,
        "with blocks of layers the larger half decides, with operators both halves are nearly even: the gain is what "
        "the larger half is over the mean, which hangs on the lengths of question and answer and on how well the "
        "heuristic balances.",
    )


def fig9(paper: FtPipe) -> Finding:
    """Figure 9: the number of stages L."""
    table, points = FigureTable(), []
    for stages in paper.stages:
        trial = paper.mixed(paper.work(paper.tasks[paper.task]), paper.machine, stages, OPERATORS)
        table.add(f"L = {stages}", f"step, {len(trial.stages)} stages", trial.step_s, " s")
        points += [(stages, trial.step_s)] if trial.step_s else []
    if points:
        best = min(points, key=lambda point: point[1])[0]
        table.words(paper.task, "best L", "16", str(best))
    curve = {"simulated": [(stages, points[0][1] / step_s) for stages, step_s in points]}
    title, across = f"Mixed-pipe by number of stages, {paper.task}", f"speed over L = {paper.stages[0]}"
    chart = Curves("fig9", title, "L", across, curve, True)
    return Finding(
        "fig9",
        "how many stages Mixed-pipe should have, 8 GPUs",
        "the sweet spot is L = 16, two a GPU.",
        "simulated steps with L asked for. The paper's own schedule is asynchronous; here the pipeline is synchronous.",
        table,
        "a synchronous pipeline has no staleness that more stages would cost, only messages, and more stages a GPU "
        "shorten its fill and drain; the optimum may lie at more stages than for the asynchronous one.",
        [chart],
    )


def large(paper: FtPipe) -> Finding:
    """Section 5.8: T5-11B on four GPUs of 32 GB."""
    table, hardware = FigureTable(), Hardware.preset("mobius-v100", memory="32GiB")
    for count, rows in paper.batches:
        task = replace(paper.tasks[paper.task], batch=count * rows, micro_batch=rows)
        work, where = paper.work(task, paper.large), f"{count} x {rows} rows"
        ways = (paper.mixed(work, hardware, level=level) for level in (LAYERS, OPERATORS))
        trials = {"Mixed": min(ways, key=_on_gpus_first), "Seq": paper.seq(work, hardware)}
        words = [f"{name} {'fits' if on_gpus(trial) else 'does not'}" for name, trial in trials.items()]
        table.words(where, "which fits", "Mixed fits, Seq does not", ", ".join(words))
        table += [_peak(where, name, trial) for name, trial in trials.items()]
    return Finding(
        "large",
        "T5-11B on 4 GPUs of 32 GB (section 5.8)",
        "Mixed-pipe trains it, Seq-pipe runs out of memory; with which batch is not said.",
        "weights and gradients in fp32 (8 bytes a parameter, 90 GB in all) and Adafactor, whose states count as "
        "nothing, all on the GPUs; inputs of all micro-batches kept for recomputation; what would have to be swapped "
        "does not fit. Micro-batches x rows of the lengths of the task above.",
        table,
        "90 of 129 usable GB leave room for contiguous stages, too, while there are few micro-batches: our contiguous "
        "partitioners know each GPU's memory. What decides is the position bias of 128 heads (134 MB in fp32 for each "
        "micro-batch), which is kept and sent, with its gradient, wherever a stage of the encoder lies.",
    )


def _on_gpus_first(trial: SimulatedStep) -> tuple[bool, float]:
    return not on_gpus(trial), trial.step_s or math.inf


def _peak(setting: str, name: str, trial: SimulatedStep) -> FigureRow:
    what = f"fullest GPU and step, {name}"
    if trial.timeline is None or not on_gpus(trial):
        return FigureRow(setting, what, "", "does not fit")
    peak = max(trial.timeline.peak_bytes[device] for device in trial.timeline.device_names)
    return FigureRow(setting, what, "", f"{format_bytes(peak)}, {trial.step_s:.2f} s", value=float(peak))


def search(paper: FtPipe) -> Finding:
    """The seconds that the partitioners take."""
    table, work = FigureTable(), paper.work(paper.tasks[paper.task])
    for level, key in ((LAYERS, "layers"), (OPERATORS, "operators")):
        took_s = paper.mixed(work, paper.machine, level=level).planning_cpu_s.get("partition-mixed", math.nan)
        where = f"{len(paper.blocks(work, paper.machine, level))} {key}"
        table.add(where, "Mixed-pipe, processor time", took_s, " s", 1, (0, 10))
    took_s = paper.run(work, paper.machine, SEQ[0]).planning_cpu_s["partition-pipedream"]
    table.add("layers", "exhaustive Seq-pipe, processor time", took_s, " s", 1)
    return Finding(
        "search",
        "time to search",
        "Mixed-pipe takes a few seconds; an exhaustive search over Seq-pipes about 20 minutes at 2000 nodes.",
        "processor seconds of the pass on the machine that made this page, 10 s taken as the limit of 'a few'.",
        table,
        "operators outnumber the paper's 2000 nodes, or share the machine with other work.",
    )


EXPERIMENTS = FtPipe
FITTED: Mapping[str, str] = {}  # a finding, or "finding: setting" -> what of the machine was fitted to it
FINDINGS = (table2, table2_asynchronous, volume, granularity, fig9, large, search)
