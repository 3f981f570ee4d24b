"""Files that try to run code: none does, by whatever way a written folder is opened."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import pytest

from penstock.ir.errors import VerifyError
from penstock.runtime.device.file import open_directory, read_directory
from penstock.runtime.source.file import parse_file, verify_tree
from penstock.runtime.source.trust import ONLY_VERIFIED, TRUSTED, Trust
from penstock.tests.codegen.generated import Generated, generate, run
from penstock.tests.codegen.tiny import Tiny, tiny_batch
from penstock.tests.runtime.source.grammar import derive_files
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
    ran, _, _ = outcomes(generated, files, tmp_path, TRUSTED)
    parsed = ("a step's body", "a step's return", "a second step", "an evaluate")  # which no trust lets pass
    assert len(ran) > 0.98 * len(files) * (1 - len(parsed) / len(PLACES))


def test_the_written_grammar_is_that_of_the_verifier(generated: Generated) -> None:
    """Files that are derived from docs/security.md alone pass, so that it is the piece for which others are refused."""
    for file, _ in derive_files(generated.text, "", 400, seed=0, hostile=False):
        verify_tree(parse_file(file.text), ONLY_VERIFIED)


@pytest.mark.parametrize(
    ("number", "seed"), [(60, 1), *(pytest.param(500, seed, marks=pytest.mark.slow) for seed in range(2, 6))]
)
def test_no_file_of_another_grammar_runs(generated: Generated, tmp_path: Path, number: int, seed: int) -> None:
    """All of these files run code where they are trusted, and none where it is verified."""
    generated.load(tmp_path)
    files, kinds = zip(*derive_files(generated.text, str(tmp_path / "canary"), number, seed))
    assert len(set(kinds)) > 10
    ran, refused, other = outcomes(generated, files, tmp_path, None)
    assert (ran, other) == ([], [])
    assert len(refused) == number
    ran, refused, other = outcomes(generated, files, tmp_path, TRUSTED)
    assert (refused, other) == ([], [])
    assert len(ran) == number


def test_a_class_calls_its_own_members_alone(generated: Generated) -> None:
    """Members of another class are names that it has no part for."""
    inside = generated.text.replace("        draw_at(self)\n", "        draw_at(self)\n        h = self.{}(h)\n")
    for name in ("embed", "head"):
        with pytest.raises(VerifyError, match=f"`self.{name}` is no member that its class, or one that it builds"):
            verify_tree(parse_file(inside.replace("self.{}", f"self.{name}")), ONLY_VERIFIED)
    verify_tree(parse_file(inside.replace("self.{}", "self.up")), ONLY_VERIFIED)
    outside = generated.text.replace("self.blocks[i](x, mask)", "self.blocks[i].norm(x)")  # of a class that it builds
    verify_tree(parse_file(outside), ONLY_VERIFIED)
