"""Everything that Penstock promises on one CUDA GPU, measured: one command, at most ten minutes, one JSON row a figure.

Each row has the figure, its target, what was measured and whether that is ok (null: no target), the GPU, the version
of torch and the command. Rows are printed, and appended to bench/results/gpu-DATE.jsonl as they come. Every section
runs in a process of its own, so that a crash or a hang of one costs no other.

Nothing need be installed: from a clone of any name this works with Python 3.10+ and, beside PyTorch 2.13+ (which brings
networkx, sympy and typing-extensions), the packages numpy, psutil, pyyaml, safetensors, pydantic and what pydantic
needs: pydantic-core, annotated-types, typing-inspection. Not needed: transformers, rich, typer, nvidia-ml-py. Packages
that the machine lacks may lie in a folder that PYTHONPATH names (pip install --target FOLDER --no-index *.whl).

Run: python bench/gpu.py                        all sections on the first GPU
     python bench/gpu.py --section parity       one of them, in this process
     python bench/gpu.py --section reservoir    models in DRAM and on SSD, with all the time for itself: behind the
                                                other sections it has what they leave, and skips what takes longer
     python bench/gpu.py --device cpu --small   the benchmark's own code, on a machine without a GPU
The tests for a GPU: pytest -m gpu
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOTAL_S = 570.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections; returns exit status 1 if a figure misses its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes that take a CPU seconds")
    parser.add_argument("--section", action="append", help="run this one here, in this process; may be repeated")
    parser.add_argument("--out", type=Path, help="file to append the rows to")
    parser.add_argument("--scratch", type=Path, help="folder that the sections of one run share")
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help="what a long section may take")
    args = parser.parse_args(arguments)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch needs this to be deterministic
    make_importable()
    day = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    out = args.out or ROOT / "bench" / "results" / f"gpu-{day}.jsonl"
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        scratch = args.scratch or Path(folder)
        rows = run_here(args, scratch) if args.section else run_all(args, scratch)
        misses = 0
        for row in rows:
            text = json.dumps(row)
            print(text, flush=True)
            if args.scratch is None:  # otherwise the process that started this one writes the rows
                out.parent.mkdir(exist_ok=True)
                with open(out, "a") as file:
                    file.write(text + "\n")
            misses += row["ok"] is False
    return 1 if misses else 0


def make_importable() -> None:
    """Let this process and its children import the package `penstock`, whatever the folder of the clone is called."""
    if importlib.util.find_spec("penstock") is None:
        link = Path(tempfile.mkdtemp(prefix="bench-")) / "penstock"
        link.symlink_to(ROOT, target_is_directory=True)
        sys.path.insert(0, str(link.parent))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(link.parent), os.environ.get("PYTHONPATH")]))


def run_here(args: argparse.Namespace, scratch: Path) -> Iterator[dict[str, Any]]:
    """Run the named sections, one after another. An error that a section raises becomes a row."""
    from penstock.bench.peers import rows as bench_rows
    from penstock.bench.peers.gpu_sections import SECTIONS, Setup

    setup = Setup(args.device, args.small, scratch, args.seconds)
    options = [f"--device {args.device}" if args.device != "cuda" else "", "--small" if args.small else ""]
    for name in args.section:
        command = " ".join(["python bench/gpu.py", *filter(None, options), "--section", name])
        origin = {**bench_rows.provenance(), "command": command, **device(args.device)}
        section, _ = SECTIONS[name]
        begin_s = time.perf_counter()
        try:
            for row in section(setup):
                yield bench_rows.rounded({"bench": "gpu", "section": name, **row, **origin})
        except Exception as error:
            traceback.print_exc()
            yield {"bench": "gpu", "section": name, **failed(f"{type(error).__name__}: {error}"), **origin}
        took = {"figure": "seconds", "measured": round(time.perf_counter() - begin_s, 1), "target": None, "ok": None}
        yield {"bench": "gpu", "section": name, **took, **origin}


def run_all(args: argparse.Namespace, scratch: Path) -> Iterator[dict[str, Any]]:
    """Run every section in a child process, limited to the section's time and to what is left of the total."""
    from penstock.bench.peers.gpu_sections import SECTIONS

    end_s = time.monotonic() + TOTAL_S
    for name, (_, limit_s) in SECTIONS.items():
        left_s = min(limit_s, end_s - time.monotonic())
        command = [sys.executable, __file__, "--device", args.device, "--section", name, "--scratch", str(scratch)]
        command += ["--seconds", f"{left_s:.0f}", *(["--small"] if args.small else [])]
        yield from run_child(command, name, left_s)


def run_child(command: Sequence[str], name: str, limit_s: float) -> Iterator[dict[str, Any]]:
    """The rows of one child process, also those that it printed before it failed or took too long."""
    if limit_s < 2:
        yield {"bench": "gpu", "section": name, **failed("no time was left for it")}
        return
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(command, stdout=output, text=True)
        try:
            status, reason = child.wait(limit_s), ""
        except subprocess.TimeoutExpired:
            status, reason = 1, f"took more than {limit_s:.0f} s"
        finally:
            child.kill()
            child.wait()
        output.seek(0)
        found = [json.loads(line) for line in output.read().splitlines() if line.startswith("{") and line.endswith("}")]
    yield from found
    if reason or (status != 0 and not any(row["ok"] is False for row in found)):
        yield {"bench": "gpu", "section": name, **failed(reason or f"ended with exit code {status}")}


def failed(reason: str) -> dict[str, Any]:
    return {"figure": "the section runs", "measured": reason, "target": "no error", "ok": False}


def device(kind: str) -> dict[str, Any]:
    import torch

    name = torch.cuda.get_device_name() if kind == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda}


if __name__ == "__main__":
    sys.exit(main())
