"""One CUDA device: eager's numbers, fetches under computation, and memory within the accounted peak."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.ir.machine.hardware import Hardware
from penstock.runtime.device.session import DeviceSession
from penstock.runtime.device.setup import DeviceSetup
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec
from penstock.runtime.source.trust import TRUSTED
from penstock.tests.ir.program.handmade import pipeline
from penstock.tests.runtime.generated_files import write_chain

pytestmark = pytest.mark.gpu
MICRO_BATCHES, STEPS = 2, 3
ADAMW = OptimizerSpec.from_callable(partial(torch.optim.AdamW, lr=1e-3))


def gpu(memory: str = "4GB") -> Hardware:
    document = Hardware.cpu(1, memory=memory, dram="16GB").model_dump(mode="json")
    document["devices"][0] |= {"kind": "cuda", "name": "gpu0"}
    return Hardware.from_any(document)


def open_session(folder: Path, width: int, rows: int, **kind: bool) -> DeviceSession:
    (program,) = pipeline(1, 4, MICRO_BATCHES, width=width, rows=rows, **kind)
    (path,) = write_chain(folder, [program], width)
    setup = DeviceSetup(0, path, program.interface, gpu(), ADAMW, trust=TRUSTED)
    session = DeviceSession(setup, setup.open_file())
    weights = weights_of(width)
    session.state.load_weights(lambda stage: ({f"layer{stage[-1]}.weight": weights[int(stage[-1])]}, {}))
    return session


def weights_of(width: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(width, width, generator=made) / width**0.5 for _ in range(4)]


def batch_of(step: int, rows: int, width: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows * MICRO_BATCHES, width, generator=torch.Generator().manual_seed(step))}


def eager(width: int, rows: int, optimizer_device: str) -> tuple[list[float], list[Tensor]]:
    """On the GPU, with the optimizer where the plan has it."""
    params = [torch.nn.Parameter(w.cuda()) for w in weights_of(width)]
    masters = [torch.nn.Parameter(p.detach().to(optimizer_device)) for p in params]
    optimizer, losses = ADAMW.build(masters), []
    for step in range(STEPS):
        for x in batch_of(step, rows, width)["x"].cuda().chunk(MICRO_BATCHES):
            for param in params[:-1]:
                x = torch.tanh(F.linear(x, param))
            loss = F.linear(x, params[-1]).square().mean()
            losses.append(loss.item())
            (loss / MICRO_BATCHES).backward()
        for master, param in zip(masters, params):
            assert param.grad is not None
            master.grad, param.grad = param.grad.to(optimizer_device), None
        optimizer.step()
        for master, param in zip(masters, params):
            param.data.copy_(master.data)
    return losses, [m.detach().cpu() for m in masters]


@pytest.mark.emulated_core
@pytest.mark.parametrize("fetched", [False, True], ids=["resident", "swapped"])
def test_one_gpu_equals_eager_bit_for_bit(fetched: bool, tmp_path: Path) -> None:
    session = open_session(tmp_path, 256, 32, fetched=fetched, kept=not fetched)
    results = [session.step(batch_of(step, 32, 256)) for step in range(STEPS)]
    losses, weights = eager(256, 32, "cpu" if fetched else "cuda")
    assert [v.item() for r in results for v in r.values["loss"]] == losses
    for i, want in enumerate(weights):
        assert torch.equal(session.state.stage_state(f"stage{i}").weights[f"layer{i}.weight"].cpu(), want)
    assert session.state.stores["stage0"].flat.is_pinned() == fetched
    session.close()


@pytest.mark.real_gpu
def test_fetches_run_under_computation(tmp_path: Path) -> None:
    session = open_session(tmp_path, 4096, 4096)
    for step in range(2):
        session.step(batch_of(step, 4096, 4096))
    fetches = [s for s in session.spans if s.op == "fetch"]
    computed = [s for s in session.spans if s.stream == "compute"]
    assert any(f.start_s < c.end_s and c.start_s < f.end_s for f in fetches for c in computed)
    session.close()


def test_the_allocator_stays_within_the_accounted_peak(tmp_path: Path) -> None:
    before = torch.cuda.memory_allocated()
    session = open_session(tmp_path, 2048, 2048)
    session.step(batch_of(0, 2048, 2048))
    lasting = session.state.memory.accounts["device"].live_bytes
    libraries = torch.cuda.memory_allocated() - before - lasting  # workspaces of cuBLAS, taken once
    assert libraries <= 256 << 20
    torch.cuda.reset_peak_memory_stats()
    accounted = session.step(batch_of(1, 2048, 2048)).report["peak_bytes"]["gpu0"]
    assert torch.cuda.max_memory_allocated() - before - libraries <= 1.05 * accounted
    session.close()


def test_a_step_never_waits_for_the_whole_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session(tmp_path, 256, 32)
    session.step(batch_of(0, 32, 256))

    def refuse(*_: object) -> None:
        raise AssertionError("torch.cuda.synchronize was called")

    with monkeypatch.context() as within:
        within.setattr(torch.cuda, "synchronize", refuse)
        assert session.step(batch_of(1, 32, 256)).values["loss"]
    session.close()  # which does wait, before memory goes back
