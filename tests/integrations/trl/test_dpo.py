"""A run by `PenstockDPOTrainer` is that of `DPOTrainer`: losses, rewards and weights. In fp32, on one device and one
thread: log probabilities are summed in another order than in TRL's chunks of them, hence 1e-5."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl import DPOTrainer

from penstock.errors import BatchError, PlanError
from penstock.integrations.trl import PenstockDPOTrainer
from penstock.integrations.trl.pair_loss import PAIR_LOSSES, PreferenceLoss
from penstock.integrations.trl.pairs import as_pairs
from penstock.tests.integrations.trl.case import (
    TOLERANCE,
    chat_preferences,
    experts,
    image_chats,
    llama,
    preferences,
    require_equal,
    run_of,
    tell_of,
)

REWARDS = [f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins")]
LOGGED = [*REWARDS, "logps/chosen", "logps/rejected"]


def lora(**more):
    return LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj", "down_proj"], **more)


def frozen_copy():
    return {"model": llama(), "ref_model": llama(1)}


def new_adapters():
    return {"model": llama(), "peft_config": lora()}


def trained_adapters():
    model = get_peft_model(llama(), lora())
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.2, generator=torch.Generator().manual_seed(len(name)))
    return {"model": model}


def make(kind, folder, models=new_adapters, more=None, rows=preferences, **changes):
    return run_of(kind, folder, rows, {**models(), **(more or {})}, **changes)


def train(kind, folder, models=new_adapters, resume=None, **changes):
    trainer = make(kind, folder, models, **changes)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def both(folder, *args, **kwargs):
    return [train(kind, folder / kind.__name__, *args, **kwargs) for kind in (PenstockDPOTrainer, DPOTrainer)]


@pytest.mark.slow
@pytest.mark.parametrize("models", [frozen_copy, new_adapters, trained_adapters])
def test_same_run(models, tmp_path):
    require_equal(*both(tmp_path, models))


@pytest.mark.slow
def test_same_run_with_the_reference_computed_before(tmp_path):
    require_equal(*both(tmp_path, frozen_copy, precompute_ref_log_probs=True))


@pytest.mark.slow
def test_same_run_of_chats_and_several_losses(tmp_path):
    """All kinds of losses in one sum; a batch of several lengths, some of which are cut."""
    kinds = {"loss_type": list(PAIR_LOSSES), "loss_weights": [0.1 * (n + 1) for n in range(len(PAIR_LOSSES))]}
    changes = {**kinds, "label_smoothing": 0.1, "beta": 0.3, "max_length": 14, "pad_to_multiple_of": 4}
    require_equal(*both(tmp_path, new_adapters, rows=chat_preferences, **changes))


@pytest.mark.parametrize("kind", PAIR_LOSSES)
def test_each_loss_is_that_of_trl(kind, plain):
    plain.loss_types, plain.label_smoothing = [kind], 0.2
    batch = next(iter(plain.get_train_dataloader()))
    expected = plain.compute_loss(plain.model, dict(batch))
    ours = PreferenceLoss(plain.model, plain.ref_model, [(kind, 1.0)], plain.beta, 0.2, plain.args.discopop_tau)
    found = ours(**as_pairs(batch, 20, 0))
    torch.testing.assert_close(found["loss"], expected, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(found["losses"].mean(), expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make(DPOTrainer, tmp_path_factory.mktemp("plain"), frozen_copy, gradient_accumulation_steps=1)


@pytest.mark.slow
def test_rewards_of_logged_steps(tmp_path):
    """Of micro-batches that are whole batches, as TRL averages those of all micro-batches."""
    ours, plain = both(tmp_path, trained_adapters, per_device_train_batch_size=4, gradient_accumulation_steps=1)
    require_equal(ours, plain, *LOGGED)


@pytest.mark.slow
@pytest.mark.parametrize("models", [frozen_copy, new_adapters])
def test_same_evaluation(models, tmp_path):
    """Also of a last batch that is short, after training, and of another data set."""
    ours, plain = both(tmp_path, models, eval_strategy="steps", eval_steps=2)
    require_equal(ours, plain, "eval_loss", "eval_num_tokens", *(f"eval_{name}" for name in LOGGED))
    for data in ({}, {"eval_dataset": preferences(5, 2)}):
        a, b = ours.evaluate(**data), plain.evaluate(**data)
        assert a["eval_loss"] == pytest.approx(b["eval_loss"], abs=TOLERANCE)
        assert a["eval_rewards/margins"] == pytest.approx(b["eval_rewards/margins"], abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("models", [frozen_copy, new_adapters])
def test_resumes_in_the_middle(models, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2}
    train(PenstockDPOTrainer, tmp_path / "a", models, **saving)
    again = train(PenstockDPOTrainer, tmp_path / "a", models, str(tmp_path / "a" / "checkpoint-2"), **saving)
    plain = train(DPOTrainer, tmp_path / "b", models)
    assert len(tell_of(again, "loss")) == 4
    torch.testing.assert_close(tell_of(again, "loss"), tell_of(plain, "loss"), rtol=2e-4, atol=TOLERANCE)
    for (name, a), b in zip(again.model.named_parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


@pytest.mark.slow
def test_saves_the_policy(tmp_path):
    ours = train(PenstockDPOTrainer, tmp_path / "a", frozen_copy, max_steps=2)
    ours.save_model(str(tmp_path / "saved"))
    again = type(ours.model).from_pretrained(tmp_path / "saved")
    for a, b in zip(again.parameters(), ours.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("option", "found"),
    [
        ({"loss_type": ["sigmoid", "aot"]}, "aot"),
        ({"loss_type": ["sft"]}, "sft"),
        ({"f_divergence_type": "forward_kl"}, "f_divergence_type"),
        ({"sync_ref_model": True}, "sync_ref_model"),
        ({"use_weighting": True}, "use_weighting"),
        ({"ld_alpha": 0.5}, "ld_alpha"),
        ({"padding_free": True}, "padding_free"),
        ({"activation_offloading": True}, "activation_offloading"),
    ],
)
def test_refuses_by_name(option, found, tmp_path):
    with pytest.raises(PlanError, match=found):
        make(PenstockDPOTrainer, tmp_path, **option)


def test_refuses_a_loss_of_routers(tmp_path):
    def models():
        return {"model": experts(), "ref_model": experts()}

    with pytest.raises(PlanError, match="router_aux_loss_coef"):
        make(PenstockDPOTrainer, tmp_path, models)
    make(PenstockDPOTrainer, tmp_path, models, router_aux_loss_coef=0.0)


def test_refuses_metrics_of_logits(tmp_path):
    with pytest.raises(PlanError, match="compute_metrics"):
        make(PenstockDPOTrainer, tmp_path, more={"compute_metrics": lambda prediction: {}})


def test_refuses_images(tmp_path):
    with pytest.raises(PlanError, match="PenstockSFTTrainer"):
        make(PenstockDPOTrainer, tmp_path, rows=lambda *args: image_chats(2))


@pytest.mark.slow
def test_a_last_batch_of_fewer_pairs(tmp_path):
    """14 pairs: three steps of 4, and one of 2."""
    changes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}

    def rows(count=14, seed=0):
        return preferences(min(count, 14), seed)

    require_equal(*both(tmp_path, rows=rows, max_steps=5, **changes))


def test_pairs_of_one_length():
    batch = {
        "input_ids": torch.tensor([[5, 6, 7], [5, 8, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "completion_mask": torch.tensor([[0, 1, 1], [0, 1, 0]]),
        "ref_chosen_logps": torch.tensor([-1.5]),
        "ref_rejected_logps": torch.tensor([-2.5]),
    }
    found = {name: value.tolist() for name, value in as_pairs(batch, 4, 9).items()}
    assert found == {
        "chosen_input_ids": [[5, 6, 7, 9]],
        "rejected_input_ids": [[5, 8, 0, 9]],
        "chosen_attention_mask": [[1, 1, 1, 0]],
        "rejected_attention_mask": [[1, 1, 0, 0]],
        "chosen_labels": [[-100, 6, 7, -100]],
        "rejected_labels": [[-100, 8, -100, -100]],
        "chosen_reference": [-1.5],
        "rejected_reference": [-2.5],
    }
    with pytest.raises(BatchError, match="rows of 3, and those of this run have 2"):
        as_pairs(batch, 2, 0)
