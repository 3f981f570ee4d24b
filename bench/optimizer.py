"""Parameters per second of an optimizer step on resident states: a stage's optimizer against plain torch and DeepSpeed.

The tensors are those of 33.5 million parameters of a transformer with hidden size 1024, a stage as planned. fp32: the
weights are what is stepped, gradients in fp32. bf16: gradients and weights in bf16 beside fp32 masters, as
precision="bf16-true" has them; the rivals then convert gradients and copy the new weights as a training loop does, in
memory taken once. `placed` is a step whose states are in given places, `undoable` one after a snapshot. All sides take
turns in one process. Beside the time on the clock is that of all cores, which tells more where others compute, too.

DeepSpeed is measured where it can be imported and its extension is there or can be built (g++ and ninja).

Two threads take turns well only where nothing else runs; OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0, as the workers have
it, keeps the figures of both sides near each other where something does.

Run: python bench/optimizer.py [--rounds N] [--threads 1 2]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.bench.peers import rows
from penstock.bench.peers.timing import alternate
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec, StageOptimizer

TARGET = 1.0
# Bytes of DRAM that a step reads and writes for a parameter: masters and two states both ways, gradients, and in bf16
# the new weights; in three passes also fp32 gradients, written and read, and masters that are read once more.
BYTES_PER_PARAM = {"fp32": {"one pass": 28}, "bf16": {"one pass": 28, "three passes": 40}}
HIDDEN = 1024
ADAMW = partial(torch.optim.AdamW, lr=1e-4)
Step = Callable[[], None]


def shapes() -> dict[str, tuple[int, ...]]:
    """The shapes of two blocks and most of a third: 33.5 million parameters in matrices, biases and norms."""
    h = HIDDEN
    block = {
        "ln_1.weight": (h,), "ln_1.bias": (h,), "attn.qkv.weight": (3 * h, h), "attn.qkv.bias": (3 * h,),
        "attn.proj.weight": (h, h), "attn.proj.bias": (h,), "ln_2.weight": (h,), "ln_2.bias": (h,),
        "mlp.up.weight": (4 * h, h), "mlp.up.bias": (4 * h,), "mlp.down.weight": (h, 4 * h), "mlp.down.bias": (h,),
    }  # fmt: skip
    whole = {f"h.{i}.{name}": shape for i in range(3) for name, shape in block.items()}
    return {name: shape for name, shape in whole.items() if name != "h.2.mlp.down.weight"}


def tensors(scale: float, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=made).mul_(scale).to(dtype) for name, shape in shapes().items()}


def stage_step(precision: str, placed: bool = False, undoable: bool = False) -> Step:
    """A step of our `StageOptimizer`."""
    spec = OptimizerSpec.from_callable(ADAMW)
    masters, low = tensors(0.1), None
    places = None
    if placed:
        places = {
            name: {key: torch.empty(own) for key, (own, _) in spec.state_shapes(shape, name).items()}
            for name, shape in shapes().items()
        }
    part = StageOptimizer(spec, masters, places)
    grads = tensors(0.01, torch.bfloat16 if precision == "bf16" else torch.float32)
    if precision == "bf16":
        low = {name: master.bfloat16() for name, master in masters.items()}
    kept: list[Any] = [None]

    def step() -> None:
        if undoable:
            kept[0] = part.snapshot(into=kept[0])
        part.step(grads, weights=low, preserve=undoable)

    return step


def torch_step(precision: str) -> Step:
    """A step of torch.optim.AdamW(fused=True) on the same tensors."""
    masters = [nn.Parameter(t) for t in tensors(0.1).values()]
    return _loop(torch.optim.AdamW(masters, lr=1e-4, fused=True), masters, precision)


def deepspeed_step(precision: str) -> Step:
    """A step of DeepSpeedCPUAdam. Lets all errors of its import and its build through."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    masters = [nn.Parameter(t) for t in tensors(0.1).values()]
    return _loop(DeepSpeedCPUAdam(masters, lr=1e-4, adamw_mode=True), masters, precision)


def _loop(optimizer: Any, masters: list[nn.Parameter], precision: str) -> Step:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    grads = list(tensors(0.01, dtype).values())
    low = [master.detach().to(dtype) for master in masters]
    for master, grad in zip(masters, grads):
        master.grad = grad if precision == "fp32" else torch.empty_like(master)

    def step() -> None:
        if precision == "bf16":
            for master, grad in zip(masters, grads):
                assert master.grad is not None
                master.grad.copy_(grad)
        optimizer.step()
        if precision == "bf16":
            for weight, master in zip(low, masters):
                weight.copy_(master.detach())

    return step


def _count(step: Step, cpu_s: list[float]) -> Step:
    """The step, which adds the seconds of all its threads' cores to the list."""

    def run() -> None:
        begin_s = time.process_time()
        step()
        cpu_s.append(time.process_time() - begin_s)

    return run


def figures(precision: str, threads: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    sides: dict[str, Step] = {"penstock": stage_step(precision), "torch": torch_step(precision)}
    missing = ""
    try:
        sides["deepspeed"] = deepspeed_step(precision)
    except Exception as error:  # its build fails in its own ways
        missing = f"{type(error).__name__}: {error}".split("\n")[0]
    sides["placed"] = stage_step(precision, placed=True)
    sides["undoable"] = stage_step(precision, undoable=True)
    cpu_s: dict[str, list[float]] = {name: [] for name in sides}
    times_s = alternate({name: _count(step, cpu_s[name]) for name, step in sides.items()}, rounds)
    cpu_median_s = {name: statistics.median(own[-rounds:]) for name, own in cpu_s.items()}
    numel = sum(t.numel() for t in tensors(0.0).values())
    rivals = {name: times_s[name] for name in ("torch", "deepspeed") if name in times_s}
    best = min(rivals, key=lambda name: statistics.median(rivals[name]))
    pairs = [rival / own for rival, own in zip(rivals[best], times_s["penstock"])]
    return {
        "parameters": numel, "tensors": len(shapes()), "precision": precision, "threads": threads,
        "optimizer": "AdamW", "seconds": {name: rows.spread(times) for name, times in times_s.items()},
        "params_per_s": {name: numel / statistics.median(times) for name, times in times_s.items()},
        "params_per_cpu_s": {name: numel / own_s for name, own_s in cpu_median_s.items()},
        "bytes_per_param": BYTES_PER_PARAM[precision],
        "rival": best, "ratio": statistics.median(rivals[best]) / statistics.median(times_s["penstock"]),
        "ratio_of_pairs": statistics.median(pairs),
        "ratio_of_fastest": min(rivals[best]) / min(times_s["penstock"]),
        "ratio_of_cpu_s": min(cpu_median_s[name] for name in rivals) / cpu_median_s["penstock"],
        "target": TARGET, "deepspeed_missing": missing or None,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    for precision in ("fp32", "bf16"):
        for threads in args.threads:
            rows.save("optimizer", figures(precision, threads, args.rounds))


if __name__ == "__main__":
    main()
