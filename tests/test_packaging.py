"""Everything on disk gets installed: setup.cfg lists every package and every data file, one by one."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from functools import partial
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("papers", "cli", "integrations", "training", "data", "compiler", "passes", "codegen", "graph", "runtime", "ir")


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


DATA = ("*.yaml", "*.json", "*.txt", "*.html", "*.css", "*.js", "LICENSE", "NOTICE")


def test_every_data_file_is_packaged() -> None:
    patterns = settings()["options.package_data"]
    packaged = {
        file
        for package, globs in patterns.items()
        for pattern in globs.split()
        for file in ROOT.joinpath(*package.split(".")[1:]).glob(pattern)
    }
    present = {file for room in ROOMS for name in DATA for file in (ROOT / room).rglob(name)}
    assert packaged == present | {ROOT / "py.typed"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools would pack what an earlier build left in the repository's own build folder."""
    folder = tmp_path_factory.mktemp("wheel")
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "out", "*.egg-info", "__pycache__")
    copy = shutil.copytree(ROOT, folder / "copy", ignore=unwanted)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(folder), str(copy)]
    subprocess.run(build, check=True, timeout=240)
    (found,) = folder.glob("penstock-*.whl")
    return found


@pytest.mark.slow
def test_the_wheel_holds_the_rooms_and_their_data(wheel: Path) -> None:
    names = {Path(name) for name in zipfile.ZipFile(wheel).namelist() if name.startswith("penstock/")}
    source = [ROOT / name for name in ("__init__.py", "errors.py", "py.typed")]
    source += [file for room in ROOMS for name in ("*.py", *DATA) for file in (ROOT / room).rglob(name)]
    assert names == {"penstock" / file.relative_to(ROOT) for file in source}


def test_the_version_is_that_of_the_changelog() -> None:
    versions = re.findall(r"^## (\d+\.\d+\.\d+) \((\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0][0] == penstock.__version__
    assert [date for _, date in versions] == sorted((date for _, date in versions), reverse=True)
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)[1:]
    assert all(len(section.splitlines()) < 60 for section in sections)


def test_the_pages_of_the_project_are_there() -> None:
    assert "bash .ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    report = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text()
    assert all(wanted in report for wanted in ("penstock --version", "penstock hardware", "job.explain()"))
    for page in ("SECURITY.md", "CODE_OF_CONDUCT.md", "ROADMAP.md", "CONTRIBUTING.md"):
        links = re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text())
        assert links and all((ROOT / link).exists() for link in links), page


@pytest.mark.slow
def test_a_wheel_is_refused_on_an_older_python(wheel: Path) -> None:
    assert wheel.name == f"penstock-{penstock.__version__}-py3-none-any.whl"
    metadata = zipfile.ZipFile(wheel).read(f"penstock-{penstock.__version__}.dist-info/METADATA").decode()
    assert "\nRequires-Python: >=3.10\n" in metadata
    older = shutil.which("python3.9")
    if older is None or subprocess.run([older, "-m", "pip", "--version"], capture_output=True).returncode:
        pytest.skip("no Python 3.9 with pip is here to be refused")
    install = [older, "-m", "pip", "install", "--no-deps", "--dry-run", wheel]
    done = subprocess.run(install, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "requires a different Python: 3.9" in done.stderr


STEP = """
import torch, penstock
assert not penstock.__file__.startswith({clone!r}), penstock.__file__
class Loss(torch.nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().mean()
model = Loss(*(torch.nn.Linear(16, 16) for _ in range(4)))
if __name__ == "__main__":
    machine = penstock.Hardware.cpu(num_devices=2, memory="64MB", dram="256MB")
    batch = dict(x=torch.randn(8, 16))
    with penstock.compile(model, machine, example_inputs=batch, strategy="gpipe", micro_batches=2) as job:
        expected = model(**batch).item()
        assert abs(job.step(batch).item() - expected) < 1e-5 * expected
"""


@pytest.mark.slow
@pytest.mark.multi
def test_the_installed_package_answers_and_trains_on_two_devices(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, in a folder outside the clone, with the libraries that are installed here."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=120)
    python = tmp_path / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check", wheel]
    subprocess.run(install, check=True, timeout=120)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")  # reads no .pth of that folder
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = partial(subprocess.run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    shown = run([python.with_name("penstock"), "--help"])
    assert shown.returncode == 0 and all(name in shown.stdout for name in ("plan", "train", "reproduce")), shown.stderr
    (tmp_path / "step.py").write_text(STEP.format(clone=str(ROOT)))
    trained = run([python, "step.py"])
    assert trained.returncode == 0, trained.stderr
