"""Compiled stages of several processes that share torch's cache on disk, with Inductor on CPU devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.tests.compiler.job.compiled_devices import ranks, train

pytestmark = pytest.mark.slow


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


def entries(cache: Path) -> dict[str, tuple[int, int]]:
    """Each file in the cache, and what changes when it is written again."""
    found = ((path, path.stat()) for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {str(path.relative_to(cache)): (file.st_ino, file.st_mtime_ns) for path, file in found}


@pytest.mark.usefixtures("cache")
def test_ranks_of_torchrun_find_what_ranks_have_compiled() -> None:
    """The first two compile the same class at the same time; what they leave serves the next."""
    first, second = ranks("inductor"), ranks("inductor")
    for rows in (first, second):
        assert sorted(row["rank"] for row in rows) == [0, 1]
        assert all(row["within"] and row["eager_blocks"] == {} for row in rows), rows
        assert all(row["stats"]["unique_graphs"] == 1 for row in rows), rows
        assert all(row["losses"] == first[0]["losses"] for row in rows), rows
    assert any(row["aot_autograd"].get("autograd_cache_miss") == 1 for row in first), first
    for row in second:
        assert row["aot_autograd"]["autograd_cache_hit"] == 1 and "autograd_cache_miss" not in row["aot_autograd"], row


def test_workers_find_what_workers_have_compiled(cache: Path) -> None:
    apart, losses, eager_blocks = train()
    assert apart.fits("fp32") and eager_blocks == {}, (apart, eager_blocks)
    before = entries(cache)
    assert any(name.startswith("aotautograd/") for name in before), before
    _, again, eager_blocks = train()
    assert again == losses and eager_blocks == {}
    assert entries(cache) == before
