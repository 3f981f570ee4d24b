"""Ranks of torchrun on emulated GPUs whose steps are longer than their timeout; one that dies in such a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from penstock.bench.peers import parity
from penstock.runtime.processes.local import worker_environment
from penstock.tests.gpu.rehearsal import batches, model_of

EMULATED = "FAKECUDA_TORCH" in os.environ
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi,
    pytest.mark.skipif(not EMULATED, reason="only an emulated GPU can be made so slow"),
]
TIMEOUT_S = 3.0
SCRIPT = f"""
import json, os, signal, sys, threading, time
import penstock
from penstock.bench.peers import parity
from penstock.runtime.device.peers import PeerLink
from penstock.tests.gpu.rehearsal import batches, model_of

parity.exact_arithmetic()
data, rank, dies = batches(), os.environ["RANK"], "dies" in sys.argv
if "dies at its start" in sys.argv and rank == "1":
    PeerLink.connect = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
hardware = penstock.Hardware.detect().with_(num_devices=2, dram="8GB", ssds=0, memory="1GB")
options = {{"optimizer": parity.SGD, "micro_batches": parity.MICRO_BATCHES, "timeout_s": {TIMEOUT_S}}}
with penstock.compile(model_of(), hardware, example_inputs=data[0], strategy="1f1b", **options) as job:
    losses, seconds = [], []
    for number, batch in enumerate(data):
        if dies and rank == "1" and number == 1:
            threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGKILL]).start()
        began = time.monotonic()
        losses.append(float(job.step(batch)))
        seconds.append(time.monotonic() - began)
if rank == "0":
    print(json.dumps({{"losses": losses, "seconds": seconds}}), flush=True)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Each operation starts up to 60 ms late."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    command += [sys.executable, "-c", SCRIPT, *arguments]
    slow = {"FAKECUDA_DELAY_US": "60000", "FAKECUDA_DELAY_SHARE": "1", "FAKECUDA_POISON": "0"}
    return subprocess.run(command, env={**worker_environment(1), **slow}, capture_output=True, text=True, timeout=280)


def test_a_step_may_be_longer_than_the_timeout() -> None:
    done = run()
    assert done.returncode == 0, done.stderr[-4000:]
    (row,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert min(row["seconds"]) > TIMEOUT_S, row
    wanted = parity.train_eager(model_of(), batches(), "cpu", "fp32")
    assert row["losses"] == pytest.approx(wanted.losses, rel=1e-5)  # the same kernels, in another order of additions


@pytest.mark.parametrize("when", ["dies", "dies at its start"])
def test_a_rank_that_dies_is_named_and_the_other_one_ends(when: str) -> None:
    """NCCL itself would let it wait for ever: for a message, and for the other side of a new communicator."""
    done = run(when)
    assert done.returncode != 0
    assert "rank 1" in done.stderr and "has ended" in done.stderr, done.stderr[-4000:]
