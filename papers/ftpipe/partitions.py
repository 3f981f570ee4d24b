"""FTPipe's partitions: balance, bytes, granularity, the number of stages, larger models, time to search."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from ...graph.costs.stage_time import block_seconds
from ...ir import ops
from ...ir.machine.hardware import Hardware
from ...ir.units import format_bytes
from ..experiments import LAYERS, OPERATORS
from ..figures import Bars, Curves
from ..lab import SimulatedStep, Workload
from ..report import Finding
from ..rule import FigureRow
from ..table import AT_LEAST_ONE, ELSEWHERE, FigureTable
from .experiments import (
    SEQ,
    SEQ_ASYNC,
    FineTuning,
    FtPipe,
    num_sent,
    on_gpus,
    on_gpus_first,
    passing_row_s,
    row_s,
    sent_bytes,
    slowest_s,
)  # fmt: skip


def volume(paper: FtPipe) -> Finding:
    """Section 3.2: the bytes that pass between the stages of a whole pipe."""
    table = FigureTable()
    rows, lengths = paper.volume
    for length in lengths:
        trial = paper.seq(
            paper.work(replace(paper.tasks[paper.task], batch=8 * rows, micro_batch=rows, sequence=length)),
            paper.machine,
        )
        if trial.timeline is not None:
            moved = sent_bytes(trial) / 1e6
            apart = ELSEWHERE if length != paper.tasks[paper.task].sequence else ""
            why = f"{num_sent(trial):.0f} messages, of which those of the encoder's borders hold the position bias"
            where = f"rows of {length} tokens"
            table.add(where, "bytes of one micro-batch", moved, " MB", 1, 456.4, why, apart)
            for name, share, claim in zip(("forward", "backward"), _computing_shares(trial), (0.96, 0.98)):
                table.add(where, f"share of computation, {name}", share, "", 3, claim, why, apart)
    return Finding(
        "volume",
        f"bytes between GPUs for one micro-batch of {rows}, T5-3B, 8 stages, fp32 (section 3.2)",
        "456.4 MB for one forward and backward across the whole pipe; computation to communication is 0.96 in "
        "forwards and 0.98 in backwards.",
        "bytes of all messages of one micro-batch, activations and gradients, under the best Seq-pipe. The paper does "
        "not say how long its rows are; judged are those of 512 tokens, of which two of its sets are (3.3). The "
        "position bias, 32 heads x length x length for a micro-batch, passes every border of the encoder. In FTPipe's "
        "published Seq-pipe for 512 tokens it does so for each row, but to 3 more GPUs only: 466 MB one way. The share "
        "of computation: of the seconds in which a GPU computes or sends, the mean of the GPUs.",
        table,
    )


def _computing_shares(trial: SimulatedStep) -> tuple[float, float]:
    """For the forwards and the backwards of a step, the mean over GPUs of the seconds that one computes over those that
    it computes or sends."""
    assert trial.timeline is not None
    spans = trial.timeline.spans
    turn_s = min(span.start_s for span in spans if span.op == "backward")
    shares = []
    for here in (lambda span: span.start_s < turn_s, lambda span: span.start_s >= turn_s):
        took: dict[tuple[int, str], float] = {}
        for span in filter(here, spans):
            took[span.device, span.stream] = took.get((span.device, span.stream), 0.0) + span.end_s - span.start_s
        each = [
            computed_s / (computed_s + took.get((device, ops.SEND), 0.0))
            for (device, stream), computed_s in took.items() if stream == ops.COMPUTE
        ]  # fmt: skip
        shares.append(sum(each) / len(each))
    return shares[0], shares[1]


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
        why = f"{1e3 * slowest['layers']:.1f} ms with layers, of which the larger half decides, and "
        why += (
            f"{1e3 * slowest['operators']:.1f} ms with operators, nearly even; the paper does not say for which lengths"
        )
        table.add(paper.shallow, "operators better by", better, "%", 0, 45, why)
    return Finding(
        "granularity",
        "operator graph against layer graph, T5-11B cut to 1+1 layers on 2 GPUs (section 5.6)",
        "45% better min-max stage time; 535 M parameters.",
        "computation of the busiest GPU for one micro-batch, forward, forward again and backward; layers over "
        "operators, minus 1.",
        table,
    )


def fig8(paper: FtPipe) -> Finding:
    """Figure 8 and section 3.3: balance."""
    table, task, stages = FigureTable(), paper.tasks[paper.balanced], 2 * paper.machine.num_devices
    uneven: dict[str, float] = {}
    bars: dict[str, list[float | None]] = {}
    for name, trial in (("Mixed", paper.mixed_async(task, stages)), ("Seq", paper.asynchronous(task, SEQ_ASYNC))):
        where = f"{paper.balanced}, {name}-pipe, {trial.workload.micro_batch} rows"
        if trial.timeline is None or trial.step_s is None:
            table.add(where, "asynchronous pipeline", None)
            continue
        busy = [seconds / trial.step_s for seconds in trial.compute_s()]
        used = [trial.timeline.peak_bytes[device] for device in trial.timeline.device_names]
        bars[f"{name}-pipe"] = [100 * share for share in busy]
        uneven[name] = max(busy) / (sum(busy) / len(busy))
        table.words(where, "GPUs compute", "", f"{min(busy):.0%} to {max(busy):.0%} of the time")
        table.words(where, "their memory", "", f"{format_bytes(min(used))} to {format_bytes(max(used))}")
        table.add(where, "busiest GPU / mean", uneven[name], "x")
    if len(uneven) == 2:
        table.ratio(
            paper.balanced, "imbalance of Seq-pipe / of Mixed-pipe", uneven["Seq"], uneven["Mixed"], AT_LEAST_ONE
        )
    theirs = paper.tasks[paper.task]
    theirs = replace(theirs, micro_batch=theirs.batch // theirs.parts)
    encoder_s, decoder_s = _layers_s(paper, paper.work(theirs))
    both = f"{1e3 * encoder_s:.1f} and {1e3 * decoder_s:.1f} ms"
    why = f"{both} for {theirs.micro_batch} rows; the paper gives no number of rows"
    what = f"encoder layer / decoder layer, {theirs.sequence} + {theirs.targets} tokens (section 3.3)"
    table.ratio(paper.task, what, encoder_s, decoder_s, 5.5, "", why=why)
    names = [f"GPU {number}" for number in range(paper.machine.num_devices)]
    chart = Bars("fig8", f"Computation of each GPU, {paper.balanced}, asynchronous", "% of the time", names, bars)
    return Finding(
        "fig8",
        "balance of memory and computation (figure 8, section 3.3)",
        "Mixed-pipe balances memory and computation of the GPUs much better than Seq-pipe; an encoder layer takes 5.5 "
        "times as long as a decoder layer for 512 and 4 tokens.",
        "shares of the time in which each GPU computes while 128 micro-batches pass an asynchronous pipeline, and "
        "peaks of memory. A layer's time: forward, forward again and backward of its blocks, for a micro-batch of the "
        "asynchronous pipeline.",
        table,
        charts=[chart],
    )


def _layers_s(paper: FtPipe, work: Workload) -> tuple[float, float]:
    """Seconds of one layer of the encoder and of the decoder: the two kinds of blocks of which there are most."""
    blocks, device = paper.blocks(work, paper.machine), paper.machine.devices[0]
    hashes = [block.hash for block in blocks]
    common = sorted(dict.fromkeys(hashes), key=lambda name: -hashes.count(name))[:2]
    encoder, decoder = sorted(common, key=hashes.index)
    found = (block_seconds(blocks[hashes.index(name)], device, paper.precision) for name in (encoder, decoder))
    first_s, second_s = (seconds.both_s + seconds.forward_s for seconds in found)
    return first_s, second_s


def fig9(paper: FtPipe) -> Finding:
    """Figure 9: the number of stages L."""
    table, task = FigureTable(), paper.tasks[paper.task]
    curves: dict[str, list[tuple[float, float]]] = {}
    for schedule in ("asynchronous", "synchronous"):
        found: dict[int, float] = {}
        for stages in paper.stages:
            if schedule == "asynchronous":
                trial = paper.mixed_async(task, stages)
                each_s = passing_row_s(trial)
            else:
                trial = paper.mixed(paper.work(task), paper.machine, stages, OPERATORS)
                each_s = row_s(trial)
            rows = f"{trial.workload.micro_batch} rows, {len(trial.stages)} stages"
            table.add(f"L = {stages}", f"{schedule}, a row ({rows})", 1e3 * each_s if each_s else None, " ms", 1)
            found |= {stages: each_s} if each_s else {}
        if found:
            best = min(found, key=lambda count: found[count])
            told = ", ".join(f"{1e3 * each_s:.1f} ms at {count}" for count, each_s in found.items())
            if schedule == "asynchronous":
                table.words(paper.task, "best L, asynchronous", "16", str(best), told)
            else:
                table.words(paper.task, "best L, synchronous", "", str(best))
            first_s = found[min(found)]
            curves[schedule] = [(count, first_s / each_s) for count, each_s in found.items()]
    title, across = f"Mixed-pipe by number of stages, {paper.task}", f"speed over L = {paper.stages[0]}"
    return Finding(
        "fig9",
        "how many stages Mixed-pipe should have, 8 GPUs",
        "the sweet spot is L = 16, two a GPU.",
        "simulated seconds of a row with L asked for, of asynchronous pipelines as in the paper, and synchronous.",
        table,
        charts=[Curves("fig9", title, "L", across, curves, True)],
    )


def large(paper: FtPipe) -> Finding:
    """Section 5.8: T5-11B on four GPUs of 32 GB."""
    table, hardware = FigureTable(), Hardware.preset("mobius-v100", memory="32GiB")
    for count, rows in paper.batches:
        task = replace(paper.tasks[paper.task], batch=count * rows, micro_batch=rows)
        work, where = paper.work(task, paper.large), f"{count} x {rows} rows"
        ways = (paper.mixed(work, hardware, level=level) for level in (LAYERS, OPERATORS))
        trials = {"Mixed": min(ways, key=on_gpus_first), "Seq": paper.seq(work, hardware)}
        words = [f"{name} {'fits' if on_gpus(trial) else 'does not'}" for name, trial in trials.items()]
        why = "90 of 129 usable GB leave room for contiguous stages while there are so few rows"
        table.words(where, "which fits", "Mixed fits, Seq does not", ", ".join(words), why)
        table += [_peak(where, name, trial) for name, trial in trials.items()]
    return Finding(
        "large",
        "T5-11B on 4 GPUs of 32 GB (section 5.8)",
        "Mixed-pipe trains it, Seq-pipe runs out of memory; with which batch is not said.",
        "weights and gradients in fp32 (8 bytes a parameter, 90 GB in all) and Adafactor, whose states count as "
        "nothing, all on the GPUs; inputs of all micro-batches kept for recomputation; what would have to be swapped "
        "does not fit. Micro-batches x rows of the lengths of the task above.",
        table,
        "our contiguous partitioners know each GPU's memory. What decides is the position bias of 128 heads (134 MB in "
        "fp32 for each micro-batch), which is kept and sent, with its gradient, wherever a stage of the encoder lies.",
    )


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
        why = f"on a machine that other work shares; the paper has 2000 nodes, these are {where}"
        table.add(where, "Mixed-pipe, processor time", took_s, " s", 1, (0, 10), why)
    took_s = paper.run(work, paper.machine, SEQ[0]).planning_cpu_s["partition-pipedream"]
    table.add("layers", "exhaustive Seq-pipe, processor time", took_s, " s", 1)
    return Finding(
        "search",
        "time to search",
        "Mixed-pipe takes a few seconds; an exhaustive search over Seq-pipes about 20 minutes at 2000 nodes.",
        "processor seconds of the pass on the machine that made this page, 10 s taken as the limit of 'a few'.",
        table,
    )


def pipedream(paper: FtPipe) -> Finding:
    """Sections 5.5 and 4.2: against PipeDream's partition, and what predicted weights cost."""
    table = FigureTable()
    task = paper.tasks[paper.short]
    for gpus, claim in paper.pipedream.items():
        own = paper.on(num_devices=gpus)
        rows, more = next(
            ((rows, more) for rows in HALVED if (more := _lead_over_pipedream(own, task, rows))), (0, None)
        )
        why = "our cuts know that the last stage of an asynchronous pipeline computes nothing again, PipeDream's do "
        why += "not; how much that is depends on where its cuts fall"
        checks = {
            f"micro-batches of {other} rows": partial(_lead_over_pipedream, own, task, other)
            for other in HALVED if other < rows
        }  # fmt: skip
        where = f"{paper.short}, {gpus} GPUs, micro-batches of {rows}"
        table.add(where, "faster than PipeDream", more, "%", 1, claim, why, checks=checks)
    for name in paper.mitigated:
        task = paper.tasks[name]
        plain_s, foretold_s = (
            passing_row_s(paper.asynchronous(task, SEQ_ASYNC, weights=way)) for way in ("current", "predict")
        )
        more = 100 * (foretold_s / plain_s - 1) if plain_s and foretold_s else None
        table.add(name, "what predicted weights cost", more, "%", 1, (0, 5), "a prediction reads and writes all states")
    return Finding(
        "pipedream",
        "PipeDream's partition, and predicted weights (sections 5.5, 4.2)",
        "BERT on SQuAD: 12.7% faster than PipeDream on 2 GPUs, 4% on 4; predicted weights cost less than 5%.",
        "seconds of a row of asynchronous pipelines, with `partition-pipedream` and with our balanced Seq-pipe; with "
        "`weights=predict` and without.",
        table,
    )


HALVED = (24, 12, 6, 3, 1)  # rows of a micro-batch: the largest that fits under both cuts


def _lead_over_pipedream(paper: FtPipe, task: FineTuning, rows: int) -> float | None:
    """The percent by which our cuts are faster than PipeDream's, both with these micro-batches."""
    same = replace(task, micro_batch=rows, parts=task.batch // rows)
    theirs_s, ours_s = (passing_row_s(paper.asynchronous(same, cut)) for cut in (SEQ[0], SEQ_ASYNC))
    return 100 * (theirs_s / ours_s - 1) if theirs_s and ours_s else None
