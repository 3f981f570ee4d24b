"""Tensors that cannot be trained on are refused before anything runs, and the devices live on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import penstock
from penstock.compiler.batches.plain_tensor import plain_tensor
from penstock.compiler.job.job import Job
from penstock.ir.errors import BatchError
from penstock.tests.compiler.eager_baseline import MICRO_BATCHES, SGD, zoo_case


class Adding(Tensor):
    """A subclass that only adds a method, as those of torchvision."""

    def doubled(self) -> Tensor:
        return self * 2


class Elsewhere(Tensor):
    """A subclass whose values are not in its own memory."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        made: Elsewhere = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("its values were asked for")


def free(value: Tensor) -> Tensor:
    value = value.clone()
    value.untyped_storage().resize_(0)
    return value


def fake(value: Tensor) -> Tensor:
    return FakeTensorMode().from_tensor(value)


UNUSABLE = [
    (lambda x: x.to_sparse(), r"has the layout sparse_coo; pass value\.to_dense\(\)"),
    (lambda x: x.to_sparse_csr(), r"has the layout sparse_csr; pass value\.to_dense\(\)"),
    (lambda x: x.to_mkldnn(), r"has the layout _mkldnn; pass value\.to_dense\(\)"),
    (lambda x: torch.nested.as_nested_tensor(list(x), layout=torch.jagged), "is nested; pad"),
    (lambda x: torch.nested.as_nested_tensor(list(x), layout=torch.strided), "is nested; pad"),
    (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8), r"is quantized \(quint8\); .*dequantize"),
    (lambda x: x.to("meta"), "is on the meta device and has no values"),
    (fake, r"is a torch\._subclasses\.fake_tensor\.FakeTensor"),
    (Elsewhere, r"is a .*\.Elsewhere, whose values are stored elsewhere"),
    (lambda x: x.clone().requires_grad_(), r"requires a gradient.*value\.detach\(\)"),
    (free, "has no memory any more"),
    (lambda x: {"shape": [8, 4], "dtype": "float32"}, "only describes a tensor"),
]


@pytest.mark.filterwarnings("ignore")  # of torch, on kinds of tensors that it calls beta
@pytest.mark.parametrize(("make", "said"), UNUSABLE, ids=[said.split(";")[0] for _, said in UNUSABLE])
def test_it_is_named_with_a_way_out(make: Any, said: str) -> None:
    with pytest.raises(BatchError, match=rf"batch\['x'\] {said}.*Nothing has run"):
        plain_tensor("x", make(torch.randn(8, 4)))


def test_what_has_values_passes_unchanged() -> None:
    whole = torch.randn(8, 6, dtype=torch.complex64)
    with torch.inference_mode():
        inferred = torch.ones(8, 4)
    plain = [
        torch.randn(4, 8).t(),
        torch.randn(1, 4).expand(8, 4),
        torch.randn(8, 8)[:, ::2],
        torch.randn(8, 4).as_subclass(Adding),
        nn.Parameter(torch.randn(8, 4), requires_grad=False),
        whole.conj(),
        whole.conj().imag,  # its negation is pending
        torch.empty(0, 4),
        inferred,
    ]
    for value in plain:
        found = plain_tensor("x", value)
        assert type(found) is Tensor and torch.equal(found, value.as_subclass(Tensor))
        assert not found.is_conj() and not found.is_neg() and not found.is_inference()


def job_on(num_devices: int) -> tuple[Job, Any]:
    model, batch = zoo_case("mlp")
    hardware = penstock.Hardware.cpu(num_devices=num_devices, memory="64MB")
    chosen = {"optimizer": SGD, "micro_batches": MICRO_BATCHES, "strategy": "balanced"}
    return penstock.compile(model, hardware, example_inputs=batch, **chosen), batch


@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=[pytest.mark.multi, pytest.mark.slow])])
def test_the_devices_live_on(num_devices: int) -> None:
    """The refused batches leave no trace: training is as without them."""
    job, batch = job_on(num_devices)
    plain, _ = job_on(1)
    name = next(name for name, value in batch.items() if value.is_floating_point())
    with job, plain:
        expected = [float(plain.step(batch)) for _ in range(2)]
        losses = [float(job.step(batch))]
        for make in (lambda x: x.to_sparse(), lambda x: x.to("meta"), fake, lambda x: x.clone().requires_grad_()):
            for call in (job.step, job.evaluate):
                with pytest.raises(BatchError, match=name):
                    call({**batch, name: make(batch[name])})
        with torch.inference_mode():
            inferred = {key: value.clone() for key, value in batch.items()}
        losses.append(float(job.step(inferred)))
        assert losses == pytest.approx(expected, rel=1e-6)
