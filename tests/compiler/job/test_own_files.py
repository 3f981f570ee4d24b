"""The files that `compile` prints are verified before they run, as a stranger's are."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.codegen import imports, paths
from penstock.codegen.imports import is_importable
from penstock.ir.errors import VerifyError
from penstock.runtime.device.file import open_directory
from penstock.runtime.source.trust import TRUSTED
from penstock.tests.compiler.eager_baseline import SGD, Eager, assert_close

FACTOR = 2.0


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / FACTOR

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / FACTOR


class Way(enum.Enum):
    UP = 1


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: Way) -> Tensor:
        ctx.sign = 1 if way is Way.UP else -1
        return x * ctx.sign

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.sign, None


@torch.library.custom_op("own_files::scale", mutates_args=())
def scale(x: Tensor, factor: float) -> Tensor:
    return x * factor


scale.register_fake(lambda x, factor: torch.empty_like(x))
scale.register_autograd(
    lambda ctx, gradient: (gradient * ctx.factor, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)


KINDS = {
    "a class of the script": lambda x: Halved.apply(x),
    "its function, taken from it": Halved.apply,
    "an enum of the script": lambda x: Turned.apply(x, Way.UP),
    "an op of torch.library": lambda x: torch.ops.own_files.scale(x, 3.0),
    "an overload of one": lambda x: torch.ops.own_files.scale.default(x, 3.0),
    "a function of torch": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
}


class Model(nn.Module):
    def __init__(self, kind: str = "", name: str = "linear"):
        super().__init__()
        torch.manual_seed(0)
        self.add_module(name, nn.Linear(4, 4))
        self.head = nn.Linear(4, 4)
        self.kind, self.name = kind, name

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = getattr(self, self.name)(x)
        return {"loss": self.head(KINDS[self.kind](h) if self.kind else h).square().mean()}


def compile_job(model: nn.Module, batch: Any, **options: Any) -> Any:
    hardware = penstock.Hardware.cpu(num_devices=1, memory="8MB")
    given = {"optimizer": SGD, "strategy": "balanced", "check": False, **options}
    return penstock.compile(model, hardware, example_inputs=batch, **given)


@pytest.mark.parametrize("kind", KINDS)
def test_the_user_s_own_code_is_no_stranger_s(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As if this file were the script. Where the files are loaded later, it is."""
    monkeypatch.setattr(imports, "is_importable", lambda name: name != __name__ and is_importable(name))
    model, batch = Model(kind), {"x": torch.randn(4, 4)}
    eager = Eager(model, micro_batches=1)
    with compile_job(model, batch, micro_batches=1) as job:
        assert not job.trust.whole and not job.trust.modules
        assert_close({"loss": job.step(batch)}, {"loss": eager.step(batch)}, 0.0)
        out = job.write(tmp_path / "out")
    with pytest.raises(VerifyError, match="trust=True"):
        penstock.load(out, model)
    open_directory(out, trust=TRUSTED)


def test_a_name_that_leaves_its_quotes_runs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As if the printer had forgotten the quoting: the files are verified, too, and say no."""
    canary, batch = tmp_path / "canary", {"x": torch.randn(4, 4)}
    name = f'"] = open({str(canary)!r}, "w") #'
    monkeypatch.setattr(paths, "quote", lambda text: f'"{text}"')
    job = compile_job(Model(name=name), batch, micro_batches=1)
    assert "open(" in job.code(0)
    with job, pytest.raises(VerifyError, match=r"device0.py:\d+: `open\(.* is no member that is printed"):
        job.step(batch)
    assert not canary.exists()
    with (
        pytest.raises(VerifyError, match="TextIO"),
        penstock.load(job.write(tmp_path / "out"), Model(name=name), trust=True) as loaded,
    ):
        loaded.step(batch)
    assert canary.exists(), "what is refused above would have run"


class MakesTensors(nn.Module):
    """Calls what lets torch's C code import parts of torch when it is first called in a process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.first(x)[:, [1, 0, 3, 2]] * torch.tensor(2.0)
        return {"loss": (self.second(h) + h.new_tensor([1.0, 2.0, 3.0, 4.0])).square().mean()}


def test_torch_may_import_its_own_parts_in_a_new_process() -> None:
    model, batch = MakesTensors(), {"x": torch.randn(4, 4)}
    eager = Eager(model, micro_batches=1)
    hardware = penstock.Hardware.cpu(num_devices=2, memory="8MB")
    options: dict[str, Any] = {"strategy": "gpipe", "micro_batches": 1, "optimizer": SGD}
    with penstock.compile(model, hardware, example_inputs=batch, **options) as job:
        assert_close({"loss": job.step(batch)}, {"loss": eager.step(batch)}, 1e-6)
