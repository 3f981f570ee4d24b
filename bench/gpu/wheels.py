"""Packages for a machine without a network: wheels gathered here for its Python, unpacked there. Needs the standard
library, and `packaging` where wheels are unpacked: one of them holds it."""

from __future__ import annotations

import configparser
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Of the extra `test`, what the tests for a GPU import; what DeepSpeed needs, which itself comes as source code.
OF_TESTS = ("expecttest", "hypothesis", "pytest", "pytest-timeout", "transformers")
OF_TOOLS = ("packaging",)
OF_PEERS = ("einops", "hjson", "msgpack", "ninja", "py-cpuinfo", "tqdm")
BUILT = ("deepspeed",)
LIMIT_BYTES = 48 << 20
ALIASES = ("manylinux2014", "manylinux2010", "manylinux1")  # of glibc 2.17, 2.12, 2.5


def name_of(requirement: str) -> str:
    """The name in a requirement or in a wheel's file name, as package indexes compare names."""
    found = re.match(r"[A-Za-z0-9_.]+(-[A-Za-z_][A-Za-z0-9_.]*)*", requirement.removesuffix(".whl"))
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def requirements(setup_cfg: Path) -> list[str]:
    """The requirements of the package, its tests for a GPU and the peers, but for torch, which such a machine
    brings."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(setup_cfg)
    extras = parser["options.extras_require"]
    texts = [parser["options"]["install_requires"], extras["gpu"]]
    tests = [line for text in (extras["test"], extras["hf"]) for line in text.split() if name_of_any(line) in OF_TESTS]
    needed = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    return [*(line for line in needed if name_of(line) != "torch"), *tests, *OF_TOOLS, *OF_PEERS]


def name_of_any(line: str) -> str:
    """`name_of`; "" for a line that refers to another extra."""
    return "" if line.startswith("%") else name_of(line)


@dataclass(frozen=True)
class Target:
    """The machine that wheels are for: its Python, its glibc or an older one, its processor."""

    python: str = "3.12"
    glibc: str = "2.35"
    processor: str = "x86_64"

    def for_pip(self) -> list[str]:
        """pip compares platforms as texts, so that each older one is named."""
        newest = int(self.glibc.split(".")[1])
        names = [*(f"manylinux_2_{minor}" for minor in range(newest, 4, -1)), *ALIASES, "linux"]
        platforms = [word for name in names for word in ("--platform", f"{name}_{self.processor}")]
        return ["--implementation", "cp", "--python-version", self.python, *platforms]


def pack(setup_cfg: Path, folder: Path, target: Target, limit_bytes: int = LIMIT_BYTES) -> list[str]:
    """Fill `folder` with wheels for `target` of at most `limit_bytes`, the smallest first. Returns sentences about what
    is there and what is not."""
    said = []
    with tempfile.TemporaryDirectory(prefix="wheels-") as gathered:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", gathered]
        subprocess.run([*command, *target.for_pip(), *requirements(setup_cfg)], check=True)
        for name in BUILT:
            command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", name]
            built = subprocess.run(
                [*command, "--wheel-dir", gathered], env={**os.environ, "DS_BUILD_OPS": "0"},
                capture_output=True, text=True,
            )  # fmt: skip
            if built.returncode:
                said.append(f"no wheel of {name} could be built: {' | '.join(built.stderr.splitlines()[-2:])}")
        return said + keep(sorted(Path(gathered).glob("*.whl")), folder, limit_bytes)


def keep(wheels: Iterable[Path], folder: Path, limit_bytes: int) -> list[str]:
    """Copy wheels into an emptied folder, the smallest first, as long as they fit."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    said, total = [], 0
    for wheel in sorted(wheels, key=lambda path: path.stat().st_size):
        size = wheel.stat().st_size
        if total + size > limit_bytes:
            said.append(f"{wheel.name} of {size / 2**20:.1f} MiB is left out: more than the limit")
            continue
        total += size
        shutil.copy(wheel, folder)
    return [*said, f"{len(list(folder.iterdir()))} wheels of {total / 2**20:.1f} MiB in {folder}"]


def suits(wheel: str, tags: Container[Any]) -> bool:
    """Whether a wheel's file name is for a machine with these tags."""
    from packaging.utils import parse_wheel_filename

    return any(tag in tags for tag in parse_wheel_filename(wheel)[3])


def machine_tags(folder: Path) -> frozenset[Any]:
    """The tags of wheels that this Python can import. `packaging` comes out of its own wheel if it is not installed."""
    carried = [str(wheel) for wheel in folder.glob("packaging-*.whl")]
    if importlib.util.find_spec("packaging") is None:
        sys.path.extend(carried)
    from packaging.tags import sys_tags

    return frozenset(sys_tags())


@dataclass
class Unpacked:
    """The names of the packages that `unpack` put in place, and of the others."""

    installed: list[str] = field(default_factory=list)
    there_already: list[str] = field(default_factory=list)
    unsuited: list[str] = field(default_factory=list)


def unpack(folder: Path, site: Path) -> Unpacked:
    """Unpack into `site` those wheels whose package this Python lacks, and let this process and its children find
    them, after all others. What an earlier call has unpacked stays: what was built from it is newer."""
    done = Unpacked()
    tags = machine_tags(folder) if any(folder.glob("*.whl")) else frozenset()
    for wheel in sorted(folder.glob("*.whl")):
        name = name_of(wheel.name.split("-")[0])
        if is_installed(name):
            done.there_already.append(name)
        elif not suits(wheel.name, tags):
            done.unsuited.append(name)
        else:
            if not (site / f"{'-'.join(wheel.name.split('-')[:2])}.dist-info" / "RECORD").is_file():  # its last file
                _extract(wheel, site)
            done.installed.append(name)
    if done.installed:
        sys.path.append(str(site))
        for variable, own in (("PYTHONPATH", site), ("PATH", site / "bin")):
            os.environ[variable] = os.pathsep.join(filter(None, [os.environ.get(variable), str(own)]))
    return done


def is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _extract(wheel: Path, site: Path) -> None:
    """Install as pip would: the files of NAME.data/purelib and platlib go beside the others, scripts to bin."""
    site.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for data in site.glob("*.data"):
        for part in data.iterdir():
            target = site / "bin" if part.name == "scripts" else site
            shutil.copytree(part, target, dirs_exist_ok=True)
        shutil.rmtree(data)
    for script in (site / "bin").glob("*"):
        script.chmod(0o755)
