"""Jobs with compiled stages, and with fused chains of calls, under emulation, with Inductor's own kernels for CUDA,
which Triton interprets on the emulated device: everything is checked against eager but the kernels' machine code. The
weights are resident, as the interpreter copies whole storages back, in which fetches would be under way.

Run: make gpu-emulated-kernels
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import nn
from torch._inductor import config as inductor
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner, GridExpr
from triton.backends.compiler import GPUTarget
from triton.runtime.interpreter import TensorHandle

from penstock.bench.peers import parity
from penstock.bench.peers.gpt import GptSize
from penstock.tests.gpu.rehearsal import batches, compile_job, model_of
from penstock.tests.gpu.test_gpu_fused import Spelled

SIZE = GptSize(layers=4, width=32, heads=2, vocabulary=64, length=16)
counts = {"kernels": 0, "launches": 0}


class Card:
    """The answers to Inductor's questions to Triton about the GPU."""

    def get_current_target(self) -> GPUTarget:
        major, minor = torch.cuda.get_device_capability()
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        return torch.cuda.current_device()

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())


class Libdevice:
    """CUDA's library of mathematical functions, by torch: the interpreter has none."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(torch, name, None) or getattr(torch.special, name)

        def call(*args: Any) -> Any:
            like = next(arg for arg in args if isinstance(arg, tl.tensor))
            arrays = [np.asarray(arg.handle.data if isinstance(arg, tl.tensor) else arg) for arg in args]
            found = function(*map(torch.from_numpy, arrays)).numpy()
            return tl.tensor(TensorHandle(found, like.handle.dtype), like.type)

        return call


def prepare(tuner: CachingAutotuner) -> None:
    """Give a kernel its launcher."""
    if getattr(tuner, "launchers", None):
        return
    counts["kernels"] += 1
    config = max(tuner.configs, key=lambda each: math.prod(each.kwargs.values()))  # the fewest programs to interpret
    tuner.launchers = [lambda *args, stream, **named: launch(tuner, config, args, named)]


def launch(tuner: CachingAutotuner, config: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    counts["launches"] += 1
    constants = tuner.triton_meta.get("constants", {})
    given = [name for name in tuner.fn.arg_names if name not in config.kwargs and name not in constants]
    values = {**config.kwargs, **constants, **dict(zip(given, args, strict=False)), **named}
    grid = GridExpr.from_meta(tuner.inductor_meta, config).eval_slow(values)
    tuner.fn[grid](**{name: values[name] for name in tuner.fn.arg_names})


def run(tuner: CachingAutotuner, *args: Any, stream: Any, **named: Any) -> None:
    named.pop("benchmark_run", None)
    prepare(tuner)
    tuner.launchers[0](*args, stream=stream, **named)


def main() -> None:
    inductor.compile_threads = 1  # in this process, which is patched
    inductor.use_static_cuda_launcher = False  # whose kernels hide their code
    triton.runtime.driver.set_active(Card())
    triton_helpers.set_driver_to_gpu = lambda: None
    triton_helpers.libdevice = Libdevice()
    CachingAutotuner.precompile = lambda tuner, *args, **options: prepare(tuner)
    CachingAutotuner.run = run
    parity.exact_arithmetic()
    data = batches(SIZE)
    ways: list[tuple[nn.Module, dict[str, Any]]] = [
        (model_of(SIZE), {"compile_stages": True}), (Spelled(SIZE), {"kernels": "fused"}),
    ]  # fmt: skip
    for (model, options), precision in itertools.product(ways, ("fp32", "bf16")):
        torch._dynamo.reset()
        wanted = parity.train_eager(model, data, "cuda", precision)
        before = counts["launches"]
        with compile_job(model, data[0], precision=precision, **options) as job:
            found = parity.train_job(job, data)
            assert job.last.eager_blocks == {}, job.last.eager_blocks
        apart = parity.compare(found, wanted, parity.start_of(model))
        print(options, precision, apart, counts, flush=True)
        assert counts["launches"] > before and apart.fits(precision)


if __name__ == "__main__":
    main()
