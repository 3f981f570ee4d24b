"""libaio with its header for a machine without a network: DeepSpeed builds what reads and writes its files with it.
Debian's packages, unpacked into a folder without being installed. Standard library only."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

PACKAGES = ("libaio-dev", "libaio1"), ("libaio-dev", "libaio1t64")  # older and newer releases
HEADER = Path("/usr/include/libaio.h")
# Where compilers, linkers and programs look, and the folder there within a package.
VARIABLES = {"CPATH": "usr/include", "LIBRARY_PATH": "usr/lib/*", "LD_LIBRARY_PATH": "usr/lib/*"}


def pack(folder: Path) -> str:
    """Fetch the packages by apt-get, if this machine has it. Returns a sentence about what is there."""
    if shutil.which("apt-get") is None:
        return "libaio is left out: there is no apt-get here"
    for names in PACKAGES:
        done = subprocess.run(["apt-get", "download", *names], cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return f"{' and '.join(names)} are there"
    return f"libaio is left out: {done.stderr.strip().splitlines()[-1]}"


def unpack(folder: Path, site: Path) -> list[str]:
    """Unpack into `site` if this machine lacks the header, and let compilers and children find it. Returns names."""
    found = sorted(folder.glob("libaio*.deb"))
    if HEADER.exists() or not found or shutil.which("dpkg-deb") is None:
        return []
    for package in found:
        subprocess.run(["dpkg-deb", "-x", str(package), str(site)], check=True)
    for variable, inside in VARIABLES.items():
        own = [str(path) for path in site.glob(inside)]
        os.environ[variable] = os.pathsep.join([*own, *filter(None, [os.environ.get(variable)])])
    return [package.name.split("_")[0] for package in found]
