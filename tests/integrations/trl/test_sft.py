"""A run by `PenstockSFTTrainer` is that of `SFTTrainer`: losses and weights, also when packed and resumed. In fp32, on
one device and one thread: the model's own loss sums in another order than TRL's chunks of probabilities, hence 1e-5."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback
from trl import SFTTrainer

import penstock.integrations.trl
from penstock.errors import BatchError, PlanError
from penstock.integrations.trl import PenstockSFTTrainer
from penstock.integrations.trl.packed import NUM_TOKENS, PackedCollator
from penstock.tests.integrations.trl.case import (
    TOLERANCE,
    chats,
    completions,
    experts,
    image_chats,
    llama,
    llava,
    processor,
    require_equal,
    run_of,
    tell_of,
    texts,
)
from penstock.tests.shown_elsewhere import slow_but

COMPLETION = (completions, {})
DATA = {
    "assistant": (chats, {"assistant_only_loss": True}),
    "packed": (texts, {"packing": True}),
}
MORE_DATA = {
    "completion": COMPLETION,
    "whole_rows": (completions, {"completion_only_loss": False}),
    "chat": (chats, {}),
    "text": (texts, {}),
    "packed_completion": (completions, {"packing": True}),
    "packed_chat": (chats, {"packing": True, "assistant_only_loss": True, "max_length": 40}),
    "packed_split": (texts, {"packing": True, "packing_strategy": "bfd_split", "max_length": 12}),
    "wrapped": (texts, {"packing": True, "packing_strategy": "wrapped"}),
    "truncated": (completions, {"max_length": 9}),
}


def make(kind, folder, data, lora=None, more=None, model=llama, **changes):
    rows, own = data
    return run_of(kind, folder, rows, {"model": model(), "peft_config": lora, **(more or {})}, **{**own, **changes})


def train(kind, folder, data, resume=None, **changes):
    trainer = make(kind, folder, data, **changes)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("data", slow_but(["packed"], DATA))
def test_same_run(data, tmp_path):
    data = DATA[data]
    require_equal(train(PenstockSFTTrainer, tmp_path / "a", data), train(SFTTrainer, tmp_path / "b", data))


@pytest.mark.slow
@pytest.mark.parametrize("data", MORE_DATA.values(), ids=MORE_DATA)
def test_same_run_of_other_data(data, tmp_path):
    require_equal(train(PenstockSFTTrainer, tmp_path / "a", data), train(SFTTrainer, tmp_path / "b", data))


@pytest.mark.slow
def test_same_adapters(tmp_path):
    runs = []
    for kind in (PenstockSFTTrainer, SFTTrainer):
        lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
        runs.append(train(kind, tmp_path / kind.__name__, COMPLETION, lora=lora))
    require_equal(*runs)
    runs[0].save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "adapter_model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("data", ["assistant", "packed"])
def test_resumes_in_the_middle(data, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2}
    train(PenstockSFTTrainer, tmp_path / "a", DATA[data], **saving)
    last = str(tmp_path / "a" / "checkpoint-2")
    again = make(PenstockSFTTrainer, tmp_path / "a", DATA[data], **saving)
    again.train(resume_from_checkpoint=last)
    plain = train(SFTTrainer, tmp_path / "b", DATA[data])
    for name in ("loss", "learning_rate", "grad_norm"):
        assert len(tell_of(again, name)) == 4
        torch.testing.assert_close(tell_of(again, name), tell_of(plain, name), rtol=2e-4, atol=TOLERANCE)
    for (name, a), b in zip(again.model.named_parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("data", ["assistant", "packed"])
def test_same_evaluation(data, tmp_path):
    """Also after a last batch that is short, and the metrics that TRL computes beside the loss."""
    evaluating = {"eval_strategy": "steps", "eval_steps": 2}
    ours = train(PenstockSFTTrainer, tmp_path / "a", DATA[data], **evaluating)
    plain = train(SFTTrainer, tmp_path / "b", DATA[data], **evaluating)
    require_equal(ours, plain, "eval_loss", "eval_entropy", "eval_mean_token_accuracy", "eval_num_tokens")
    assert ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], abs=TOLERANCE)


@pytest.mark.slow
def test_same_run_of_experts(tmp_path):
    """Without accumulation: with it, TRL's loss of the routers is the mean of the micro-batches' own."""
    whole = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "per_device_eval_batch_size": 4}
    changes = {"eval_strategy": "steps", "eval_steps": 2, "model": experts, **whole}
    ours = train(PenstockSFTTrainer, tmp_path / "a", COMPLETION, **changes)
    plain = train(SFTTrainer, tmp_path / "b", COMPLETION, **changes)
    require_equal(ours, plain, "eval_loss", "eval_entropy")


@pytest.mark.slow
def test_tells_callbacks(tmp_path):
    class Heard(TrainerCallback):
        steps = 0

        def on_step_end(self, args, state, control, **kwargs):
            self.steps += 1
            control.should_training_stop = state.global_step == 2

    heard = Heard()
    ours = train(PenstockSFTTrainer, tmp_path, COMPLETION, more={"callbacks": [heard]})
    assert (heard.steps, len(tell_of(ours, "loss"))) == (2, 2)


def test_packed_rows_of_one_length():
    rows = [
        {"input_ids": [5, 6, 7, 8], "labels": [5, 6, -100, 8], "seq_lengths": [3, 1]},
        {"input_ids": [9, 10], "labels": [9, 10], "seq_lengths": [2]},
    ]
    batch = PackedCollator(pad_token_id=0, length=6)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 0, 0], [9, 10, 0, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 0, 1, 2, 3]]
    assert batch["labels"].tolist() == [[-100, 6, -100, -100, -100, -100], [-100, 10, -100, -100, -100, -100]]
    assert int(batch[NUM_TOKENS]) == 6
    with pytest.raises(BatchError, match="6 tokens, and those of this run have 4"):
        PackedCollator(pad_token_id=0, length=4)([{"input_ids": list(range(6))}])


@pytest.mark.parametrize(
    "option",
    [
        {"padding_free": True, "max_length": None},
        {"activation_offloading": True},
        {"loss_type": "dft"},
        {"label_smoothing_factor": 0.1},
    ],
)
def test_refuses_by_name(option, tmp_path):
    with pytest.raises(PlanError, match=next(iter(option))):
        make(PenstockSFTTrainer, tmp_path, COMPLETION, **option)


def test_refuses_a_loss_of_ones_own(tmp_path):
    with pytest.raises(PlanError, match="compute_loss_func"):
        make(PenstockSFTTrainer, tmp_path, COMPLETION, more={"compute_loss_func": lambda *a, **k: 0})


@pytest.mark.slow
def test_same_run_with_images(tmp_path):
    """Every step takes rows of one length, so that `max_length` is to be given."""
    runs = []
    for kind, own in ((PenstockSFTTrainer, {"max_length": 24}), (SFTTrainer, {})):
        more = {"model": llava(), "processing_class": processor(), **own}
        runs.append(run_of(kind, tmp_path / kind.__name__, image_chats, more, max_length=None))
        runs[-1].train()
    require_equal(*runs)


def test_longer_rows_than_the_first_ask_for_max_length(tmp_path):
    more = {"model": llava(), "processing_class": processor(), "max_length": 8}
    with pytest.raises(BatchError, match="give the trainer max_length="):
        run_of(PenstockSFTTrainer, tmp_path, image_chats, more, max_length=None).train()


def test_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(PlanError, match=r"penstock\[trl\]"):
        importlib.reload(penstock.integrations.trl)
