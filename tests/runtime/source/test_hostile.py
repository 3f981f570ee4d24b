"""Files that try to run code: none does, by whatever way a written folder is opened."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import pytest

from penstock.ir.errors import VerifyError
from penstock.runtime.device.file import open_directory, read_directory
from penstock.runtime.source.trust import OWN, Trust
from penstock.tests.codegen.generated import Generated, generate, run
from penstock.tests.codegen.tiny import Tiny, tiny_batch
from penstock.tests.runtime.source.hostile import PLACES, Hostile, payloads, tricks


@pytest.fixture(scope="module")
def generated() -> Generated:
    return generate(Tiny(), tiny_batch())


def try_file(generated: Generated, hostile: Hostile, folder: Path, trust: Trust | None) -> Exception | None:
    """The error of opening the file and running its stage and its step."""
    (folder / "device0.py").write_text(hostile.text)
    with contextlib.suppress(VerifyError):
        read_directory(folder, generated.interface)
    try:
        (file,) = open_directory(folder, trust=trust)
        with contextlib.suppress(AttributeError):
            file.functions["step"](None, {})
        run(generated, file, tiny_batch(), training=True)
    except Exception as error:
        return error
    return None


def outcomes(
    generated: Generated, files: Iterable[Hostile], folder: Path, trust: Trust | None
) -> tuple[list[str], list[str], list[str]]:
    """The names of the files that ran code, that were refused with the place, and that raised something else."""
    ran, refused, other = [], [], []
    canary = folder / "canary"
    for hostile in files:
        canary.unlink(missing_ok=True)
        error = try_file(generated, hostile, folder, trust)
        if canary.exists():
            ran.append(hostile.name)
        elif isinstance(error, VerifyError) and str(folder / "device0.py") in str(error):
            refused.append(hostile.name)
        else:
            other.append(f"{hostile.name}: {error!r}")
    return ran, refused, other


def test_no_trick_runs_code(generated: Generated, tmp_path: Path) -> None:
    generated.load(tmp_path)
    files = list(tricks(generated.text, str(tmp_path / "canary")))
    ran, refused, other = outcomes(generated, files, tmp_path, None)
    assert (ran, other) == ([], [])
    assert len(refused) == len(files) > 50


@pytest.mark.slow
def test_no_payload_runs_at_any_place(generated: Generated, tmp_path: Path) -> None:
    """Nearly all of these files do run code where they are trusted: it is the verifying that holds them."""
    generated.load(tmp_path)
    files = list(payloads(generated.text, str(tmp_path / "canary")))
    ran, refused, other = outcomes(generated, files, tmp_path, None)
    assert (ran, other) == ([], [])
    assert len(refused) == len(files) > 500
    ran, _, _ = outcomes(generated, files, tmp_path, OWN)
    parsed = ("a step's body", "a step's return", "a second step", "an evaluate")  # which no trust lets pass
    assert len(ran) > 0.98 * len(files) * (1 - len(parsed) / len(PLACES))
