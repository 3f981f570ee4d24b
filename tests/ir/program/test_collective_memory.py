"""Gathers and scattered sums work in places that are there before the first step: nothing is allocated or moved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.ir import ops
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import ParamSpec, Program, StageSpec, place_frees, plan_arena, profile_memory
from penstock.runtime.device.peers import LOOPBACK, PeerLink, group_members
from penstock.runtime.device.session import DeviceSession
from penstock.runtime.device.setup import DeviceSetup
from penstock.runtime.source.trust import TRUSTED
from penstock.runtime.stage.arena import allocate
from penstock.runtime.stage.shards import FlatStage
from penstock.tests.ir.program.handmade import pipeline
from penstock.tests.runtime.device.test_device import ADAMW, MICRO_BATCHES, ROWS, WIDTH, batch_of, weights_of
from penstock.tests.runtime.generated_files import write_chain


class Allocations(TorchDispatchMode):
    """Counts results in memory that none of the operands lies in."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        new = [t for t in tree_leaves(result) if isinstance(t, Tensor) and storage(t) not in given]
        self.made += [str(func)] * len(new)
        return result


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def in_threads(count: int, run: Callable[[int], None]) -> None:
    threads = [Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def test_nothing_is_allocated() -> None:
    """Over gloo, with parameters that end anywhere in a slice: what arrives is where it stays."""
    params = (ParamSpec("a", (700, 3), "float32"), ParamSpec("b", (5,), "float32"))
    spec = StageSpec("stage0", (), (), params)
    store, made, wrong = dist.HashStore(), dict[int, list[str]](), list[str]()
    values = {p.name: torch.randn(p.shape) for p in params}
    cpu = torch.device("cpu")

    def device(index: int) -> None:
        link = PeerLink(store, index, 2, {"all": [0, 1]}, cpu, hostname=LOOPBACK, timeout_s=30)
        link.connect({}, {"all": ops.DEVICE})
        flat = FlatStage(spec, spec.segments(2), index, 2)
        shard, whole = allocate(flat.own.total_bytes, cpu), torch.zeros(flat.whole.total_bytes, dtype=torch.uint8)
        for name, view in flat.own.views(shard).items():
            view.copy_(flat.piece_of(name, values[name]))
        all_rows, slices, views = flat.weight_rows(whole), flat.weight_slices(shard), flat.whole.views(whole)
        grads, spare = flat.new_grads(cpu), torch.zeros(flat.own_grads.total_bytes, dtype=torch.uint8)
        for view in flat.grad_views(grads).values():
            view.fill_(1.0)
        sums, spares = flat.grad_slices(torch.zeros_like(spare)), flat.grad_slices(spare)
        with Allocations() as counted:
            for rows, own in zip(all_rows, slices):
                rows[index].copy_(own)
                link.gather_rows(rows, "all")
            for rows, room, total in zip(grads, spares, sums):
                total.add_(link.sum_rows(rows, room, None, "all"))
        made[index] = counted.made
        wrong.extend(name for name, view in views.items() if not torch.equal(view, values[name]))
        counts = [int(total.count_nonzero()) for total in sums]
        wrong.extend("sums" for total, n in zip(sums, counts) if n * 2.0 != float(total.sum()))

    in_threads(2, device)
    assert made == {0: [], 1: []} and not wrong
    with Allocations() as counted:
        torch.cat([torch.ones(2), torch.ones(2)])
    assert len(counted.made) == 3  # so it does count


def spread(micro_batches: int = MICRO_BATCHES) -> list[Program]:
    """Two devices share a stage on the device, and scatter the gradients of every micro-batch."""
    (whole,) = pipeline(1, 1, micro_batches, width=WIDTH, rows=ROWS)
    interface = whole.with_interface(num_devices=2, groups={"both": ((0, "", ""), (1, "", ""))}).interface
    programs = []
    for device in range(2):
        program = Program(device, interface)
        (shard,) = program.emit(ops.resident, "stage0.weights", group="both", names=["shard"])
        losses, total = [], ()
        for m in range(device, micro_batches, 2):
            (weights,) = program.emit(ops.all_gather, shard, group="both", names=[f"w_m{m}"])
            (x,) = program.emit(ops.load, program.batch, "x", micro_batch=m, names=[f"x_m{m}"])
            loss, kept = program.emit(
                ops.forward, "stage0", weights, x, micro_batch=m, names=[f"loss_m{m}", f"kept_m{m}"]
            )
            losses.append(loss)
            *_, grads = program.emit(
                ops.backward, "stage0", weights, kept, [x], [1 / micro_batches], None, micro_batch=m, names=[f"g_m{m}"]
            )
            total = tuple(program.emit(ops.reduce_scatter, grads, *total, group="both", names=[f"sum_m{m}"]))
        program.emit(ops.step, "stage0", *total)
        program.returns({"loss": losses})
        place_frees(program)
        programs.append(program)
    return programs


def test_places_are_planned_and_stay(tmp_path: Path) -> None:
    """What a session holds is what was planned; from step to step gathered weights and sums are at the same places."""
    programs = spread(micro_batches=4)
    plan = plan_arena(programs[0])
    assert [node.target for node in plan.staging] == [ops.reduce_scatter] * 2
    whole = programs[0].interface.gathered_bytes("stage0", "both")
    assert plan.bytes == whole + whole // 2  # gathered again beside the sum so far
    assert len([node for node in plan.offsets if node.target is ops.reduce_scatter]) == 1  # the sum grows in place
    paths = write_chain(tmp_path, programs, WIDTH)
    machine = Hardware.cpu(2, memory="8MB")
    setups = [DeviceSetup(i, paths[i], programs[i].interface, machine, ADAMW, trust=TRUSTED) for i in range(2)]
    files = [setup.open_file() for setup in setups]
    seen: dict[int, list[Any]] = {0: [], 1: []}

    def device(index: int) -> None:
        store = dist.FileStore(str(tmp_path / "store"), 2)
        groups = group_members(programs[0].interface.groups)
        link = PeerLink(store, index, 2, groups, torch.device("cpu"), hostname=LOOPBACK)
        session = DeviceSession(setups[index], files[index], link)
        session.state.load_weights(lambda name: ({"layer0.weight": weights_of(1)[0]}, {}))
        arena = session.state.memory.device_arena
        for step in range(3):
            batch = {"x": torch.cat([batch_of(step)["x"], batch_of(step + 9)["x"]])}
            result = session.step(batch)
            views = {key: [t.data_ptr() for t in tensors(made)] for key, made in arena._prepared.items()}
            seen[index].append(
                (
                    arena.flat.data_ptr(),
                    arena.bytes,
                    views,
                    result.report["peak_bytes"]["cpu0" if index == 0 else "cpu1"],
                )
            )
        session.close()

    in_threads(2, device)
    for index in range(2):
        first, second, third = seen[index]
        assert first[:3] == second[:3] == third[:3]
        assert first[1] == plan.bytes
        assert first[3] == profile_memory(programs[index]).peak_bytes[ops.DEVICE]


def tensors(made: Any) -> list[Tensor]:
    """The views that an arena has prepared."""
    return [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
