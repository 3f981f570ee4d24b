"""`penstock train`: fine-tune a causal language model, an encoder-decoder or a classifier on files of text.

A run leaves in its directory `checkpoint` (to resume from), `model` (as `from_pretrained` loads it), `best` (the same,
of the best evaluation), `programs` (the files that ran) and `config.yaml`; of an adapter `adapter` (as
`PeftModel.from_pretrained` loads it), and `model` with --merge only. Ctrl-C ends the run after the current step; a
second Ctrl-C ends it at once.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console

from ..compiler.export.export import complete
from ..compiler.job.job import Job
from ..compiler.job.preflight import own_device, require_kind_of_machine
from ..compiler.job.run import ABSENT
from ..compiler.models.named import SEES
from ..compiler.report.answer import many
from ..compiler.search.offer import Offer
from ..data.rows import Rows, evaluation_batches
from ..ir.errors import CheckpointError, NoRoomForCopy, PenstockError, PlanError
from ..ir.units import format_seconds
from ..runtime.state.checkpoint import find_latest, remove_oldest
from ..runtime.state.durable import Lock
from ..training.broadcast import Broadcast, facts_of, telling
from ..training.listener import Listener
from ..training.live.lines import memory_text
from ..training.live.server import PageServer
from ..training.live.terminal import view_on
from ..training.logs.find import find_logs
from ..training.watch import StragglerWatch
from .best import BestSoFar
from .config import FILE, config_text
from .options import TrainOptions
from .task import COUNTED, TrainingTask, compile_task, prepare, require_wishes
from .terminal.interruptible import interruptible
from .terminal.working import notice, working

if TYPE_CHECKING:
    from ..compiler.preference import DPO

WRITTEN = "ssd_written_bytes"  # in a checkpoint: what the run had written to SSDs
STEP = "step-"  # before its number, the name of one of several checkpoints
READ = "rows_read"  # the same: the rows of all steps, which may have had batches of several sizes
BATCH = "batch"  # the same: the rows of its last step
BEST = "best"  # the same: the best evaluation so far


@dataclass
class TrainResult:
    """The result of a run. `losses` are those of its steps; `before` and `after` have accuracy and loss on held-out
    rows."""

    steps: int = 0
    losses: list[float] = field(default_factory=list)
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    interrupted: bool = False


def train(options: TrainOptions, screen: Console) -> TrainResult:
    """Do the whole run. Raises what `penstock.compile` and `Job.step` raise; the last checkpoint then stays as it is.

    Under torchrun every rank calls it and takes its own rows of each batch; only the first rank prints and writes.
    """
    is_main = own_device() == 0
    if not is_main:
        screen = Console(markup=False, emoji=False, quiet=True)
    require_wishes(options)
    _require_writable(options.out)
    last = find_latest(options.out / "checkpoint")
    if options.elastic:
        options = dataclasses.replace(options, resume=last is not None)
    if last is not None and not options.resume:
        raise PlanError(f"{options.out} holds a checkpoint; --resume goes on from it, another --out begins anew")
    if last is None and options.resume:
        raise CheckpointError(f"{options.out} holds no checkpoint to resume from; leave --resume out to begin anew")
    planned = options.with_offer()
    hardware = planned.machine()
    require_kind_of_machine(hardware)
    with ExitStack() as pages:
        if is_main:
            options.out.mkdir(parents=True, exist_ok=True)
            pages.callback(Lock(options.out / ".running", f"--out {options.out}: one run at a time writes there").drop)
        listeners = _listeners(options, screen, pages) if is_main else []
        with notice("reading the data") if is_main else nullcontext():
            task = prepare(options, screen)
        with working() if is_main else nullcontext():
            job = compile_task(planned, task, hardware)
        stages = many(len(job.plan.decisions.stages), "stage")
        screen.print(f"{job.plan.model} on {job.plan.hardware}: {stages}, plan {job.plan.hash}", soft_wrap=True)
        if is_main:
            job.write(options.out / "programs")
            options.remember(options.out / "programs")
            (options.out / FILE).write_text(config_text(options), encoding="utf-8")
        return _Run(options, task, job, screen, listeners).run()


def _require_writable(out: Path) -> None:
    """Raise `PlanError` where nothing can be written into the directory, before the time for data and plan is spent."""
    place = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        why = "is not writable" if place.is_dir() else "is no directory"
        raise PlanError(f"--out {out}: cannot be written, as {place} {why}; name another directory")


def _listeners(options: TrainOptions, screen: Console, pages: ExitStack) -> list[Listener]:
    """The view in the terminal, logs, and a page, which serves from now until `pages` closes."""
    found = [view_on(screen), *find_logs(options.log or (), options.out / "logs")]
    if options.serve is not None:
        page = PageServer(options.serve)
        pages.callback(page.close)
        screen.print(f"live page: {page.address}", soft_wrap=True)
        found.append(page)
    return found


class _Run:
    """A run of a compiled job: its steps, evaluations and checkpoints."""

    def __init__(self, options: TrainOptions, task: TrainingTask, job: Job, screen: Console, listeners: list[Listener]):
        self.options, self.task, self.job, self.screen = options, task, job, screen
        self.checkpoint = options.out / "checkpoint"
        self.broadcast = Broadcast(job, listeners)
        self.watch = StragglerWatch(job, task.steps)
        self.best = BestSoFar(options.best_by, options.patience)
        self.result = TrainResult()
        self.saved_step = 0
        self.first_step, self.first_row = 0, 0  # of this attempt
        self.said_no_room = False
        self.looked_step, self.looked = 0, dict[str, float]()

    def run(self) -> TrainResult:
        result = self.result
        try:
            with self.job, telling(self.broadcast):
                batches = self.begin()
                if not self.options.resume:
                    result.before = self.evaluate("before training")
                with interruptible(self.screen) as stop:
                    self.steps(batches, stop)
                if result.interrupted:
                    self.broadcast.end(interrupted=True)
                else:
                    known = self.looked_step == self.job.step_count
                    result.after = self.looked if known else self.evaluate(f"after {self.job.step_count} steps")
                    self.save_model()
        except (PenstockError, KeyboardInterrupt):
            self.say_how_to_resume()
            raise
        if result.interrupted:
            self.say_how_to_resume()
        return result

    def begin(self) -> Iterator[Any]:
        """Start the devices with new or resumed state, and the logs. Returns the batches that come next."""
        options, job = self.options, self.job
        if options.resume:
            self.resume()
        else:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                _ = job.driver
            for message in said:  # about weights that the model's directory lacks, as it always lacks a new adapter's
                if options.adapter is None or ABSENT not in str(message.message):
                    self.screen.print(str(message.message), soft_wrap=True)
        given = {name: value for name, value in dataclasses.asdict(options).items() if value is not None}
        config = json.loads(json.dumps(given, default=str))
        facts = facts_of(job, options.out.name, str(options.out), self.task.steps, options.batch, config)
        self.broadcast.begin(facts)
        self.saved_step = job.step_count
        return self.batches()

    def resume(self) -> None:
        """Go on from the last checkpoint. Raises `CheckpointError` for one of other data."""
        latest = find_latest(self.checkpoint)
        data = self.job.resume(latest if latest is not None and latest.name.startswith(STEP) else self.checkpoint)
        for key, value in self.what_is_read().items():
            if data.get(key) != value:
                raise CheckpointError(
                    f"{self.checkpoint} was saved with {key} {data.get(key)!r}, this run has {value!r}; resume with "
                    "the same --data, --sequence, --seed and --eval-fraction, or begin anew in another --out"
                )
        own, batch = data.get(BATCH, self.options.batch), self.options.batch
        if own != batch and self.options.max_steps is None:
            raise CheckpointError(
                f"{self.checkpoint} was saved with --batch {own}, this run has {batch}, and --epochs counts steps by "
                f"it; resume with --batch {own}, or say by --max-steps which step is the last"
            )
        self.broadcast.records.load(data.get(WRITTEN, {}))
        self.best.load(data.get(BEST, {}))
        self.first_step = count = self.job.step_count
        self.first_row = data.get(READ, count * batch)
        self.screen.print(f"resumed at step {count}, sample {self.first_row}")

    @property
    def rows_read(self) -> int:
        return self.first_row + (self.job.step_count - self.first_step) * self.options.batch

    def what_is_read(self) -> dict[str, Any]:
        """The settings that must not change for a run to go on."""
        return {"rows": self.task.fingerprint, "sequence": self.options.sequence, "seed": self.options.seed}

    def batches(self) -> Iterator[Any]:
        """This process's rows of each batch, epoch after epoch, from the job's present step on."""
        task, job, size = self.task, self.job, self.options.batch
        if task.stream is not None:
            for batch in task.stream.batches(size, self.rows_read):
                yield Rows(batch).take(job.rows)
        assert task.rows is not None
        sampler = job.sampler(task.rows)
        for chosen in itertools.chain.from_iterable(itertools.repeat(sampler)):
            yield task.take(task.rows, chosen)

    # --- steps

    def steps(self, batches: Iterator[Any], stop: threading.Event) -> None:
        """Train until the last step, or until `stop` is set; save on the way and at the end."""
        options, job, best, result = self.options, self.job, self.best, self.result
        began_s, before = time.perf_counter(), job.step_count
        while not self.is_over and not any(job.of_all_ranks(stop.is_set())):
            batch = next(batches)
            result.losses.append(float(job.step(batch)))
            self.broadcast.stepped(options.batch * _tokens_of_a_row(batch))
            if (offer := self.watch.offer_after_step()) is not None:
                self.tell(offer)
            if options.eval_every and job.step_count % options.eval_every == 0:
                self.look()
            if self.is_over or (options.save_every and job.step_count % options.save_every == 0):
                self.save()
        result.steps, result.interrupted = job.step_count, not self.is_over
        if result.interrupted and options.save_on_stop and self.saved_step < job.step_count:
            self.save()
        elapsed_s = time.perf_counter() - began_s
        self.broadcast.flush()
        for sentence in self.task.stream.lengths.describe() if self.task.stream is not None else ():
            self.screen.print(sentence, soft_wrap=True)
        if best.is_over:
            why = f"no better {best.by} in {best.misses} evaluations"
            self.screen.print(f"{why}: ended at step {job.step_count} of {self.task.steps}")
        if result.interrupted:
            unsaved = job.step_count - self.saved_step
            self.screen.print(f"stopped at step {job.step_count} of {self.task.steps}; {unsaved} steps not saved")
        elif job.last is not None:
            count = job.step_count - before
            self.screen.print(
                f"{many(count, 'step')}, {format_seconds(elapsed_s / count)} each with data and checkpoints; peak "
                f"{memory_text(job.last.peak_bytes)}",
                soft_wrap=True,
            )

    def tell(self, offer: Offer) -> None:
        """Print, log and leave in OUT what another plan would gain, and say what takes it."""
        how = "end this run with Ctrl-C, then the same command with --resume --offered"
        if self.job.driver.is_main:
            offer.write(self.options.offer_directory)
        self.broadcast.offered(offer, how)
        self.screen.print(f"{offer.describe()}; to take the plan, {how}", soft_wrap=True)

    @property
    def is_over(self) -> bool:
        return self.job.step_count >= self.task.steps or self.best.is_over

    def look(self) -> None:
        """Evaluate, and keep the model if it is the best so far."""
        self.looked_step, self.looked = self.job.step_count, self.evaluate(f"step {self.job.step_count}")
        found = self.looked
        if self.best.is_better(found, self.job.step_count):
            self.write_model("best")

    def evaluate(self, when: str) -> dict[str, float]:
        """Loss on the held-out rows, for a classifier also accuracy, for pairs the share whose chosen answer is
        preferred. Empty if no row is held out. Losses of batches count by their rows, as a Trainer counts them."""
        held_out, job, kind = self.task.held_out, self.job, self.task.kind
        if held_out is None or not len(held_out):
            return {}
        right, total = 0, 0.0
        for rows, counted in evaluation_batches(held_out, self.options.batch):
            out = job.evaluate(self.task.take(rows, job.rows), outputs=not self.task.micro_batches)
            loss, count = out.loss, len(counted)
            if kind == "classification":
                right += int((out.logits[:count].argmax(-1) == held_out.labels[list(counted)]).sum())
            elif kind == "preference":
                model, margins = cast("DPO", job.model), out.margins[:count]
                right += int((margins > 0).sum())
                loss = model.pair_loss(margins)
            total += float(loss) * count
        found = {"loss": total / len(held_out)}
        text = f"loss {found['loss']:.4f}"
        if kind in COUNTED:
            found["accuracy"] = right / len(held_out)
            text = f"accuracy {found['accuracy']:.1%}, {text}"
        self.broadcast.evaluated(found)
        self.screen.print(f"{when}: {text} on {len(held_out)} held-out rows")
        return found

    # --- what it leaves

    def save(self) -> None:
        job = self.job
        _ = job.last  # which saving waits for, too
        self.broadcast.tell_ended()
        data = {
            **self.what_is_read(), READ: self.rows_read, BATCH: self.options.batch,
            WRITTEN: self.broadcast.records.state(), BEST: self.best.state(),
        }  # fmt: skip
        self.saved_step = job.step_count
        limit = self.options.save_total_limit
        is_one = limit == 1 and not any(self.checkpoint.glob(f"{STEP}*"))
        place = self.checkpoint if is_one else self.checkpoint / f"{STEP}{job.step_count}"
        try:
            save = job.save(place, data=data, wait=False)
            if self.is_over:
                save.wait()
        except NoRoomForCopy as error:
            if not self.said_no_room:
                self.screen.print(f"training waits for its saves: {error}", soft_wrap=True)
            self.said_no_room = True
            job.save(place, data=data)
        if not is_one and job.driver.is_main:
            remove_oldest(self.checkpoint, limit if self.is_over else max(1, limit - 1))

    def write_model(self, name: str, merge: bool = False) -> Path:
        """The weights as they are now, and the tokenizer, in a directory of that name."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `begin` has printed the warnings about weights that the directory lacks
            directory = self.job.save_pretrained(self.options.out / name, merge=merge)
        codec = self.task.codec
        if codec.tokenizer is not None and self.job.driver.is_main:
            (codec.processor or codec.tokenizer).save_pretrained(str(directory))
        return directory

    def save_model(self) -> None:
        out, is_adapter = self.options.out, self.options.adapter is not None
        directory = self.write_model("adapter" if is_adapter else "model")
        if self.options.merge:
            directory = self.write_model("model", merge=True)
        what = "adapter" if is_adapter and not self.options.merge else "model"
        places = f"{what} in {directory}, checkpoint in {self.checkpoint}, programs in {out / 'programs'}"
        self.screen.print(places, soft_wrap=True)
        if self.task.named.head in ("causal-lm", SEES) and self.job.driver.is_main:
            exported = complete(directory, self.task.named.directory, self.options.gguf)
            self.screen.print(exported.describe(), soft_wrap=True)

    def say_how_to_resume(self) -> None:
        if find_latest(self.checkpoint) is not None:
            said = f"the last checkpoint is in {self.checkpoint}; the same command with --resume goes on from it"
            self.screen.print(said, soft_wrap=True)
        elif self.result.losses:
            advice = "" if self.options.save_every else "; --save-every STEPS makes checkpoints to resume from"
            self.screen.print(f"nothing was saved yet{advice}")


def _tokens_of_a_row(batch: Any) -> int:
    first = batch[0] if isinstance(batch, list) else batch
    return sum(value.shape[1] for name, value in first.items() if name.endswith("input_ids"))
