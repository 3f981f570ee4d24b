"""The golden fixture compares whole texts, explains a difference, and no golden file outlives its test."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.tests.golden_text import Golden, difference, golden_path, write

TESTS = Path(__file__).parent


def test_path_mirrors_the_test_file() -> None:
    path = golden_path(Path("/t/passes/test_coarsen.py"), "two-stages")
    assert path == Path("/t/passes/golden/test_coarsen/two-stages.txt")


@pytest.mark.parametrize("name", ["", "Upper", "a/b", "../a", "a b"])
def test_path_refuses_other_names(name: str) -> None:
    with pytest.raises(ValueError, match="golden name"):
        golden_path(Path("test_x.py"), name)


def test_equal_text_passes(tmp_path: Path) -> None:
    write(tmp_path / "deep" / "a.txt", "one\ntwo\n")
    assert difference(tmp_path / "deep" / "a.txt", "one\ntwo\n") == ""


def test_difference_shows_the_changed_line_only(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "one\ntwo\nthree\n")
    message = difference(tmp_path / "a.txt", "one\n2\nthree\n")
    assert "-two\n+2\n" in message
    assert "-one" not in message
    assert "--update-golden" in message


def test_a_missing_last_newline_is_a_difference(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "one\n")
    assert "no newline" in difference(tmp_path / "a.txt", "one")


def test_missing_file_says_how_to_write_it(tmp_path: Path) -> None:
    assert "--update-golden" in difference(tmp_path / "a.txt", "one\n")


def test_fixture_reads_the_file_beside_this_test(golden: Golden) -> None:
    golden("a text of\ntwo lines\n", "sample")


def test_fixture_fails_on_another_text(golden: Golden, pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--update-golden"):
        pytest.skip("would rewrite the sample with a wrong text")
    with pytest.raises(pytest.fail.Exception, match="-two lines"):
        golden("a text of\nthree lines\n", "sample")


def test_no_golden_folder_without_its_test_file() -> None:
    folders = [folder for root in TESTS.rglob("golden") if root.is_dir() for folder in root.iterdir()]
    orphans = [folder for folder in folders if not (folder.parent.parent / f"{folder.name}.py").exists()]
    assert folders
    assert not orphans
