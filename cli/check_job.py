"""`penstock check` for a model by name, or for a written directory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from torch import Tensor

from ..compiler.check.check import CheckReport, check
from ..compiler.models.named import NamedModel
from ..compiler.packing.documents import pack_documents
from ..compiler.planning import rare_collections
from ..ir.errors import PlanError
from .options import JobOptions


def check_named(options: JobOptions, steps: int) -> CheckReport:
    """Compile the model and check it: with dropout against the captured graph, without it also against the model."""
    report = _check(options, steps)
    if report.skipped is None:
        return report
    other = _check(dataclasses.replace(options, dropout=False), steps)
    relevant = [d for d in other.differences if d.against == "model itself"]
    renamed = [dataclasses.replace(d, against="model itself, dropout off") for d in relevant]
    return dataclasses.replace(report, differences=[*report.differences, *renamed], skipped=other.skipped)


def _check(options: JobOptions, steps: int) -> CheckReport:
    named = options.named_model()
    model = named.load(options.seed)
    batches = [named.random_batch(options.batch, options.sequence, options.seed + i) for i in range(steps)]
    with rare_collections():
        job = options.compile_model(model, options.machine(), batches[0])
    return check(job, model, batches)


def check_written(directory: Path, options: JobOptions, steps: int, trust: bool = False) -> CheckReport:
    """Check the files of a directory, also after an edit, on the model that they were planned for.

    `options.model` names the model if the directory does not. For `trust` see `penstock.load`.
    """
    from ..compiler.load import load

    named = (options if options.model is not None else JobOptions.recall(directory)).named_model()
    model = named.load(options.seed)
    job = load(directory, model, trust=trust)
    job.folder.settings = job.folder.settings.model_copy(update={"weights": None})  # the model has them
    shapes = {name: shape for name, shape, _ in job.folder.settings.batch}
    if "input_ids" not in shapes:
        raise PlanError(f"{directory} takes {', '.join(shapes)}, not tokens; check it through penstock.compiler.check")
    rows, sequence = shapes["input_ids"]
    batches = [named.random_batch(rows, sequence, options.seed + i) for i in range(steps)]
    if "position_ids" in shapes:
        batches = [_packed_batch(named, batch["input_ids"], step) for step, batch in enumerate(batches)]
    return check(job, model, batches)


def _packed_batch(named: NamedModel, ids: Tensor, step: int) -> dict[str, Tensor]:
    """Rows of two documents each, cut at another place in each step."""
    sequence = ids.shape[1]
    cut = 1 + step % (sequence - 1)
    documents = [part for row in ids for part in (row[:cut], row[cut:])]
    return pack_documents(documents, sequence, first_position=named.skipped_positions).columns
