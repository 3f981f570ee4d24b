"""One rank per device, all running the same script: every rank sees the loss and can ask for any stage."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from penstock.ir.errors import PlanError
from penstock.runtime.processes.local import worker_environment
from penstock.runtime.processes.torchrun import TorchrunDriver

SCRIPT = """
import json, os, sys, threading
from functools import partial
from pathlib import Path

import torch

from penstock.runtime.processes.setup import RunSetup
from penstock.ir.errors import CheckpointError
from penstock.ir.machine.hardware import Hardware
from penstock.runtime.processes.local import start_driver
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec
from penstock.runtime.source.trust import TRUSTED
from penstock.runtime.stage.store import StageStore
from penstock.tests.runtime.generated_files import write_chain
from penstock.tests.ir.program.handmade import pipeline

rank = os.environ["RANK"]
folder = Path(sys.argv[1], rank)
folder.mkdir()
programs = pipeline(2, 4, 2, width=16, kept=True)
files = write_chain(folder, programs, 16)
adamw = OptimizerSpec.from_callable(partial(torch.optim.AdamW, lr=1e-2))
driver = start_driver(RunSetup(files, programs[0].interface, Hardware.cpu(2, memory="8MB"), adamw, trust=TRUSTED))
made = torch.Generator().manual_seed(0)
for i in range(4):
    driver.load_stage(f"stage{i}", {f"layer{i}.weight": torch.randn(16, 16, generator=made) / 4}, {})
update, returned = StageStore.update, threading.Semaphore(0)
def held(store, *args, **fields):
    assert driver.tail.number == 0 or returned.acquire(timeout=60), "a step waits for its updates"
    update(store, *args, **fields)
StageStore.update = held
losses, moved = [], []
for step in range(4):
    batch = {"x": torch.randn(8, 16, generator=torch.Generator().manual_seed(step))}
    driver.agree_on_batch("step", "", None)
    losses.append([v.item() for v in driver.begin_step(batch)["loss"]])
    if step:
        returned.release(2)  # this rank's two updates
    batch["x"].zero_()  # a script may reuse its batch
    if step == 2 and rank == "1":  # alone, while the other rank is in its next step
        moved = driver.finish_step()["moved_bytes"]
last = driver.finish_step()
assert not moved or moved == last["moved_bytes"]
keys = [f"report/{number}/{rank}" for number in range(1, 5)]
left = [key for key in keys if driver.ranks.store.check([key])]
weights = []
for stage, device in sorted(driver.setup.stage_devices.items()):
    _, tensors = driver.call("stage_state", device, {"stage": stage})
    weights.append(tensors[f"weights/layer{stage[-1]}.weight"].tolist())
try:
    driver.call("read_shard", 1, {"stage": "stage1", "directory": "/nowhere/at/all", "group": {}, "scheduler": {}})
except CheckpointError as error:
    refused = str(error)
spans = len({span.device for span in driver.timeline().spans})
driver.close()
found = {"losses": losses, "weights": weights, "refused": refused, "devices": spans, "driver": type(driver).__name__}
found |= {"peaks": last["peak_bytes"], "reports in the store": len(left)}
Path(sys.argv[1], f"rank{rank}.json").write_text(json.dumps(found))
"""


@pytest.mark.multi
def test_ranks_train_together_and_see_the_same(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    command.append(str(tmp_path))
    done = subprocess.run(command, env=worker_environment(1), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert sorted(first["peaks"]) == ["cpu0", "cpu1", "dram0"] and first["reports in the store"] == 1
    assert first["driver"] == "TorchrunDriver" and first["devices"] == 2 and "no such checkpoint" in first["refused"]
    losses, weights = eager()
    assert first["losses"] == losses
    assert [torch.equal(torch.tensor(a), b) for a, b in zip(first["weights"], weights, strict=True)] == [True] * 4


def eager() -> tuple[list[list[float]], list[torch.Tensor]]:
    made = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(16, 16, generator=made) / 4) for _ in range(4)]
    optimizer, losses = partial(torch.optim.AdamW, lr=1e-2, fused=True)(params), []
    for step in range(4):
        losses.append([])
        for x in torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).chunk(2):
            for param in params[:-1]:
                x = torch.tanh(torch.nn.functional.linear(x, param))
            loss = torch.nn.functional.linear(x, params[-1]).square().mean()
            losses[-1].append(loss.item())
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach() for p in params]


def test_the_number_of_ranks_must_be_that_of_the_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from penstock.ir.machine.hardware import Hardware
    from penstock.runtime.processes.setup import RunSetup
    from penstock.runtime.source.trust import TRUSTED
    from penstock.tests.ir.program.handmade import pipeline
    from penstock.tests.runtime.generated_files import write_chain

    programs = pipeline(2, 2, 2, width=16)
    setup = RunSetup(
        write_chain(tmp_path, programs, 16), programs[0].interface, Hardware.cpu(2, memory="8MB"), trust=TRUSTED
    )
    assert not TorchrunDriver.is_present()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    assert TorchrunDriver.is_present()
    with pytest.raises(PlanError, match="started 4 processes, the plan has 2 devices"):
        TorchrunDriver(setup)
