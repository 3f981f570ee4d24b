"""The options of TRL's configs: what a plan decides by itself, and what no `Job` honours, each by its name."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from trl.trainer.utils import get_config_model_id

from ...ir.errors import PlanError
from .pair_loss import PAIR_LOSSES

OF_BOTH = {"activation_offloading": "leave it out: the plan chooses where activations go"}
OF_SFT = {
    **OF_BOTH,
    "padding_free": "packing=True, which packs into rows of one length; without it rows are padded to one length",
}
OF_DPO = {
    **OF_BOTH,
    "padding_free": "leave it out: pairs are padded to one length",
    "sync_ref_model": "leave it out: the reference is a part of the job and stays as it was",
    "use_weighting": "leave it out",
    "ld_alpha": "leave it out",
}
OVER_BATCH = {  # losses of pairs that a step of micro-batches cannot make: why
    "aot": "it sorts all pairs of a batch",
    "aot_unpaired": "it sorts all pairs of a batch",
    "sft": "it divides by the tokens of a batch, not pair by pair",
}


def with_plan_defaults(args: Any) -> Any:
    """A copy of `args` without checkpoints of activations, TRL's default: the plan chooses what is computed again."""
    found = copy.copy(args)
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        setattr(found, name, False)
        setattr(found, f"{name}_kwargs", None)
    return found


def refuse_options(args: Any, instead: Mapping[str, str]) -> None:
    """Raise `PlanError` for an option of `args` among these. Each comes with what works instead."""
    for name, text in instead.items():
        value = getattr(args, name, None)
        if value:
            raise PlanError(f"{type(args).__name__}({name}={value!r}) cannot be honoured by a Job; use: {text}")


def refuse_sft(args: Any) -> None:
    """Raise `PlanError` for an option of `SFTConfig` that cannot be honoured."""
    refuse_options(args, OF_SFT)
    kind = getattr(args, "loss_type", "nll")
    if kind not in ("nll", "chunked_nll"):
        raise PlanError(f"SFTConfig(loss_type={kind!r}): a Job trains the loss of the model itself; use: 'nll'")


def refuse_images(dataset: Any) -> None:
    """Raise `PlanError` for pairs with images, of which TRL's collator has a form of its own."""
    row: Any = next(iter(dataset), {}) if dataset is not None else {}
    for name in ("image", "images"):
        if name in row:
            raise PlanError(
                f"train_dataset has {name!r}: PenstockDPOTrainer takes pairs of text; leave the column out, or train "
                "on the chosen answers with PenstockSFTTrainer"
            )


def refuse_dpo(args: Any) -> None:
    """Raise `PlanError` for an option of `DPOConfig` that cannot be honoured."""
    refuse_options(args, OF_DPO)
    if args.f_divergence_type != "reverse_kl":
        raise PlanError(f"DPOConfig(f_divergence_type={args.f_divergence_type!r}): use: 'reverse_kl'")
    for kind in args.loss_type:
        if kind not in PAIR_LOSSES:
            reason = OVER_BATCH.get(kind, "it is not known here")
            raise PlanError(f"DPOConfig(loss_type={kind!r}): {reason}; use one of: {', '.join(PAIR_LOSSES)}")


def default_folder(model: Any, method: str) -> str:
    """The folder in which TRL writes a run without a config."""
    name = model if isinstance(model, str) else get_config_model_id(model.config)
    return f"{name.split('/')[-1]}-{method}"
