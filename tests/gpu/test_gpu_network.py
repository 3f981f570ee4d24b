"""The network between hosts whose devices are GPUs, timed over NCCL: by two torchruns of one rank, and in a ring."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from penstock.ir.machine.hardware import Hardware
from penstock.runtime.measure.network import MESSAGE_BYTES
from penstock.tests.compiler.job.agents import agents
from penstock.tests.runtime.measure.timed_host import HOSTS, timed_by_all

EMULATED = "FAKECUDA_TORCH" in os.environ
pytestmark = [pytest.mark.gpu, pytest.mark.multi]
SCRIPT = """
import json, os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["GROUP_RANK"]  # a host of its own for each rank
from penstock.cli.main import main
from penstock.runtime.device.peers import PeerLink

sent, send = [], PeerLink.send


def watched(link, value, dst, tag):
    sent.append((value.device.type, value.numel() * value.element_size()))
    send(link, value, dst, tag)


PeerLink.send = watched
try:
    main(["hardware", "detect", "--save", sys.argv[1]])
finally:
    with open(f"{sys.argv[2]}/sent{os.environ['RANK']}.json", "w") as file:
        json.dump(sorted(set(sent)), file)
"""


@pytest.mark.skipif(not EMULATED and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_hosts_with_gpus_time_what_lies_between_them_over_nccl(tmp_path: Path) -> None:
    script, document = tmp_path / "script.py", tmp_path / "machine.yaml"
    script.write_text(SCRIPT)
    with agents(tmp_path / "agents", str(document), str(tmp_path), nodes=2, per_node=1, script=script) as started:
        codes = [process.wait(200) for process in started.processes]
        assert codes == [0, 0], started.output()[-4000:]
    found = Hardware.from_any(str(document))
    assert [(device.kind, device.host) for device in found.devices] == [("cuda", 0), ("cuda", 1)]
    assert found.network is not None and 1e6 < found.network.bandwidth < 1e13
    assert "measured between them" in found.source
    for rank in range(2):
        sent = json.loads((tmp_path / f"sent{rank}.json").read_text())
        assert {kind for kind, _ in sent} == {"cuda"} and {size for _, size in sent} >= set(MESSAGE_BYTES)


@pytest.mark.skipif(not EMULATED, reason="takes three GPUs")
def test_three_gpus_time_their_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECUDA_DEVICES", str(HOSTS))
    rows = timed_by_all(str(tmp_path), "cuda")
    assert set(rows) == set(range(HOSTS)) and not rows[2]
    assert 1e5 < rows[0]["bandwidth"] < 1e13 and 0 < rows[0]["latency_s"] < 1
    assert rows[0]["host_shares"] is None or list(rows[0]["host_shares"]) == [2, HOSTS]
