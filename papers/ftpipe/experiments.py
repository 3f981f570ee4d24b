"""FTPipe's setup: the tasks of its tables 2 to 4, its machine, and the trials of its pipelines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...graph.costs.stage_time import block_seconds
from ...ir import ops
from ...ir.machine.hardware import Hardware
from ..experiments import LAYERS, OPERATORS, Experiments, said_memory, said_products, said_traffic
from ..lab import SimulatedStep, Workload
from .gpipe import gpipe_s

REST = "map-round-robin, schedule-pipeline, insert-remat{always=true}, insert-fetch, insert-optimizer"
FREE = "map-cross, schedule-async"
SEQ = ("partition-pipedream", "partition-balanced{stages=devices}", "partition-acyclic")
SEQ_ASYNC = "partition-balanced{stages=devices, asynchronous=true}"
T5 = "t5-3b"


@dataclass(frozen=True)
class FineTuning:
    """A task: rows of the global batch and of GPipe's micro-batch (table 4), tokens in a row (in encoder and decoder),
    rows of the training set. FTPipe divides the global batch into `parts` micro-batches (table 4).

    The paper's numbers: `speedup` is that of Mixed-pipe over Seq-pipe, both synchronous (table 2); `more` the ratio of
    their bytes between GPUs (5.3); `asynchronous` and `reached` the speedups of an epoch and of the time to the top
    accuracy, of FTPipe over synchronous Seq-pipe (table 2), and `same` that of an epoch with equal partitions (table
    3). A task without `speedup` has Seq-pipes only.
    """

    batch: int
    micro_batch: int
    sequence: int
    targets: int | None
    samples: int
    parts: int
    asynchronous: float
    reached: float
    same: float
    speedup: float | None = None
    more: float | None = None
    model: str = T5
    state_bytes: float = 0.0

    @property
    def is_mixed(self) -> bool:
        return self.speedup is not None


class FtPipe(Experiments):
    """FTPipe's setup."""

    title = "FTPipe (ATC 2021) in simulation"
    left_out = {
        "figures 1 to 5": "why fine-tuning, and drawings of schedules and partitions.",
        "figures 6, 7": "accuracy over time: a matter of values. `bench/async_training.py` compares losses of "
        "asynchronous and synchronous fine-tuning; `penstock check` compares a synchronous plan with plain PyTorch.",
        "section 5.5, T5-3B and GPT-2": "PipeDream fails in the paper: out of memory; its pipelines of BERT are in "
        "the finding pipedream.",
    }
    factors = {
        "100% of the GPUs' rates": "fitted to nothing: calls take what was publicly measured. What GPipe loses beside "
        "FTPipe is its published order of turns",
    }
    large = "t5-11b"
    shallow = "t5-11b:num_layers=1,num_decoder_layers=1"  # `large` with one layer in each half
    precision, state_bytes = "fp32", 0.0
    tasks: Mapping[str, FineTuning] = {
        "WiC": FineTuning(128, 16, 64, 4, 5_428, 2, 2.48, 11.54, 2.09, 1.19, 3.31),
        "RTE": FineTuning(40, 4, 320, 8, 2_490, 5, 2.71, 4.1, 2.25, 1.2, 2.5),
        "BoolQ": FineTuning(20, 2, 512, 4, 9_427, 5, 2.13, 2.88, 2.23, 1.08, 2.6),
        "MultiRC": FineTuning(8, 1, 512, 4, 27_243, 2, 3.32, 3.32, 2.98, 1.11, 2.6),
        "WikiText2, GPT-2": FineTuning(8, 1, 1024, None, 2_334, 8, 1.6, 1.6, 1.61, model="gpt2-xl", state_bytes=8.0),
        "SQuAD, BERT": FineTuning(24, 3, 384, None, 87_599, 1, 2.04, 2.04, 2.04, model="bert-large", state_bytes=8.0),
    }
    task = "BoolQ"  # of the experiments with a single task
    short = "SQuAD, BERT"  # of section 5.5
    pipedream: Mapping[int, float] = {2: 12.7, 4: 4.0}  # section 5.5: GPUs -> percent faster
    mitigated = ("WikiText2, GPT-2", "SQuAD, BERT")  # section 4.2: with predicted weights
    published = 3  # other GPUs to which FTPipe's published Seq-pipes send a position bias
    balanced = "WiC"  # of figure 8
    preset = "ftpipe-2080ti"
    presets = ("ftpipe-2080ti", "mobius-v100")
    stages: Sequence[int] = (8, 16, 24, 32)  # figure 9
    batches: Sequence[tuple[int, int]] = ((4, 1), (8, 1), (4, 2), (8, 2), (10, 2), (5, 4))  # of `large`: count, rows
    volume: tuple[int, Sequence[int]] = (4, (64, 320, 512))  # micro-batch and lengths for section 3.2's bytes
    passing = 128  # the number of micro-batches of a simulated asynchronous pipeline, from its filling to its draining

    @property
    def machine(self) -> Hardware:
        return Hardware.preset(self.preset).with_(**self.changes)

    def small(self) -> Iterator[tuple[str, Workload, Hardware, str]]:
        model = "t5-small:num_layers=2,num_decoder_layers=2,vocab_size=1024"
        work = self.workload(model, 4, 4, 64, 8)
        yield "synchronous", work, self.machine, f"{LAYERS}, partition-balanced{{stages=4}}, {REST}"
        yield "asynchronous", work, self.machine, f"{LAYERS}, partition-mixed{{stages=8, asynchronous=true}}, {FREE}"

    def work(self, task: FineTuning, model: str = "") -> Workload:
        """GPipe's micro-batches of one global batch."""
        return self._work(task, task.micro_batch, task.batch // task.micro_batch, model)

    def _work(self, task: FineTuning, rows: int, count: int, model: str = "") -> Workload:
        work = self.workload(model or task.model, rows, count, task.sequence, task.targets)
        return replace(work, state_bytes=task.state_bytes)

    def run(self, work: Workload, hardware: Hardware, partition: str, level: str = LAYERS) -> SimulatedStep:
        return self.lab.trial(work, hardware, f"{level}, {partition}, {REST}")

    def seq(self, work: Workload, hardware: Hardware) -> SimulatedStep:
        """The best of the contiguous partitioners with one stage per GPU; plans entirely on the GPUs come first."""
        return min((self.run(work, hardware, partition) for partition in SEQ), key=on_gpus_first)

    def mixed(self, work: Workload, hardware: Hardware, stages: int = 0, level: str = LAYERS) -> SimulatedStep:
        options = f"{{stages={stages}}}" if stages else ""
        return self.run(work, hardware, f"partition-mixed{options}", level)

    def asynchronous(
        self, task: FineTuning, partition: str, level: str = LAYERS, weights: str = "current"
    ) -> SimulatedStep:
        """An asynchronous pipeline's trial of a task, with FTPipe's micro-batches; with GPipe's where these do not
        fit. An update takes the gradients of the task's whole batch."""
        for rows in (task.batch // task.parts, task.micro_batch):
            each = task.batch // rows
            work = self._work(task, rows, each * -(-self.passing // each))
            options = f"accumulate={each}" + (f", weights={weights}" if weights != "current" else "")
            trial = self.lab.trial(work, self.machine, f"{level}, {partition}, {FREE}{{{options}}}")
            if trial.timeline is not None:
                break
        return trial

    def slower(self, work: Workload, times: float) -> float:
        """The times that all blocks take where a call costs `times` as much besides its work."""
        device = self.machine.devices[0]
        slow = self.machine.with_(op_overhead_s=times * device.op_overhead_s).devices[0]
        blocks = self.blocks(work, self.machine)
        after_s, before_s = (sum(block_seconds(b, d, self.precision).both_s for b in blocks) for d in (slow, device))
        return after_s / before_s

    def mixed_async(self, task: FineTuning, stages: int, level: str = OPERATORS) -> SimulatedStep:
        return self.asynchronous(task, mixed_async(stages), level)

    def assumptions(self) -> dict[str, str]:
        """The assumptions of all figures, taken from the preset and the setup that are simulated."""
        device = self.machine.devices[0]
        tasks = self.tasks.items()
        lengths = ", ".join(f"{name} {t.sequence}" + (f" + {t.targets}" if t.targets else "") for name, t in tasks)
        batches = ", ".join(f"{name} {t.batch // t.micro_batch} x {t.micro_batch}" for name, t in tasks)
        theirs = ", ".join(f"{name} {t.parts} x {t.batch // t.parts}" for name, t in tasks)
        samples = ", ".join(f"{name} {t.samples}" for name, t in tasks)
        return {
            "GPU memory": said_memory(device),
            "GPU time": f"{said_products(device, 'fp32')}; {said_traffic(device)}",
            "links": f"{device.h2d_bandwidth / 1e9:.1f} GB/s per direction for each GPU and for each of two root "
            "complexes of 4 GPUs, no P2P: through DRAM. The paper says PCIe 3 and nothing else",
            "bytes of a parameter": "4 for its weight, 4 for its gradient; Adafactor's states count as nothing, Adam's "
            "(GPT-2, BERT) as 8",
            "lengths": f"tokens of a row (question + answer); 512 + 4 are the paper's for two sets (3.3), 1024 and 384 "
            f"those of appendix A, the others those of FTPipe's published configurations: {lengths}",
            "batches": f"micro-batches x rows, table 4 for GPipe: {batches}; for FTPipe: {theirs}",
            "GPipe": "a synchronous step as FTPipe's runtime takes it by its published source "
            "(github.com/saareliad/FTPipe): all forwards, then backwards, the last micro-batch first; a forward is "
            "computed again before its gradient is waited for, that of the last micro-batch not at all. Stages, their "
            "seconds and messages are those of our programs, which wait first and stand beside it",
            "epochs": f"rows of the published training sets: {samples} (tokens of WikiText-2 over 1024)",
            "Seq-pipe": f"one stage a GPU, the best of {', '.join(f'`{p}`' for p in SEQ)}; `{REST}`",
            "Mixed-pipe": "`partition-mixed`, which chooses L itself unless figure 9 asks; the rest the same",
            "asynchronous": f"`partition-mixed{{asynchronous=true}}`, {FREE}, an update for each batch of table 4; of "
            f"{self.passing} micro-batches or a few more the half in the middle is timed, as an epoch has many more",
        }


def mixed_async(stages: int) -> str:
    """Mixed-pipe as it is planned for asynchronous pipelines."""
    return f"partition-mixed{{stages={stages}, asynchronous=true}}"


def on_gpus(trial: SimulatedStep) -> bool:
    """Whether the plan fits with everything on the GPUs, as FTPipe needs it."""
    return trial.timeline is not None and all(t.op != "fetch" for t in trial.transfers)


def on_gpus_first(trial: SimulatedStep) -> tuple[bool, float]:
    return not on_gpus(trial), gpipe_s(trial) or math.inf


def sent_bytes(trial: SimulatedStep) -> float:
    """Bytes that one micro-batch sends from GPU to GPU, forward and backward."""
    return sum(t.moved_bytes for t in trial.transfers if t.op == "send") / trial.workload.micro_batches


def num_sent(trial: SimulatedStep) -> float:
    """The number of messages of one micro-batch."""
    return sum(t.op == "send" for t in trial.transfers) / trial.workload.micro_batches


def copies(trial: SimulatedStep) -> tuple[int, int]:
    """The number of other stages that receive the value of which most bytes pass between stages, and its bytes."""
    read = Counter(value.name for spec in trial.specs for value in spec.inputs)
    sent = (value for spec in trial.specs for value in spec.outputs if value.requires_grad)
    most = max(sent, key=lambda value: read[value.name] * value.bytes)
    return read[most.name], most.bytes


def bytes_by_row(trial: SimulatedStep, to: int | None = None) -> float:
    """The bytes of `sent_bytes` if a position bias went once for each row, as FTPipe's model adds the mask to it, and
    back; and, if given, `to` that number of other stages."""
    number, num_bytes = copies(trial)
    return sent_bytes(trial) + 2 * num_bytes * ((number if to is None else to) * trial.workload.micro_batch - number)


def slowest_s(trial: SimulatedStep) -> float:
    """Seconds that the busiest GPU computes for one micro-batch."""
    return max(trial.compute_s()) / trial.workload.micro_batches


def row_s(trial: SimulatedStep) -> float | None:
    """Seconds per row of the batch, of a whole synchronous step."""
    return _each_row(trial, trial.step_s)


def gpipe_row_s(trial: SimulatedStep) -> float | None:
    """The same under FTPipe's own runtime."""
    return _each_row(trial, gpipe_s(trial))


def _each_row(trial: SimulatedStep, step_s: float | None) -> float | None:
    work = trial.workload
    return step_s / (work.micro_batch * work.micro_batches) if step_s else None


def passing_row_s(trial: SimulatedStep) -> float | None:
    """Seconds per row while an asynchronous pipeline is full: of the half of its micro-batches in the middle, on the
    device that takes longest for them."""
    if trial.timeline is None:
        return None
    work, slowest = trial.workload, 0.0
    for device in range(len(trial.timeline.device_names)):
        spans = trial.timeline.spans
        ends = sorted(s.end_s for s in spans if s.device == device and s.stream == ops.COMPUTE and s.op == "backward")
        if ends:
            first, last = len(ends) // 4, 3 * len(ends) // 4
            share = (last - first) / len(ends)
            slowest = max(slowest, (ends[last] - ends[first]) / (share * work.micro_batches))
    return slowest / work.micro_batch
