"""Names on the hub: downloaded as files of `datasets`, or refused with what works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from penstock.compiler.models.hub import hub_refusal
from penstock.data.files import read_records
from penstock.data.hub import is_on_hub, local_paths
from penstock.ir.errors import PlanError


class Api:
    """A hub that answers every question with one error, or without one."""

    error: Exception | None = None

    def dataset_info(self, name: str, timeout: float) -> None:
        if self.error is not None:
            raise self.error


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Api]:
    kind = type("OwnApi", (Api,), {})
    monkeypatch.setattr(huggingface_hub, "HfApi", kind)
    return kind


def answer(kind: Any, status: int) -> Exception:
    request = httpx.Request("GET", "https://huggingface.co/x")
    return kind("refused", response=httpx.Response(status, request=request))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tatsu-lab/alpaca", True),
        ("glue-owner/glue:mrpc/test", True),
        ("alpaca", False),
        ("owner/rows.jsonl", False),
        ("../owner/name", False),
        ("/owner/name", False),
        ("a/b/c/d", False),
    ],
)
def test_names(name: str, expected: bool) -> None:
    assert is_on_hub(Path(name)) == expected


def test_what_is_here_is_no_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a path below a folder that is here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    assert not is_on_hub(Path("data/notes")) and is_on_hub(Path("date/notes"))


def test_a_downloaded_split_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: type[Api]) -> None:
    made = datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}])
    made.save_to_disk(str(tmp_path / "cache"))
    asked: list[Any] = []

    def load(name: str, configuration: str | None, split: str) -> datasets.Dataset:
        asked.append((name, configuration, split))
        return datasets.Dataset.from_file(str(next((tmp_path / "cache").glob("*.arrow"))))

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = local_paths([Path("a/b"), Path("a/b:c/test")], "train")
    assert asked == [("a/b", None, "train"), ("a/b", "c", "test")]
    assert [record.values["text"] for record in read_records(found)] == ["one", "two"] * 2


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (httpx.ConnectError("no network"), "hub cannot be reached from here. A local file works: --data FILE"),
        (answer(RepositoryNotFoundError, 404), "hub has no 'no-such/rows', or shows it to logged-in"),
        (answer(GatedRepoError, 403), "is gated .*terms on https://huggingface.co/datasets/no-such/rows, then log in"),
    ],
    ids=["no network", "no data set", "gated"],
)
def test_refusals(error: Exception, said: str, hub: type[Api]) -> None:
    hub.error = error
    with pytest.raises(PlanError, match=f"--data no-such/rows: there is no such file or folder, and .*{said}"):
        local_paths([Path("no-such/rows")], "train")


def test_an_unknown_split(monkeypatch: pytest.MonkeyPatch, hub: type[Api]) -> None:
    def load(*_: Any, split: str) -> None:
        raise ValueError(f"Unknown split {split!r}. Should be one of ['train'].")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(PlanError, match="Unknown split 'test'"):
        local_paths([Path("a/b")], "test")


def test_a_gated_model() -> None:
    error = OSError("wrapped")
    error.__cause__ = answer(GatedRepoError, 401)
    assert "accept its terms on https://huggingface.co/meta-llama/x, then" in hub_refusal("meta-llama/x", error)
    assert hub_refusal("a/b", SystemError("odd")) == "'a/b' is not had from the Hugging Face hub: odd"
