import json
import subprocess
import sys

import pytest

CHILD = """
import json, resource, torch
from penstock.runtime.device.malloc import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = [torch.ones(2**20) for _ in range(30)]  # 120 MiB, 30720 pages
    del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

kept = keep_freed_memory()
print(json.dumps([kept, [faults() for _ in range(4)]]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_memory_freed_once_is_not_faulted_in_again():
    run = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    kept, faults = json.loads(run.stdout)
    if not kept:
        pytest.skip("this C library's malloc cannot be told")
    assert faults[0] > 20_000  # else this test measures nothing
    assert faults[-1] < 2_000  # small blocks in between may make the heap grow once more, not for ever
