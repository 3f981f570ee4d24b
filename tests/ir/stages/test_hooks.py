"""A gradient hook as data: what it may call, how it crosses a file, and where programs run it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from penstock.ir.documents import Unreadable
from penstock.ir.errors import VerifyError
from penstock.ir.program import Earlier, HookCall, Interface, Program, elementwise, parse_program, print_program
from penstock.ir.verify import verify
from penstock.runtime.optimizer.hooks import call_hooks
from penstock.tests.ir.program.two_stages import interface_of, models, training, with_hooks

CLAMP = HookCall("aten.clamp.default", (Earlier(0), -0.5, None))
CAST = HookCall("aten._to_copy.default", (Earlier(1),), (("dtype", "float64"),))
REFUSED = [
    "aten.sum.default", "aten.mul_.Tensor", "aten.mul.out", "aten.rand_like.default", "aten.bernoulli.p", "aten.mul",
    "aten.copy_.default", "aten.mm.default", "os.system.default", "aten.__class__.mro", "aten..", "",
    "aten.from_file.default",
]  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_only_elementwise_operators_are_found(name: str) -> None:
    assert elementwise(name) is None


def test_a_hook_is_run_as_written() -> None:
    gradient = torch.tensor([-2.0, 0.25])
    assert call_hooks((CLAMP, CAST), gradient).equal(torch.tensor([-0.5, 0.25], dtype=torch.float64))
    assert str(CLAMP) == "clamp(v0, -0.5, None)" and str(CAST) == "_to_copy(v1, dtype=float64)"


def hooked_interface() -> Interface:
    return with_hooks(interface_of(*models()), CLAMP, CAST)


def test_hooks_cross_a_file() -> None:
    interface = hooked_interface()
    assert Interface.from_json(interface.to_json()) == interface


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "aten.sum.default"}, "'aten.sum.default', which is no element-wise operator"),
        ({"op": "os.system.default"}, "which is no element-wise operator"),
        ({"args": [{"index": 2}]}, "reads the result of a later call"),
        ({"args": [{"index": -1}]}, "reads the result of a later call"),
        ({"args": [["nested"]]}, "args"),
    ],
)
def test_a_hook_of_a_stranger_is_checked(change: dict[str, object], message: str) -> None:
    document = json.loads(hooked_interface().to_json())
    document["stages"]["stage0"]["params"][0]["hook"][1].update(change)
    with pytest.raises(Unreadable, match=message):
        Interface.from_json(json.dumps(document))


def resident() -> list[Program]:
    return training(hooked_interface(), swap=False, max_norm=1.0)


def hook_line(program: Program) -> tuple[str, str]:
    """The line of the program that runs hooks, and the name of the gradients that it takes."""
    line = next(line for line in print_program(program).splitlines() if "rt.hook(" in line)
    return f"{line}\n", line.partition("rt.hook(")[2].rstrip(")")


def left_out(text: str, line: str, given: str) -> str:
    return text.replace(line, "").replace("g_hooked", given)


def twice(text: str, line: str, given: str) -> str:
    again = line.replace(f"hook({given})", "hook(g_hooked)").replace("g_hooked =", "g_again =")
    return text.replace("g_hooked", "g_again").replace(line.replace("g_hooked", "g_again"), line + again)


def behind_the_norm(text: str, line: str, given: str) -> str:
    norm = next(f"{row}\n" for row in text.splitlines() if "rt.norm(" in row)
    return text.replace(line, "").replace(norm, norm.replace("g_hooked", given) + line)


WRONG = {left_out: "have not run", twice: "run twice", behind_the_norm: "have not run"}


def test_programs_run_hooks_once_before_anything_looks_at_the_gradients() -> None:
    programs = resident()
    assert all(print_program(p).count("rt.hook(") == 1 for p in programs)
    verify(programs)


@pytest.mark.parametrize("edit", WRONG, ids=lambda edit: edit.__name__)
def test_other_programs_are_refused(edit: Callable[[str, str, str], str]) -> None:
    programs = resident()
    text = edit(print_program(programs[0]), *hook_line(programs[0]))
    with pytest.raises(VerifyError, match=f"the gradient hooks of stage0 {WRONG[edit]}"):
        verify([parse_program(text, programs[0].interface, 0), programs[1]])
