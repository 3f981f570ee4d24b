"""Block classes of a stage run by `torch.compile`: one compilation for all blocks of a class, eager where that fails.

In: a stage's module, whose repeated blocks are instances of one class. A class's forward is compiled, and its weights
are inputs of what comes out, so that the class's other blocks and weights that lie elsewhere run without another
compilation. The printed file stays what runs: nothing of it is rewritten.

torch keeps what it compiles in a directory, by default that of `cache_directory`, and finds it there the next time.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...ir.precision import Precision
from ..modules import Scope, Stage, draw_at

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
FP32_TOLERANCE = 1e-4  # of the largest value of an output: sums of up to thousands of terms in another order
LOW_TOLERANCE = 6e-2  # a few roundings to bf16, which fused kernels leave out
BACKEND = "inductor"


class CompiledBlocks:
    """The block classes of one stage. While `running`, a call of a block goes to what was compiled of its class.

    `reasons`: class name to why it runs eagerly, of those that do.
    """

    def __init__(self, stage: str, module: nn.Module, precision: Precision, backend: str = BACKEND):
        self.stage, self.precision, self.backend = stage, precision, backend
        self.reasons: dict[str, str] = {}
        self.blocks: dict[str, list[nn.Module]] = {}
        self._is_running = False
        for block in _outermost(module):
            self.blocks.setdefault(type(block).__name__, []).append(block)
        for name, blocks in self.blocks.items():
            if any(_draws(part) for part in blocks[0].modules()):
                self._leave(name, "it draws random numbers, which compiled kernels draw otherwise")
                continue
            for block in blocks:
                block.forward = functools.partial(self._call, block, name)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within this, blocks run compiled; outside of it as written."""
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    @property
    def is_any(self) -> bool:
        """Whether any class is to run compiled."""
        return self.blocks.keys() > self.reasons.keys()

    def leave_all(self, reason: str) -> None:
        """Let all classes run eagerly from now on, and warn of it."""
        for name in self.blocks.keys() - self.reasons.keys():
            self._leave(name, reason)

    def compare(self, eager: list[Tensor], compiled: list[Tensor]) -> None:
        """Leave all classes if outputs of the same inputs differ by more than the tolerance."""
        tolerance = FP32_TOLERANCE if self.precision.low_dtype is None else LOW_TOLERANCE
        for wanted, found in zip(eager, compiled, strict=True):
            if not wanted.is_floating_point():
                agrees = torch.equal(wanted, found)
            else:
                largest = wanted.abs().max().item() if wanted.numel() else 0.0
                agrees = torch.allclose(found, wanted, rtol=0.0, atol=tolerance * largest, equal_nan=True)
            if not agrees:
                self.leave_all(f"its outputs differ from eager ones by more than {tolerance:g} of the largest value")
                return

    def _leave(self, name: str, reason: str) -> None:
        self.reasons[name] = reason
        warnings.warn(f"compile_stages: {name} of {self.stage} runs eagerly: {reason}", stacklevel=2)

    def _call(self, block: nn.Module, name: str, *args: Any) -> Any:
        written = type(block).forward
        if not self._is_running or name in self.reasons:
            return written(block, *args)
        try:
            return compiled_forward(written, self.backend)(block, *args)
        except _failures() as error:
            self._leave(name, f"torch.compile failed: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
            return written(block, *args)


@functools.lru_cache(maxsize=256)
def compiled_forward(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """A class's forward, compiled when it is called: whole, and for the shapes of the plan, which never change."""
    os.environ.setdefault(CACHE_VARIABLE, str(cache_directory()))
    return torch.compile(forward, fullgraph=True, dynamic=False, backend=backend)


def cache_directory() -> Path:
    """Where compiled kernels are kept between runs, unless `CACHE_VARIABLE` says where."""
    home = os.environ.get("XDG_CACHE_HOME")
    return Path(home) / "penstock" / "compiled" if home else Path.home() / ".cache" / "penstock" / "compiled"


def _failures() -> tuple[type[Exception], ...]:
    from torch._dynamo import exc

    return exc.TorchDynamoException, exc.FailOnRecompileLimitHit


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    """The blocks in a module that are in no other block."""
    for child in module.children():
        if isinstance(child, Scope) and type(child) not in (Scope, Stage):
            yield child
        else:
            yield from _outermost(child)


def _draws(module: nn.Module) -> bool:
    return draw_at.__name__ in type(module).forward.__code__.co_names
