"""The task of `penstock train`: the model and its rows, and the job compiled for them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from ..compiler.export.gguf_file import library, require_known, require_type
from ..compiler.job.job import Job
from ..compiler.models.named import SEES, NamedModel, find_model
from ..compiler.planning import rare_collections
from ..compiler.preference import DPO
from ..compiler.report.answer import many
from ..data.codec import Codec
from ..data.files import SPLITS
from ..data.hub import is_on_hub
from ..data.read import read_rows
from ..data.rows import Rows, with_labels_alike
from ..data.streamed import StreamedRows
from ..ir.errors import PlanError
from ..ir.machine.hardware import Hardware
from .best import LOWER_IS_BETTER, BestSoFar
from .options import TrainOptions
from .schedule import schedule

ON_TOKENS = ("text", "chat", "completion")  # kinds of data with the same inputs
COUNTED = ("classification", "preference")  # kinds of data whose evaluation counts what is right


@dataclass
class TrainingTask:
    """The model, its rows and the number of steps: everything but the devices. `stream` takes the place of `rows` where
    they are read while training. `micro_batches`: of a step, which takes a list of these, as images have several sizes;
    0 where it takes a batch."""

    named: NamedModel
    codec: Codec
    kind: str
    rows: Rows | None
    held_out: Rows | None
    steps: int
    stream: StreamedRows | None = None
    micro_batches: int = 0

    @property
    def fingerprint(self) -> str:
        """A hash of the training rows, as a run resumes only on the same data."""
        if self.stream is not None:
            return self.stream.fingerprint
        assert self.rows is not None
        found = hashlib.sha256()
        for name, columns in {**{k: [v] for k, v in self.rows.columns.items()}, **self.rows.uneven}.items():
            found.update(name.encode())
            for column in columns:
                found.update(column.contiguous().numpy().tobytes())
        return found.hexdigest()[:16]

    def take(self, rows: Rows, indices: Sequence[int]) -> Any:
        """These rows as a step takes them: one batch, or a list of micro-batches."""
        return rows.take_parts(indices, self.micro_batches) if self.micro_batches else rows.take(indices)

    def example(self, batch: int) -> Any:
        if self.stream is not None:
            return Rows(next(self.stream.batches(batch))).take(range(batch))
        assert self.rows is not None
        first = self.rows.order_by_size() if self.micro_batches else range(len(self.rows))
        return self.take(self.rows, [first[i % len(self.rows)] for i in range(batch)])


def require_wishes(options: TrainOptions) -> None:
    """Raise `PlanError` for options that do not go together. Neither the model nor the data is read."""
    if not options.data:
        raise PlanError("name the data to train on: --data FILE.txt, FILE.jsonl, FILE.parquet, a folder or OWNER/NAME")
    schedule(options.schedule, 0, _warmup(options, 0))
    options.optimizer_partial()
    if options.merge and options.adapter is None:
        raise PlanError("--merge without --adapter: there is nothing to merge, and the whole model is saved as it is")
    if options.gguf is not None:
        require_type(options.gguf)
        if options.adapter is not None and not options.merge:
            raise PlanError("--gguf with --adapter: a file of GGUF has the whole model; give --merge, too")
        library()
    if options.eval_every and not (options.eval_data or options.eval_fraction):
        raise PlanError("--eval-every: no rows are held out to evaluate on; give --eval-data or --eval-fraction")
    if options.patience and not options.eval_every:
        raise PlanError("--patience: evaluations count, and there are none; give --eval-every")
    if options.best_by not in LOWER_IS_BETTER:
        raise PlanError(f"--best-by {options.best_by!r}; allowed are {', '.join(LOWER_IS_BETTER)}")
    if options.best_by != BestSoFar.by and not options.eval_every:
        raise PlanError(f"--best-by {options.best_by}: without evaluations there is no best model; give --eval-every")
    if options.eval_data and options.eval_fraction:
        raise PlanError("--eval-data and --eval-fraction: rows are held out by one of them")
    both = {path.resolve() for path in options.data} & {path.resolve() for path in options.eval_data or ()}
    if both:
        raise PlanError(
            f"--eval-data {both.pop()}: it is trained on; give other files, or of a folder of `datasets` with several "
            "splits the split's own: FOLDER/test"
        )
    if options.split != "train" and not any((path / SPLITS).is_file() or is_on_hub(path) for path in options.data):
        raise PlanError(
            f"--split {options.split}: no --data is a folder that `datasets` saved with several splits, or a name on "
            "the hub"
        )


def _find_model(options: TrainOptions) -> NamedModel:
    """The model. Raises `PlanError` for a model that reads no text, and for options that it cannot keep."""
    named = options.named_model()
    item = named.items(options.batch, options.sequence)[1]
    if item != "token":
        inputs = "inputs of its own" if named.inputs is not None else f"{item}s"
        raise PlanError(
            f"penstock train reads text, and {options.model} takes {inputs}; call penstock.compile(model, "
            "hardware, example_inputs=...) from Python, and job.step with each batch"
        )
    if options.gguf is not None:
        if named.head != "causal-lm":
            raise PlanError(f"--gguf: written for models with the head causal-lm, and {options.model} has {named.head}")
        require_known(named.config.to_dict())
    named.check_sequence(options.sequence)
    if options.image_size is not None and named.head != SEES:
        raise PlanError(f"--image-size {options.image_size}: {options.model} reads text alone; leave it out")
    return named


def prepare(options: TrainOptions, screen: Console) -> TrainingTask:
    """Read the data into rows and find the model for them. Raises `PlanError` naming options that do not fit; the model
    is looked at before the data."""
    named = _find_model(options)
    codec = Codec.read(named.directory, named.head == SEES, options.size_of_images)
    if named.head == SEES and codec.processor is None:
        raise PlanError(f"{options.model} sees, and has no processor here: name a directory that has one, too")
    if codec.is_bytes:
        if options.gguf is not None:
            raise PlanError(f"--gguf: {options.model} comes with no tokenizer, which llama.cpp needs in the file")
        screen.print(f"{options.model} comes with no tokenizer: the bytes of the text are its tokens")
    assert options.data is not None
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
        held_out = _held_out(options, codec, named, read.kind, read.classes, screen)
        if read.kind == "seq2seq":
            rows, held_out = with_labels_alike(rows, held_out)
    if options.eval_fraction and not len(held_out):
        raise PlanError(f"--eval-fraction {options.eval_fraction} of {len(rows)} rows is none; give a larger one")
    if not len(rows):
        raise PlanError(f"--eval-fraction {options.eval_fraction} leaves no row to train on; give a smaller one")
    steps = options.max_steps or math.ceil(options.epochs * len(rows) / options.batch)
    if not steps:
        raise PlanError("--epochs 0: the run would have no step; give --epochs 1 or another share, or --max-steps")
    what = f"{len(read.classes)} classes" if read.classes else f"{read.kind}, {rows.describe()}"
    screen.print(
        f"{len(rows)} rows to train on, {len(held_out)} held out, {what}; {many(steps, 'step')} of {options.batch} rows"
    )
    count = 0
    if rows.uneven or held_out.uneven:
        count = options.micro_batches or options.batch
        if options.batch % count:
            raise PlanError(f"--micro-batches {count}: it is no divisor of --batch {options.batch}")
        screen.print(
            f"images have several sizes: a step takes {count} micro-batches as they are, and each new combination of "
            "sizes in one is captured once, in seconds; --image-size 448 makes all of one size",
            soft_wrap=True,
        )
    return TrainingTask(named, codec, read.kind, rows, held_out, steps, micro_batches=count)


def _prepare_stream(
    options: TrainOptions, named: NamedModel, codec: Codec, stream: StreamedRows, screen: Console
) -> TrainingTask:
    if options.max_steps is None:
        raise PlanError("--streaming: how many rows there are is not known before the last one; give --max-steps")
    if options.eval_fraction:
        raise PlanError("--streaming --eval-fraction: rows are not known beforehand; hold out files: --eval-data")
    _require_fitting(options, named, codec, stream.kind)
    for sentence in stream.said:
        screen.print(sentence, soft_wrap=True)
    held_out = _held_out(options, codec, named, stream.kind, [], screen) if options.eval_data else None
    screen.print(f"rows of {stream.kind} read while training; {options.max_steps} steps of {options.batch} rows")
    return TrainingTask(named, codec, stream.kind, None, held_out, options.max_steps, stream)


def _held_out(
    options: TrainOptions, codec: Codec, named: NamedModel, kind: str, classes: list[str], screen: Console
) -> Rows:
    """The rows of --eval-data. Raises `PlanError` for rows of other inputs than those to train on, which are of `kind`
    and have these classes."""
    assert options.eval_data is not None
    read = read_rows(options.data_spec(options.eval_data), codec, named.head, named.skipped_positions)
    if read.kind != kind and not {read.kind, kind} <= set(ON_TOKENS):
        raise PlanError(f"--eval-data is {read.kind}, and --data is {kind}; give files of one kind")
    for sentence in read.said:
        screen.print(f"held out: {sentence}", soft_wrap=True)
    unknown = [name for name in read.classes if name not in classes]
    if unknown:
        raise PlanError(f"--eval-data has the label {unknown[0]!r}, which no row to train on has")
    if not read.classes:
        return read.rows
    number = torch.tensor([classes.index(name) for name in read.classes])
    return Rows({**read.rows.columns, "labels": number[read.rows.labels]})


def _require_fitting(options: TrainOptions, named: NamedModel, codec: Codec, kind: str) -> None:
    """Raise `PlanError` for wishes that this kind of data, this model or this tokenizer cannot keep."""
    if named.weights is None and "/" in (options.model or "") and named.directory is None:
        raise PlanError(
            f"{options.model} has no weights here: it is no directory, nor in the hub's cache. --download gets them; "
            f"--model {(options.model or '').rpartition('/')[2]} begins with new ones"
        )
    if options.best_by == "accuracy" and kind not in COUNTED:
        raise PlanError(f"--best-by accuracy: {kind} is evaluated by its loss; accuracy is for {' and '.join(COUNTED)}")
    if options.beta is not None and kind != "preference":
        raise PlanError(f"--beta {options.beta:g}: it is for pairs of answers, and the data is {kind}; leave it out")
    known = named.config.get_text_config().vocab_size
    if codec.vocab_size > known:
        raise PlanError(
            f"the tokenizer has {codec.vocab_size} tokens, {options.model} {known}; "
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


def compile_task(options: TrainOptions, task: TrainingTask, hardware: Hardware) -> Job:
    """Compile the job. A model with weights stays on the meta device, unless its adapter begins from their values or
    learns from pairs; one without gets new weights."""
    named = task.named
    named.require_libraries()
    needs_values = task.kind == "preference" or (named.adapter is not None and named.adapter.dora)
    weights = None if needs_values else named.weights
    model = named.on_meta() if weights is not None else named.load(options.seed)
    if task.kind == "preference":
        model = (DPO(model) if options.beta is None else DPO(model, options.beta)).train()
    example = task.example(options.batch)
    with rare_collections():
        job = options.compile_model(
            model,
            hardware,
            example,
            weights,
            lr_scheduler=schedule(options.schedule, task.steps, _warmup(options, task.steps)),
            steps=task.steps,
        )
    if task.micro_batches and (reason := job.why_one_form):
        job.close()
        raise PlanError(
            f"images have several sizes or numbers, which a step cannot take with {reason}: give each row the same "
            "number, of one size, as --image-size 448 makes them"
        )
    return job


def _warmup(options: TrainOptions, steps: int) -> int:
    if options.warmup_steps and options.warmup_ratio:
        raise PlanError("--warmup-steps and --warmup-ratio: give one of them")
    return options.warmup_steps or math.ceil(options.warmup_ratio * steps)
