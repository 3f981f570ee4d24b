"""Each entry of a batch goes to forward, to the loss, or is said to be read by nobody."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.compiler.capture.trace import trace
from penstock.graph.opgraph import OpGraph
from penstock.ir.errors import CaptureError


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y: Tensor = self.layer(x)
        return y if bias is None else y * bias


class Wrapper(nn.Module):
    """Names one argument and hands on the others, as a PeftModel does."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Inner()

    def forward(self, x: Tensor, **kwargs: Tensor) -> Tensor:
        return self.model(x, **kwargs)  # type: ignore[no-any-return]


def loss_of(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (output - batch["targets"]).square().mean() if "targets" in batch else output.square().mean()


def graph_of(*keys: str) -> OpGraph:
    return trace(Wrapper(), {key: torch.randn(3, 4) for key in keys}, loss_fn=loss_of)


def readers(graph: OpGraph) -> dict[str, int]:
    return {str(node.target): len(node.users) for node in graph.nodes if node.op == "placeholder"}


def test_forward_gets_what_it_takes_by_kwargs() -> None:
    graph = graph_of("x", "bias")
    assert readers(graph)["bias"] == 1 and not graph.notes


def test_what_a_module_inside_does_not_take_is_for_the_loss() -> None:
    graph = graph_of("x", "bias", "targets")
    assert readers(graph) == {"x": 1, "bias": 1, "targets": 1} and not graph.notes


def test_an_entry_that_nobody_reads_is_said() -> None:
    assert graph_of("x", "weights").notes == ("neither forward nor the loss reads 'weights' of the batch",)


def test_without_a_loss_function_forward_gets_all() -> None:
    with pytest.raises(CaptureError, match="unexpected keyword argument 'weights'"):
        trace(Wrapper(), {"x": torch.randn(3, 4), "weights": torch.randn(3, 4)})


def test_inputs_with_capitals_train() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, KL_x: Tensor, pixelValues: Tensor) -> Tensor:
            return (self.layer(KL_x) - pixelValues).square().mean()

    model, batch = Model(), {"KL_x": torch.randn(4, 4), "pixelValues": torch.randn(4, 4)}
    hardware = penstock.Hardware.cpu(1, memory="64MB")
    with penstock.compile(model, hardware, example_inputs=batch, strategy="balanced", micro_batches=2) as job:
        assert float(job.step(batch)) == pytest.approx(float(model(**batch).detach()), rel=1e-6)
