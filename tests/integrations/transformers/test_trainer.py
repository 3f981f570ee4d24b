"""A run by `PenstockTrainer` is that of `Trainer`: losses and weights, also when resumed."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from torch.export import Dim
from transformers import Trainer, TrainerCallback

from penstock.errors import PlanError
from penstock.integrations.transformers import PenstockTrainer
from penstock.ir.machine.hardware import Hardware
from penstock.tests.integrations.transformers.runs import (
    FAST,
    TOLERANCE,
    as_tensors,
    both,
    causal,
    classifier,
    joining,
    llama,
    make_case,
    many_sizes,
    padding,
    require_equal,
    seq2seq,
    tell_of,
    train_steps,
    vision,
)
from penstock.training import watch
from penstock.training.logs.jsonl import JsonLog


def test_same_run_of_a_causal_model(tmp_path):
    require_equal(*both(causal, tmp_path))


@pytest.mark.slow
def test_same_run_of_rows_of_many_lengths_and_a_short_last_batch(tmp_path):
    """30 rows are 7 steps of 4 and one of 2, for two epochs."""
    require_equal(*both(llama, tmp_path, {"data_collator": padding}, max_steps=-1, num_train_epochs=2))


@pytest.mark.slow
def test_same_run_of_a_model_that_sees(tmp_path):
    """Inputs have several entries a row; a last batch is short, and an evaluation has 7 rows."""
    changes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "eval_strategy": "epoch"}
    ours, plain = both(vision, tmp_path, {"data_collator": joining}, max_steps=-1, num_train_epochs=1, **changes)
    require_equal(ours, plain)
    torch.testing.assert_close(tell_of(ours, "eval_loss"), tell_of(plain, "eval_loss"), rtol=2e-4, atol=TOLERANCE)


@pytest.mark.slow
def test_same_run_of_images_of_several_sizes_and_numbers(tmp_path):
    """28 rows are 7 steps of 2 batches of 2; every evaluation is by the model itself."""
    changes = {"gradient_accumulation_steps": 2, "eval_strategy": "epoch"}
    ours, plain = both(many_sizes, tmp_path, {"data_collator": joining}, max_steps=-1, num_train_epochs=1, **changes)
    require_equal(ours, plain)
    torch.testing.assert_close(tell_of(ours, "eval_loss"), tell_of(plain, "eval_loss"), rtol=2e-4, atol=TOLERANCE)


@pytest.mark.slow
def test_same_run_where_every_batch_has_its_own_length(tmp_path):
    options = {**FAST, "dynamic_shapes": Dim("sequence", min=2, max=14)}
    model, rows = llama()
    lengths = []

    def collate(some):
        lengths.append(max(len(row["input_ids"]) for row in some))
        return padding(some)

    ours = make_case(
        PenstockTrainer, model, rows[:28], tmp_path, {"data_collator": collate, "compile_options": options}
    )
    ours.train()
    assert len(set(lengths)) > 1
    require_equal(
        ours, train_steps(Trainer, lambda: (llama()[0], rows[:28]), tmp_path, trainer={"data_collator": padding})
    )


@pytest.mark.slow
def test_same_run_of_an_encoder_decoder(tmp_path):
    whole = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    require_equal(*both(seq2seq, tmp_path, {"data_collator": padding}, **whole))


@pytest.mark.slow  # test_evaluation.py has its whole run, with evaluations
def test_same_run_of_a_classifier(tmp_path):
    require_equal(*both(classifier, tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=1))


@pytest.mark.slow
def test_same_run_up_to_the_end_of_a_stream(tmp_path):
    """15 batches of 2 rows, of which the last makes no whole step; `Trainer` adds it to the next epoch's first step."""
    from datasets import Dataset

    def streamed():
        model, rows = llama()
        return model, Dataset.from_list(
            [{k: v.tolist() for k, v in each.items()} for each in rows]
        ).to_iterable_dataset()

    given = {"eval_dataset": llama()[1][:7], "processing_class": None, "data_collator": as_tensors}
    ours, plain = both(streamed, tmp_path, given, max_steps=7)
    require_equal(ours, plain)
    longer = train_steps(PenstockTrainer, streamed, tmp_path, trainer=given, max_steps=8)
    assert len(tell_of(longer, "loss")) == longer.state.global_step == 8 and tell_of(longer, "loss")[-1] < 5.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adafactor", "adamw_bnb_8bit", "adamw_torch_8bit"])
def test_same_run_with_an_optimizer_of_another_library(name, tmp_path):
    """Embeddings and head have 4800 elements, above 4096, below which all states of these libraries have 32 bits."""

    def wide():
        model, rows = llama()
        model.resize_token_embeddings(150)
        return model, rows

    require_equal(*both(wide, tmp_path, {"data_collator": padding}, optim=name))


@pytest.mark.slow
def test_accumulated_batches_of_a_classifier_are_one_batch(tmp_path):
    """Trainer adds up the means of micro-batches where a model leaves `num_items_in_batch` aside, as BERT's and T5's
    losses do; a Job's loss is the mean over the whole batch."""
    ours = train_steps(PenstockTrainer, classifier, tmp_path / "a")
    whole = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    require_equal(ours, train_steps(Trainer, classifier, tmp_path / "b", **whole))


def test_resumes_in_the_middle(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 3}
    train_steps(PenstockTrainer, causal, tmp_path / "a", **saving)
    again = train_steps(PenstockTrainer, causal, tmp_path / "a", str(tmp_path / "a" / "checkpoint-3"), **saving)
    require_equal(again, train_steps(Trainer, causal, tmp_path / "b"))


@pytest.mark.slow
def test_resumes_without_skipping_data(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 3, "ignore_data_skip": True}
    found = []
    for kind in (PenstockTrainer, Trainer):
        folder = tmp_path / kind.__name__
        train_steps(kind, causal, folder, **saving)
        found.append(train_steps(kind, causal, folder, str(folder / "checkpoint-3"), **saving))
    require_equal(*found)


def test_refuses_to_resume_from_another_trainer(tmp_path):
    train_steps(Trainer, causal, tmp_path, save_strategy="steps", save_steps=3)
    with pytest.raises(PlanError, match="saved by another trainer"):
        train_steps(PenstockTrainer, causal, tmp_path, str(tmp_path / "checkpoint-3"))


@pytest.mark.slow
def test_half_precision_is_that_of_autocast(tmp_path):
    """bf16 has 8 bits: activations differ by 2 ** -8 between two orders of the same sums."""
    ours, plain = both(causal, tmp_path, bf16=True)
    torch.testing.assert_close(tell_of(ours, "loss"), tell_of(plain, "loss"), rtol=2**-8, atol=0.0)
    assert not torch.equal(tell_of(ours, "loss"), tell_of(train_steps(PenstockTrainer, causal, tmp_path), "loss"))


@pytest.mark.slow
def test_precision_of_accelerate_launch(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    found = train_steps(PenstockTrainer, causal, tmp_path, max_steps=2)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    assert torch.equal(
        tell_of(found, "loss"), tell_of(train_steps(PenstockTrainer, causal, tmp_path, bf16=True, max_steps=2), "loss")
    )


@pytest.mark.slow
def test_adapter_of_peft(tmp_path):
    from peft import LoraConfig, get_peft_model

    def adapt():
        model, rows = causal()
        torch.manual_seed(1)
        return get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.0)), rows

    ours, plain = both(adapt, tmp_path, save_strategy="steps", save_steps=5)
    require_equal(ours, plain)
    assert (tmp_path / "ours" / "checkpoint-5" / "adapter_model.safetensors").is_file()


class StopsAt3(TrainerCallback):
    def __init__(self):
        self.heard = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.heard.append(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 3


@pytest.mark.slow
def test_callbacks_hear_and_stop(tmp_path):
    callback = StopsAt3()
    found = train_steps(PenstockTrainer, causal, tmp_path, trainer={"callbacks": [callback]})
    assert callback.heard == [0, 1, 2]
    assert len(tell_of(found, "loss")) == found.state.global_step == 3


@pytest.fixture(scope="module")
def log_folder(tmp_path_factory):
    """The directory of a run that evaluates, with logs by TensorBoard and by a listener."""
    folder = tmp_path_factory.mktemp("logged")
    given = {"listeners": [JsonLog(folder / "logs")], "serve": "127.0.0.1:0"}
    changes = {"eval_strategy": "steps", "eval_steps": 2, "report_to": "tensorboard"}
    train_steps(PenstockTrainer, causal, folder, trainer=given, **changes)
    return folder


@pytest.mark.slow
def test_reports_to_tensorboard(log_folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = log_folder.rglob("events.out.*")
    found = EventAccumulator(str(events)).Reload()
    assert len(found.Scalars("train/loss")) == 5
    assert len(found.Scalars("train/grad_norm")) == 5


def test_listeners_hear_of_steps_and_evaluations(log_folder):
    lines = [json.loads(line) for line in (log_folder / "logs" / "log.jsonl").read_text().splitlines()]
    events = [line["event"] for line in lines]
    assert events.count("step") == 5
    assert [line["step"] for line in lines if line["event"] == "evaluation"] == [2, 4, 5]
    assert (events[0], events[-1]) == ("begin", "end")


@pytest.mark.slow
def test_an_interrupt_while_saving_leaves_a_whole_checkpoint(tmp_path):
    class Interrupted(PenstockTrainer):
        def _save_rng_state(self, output_dir):
            os.kill(os.getpid(), signal.SIGINT)
            super()._save_rng_state(output_dir)

    saving = {"save_strategy": "steps", "save_steps": 3}
    found = make_case(Interrupted, *causal(), tmp_path, **saving)
    with pytest.raises(KeyboardInterrupt):
        found.train()
    assert found.state.global_step == 3 and found.job is None
    again = train_steps(PenstockTrainer, causal, tmp_path, True, **saving)
    require_equal(again, train_steps(Trainer, causal, tmp_path / "b"))


@pytest.mark.slow
def test_an_interrupt_between_steps_leaves_the_trained_weights(tmp_path):
    class Interrupts(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                os.kill(os.getpid(), signal.SIGINT)

    fixed = {"lr_scheduler_type": "constant"}
    found = make_case(PenstockTrainer, *causal(), tmp_path, {"callbacks": [Interrupts()]}, **fixed)
    with pytest.raises(KeyboardInterrupt):
        found.train()
    plain = train_steps(Trainer, causal, tmp_path, max_steps=3, **fixed)
    for ours, theirs in zip(found.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.slow
def test_an_error_ends_the_run(tmp_path):
    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise ValueError("here")

    model, rows = causal()
    found = make_case(PenstockTrainer, model, rows, tmp_path, {"callbacks": [Fails()]})
    with pytest.raises(ValueError, match="here"):
        found.train()
    assert found.job is None


@pytest.mark.slow
@pytest.mark.multi
def test_a_plan_that_is_offered_for_a_slow_device_goes_on_as_trainer_does(tmp_path, monkeypatch, caplog):
    """The second of two workers counts as three times as slow. The run ends at a checkpoint, as if stopped, and is
    begun again as the warning says."""
    monkeypatch.setattr(watch, "OFFER_S", 0.0)
    monkeypatch.setattr("penstock.compiler.job.job.slow_devices", lambda *_, **__: {1: 3.0})
    last = watch.WARM_STEPS + watch.LOOKED + 1
    two = {"hardware": Hardware.cpu(2), "compile_options": {"strategy": "data-parallel", "micro_batches": 4}}
    steps = {"max_steps": last + 3, "save_strategy": "steps", "save_steps": last, "lr_scheduler_type": "constant"}
    folder = tmp_path / "ours"

    class Stops(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == last

    begun = make_case(PenstockTrainer, *causal(), folder, {**two, "callbacks": [Stops()]}, **steps)
    begun.train()
    (said,) = [record.message for record in caplog.records if "as long as planned" in record.message]
    plan, hardware = folder / "penstock-offer" / "plan.json", folder / "penstock-offer" / "hardware.yaml"
    assert f"hardware={str(hardware)!r} and compile_options={{'plan': {str(plan)!r}}}" in said
    taken = {"hardware": str(hardware), "compile_options": {"plan": str(plan)}}
    ours = make_case(PenstockTrainer, *causal(), folder, taken, **steps)
    ours.train(resume_from_checkpoint=str(folder / f"checkpoint-{last}"))
    plain = train_steps(Trainer, causal, tmp_path / "plain", **{**steps, "save_strategy": "no"})
    require_equal(ours, plain)
