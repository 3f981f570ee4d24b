"""Several processes share the tests by files, and by folders of tests that begin with the same work."""

from __future__ import annotations

from pathlib import Path

from penstock.tests.collection import ALIKE, share_of

ROOT = Path(__file__).resolve().parents[1]


def test_folders_of_alike_tests_are_one_share_and_other_files_are_shares_of_their_own() -> None:
    assert all((ROOT / path).exists() for path in ALIKE)
    files = ["tests/passes/test_orders.py", "tests/passes/memory/test_insert_fetch.py", "tests/graph/test_dataflow.py"]
    assert all((ROOT / file).is_file() for file in files)
    assert {share_of(file) for file in files} == {"graphs"} != {share_of("tests/compiler/job/test_job.py")}
    assert share_of("tests/compiler/test_api.py") == "tests/compiler/test_api.py"
    assert share_of("tests/test_words.py") == share_of("tests/graph/operators/test_knowledge.py") == "sources"
