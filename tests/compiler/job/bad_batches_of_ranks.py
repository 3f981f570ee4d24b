"""A script for torchrun: all ranks step over bad batches, which leave no trace.

torchrun --nproc-per-node=2 bad_batches_of_ranks.py FOLDER STRATEGY HOSTS

Each rank writes FOLDER/rankR.json: the errors that it saw.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from penstock.tests.compiler.job.test_bad_batches import KINDS, job_of, require_equal, results


def main(folder: str, strategy: str, hosts: str) -> None:
    said: list[str] = []
    options: dict[str, Any] = {"hidden": True, "strategy": strategy, "hosts": int(hosts)}
    options["buffers"] = strategy == "gpipe"
    without = results(job_of(2, **options), [], 2)
    require_equal(results(job_of(2, **options), [*KINDS, *KINDS], 2, said), without)
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps({"errors": said}))


if __name__ == "__main__":
    main(*sys.argv[1:])
