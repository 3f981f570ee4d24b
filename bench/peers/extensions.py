"""The parts that DeepSpeed compiles on the machine that it runs on: its AdamW, and the reads and writes of its files.
Needs torch; the other Python has no Penstock."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

FOLDER = "TORCH_EXTENSIONS_DIR"  # where torch builds them, and finds them built
BUILDERS = ("CPUAdamBuilder", "AsyncIOBuilder")
LINKED = ("libcuda", "libcudart")  # with these


def build(builder: str) -> tuple[float, str]:
    """Build and load one in a process of its own. Returns the seconds, and the end of its complaint if it failed."""
    begin_s = time.perf_counter()
    code = f"from deepspeed.ops.op_builder import {builder} as builder; builder().load(verbose=False)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return time.perf_counter() - begin_s, " | ".join(
        lines[-3:]
    ) or f"exit code {done.returncode}" if done.returncode else ""


def ready_to_build() -> None:
    """Let compilers make code for this GPU alone, as DeepSpeed cannot read every list of architectures (`9.0a`), and
    linkers find CUDA's libraries that torch has loaded: its wheels, and drivers, have no names for linkers."""
    import torch

    torch.cuda.init()
    os.environ["TORCH_CUDA_ARCH_LIST"] = ".".join(map(str, torch.cuda.get_device_capability()))
    folder = Path(os.environ[FOLDER]) / "linked"
    folder.mkdir(parents=True, exist_ok=True)
    maps = Path("/proc/self/maps").read_text()
    for name in LINKED:
        found = re.search(rf"/\S*/{name}\.so\S*", maps)
        if found is not None:
            link = folder / f"{name}.so"
            link.unlink(missing_ok=True)
            link.symlink_to(found[0])
    paths = [str(folder), *filter(None, [os.environ.get("LIBRARY_PATH")])]
    os.environ["LIBRARY_PATH"] = os.pathsep.join(paths)
