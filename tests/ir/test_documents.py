"""Documents are regular files of plain data; anything else is refused with the reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.ir import documents
from penstock.ir.documents import Unreadable, is_inside, read_json, read_text, read_yaml

BOMB = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{after}: &{after} [{','.join([f'*{before}'] * 10)}]\n" for before, after in zip("abcdefgh", "bcdefghi")
)


def test_a_pipe_without_a_writer_does_not_hold_the_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Unreadable, match="is not a regular file"):
        read_text(tmp_path / "pipe")


@pytest.mark.parametrize("path", ["/dev/zero", "/proc/self", "/nowhere/at/all"])
def test_what_is_no_file_is_refused(path: str) -> None:
    with pytest.raises(Unreadable, match=r"is not a regular file|cannot be read"):
        read_text(path)


def test_a_file_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "large", "wb") as file:
        file.truncate(documents.MOST_BYTES + 1)
    with pytest.raises(Unreadable, match="at most"):
        read_text(tmp_path / "large")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": {"b": 1, "b": 2}}', "names 'b' twice"),
        ("1" * 5000, "is no JSON"),  # Python refuses to read so long a number
    ],
)
def test_json_that_is_none(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "d.json"
    path.write_text(text)
    with pytest.raises(Unreadable, match=said):
        read_json(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "line 1"),
        ("a: 1\na: 2\n", "line 2, column 1: the key 'a' is given twice"),
        ("a: !!python/object/apply:os.system [touch x]", "could not determine a constructor"),
        ("a: &x [*x]", "references"),
        (BOMB, "references"),
        ("a: 2001-13-45", "month"),
        ("[" * 700, "nested too deeply"),
    ],
)
def test_yaml_that_is_none(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "d.yaml"
    path.write_text(text)
    with pytest.raises(Unreadable, match=said):
        read_yaml(path)


def test_plain_documents_are_read(tmp_path: Path) -> None:
    path = tmp_path / "d"
    path.write_text('{"a": [1, 2.5, null, "ü"]}')
    assert read_json(path) == read_yaml(path) == {"a": [1, 2.5, None, "ü"]}
    path.write_text("a: &x [1, 2]\nb: *x\n")
    assert read_yaml(path) == {"a": [1, 2], "b": [1, 2]}


@pytest.mark.parametrize(
    ("name", "inside"),
    [("a.safetensors", True), ("a/b", True), ("..", False), ("a/../../b", False), ("/a", False), ("", False)],
)
def test_a_name_stays_in_its_folder(name: str, inside: bool) -> None:
    assert is_inside(name) is inside
