"""One device, and several in one process: the same numbers as eager PyTorch, within the memory that was planned."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from penstock.ir import ops
from penstock.ir.errors import BatchError, BudgetExceeded, PlanError, VerifyError, WorkerError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import Program, infer_all, profile_memory
from penstock.runtime.device import session as device_session
from penstock.runtime.device.file import DeviceFile, open_device_file
from penstock.runtime.device.peers import LOOPBACK, PeerLink, group_members
from penstock.runtime.device.prepare import Issues, plan_issues
from penstock.runtime.device.session import DeviceSession, StepResult
from penstock.runtime.device.setup import DeviceSetup, HostShare
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec
from penstock.runtime.source.trust import TRUSTED
from penstock.tests.ir.program.handmade import pipeline
from penstock.tests.ir.verify.test_rules import edit
from penstock.tests.runtime.generated_files import write_chain

WIDTH, ROWS, MICRO_BATCHES, STEPS = 16, 4, 2, 3
ADAMW = OptimizerSpec.from_callable(partial(torch.optim.AdamW, lr=1e-2))


def weights_of(num_stages: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(WIDTH, WIDTH, generator=made) / 4 for _ in range(num_stages)]


def batch_of(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS * MICRO_BATCHES, WIDTH, generator=torch.Generator().manual_seed(step))}


def eager(num_stages: int, max_norm: float | None = None) -> tuple[list[float], list[Tensor], float]:
    """Losses of all micro-batches, final weights, last gradient norm."""
    params = [torch.nn.Parameter(w) for w in weights_of(num_stages)]
    optimizer, losses, norm = ADAMW.build(params), [], 0.0
    for step in range(STEPS):
        for x in batch_of(step)["x"].chunk(MICRO_BATCHES):
            for param in params[:-1]:
                x = torch.tanh(F.linear(x, param))
            loss = F.linear(x, params[-1]).square().mean()
            losses.append(loss.item())
            (loss / MICRO_BATCHES).backward()
        if max_norm is not None:
            norm = float(torch.nn.utils.clip_grad_norm_(params, max_norm))
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach() for p in params], norm


def open_session(
    path: Path,
    program: Program,
    hardware: Hardware,
    *,
    link: PeerLink | None = None,
    precision: str = "fp32",
    **share: Any,
) -> DeviceSession:
    setup = DeviceSetup(
        program.device,
        path,
        program.interface,
        hardware,
        ADAMW,
        precision=precision,
        share=HostShare(**share),
        trust=TRUSTED,
    )
    return start(setup, setup.open_file(), link)


def start(setup: DeviceSetup, file: DeviceFile, link: PeerLink | None) -> DeviceSession:
    session = DeviceSession(setup, file, link)
    weights = weights_of(len(setup.interface.stages))
    session.state.load_weights(lambda stage: ({f"layer{stage[-1]}.weight": weights[int(stage[-1])]}, {}))
    return session


@pytest.mark.parametrize(
    "kind",
    [
        {"fetched": False, "kept": True},
        {"fetched": False, "kept": False},
        {"fetched": True, "kept": False},
        {"fetched": True, "kept": False, "prefetch": False},
        {"fetched": True, "kept": True},
        {"fetched": False, "kept": True, "split": True},
        {"fetched": True, "kept": False, "split": True},
    ],
    ids=str,
)
def test_one_device_equals_eager_bit_for_bit(kind: dict[str, bool], tmp_path: Path) -> None:
    (program,) = pipeline(1, 3, MICRO_BATCHES, width=WIDTH, rows=ROWS, **kind)
    session = open_session(*write_chain(tmp_path, [program], WIDTH), program, Hardware.cpu(1, memory="8MB"))
    losses, weights, _ = eager(3)
    results = [session.step(batch_of(step)) for step in range(STEPS)]
    assert [v.item() for r in results for v in r.values["loss"]] == losses
    for i, want in enumerate(weights):
        assert torch.equal(session.state.stage_state(f"stage{i}").weights[f"layer{i}.weight"], want)
    planned = profile_memory(program).peak_bytes
    assert results[0].report["peak_bytes"] == {"cpu0": planned[ops.DEVICE], "dram0": planned[ops.DRAM]}
    if kind["kept"] or kind.get("split"):  # planned without measuring; from the second step on charged as measured
        measured = {name: store.runner.kept_bytes for name, store in session.state.stores.items()}
        stages = {name: replace(s, kept_bytes=measured[name]) for name, s in program.interface.stages.items()}
        infer_all(program.with_interface(stages=stages))
        assert profile_memory(program).peak_bytes[ops.DEVICE] != planned[ops.DEVICE]
    assert results[-1].report["peak_bytes"]["cpu0"] == profile_memory(program).peak_bytes[ops.DEVICE]
    session.close()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_kept_values_find_weights_that_were_fetched_again(
    elsewhere: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another stage's weights take their place meanwhile. `elsewhere`: they come back to another place."""

    def plan_elsewhere(*args: Any) -> Issues:
        plan = plan_issues(*args)
        fetch = [op for op in plan.ops if op.pieces][-1]
        ((_, first, last),) = fetch.pieces
        fetch.pieces = ((plan.arenas[ops.DEVICE], first, last),)
        plan.arenas[ops.DEVICE] *= 2
        return plan

    if elsewhere:
        monkeypatch.setattr(device_session, "plan_issues", plan_elsewhere)
    (program,) = edit(
        pipeline(1, 3, MICRO_BATCHES, width=WIDTH, rows=ROWS, kept=True), 0,
        ("    w2 =", "    rt.free(w0)\n    w2 ="),
        ("    g0_m0, =", '    w0_1 = rt.fetch("stage0.weights")\n    g0_m0, ='),
        ("w0, k0_m0", "w0_1, k0_m0"), ("w0, k0_m1", "w0_1, k0_m1"), ("rt.free(w0, x_m1", "rt.free(w0_1, x_m1"),
    )  # fmt: skip
    session = open_session(*write_chain(tmp_path, [program], WIDTH), program, Hardware.cpu(1, memory="8MB"))
    assert [store.runner.weights_move for store in session.state.stores.values()] == [elsewhere, False, False]
    losses, weights, _ = eager(3)
    results = [session.step(batch_of(step)) for step in range(STEPS)]
    assert [v.item() for r in results for v in r.values["loss"]] == losses
    for i, want in enumerate(weights):
        assert torch.equal(session.state.stage_state(f"stage{i}").weights[f"layer{i}.weight"], want)
    session.close()


def run_devices(folder: Path, programs: list[Program]) -> tuple[list[list[StepResult]], list[Tensor]]:
    """All devices as threads of this process, with real connections: results per device and step, final weights."""
    count, paths = len(programs), write_chain(folder, programs, WIDTH)
    machine = Hardware.cpu(count, memory="8MB")
    setups = [
        DeviceSetup(p.device, path, p.interface, machine, ADAMW, trust=TRUSTED) for path, p in zip(paths, programs)
    ]
    files = [setup.open_file() for setup in setups]
    found: list[list[StepResult]] = [[] for _ in programs]
    weights: dict[str, Tensor] = {}

    def run(device: int) -> None:
        store = dist.FileStore(str(folder / "store"), count)
        groups = group_members(programs[0].interface.groups)
        link = PeerLink(store, device, count, groups, torch.device("cpu"), timeout_s=30, hostname=LOOPBACK)
        session = start(setups[device], files[device], link)
        found[device] = [session.step(batch_of(step)) for step in range(STEPS)]
        for stage in session.state.stores:
            weights[stage] = session.state.stage_state(stage).weights[f"layer{stage[-1]}.weight"]
        session.close()

    threads = [threading.Thread(target=run, args=(device,)) for device in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(found)
    return found, [weights[stage] for stage in programs[0].interface.stages]


def losses_of(results: list[StepResult]) -> list[float]:
    return [value.item() for result in results for value in result.values["loss"]]


def test_several_devices_equal_eager_with_clipping_over_all(tmp_path: Path) -> None:
    found, weights = run_devices(tmp_path, pipeline(3, 6, MICRO_BATCHES, width=WIDTH, rows=ROWS, clip=True))
    losses, want, norm = eager(6, max_norm=1.0)
    torch.testing.assert_close(losses_of(found[2]), losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-7)
    norms = [results[-1].report["gradient_norm"] for results in found]
    assert norms[0] == norms[1] == norms[2] == pytest.approx(norm, rel=1e-6)
    bytes_each_way = 2 * MICRO_BATCHES * ROWS * WIDTH * 4  # two borders from device 0 to device 1
    assert found[0][-1].report["moved_bytes"]["cpu0 -> cpu1"] == bytes_each_way


def test_two_devices_equal_eager_bit_for_bit(tmp_path: Path) -> None:
    found, weights = run_devices(tmp_path, pipeline(2, 4, MICRO_BATCHES, width=WIDTH, rows=ROWS))
    losses, want, _ = eager(4)
    assert losses_of(found[1]) == losses and found[0][0].values == {}
    assert all(torch.equal(a, b) for a, b in zip(weights, want, strict=True))


def test_fetch_and_compute_overlap_on_a_slow_link(tmp_path: Path) -> None:
    (program,) = pipeline(1, 3, MICRO_BATCHES, width=WIDTH, rows=ROWS)
    (path,) = write_chain(tmp_path, [program], WIDTH, seconds=0.005)
    hardware = Hardware.cpu(1, memory="8MB", h2d="50kB/s", d2h="50kB/s")  # 20 ms for a stage's 1 KiB
    session = open_session(path, program, hardware)
    session.step(batch_of(0))
    fetches = [s for s in session.spans if s.op == "fetch"]
    computed = [s for s in session.spans if s.stream == "compute"]
    assert all(s.end_s - s.start_s >= 0.02 for s in fetches)
    assert any(f.start_s < c.end_s and c.start_s < f.end_s for f in fetches for c in computed)
    starts = {s.text.split(" = ")[0]: s.start_s for s in session.spans if s.op == "fetch"}
    first_use = next(s for s in computed if '"stage0"' in s.text)
    assert starts["w1"] < first_use.end_s  # prefetched while stage 0 runs, not after it
    session.close()


def test_more_than_the_budget_raises_at_the_op_with_the_live_values(tmp_path: Path) -> None:
    (program,) = pipeline(1, 3, MICRO_BATCHES, width=WIDTH, rows=ROWS, kept=True)
    (path,) = write_chain(tmp_path, [program], WIDTH)
    peak = profile_memory(program)
    hardware = Hardware.cpu(1, memory=peak.peak_bytes[ops.DEVICE] - 1)
    session = open_session(path, program, hardware)
    with pytest.raises(BudgetExceeded) as caught:
        session.step(batch_of(0))
    message = str(caught.value)
    assert "device 0 (cpu0), line" in message and "rt.backward(" in message and "missing 1.00 B" in message
    assert "k2_m0" in message and "arena" in message
    with pytest.raises(WorkerError, match="failed before"):
        session.step(batch_of(1))
    session.close()


def test_what_lasts_must_fit_before_anything_runs(tmp_path: Path) -> None:
    (program,) = pipeline(1, 3, MICRO_BATCHES, width=WIDTH, rows=ROWS, fetched=False)
    (path,) = write_chain(tmp_path, [program], WIDTH)
    with pytest.raises(BudgetExceeded, match="cpu0"):
        open_session(path, program, Hardware.cpu(1, memory="4kB"))


def test_dram_has_a_budget_too(tmp_path: Path) -> None:
    (program,) = pipeline(1, 3, MICRO_BATCHES, width=WIDTH, rows=ROWS)
    (path,) = write_chain(tmp_path, [program], WIDTH)
    need = profile_memory(program).peak_bytes[ops.DRAM]
    session = open_session(path, program, Hardware.cpu(1, memory="8MB"), dram_budget_bytes=need)
    assert session.step(batch_of(0)).report["peak_bytes"]["dram0"] == need
    session.close()
    with pytest.raises(BudgetExceeded, match=r"dram0: all steps' arena"):
        open_session(path, program, Hardware.cpu(1, memory="8MB"), dram_budget_bytes=need - 1)


@pytest.mark.parametrize("fetched", [True, False], ids=["threads", "inline"])
def test_an_error_in_a_stage_names_device_line_and_micro_batch(fetched: bool, tmp_path: Path) -> None:
    (program,) = pipeline(1, 3, MICRO_BATCHES, width=WIDTH, rows=ROWS, fetched=fetched)
    (path,) = write_chain(tmp_path, [program], WIDTH, failing="stage1")
    session = open_session(path, program, Hardware.cpu(1, memory="8MB"))
    with pytest.raises(WorkerError, match=r"ValueError: no third time") as caught:  # forward m0, m1, then again
        session.step(batch_of(0))
    lines = path.read_text().splitlines()
    number = next(i for i, text in enumerate(lines, 1) if 'rt.backward("stage1"' in text)
    assert f"device 0 (cpu0), line {number}:" in str(caught.value) and "(micro-batch 0)" in str(caught.value)
    assert caught.value.device == 0 and caught.value.line is not None and caught.value.line in lines[number - 1]
    assert isinstance(caught.value.__cause__, ValueError)
    session.close()


def test_bf16_trains_fp32_masters(tmp_path: Path) -> None:
    (program,) = pipeline(1, 2, MICRO_BATCHES, width=WIDTH, rows=ROWS)
    interface = program.interface
    stages = {
        name: replace(spec, params=tuple(replace(p, dtype="bfloat16") for p in spec.params))
        for name, spec in interface.stages.items()
    }
    for name, spec in stages.items():
        stages[name] = replace(spec, outputs=(replace(spec.outputs[0], dtype="bfloat16"),))
    stages["stage1"] = replace(stages["stage1"], inputs=stages["stage0"].outputs)
    (path,) = write_chain(tmp_path, [program], WIDTH)
    program.with_interface(stages=stages, master=True)
    session = open_session(path, program, Hardware.cpu(1, memory="8MB"), precision="bf16")
    losses, weights, _ = eager(2)
    found = [v.item() for step in range(STEPS) for v in session.step(batch_of(step)).values["loss"]]
    torch.testing.assert_close(found, losses, rtol=0.05, atol=0)
    for i, want in enumerate(weights):
        store = session.state.stores[f"stage{i}"]
        (name,) = store.weights
        assert store.masters[name].dtype == torch.float32 and not torch.equal(store.masters[name], weights_of(2)[i])
        torch.testing.assert_close(store.masters[name], want, rtol=0.1, atol=0.01)
        assert torch.equal(store.weights[name], store.masters[name].bfloat16())
    session.close()


def test_a_state_moves_to_another_session_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    (swapped,) = pipeline(1, 2, MICRO_BATCHES, width=WIDTH, rows=ROWS)
    (resident,) = pipeline(1, 2, MICRO_BATCHES, width=WIDTH, rows=ROWS, fetched=False)
    sessions = []
    for name, program in (("swapped", swapped), ("resident", resident)):
        (tmp_path / name).mkdir()
        (path,) = write_chain(tmp_path / name, [program], WIDTH)
        sessions.append(open_session(path, program, Hardware.cpu(1, memory="8MB")))
    first, second = sessions
    first.step(batch_of(0))
    for stage in ("stage0", "stage1"):
        second.state.load_stage_state(stage, first.state.stage_state(stage))
    second.state.load_counters(first.state.counters())
    assert second.state.step_count == 1
    losses = [[v.item() for v in s.step(batch_of(1)).values["loss"]] for s in sessions]
    losses += [[v.item() for v in s.step(batch_of(2)).values["loss"]] for s in sessions]
    assert losses[0] == losses[1] and losses[2] == losses[3] and losses[0] != losses[2]
    first.close(), second.close()


def test_a_wrong_batch_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (program,) = pipeline(1, 2, MICRO_BATCHES, width=WIDTH, rows=ROWS)
    (path,) = write_chain(tmp_path, [program], WIDTH)
    session = open_session(path, program, Hardware.cpu(1, memory="8MB"))
    with pytest.raises(BatchError, match="'x' is missing; found y"):
        session.step({"y": torch.zeros(1)})
    with pytest.raises(BatchError, match=r"float64\[8, 16\], compiled for float32\[8, 16\]"):
        session.step({"x": batch_of(0)["x"].double()})
    assert session.step(batch_of(0)).values["loss"]
    with pytest.raises(PlanError, match="no `evaluate`"):
        session.evaluate(batch_of(0))
    session.close()


def test_a_file_without_stages_is_refused(tmp_path: Path) -> None:
    (program,) = pipeline(1, 2, MICRO_BATCHES, width=WIDTH, rows=ROWS)
    (path,) = write_chain(tmp_path, [program], WIDTH)
    path.write_text(path.read_text().replace("STAGES", "Stages"))
    with pytest.raises(VerifyError, match="no STAGES"):
        open_device_file(path, program.interface, 0, TRUSTED)


def test_a_silent_peer_is_an_error_in_time(tmp_path: Path) -> None:
    """The other device connects but never sends."""
    programs = pipeline(2, 2, MICRO_BATCHES, width=WIDTH, rows=ROWS)
    files = write_chain(tmp_path, programs, WIDTH)
    links: dict[int, PeerLink] = {}

    def connect(device: int) -> None:
        store = dist.FileStore(str(tmp_path / "store"), 2)
        links[device] = PeerLink(store, device, 2, {}, torch.device("cpu"), timeout_s=2, hostname=LOOPBACK)

    threads = [threading.Thread(target=connect, args=(device,)) for device in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    session = open_session(files[1], programs[1], Hardware.cpu(2, memory="8MB"), link=links[1])
    with pytest.raises(WorkerError, match=r"rt.recv\(.*Timed out"):
        session.step(batch_of(0))
    assert links[0]._timeout == timedelta(seconds=2)
    session.close()
