"""Processes share the tests, of which each is in one part."""

from __future__ import annotations

from pathlib import Path

from penstock.tests.collection import ALIKE, is_in_part, share_of

ROOT = Path(__file__).resolve().parents[1]


def test_folders_of_alike_tests_are_one_share_and_other_files_are_shares_of_their_own() -> None:
    assert all((ROOT / path).exists() for path in ALIKE)
    files = ["tests/passes/test_orders.py", "tests/passes/memory/test_insert_fetch.py", "tests/graph/test_dataflow.py"]
    assert all((ROOT / file).is_file() for file in files)
    assert {share_of(file) for file in files} == {"graphs"} != {share_of("tests/compiler/job/test_job.py")}
    assert share_of("tests/compiler/test_api.py") == "tests/compiler/test_api.py"
    assert share_of("tests/test_words.py") == share_of("tests/graph/operators/test_knowledge.py") == "sources"


def test_each_test_is_in_one_part() -> None:
    tests = [f"tests/test_collection.py::test_something[{number}]" for number in range(30)]
    parts = [[test for test in tests if is_in_part(test, f"{part}/3")] for part in (1, 2, 3)]
    assert all(parts) and sorted([*parts[0], *parts[1], *parts[2]]) == sorted(tests)
    assert all(is_in_part(test, "1/1") for test in tests)
