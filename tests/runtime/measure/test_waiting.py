"""Waits for a core, as the kernel counts them."""

from __future__ import annotations

from pathlib import Path

from penstock.runtime.measure.waiting import waited_s


def test_the_second_number_counts(tmp_path: Path) -> None:
    account = tmp_path / "schedstat"
    account.write_text("1230000 2500000000 17\n")
    assert waited_s(account) == 2.5


def test_a_kernel_without_the_account(tmp_path: Path) -> None:
    assert waited_s(tmp_path / "none") == 0.0
    (tmp_path / "empty").touch()
    assert waited_s(tmp_path / "empty") == 0.0


def test_waits_only_grow() -> None:
    first = waited_s()
    assert 0.0 <= first <= waited_s()
