"""Batches with fewer rows than the others, as the last one of an epoch has: filled up with rows that do not count, or,
where a loss counts all rows, of a job that takes fewer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.export import Dim

from ...compiler.job.job import Job
from ...ir.errors import PlanError
from ...runtime.torch_names import BatchNorm
from .batches import BatchForm, count_rows


def compile_for_all_rows(
    make: Callable[..., Job],
    batch: dict[str, Tensor],
    form: BatchForm,
    model: nn.Module,
    short: int | None,
    options: Mapping[str, Any],
    ranks: int,
) -> tuple[Job, BatchForm]:
    """A job of `make(batch, **more)` that also takes batches of `short` rows, and the form of its batches. `options`:
    what the user gives to `penstock.compile`."""
    job = make(form.repeat(batch))
    reason = why_not_fillable(batch, model, job)
    if short is None or not reason:
        return job, form
    require_one_process(ranks, reason)
    job.close()
    more = {"dynamic_shapes": any_rows(batch, form.rows, options.get("dynamic_shapes"))}
    if "loss_weight" not in options and all(term.kind == "mean" for term in job.folder.settings.loss):
        more["loss_weight"] = count_rows
    if short and job.plan.micro_batches > short:
        more["micro_batches"] = max(n for n in range(1, short + 1) if form.rows % n == 0)
    return make(form.repeat(batch), **more), replace(form, takes_fewer=True)


def why_not_short(batch: dict[str, Tensor], rows: int, model: nn.Module, job: Job, form: BatchForm) -> str:
    """The reason for which a job does not take a batch of this number of rows; "" if it does."""
    if not form.takes_fewer:
        return why_not_fillable(batch, model, job)
    least = job.plan.micro_batches
    return f"{rows} rows are fewer than its {least} micro-batches" if rows < least else ""


def any_rows(batch: Mapping[str, Tensor], most: int, others: Any) -> Any:
    """`dynamic_shapes` for a batch of up to `most` rows. `others`: those of the user, of other dimensions."""
    rows = Dim("rows", max=most)
    if isinstance(others, Dim):
        return (rows, others)
    if isinstance(others, tuple):
        return others
    return {name: {0: rows, **((others or {}).get(name) or {})} for name in batch}


def why_not_fillable(batch: Mapping[str, Tensor], model: nn.Module, job: Job | None = None) -> str:
    """The reason for which a short batch cannot be filled with rows that do not count; "" if none is known."""
    labels = batch.get("labels")
    if labels is None:
        return "its batches have no 'labels'"
    if labels.is_floating_point():
        return "its labels are no classes, of which a loss could leave some out"
    if any(isinstance(module, BatchNorm) for module in model.modules()):
        return "the model's BatchNorm mixes rows"
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        return "the model adds a loss of its routers over all rows"
    settings = None if job is None else job.folder.settings
    if settings is not None and not all(term.kind == "counted" for term in settings.loss):
        return "its loss is a mean over rows, whatever their labels"
    if settings is not None and not set(settings.counts.inputs) <= {"labels"}:
        return f"its loss counts {', '.join(settings.counts.inputs)}, of rows without labels as well"
    return ""


def short_rows(args: Any, dataset: Any, whole: int, steps: int) -> int | None:
    """The number of rows of an epoch's last batch where it has fewer than the others and the run comes to it; 0 where
    nobody knows, as of a stream; None where all batches have `whole` rows."""
    rows = getattr(dataset, "__len__", None)
    if rows is None:
        return None if args.dataloader_drop_last and whole == args.train_batch_size else 0
    used = rows() // args.world_size // args.train_batch_size * args.train_batch_size * args.world_size
    used = used if args.dataloader_drop_last else rows()
    return used % whole if used % whole and steps > used // whole else None


def require_one_process(ranks: int, reason: str) -> None:
    """Raise `PlanError` for a short last batch that ranks of torchrun would have to share."""
    if ranks > 1:
        raise PlanError(
            "the last batch of an epoch has fewer rows than the others, and ranks cannot fill it up, as "
            f"{reason}; use: dataloader_drop_last=True, or rows that make whole batches (per_device_train_batch_size x "
            "gradient_accumulation_steps x ranks)"
        )
