"""A script for a test: trains a GPT-2 with compiled blocks in two stages, and prints torch's counters."""

import json

from torch._dynamo.utils import counters

from penstock.tests.compiler.job.test_compiled_job import batch_of, compile_job, in_stages
from penstock.tests.zoo import gpt2

if __name__ == "__main__":
    with compile_job(gpt2(dropout=0.0, num_layers=4)[0], batch_of(gpt2), strategy=in_stages(2)) as job:
        losses = [float(job.step(batch_of(gpt2))) for _ in range(2)]
        assert job.last is not None
        found = {name: dict(counters[name]) for name in ("stats", "inductor", "aot_autograd")}
        print(json.dumps({"losses": losses, "eager": job.last.eager_blocks, **found}))
