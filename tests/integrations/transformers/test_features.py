"""Features of a Trainer: options that a Job cannot honour are refused by name, before a step is made."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import Trainer, default_data_collator

from penstock.errors import BatchError, PlanError
from penstock.integrations.transformers import PenstockTrainer
from penstock.integrations.transformers.features import (
    FEATURES,
    INSTEAD,
    LEFT_ASIDE,
    refuse_trainer,
    require_known_optimizer,
)
from penstock.integrations.transformers.short_batches import require_one_process, short_rows
from penstock.tests.integrations.transformers.runs import (
    TOLERANCE,
    VOCABULARY,
    arguments,
    both,
    causal,
    classifier,
    llama,
    make_case,
    padding,
    require_equal,
    row,
    tell_of,
)

DOCS = Path(__file__).resolve().parents[3] / "docs" / "integrations.md"
NEED_MORE = ("fsdp", "deepspeed", "parallelism_config", "optim_target_modules")  # objects, or a start of their own


def test_the_page_shows_every_feature():
    text = DOCS.read_text("utf-8")
    assert len(FEATURES) >= 40
    for each in FEATURES:
        names = ", ".join(f"`{name}`" if "_" in name or (name.islower() and " " not in name) else name
                          for name in each.name.split(", "))  # fmt: skip
        assert f"| {names} | {each.treatment} | {each.text} |" in text, each.name


@pytest.mark.parametrize("name", [*(name for name in INSTEAD if name not in NEED_MORE), "train_sampling_strategy"])
def test_refuses_by_name(name, tmp_path):
    model, rows = causal()
    given = arguments(tmp_path, eval_strategy="steps")
    setattr(given, name, "batch_rebalance" if name == "train_sampling_strategy" else True)
    with pytest.raises(PlanError, match=name):
        PenstockTrainer(model=model, args=given, train_dataset=rows, eval_dataset=rows)


def test_options_that_change_no_number_are_left_aside_with_a_line(tmp_path, caplog):
    values = {**dict.fromkeys(LEFT_ASIDE, True), "torch_empty_cache_steps": 2}
    given = arguments(tmp_path, torch_compile_mode="default")
    for name, value in values.items():
        setattr(given, name, value)
    model, rows = causal()
    trainer = PenstockTrainer(model=model, args=given, train_dataset=rows)
    told = " ".join(caplog.messages)
    for name, value in values.items():
        assert f"TrainingArguments({name}={value!r}) is left aside: {LEFT_ASIDE[name]}" in told
        assert not getattr(trainer.args, name) and getattr(given, name) == value
    assert trainer.args.torch_compile_mode is None


def test_refuses_an_optimizer_that_wants_more_than_gradients():
    from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

    with pytest.raises(PlanError, match=r"'galore_adamw_layerwise'.*adafactor"):
        require_known_optimizer(LayerWiseDummyOptimizer, "galore_adamw_layerwise")


def test_refuses_a_maker_of_models(tmp_path):
    with pytest.raises(PlanError, match=r"model_init.*model=model_init\(\)"):
        make_case(PenstockTrainer, None, causal()[1], tmp_path, {"model_init": lambda: causal()[0]})


@pytest.mark.parametrize("name", ["deepspeed", "fsdp"])
def test_refuses_what_accelerate_launch_adds(name, tmp_path):
    trainer = make_case(PenstockTrainer, *causal(), tmp_path)
    setattr(trainer, f"is_{name}_enabled", True)
    with pytest.raises(PlanError, match=f"--use_{name}"):
        refuse_trainer(trainer)


def test_refuses_a_precision_of_accelerate_launch(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(PlanError, match=r"--mixed_precision fp8.*bf16"):
        make_case(PenstockTrainer, *causal(), tmp_path)


class CountsAllRows(nn.Module):
    """A model with 2 classes whose loss takes any number as a class."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 1)

    def forward(self, input_ids, labels):
        logits = self.head(self.tokens(input_ids).mean(1)).squeeze(-1)
        return {"loss": nn.functional.binary_cross_entropy_with_logits(logits, labels.float()), "logits": logits}


def counted_rows():
    return CountsAllRows(), [{"input_ids": row(i)["input_ids"], "labels": torch.tensor(i % 2)} for i in range(32)]


def test_a_loss_that_counts_all_rows_is_evaluated_as_by_trainer(tmp_path):
    """7 rows, fewer than two steps have."""
    changes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "eval_strategy": "steps"}
    ours, plain = both(counted_rows, tmp_path, **changes, eval_steps=2)
    require_equal(ours, plain)
    torch.testing.assert_close(tell_of(ours, "eval_loss"), tell_of(plain, "eval_loss"), rtol=TOLERANCE, atol=TOLERANCE)


def test_a_short_batch_that_ranks_would_share_is_refused():
    args = SimpleNamespace(world_size=2, train_batch_size=2, dataloader_drop_last=False)
    assert short_rows(args, range(30), 8, 9) == 6
    assert short_rows(args, range(30), 8, 3) is None
    with pytest.raises(PlanError, match="as its labels are no classes; use: dataloader_drop_last=True"):
        require_one_process(2, "its labels are no classes")


@pytest.mark.slow
def test_a_stream_that_ends_with_a_short_batch_of_numbers(tmp_path):
    """30 rows, of which nobody knows the number: the eighth batch has two."""
    from datasets import Dataset

    model, rows = classifier()
    model.config.problem_type = "multi_label_classification"
    rows = [{"input_ids": each["input_ids"].tolist(), "labels": [0.0, 1.0, 0.0]} for each in rows[:30]]
    given = {"train_dataset": Dataset.from_list(rows).to_iterable_dataset(), "data_collator": default_data_collator}
    whole = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 9}
    found = []
    for kind in (PenstockTrainer, Trainer):
        found.append(make_case(kind, copy.deepcopy(model), rows, tmp_path / kind.__name__, given, **whole))
        found[-1].train()
    require_equal(*found)


@pytest.mark.slow
def test_weights_alone_are_saved_and_nothing_resumes_from_them(tmp_path, capsys):
    """And before the first step it has said what it plans, and the answer."""
    ours = make_case(PenstockTrainer, *causal(), tmp_path, save_strategy="steps", save_steps=2, save_only_model=True)
    ours.train()
    told = capsys.readouterr().err
    for part in ("planning GPT2LMHeadModel on", "48 tokens in 4 rows", "fits        yes: ", "tokens a second"):
        assert part in told, part
    saved = {path.name for path in (tmp_path / "checkpoint-4").iterdir()}
    assert "model.safetensors" in saved and not saved & {"penstock", "scheduler.pt"}
    with pytest.raises(PlanError, match="save_only_model"):
        make_case(PenstockTrainer, *causal(), tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


@pytest.mark.slow
def test_pushes_as_a_trainer_does(tmp_path, monkeypatch):
    """The uploads of the library, on a hub that is not there."""
    uploads = []

    class Api:
        def create_repo(self, name, **options):
            return SimpleNamespace(repo_id=f"me/{name}")

        def upload_folder(self, **options):
            uploads.append((options["repo_id"], sorted(path.name for path in Path(options["folder_path"]).iterdir())))
            return SimpleNamespace(done=lambda: True, result=lambda: None)

    monkeypatch.setattr("transformers.trainer.hf_api", Api)
    saving = {"save_strategy": "steps", "save_steps": 4, "push_to_hub": True, "hub_model_id": "tiny"}
    ours = make_case(PenstockTrainer, *causal(), tmp_path, **saving)
    ours.train()
    assert uploads[0][0] == "me/tiny" and "model.safetensors" in uploads[0][1]


@pytest.mark.slow
def test_noise_in_embeddings_is_drawn_anew_by_keys(tmp_path):
    """Not the draws of torch's generator: the same in every run, none without training, and the loss goes down."""
    runs = []
    for index in range(2):
        changes = {"neftune_noise_alpha": 5.0, "max_steps": 12, "learning_rate": 1e-2}
        runs.append(make_case(PenstockTrainer, *causal(), tmp_path / str(index), **changes))
        runs[-1].train()
    first, again = (tell_of(run, "loss") for run in runs)
    plain = make_case(PenstockTrainer, *causal(), tmp_path / "plain", max_steps=12, learning_rate=1e-2)
    plain.train()
    assert torch.equal(first, again) and not torch.equal(first, tell_of(plain, "loss"))
    assert first[-3:].mean() < first[:3].mean()


def test_refuses_rows_longer_than_it_was_told(tmp_path):
    model, rows = llama()
    with pytest.raises(BatchError, match="max_length=14"):
        make_case(PenstockTrainer, model, rows[:4][::-1] + [rows[6]] * 28, tmp_path,
             {"data_collator": padding, "max_length": 11}).train()  # fmt: skip
