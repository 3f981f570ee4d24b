"""Files of every kind hold the same records; mistakes name file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.data.files import hash_of, read_records
from penstock.ir.errors import PlanError

ROWS = [{"text": "one", "label": 1}, {"text": "two", "label": 2}]


def write(folder: Path, kind: str) -> Path:
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("\n\n".join(json.dumps(row) for row in ROWS))
    elif kind == "json":
        path.write_text(json.dumps({"data": ROWS}))
    elif kind in ("csv", "tsv"):
        mark = "," if kind == "csv" else "\t"
        path.write_text("\n".join([f"text{mark}label", *(f"{row['text']}{mark}{row['label']}" for row in ROWS), ""]))
    elif kind == "parquet":
        datasets().to_parquet(str(path))
    elif kind == "arrow":
        import pyarrow as pa

        table = pa.Table.from_pylist(ROWS)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    elif kind == "saved":
        path = folder / "saved"
        datasets().save_to_disk(str(path))
    elif kind == "folder":
        path = folder / "folder"
        path.mkdir()
        for number, row in enumerate(ROWS):
            (path / f"{number}.jsonl").write_text(json.dumps(row))
    return path


def datasets():  # type: ignore[no-untyped-def]
    from datasets import Dataset

    return Dataset.from_list(ROWS)


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow", "saved", "folder"])
def test_same_records(kind: str, tmp_path: Path) -> None:
    assert [record.values for record in read_records([write(tmp_path, kind)])] == ROWS


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_values_of_csv_are_texts(kind: str, tmp_path: Path) -> None:
    rows = [{name: str(value) for name, value in row.items()} for row in ROWS]
    assert [record.values for record in read_records([write(tmp_path, kind)])] == rows


def test_csv_with_lines_and_commas_in_quotes(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('\ufeffprompt,completion\n"a, ""b""\nc",' + "d" * 200_000 + "\n\n")
    (record,) = read_records([path])
    assert record.values == {"prompt": 'a, "b"\nc', "completion": "d" * 200_000}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n1,2,3\n", "row 2: has 3 values, and the first row names 2 columns: a, b"),
        ("a,a\n1,2\n", "its first row has 'a', allowed: a name of its own"),
        ("a,\n1,2\n", "its first row has '', allowed"),
        ('a,b\n1,"2\n', "cannot be read as UTF-8 text with values between commas"),
    ],
)
def test_mistakes_of_csv(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(PlanError, match=said):
        list(read_records([path]))


def test_pages_and_hidden_files_of_a_folder_are_not_data(tmp_path: Path) -> None:
    """As a data set from the hub has them."""
    folder = write(tmp_path, "folder")
    (folder / "README.md").write_text("# About these rows")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x.json").write_text("{}")
    assert [record.values for record in read_records([folder])] == ROWS
    for file in folder.glob("*.jsonl"):
        file.unlink()
    assert [record.values for record in read_records([folder])] == [{"text": "# About these rows"}]


def test_the_arrow_files_of_datasets_are_streams(tmp_path: Path) -> None:
    (file,) = write(tmp_path, "saved").glob("*.arrow")
    assert [record.values for record in read_records([file])] == ROWS


def test_a_split_by_name(tmp_path: Path) -> None:
    from datasets import DatasetDict

    DatasetDict(train=datasets(), test=datasets().select([1])).save_to_disk(str(tmp_path / "both"))
    assert [record.values for record in read_records([tmp_path / "both"], "test")] == ROWS[1:]
    with pytest.raises(PlanError, match="no split 'dev'; there are train, test"):
        list(read_records([tmp_path / "both"], "dev"))


@pytest.mark.parametrize("kind", ["jsonl", "json", "txt"])
def test_files_from_windows(kind: str, tmp_path: Path) -> None:
    """They begin with a mark and end their lines with two characters."""
    path = tmp_path / f"rows.{kind}"
    text = "one\ntwo" if kind == "txt" else write(tmp_path, kind).read_text()
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    wanted = [{"text": text}] if kind == "txt" else ROWS
    assert [record.values for record in read_records([path])] == wanted


def test_plain_text_is_one_record(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    assert [record.values for record in read_records([tmp_path / "a.txt"])] == [{"text": "some text"}]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.xlsx", "x", r"ends in one of \.txt, \.md, \.jsonl"),
        ("a.jsonl", '{"text": "x"}\nnot json', "line 2: not JSON"),
        ("a.jsonl", '{"text": "\\ud83d\\ude00"}\n{"text": "\\ud83d"}', "line 2: holds one half of a character"),
        ("a.jsonl", "[1]", "line 1: .* an object with a key for each column"),
        ("a.json", '{"text": 1}', "found no list of objects"),
        ("a.json", "{", "not JSON.*one object a line is for files that end in .jsonl"),
        ("a.parquet", "x", "cannot be read as parquet"),
        ("a.arrow", "x", "cannot be read as arrow"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(PlanError, match=said):
        list(read_records([tmp_path / name]))


def test_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_text("{}")
    with pytest.raises(PlanError, match=r"note\.jsonl: cannot be read.*the nearest is .*notes\.jsonl"):
        list(read_records([tmp_path / "note.jsonl"]))
    (tmp_path / "empty").mkdir()
    with pytest.raises(PlanError, match="a folder with no data file in it"):
        list(read_records([tmp_path / "empty"]))


def test_the_hash_is_of_all_bytes(tmp_path: Path) -> None:
    path = write(tmp_path, "folder")
    before = hash_of([path])
    (path / "1.jsonl").write_text(json.dumps({"text": "other"}))
    assert hash_of([path]) != before
