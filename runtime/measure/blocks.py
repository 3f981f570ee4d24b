"""Timing stages of a generated file on one device, one after the other, as a worker runs them.

Run as `python -m penstock.runtime.measure.blocks FOLDER DEVICE PRECISION RANK WORLD THREADS`. FOLDER holds device0.py,
interface.json, rows.json (stage -> input of indices -> number of rows) and trust.json (how far the file may run);
DEVICE is "cpu" or "cuda:0". For CPU devices one process per device of the machine runs, in step, since devices that
share a memory bus slow each other down. Prints one line of JSON: stage -> seconds of a forward that keeps nothing, one
that keeps what backward needs, backward, and, for a stage with classes of saved tensors, a second forward that takes
all of them.

Weights are random, made for one stage on the device and dropped after it: a model larger than memory can be timed. The
runtime's work around every op (seeds, detaching) is not in the times of forwards: the simulator charges it once per op,
however many blocks a stage has. Time in which the thread waited for a core that other processes had is left out, too,
if the machine has cores for all of its devices' threads.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...ir.program import Interface, ParamSpec, StageSpec, TensorSpec
from ..device.file import INTERFACE_FILE, DeviceFile, open_device_file
from ..device.host import keep_freed_memory
from ..source.trust import Trust
from ..stage.runner import StageRunner
from .detect import usable_cores
from .waiting import waited_s

ROWS_FILE = "rows.json"
TRUST_FILE = "trust.json"
STAGE_S = 0.5  # time for one stage, after one warm-up
LEAST_ROUNDS = 3
SEED = 0
CLOCK_S = 1e-7  # no clock here tells a shorter time from none
WEIGHT_SCALE = 0.02  # of random weights: what flows through a block stays neither huge nor denormal


class Watch:
    """Seconds from `start` to `stop`, by the host's clock without waits for a core, or by events on a GPU's current
    stream. `shares_cores`: waits count, as the machine's own devices wait for each other."""

    def __init__(self, device: torch.device, shares_cores: bool = False):
        self.is_cuda, self.shares_cores = device.type == "cuda", shares_cores
        self.start_s = self.end_s = self.waited_s = 0.0
        if self.is_cuda:
            self.first, self.last = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def start(self, *_: Any) -> None:
        if self.is_cuda:
            self.first.record()
            return
        self.waited_s = 0.0 if self.shares_cores else waited_s()
        self.start_s = time.perf_counter()

    def stop(self, *_: Any) -> None:
        if self.is_cuda:
            self.last.record()
            return
        self.end_s = time.perf_counter()
        self.waited_s = 0.0 if self.shares_cores else waited_s() - self.waited_s

    def seconds(self) -> float:
        if not self.is_cuda:
            return max(self.end_s - self.start_s - self.waited_s, CLOCK_S)
        self.last.synchronize()
        return max(float(self.first.elapsed_time(self.last)) / 1e3, CLOCK_S)


def time_stage(
    file: DeviceFile,
    spec: StageSpec,
    rows: Mapping[str, int],
    device: torch.device,
    precision: str,
    *,
    shares_cores: bool = False,
    slice_s: float = STAGE_S,
) -> list[float]:
    """Seconds of a forward that keeps nothing, one that keeps what backward needs, backward, and, if the stage has
    classes of saved tensors, a forward that takes them all. Each is the first quartile of the rounds in `slice_s`,
    since other work of the machine can only make them longer."""
    runner = StageRunner(spec, file.build(spec.name), device, precision)
    runner.load_buffers({buffer.name: _fill_buffer(buffer, device) for buffer in spec.buffers})
    runner.bind({param.name: _weights(param, device) for param in spec.params})
    play = _round_of(runner, spec, rows, device, Watch(device, shares_cores))
    play()
    times: list[tuple[float, ...]] = []
    end = time.perf_counter() + slice_s
    while len(times) < LEAST_ROUNDS or time.perf_counter() < end:
        times.append(play())
    return [sorted(column)[len(times) // 4] for column in zip(*times)]


def _round_of(
    runner: StageRunner, spec: StageSpec, rows: Mapping[str, int], device: torch.device, watch: Watch
) -> Callable[[], tuple[float, ...]]:
    inputs = [_input(want, rows.get(want.name), device) for want in spec.inputs]
    douts = [_gradient(output, output.name == spec.loss, device) for output in spec.outputs]
    runner.module.register_forward_pre_hook(watch.start)
    runner.module.register_forward_hook(watch.stop)
    grads: dict[str, Tensor] = {}
    classes = [saved.name for saved in spec.saved]

    def play() -> tuple[float, ...]:
        runner.forward(inputs, SEED, keep=False)
        light_s = watch.seconds()
        _, kept = runner.forward(inputs, SEED)
        keeping_s = watch.seconds()
        watch.start()
        runner.backward(kept, inputs, douts, grads, SEED)  # adds to `grads`, as from the second micro-batch on
        watch.stop()
        backward_s = watch.seconds()
        if not classes:
            return light_s, keeping_s, backward_s
        _, kept = runner.forward(inputs, SEED, classes)
        runner.backward(kept, inputs, douts, grads, SEED)  # the watch has timed the forward that takes the classes
        return light_s, keeping_s, backward_s, watch.seconds()

    return play


def _weights(param: ParamSpec, device: torch.device) -> Tensor:
    dtype = getattr(torch, param.dtype)
    if not dtype.is_floating_point:
        return torch.zeros(param.shape, dtype=dtype, device=device)
    return torch.empty(param.shape, dtype=dtype, device=device).normal_(0.0, WEIGHT_SCALE)


def _fill_buffer(buffer: ParamSpec, device: torch.device) -> Tensor:
    """Ones, or True, for factors and masks; zeros for values that may be an index."""
    dtype = getattr(torch, buffer.dtype)
    value = 1 if dtype.is_floating_point or dtype == torch.bool else 0
    return torch.full(buffer.shape, value, dtype=dtype, device=device)


def _input(want: TensorSpec, rows: int | None, device: torch.device) -> Tensor:
    dtype = getattr(torch, want.dtype)
    if dtype.is_floating_point:
        return torch.randn(want.shape, device=device).to(dtype)
    if rows is not None and dtype != torch.bool:
        return torch.randint(rows, want.shape, dtype=dtype, device=device)
    return torch.ones(want.shape, dtype=dtype, device=device)


def _gradient(output: TensorSpec, is_loss: bool, device: torch.device) -> Tensor | float | None:
    if is_loss:
        return 1.0
    return _input(output, None, device) if output.requires_grad else None


def time_stages(folder: str, device: torch.device, precision: str, world: int = 1) -> dict[str, list[float]]:
    """Times of all stages of the folder's file, in step with the other ranks of the process group if there are any."""
    together, shares_cores = world > 1, world * torch.get_num_threads() > usable_cores()
    interface = Interface.from_json(Path(folder, INTERFACE_FILE).read_text(encoding="utf-8"))
    rows = json.loads(Path(folder, ROWS_FILE).read_text(encoding="utf-8"))
    trust = Trust.from_json(json.loads(Path(folder, TRUST_FILE).read_text(encoding="utf-8")))
    file = open_device_file(Path(folder, "device0.py"), interface, 0, trust)
    found = {}
    for name, spec in interface.stages.items():
        if together:
            dist.barrier()
        try:
            found[name] = time_stage(file, spec, rows[name], device, precision, shares_cores=shares_cores)
        except Exception as error:
            raise RuntimeError(f"block {spec.title!r} cannot be timed on {device}: {error}") from error
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if together:
        dist.barrier()  # a slower rank still needs the others
    return found


def main(arguments: list[str]) -> None:
    folder, name, precision, rank, world, threads = arguments
    device, together = torch.device(name), int(world) > 1
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()  # as the devices themselves do
    torch.get_num_threads()  # the first use would else overwrite the number set next
    torch.set_num_threads(int(threads))
    if together:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{Path(folder, 'rendezvous')}",
            rank=int(rank),
            world_size=int(world),
            timeout=timedelta(hours=1),
        )
    try:
        print(json.dumps(time_stages(folder, device, precision, int(world))))
    finally:
        if together:
            dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
