"""Runs by TRL's trainers for rewards, wanted and unwanted answers, pairs without a reference and distillation are the
same by Penstock's. In fp32, on one device and one thread."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaForSequenceClassification
from trl import KTOTrainer, RewardTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.gkd import GKDTrainer
from trl.experimental.orpo import ORPOTrainer

from penstock.errors import PlanError
from penstock.integrations import trl as ours
from penstock.tests.integrations.trl.case import TOLERANCE, chats, llama, preferences, require_equal, run_of, tell_of

WHOLE = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
REWARDS = [f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins")]


def scorer():
    torch.manual_seed(0)
    config = llama().config
    config.num_labels = 1
    return LlamaForSequenceClassification(config)


def margins(rows=16, seed=0):
    return preferences(rows, seed).add_column("margin", [0.1 * n for n in range(rows)])


def single_answers(rows=16, seed=0):
    pairs = preferences(rows, seed)
    words = ("chosen", "rejected", "chosen")
    found = [(row["prompt"], row[words[n % 3]], n % 3 != 1) for n, row in enumerate(pairs)]
    return Dataset.from_list([dict(zip(("prompt", "completion", "label"), row, strict=True)) for row in found])


def lora():
    return LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj", "down_proj"])


def train(kind, folder, rows, more, **changes):
    made = {name: make() for name, make in more.items()}
    if issubclass(kind, ours.PenstockKTOTrainer):
        made["compile_options"] = {"strategy": "balanced"}  # one micro-batch, as all rows make the divergence
    trainer = run_of(kind, folder / kind.__name__, rows, made, **{**WHOLE, **changes})
    trainer.train()
    return trainer


def compare(folder, kinds, rows, more, *logged, **changes):
    changes = {"eval_strategy": "steps", "eval_steps": 2, **changes}
    own, plain = (train(kind, folder, rows, more, **changes) for kind in kinds)
    require_equal(own, plain, "eval_loss", *logged, *(f"eval_{name}" for name in logged))
    a, b = own.evaluate(), plain.evaluate()
    assert a["eval_loss"] == pytest.approx(b["eval_loss"], abs=TOLERANCE)


REWARDED = ("min_reward", "mean_reward", "max_reward", "accuracy", "margin")


@pytest.mark.slow
@pytest.mark.parametrize("rows", [margins, preferences])
def test_rewards(rows, tmp_path):
    kinds = (ours.PenstockRewardTrainer, RewardTrainer)
    compare(tmp_path, kinds, rows, {"model": scorer}, *REWARDED, center_rewards_coefficient=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_wanted_and_unwanted_answers(loss, tmp_path):
    kinds = (ours.PenstockKTOTrainer, KTOTrainer)
    more = {"model": llama, "ref_model": lambda: llama(1)}
    changes = {"loss_type": loss, "undesirable_weight": 1.5, "beta": 0.3}
    compare(tmp_path, kinds, single_answers, more, "kl", "logps/chosen", **changes)


@pytest.mark.slow
@pytest.mark.parametrize("precompute", [False, True])
def test_wanted_answers_with_adapters(precompute, tmp_path):
    kinds = (ours.PenstockKTOTrainer, KTOTrainer)
    more = {"model": llama, "peft_config": lora}
    compare(tmp_path, kinds, single_answers, more, "kl", precompute_ref_log_probs=precompute)


CPO = [
    {"loss_type": "sigmoid", "label_smoothing": 0.1},
    {"loss_type": "simpo", "cpo_alpha": 0.0},
    {"loss_type": "ipo"},
    {"loss_type": "hinge"},
    {"loss_type": "sigmoid", "alpha": 0.05},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", CPO)
def test_contrasts(options, tmp_path):
    kinds = (ours.PenstockCPOTrainer, CPOTrainer)
    compare(tmp_path, kinds, preferences, {"model": llama}, *REWARDS, "logps/chosen", **options)


ODDS = [{"model": llama}, {"model": llama, "peft_config": lora}]


@pytest.mark.slow
@pytest.mark.parametrize("more", ODDS)
def test_odds(more, tmp_path):
    kinds = (ours.PenstockORPOTrainer, ORPOTrainer)
    compare(tmp_path, kinds, preferences, more, *REWARDS, "logps/rejected", beta=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_distillation(beta, tmp_path):
    """Over two micro-batches of TRL's own, whose tokens count alike."""
    kinds = (ours.PenstockGKDTrainer, GKDTrainer)
    more = {"model": llama, "teacher_model": lambda: llama(1)}
    changes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "lmbda": 0.0, "beta": beta}
    compare(tmp_path, kinds, chats, more, **changes)


class OwnContrast(ours.PenstockCPOTrainer):
    def cpo_loss(self, chosen, rejected):
        return rejected - chosen


class OwnReward(ours.PenstockRewardTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return 2 * super().compute_loss(model, inputs)


@pytest.mark.parametrize(
    ("kind", "more", "option", "found"),
    [
        (ours.PenstockGKDTrainer, {"model": llama, "teacher_model": llama}, {"lmbda": 0.5}, r"lmbda.*0\.0"),
        (ours.PenstockGKDTrainer, {"model": llama, "teacher_model": llama}, {"lmbda": 0, "seq_kd": True}, "seq_kd"),
        (ours.PenstockKTOTrainer, {"model": llama}, {"sync_ref_model": True}, "sync_ref_model"),
        (ours.PenstockORPOTrainer, {"model": llama}, {"generate_during_eval": True}, "generate_during_eval"),
        (ours.PenstockRewardTrainer, {"model": scorer}, {"activation_offloading": True}, "activation_offloading"),
        (ours.PenstockKTOTrainer, {"model": llama}, {"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        (OwnContrast, {"model": llama}, {}, "OwnContrast.cpo_loss would not be called.*PenstockTrainer"),
        (OwnReward, {"model": scorer}, {}, "OwnReward.compute_loss would not be called.*PenstockTrainer"),
    ],
)
def test_refuses_by_name(kind, more, option, found, tmp_path):
    rows = single_answers if kind is ours.PenstockKTOTrainer else preferences
    with pytest.raises(PlanError, match=found):
        train(kind, tmp_path, rows, more, **option)


@pytest.mark.parametrize("name", ["PenstockGRPOTrainer", "OnlineDPOTrainer", "PenstockRLOOTrainer"])
def test_trainers_that_generate_are_refused_by_name(name):
    with pytest.raises(PlanError, match=f"{name}.*PenstockDPOTrainer"):
        getattr(ours, name)


@pytest.mark.slow
def test_a_last_batch_of_fewer_pairs(tmp_path):
    """14 pairs: three steps of 4, and one of 2."""
    own, plain = (
        train(kind, tmp_path, lambda n=14, seed=0: preferences(min(n, 14), seed), {"model": llama}, max_steps=5)
        for kind in (ours.PenstockORPOTrainer, ORPOTrainer)
    )
    require_equal(own, plain)
    assert len(tell_of(own, "loss")) == 5
