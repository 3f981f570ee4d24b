"""The optimizer that settings.json names: torch's own or an imported one, with plain data; else it needs trust."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from penstock.ir.errors import PlanError
from penstock.runtime.optimizer.written import read_optimizer

ADAMW: dict[str, Any] = {
    "path": "torch.optim:AdamW", "kwargs": {"lr": 1e-3, "betas": [0.9, 0.99]}, "scheduler_path": None,
    "scheduler_kwargs": {}, "groups": [],
}  # fmt: skip
COSINE = {"scheduler_path": "torch.optim.lr_scheduler:CosineAnnealingLR", "scheduler_kwargs": {"T_max": 10}}
WARMUP = {"scheduler_path": "transformers.optimization:get_constant_schedule", "scheduler_kwargs": {}}


@pytest.mark.parametrize("changes", [{}, COSINE, WARMUP], ids=["alone", "class", "transformers"])
def test_what_torch_and_imported_libraries_have_is_taken(changes: dict[str, Any]) -> None:
    if changes is WARMUP:
        pytest.importorskip("transformers.optimization")
    spec = read_optimizer(json.dumps(ADAMW | changes), "settings.json", trust=False)
    assert spec.path == "torch.optim:AdamW" and spec.kwargs["betas"] == (0.9, 0.99)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"path": "os:system"}, "is no torch.optim.Optimizer class"),
        ({"path": "torch.optim:lr_scheduler"}, "is no torch.optim.Optimizer class"),
        ({"path": "antigravity:fly"}, "'antigravity' is not imported here"),
        ({"path": "torch.optim:AdamW.__init__.__globals__"}, "not written as 'module:name'"),
        ({"path": "torch.optim:Absent"}, "cannot import 'Absent'"),
        ({"path": 3}, "it is written as 'module:name'"),
        ({"scheduler_path": "os:system"}, "is no class of torch.optim.lr_scheduler"),
        ({"scheduler_path": "builtins:exec"}, "is no class of torch.optim.lr_scheduler"),
        ({"scheduler_path": "torch.optim:AdamW"}, "is no class of torch.optim.lr_scheduler"),
        ({"kwargs": {"lr": "function:os:getpid"}}, "argument 'lr' is a function of this machine's own"),
        ({"scheduler_kwargs": {"lr_lambda": ["function:os:getpid"]}}, "argument 'lr_lambda' is a function"),
        ({"kwargs": {"lr": {"a": 1}}}, "numbers, texts and lists of them"),
        ({"groups": [{"names": None, "options": {"lr": "function:os:getpid"}}]}, "argument 'lr' is a function"),
        ({"groups": 3}, "not the optimizer of a job"),
        ({"kwargs": []}, "not the optimizer of a job"),
        ({"more": 1}, "not the optimizer of a job"),
    ],
)
def test_what_is_no_optimizer_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=f"^settings.json: .*{said}"):
        read_optimizer(json.dumps(ADAMW | changes), "settings.json", trust=False)
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("text", ["", "[]", "3", '"x"', "{", "[" * 100_000])
def test_what_is_no_document_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="not the optimizer of a job"):
        read_optimizer(text, "settings.json", trust=True)


def test_trust_takes_functions_as_arguments() -> None:
    scheduler = {
        "scheduler_path": "torch.optim.lr_scheduler:LambdaLR",
        "scheduler_kwargs": {"lr_lambda": "function:math:exp"},
    }
    text = json.dumps(ADAMW | scheduler)
    assert read_optimizer(text, "settings.json", trust=True).scheduler_kwargs == {"lr_lambda": "function:math:exp"}
    with pytest.raises(PlanError, match=r"trust=True"):
        read_optimizer(text, "settings.json", trust=False)
