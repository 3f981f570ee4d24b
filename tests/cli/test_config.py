"""A run as a file: what it says is what the options say, and mistakes are told with their line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from penstock.cli.config import SAME, SECTION_OF, SECTIONS, WRITE, config_text, read_config
from penstock.cli.main import main
from penstock.cli.options import TrainOptions
from penstock.ir.errors import PlanError

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train.yaml"


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_every_option_has_a_section() -> None:
    keys = [key for keys in SECTIONS.values() for key in keys]
    assert sorted(keys) == sorted(field.name for field in dataclasses.fields(TrainOptions))


def test_a_file_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {model: gpt2}\ndata:\n  data: a.txt\noptimizer:\n  lr: 5e-5\ntraining:\n")
    assert read_config(path) == {"model": "gpt2", "data": [Path("a.txt")], "lr": 5e-5}


def test_numbers_are_texts_where_a_text_is_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path, "hardware: {hardware: 4090, ssd: 0, set: [a=1, 2]}\n")
    assert read_config(path) == {"hardware": ["4090"], "ssd": "0", "set": ["a=1", "2"]}


def test_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    path = write(tmp_path, "model: {model: ~/gpt}\ndata: {data: [~/a.txt, b~.txt]}\nsaving: {out: ~/out}\n")
    found = read_config(path)
    assert found["model"] == "/home/me/gpt" and found["out"] == Path("/home/me/out")
    assert found["data"] == [Path("/home/me/a.txt"), Path("b~.txt")]


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, "# nothing\n")) == {}


@pytest.mark.parametrize(
    "options",
    [
        TrainOptions(),
        TrainOptions(
            model="gpt2: odd # name", data=[Path("a b.jsonl"), Path("c")], lr=1e-7, set=["dram=1TB"], resume=True,
            micro_batches=4, out=Path("out/x"), eval_fraction=0.1,
        ),
    ],
    ids=["defaults", "all kinds"],
)  # fmt: skip
def test_what_is_printed_is_read_back(options: TrainOptions, tmp_path: Path) -> None:
    text = config_text(options)
    assert TrainOptions(**read_config(write(tmp_path, text))) == options
    assert max(map(len, text.splitlines())) <= 120
    for keys in yaml.safe_load(text).values():
        assert keys


def test_the_example_is_a_run() -> None:
    found = TrainOptions(**read_config(EXAMPLE))
    assert found.model is not None and found.data


def test_options_count_more_than_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also flags, which the file sets and the line takes back."""
    path = write(tmp_path, "data: {pack: true, data: [a, b]}\noptimizer: {lr: 1e-3}\nsaving: {resume: true}\n")
    line = [str(path), "--no-pack", "--no-resume", "--lr", "0.5", "--data", "c"]
    with pytest.raises(SystemExit, match="0"):
        main(["train", *line, "--print-config"])
    found = read_config(write(tmp_path, capsys.readouterr().out))
    assert (found["pack"], found["resume"], found["lr"], found["data"]) == (False, False, 0.5, [Path("c")])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("optimizer:\n  learning_rat: 1\n", "line 2: optimizer has no key 'learning_rat'"),
        ("training:\n  bach: 4\n", "line 2: training has no key 'bach'; the nearest is training.batch"),
        ("training:\n  lr: 4\n", "line 2: 'lr' belongs to the section optimizer, not to training"),
        ("trainin:\n  batch: 4\n", "line 1: no section 'trainin'; the nearest is training"),
        ("batch: 4\n", "line 1: no section 'batch'; 'batch' is a key of the section training"),
        ("training:\n  batch: many\n", r"line 2: training.batch is 'many', allowed: int, at least 1, at most 1e"),
        ("training:\n  - batch\n", r"line 1: training is .* keys with values below it, .* `training: {batch: 4}`"),
        ("data: a b.jsonl\n", r"line 1: data is 'a b.jsonl', allowed: .* such as `data: {data: a b.jsonl}`"),
        ("- a\n", "found a list, allowed: the sections model, data"),
        ("training:\n  batch: [\n", "config.yaml: .*line"),
        ("optimizer:\n  lr: [1, 2]\n", "optimizer.lr is"),
        ("training:\n  batch: 0\n", r"line 2: training.batch is 0, allowed: int, at least 1, at most 1e\+09 \(rows of"),
        ("training:\n  max_steps: -1\n", r"line 2: training.max_steps is -1, allowed: int | null, at least 1"),
        ("data:\n  eval_fraction: 1.5\n", "line 2: data.eval_fraction is 1.5, allowed: float, at least 0, at most 0.9"),
        ("learning_rate: fast\n", "line 1: optimizer.lr is 'fast', allowed: float"),
        ("optimizer: {lr: 1}\nlearning_rate: 2\n", "line 2: optimizer.lr is given twice"),
        ("data:\n  pack: true\n  pack: false\n", "line 3, column 3: the key 'pack' is given twice"),
    ],
)
def test_mistakes_are_told_with_their_line(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=said):
        read_config(write(tmp_path, text))


def test_keys_of_other_trainers_that_mean_the_same(tmp_path: Path) -> None:
    """At the top of a file, as these trainers have them, or in any section."""
    path = write(
        tmp_path,
        "base_model: gpt2\nsequence_len: 64\nlearning_rate: 2e-4\nnum_epochs: 3\noutput_dir: out/x\nval_set_size: 0.1\n"
        "training:\n  lr_scheduler_type: cosine\n  save_steps: 5\n  seed: 3\n",
    )
    assert read_config(path) == {
        "model": "gpt2", "sequence": 64, "lr": 2e-4, "epochs": 3.0, "out": Path("out/x"), "eval_fraction": 0.1,
        "schedule": "cosine", "save_every": 5, "seed": 3,
    }  # fmt: skip


def test_keys_of_other_trainers_are_answered_all_at_once(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "base_model: gpt2\nmicro_batch_size: 2\ndatasets:\n  - path: a\n    type: alpaca\nlora_r: 8\nfoo: 1\n"
        "training:\n  per_device_train_batch_size: 4\n  gradient_checkpointing: true\n",
    )
    with pytest.raises(PlanError) as caught:
        read_config(path)
    said = str(caught.value).replace(f"{path}, ", "").splitlines()
    assert said == [
        "line 2: 'micro_batch_size' is of another trainer: write training.batch: N, the rows of all devices and "
        "micro-batches of a step together; the plan divides them",
        "line 3: 'datasets' is of another trainer: write data.data: FILE or OWNER/NAME; its columns say the kind, or "
        "`kind: chat`",
        "line 6: 'lora_r' is of another trainer: write model.adapter: lora:r=16,alpha=32,targets=q_proj+v_proj",
        "line 7: no section 'foo'; there are model, data, hardware, plan, optimizer, training, logging, saving",
        "line 9: 'per_device_train_batch_size' is of another trainer: write training.batch: N, the rows of all devices "
        "and micro-batches of a step together; the plan divides them",
        "line 10: 'gradient_checkpointing' is of another trainer: leave it out: the plan decides this",
    ]


def test_the_table_of_other_trainers_keys() -> None:
    """Each has one answer, of a key that there is, and none is a key of ours."""
    assert set(SAME.values()) <= SECTION_OF.keys()
    assert not (SAME.keys() | WRITE.keys()) & SECTION_OF.keys() and not SAME.keys() & WRITE.keys()
    for key, text in WRITE.items():
        own = text.partition(":")[0]
        assert own in SECTION_OF or own == "leave it out", key


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"gone\.yaml"):
        read_config(tmp_path / "gone.yaml")


def test_the_file_in_the_documents_is_a_run(tmp_path: Path) -> None:
    page = (EXAMPLE.parents[1] / "docs" / "train_config.md").read_text()
    found = read_config(write(tmp_path, page.split("```yaml\n")[1].split("```")[0]))
    assert found["log"] == ["jsonl", "tensorboard"] and found["patience"] == 2
