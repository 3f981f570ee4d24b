"""The cache of measured times: what is used, what is ignored, what is refused."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.compiler.profile.cache import EntryKey, ProfileCache, default_directory
from penstock.graph.turn_seconds import TurnSeconds
from penstock.ir.errors import PlanError

KEY = EntryKey("0123456789abcdef", "a CPU, 1 threads", "fp32", "2.13.0")
SECONDS = TurnSeconds(0.001, 0.002, 0.003)


@pytest.fixture
def cache(tmp_path: Path) -> ProfileCache:
    return ProfileCache(tmp_path / "profiles")


@pytest.mark.slow
def test_what_was_saved_is_loaded(cache: ProfileCache) -> None:
    assert cache.load(KEY) is None
    assert not cache.directory.exists()
    cache.save(KEY, SECONDS)
    assert cache.load(KEY) == SECONDS
    assert ProfileCache(str(cache.directory)).load(KEY) == SECONDS


@pytest.mark.parametrize(
    "other", [{"block": "f" * 16}, {"device": "another"}, {"precision": "bf16"}, {"torch": "2.12.1"}, {"format": 0}]
)
def test_an_entry_of_anything_else_is_not_used(cache: ProfileCache, other: dict[str, Any]) -> None:
    cache.save(KEY, SECONDS)
    stale = replace(KEY, **other)
    assert cache.load(stale) is None
    cache.path(KEY).rename(cache.path(stale))  # even at the very place where it is looked for
    with pytest.warns(UserWarning, match=f"is of another {next(iter(other))}; the block is measured anew"):
        assert cache.load(stale) is None


@pytest.mark.parametrize("text", ["", '{"key": {', "[]", '{"seconds": {}}', b"\xff\xfe".decode("latin1")])
def test_a_damaged_entry_is_reported_and_written_anew(cache: ProfileCache, text: str) -> None:
    cache.save(KEY, SECONDS)
    cache.path(KEY).write_text(text, encoding="latin1")
    with pytest.warns(UserWarning, match=r"0123456789abcdef-.*\.json is damaged"):
        assert cache.load(KEY) is None
    cache.save(KEY, SECONDS)
    assert cache.load(KEY) == SECONDS


@pytest.mark.parametrize("value", [float("nan"), 0, 0.0, -1e-3, float("inf"), "0.1", None, True])
@pytest.mark.parametrize("name", ["forward_s", "rematerialise_s", "backward_s"])
def test_a_figure_that_is_no_time_is_refused_by_name(cache: ProfileCache, name: str, value: Any) -> None:
    cache.save(KEY, SECONDS)
    path = cache.path(KEY)
    entry = json.loads(path.read_text())
    entry["seconds"][name] = value
    path.write_text(json.dumps(entry))
    with pytest.raises(PlanError, match=rf"{name} of .*{path.name} is .*positive and finite; delete the file"):
        cache.load(KEY)
    with pytest.raises(PlanError, match=f"{name} of block 0123456789abcdef on a CPU"):
        cache.save(KEY, replace(SECONDS, **{name: value}))


def test_a_missing_figure_is_refused_by_name(cache: ProfileCache) -> None:
    cache.save(KEY, SECONDS)
    path = cache.path(KEY)
    entry = json.loads(path.read_text())
    del entry["seconds"]["backward_s"]
    path.write_text(json.dumps(entry))
    with pytest.raises(PlanError, match=rf"{path.name} lacks backward_s; delete the file"):
        cache.load(KEY)


def test_many_may_write_and_read_at_once(cache: ProfileCache) -> None:
    wrong: list[TurnSeconds | None] = []
    cache.save(KEY, SECONDS)

    def work(start_s: float) -> None:
        for i in range(40):
            cache.save(KEY, TurnSeconds(start_s, start_s, start_s + i))
            found = cache.load(KEY)
            if found is None or (found != SECONDS and found.forward_s != found.rematerialise_s):
                wrong.append(found)

    threads = [threading.Thread(target=work, args=(float(n),)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert [path.name for path in cache.directory.iterdir()] == [cache.path(KEY).name]


def test_a_failed_write_leaves_the_entry_and_nothing_else(cache: ProfileCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.save(KEY, SECONDS)

    def full(self: Path, *args: Any, **kwargs: Any) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        cache.save(KEY, TurnSeconds(1.0, 1.0, 1.0))
    assert [path.name for path in cache.directory.iterdir()] == [cache.path(KEY).name]
    assert cache.load(KEY) == SECONDS


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ProfileCache().directory == default_directory() == tmp_path / "penstock" / "profiles"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_directory() == tmp_path / ".cache" / "penstock" / "profiles"
    (tmp_path / "file").touch()
    with pytest.raises(PlanError, match="is a file; name a directory"):
        ProfileCache(tmp_path / "file")
