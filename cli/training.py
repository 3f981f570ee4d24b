"""`penstock train`: fine-tune a causal language model, an encoder-decoder or a classifier on files of text.

A run leaves in its directory `checkpoint` (to resume from), `model` (as `from_pretrained` loads it) and `programs`
(the files that ran); of an adapter `adapter` (as `PeftModel.from_pretrained` loads it), and `model` with --merge only.
Ctrl-C ends the run after the current step; a second Ctrl-C ends it at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ..compiler.garbage import rare_collections
from ..compiler.job.job import Job
from ..compiler.job.preflight import own_device
from ..compiler.models.named import NamedModel, find_model
from ..compiler.preference import DPO
from ..data.codec import Codec
from ..data.read import read_rows
from ..data.rows import Rows, evaluation_batches
from ..data.streamed import StreamedRows
from ..ir.errors import CheckpointError, NoRoomForCopy, PenstockError, PlanError
from ..ir.units import format_seconds
from ..runtime.processes.interrupt import ECHO_S
from ..runtime.processes.torchrun import TorchrunDriver
from ..runtime.state.checkpoint import find_latest
from ..training.broadcast import Broadcast, facts_of, telling
from ..training.listener import Listener
from ..training.live.lines import memory_text
from ..training.live.server import PageServer
from ..training.live.terminal import view_on
from ..training.logs.find import find_logs
from .best import BestSoFar
from .config import FILE, config_text
from .options import TrainOptions
from .schedule import schedule
from .working import working

WRITTEN = "ssd_written_bytes"  # in a checkpoint: what the run had written to SSDs
BEST = "best"  # the same: the best evaluation so far


@dataclass
class TrainResult:
    """What a run did. `losses` are those of its steps; `before` and `after` have accuracy and loss on held-out rows."""

    steps: int = 0
    losses: list[float] = field(default_factory=list)
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    interrupted: bool = False


@dataclass
class TrainingTask:
    """The model, its rows and the number of steps: everything but the devices. `stream` takes the place of `rows` where
    they are read while training."""

    named: NamedModel
    codec: Codec
    kind: str
    rows: Rows | None
    held_out: Rows | None
    steps: int
    stream: StreamedRows | None = None

    @property
    def fingerprint(self) -> str:
        """A hash of the training rows, as a run resumes only on the same data."""
        if self.stream is not None:
            return self.stream.fingerprint
        assert self.rows is not None
        found = hashlib.sha256()
        for name, column in self.rows.columns.items():
            found.update(name.encode() + column.contiguous().numpy().tobytes())
        return found.hexdigest()[:16]

    def example(self, batch: int) -> dict[str, Tensor]:
        """A batch to compile for."""
        if self.stream is not None:
            return next(self.stream.batches(batch))
        assert self.rows is not None
        return self.rows.take([i % len(self.rows) for i in range(batch)])


def train(options: TrainOptions, screen: Console) -> TrainResult:
    """Do the whole run. Raises what `penstock.compile` and `Job.step` raise; the last checkpoint then stays as it is.

    Under torchrun every rank calls it and takes its own rows of each batch; only the first rank prints and writes.
    """
    is_main = own_device() == 0
    if not is_main:
        screen = Console(quiet=True)
    last = find_latest(options.out / "checkpoint")
    if options.elastic:
        options = dataclasses.replace(options, resume=last is not None)
    if last is not None and not options.resume:
        raise PlanError(f"{options.out} holds a checkpoint; --resume goes on from it, another --out begins anew")
    if last is None and options.resume:
        raise CheckpointError(f"{options.out} holds no checkpoint to resume from; leave --resume out to begin anew")
    with ExitStack() as pages:
        return _train(options, screen, _listeners(options, screen, pages) if is_main else [])


def _listeners(options: TrainOptions, screen: Console, pages: ExitStack) -> list[Listener]:
    """The view in the terminal, logs, and a page, which serves from now until `pages` closes."""
    found = [view_on(screen), *find_logs(options.log or (), options.out / "logs")]
    if options.serve is not None:
        page = PageServer(options.serve)
        pages.callback(page.close)
        screen.print(f"live page: {page.address}", soft_wrap=True)
        found.append(page)
    return found


def _train(options: TrainOptions, screen: Console, listeners: list[Listener]) -> TrainResult:
    is_main = own_device() == 0
    task = prepare(options, screen)
    with working() if is_main else nullcontext():
        job = compile_task(options, task)
    screen.print(
        f"{job.plan.model} on {job.plan.hardware}: {len(job.plan.decisions.stages)} stages, plan {job.plan.hash}"
    )
    if is_main:
        job.write(options.out / "programs")
        options.remember(options.out / "programs")
        (options.out / FILE).write_text(config_text(options), encoding="utf-8")
    result = TrainResult()
    best = BestSoFar(options.best_by, options.patience)
    try:
        with job, telling(Broadcast(job, listeners)) as broadcast:
            batches = _begin(options, task, job, screen, broadcast, best)
            if not options.resume:
                result.before = evaluate(job, task, options.batch, screen, "before training", broadcast)
            with interruptible(screen) as stop:
                _steps(options, task, job, screen, batches, result, stop, broadcast, best)
            if result.interrupted:
                broadcast.end(interrupted=True)
            else:
                result.after = evaluate(job, task, options.batch, screen, f"after {job.step_count} steps", broadcast)
                _save_model(options, task, job, screen)
    except (PenstockError, KeyboardInterrupt):
        _say_how_to_resume(options, screen)
        raise
    if result.interrupted:
        _say_how_to_resume(options, screen)
    return result


def prepare(options: TrainOptions, screen: Console) -> TrainingTask:
    """Read the data into rows and find the model for them. Raises `PlanError` naming options that do not fit."""
    if not options.data:
        raise PlanError("name the data to train on: --data FILE.txt, FILE.jsonl, FILE.parquet or a folder")
    if options.merge and options.adapter is None:
        raise PlanError("--merge without --adapter: there is nothing to merge, and the whole model is saved as it is")
    if options.eval_every and not (options.eval_data or options.eval_fraction):
        raise PlanError("--eval-every: no rows are held out to evaluate on; give --eval-data or --eval-fraction")
    if options.patience and not options.eval_every:
        raise PlanError("--patience: evaluations count, and there are none; give --eval-every")
    if options.eval_data and options.eval_fraction:
        raise PlanError("--eval-data and --eval-fraction: rows are held out by one of them")
    named = options.named_model()
    named.check_sequence(options.sequence)
    codec = Codec.of_directory(named.directory)
    if codec.is_bytes:
        screen.print(f"{options.model} comes with no tokenizer: the bytes of the text are its tokens")
    spec = options.data_spec(options.data)
    if options.streaming:
        return _prepare_stream(options, named, codec, StreamedRows(spec, codec, named.head), screen)
    read = read_rows(spec, codec, named.head, named.skipped_positions)
    for sentence in read.said:
        screen.print(sentence, soft_wrap=True)
    if read.classes:
        named = _with_classes(options, named, read.classes)
    _require_fitting(options, named, codec, read.kind)
    rows, held_out = read.rows.split(options.eval_fraction, options.seed)
    if options.eval_data:
        held_out = _held_out(options, codec, named, read.classes)
    if not len(rows):
        raise PlanError(f"--eval-fraction {options.eval_fraction} leaves no row to train on; give a smaller one")
    steps = options.max_steps or math.ceil(options.epochs * len(rows) / options.batch)
    what = f"{len(read.classes)} classes" if read.classes else f"{read.kind}, {rows.describe()}"
    screen.print(
        f"{len(rows)} rows to train on, {len(held_out)} held out, {what}; {steps} steps of {options.batch} rows"
    )
    return TrainingTask(named, codec, read.kind, rows, held_out, steps)


def _prepare_stream(
    options: TrainOptions, named: NamedModel, codec: Codec, stream: StreamedRows, screen: Console
) -> TrainingTask:
    if options.max_steps is None:
        raise PlanError("--streaming: how many rows there are is not known before the last one; give --max-steps")
    if options.eval_fraction:
        raise PlanError("--streaming --eval-fraction: rows are not known beforehand; hold out files: --eval-data")
    _require_fitting(options, named, codec, stream.kind)
    held_out = _held_out(options, codec, named, []) if options.eval_data else None
    screen.print(f"rows of {stream.kind} read while training; {options.max_steps} steps of {options.batch} rows")
    return TrainingTask(named, codec, stream.kind, None, held_out, options.max_steps, stream)


def _held_out(options: TrainOptions, codec: Codec, named: NamedModel, classes: list[str]) -> Rows:
    assert options.eval_data is not None
    read = read_rows(options.data_spec(options.eval_data), codec, named.head, named.skipped_positions)
    unknown = [name for name in read.classes if name not in classes]
    if unknown:
        raise PlanError(f"--eval-data has the label {unknown[0]!r}, which no row to train on has")
    if not read.classes:
        return read.rows
    number = torch.tensor([classes.index(name) for name in read.classes])
    return Rows({**read.rows.columns, "labels": number[read.rows.labels]})


def _require_fitting(options: TrainOptions, named: NamedModel, codec: Codec, kind: str) -> None:
    """Raise `PlanError` for a tokenizer larger than the model, and pairs without adapters."""
    if codec.vocab_size > named.config.vocab_size:
        raise PlanError(
            f"the tokenizer has {codec.vocab_size} tokens, {options.model} {named.config.vocab_size}; "
            f"allowed: {options.model}:vocab_size={codec.vocab_size} with new weights, or the model's own tokenizer"
        )
    if kind == "preference" and options.adapter is None:
        raise PlanError(
            "pairs of answers need --adapter: their reference is the model with its adapters off; --adapter lora:r=16"
        )


def _with_classes(options: TrainOptions, named: NamedModel, classes: list[str]) -> NamedModel:
    """The same model with one output per class, or more if the options ask for more."""
    if len(classes) < 2:
        raise PlanError(f"the data has the one label {classes[0]!r}; a classifier needs two or more")
    if options.labels is not None and options.labels < len(classes):
        raise PlanError(f"--labels {options.labels}, but the data has {len(classes)}: {', '.join(classes[:8])}")
    count = options.labels or len(classes)
    assert options.model is not None
    found = find_model(
        options.model,
        head=named.head,
        num_labels=count,
        dropout=options.dropout,
        download=options.download,
        adapter=options.adapter,
        base=options.base,
    )
    names = [*classes, *(f"unused {i}" for i in range(len(classes), count))]
    found.config.id2label = dict(enumerate(names))
    found.config.label2id = {name: i for i, name in enumerate(names)}
    return found


def compile_task(options: TrainOptions, task: TrainingTask) -> Job:
    """Compile the job. A model with weights stays on the meta device, unless its adapter begins from their values or
    learns from pairs; one without gets new weights."""
    named = task.named
    needs_values = task.kind == "preference" or (named.adapter is not None and named.adapter.dora)
    weights = named.directory if named.has_weights and not needs_values else None
    model = named.on_meta() if weights is not None else named.in_memory(options.seed)
    if task.kind == "preference":
        model = DPO(model, options.beta).train()
    example = task.example(options.batch)
    with rare_collections():
        return options.compile_model(
            model,
            options.machine(),
            example,
            weights,
            lr_scheduler=schedule(options.schedule, task.steps, _warmup(options, task.steps)),
            steps=task.steps,
        )


def _warmup(options: TrainOptions, steps: int) -> int:
    if options.warmup_steps and options.warmup_ratio:
        raise PlanError("--warmup-steps and --warmup-ratio: give one of them")
    return options.warmup_steps or math.ceil(options.warmup_ratio * steps)


def _begin(
    options: TrainOptions, task: TrainingTask, job: Job, screen: Console, broadcast: Broadcast, best: BestSoFar
) -> Iterator[dict[str, Tensor]]:
    """Start the devices with new or resumed state, and the logs. Returns the batches that come next."""
    batches = _begin_job(options, task, job, screen, broadcast, best)
    given = {name: value for name, value in dataclasses.asdict(options).items() if value is not None}
    config = json.loads(json.dumps(given, default=str))
    broadcast.begin(facts_of(job, options.out.name, str(options.out), task.steps, options.batch, config))
    return batches


def _begin_job(
    options: TrainOptions, task: TrainingTask, job: Job, screen: Console, broadcast: Broadcast, best: BestSoFar
) -> Iterator[dict[str, Tensor]]:
    if not options.resume:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            _ = job.driver
        for message in said:  # about weights that the model's directory lacks
            screen.print(str(message.message), soft_wrap=True)
        return _batches(options, task, job)
    data = job.resume(options.out / "checkpoint")
    now = {"rows": task.fingerprint, "sequence": options.sequence, "seed": options.seed}
    for key, value in now.items():
        if data.get(key) != value:
            raise CheckpointError(
                f"{options.out / 'checkpoint'} was saved with {key} {data.get(key)!r}, this run has {value!r}; resume "
                "with the same --data, --sequence, --seed and --eval-fraction, or begin anew in another --out"
            )
    broadcast.records.load(data.get(WRITTEN, {}))
    best.load(data.get(BEST, {}))
    screen.print(f"resumed at step {job.step_count}, sample {job.step_count * options.batch}")
    return _batches(options, task, job)


def _batches(options: TrainOptions, task: TrainingTask, job: Job) -> Iterator[dict[str, Tensor]]:
    """This process's rows of each batch, epoch after epoch, from the job's present step on."""
    if task.stream is not None:
        for batch in task.stream.batches(options.batch, job.step_count * options.batch):
            yield Rows(batch).take(job.rows)
    assert task.rows is not None
    sampler = job.sampler(task.rows)
    for chosen in itertools.chain.from_iterable(itertools.repeat(sampler)):
        yield task.rows.take(chosen)


def _steps(
    options: TrainOptions,
    task: TrainingTask,
    job: Job,
    screen: Console,
    batches: Iterator[dict[str, Tensor]],
    result: TrainResult,
    stop: threading.Event,
    broadcast: Broadcast,
    best: BestSoFar,
) -> None:
    """Train until the last step or until `stop` is set; save on the way and at the end."""
    saved_step = job.step_count
    began_s, before = time.perf_counter(), job.step_count
    while True:
        if job.step_count >= task.steps or best.is_over or any(job.of_all_ranks(stop.is_set())):
            break
        batch = next(batches)
        result.losses.append(float(job.step(batch)))
        broadcast.stepped(options.batch * _tokens_of_a_row(batch))
        if options.eval_every and job.step_count % options.eval_every == 0:
            _look(options, task, job, screen, broadcast, best)
        due = options.save_every and job.step_count % options.save_every == 0
        if due or job.step_count == task.steps or best.is_over:
            _save(options, task, job, screen, broadcast, best)
            saved_step = job.step_count
    result.interrupted = job.step_count < task.steps and not best.is_over
    if result.interrupted and options.save_on_stop and saved_step < job.step_count:
        _save(options, task, job, screen, broadcast, best)
        saved_step = job.step_count
    elapsed_s = time.perf_counter() - began_s
    broadcast.flush()
    result.steps = job.step_count
    if best.is_over:
        why = f"no better {best.by} in {best.misses} evaluations"
        screen.print(f"{why}: ended at step {job.step_count} of {task.steps}")
    if result.interrupted:
        screen.print(f"stopped at step {job.step_count} of {task.steps}; {job.step_count - saved_step} steps not saved")
    elif job.last is not None:
        mean_s = elapsed_s / (job.step_count - before)
        screen.print(
            f"{job.step_count - before} steps, {format_seconds(mean_s)} each with data and checkpoints; peak "
            f"{memory_text(job.last.peak_bytes)}",
            soft_wrap=True,
        )


def _tokens_of_a_row(batch: dict[str, Tensor]) -> int:
    return sum(value.shape[1] for name, value in batch.items() if name.endswith("input_ids"))


def _look(
    options: TrainOptions, task: TrainingTask, job: Job, screen: Console, broadcast: Broadcast, best: BestSoFar
) -> None:
    """Evaluate, and keep the model if it is the best so far."""
    found = evaluate(job, task, options.batch, screen, f"step {job.step_count}", broadcast)
    if best.is_better(found, job.step_count):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `_begin` has printed what the directory lacks
            directory = job.save_pretrained(options.out / "best")
        if task.codec.tokenizer is not None and job.driver.is_main:
            task.codec.tokenizer.save_pretrained(str(directory))


def _save(
    options: TrainOptions, task: TrainingTask, job: Job, screen: Console, broadcast: Broadcast, best: BestSoFar
) -> None:
    _ = job.last  # which saving waits for, too
    broadcast.tell_ended()
    data: dict[str, Any] = {"rows": task.fingerprint, "sequence": options.sequence, "seed": options.seed}
    data |= {WRITTEN: broadcast.records.state(), BEST: best.state()}
    try:
        save = job.save(options.out / "checkpoint", data=data, wait=False)
    except NoRoomForCopy as error:
        screen.print(f"training waits for this save: {error}", soft_wrap=True)
        job.save(options.out / "checkpoint", data=data)
        return
    if job.step_count == task.steps or best.is_over:
        save.wait()


def _save_model(options: TrainOptions, task: TrainingTask, job: Job, screen: Console) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `_begin` has printed the warnings about weights that the directory lacks
        directory = job.save_pretrained(options.out / ("model" if options.adapter is None else "adapter"))
        if options.merge:
            directory = job.save_pretrained(options.out / "model", merge=True)
    if task.codec.tokenizer is not None and job.driver.is_main:
        task.codec.tokenizer.save_pretrained(str(directory))
    what = "model" if options.adapter is None or options.merge else "adapter"
    screen.print(
        f"{what} in {directory}, checkpoint in {options.out / 'checkpoint'}, programs in {options.out / 'programs'}"
    )


def evaluate(
    job: Job, task: TrainingTask, batch: int, screen: Console, when: str, broadcast: Broadcast
) -> dict[str, float]:
    """Loss on the held-out rows, for a classifier also accuracy, for pairs the share whose chosen answer is preferred.
    Empty if no row is held out.

    The loss leaves out the last batch if it is not full, unless it is the only one.
    """
    if task.held_out is None or not len(task.held_out):
        return {}
    right = 0
    losses: list[float] = []
    for chosen, count in evaluation_batches(task.held_out, batch):
        out = job.evaluate(task.held_out.take(chosen[job.rows.start : job.rows.stop]))
        if count == batch or not losses:
            losses.append(float(out.loss))
        if task.kind == "classification":
            right += int((out.logits.argmax(-1) == task.held_out.labels[chosen])[:count].sum())
        elif task.kind == "preference":
            right += int((out.margins > 0)[:count].sum())
    found = {"loss": sum(losses) / len(losses)}
    text = f"loss {found['loss']:.4f}"
    if task.kind in ("classification", "preference"):
        found["accuracy"] = right / len(task.held_out)
        text = f"accuracy {found['accuracy']:.1%}, {text}"
    broadcast.evaluated(found)
    screen.print(f"{when}: {text} on {len(task.held_out)} held-out rows")
    return found


def _say_how_to_resume(options: TrainOptions, screen: Console) -> None:
    if find_latest(options.out / "checkpoint") is not None:
        screen.print(
            f"the last checkpoint is in {options.out / 'checkpoint'}; the same command with --resume goes on from it"
        )
    else:
        screen.print("nothing was saved yet; --save-every STEPS makes checkpoints to resume from")


@contextmanager
def interruptible(screen: Console) -> Iterator[threading.Event]:
    """An event that the first Ctrl-C (or SIGTERM) sets, and the end; the second one raises KeyboardInterrupt.

    torchrun passes on a signal that the terminal has already sent to its ranks, so under torchrun a signal that follows
    within `ECHO_S` does not count as a second one.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may take signals
        return

    echo_s = ECHO_S if TorchrunDriver.is_present() else 0.0
    first_s, is_over = 0.0, False

    def take(number: int, frame: object) -> None:
        nonlocal first_s
        if stop.is_set() and time.monotonic() > first_s + echo_s:
            raise KeyboardInterrupt
        if stop.is_set():
            return
        stop.set()
        first_s = time.monotonic()

    def say() -> None:
        stop.wait()
        if not is_over:
            screen.print("stopping behind this step; once more stops at once")

    teller = threading.Thread(target=say, name="penstock-stop", daemon=True)  # printing is not safe in a handler
    teller.start()
    before = {number: signal.signal(number, take) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        is_over = True
        stop.set()
        teller.join()
