"""A machine in one line of JSON: GPU, driver, versions, missing packages and tools.

Run as `python -m penstock.bench.gpu.machine cuda`. A process of its own; needs torch and the standard library.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

NEEDED = (
    "numpy", "networkx", "sympy", "pydantic", "pydantic_core", "annotated_types", "typing_inspection", "yaml", "psutil",
    "rich", "safetensors", "typer", "mip", "highspy", "pymetis", "pynvml", "triton", "pytest", "pytest_timeout",
    "expecttest", "hypothesis", "transformers", "deepspeed", "hjson", "msgpack", "cpuinfo", "einops", "ninja",
)  # fmt: skip
NO_DEVICE = 4  # exit status where there is no device of the kind asked for
TOOLS = ("g++", "ninja", "nvcc", "nvidia-smi", "git", "pip")


def is_emulated() -> bool:
    """Whether the CUDA runtime in this process is that of tests/fakecuda. To be asked after torch is imported."""
    maps = Path("/proc/self/maps").read_text()
    found = re.search(r"(\S*/libcudart\.so\.\d+)", maps)
    return found is not None and hasattr(ctypes.CDLL(found[1]), "fakecuda_summary")


def driver_version() -> str:
    """The kernel driver's own words, else nvidia-smi's; "unknown" without either."""
    version = Path("/proc/driver/nvidia/version")
    found = re.search(r"Module.*?(\d+\.\d[\d.]*)", version.read_text()) if version.is_file() else None
    if found:
        return found[1]
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split("\n")
    return lines[0].strip() or "unknown"


def describe_kernel(kind: str) -> dict[str, Any]:
    """The facts of a machine that has such a device."""
    import torch

    emulated = kind == "cuda" and is_emulated()
    name = torch.cuda.get_device_name() if kind == "cuda" else "cpu"
    ram_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts: dict[str, Any] = {
        "device": f"emulated {name}" if emulated else name, "driver": driver_version() if kind == "cuda" else "none",
        "torch": torch.__version__, "cuda": torch.version.cuda, "emulated": emulated,
        "python": platform.python_version(), "cores": len(os.sched_getaffinity(0)),
        "ram_gib": round(ram_bytes / 2**30, 1), "kernel": platform.release(),
        "packages_missing": [name for name in NEEDED if importlib.util.find_spec(name) is None],
        "tools_missing": [name for name in TOOLS if shutil.which(name) is None],
        "locked_memory_limit": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "shm_gib": round(shutil.disk_usage("/dev/shm").total / 2**30, 1) if Path("/dev/shm").is_dir() else 0,
    }  # fmt: skip
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "memory_gib": round(properties.total_memory / 2**30, 2),
            "capability": list(torch.cuda.get_device_capability()), "num_gpus": torch.cuda.device_count(),
        }  # fmt: skip
    return facts


def has(kind: str) -> bool:
    import torch

    return kind == "cpu" or torch.cuda.is_available()


if __name__ == "__main__":
    if not has(sys.argv[1]):
        sys.exit(NO_DEVICE)
    print(json.dumps(describe_kernel(sys.argv[1])))
