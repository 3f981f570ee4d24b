"""The options of TRL's configs: what a plan decides by itself, and what no `Job` honours, each by its name."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from trl.trainer.utils import get_config_model_id

from ...ir.errors import PlanError
from .pair_loss import PAIR_LOSSES

OWN_LOSS = "PenstockTrainer, which takes a loss of your own"
LOSSES = dict.fromkeys(  # methods of TRL's trainers that make a loss
    (
        "compute_loss", "_compute_loss", "compute_ref_log_probs", "concatenated_forward", "get_batch_logps",
        "get_batch_loss_metrics", "cpo_loss", "odds_ratio_loss", "generalized_jsd_loss",
    ),
    OWN_LOSS,
)  # fmt: skip
NO_LOGITS = "leave it out: a Job keeps no logits of rows; what TRL logs of an evaluation is logged"
OF_TRL = {
    "activation_offloading": "leave it out: the plan chooses where activations go",
    "label_smoothing_factor": "0.0, or PenstockTrainer, which smooths labels",
}
OF_SFT = {
    **OF_TRL,
    "padding_free": "packing=True, which packs into rows of one length; without it rows are padded to one length",
}
OF_KTO = {**OF_TRL, "sync_ref_model": "leave it out: the reference is a part of the job and stays as it was"}
OF_DPO = {
    **OF_KTO,
    "padding_free": "leave it out: pairs are padded to one length",
    "use_weighting": "leave it out",
    "ld_alpha": "leave it out",
}
OF_CPO = {**OF_TRL, "generate_during_eval": "leave it out: a job holds the weights while it trains"}
OF_GKD = {
    **OF_TRL,
    "lmbda": "0.0: a student that answers while it trains would need its weights, which a Job holds on its devices",
    "seq_kd": "False, and answers of the teacher in the data: teacher.generate before training",
}
OVER_BATCH = {  # losses of pairs that a step of micro-batches cannot make: why
    "aot": "it sorts all pairs of a batch",
    "aot_unpaired": "it sorts all pairs of a batch",
    "sft": "it divides by the tokens of a batch, not pair by pair",
}


def settle_config(trainer: Any, model: Any, args: Any, given: Mapping[str, Any], **defaults: Any) -> Any:
    """A copy of the config, or TRL's own with these defaults, without checkpoints of activations, TRL's default: the
    plan chooses what is computed again. `given`: the other arguments of the trainer.

    Raises `PlanError` for an option or an argument that no `Job` honours.
    """
    if args is None:
        args = trainer.config(_default_folder(model, trainer.config.__name__.removesuffix("Config")), **defaults)
    for owner, values, table in (
        (type(args).__name__, vars(args), trainer.refused), (type(trainer).__name__, given, trainer.not_taken)
    ):  # fmt: skip
        for name, instead in table.items():
            if values.get(name):
                raise PlanError(f"{owner}({name}={values[name]!r}) cannot be honoured by a Job; use: {instead}")
    found = copy.copy(args)
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        setattr(found, name, False)
        setattr(found, f"{name}_kwargs", None)
    return found


def refuse_sft(args: Any) -> None:
    """Raise `PlanError` for a loss of `SFTConfig` other than the model's."""
    kind = getattr(args, "loss_type", "nll")
    if kind not in ("nll", "chunked_nll"):
        raise PlanError(f"SFTConfig(loss_type={kind!r}): a Job trains the loss of the model itself; use: 'nll'")


def refuse_routers(trainer: Any) -> None:
    """Raise `PlanError` for a loss of routers beside that of rows."""
    if getattr(trainer, "aux_loss_enabled", False):
        coefficient = getattr(trainer, "router_aux_loss_coef", getattr(trainer, "aux_loss_coef", None))
        raise PlanError(
            f"{type(trainer.args).__name__}(router_aux_loss_coef={coefficient!r}), by the config or the model's own: "
            "the loss of rows leaves the routers out; use: 0.0"
        )


def refuse_images(dataset: Any, name: str) -> None:
    """Raise `PlanError` for rows with images, of which TRL's collators have a form of their own."""
    row: Any = next(iter(dataset), {}) if dataset is not None else {}
    for column in ("image", "images"):
        if column in row:
            raise PlanError(
                f"train_dataset has {column!r}: {name} takes text; leave the column out, or train on the wanted "
                "answers with PenstockSFTTrainer"
            )


def refuse_dpo(args: Any) -> None:
    """Raise `PlanError` for a loss of `DPOConfig` that cannot be made of pairs one by one."""
    if args.f_divergence_type != "reverse_kl":
        raise PlanError(f"DPOConfig(f_divergence_type={args.f_divergence_type!r}): use: 'reverse_kl'")
    for kind in args.loss_type:
        if kind not in PAIR_LOSSES:
            reason = OVER_BATCH.get(kind, "it is not known here")
            raise PlanError(f"DPOConfig(loss_type={kind!r}): {reason}; use one of: {', '.join(PAIR_LOSSES)}")


def _default_folder(model: Any, method: str) -> str:
    """The folder in which TRL writes a run without a config."""
    name = model if isinstance(model, str) else get_config_model_id(model.config)
    return f"{name.split('/')[-1]}-{method}"
