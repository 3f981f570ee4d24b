"""A script for torchrun: ranks save in the background while they train, resume from that, and meet a save that fails.

torchrun --nproc-per-node=2 background_save_rank.py FOLDER STRATEGY

Each rank writes FOLDER/rankR.json.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from penstock.ir.errors import CheckpointError
from penstock.runtime.state import checkpoint
from penstock.runtime.state.checkpoint import find_latest, open_checkpoint
from penstock.runtime.state.manifest import MANIFEST
from penstock.tests.compiler.job.steps_of_ranks import RANK, compile_job


def main() -> None:
    folder, found = Path(sys.argv[1]), dict[str, Any]()
    job, _, batch = compile_job(sys.argv[2])
    with job:
        for _ in range(2):
            job.step(batch)
        job.save(folder / "saved" / "at once", data={"next": 2})
        save = job.save(folder / "saved" / "behind", data={"next": 2}, wait=False)
        losses = [float(job.step(batch)) for _ in range(3)]
        found["waited"] = str(save.wait(60))
        names = ("at once", "behind")
        at_once, behind = (json.loads((folder / "saved" / name / MANIFEST).read_text()) for name in names)
        found["same tensors"] = at_once["tensors"] == behind["tensors"] and at_once["scalars"] == behind["scalars"]
        found["sharded"] = bool(job.driver.setup.spread)
        found["data"] = job.resume(folder / "saved" / "behind")
        found["same losses"] = [float(job.step(batch)) for _ in range(3)] == losses

        commit = checkpoint.commit

        def full(*args: Any) -> Path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        if RANK == 0:
            checkpoint.commit = full
        job.save(folder / "saved" / "behind", wait=False)
        try:
            for _ in range(200):  # told at the same step everywhere, once a step has told all ranks of it
                job.step(batch)
                time.sleep(0.02)
        except CheckpointError as error:
            found |= {"error": str(error), "step": job.step_count}
        checkpoint.commit = commit
        job.step(batch)
        job.of_all_ranks(0)
        latest = find_latest(folder / "saved" / "behind")
        assert latest is not None
        found["kept"] = open_checkpoint(latest, verify=True).progress.step
        job.of_all_ranks(0)
        job.save(folder / "saved" / "last", wait=False)  # `close` waits for it
    found["last"] = open_checkpoint(folder / "saved" / "last", verify=True).progress.step - job.step_count
    path = folder / f"rank{RANK}.json"
    path.with_suffix(".new").write_text(json.dumps(found))
    path.with_suffix(".new").rename(path)


if __name__ == "__main__":
    main()
