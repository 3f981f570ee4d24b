"""Rows are tokenised once on each host."""

from __future__ import annotations

import inspect
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.compiler.packing.documents import pack_documents
from penstock.data import cache, read
from penstock.data.codec import Codec
from penstock.data.spec import DataSpec
from penstock.ir.errors import PlanError

BYTES = Codec.read(None)


@pytest.fixture
def spec(tmp_path: Path) -> DataSpec:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": "words " * 9}) for _ in range(4)))
    return DataSpec(paths=(path,), sequence=8)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one each time that rows are made."""
    count: list[int] = []
    make = read._make_rows
    monkeypatch.setattr(read, "_make_rows", lambda *args: [count.append(1), make(*args)][1])
    return count


def test_the_second_time_is_read(spec: DataSpec, made: list[int]) -> None:
    first, second = (read.read_rows(spec, BYTES, "causal-lm") for _ in range(2))
    assert len(made) == 1
    assert second.kind == first.kind and second.said == first.said
    for name, column in first.rows.columns.items():
        torch.testing.assert_close(second.rows.columns[name], column, rtol=0, atol=0)


def test_other_files_wishes_and_tokenizers_are_made_anew(spec: DataSpec, made: list[int]) -> None:
    read.read_rows(spec, BYTES, "causal-lm")
    read.read_rows(spec.model_copy(update={"sequence": 4}), BYTES, "causal-lm")
    read.read_rows(spec, Codec(BYTES.encode, BYTES.special, None, 0, 256), "causal-lm")
    spec.paths[0].write_text(json.dumps({"text": "other words"}))
    read.read_rows(spec, BYTES, "causal-lm")
    assert len(made) == 4


def test_a_damaged_file_is_made_anew(spec: DataSpec, made: list[int]) -> None:
    read.read_rows(spec, BYTES, "causal-lm")
    (path,) = cache.cache_directory().glob("*.pt")
    path.write_bytes(path.read_bytes()[:100])
    assert len(read.read_rows(spec, BYTES, "causal-lm").rows) > 0
    assert len(made) == 2


def test_a_directory_that_cannot_be_written(spec: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.SETTING, str(tmp_path / "file"))
    with pytest.raises(PlanError, match="PENSTOCK_CACHE=DIRECTORY names another place"):
        read.read_rows(spec, BYTES, "causal-lm")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 1152 vs 1046"), "its disk is full"),
        (OSError(28, "No space left on device"), "No space left"),
    ],
)
def test_a_full_disk(error: Exception, said: str, spec: DataSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been written is removed: it would keep the disk full."""

    def full(found: Any, path: Path) -> None:
        path.write_bytes(b"x")
        raise error

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(PlanError, match=rf"{said}.*; PENSTOCK_CACHE=DIRECTORY"):
        read.read_rows(spec, BYTES, "causal-lm")
    assert not list(cache.cache_directory().glob("*.p*"))


def test_an_error_of_what_makes_the_rows_is_not_one_of_the_cache() -> None:
    def make() -> dict[str, Any]:
        raise TimeoutError("the disk with the data is gone")

    for _ in range(2):  # the lock is free again
        with pytest.raises(TimeoutError, match="the disk with the data is gone"):
            cache.load_or_make("key", make)


def test_other_code_makes_other_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_by = {Path(inspect.getfile(function)).parent for function in (pack_documents, read.read_rows)}
    assert made_by == set(cache.MAKERS)
    monkeypatch.setattr(cache, "MAKERS", (tmp_path,))
    keys = set()
    for code in ("a = 1", "a = 2"):
        (tmp_path / "makes.py").write_text(code)
        keys.add(cache.key_of("part"))
    assert len(keys) == 2


def _slowly(folder: str, count: Any) -> None:
    def make() -> dict[str, Any]:
        with count.get_lock():
            count.value += 1
        time.sleep(0.5)
        return {"columns": torch.zeros(1)}

    cache.load_or_make("key", make)


@pytest.mark.slow
def test_two_processes_make_them_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    count = context.Value("i", 0)
    processes = [context.Process(target=_slowly, args=(str(tmp_path), count)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert count.value == 1
