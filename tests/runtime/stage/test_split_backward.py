"""A backward in two halves: bit for bit that of one, whatever the graph, and refused where its text is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from penstock.ir import ops
from penstock.ir.errors import VerifyError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import infer_all, profile_memory, work_of
from penstock.ir.verify import verify
from penstock.runtime.simulate import simulate
from penstock.runtime.stage.split_backward import input_half, weight_half
from penstock.tests.ir.program.handmade import pipeline
from penstock.tests.ir.verify.test_rules import edit

WIDTH = 8
SPLIT = {"fetched": False, "kept": True, "split": True}


class Knotted(nn.Module):
    """A layer that is used twice with others between, a vector that enters before and after it, and an output that
    no input reaches and that shares a function of a parameter with the other."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.between = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.vector, self.apart = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.unused = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = self.twice(torch.tanh(self.twice(x + self.vector)) + self.between(y)) * self.vector
        apart = self.apart.abs()  # of a sum of gradients it is exactly the sum of each
        return (h + y) * apart, apart * self.between[1].bias


def gradients(split: bool) -> dict[str, Tensor | None]:
    """Of the parameters after two micro-batches, and of the inputs of the second."""
    torch.manual_seed(0)
    module = Knotted()
    params = dict(module.named_parameters())
    for m in range(2):
        made = torch.Generator().manual_seed(m)
        leaves = [torch.randn(3, WIDTH, generator=made).requires_grad_() for _ in range(2)]
        douts = [torch.randn(3, WIDTH, generator=made), torch.randn(WIDTH, generator=made)]
        edges = [get_gradient_edge(out) for out in module(*leaves)]
        if not split:
            torch.autograd.backward(edges, douts)
            continue
        before = {name: p.grad for name, p in params.items()}
        rest = input_half(edges, douts, leaves, params)
        assert all(p.grad is before[name] for name, p in params.items())
        weight_half(rest, params)
        assert not rest.tensors()
    return {name: p.grad for name, p in params.items()} | {f"input {i}": leaf.grad for i, leaf in enumerate(leaves)}


def test_halves_give_the_gradients_of_the_whole_bit_for_bit() -> None:
    whole, halves = gradients(split=False), gradients(split=True)
    for name, want in whole.items():
        found = halves[name]
        assert want is found is None or (found is not None and want is not None and torch.equal(found, want)), name
    assert whole["unused"] is None and whole["input 1"] is not None


LAST = '    g1_m1 = rt.backward_weight("stage1", w1, r1_m1, g1_m0, micro_batch=1)\n'
WRONG = {
    "another micro-batch": ((("r1_m1, g1_m0, micro_batch=1", "r1_m1, g1_m0, micro_batch=0"),), "of micro-batch 1"),
    "twice": (
        (("    g1_m1 =", LAST.replace("g1_m1", "g9", 1).replace("g1_m0", "None") + "    rt.free(g9)\n    g1_m1 ="),),
        "is done in",
    ),
    "never": (
        ((LAST, ""), ('rt.step("stage1", g1_m1)\n    rt.free(g1_m1)', 'rt.step("stage1", g1_m0)\n    rt.free(g1_m0)')),
        "no backward_weight of stage1 for micro-batch 1",
    ),
    "gradients left out": (
        (("r1_m1, g1_m0,", "r1_m1, None,"), ("rt.free(r1_m1)", "rt.free(r1_m1, g1_m0)")),
        "lack micro-batch 0",
    ),
    "used behind": ((("rt.free(r1_m0)", "rt.free(r1_m0, k1_m0)"),), "taken over by `backward_input`"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_texts_are_refused(name: str) -> None:
    changes, match = WRONG[name]
    with pytest.raises(VerifyError, match=match):
        verify(edit(pipeline(2, 2, 2, **SPLIT), 1, *changes))


def test_both_halves_run_on_the_same_weights() -> None:
    program = pipeline(1, 2, 1, split=True, prefetch=False)
    again = '    w9 = rt.fetch("stage1.weights")\n    g1_m0 = rt.backward_weight("stage1", w9'
    changes = (('    g1_m0 = rt.backward_weight("stage1", w1', again), ("rt.free(w1, r1_m0", "rt.free(w1, w9, r1_m0"))
    with pytest.raises(VerifyError, match="left by a backward on `w1`, but this half runs on `w9`"):
        verify(edit(program, 0, *changes))


def test_a_stage_whose_backward_has_one_half_is_not_split() -> None:
    programs = pipeline(2, 2, 2, **SPLIT)
    nodes = {node.name: node for node in programs[0].graph.nodes}
    with pytest.raises(VerifyError, match="stage0 has no input that needs a gradient; its backward has one half"):
        operands = ("stage0", nodes["w0"], nodes["k0_m0"], [nodes["x_m0"]], [nodes["dy0_m0"]])
        programs[0].emit(ops.backward_input, *operands, micro_batch=0)


def test_halves_do_together_what_the_whole_does_and_hold_what_is_saved_in_between() -> None:
    (whole,), (halves,) = (pipeline(1, 2, 3, fetched=False, kept=True, split=split) for split in (False, True))
    stages = {n: replace(s, split_bytes=4096, weight_share=0.25) for n, s in whole.interface.stages.items()}
    flops = {}
    for program in (whole, halves):
        infer_all(program.with_interface(stages=stages))
        done = [(n.target, work_of(program, n)) for n in program.ops() if str(n.args[0]) == "stage1"]
        flops[program] = {op: sum(w.flops for o, w in done if o is op) for op, _ in done}
    spec = stages["stage1"]
    assert flops[halves][ops.backward_weight] == 3 * 0.25 * spec.backward_flops
    assert flops[halves][ops.backward_input] == flops[whole][ops.backward] - flops[halves][ops.backward_weight]
    more = profile_memory(halves).peak_bytes[ops.DEVICE] - profile_memory(whole).peak_bytes[ops.DEVICE]
    assert more > 2 * spec.split_bytes  # of micro-batches that wait
    times = [simulate([program], Hardware.cpu(1)).step_s for program in (whole, halves)]
    assert times[0] < times[1] < 1.2 * times[0]  # a few more calls
