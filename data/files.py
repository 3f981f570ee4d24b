"""Reads records out of files, one after another: .txt, .md, .jsonl, .json, .csv, .tsv, .parquet, .arrow, and folders.

A folder that `datasets` has saved is read with that library; of any other folder all files are read by name.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..ir.errors import PlanError
from ..runtime.quantised.libraries import why_missing

SPLITS = "dataset_dict.json"
SAVED = ("state.json", SPLITS)  # what `save_to_disk` leaves
PAGE = "README.md"
PIECE = 1 << 22
HALF = re.compile("[\ud800-\udfff]")  # of a character; no tokenizer takes it
UTF8 = "utf-8-sig"  # editors on Windows begin a file with a mark
LONGEST = 1 << 30  # characters of a value in csv, where Python's own limit is 128 thousand


@dataclass(frozen=True)
class Record:
    """One object of a file. `where` names it for a message."""

    where: str
    values: dict[str, Any]

    @property
    def folder(self) -> Path:
        """The folder of its file, which paths in it are relative to."""
        return Path(self.where.rpartition(", ")[0] or self.where).parent


def read_records(paths: Iterable[Path], split: str = "train") -> Iterator[Record]:
    """All records, in order. Raises `PlanError` naming the file, and the line where there is one, at fault."""
    for path in paths:
        if not path.exists():
            raise PlanError(f"{path}: cannot be read: there is no such file or folder{_nearest(path)}")
        if path.is_dir() and any((path / name).is_file() for name in SAVED):
            yield from _read_saved(path, split)
        else:
            for file in files_of(path):
                yield from READERS[file.suffix](file)


def files_of(path: Path) -> list[Path]:
    """The data files of a path: itself, or all of a folder, but for hidden ones, and the page about the others that the
    hub has. Raises `PlanError` where there is none."""
    kinds = ", ".join(READERS)
    if not path.is_dir():
        if path.suffix not in READERS:
            raise PlanError(f"{path}: a data file ends in one of {kinds}")
        return [path]
    found = sorted(file for file in path.rglob("*") if file.suffix in READERS and file.is_file())
    found = [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if not found:
        raise PlanError(f"{path}: a folder with no data file in it; they end in {kinds}")
    return [file for file in found if file.name != PAGE] or found


def hash_of(paths: Iterable[Path]) -> str:
    """A hash of all bytes that are read."""
    found = hashlib.sha256()
    for path in paths:
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        for file in files:
            found.update(file.name.encode())
            with open(file, "rb") as opened:
                while piece := opened.read(PIECE):
                    found.update(piece)
    return found.hexdigest()


def _nearest(path: Path) -> str:
    there = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, there, 1)
    return f"; the nearest is {path.parent / near[0]}" if near else ""


def _text(path: Path) -> Iterator[Record]:
    text = _read(path)
    if text.strip():
        yield Record(str(path), {"text": text})


def _lines(path: Path) -> Iterator[Record]:
    try:
        with open(path, encoding=UTF8) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _record(f"{path}, line {number}", line)
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def _record(where: str, line: str) -> Record:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise PlanError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise PlanError(f"{where}: found {line[:60]!r}, allowed: an object with a key for each column")
    if "\\ud" in line.lower() and HALF.search(json.dumps(row, ensure_ascii=False)):
        raise PlanError(f"{where}: holds one half of a character that is written in two, such as \\ud83d")
    return Record(where, row)


def _json(path: Path) -> Iterator[Record]:
    try:
        rows = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise PlanError(f"{path}: not JSON: {error}; one object a line is for files that end in .jsonl") from error
    if isinstance(rows, dict):
        rows = rows.get("data", rows)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise PlanError(f'{path}: found no list of objects, nor one under "data"')
    for number, row in enumerate(rows, start=1):
        yield Record(f"{path}, row {number}", row)


def _csv(path: Path) -> Iterator[Record]:
    """The first row has the names of the columns; all values are texts."""
    csv.field_size_limit(LONGEST)
    try:
        with open(path, encoding=UTF8, newline="") as file:
            rows = csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
            names = next(rows, [])
            twice = [name for number, name in enumerate(names) if not name.strip() or name in names[:number]]
            if twice:
                raise PlanError(f"{path}: its first row has {twice[0]!r}, allowed: a name of its own for each column")
            for number, row in enumerate(filter(None, rows), start=1):
                if len(row) != len(names):
                    raise PlanError(
                        f"{path}, row {number}: has {len(row)} values, and the first row names {len(names)} columns: "
                        f"{', '.join(names)}"
                    )
                yield Record(f"{path}, row {number}", dict(zip(names, row)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PlanError(f"{path}: cannot be read as UTF-8 text with values between commas: {error}") from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding=UTF8)
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def _parquet(path: Path) -> Iterator[Record]:
    pyarrow = _pyarrow(path)
    import pyarrow.parquet as parquet

    try:
        yield from _read_batches(path, parquet.ParquetFile(path).iter_batches())
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise PlanError(f"{path}: cannot be read as parquet: {error}") from error


def _arrow(path: Path) -> Iterator[Record]:
    pyarrow = _pyarrow(path)
    import pyarrow.ipc as ipc

    try:
        with pyarrow.memory_map(str(path)) as source:
            try:
                opened: Any = ipc.open_stream(source)
                batches = iter(opened)
            except pyarrow.ArrowInvalid:
                source.seek(0)
                opened = ipc.open_file(source)
                batches = (opened.get_batch(i) for i in range(opened.num_record_batches))
            yield from _read_batches(path, batches)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise PlanError(f"{path}: cannot be read as arrow: {error}") from error


def _read_batches(path: Path, batches: Iterable[Any]) -> Iterator[Record]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield Record(f"{path}, row {number}", row)


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise PlanError(f"{path}: pyarrow is {why_missing('pyarrow', error, 'data')}") from error
    return pyarrow


def require_datasets(path: Path) -> Any:
    """The library `datasets`. Raises `PlanError` naming the path that needs it."""
    try:
        import datasets
    except ImportError as error:
        raise PlanError(f"{path}: datasets is {why_missing('datasets', error, 'data')}") from error
    return datasets


def _read_saved(path: Path, split: str) -> Iterator[Record]:
    datasets = require_datasets(path)
    try:
        found: Any = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: cannot be read as a saved data set: {error}") from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise PlanError(f"{path}: has no split {split!r}; there are {', '.join(found)}")
        found = found[split]
    for number, row in enumerate(found, start=1):
        yield Record(f"{path}, row {number}", row)


READERS: dict[str, Callable[[Path], Iterator[Record]]] = {
    ".txt": _text,
    ".md": _text,
    ".jsonl": _lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
