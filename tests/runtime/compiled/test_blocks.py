"""Blocks run by `torch.compile`: one compilation for a class, gradients of eager, and named reasons to stay eager."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from penstock.ir.errors import PlanError
from penstock.ir.precision import Precision
from penstock.ir.program import ParamSpec, StageSpec, TensorSpec
from penstock.runtime.compiled.block_trial import BlockRun, BlockTrial
from penstock.runtime.compiled.blocks import require_compiler
from penstock.runtime.functions import packed_attention
from penstock.runtime.modules import Scope, Stage, draw_at
from penstock.runtime.stage.runner import StageRunner
from penstock.tests.shown_elsewhere import slow_but

CPU = torch.device("cpu")
NUM_BLOCKS = 3
X = TensorSpec("x", (4, 8), "float32", requires_grad=True)
MOST = 1 << 20


class Block(Scope):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(x))


class Drawing(Block):
    def forward(self, x: Tensor) -> Tensor:
        draw_at(self, "dropout")
        return F.dropout(super().forward(x), 0.5)


class Bordered(Block):
    def forward(self, x: Tensor) -> Tensor:
        q = super().forward(x).view(1, 1, *x.shape)
        return packed_attention(q, q, q, documents=torch.zeros(1, len(x)), borders=torch.tensor([0, len(x)])).view_as(x)


class Breaking(Block):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


class Asking(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) if x.sum().item() > 0 else x - self.linear(x)


class Saving(Block):
    def forward(self, x: Tensor) -> Tensor:
        more = 0.0 * x.sin().exp() if torch.compiler.is_compiling() else 0.0
        return super().forward(x) + more


class Differing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.compiler.is_compiling()


class DifferingBehind(Block):
    def forward(self, x: Tensor) -> Tensor:
        other = x.detach() if torch.compiler.is_compiling() else x
        return super().forward(x) + other


def stage_of(kind: type[Block]) -> Stage:
    class Blocks(Stage):
        def __init__(self) -> None:
            super().__init__()
            self.h = Scope()
            for i in range(NUM_BLOCKS):
                self.h[i] = kind()

        def forward(self, x: Tensor) -> tuple[Tensor]:
            for i in range(NUM_BLOCKS):
                x = self.h[i](x)
            return (x,)

    return Blocks()


def run(kind: type[Block], compiler: str | None, keep: bool = True):
    torch.manual_seed(0)
    stage = stage_of(kind)
    weights = {name: p.detach().clone() for name, p in stage.named_parameters()}
    params = tuple(ParamSpec(name, tuple(p.shape), "float32") for name, p in weights.items())
    spec = StageSpec("stage0", (X,), (TensorSpec("y", (4, 8), "float32"),), params, kept_bytes=MOST)
    runner = StageRunner(spec, stage, CPU, "fp32", compiler=compiler)
    runner.try_kernels([keep])
    results = []
    for seed in range(2):
        runner.bind({name: w.clone() for name, w in weights.items()})  # each time elsewhere
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        (y,), kept = runner.forward([x], seed, keep)
        dinputs, grads = runner.backward(kept, [x], [torch.ones(4, 8)], None, seed)
        results += [y, *dinputs, *grads.values()]
    return runner, results


@pytest.mark.parametrize("keep", slow_but([True], [True, False]))
def test_one_compilation_serves_all_blocks_and_every_place_of_their_weights(keep: bool) -> None:
    torch._dynamo.reset()
    counters.clear()
    runner, found = run(Block, "aot_eager", keep=keep)
    assert counters["stats"]["unique_graphs"] == (1 if keep else 2)  # with autograd and, in a light forward, without
    assert runner.compiled is not None and not runner.compiled.reasons
    for mine, eager in zip(found, run(Block, None)[1], strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-5, atol=1e-6)  # the same kernels, in AOTAutograd's order


@pytest.mark.parametrize(
    ("kind", "backend", "reason"),
    [
        (Drawing, "aot_eager", "draws random numbers"),
        (Bordered, "eager", "borders of documents"),
        (Breaking, "eager", "torch.compile failed"),
        (Asking, "eager", "does not run on fake tensors"),
        (Saving, "eager", "would save"),
        (Differing, "eager", "outputs differ"),
        (DifferingBehind, "eager", "gradients differ"),
    ],
)
def test_a_class_that_stays_eager_is_named_and_exact(kind: type[Block], backend: str, reason: str) -> None:
    torch._dynamo.reset()
    runner, found = run(kind, backend)
    assert runner.compiled is not None and reason in runner.compiled.reasons[kind.__name__]
    eager = run(kind, None)[1]
    assert all(torch.equal(mine, want) for mine, want in zip(found, eager, strict=True))


def test_no_step_compiles_what_was_not_tried() -> None:
    torch._dynamo.reset()
    runner, _ = run(Block, "aot_eager")
    assert runner.compiled is not None and not runner.compiled.reasons
    counters.clear()
    x = torch.randn(5, 8)  # not the plan's shape
    with runner.compiled.run_compiled(nullcontext()), torch.no_grad():
        (found,) = runner.module(x)
    assert "no step compiles" in runner.compiled.reasons["Block"] and not counters["aot_autograd"]
    with torch.no_grad():
        assert torch.equal(found, runner.module(x)[0])


def test_a_gpu_without_triton_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils._triton.has_triton_package", lambda: False)
    with pytest.raises(PlanError, match="needs Triton"):
        require_compiler(torch.device("cuda"))
    require_compiler(torch.device("cuda"), "aot_eager")
    require_compiler(CPU)


@pytest.mark.parametrize(("workspace_bytes", "fits"), [(20, False), (70, True)])
def test_a_backward_that_adds_to_gradients_is_compared_with_its_like(workspace_bytes: int, fits: bool) -> None:
    """The first backward makes the gradients that the second finds, and takes more as written, too."""
    spec = StageSpec("stage0", (), (), (), backward_workspace_bytes=workspace_bytes)
    trial = BlockTrial(spec, CPU, Precision.of("fp32"), {})
    gradients = [torch.ones(2)]
    written = BlockRun(gradients=gradients, alive=10, whole_peaks=[100, 50])
    found = BlockRun(gradients=gradients, alive=10, whole_peaks=[100, 80])
    reason = trial._compare(written, found, keep=True)
    told = "a block would take 80 bytes in backward; as written, and in the plan's account, 50"
    assert reason == (None if fits else told)
