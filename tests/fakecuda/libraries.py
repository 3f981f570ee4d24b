"""Links the libraries that torch's CUDA build asks for: the emulator's own symbols, and a stub for every other one.

    libraries.py TORCH_LIB OUT LIBRARY=OBJECT,OBJECT ...

A stub says its name once (FAKECUDA_STUBS=1) and returns success (0). Symbols get the versions that torch wants.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

USERS = [
    "libtorch_cuda.so", "libc10_cuda.so", "libtorch_python.so", "libtorch_cuda_linalg.so", "libtorch_nvshmem.so",
    "libcaffe2_nvrtc.so", "libtorch_global_deps.so", "libtorch_cpu.so", "libtorch.so", "libc10.so",
]  # fmt: skip
RUNTIME, DRIVER, NVML = "libcudart.so.13", "libcuda.so.1", "libnvidia-ml.so.1"
# Where symbols without a version belong, by their beginning; the first that fits counts.
PREFIXES = {
    "nccl": "libnccl.so.2", "curand": "libcurand.so.10", "nvshmem": "libnvshmem_host.so.3", "cuFile": "libcufile.so.0",
    "cusparseLt": "libcusparseLt.so.0", "nvrtc": "libnvrtc.so.13", "cuda": RUNTIME, "cufft": "libcufft.so.12",
    "cudnn": "libcudnn.so.9", "cusolver": "libcusolver.so.12", "cusparse": "libcusparse.so.12",
    "cublasLt": "libcublasLt.so.13", "cublas": "libcublas.so.13", "cupti": "libcupti.so.13",
}  # fmt: skip
NEEDED_EMPTY = ("libcupti.so.13", "libcurand.so.10", DRIVER)
TEXT = re.compile(r"(nvmlErrorString|ErrorString|ErrorName|StatusString|GetLastError|StatusName)$")
FIRST_IS_HANDLE = "*(void**)a = calloc(1, 4096); return 0;"
SECOND_IS_HANDLE = "*(void**)b = calloc(1, 4096); return 0;"
CURRENT_MEMORY = (
    "size_t* m = b; long cudaMemGetInfo(size_t*, size_t*); cudaMemGetInfo(m + 1, m); m[2] = m[0] - m[1]; return 0;"
)
# Functions with answers that callers rely on. The rest of NVML says "not supported".
ANSWERS = {
    "cudaGetDeviceCount": "*(int*)a = 0; return 100;",  # there is none, where the emulator does not answer itself
    "cudnnGetVersion": "return 92600;", "cudnnGetCudartVersion": "return 13000;",
    "cudnnGetProperty": "*(int*)b = a == 0 ? 9 : a == (void*)1 ? 26 : 0; return 0;",  # as cudnnGetVersion, in parts
    "cudnnGetMaxDeviceVersion": "return 13000;", "cudnnCreate": FIRST_IS_HANDLE,
    "nvrtcVersion": "*(int*)a = 13; *(int*)b = 0; return 0;",
    "cublasGetVersion_v2": "*(int*)b = 130000; return 0;", "cublasLtGetVersion": "return 130000;",
    "cublasCreate_v2": FIRST_IS_HANDLE, "cublasLtCreate": FIRST_IS_HANDLE, "cusparseCreate": FIRST_IS_HANDLE,
    "cusolverDnCreate": FIRST_IS_HANDLE,
    "nvmlInit_v2": "return 0;", "nvmlInitWithFlags": "return 0;", "nvmlShutdown": "return 0;",
    "nvmlDeviceGetGpuFabricInfoV": "return 0;", "nvmlDeviceGetHandleByIndex_v2": SECOND_IS_HANDLE,
    "nvmlDeviceGetHandleByPciBusId_v2": SECOND_IS_HANDLE,
    "nvmlDeviceGetMemoryInfo": CURRENT_MEMORY,  # DeepSpeed asks about its own device
    "nvmlDeviceGetComputeRunningProcesses": "*(unsigned*)b = 0; return 0;",  # torch asks where memory runs out
}  # fmt: skip
NVML_NAMES = [
    "nvmlShutdown", "nvmlInitWithFlags", "nvmlErrorString", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetNvLinkState", "nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetMemoryInfo",
]  # fmt: skip
STUBS_BEGIN = """\
#include <stdio.h>
#include <stdlib.h>
static void tell(int* once, const char* name) {
  if (*once) return;
  *once = 1;
  if (getenv("FAKECUDA_STUBS")) fprintf(stderr, "[fakecuda] stub %s\\n", name);
}
"""


def tool(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def library_of(name: str, version: str) -> str | None:
    """The library of CUDA that has an undefined symbol of torch's; None for other libraries' symbols."""
    if version.startswith("lib"):
        return version
    if version.startswith(("GLIBC", "CXXABI", "GCC", "GOMP", "OMP")) or name.startswith("_Z"):
        return None
    found = next((library for prefix, library in PREFIXES.items() if name.startswith(prefix)), None)
    return DRIVER if found is None and re.match(r"cu[A-Z]", name) else found


def wanted(torch_lib: Path) -> dict[str, dict[str, str]]:
    """Per library what torch needs of it: symbol to version, which is empty where torch asks for none."""
    libraries: dict[str, dict[str, str]] = defaultdict(dict, {name: {} for name in NEEDED_EMPTY})
    for user in USERS:
        for line in tool("readelf", "-Ws", "--dyn-syms", torch_lib / user).splitlines():
            parts = line.split()
            if len(parts) >= 8 and parts[6] == "UND":
                name, _, version = parts[7].partition("@")
                library = library_of(name, version)
                if library is not None:
                    libraries[library].setdefault(name, version if version.startswith("lib") else "")
    looked_up = (torch_lib.parent / "include/c10/cuda/driver_api.h").read_text()  # by name, when it runs
    libraries[DRIVER] |= dict.fromkeys(re.findall(r"_\((cu\w+), \d+\)", looked_up), "")
    libraries[NVML] |= dict.fromkeys([*re.findall(r"\b(nvml[A-Z]\w+)", looked_up), *NVML_NAMES], "")
    return libraries


def stub(name: str) -> str:
    otherwise = "return 3;" if name.startswith("nvml") else "return 0;"
    body = 'return (long)"fakecuda";' if TEXT.search(name) else ANSWERS.get(name, otherwise)
    return f'long {name}(void* a, void* b, void* c) {{ static int once; tell(&once, "{name}"); {body} }}\n'


def link(library: str, symbols: dict[str, str], objects: list[str], has: set[str], out: Path, *more: str) -> None:
    source, versions = out / f"{library}.c", out / f"{library}.map"
    source.write_text(STUBS_BEGIN + "".join(stub(name) for name in sorted(set(symbols) - has)))
    versions.write_text("".join(f"{v} {{ global: *; }};\n" for v in sorted({*symbols.values()} - {""} or {library})))
    stubs = out / f"{library}.o"
    tool("gcc", "-fPIC", "-w", "-c", source, "-o", stubs)
    named = [f"-Wl,-soname,{library}"]
    if any(symbols.values()):
        named.append(f"-Wl,--version-script,{versions}")
    tool("g++", "-shared", "-o", out / library, *objects, stubs, *named, *more, "-ldl", "-lpthread", "-lrt")


def defined(objects: list[str]) -> set[str]:
    rows = (line.split() for line in tool("nm", "--defined-only", *objects).splitlines())
    return {row[-1] for row in rows if len(row) == 3 and row[1] in "TW"}


def main(torch_lib: str, out: str, *own: str) -> None:
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    objects = {library: names.split(",") for library, _, names in (each.partition("=") for each in own)}
    libraries, runtime = wanted(Path(torch_lib)), folder / RUNTIME
    link(RUNTIME, libraries.pop(RUNTIME), objects[RUNTIME], defined(objects[RUNTIME]), folder)
    for library, symbols in sorted(libraries.items()):
        # The driver's calls are defined in the runtime's library, which the driver's therefore needs; NVML's asks it.
        mine = objects.get(library, [])
        has = defined(objects[RUNTIME]) if library == DRIVER else defined(mine) if mine else set()
        needs = ["-Wl,--no-as-needed", str(runtime)] if mine or library in (DRIVER, NVML) else []
        link(library, symbols, mine, has, folder, *needs)
    print(f"{len(libraries) + 1} libraries in {folder}")


if __name__ == "__main__":
    main(*sys.argv[1:])
