"""Makes a transformers Trainer run its steps on a `Job`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import Tensor
from transformers.trainer_callback import ProgressCallback

from ...compiler.api import compile as compile_job
from ...compiler.job.job import Job
from ...compiler.search.offer import Offer
from ...ir.errors import BatchError, PlanError, WorkerError
from ...runtime.processes.interrupt import finishing
from ...training.broadcast import Broadcast, facts_of, telling
from ...training.listener import Listener
from ...training.live.server import PageServer
from ...training.live.terminal import TerminalView, view_on
from ...training.watch import StragglerWatch
from ..said import tell_plan, tell_planning
from .batches import TOKENS, BatchForm, count_rows, form_of, gather_batch, join_batches, take_rows
from .callbacks import SetOptions, SyncFirst, refuse_callbacks, set_options
from .evaluation import evaluate
from .features import PRECISIONS, overrides, refuse_trainer, settle_arguments
from .loss import TracedLoss, add_noise, loss_of_trainer, makes_loss
from .optimizers import OptimizerOf, follows_own_rates, makes_optimizer
from .schedule import make_schedule
from .short_batches import compile_for_all_rows, short_rows, why_not_short

if TYPE_CHECKING:
    Host = Any  # the Trainer that has the mixin
else:
    Host = object

FOLDER = "penstock"  # the job's part of a checkpoint
OFFER = "penstock-offer"  # in the output directory: a plan that a run offers
logger = logging.getLogger(__name__)


class StepsByJob(Host):
    """Mixed in before a Trainer. The Trainer's optimizer never steps: it holds the learning rates that are logged.

    hardware, compile_options: for `penstock.compile`; with `dynamic_shapes` a batch is as long as its longest row.
    max_length: what rows of token ids are padded to otherwise; if left out, the longest row of the data sets.
    listeners: are told of the run, such as the logs of `penstock.training.logs`.
    serve: HOST:PORT of a page that shows the run.
    """

    optimizer: Any
    lr_scheduler: Any
    neftune_hook_handle: Any
    _loss_shifts_labels: bool
    own_loss: Any = None  # the `compute_loss` that is the model's own
    not_called: Mapping[str, str] = {}  # further methods that a step of a job does not call -> what works instead

    def __init__(
        self,
        *args: Any,
        hardware: Any = "auto",
        compile_options: Mapping[str, Any] | None = None,
        max_length: int | None = None,
        listeners: Sequence[Listener] = (),
        serve: str | None = None,
        **kwargs: Any,
    ):
        self.hardware, self.compile_options = hardware, dict(compile_options or {})
        self.max_length, self.listeners, self.serve = max_length, list(listeners), serve
        self.job: Job | None = None
        self._options: SetOptions | None = None
        self._form: BatchForm | None = None
        self._broadcast: Broadcast | None = None
        self._watch: StragglerWatch | None = None
        self._run = ExitStack()
        self._waiting: list[Any] = []
        self._checkpoint: str | None = None
        if len(args) > 1:
            args = (args[0], args[1] and settle_arguments(args[1]), *args[2:])
        elif kwargs.get("args") is not None:
            kwargs["args"] = settle_arguments(kwargs["args"])
        super().__init__(*args, **kwargs)
        self._given = (self.optimizer, self.lr_scheduler)
        if "dynamic_shapes" in self.compile_options and self.args.world_size > 1:
            raise PlanError(
                "compile_options={'dynamic_shapes': ...} under torchrun: ranks would have batches of several "
                "lengths; leave it out, and rows are padded to max_length"
            )
        refuse_trainer(self)
        refuse_callbacks(self.callback_handler.callbacks)

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """The job's devices have the weights."""

    # --- training

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with ExitStack() as self._run:
                try:
                    return super()._inner_training_loop(*args, **kwargs)
                except KeyboardInterrupt:
                    if self.args.world_size == 1:  # one rank of several may be alone here
                        try:
                            self._sync()
                        except WorkerError:
                            logger.warning("a second Ctrl-C broke a step off: the model has older weights")
                    raise
        finally:
            self.job = self._form = self._broadcast = self._watch = self._options = None

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        self.optimizer, self.lr_scheduler = self._given
        if self.neftune_noise_alpha is not None:
            self.neftune_hook_handle.remove()
            embeddings = next(each for each in self.model.modules() if hasattr(each, "neftune_noise_alpha"))
            self.neftune_hook_handle = embeddings.register_forward_hook(add_noise)
        self.create_optimizer()
        self._optimizer = OptimizerOf.read_trainer(self, self._given[0] is not None or makes_optimizer(self))
        self.create_scheduler(max_steps)
        self._total_steps, self._checkpoint, self._waiting = max_steps, resume_from_checkpoint, []
        self._synced_step = -1
        if resume_from_checkpoint is not None:
            if not (Path(resume_from_checkpoint) / FOLDER).exists():
                raise PlanError(
                    f"resume_from_checkpoint={resume_from_checkpoint!r} has no {FOLDER!r}: it was saved by another "
                    "trainer, or with save_only_model; load its model and begin anew"
                )
            state = torch.load(Path(resume_from_checkpoint) / "scheduler.pt", weights_only=True)
            self.lr_scheduler.load_state_dict(state)
            for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr()):
                group["lr"] = rate
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        refuse_callbacks(self.callback_handler.callbacks)
        others = [callback for callback in self.callback_handler.callbacks if not isinstance(callback, SyncFirst)]
        self.callback_handler.callbacks = [SyncFirst(others, self._sync), *others]
        self.accelerator._models.append(self.model)  # or an evaluation would wrap the model's forward
        return self.model, train_dataloader

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        if self._waiting:  # of a stream, of which a Trainer does not see the end
            logger.warning("the last %d batches of an epoch make no whole step and are left out", len(self._waiting))
            self._waiting = []
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Nothing until all parts of the global batch are there; then a step of the job, whose loss is that of all."""
        self.model.train()
        self._waiting.append(self._own_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._waiting = self._waiting, []
        if self._form is None:
            self._form = self._found_form(batches[0])
        form = self._form.shorten(batches) if "dynamic_shapes" in self.compile_options else self._form
        padded = [form.pad(each) for each in batches]
        batch = padded if self._takes_list(padded) else gather_batch(self.accelerator, join_batches(padded))
        each = batch if isinstance(batch, list) else [batch]
        tokens = sum(part[TOKENS].numel() if TOKENS in part else count_rows(part) for part in each)
        if self.job is None:
            self.job, self._broadcast = self._begin_job(batch)
            self._watch = StragglerWatch(self.job, self._total_steps)
        assert self._broadcast is not None and self._watch is not None and self._options is not None
        set_options(self.job, self._optimizer.numbers, self._options.take())  # what callbacks and schedules have set
        loss = self._take_step(self.job, self._fill(batch))
        self._options.step()
        self._broadcast.stepped(tokens)
        if (offer := self._watch.offer_after_step()) is not None:
            self._tell(offer)
        return loss.detach().to(self.args.device)

    def _own_inputs(self, inputs: Any) -> Any:
        """A batch as the script's own `_prepare_inputs` makes it, if there is one; a Trainer's moves it only."""
        if not overrides(self, "_prepare_inputs"):
            return inputs
        return {key: v.cpu() if isinstance(v, Tensor) else v for key, v in self._prepare_inputs(inputs).items()}

    def _tell(self, offer: Offer) -> None:
        """Log what another plan would gain, leave it in the output directory, and say what takes it."""
        if not self.is_world_process_zero():
            return
        assert self._broadcast is not None
        plan, hardware = offer.write(Path(self.args.output_dir) / OFFER)
        how = (
            f"begin again with hardware={str(hardware)!r} and compile_options={{'plan': {str(plan)!r}}}, and resume "
            "from the last checkpoint"
        )
        self._broadcast.offered(offer, how)
        logger.warning("%s; to take the plan, %s", offer.describe(), how)

    def _takes_list(self, batches: list[dict[str, Tensor]]) -> bool:
        """Whether a step takes these batches as its micro-batches, as they have images of several sizes."""
        assert self._form is not None
        if self.args.world_size > 1 or not self._form.has_own_sizes(batches):
            return False
        count = self.args.gradient_accumulation_steps
        planned = self.compile_options.get("micro_batches", count) if self.job is None else self.job.plan.micro_batches
        if planned != count:
            raise BatchError(
                f"images have several sizes, so that a step takes its {count} batches as micro-batches, and the plan "
                f"has micro_batches={planned}: set gradient_accumulation_steps={planned}, or give "
                f"compile_options={{'micro_batches': {count}}}"
            )
        return True

    def _fill(self, batch: Any) -> Any:
        """Fill the batch up to the rows of every step, or a list of micro-batches up to their number."""
        assert self._form is not None
        if isinstance(batch, list):
            return self._form.fill_list(batch, self.args.gradient_accumulation_steps)
        return self._form.fill(batch)

    def _take_step(self, job: Job, batch: Any) -> Tensor:
        return job.step(batch)

    def _found_form(self, batch: Any) -> BatchForm:
        rows = self.get_total_train_batch_size(self.args)
        multiple = getattr(self.data_collator, "pad_to_multiple_of", None) or 1
        pad_id = getattr(self.processing_class, "pad_token_id", None)
        pad_id = getattr(self._config(), "pad_token_id", None) if pad_id is None else pad_id
        return form_of(batch, rows, self._datasets(), self.max_length, multiple, pad_id or 0)

    def _config(self) -> Any:
        return getattr(self.model, "config", None)

    def _datasets(self) -> Iterable[Any]:
        evaluated = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        return (self.train_dataset, *evaluated.values())

    def _begin_job(self, batch: Any) -> tuple[Job, Broadcast]:
        """The job, and who is told of its steps, until the run ends."""
        assert self._form is not None
        listeners = self._listeners()
        is_main, rows = self.is_world_process_zero(), self._form.rows
        if is_main:
            shown = batch[0] if isinstance(batch, list) else self._form.repeat(batch)
            tell_planning(self.model, self.hardware, shown, rows)
        if isinstance(batch, list):
            job = self._compile(self._fill(batch))
        else:
            short = short_rows(self.args, self.train_dataset, self._form.rows, self._total_steps)
            job, self._form = compile_for_all_rows(
                self._compile, batch, self._form, self.model, short, self.compile_options, self.args.world_size
            )
        self._run.enter_context(job)
        if is_main:
            tell_plan(job)
        if self._checkpoint is not None:
            job.resume(Path(self._checkpoint) / FOLDER)
        broadcast = self._run.enter_context(telling(Broadcast(job, listeners)))
        name = Path(self.args.output_dir).name
        broadcast.begin(facts_of(job, name, str(self.args.output_dir), self._total_steps, self._form.rows))
        return job, broadcast

    def _listeners(self) -> list[Listener]:
        """Those given, a page, and the view in the terminal, which takes the place of the Trainer's progress bar."""
        if not self.is_world_process_zero():
            return []
        found = list(self.listeners)
        if self.serve is not None:
            page = PageServer(self.serve)
            self._run.callback(page.close)
            logger.warning("live page: %s", page.address)
            found.append(page)
        if not self.args.disable_tqdm:
            view = view_on(Console(markup=False, emoji=False))
            if isinstance(view, TerminalView):
                self.remove_callback(ProgressCallback)
                found.append(view)
        return found

    def _module(self) -> Any:
        """The module that the job trains: the model, or the model with the loss that the trainer makes."""
        return TracedLoss(self.model, partial(loss_of_trainer, self)) if makes_loss(self) else self.model

    def _compile(self, batch: Any, **more: Any) -> Job:
        args = self.args
        self.model.train()
        schedule = partial(
            make_schedule,
            name=str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
            warmup_steps=args.get_warmup_steps(self._total_steps),
            total_steps=self._total_steps,
            **(args.lr_scheduler_kwargs or {}),
        )
        own_rates = self._given[1] is not None or follows_own_rates(self)
        self._options = SetOptions(self.optimizer, None if own_rates else schedule, self.lr_scheduler.state_dict())
        options: dict[str, Any] = {
            "optimizer": self._optimizer.maker(),
            "param_groups": list(self._optimizer.groups()),
            "lr_scheduler": None if own_rates else schedule,
            "max_grad_norm": args.max_grad_norm or None,
            "precision": PRECISIONS[args.mixed_precision],
            "seed": args.seed,
            "steps": self._total_steps,
        }
        options |= {**self.compile_options, **more}
        return compile_job(self._module(), self.hardware, batch, **options)

    def _clip_grad_norm(self, model: Any) -> None:
        """The job clips."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """It is asked for only where it is logged, because it waits for the end of the step."""

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log and self.job is not None and self.job.last is not None:
            grad_norm = self.job.last.gradient_norm
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._sync()
        return super()._finalize_training(*args, **kwargs)

    # --- evaluation: by the job while it trains, else by the model on one device

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        if self.job is not None:
            found = super().evaluation_loop(*args, **kwargs)
            assert self._broadcast is not None
            self._broadcast.evaluated({k: v for k, v in found.metrics.items() if isinstance(v, (int, float))})
            return found
        with self._on_device():
            return super().evaluation_loop(*args, **kwargs)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """With the trained model on the one device that a Trainer computes on."""
        self._sync()
        self.model.to(self.args.device)
        try:
            yield
        finally:
            self.model.to("cpu")

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        if self.job is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        assert self._form is not None
        own = self._form.pad(self._own_inputs(inputs))
        whole = gather_batch(self.accelerator, own)
        batch = self._each_once(whole)
        reason = self.job.folder.settings.evaluation or ""
        if self._form.has_own_sizes([batch]):
            reason = reason or "its images have several sizes"
        if rest := count_rows(batch) % self._form.rows:
            reason = reason or why_not_short(batch, rest, self.model, self.job, self._form)
        if reason:
            return self._prediction_of_model(model, inputs, prediction_loss_only, ignore_keys, reason)
        loss, outputs = self._evaluate_batch(batch, not prediction_loss_only)
        if loss is not None:
            loss = loss.to(self.args.device)
        if prediction_loss_only:
            return loss, None, None
        if ignore_keys is None:
            ignore_keys = getattr(self._config(), "keys_to_ignore_at_inference", ["past_key_values"])
        outputs = {name: value for name, value in outputs.items() if name not in ignore_keys}
        logits = tuple(self._own_rows(value, own, batch, whole).to(self.args.device) for value in outputs.values())
        labels = tuple(own[name].to(self.args.device) for name in self.label_names if name in own)
        one_or_all = labels[0] if len(labels) == 1 else labels or None  # as a Trainer hands them over
        return loss, logits[0] if len(logits) == 1 else logits, one_or_all

    def _own_rows(self, value: Tensor, own: Any, batch: Any, whole: Any) -> Tensor:
        """This process's part of an output of a batch, which may have several entries for each row."""
        each = len(value) // count_rows(batch)
        first, end = ((self.args.process_index + i) * count_rows(own) * each for i in (0, 1))
        return _pad_rows(value, (count_rows(whole) - count_rows(batch)) * each)[first:end]

    def _evaluate_batch(self, batch: dict[str, Tensor], outputs: bool) -> tuple[Tensor | None, dict[str, Tensor]]:
        """The loss and, where they are asked for, the outputs of a batch of all ranks."""
        assert self.job is not None and self._form is not None
        return evaluate(self.job, self._form, batch, self._loss_shifts_labels, outputs)

    def _each_once(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Drop the rows that a last batch repeats to have the same number for every rank."""
        state = self.accelerator.gradient_state
        if self.args.world_size == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return batch
        return take_rows(batch, 0, state.remainder)

    def _prediction_of_model(self, model: Any, inputs: Any, loss_only: bool, ignore_keys: Any, reason: str) -> Any:
        logger.warning("evaluated by the model on %s, not by the job: %s", self.args.device, reason)
        with self._on_device():
            return super().prediction_step(model, inputs, loss_only, ignore_keys)

    # --- what reads the weights

    def _sync(self) -> None:
        if self.job is not None and self._synced_step != self.job.step_count:
            self.job.sync()
            self._synced_step = self.job.step_count

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with finishing("save"):
            super()._save_checkpoint(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        self._sync()
        super().save_model(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.job is not None, "checkpoints are saved after steps"
        self.job.save(Path(output_dir) / FOLDER)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")


def _pad_rows(value: Tensor, missing: int) -> Tensor:
    """With more rows, which a Trainer drops when it has those of all ranks."""
    return torch.cat([value, value[-1:].expand(missing, *value.shape[1:])])
