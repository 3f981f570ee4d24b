"""The order that streams and events promise on a GPU, checked without one: no race, memory held where it crosses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import penstock
from penstock.compiler.strategies import STRATEGIES
from penstock.ir import ops
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import profile_memory
from penstock.runtime.device.issuing import Loans
from penstock.runtime.device.named_streams import Streams
from penstock.runtime.device.session import DeviceSession
from penstock.runtime.device.setup import DeviceSetup, HostShare
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec
from penstock.runtime.source.trust import TRUSTED
from penstock.runtime.state.weights import LiveWeights, stage_buffers, stage_weights
from penstock.tests.compiler.fleet_matrix import with_counts
from penstock.tests.ir.program.handmade import pipeline
from penstock.tests.runtime.device.fake_cuda import FakeCuda, FakeCudaSession, install
from penstock.tests.runtime.generated_files import write_chain
from penstock.tests.shown_elsewhere import slow_but
from penstock.tests.zoo import gpt2

WIDTH, ROWS, MICRO_BATCHES, STEPS, STAGES = 8, 4, 2, 3, 4
ADAMW = OptimizerSpec.from_callable(partial(torch.optim.AdamW, lr=1e-2))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch)


def gpu(kind: str) -> Hardware:
    document = Hardware.cpu(1, memory="8MB", ssd="64MB").model_dump(mode="json")
    document["devices"][0] |= {"kind": kind}
    return Hardware.from_any(document)


def open_session(folder: Path, kind: str, **shape: Any) -> DeviceSession:
    folder.mkdir()
    (program,) = pipeline(1, STAGES, MICRO_BATCHES, width=WIDTH, rows=ROWS, **shape)
    (path,) = write_chain(folder, [program], WIDTH)
    made_for = FakeCudaSession if kind == "cuda" else DeviceSession
    share = HostShare(ssd_dirs=(str(folder),))
    setup = DeviceSetup(0, path, program.interface, gpu(kind), ADAMW, share=share, trust=TRUSTED)
    session = made_for(setup, setup.open_file())
    made = torch.Generator().manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, generator=made) / 4 for _ in range(STAGES)]
    session.state.load_weights(lambda stage: ({f"layer{stage[-1]}.weight": weights[int(stage[-1])]}, {}))
    return session


def batch_of(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS * MICRO_BATCHES, WIDTH, generator=torch.Generator().manual_seed(step))}


def run(session: DeviceSession) -> list[float]:
    """Steps one right after another: from the second on, each begins before the one before has ended."""
    losses = [v.item() for step in range(STEPS) for v in session.begin_step(batch_of(step))["loss"]]
    session.finish_step()
    session.close()
    return losses


SHAPES = [
    {"fetched": False, "kept": True},
    {"fetched": True},
    {"fetched": True, "prefetch": False},
    {"fetched": True, "kept": True},
    {"fetched": True, "clip": True},
    {"fetched": False, "clip": True},
    {"fetched": True, "ssd": "states"},
    {"fetched": True, "ssd": "all", "moved": "dram"},
    {"fetched": True, "ssd": "all", "moved": "ssd"},
    {"fetched": True, "ssd": "all", "clip": True, "speculative": True},
]


@pytest.mark.parametrize("shape", slow_but([SHAPES[i] for i in (0, 4, 6, 8, 9)], SHAPES), ids=str)
def test_no_stream_touches_what_another_may_still_use(shape: dict[str, Any], cuda: FakeCuda, tmp_path: Path) -> None:
    session = open_session(tmp_path / "cuda", "cuda", **shape)
    losses = run(session)
    assert cuda.races == [] and cuda.not_held == set()
    assert any(len({a.actor for a in accesses}) > 1 for accesses in cuda.accesses.values()) or not shape["fetched"]
    assert losses == run(open_session(tmp_path / "cpu", "cpu", **shape))


def test_without_events_every_kind_of_race_is_found(cuda: FakeCuda, tmp_path: Path) -> None:
    """Every wait has a purpose, and the detector sees a missing one."""
    session = open_session(tmp_path / "cuda", "cuda", fetched=True)
    for issue in session.plans["step"].ops:
        issue.waits = ()
    run(session)
    sides = [line.partition("does not wait") for line in cuda.races]
    found = {(_op_of(late), _op_of(early)) for late, _, early in sides}
    assert {("forward", "fetch"), ("fetch", "backward"), ("offload", "backward"), ("step", "offload")} <= found


def test_without_events_of_the_step_before_its_updates_race_with_the_next_step(cuda: FakeCuda, tmp_path: Path) -> None:
    session = open_session(tmp_path / "cuda", "cuda", fetched=True)
    for issue in session.plans["step"].ops:
        issue.before = ()
    run(session)
    sides = [line.partition("does not wait") for line in cuda.races]
    assert {"fetch", "step"} in [{_op_of(late), _op_of(early)} for late, _, early in sides]


def _op_of(text: str) -> str:
    return text.partition("rt.")[2].partition("(")[0]


def test_memory_that_crosses_streams_must_be_held(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Loans, "_lend", lambda loans, taker, tensors, reader, index: None)
    run(open_session(tmp_path / "cuda", "cuda", fetched=True))
    assert any("rt.offload" in line for line in cuda.not_held)


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["64MB", "300kB"], ids=["resident", "swapped"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_compiled_plans_with_tied_weights_and_clipping(
    memory: str, precision: str, cuda: FakeCuda, tmp_path: Path
) -> None:
    """Two stages of a GPT that share a table: sums of gradients, norm, loss scale."""
    model, batch = gpt2(dropout=0.1)
    document = Hardware.cpu(1, memory=memory).model_dump(mode="json")
    document["devices"][0] |= {"kind": "cuda"}
    job = penstock.compile(
        model, Hardware.from_any(document), example_inputs=batch, optimizer=partial(torch.optim.AdamW, lr=1e-2),
        strategy=STRATEGIES["balanced"].replace("partition-balanced", "partition-balanced{stages=2}"),
        micro_batches=2, precision=precision, max_grad_norm=1.0,
    )  # fmt: skip
    interface = job.folder.interface
    assert bool(job.plan.decisions.fetch) == (memory != "64MB")
    path = job.write(tmp_path / "files") / "device0.py"
    setup = DeviceSetup(0, path, interface, job.hardware, ADAMW, precision)
    session = FakeCudaSession(setup, setup.open_file())
    source, batch = LiveWeights(model), with_counts(job, batch)
    for name, spec in interface.stages.items():
        session.state.load_stage(name, stage_weights(source, spec, own=False), stage_buffers(source, spec))
    losses = [float(torch.stack(session.step(batch).values["loss"]).mean()) for _ in range(STEPS)]
    session.evaluate(batch)
    session.close()
    assert cuda.races == [] and cuda.not_held == set()
    assert losses[-1] < losses[0]


def test_memory_comes_back_as_the_order_says_and_the_host_waits_for_nothing(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The fake GPU's events are never over while ops are issued, so all room comes from waits of streams."""
    roomy = open_session(tmp_path / "roomy", "cuda", fetched=True)
    program = roomy.file.programs["step"]
    peak_bytes = profile_memory(program).peak_bytes[ops.DEVICE]
    document = gpu("cuda").model_dump(mode="json")
    document["devices"][0] |= {"memory_bytes": peak_bytes}
    tight = FakeCudaSession(replace(roomy.setup, hardware=Hardware.from_any(document)), roomy.file)
    end_issue, most, while_issued = Streams.end_issue, [0, 0], []

    def count(streams: Streams, used: Any) -> None:
        while_issued.append(cuda.host_waits)
        end_issue(streams, used)

    monkeypatch.setattr(Streams, "end_issue", count)
    for place, session in enumerate((roomy, tight)):
        _count_borrowed(monkeypatch, most, place)
        cuda.host_waits = 0
        session.step(batch_of(0))
        session.close()
    assert 0 < most[1] < most[0] and cuda.races == [] and cuda.not_held == set()
    assert while_issued == [0, 0]


def _count_borrowed(monkeypatch: pytest.MonkeyPatch, most: list[int], place: int) -> None:
    settle = Loans.settle

    def counting(loans: Loans, stream: Any, waits: Any) -> None:
        settle(loans, stream, waits)
        held = [t for rows in loans._open.values() for row in rows.values() for _, tensors in row for t in tensors]
        most[place] = max(most[place], sum(tensor.nbytes for tensor in held))

    monkeypatch.setattr(Loans, "settle", counting)
