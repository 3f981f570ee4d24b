"""A script for torchrun: ranks with a GPU each step over bad batches, which leave no trace.

bad_batches_of_gpus.py FOLDER WAY ...      each rank writes FOLDER/rankR.json: per way the errors that it saw
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path


def main(folder: str, *ways: str) -> None:
    if os.environ["LOCAL_WORLD_SIZE"] == "1":  # hosts of one GPU each, before torch looks for GPUs
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["RANK"]
    from penstock.bench.peers import parity
    from penstock.tests.gpu.test_gpu_bad_batches import pair_by, require_no_trace

    parity.exact_arithmetic()
    said = {way: require_no_trace(partial(pair_by, way), ["nan", "inf"]) for way in ways}
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
