"""Lets the CUDA build of PyTorch in a virtual environment run on CPUs alone, without the 5 GB of libraries it requires.

    without_gpu.py VENV

Beside torch's own libraries there are stubs, which say that there is no GPU, and its METADATA no longer requires the
libraries, so that pip does not add them. Another torch, such as the emulator's, does not find the stubs there. Needs
gcc, g++ and binutils. A build for CPUs stays as it is.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from libraries import DRIVER, NVML, link, wanted

REQUIRES_CUDA = re.compile(r'^Requires-Dist: .*platform_system == "Linux".*\n', re.MULTILINE)


def take_out_cuda(packages: Path) -> None:
    """Replace CUDA's libraries for the torch in a folder of packages."""
    libraries = packages / "torch/lib"
    if not (libraries / "libtorch_cuda.so").exists():
        return
    with tempfile.TemporaryDirectory() as work:
        for library, symbols in wanted(libraries).items():
            if library not in (DRIVER, NVML):  # those are opened by name, where there is a GPU
                link(library, symbols, [], set(), Path(work))
                (libraries / library).write_bytes((Path(work) / library).read_bytes())
    (metadata,) = packages.glob("torch-*.dist-info/METADATA")
    metadata.write_text(REQUIRES_CUDA.sub("", metadata.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    (found,) = Path(sys.argv[1]).glob("lib/python*/site-packages")
    take_out_cuda(found)
