"""Models that call kernels of optional packages: the reference code is traced where transformers has it, or the package
is named."""

from __future__ import annotations

import copy
import sys
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import penstock
from penstock.bench.hybrids import model_class, packed_batch, token_batch
from penstock.bench.model_zoo.compare import SGD, build, train
from penstock.compiler.capture.trace import trace
from penstock.errors import CaptureError
from penstock.tests.releases import needs_transformers

TOKENS = 6


def need_gpu(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("no CUDA device")


@pytest.fixture
def fake_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """LFM2 as it is where causal-conv1d is installed, which runs on GPUs alone."""
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback as choose
    from transformers.models.lfm2 import modeling_lfm2

    package = ModuleType("causal_conv1d")
    package.causal_conv1d_fn = need_gpu  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "causal_conv1d", package)
    own = modeling_lfm2.causal_conv1d_fn.__wrapped__
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", choose("causal_conv1d_fn", "causal_conv1d")(own))


@pytest.mark.slow
def test_reference_code_is_traced_in_place_of_kernels(fake_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(model_class("Lfm2"))
    batch = token_batch(TOKENS, "left")
    with pytest.raises(RuntimeError, match="no CUDA device"):
        model(**batch)
    notes = trace(model, batch).notes
    assert any("kernels of causal-conv1d (causal_conv1d_fn), which no program can hold" in note for note in notes)
    twin = copy.deepcopy(model)
    hardware = penstock.Hardware.cpu(num_devices=1, memory="1GB", dram="2GB")
    job = penstock.compile(model, hardware, example_inputs=batch, optimizer=SGD, strategy="balanced", micro_batches=2)
    with job:
        found = [float(job.step(batch)) for _ in range(2)]
    monkeypatch.undo()
    assert found == pytest.approx(train(twin, batch, 2)["losses"], rel=1e-5)


def test_without_packages_nothing_is_noted() -> None:
    assert not any("kernels" in note for note in trace(build(model_class("Lfm2")), token_batch(TOKENS, "none")).notes)


@needs_transformers("5.24", "its model takes borders that only kernels keep, and ignores them")
def test_borders_that_only_kernels_keep_are_refused_by_name() -> None:
    """causal-conv1d is absent, and the batch has `seq_idx`."""
    packed = packed_batch(TOKENS)
    packed["seq_idx"] = (packed["position_ids"] == 0).cumsum(-1).int()
    with pytest.raises(CaptureError, match=r"Lfm2ShortConv carries its state .*causal_conv1d.*one document in a row"):
        trace(build(model_class("Lfm2")), packed)


def test_kernels_of_the_hub_are_refused_by_name() -> None:
    model = build(model_class("Lfm2"))
    model._use_kernels = True  # type: ignore[assignment]
    with pytest.raises(CaptureError, match=r"Lfm2ForCausalLM was loaded with use_kernels=True: .*without use_kernels"):
        trace(model, token_batch(TOKENS, "none"))


class Layer(nn.Module):
    """A layer of own code, whose `call` reaches a package of kernels."""

    def __init__(self, call: Any):
        super().__init__()
        self.inner, self.call = nn.Linear(4, 4), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.inner(x)).sum()  # type: ignore[no-any-return]


def absent(x: Tensor) -> Tensor:
    import mamba_ssm  # type: ignore[import-not-found]

    return mamba_ssm.scan(x)  # type: ignore[no-any-return]


def test_a_package_that_is_absent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)
    with pytest.raises(CaptureError, match=r"Layer needs the kernels of mamba-ssm, which is not installed: choose"):
        trace(Layer(absent), {"x": torch.ones(2, 4)})


def test_a_kernel_that_fails_on_fake_tensors_is_named() -> None:
    package = ModuleType("fla")
    exec("def scan(x):\n    raise RuntimeError('Pointer argument cannot be accessed')", package.__dict__)
    with pytest.raises(CaptureError, match=r"Layer calls kernels of flash-linear-attention, which no program can hold"):
        trace(Layer(partial(package.scan)), {"x": torch.ones(2, 4)})
