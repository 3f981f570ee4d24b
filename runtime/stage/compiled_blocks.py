"""Block classes of a stage run by `torch.compile`: one compilation for all blocks of a class, eager where that fails.

In: a stage's module, whose repeated blocks are instances of one class. A class's forward is compiled, and its weights
are inputs of what comes out, so that the class's other blocks, those of other stages in the process, and weights that
lie elsewhere run without another compilation. The printed file stays what runs: nothing of it is rewritten.

torch keeps what it compiles on disk and finds it there the next time, in its own directory: that of the environment
variable TORCHINDUCTOR_CACHE_DIR, else a folder of the user's among temporary files.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...ir.precision import Precision
from ..modules import Scope, Stage, draw_at

FP32_TOLERANCE = 1e-4  # of the largest value of an output: sums of up to thousands of terms in another order
LOW_TOLERANCE = 6e-2  # a few roundings to bf16, which fused kernels leave out
BACKEND = "inductor"

DRAWS = "it draws random numbers, which compiled kernels draw otherwise"
KEEPS = "the plan keeps results of single calls, which compiled kernels do not make"


class CompiledBlocks:
    """The block classes of one stage, of which those without a reason run compiled once they were tried.

    `blocks`: class name to its blocks, without those inside of another block. `reasons`: class name to why it runs
    eagerly, of those that do.
    """

    def __init__(self, module: nn.Module, precision: Precision, backend: str = BACKEND):
        self.precision, self.backend = precision, backend
        self.reasons: dict[str, str] = {}
        self.blocks: dict[str, list[nn.Module]] = {}
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._is_tried = self._is_running = False
        for block in _outermost(module):
            self.blocks.setdefault(type(block).__name__, []).append(block)
        for name, blocks in self.blocks.items():
            if any(_draws(part) for part in blocks[0].modules()):
                self.reasons[name] = DRAWS
                continue
            for block in blocks:
                block.forward = functools.partial(self._call, block, name)

    @property
    def must_try(self) -> bool:
        """Whether `compare` is to be called before the stage's next forward."""
        return not self._is_tried and self.blocks.keys() > self.reasons.keys()

    def compare(self, run: Callable[[bool], tuple[list[Tensor], int]], counted_bytes: int) -> None:
        """Run the same inputs eagerly and compiled: `run` says what comes out, and with True the bytes saved for
        backward. All classes stay eager where outputs differ, or where more is saved than the plan has counted."""
        eager, _ = run(False)
        self._is_tried = True
        compiled, saved_bytes = run(True)
        tolerance = FP32_TOLERANCE if self.precision.low_dtype is None else LOW_TOLERANCE
        if not all(_agree(*pair, tolerance) for pair in zip(eager, compiled, strict=True)):
            self.leave_all(
                f"outputs of its stage differ from eager ones by more than {tolerance:g} of the largest value"
            )
        elif saved_bytes > counted_bytes:
            self.leave_all(f"its stage would save {saved_bytes} bytes for backward; the plan counts {counted_bytes}")

    def leave_all(self, reason: str) -> None:
        """Let all classes run eagerly from now on."""
        self.reasons = {**dict.fromkeys(self.blocks, reason), **self.reasons}

    def within(self, calls: AbstractContextManager[Any]) -> AbstractContextManager[None]:
        """Within this, blocks run compiled once they were tried. Where single `calls` are kept or taken they do not."""
        return self._running() if self._is_tried and isinstance(calls, nullcontext) else nullcontext()

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def _call(self, block: nn.Module, name: str, *args: Any) -> Any:
        if self._is_running and name not in self.reasons:
            try:
                return self._compiled_forward(block, name)(block, *args)
            except _failures() as error:
                first = str(error).strip().partition("\n")[0]
                self.reasons[name] = f"torch.compile failed: {type(error).__name__}: {first}"
        return type(block).forward(block, *args)

    def _compiled_forward(self, block: nn.Module, name: str) -> Callable[..., Any]:
        """Compiled at its first call: whole, and for the plan's shapes, which never change. torch knows the blocks of
        other stages by their code."""
        if name not in self._compiled:
            forward = type(block).forward
            self._compiled[name] = torch.compile(forward, fullgraph=True, dynamic=False, backend=self.backend)
        return self._compiled[name]


def _failures() -> tuple[type[Exception], ...]:
    from torch._dynamo import exc

    return exc.TorchDynamoException, exc.FailOnRecompileLimitHit


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    """The blocks in a module that are in no other block."""
    for child in module.children():
        if isinstance(child, Scope) and type(child) is not Scope and not isinstance(child, Stage):
            yield child
        else:
            yield from _outermost(child)


def _draws(module: nn.Module) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and draw_at.__name__ in code.co_names


def _agree(eager: Tensor, compiled: Tensor, tolerance: float) -> bool:
    if not eager.is_floating_point() or not eager.numel():
        return torch.equal(eager, compiled)
    largest = eager.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    return torch.allclose(compiled, eager, rtol=0.0, atol=tolerance * largest, equal_nan=True)
