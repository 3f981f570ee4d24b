"""A trace that does something else than the model is refused at compile, whatever of it differs; equal ones pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.compiler.check import first_rows
from penstock.compiler.stale import mark
from penstock.ir.errors import CaptureError, StaleModelWarning
from penstock.runtime.torch_names import FakeTensor
from penstock.tests.compiler.reasons import reasons_of

HARDWARE = penstock.Hardware.cpu(num_devices=1, memory="64MB", dram="1GB")
EQUAL = "the op graph computes what the model computes in eager, on the first {} of example_inputs"
NOT = "the op graph was not compared with the model in eager: {}"


class Net(nn.Module):
    """Embedding, dropout, a batch norm's buffers, a tied head. `change` may do something else while it is traced."""

    def __init__(self, change: Callable[[Net, Tensor, bool], Tensor] = lambda net, x, traced: x) -> None:
        super().__init__()
        self.change = change
        self.embed, self.first, self.drop = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Dropout(0.2)
        self.norm, self.inner, self.head = (
            nn.BatchNorm1d(8),
            nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
            nn.Linear(8, 20),
        )
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.drop(self.norm(self.first(self.embed(ids)).mean(1)))
        x = self.inner(self.change(self, x, isinstance(x, FakeTensor)))
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def batch_of(rows: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 20, (rows, 6), generator=generator)
    return {"ids": ids, "labels": ids[:, 0]}


def comparison_of(model: nn.Module, batch: Any, **options: Any) -> str:
    options = {"strategy": "balanced", "micro_batches": 2, "optimizer": partial(torch.optim.SGD, lr=0.1), **options}
    return penstock.compile(model, HARDWARE, example_inputs=batch, **options).folder.settings.comparison


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-true"])
def test_a_model_that_is_traced_as_it_is_passes_and_is_left_alone(precision: str) -> None:
    model, state = Net(), torch.get_rng_state()
    before, attributes = copy.deepcopy(model.state_dict()), {n: set(vars(m)) for n, m in model.named_modules()}
    assert comparison_of(model, batch_of(), precision=precision) == EQUAL.format("2 rows")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {n: set(vars(m)) for n, m in model.named_modules()} == attributes
    assert all(p.grad is None and p.is_leaf for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_whose_job_has_newer_weights_is_compared_in_silence() -> None:
    model = Net()
    unsynced = mark(model)
    assert comparison_of(model, batch_of()) == EQUAL.format("2 rows")
    assert not unsynced.told
    with pytest.warns(StaleModelWarning):
        model(**batch_of())


def add_in_trace(net: Net, x: Tensor, traced: bool) -> Tensor:
    return x + (0.01 if traced else 0.0)


def detach_in_trace(net: Net, x: Tensor, traced: bool) -> Tensor:
    return x.detach() if traced else x


def count_in_trace(net: Net, x: Tensor, traced: bool) -> Tensor:
    net.seen.add_(2 if traced else 1)
    return x


def fail_in_eager(net: Net, x: Tensor, traced: bool) -> Tensor:
    if not traced:
        raise ValueError("only when it is traced")
    return x


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            add_in_trace,
            ["the loss is", "output 'logits' differs", "the first module whose result differs is 'inner.0'"],
        ),
        (detach_in_trace, ["gradients differ, that of"]),
        (count_in_trace, ["buffer 'seen' differs", "all modules return the same"]),
        (fail_in_eager, ["in eager it ends in ValueError: only when it is traced"]),
    ],
)
def test_what_differs_is_refused_by_name_unless_the_check_is_off(
    change: Callable[[Net, Tensor, bool], Tensor], words: list[str]
) -> None:
    with pytest.raises(CaptureError) as refused:
        comparison_of(Net(change), batch_of(), micro_batches=1)
    assert all(word in str(refused.value) for word in [*words, "check=False"]), refused.value
    assert comparison_of(Net(change), batch_of(), micro_batches=1, check=False) == ""


def test_losses_that_micro_batches_scale_are_compared_with_the_models_own() -> None:
    """A sum over rows is multiplied in the graph; a mean over targets divides by what the whole batch counts."""
    model, batch = nn.Sequential(nn.Linear(6, 3)), {"input": torch.randn(4, 6), "labels": torch.tensor([0, 1, 2, -100])}

    def sum_of_squares(output: Tensor, batch: Any) -> Tensor:
        return output.square().sum()

    def mean_of_targets(output: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output, batch["labels"])

    for loss_fn in (sum_of_squares, mean_of_targets):
        for weight in (None, lambda rows: len(rows["labels"])):
            found = comparison_of(model, batch, loss_fn=loss_fn, loss_weight=weight)
            assert found == EQUAL.format("2 rows")


def test_a_weight_that_forward_changes_is_compared_after_its_change() -> None:
    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.table = nn.Parameter(torch.randn(6)), nn.Embedding(20, 6, max_norm=0.1)

        def forward(self, ids: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.5, 0.5)
            return (self.table(ids) * self.weight).square().mean()

    model = Clamped()
    before = copy.deepcopy(model.state_dict())
    assert comparison_of(model, {"ids": batch_of()["ids"]}) == EQUAL.format("2 rows")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_rows_of_a_batch_of_another_size_than_the_most() -> None:
    sizes = {"ids": {1: torch.export.Dim("sequence", max=9)}, "labels": {}}
    assert comparison_of(Net(), batch_of(), dynamic_shapes=sizes) == EQUAL.format("2 rows")


@pytest.mark.slow
def test_what_is_not_compared_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = {name: {"shape": list(t.shape), "dtype": "int64"} for name, t in batch_of().items()}
    assert comparison_of(Net(), specs) == NOT.format("example_inputs has no values")
    with torch.device("meta"):
        meta = Net()
    assert comparison_of(meta, batch_of()) == NOT.format("its weights are not in memory")
    wrong = {**batch_of(), "ids": batch_of()["ids"] + 20}
    assert comparison_of(Net(), wrong).startswith(NOT.format("on example_inputs it fails: IndexError"))
    monkeypatch.setattr(first_rows, "MOST_BYTES", 100)
    assert comparison_of(Net(), batch_of()).startswith(NOT.format("gradients take 1.33 KiB"))


@pytest.mark.slow
def test_its_work_is_bounded_by_fewer_rows_and_then_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = nn.Sequential(nn.Linear(6, 3)), {"input": torch.randn(4, 6)}
    flops_of_row = 2 * 6 * 3 * 2  # a forward, and a backward for the weight alone
    options: dict[str, Any] = {"loss_fn": lambda output, batch: output.square().mean(), "micro_batches": 1}
    for rows, found in ((4, "4 rows"), (1, "row")):
        monkeypatch.setattr(first_rows, "MOST_FLOPS", 2 * rows * flops_of_row)
        assert comparison_of(model, batch, **options) == EQUAL.format(found)
    monkeypatch.setattr(first_rows, "MOST_FLOPS", 2 * flops_of_row - 1)
    assert comparison_of(model, batch, **options).startswith(NOT.format("a row takes more than"))


def test_little_work_is_done_on_one_thread_and_leaves_their_number() -> None:
    own, seen = torch.get_num_threads(), list[int]()

    def note_threads(net: Net, x: Tensor, traced: bool) -> Tensor:
        if not traced:
            seen.append(torch.get_num_threads())
        return x

    torch.set_num_threads(2)
    try:
        assert comparison_of(Net(note_threads), batch_of()) == EQUAL.format("2 rows")
        assert set(seen) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(own)


def test_explain_says_what_was_compared() -> None:
    options = {"strategy": "balanced", "micro_batches": 2, "optimizer": partial(torch.optim.SGD, lr=0.1)}
    job = penstock.compile(Net(), HARDWARE, example_inputs=batch_of(), **options)
    job.replanner = job._pages.replanner = None  # which would plan for other machines
    assert EQUAL.format("2 rows") in reasons_of(job)
