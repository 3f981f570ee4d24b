"""A case of `bench/search_time.py` in a process of its own: its row, CPU seconds and memory."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any


def searched(case: str, folder: Path) -> tuple[dict[str, Any], float]:
    """The row, which goes into `folder`, and the peak in GB of the largest process that this one has waited for."""
    code = (
        f"import pathlib, sys; sys.argv = ['search_time', {case!r}]; from penstock.bench.peers import rows; "
        f"rows.RESULTS = pathlib.Path({str(folder)!r}); from penstock.bench.search_time import main; main()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return json.loads((folder / "search_time.jsonl").read_text()), used.ru_maxrss / 1e6
