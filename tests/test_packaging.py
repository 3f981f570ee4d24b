"""What is on disk is what gets installed: setup.cfg lists every package and every data file, one by one."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("papers", "cli", "compiler", "passes", "codegen", "runtime", "ir")


def settings() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def folders_with_code() -> set[Path]:
    files = [file for room in ROOMS for file in (ROOT / room).rglob("*.py")]
    return {ROOT, *(file.parent for file in files)}


def test_every_folder_with_code_is_a_listed_package() -> None:
    listed = set(settings()["options"]["packages"].split())
    present = {".".join(("penstock", *folder.relative_to(ROOT).parts)) for folder in folders_with_code()}
    assert listed == present
    assert all((folder / "__init__.py").exists() for folder in folders_with_code())


def test_every_data_file_is_packaged() -> None:
    patterns = settings()["options.package_data"]
    packaged = {
        file
        for package, globs in patterns.items()
        for pattern in globs.split()
        for file in ROOT.joinpath(*package.split(".")[1:]).glob(pattern)
    }
    endings = ("yaml", "json", "txt")
    present = {file for room in ROOMS for ending in endings for file in (ROOT / room).rglob(f"*.{ending}")}
    assert packaged == present | {ROOT / "py.typed"}


@pytest.mark.slow
def test_the_wheel_holds_the_rooms_and_their_data(tmp_path: Path) -> None:
    # Built from a copy: setuptools would pack what an earlier build left in the repository's own build folder.
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "out", "*.egg-info", "__pycache__")
    copy = shutil.copytree(ROOT, tmp_path / "copy", ignore=unwanted)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(tmp_path), str(copy)]
    subprocess.run(build, check=True, timeout=240)
    (wheel,) = tmp_path.glob("penstock-*.whl")
    names = {Path(name) for name in zipfile.ZipFile(wheel).namelist() if name.startswith("penstock/")}
    source = [ROOT / name for name in ("__init__.py", "errors.py", "py.typed")]
    source += [file for room in ROOMS for file in (ROOT / room).rglob("*.py")]
    assert names == {"penstock" / file.relative_to(ROOT) for file in source}
