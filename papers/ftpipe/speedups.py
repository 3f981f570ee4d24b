"""FTPipe's speedups: tables 2 and 3."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...ir.units import format_seconds
from ..experiments import LAYERS, OPERATORS
from ..figures import Bars
from ..lab import SimulatedStep
from ..report import Finding
from ..rule import Claim, FigureRow
from ..table import ELSEWHERE, SECONDS, FigureTable
from .experiments import (
    SEQ_ASYNC,
    FineTuning,
    FtPipe,
    bytes_by_row,
    copies,
    gpipe_row_s,
    mixed_async,
    num_sent,
    passing_row_s,
    row_s,
    sent_bytes,
    slowest_s,
)  # fmt: skip
from .gpipe import busiest_share, gpipe_s

SLOWER = 8  # times what a call costs besides its work
MILLISECONDS = "{:.1f} ms / {:.1f} ms a row"


def table2(paper: FtPipe) -> Finding:
    """Mixed-pipe over Seq-pipe, both synchronous: with two stages per GPU as in the paper, and with its own choice of
    L."""
    table, paper_stages = FigureTable(), 2 * paper.machine.num_devices
    theirs = f"L = {paper_stages}"
    ways = {theirs: (OPERATORS, paper_stages), "layers": (LAYERS, paper_stages), "own L": (OPERATORS, 0)}
    tasks = {name: task for name, task in paper.tasks.items() if task.is_mixed}
    bars: dict[str, list[float | None]] = {"paper": [task.speedup for task in tasks.values()]}
    for name, task in tasks.items():
        seq = paper.seq(paper.work(task), paper.machine)
        gains = {}
        for key, (level, stages) in ways.items():
            mixed = paper.mixed(paper.work(task), paper.machine, stages, level)
            claims = (task.speedup, task.more) if key == theirs else (None, None)
            gains[key] = _add_way(table, paper, name, key, seq, mixed, claims)
            bars.setdefault(key, []).append(gains[key])
        if name == paper.balanced:
            _add_finer(table, paper, name, _synchronous, gpipe_s, 1.6)
    chart = Bars("table2", "Mixed-pipe over Seq-pipe, synchronous", "times as fast", list(tasks), bars)
    return Finding(
        "table2",
        "Mixed-pipe over Seq-pipe, T5-3B on 8 GPUs, synchronous",
        "1.19x (WiC), 1.2x (RTE), 1.08x (BoolQ), 1.11x (MultiRC) the speed, at 2.5x to 3.3x the bytes between GPUs.",
        "steps of one global batch as FTPipe's runtime takes them, with table 4's micro-batches for GPipe on both "
        "sides; below them those of our own programs. Seq-pipe is the best of three contiguous partitioners. "
        "Mixed-pipe has two stages a GPU (L = 16), as in the paper, of operators or of layers, or its own choice of "
        "L. Bytes: of all messages of one micro-batch.",
        table,
        "most bytes are position biases, which go from the first stage of the encoder to all others of it. FTPipe's "
        "published partitions send them to 3 other GPUs in its Seq-pipes and to 7 other stages in its pipes of 16, for "
        "each row anew, as its model adds the mask to the bias: by their shapes 3.3, 2.9 and 2.6 times the bytes for "
        "64, 320 and 512 tokens. Our Seq-pipes are better balanced and give the encoder more GPUs, and a bias goes "
        "once for a micro-batch.",
        [chart],
    )


def _add_finer(
    table: FigureTable, paper: FtPipe, name: str, trial: Callable[[FtPipe, FineTuning, int, str], SimulatedStep],
    row_s: Callable[[SimulatedStep], float | None], claim: float,
) -> None:  # fmt: skip
    """Add the percent by which a graph of operators is faster than one of layers (section 5.6)."""
    task, stages = paper.tasks[name], 2 * paper.machine.num_devices
    fine, coarse = (trial(paper, task, stages, level) for level in (OPERATORS, LAYERS))
    why = "the layers of T5-3B are small beside a stage, so that whole ones divide nearly as evenly"
    checks = {
        "the busiest GPU's seconds in place of the pipeline's": lambda: _percent(slowest_s(coarse), slowest_s(fine)),
        "our own programs' whole steps": lambda: _percent(coarse.step_s, fine.step_s),
    }
    what = "operators over layers"
    table.add(name, what, _percent(row_s(coarse), row_s(fine)), "%", 1, claim, why, checks=checks)


def _percent(theirs_s: float | None, own_s: float | None) -> float | None:
    return 100 * (theirs_s / own_s - 1) if theirs_s and own_s else None


def _synchronous(paper: FtPipe, task: FineTuning, stages: int, level: str) -> SimulatedStep:
    return paper.mixed(paper.work(task), paper.machine, stages, level)


def _add_way(
    table: FigureTable, paper: FtPipe, name: str, key: str, seq: SimulatedStep, mixed: SimulatedStep,
    claims: tuple[Claim, Claim],
) -> float | None:  # fmt: skip
    """Add the time of a Seq-pipe over that of a Mixed-pipe, which is returned, and the bytes the other way round."""
    said = f"{SECONDS}; {len(mixed.stages)} stages"
    what, why = f"Seq-pipe / Mixed-pipe, {key}", _parts(seq, mixed)
    gain = table.ratio(name, what, gpipe_s(seq), gpipe_s(mixed), claims[0], said, why=why)
    table.ratio(name, f"the same, our own programs, {key}", seq.step_s, mixed.step_s, claims[0], apart=ELSEWHERE)
    if gain is not None:
        told = " against ".join(
            f"{num_sent(step):.0f} messages of {1e-6 * sent_bytes(step) / num_sent(step):.1f} MB"
            for step in (mixed, seq)
        )
        why = f"{told}; what takes most bytes goes to {copies(mixed)[0]} other stages against {copies(seq)[0]}"
        more = sent_bytes(mixed) / sent_bytes(seq)
        checks = {
            "a position bias for each row": lambda: bytes_by_row(mixed) / bytes_by_row(seq),
            f"that, and to {paper.published} other GPUs in Seq-pipe, as in FTPipe's published one": lambda: (
                bytes_by_row(mixed) / bytes_by_row(seq, paper.published)
            ),
        }
        table.add(name, f"the same, bytes between GPUs, {key}", more, "x", claim=claims[1], why=why, checks=checks)
    return gain


def _parts(seq: SimulatedStep, mixed: SimulatedStep) -> str:
    shares = (f"{busiest_share(step):.0%} of its step" if step.timeline else "nothing" for step in (seq, mixed))
    return "the busiest GPU of Seq-pipe computes {}, that of Mixed-pipe {}".format(*shares)


def _ways(paper: FtPipe, task: FineTuning) -> Iterator[tuple[str, SimulatedStep, Claim]]:
    """The asynchronous pipelines of a task, and the paper's speedup of the one that it has."""
    if task.is_mixed:
        stages = 2 * paper.machine.num_devices
        yield f"L = {stages}", paper.mixed_async(task, stages), task.asynchronous
        yield "Seq-pipe", paper.asynchronous(task, SEQ_ASYNC), None
    else:
        yield "Seq-pipe", paper.asynchronous(task, SEQ_ASYNC), task.asynchronous


def table2_asynchronous(paper: FtPipe) -> Finding:
    """Asynchronous pipelines over synchronous Seq-pipe, by the time of an epoch."""
    table = FigureTable()
    bars: dict[str, list[float | None]] = {"paper": [], "ours": []}
    for name, task in paper.tasks.items():
        seq = paper.seq(paper.work(task), paper.machine)
        bars["paper"].append(task.asynchronous)
        for key, trial, claim in _ways(paper, task):
            gain = _add_gain(table, paper, name, f"GPipe Seq-pipe / asynchronous, {key}", seq, trial, claim)
            if claim is not None:
                bars["ours"].append(gain)
                if gain is not None:
                    _add_epochs(table, name, task, gpipe_row_s(seq) or 0.0, gain)
        if name == paper.balanced:
            _add_finer(table, paper, name, FtPipe.mixed_async, passing_row_s, 2.2)
    chart = Bars("table2_asynchronous", "Asynchronous over GPipe's Seq-pipe", "times as fast", list(paper.tasks), bars)
    return Finding(
        "table2_asynchronous",
        "asynchronous pipelines over GPipe's Seq-pipe on 8 GPUs, time of an epoch",
        "Mixed-pipe, T5-3B: 2.48x (WiC), 2.71x (RTE), 2.13x (BoolQ), 3.32x (MultiRC); Seq-pipe: 1.6x (GPT-2 1.5B on "
        "WikiText2), 2.04x (BERT on SQuAD). To the top accuracy 11.54x, 4.1x, 2.88x, 3.32x, 1.6x, 2.04x.",
        "seconds of a row. GPipe: a global batch as in table 4 under FTPipe's runtime, the best of three contiguous "
        "partitioners; our own program beside it. "
        f"Asynchronous: the middle of {paper.passing} micro-batches, with the rows that table 4 has for FTPipe (or, "
        "where these do not fit, GPipe's). Mixed-pipe has two stages a GPU (L = 16), of operators, as in the paper; "
        "Seq-pipe one. Stale: updates that the first stage lacks. Time to the top accuracy: our epochs, as many as the "
        "paper's two ratios imply.",
        table,
        "what an asynchronous pipeline gains here is what a synchronous one loses: filling and draining, (P-1)/M of "
        "the time of a forward and a backward that computes nothing again, the imbalance of its stages, and what "
        "small micro-batches lose. GPT-2 has equal layers and micro-batches of one row on both sides, so that only "
        "the first of these is left. For T5 the paper gains more than for GPT-2 where GPipe's micro-batch has fewer "
        "rows than FTPipe's, most from 1 row to 4 (MultiRC); products and calls of that size lose less here.",
        [chart],
    )


def _checks(paper: FtPipe, seq: SimulatedStep, trial: SimulatedStep) -> dict[str, Callable[[], float | None]]:
    """An asynchronous row after each change of what its reason names, under the same plans."""
    theirs_s, own_s = gpipe_row_s(seq) or 0.0, passing_row_s(trial) or 1.0
    rows = seq.workload.micro_batch * seq.workload.micro_batches
    quarter = seq.hardware.devices[0].h2d_bandwidth / 4
    slow = seq.hardware.with_(h2d_bandwidth=quarter, d2h_bandwidth=quarter)

    def with_calls() -> float:
        return theirs_s / own_s * paper.slower(seq.workload, SLOWER) / paper.slower(trial.workload, SLOWER)

    def with_messages() -> float:
        return (gpipe_s(seq, slow) or 0.0) / rows / own_s

    return {
        f"calls that cost {SLOWER} times as much": with_calls,
        "messages of GPipe at a quarter of the links' rate": with_messages,
    }


def _add_gain(
    table: FigureTable, paper: FtPipe, name: str, what: str, seq: SimulatedStep, trial: SimulatedStep, claim: Claim,
    apart: str = "",
) -> float | None:  # fmt: skip
    """Add and return the seconds per row of a synchronous pipeline over those of an asynchronous one."""
    theirs_s, own_s = gpipe_row_s(seq), passing_row_s(trial)
    if theirs_s is None or own_s is None:
        table.append(FigureRow(name, what, "", f"does not fit: {seq.misses or trial.misses}"[:110]))
        return None
    stale = max(trial.decisions["staleness"].values())
    both = MILLISECONDS.format(1e3 * theirs_s, 1e3 * own_s)
    what += f" ({both}; {trial.workload.micro_batch} rows, {stale} stale)"
    why = (
        f"GPipe's busiest GPU computes {busiest_share(seq):.0%} of the time, with {seq.workload.micro_batch} row(s) in "
        f"a micro-batch, that of the asynchronous pipeline {max(trial.compute_s()) / (trial.step_s or 1.0):.0%}"
    )
    checks = _checks(paper, seq, trial)
    gain = table.ratio(name, what, theirs_s, own_s, claim, said="", why=why, apart=apart, checks=checks)
    own = "the same with our own synchronous program"
    table.ratio(name, own, row_s(seq), own_s, claim, said="", apart=ELSEWHERE)
    return gain


def _add_epochs(table: FigureTable, name: str, task: FineTuning, theirs_s: float, gain: float) -> None:
    """Add epochs, of which GPipe takes `theirs_s` a row, and the gain to the top accuracy."""
    both = " / ".join(format_seconds(task.samples * each_s) for each_s in (theirs_s, theirs_s / gain))
    table.words(name, f"an epoch of {task.samples} rows, GPipe / asynchronous", "", both)
    epochs = task.asynchronous / task.reached  # of the asynchronous pipeline, over GPipe's
    what = f"the same to the top accuracy, with {epochs:.2f} times the epochs"
    table.add(name, what, gain / epochs, "x", claim=task.reached, apart=ELSEWHERE)


def _same(paper: FtPipe, task: FineTuning) -> tuple[SimulatedStep, SimulatedStep, str]:
    """A synchronous and an asynchronous pipeline of a task with the same partitioner, and its name."""
    stages = 2 * paper.machine.num_devices
    if task.is_mixed:
        there = paper.run(paper.work(task), paper.machine, mixed_async(stages), OPERATORS)
        return there, paper.mixed_async(task, stages), f"Mixed-pipe, L = {stages}"
    there = paper.run(paper.work(task), paper.machine, SEQ_ASYNC)
    return there, paper.asynchronous(task, SEQ_ASYNC), "Seq-pipe"


def table3(paper: FtPipe) -> Finding:
    """Asynchronous over synchronous pipelines of the same kind of partition."""
    table = FigureTable()
    bars: dict[str, list[float | None]] = {"paper": [], "ours": []}
    for name, task in paper.tasks.items():
        there, here, kind = _same(paper, task)
        bars["paper"].append(task.same)
        what, apart = f"synchronous / asynchronous, {kind}", "" if task.is_mixed else ELSEWHERE  # in table 2
        bars["ours"].append(_add_gain(table, paper, name, what, there, here, task.same, apart))
    chart = Bars("table3", "Asynchronous over synchronous, same partitioner", "times as fast", list(paper.tasks), bars)
    return Finding(
        "table3",
        "asynchronous over synchronous pipelines with the same partitioner, time of an epoch",
        "2.09x (WiC), 2.25x (RTE), 2.23x (BoolQ), 2.98x (MultiRC) with Mixed-pipe; 1.61x (GPT-2), 2.04x (BERT) with "
        "Seq-pipe.",
        "as in table2_asynchronous; the synchronous side has the partitioner of the asynchronous one, with its "
        "objective, as section 5.4 has the same partitions on both sides.",
        table,
        "see table2_asynchronous.",
        [chart],
    )
