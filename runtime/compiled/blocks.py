"""Block classes of a stage run by `torch.compile`: one compilation for all blocks of a class, eager where that fails.

In: a stage's module, whose repeated blocks are instances of one class. A class's forward is compiled, and its weights
are inputs of what comes out, so that the class's other blocks, those of other stages in the process, and weights
elsewhere run without another compilation. The printed file stays what runs: nothing of it is rewritten.

torch keeps what it compiles on disk and finds it there the next time, in its own directory: that of the environment
variable TORCHINDUCTOR_CACHE_DIR, else a folder of the user's among temporary files.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ...ir.errors import PlanError
from ..modules import Scope, Stage, draw_at
from .block_trial import BlockTrial, TriedCall

BACKEND = "inductor"

DRAWS = "it draws random numbers, which compiled kernels draw otherwise"
BORDERS = "its attention takes borders of documents, and a trial has none"
KEEPS = "the plan keeps results of single calls, which compiled kernels do not make"
LATE = "a step calls it otherwise than it was tried, and no step compiles"


class CompiledBlocks:
    """The block classes of one stage, of which those without a reason run compiled once they were tried.

    `blocks`: class name to its blocks, without those inside of another block. `reasons`: class name to why it runs
    eagerly, of those that do.
    """

    def __init__(self, module: nn.Module, backend: str = BACKEND):
        self.backend = backend
        self.reasons: dict[str, str] = {}
        self.blocks: dict[str, list[nn.Module]] = {}
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._calls: dict[str, dict[Any, TriedCall]] | None = None  # while they are looked for
        self._is_tried = self._is_running = False
        for block in _outermost(module):
            self.blocks.setdefault(type(block).__name__, []).append(block)
        for name, blocks in self.blocks.items():
            if any(_draws(part) for part in blocks[0].modules()):
                self.reasons[name] = DRAWS
                continue
            if any(_takes_borders(part) for part in blocks[0].modules()):
                self.reasons[name] = BORDERS
                continue
            for block in blocks:
                block.forward = functools.partial(self._call, block, name)

    def try_classes(self, run: Callable[[], None], trial: BlockTrial, keeps: Sequence[bool]) -> None:
        """Compile every kind of call that `run`, the stage on fake tensors, makes of a class, and try it. `keeps`: with
        autograd, without, or both. From then on nothing is compiled."""
        if self.blocks.keys() <= self.reasons.keys():
            return
        try:
            calls = self._find_calls(run)
        except (RuntimeError, TypeError, ValueError) as error:  # what the user's forward may raise
            self.leave_all(f"its stage does not run on fake tensors: {_first_line(error)}")
            return
        for name, kinds in calls.items():
            for call in kinds.values():
                for keep in keeps:
                    self._try(name, call, trial, keep)
        self._is_tried = True

    def _find_calls(self, run: Callable[[], None]) -> Mapping[str, dict[Any, TriedCall]]:
        found: dict[str, dict[Any, TriedCall]] = {}
        self._calls = found
        try:
            run()
        finally:
            self._calls = None
        return found

    def _try(self, name: str, call: TriedCall, trial: BlockTrial, keep: bool) -> None:
        if name in self.reasons:
            return
        try:
            with _compiling():
                reason = trial.reason(call, self._compiled_forward(call.block, name), keep)
        except _failures() as error:
            reason = f"torch.compile failed: {_first_line(error)}"
        if reason is not None:
            self.reasons[name] = reason

    def leave_all(self, reason: str) -> None:
        """Let all classes run eagerly from now on."""
        self.reasons = {**dict.fromkeys(self.blocks, reason), **self.reasons}

    def run_compiled(self, calls: AbstractContextManager[Any]) -> AbstractContextManager[None]:
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
        if self._calls is not None:
            call = TriedCall(block, args)
            self._calls.setdefault(name, {}).setdefault(call.kind, call)
        elif self._is_running and name not in self.reasons:
            try:
                return self._compiled_forward(block, name)(block, *args)
            except _failures():
                self.reasons[name] = LATE
        return type(block).forward(block, *args)

    def _compiled_forward(self, block: nn.Module, name: str) -> Callable[..., Any]:
        """Compiled at its first call: whole, and for the plan's shapes, which never change. torch knows the blocks of
        other stages by their code."""
        if name not in self._compiled:
            forward, backend = type(block).forward, _only_in_trials(self.backend)
            self._compiled[name] = torch.compile(forward, fullgraph=True, dynamic=False, backend=backend)
        return self._compiled[name]


def require_compiler(device: torch.device, backend: str = BACKEND) -> None:
    """Raises `PlanError` where torch's compiler lacks what it needs for this device."""
    if lacks_triton(device, backend):
        raise PlanError(
            "compile_stages=True on a GPU needs Triton, with which torch.compile writes its kernels, and this Python "
            f"has none. Install the triton that torch {torch.__version__} requires, or leave compile_stages out"
        )


def lacks_triton(device: torch.device, backend: str = BACKEND) -> bool:
    """Whether torch's compiler cannot write kernels for a GPU."""
    from ..torch_names import has_triton_package

    return device.type == "cuda" and backend == BACKEND and not has_triton_package()


_trials = 0  # those under way in this process


@contextmanager
def _compiling() -> Iterator[None]:
    global _trials
    _trials += 1
    try:
        yield
    finally:
        _trials -= 1


@functools.cache
def _only_in_trials(backend: str) -> Callable[..., Any]:
    """The backend of this name, one object for all stages of the process, so that torch shares what it compiled. It
    raises once trials are over: a step has no time for a compilation, with messages under way."""
    from ..torch_names import lookup_backend

    compile_graph = lookup_backend(backend)

    def compile_in_trial(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        if not _trials:
            raise RuntimeError(LATE)
        return compile_graph(graph, inputs)

    return compile_in_trial


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _failures() -> tuple[type[Exception], ...]:
    from ..torch_names import dynamo_errors as exc

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


def _takes_borders(module: nn.Module) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and any(isinstance(const, tuple) and "borders" in const for const in code.co_consts)
