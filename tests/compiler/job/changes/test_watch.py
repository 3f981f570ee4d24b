"""A step sees what the script has changed in Python since compile, or is refused by its name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.compiler.job.changes.watch import PythonValues
from penstock.errors import PlanError

SCALE = 1.0
norm = [0.0]  # has the name of a layer


class Config:
    factor, unused = 1.0, 0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)
        self.config, self.steps, self.rates, self.shift = Config(), 0, [1.0], torch.zeros(4)
        self.config.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.norm(self.a(x))) * self.config.factor + self.shift
        return self.b(torch.tanh(h) * self.rates[0])


def scale(value: Tensor) -> Tensor:
    return (lambda inner: inner * SCALE)(value)


def loss(output: Tensor, batch: Any) -> Tensor:
    return scale(output.mean())


@pytest.fixture(scope="module")
def running() -> Any:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(8, 4)
    hardware = penstock.Hardware.cpu(num_devices=1)
    options: dict[str, Any] = {"strategy": "balanced", "micro_batches": 2}
    with penstock.compile(net, hardware, example_inputs=x, loss_fn=loss, **options) as job:
        job.step(x)
        yield net, x, job


def change_global(net: Net) -> Callable[[], None]:
    globals()["SCALE"] = 2.0
    return lambda: globals().update(SCALE=1.0)


def change_hook(net: Net) -> Callable[[], None]:
    return net.a.register_forward_hook(lambda module, inputs, output: output * 2).remove


def change_module(net: Net) -> Callable[[], None]:
    before, net.drop = net.drop, nn.Identity()  # type: ignore[assignment]
    return lambda: setattr(net, "drop", before)


def change_list(net: Net) -> Callable[[], None]:
    net.rates[0] = 0.5
    return lambda: net.rates.__setitem__(0, 1.0)


def change_forward(net: Net) -> Callable[[], None]:
    net.a.forward = lambda x: x  # type: ignore[method-assign]
    return lambda: delattr(net.a, "forward")


def attribute(path: str, value: Any) -> Callable[[Net], Callable[[], None]]:
    def change(net: Net) -> Callable[[], None]:
        owner: Any = net
        *parts, name = path.split(".")
        for part in parts:
            owner = getattr(owner, part)
        before = getattr(owner, name)
        setattr(owner, name, value)
        return lambda: setattr(owner, name, before)

    return change


@pytest.mark.parametrize(
    "change, name",
    [
        (attribute("drop.p", 0.1), r"p of drop: 0\.5 before, 0\.1 now"),
        (lambda net: (net.norm.eval(), net.norm.train)[1], r"training of norm: True before, False now"),
        (attribute("config.factor", 2.0), r"factor of Config of the model: 1\.0 before, 2\.0 now"),
        (attribute("shift", torch.ones(4)), r"shift of the model"),
        (change_global, r"SCALE in scale: 1\.0 before, 2\.0 now"),
        (change_hook, r"forward hooks of a: none of that before, .*lambda.* now"),
        (change_module, "modules of the model: Dropout before, Identity now"),
        (change_list, "a list of the model"),
        (change_forward, "attributes of a"),
    ],
)
def test_a_change_that_forward_would_see_is_refused_until_it_is_undone(
    running: Any, change: Callable[[Net], Callable[[], None]], name: str
) -> None:
    net, x, job = running
    undo, count = change(net), job.step_count
    with pytest.raises(PlanError, match=rf"{name}(.|\n)*Set it back, or sync the job and compile the model again"):
        job.step(x)
    undo()
    job.step(x)
    assert job.step_count == count + 1


class Weighted:
    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        return output.mean() * self.factor


def test_a_loss_that_is_a_module_or_an_object_is_watched() -> None:
    x, hardware = torch.randn(8, 4), penstock.Hardware.cpu(num_devices=1)
    criterion, weighted = nn.SmoothL1Loss(beta=0.5), Weighted()

    def loss_of_criterion(output: Tensor, batch: Any) -> Tensor:
        return criterion(output, torch.zeros_like(output))

    for function, holder, name in ((loss_of_criterion, criterion, "beta"), (weighted, weighted, "factor")):
        with penstock.compile(
            nn.Linear(4, 1), hardware, example_inputs=x, loss_fn=function, strategy="balanced", micro_batches=2
        ) as job:
            job.step(x)
            setattr(holder, name, 0.25)
            with pytest.raises(PlanError, match=rf"{name} of .* before, 0\.25 now"):
                job.step(x)


def test_a_constant_that_is_written_is_refused(running: Any) -> None:
    net, x, job = running
    net.shift.add_(1)
    with pytest.raises(PlanError, match="a tensor of the model changed"):
        job.step(x)
    net.shift.sub_(1)
    job.step(x)


def test_a_global_with_the_name_of_an_attribute_may_change(running: Any) -> None:
    _, _, job = running
    norm[0] += 1.0
    assert not job._inputs.taken._watch.changes()


def test_a_change_without_effect_goes_on_and_is_soon_watched_no_more(running: Any) -> None:
    net, x, job = running
    net.config.unused = 5
    for count in range(2):
        net.steps = count + 1
        job.step(x)
    net.steps = 9
    with pytest.warns(UserWarning, match="steps of the model has changed 3 times and made no difference"):
        job.step(x)
    net.steps = 10
    assert not job._inputs.taken._watch.changes()


@pytest.mark.filterwarnings("error::penstock.compiler.stale.StaleModelWarning")
def test_a_new_trace_does_not_take_itself_for_the_script() -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(4, 4)
    net.steps = 0
    hardware = penstock.Hardware.cpu(num_devices=1, memory="64MB", dram="1GB")
    options: dict[str, Any] = {"optimizer": torch.optim.SGD, "loss_fn": loss, "strategy": "balanced"}
    with penstock.compile(net, hardware, example_inputs=x, micro_batches=2, **options) as job:
        job.step(x)
        net.steps = 1
        job.step(x)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if re.match("inner", "inner") else x


def test_patterns_that_other_code_uses_are_no_change() -> None:
    """Python keeps the expressions that it has compiled in a dict of its module `re`."""
    watch = PythonValues(Named(), ())
    assert not re.search("an expression of no other test", "")
    assert watch.changes() == {}


def test_what_is_compared_of_a_module_is_read_in_two_rows() -> None:
    """About 1.5 us a module on an idle core."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)) for _ in range(100)))
    watch = PythonValues(model, ())
    assert watch.changes() == {} and len(watch._rows) <= 2 * 301 + 10
