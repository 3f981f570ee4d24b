"""Whether two versions of Penstock plan and print the same: ten models on five machines, with a search of bounded work.

    python bench/same_plans.py OUT            writes plans, device files and simulated steps to the folder OUT
    python bench/same_plans.py OLD NEW        compares two such folders; lines that import are left out

Each case runs in a process of its own. Exit status 1: something differs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MODELS = {  # batch, sequence, strategy
    "gpt2": (8, 256, "auto"),
    "gpt2-xl": (8, 512, "auto"),
    "bert-base": (16, 128, "auto"),
    "t5-base": (8, 128, "auto"),
    "bart-base": (8, 128, "auto"),
    "vit-base": (16, 0, "auto"),
    "opt-1.3b": (8, 256, "mobius"),
    "qwen3-1.7b": (8, 512, "auto"),
    "llama-8b": (8, 512, "fuyou"),
    "mobius-3b": (8, 512, "mobius"),
}
MACHINES = ("rtx4090x1", "rtx4090x2", "mobius-topo2+2", "laptop-16gb", "fuyou-4090")
SEARCH_S = 0.5  # of work, which does not depend on the machine or its load


def write(case: str, out: Path) -> None:
    """Plan one case, and write its files below `out`; a case that is refused leaves its reason."""
    from penstock.cli.options import JobOptions
    from penstock.ir.errors import PenstockError

    model, machine = case.split("@")
    batch, sequence, strategy = MODELS[model]
    options = {"model": model, "hardware": [machine], "batch": batch, "strategy": strategy, "precision": "bf16-true"}
    sizes = {"sequence": sequence} if sequence else {}
    folder = out / case
    folder.mkdir(parents=True)
    try:
        job = JobOptions(**options, **sizes, search_seconds=SEARCH_S).compile()
    except PenstockError as error:
        (folder / "refused.txt").write_text(f"{type(error).__name__}: {error}\n")
        return
    job.write(folder)
    assert job.plan.predicted is not None
    (folder / "step.json").write_text(json.dumps({"step_s": job.plan.predicted.step_s, "hash": job.plan.hash}))


def text_of(file: Path) -> list[str]:
    """The lines of a file that do not import."""
    return [line for line in file.read_text("utf-8").splitlines() if not line.startswith(("import ", "from "))]


def differing(old: Path, new: Path) -> list[str]:
    """Paths below the two folders whose texts differ, or which one of them lacks."""
    files = {file.relative_to(root) for root in (old, new) for file in root.rglob("*") if file.is_file()}
    return [
        name.as_posix()
        for name in sorted(files)
        if not (old / name).exists() or not (new / name).exists() or text_of(old / name) != text_of(new / name)
    ]


def main() -> int:
    first, *rest = sys.argv[1:]
    if rest and "@" in rest[0]:
        write(rest[0], Path(first))
        return 0
    if rest:
        old, new = Path(first), Path(rest[0])
        names, cases = differing(old, new), len(list(old.iterdir()))
        print(f"{cases} cases, {sum(1 for file in old.rglob('*') if file.is_file())} files, {len(names)} differ")
        print("\n".join(names))
        return 1 if names else 0
    for case in [f"{model}@{machine}" for model in MODELS for machine in MACHINES]:
        if subprocess.run([sys.executable, __file__, first, case], check=False).returncode:
            print(f"{case}: failed", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
