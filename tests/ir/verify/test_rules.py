"""Correct programs pass the verifier; each way to break one is refused, at its line."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest

from penstock.ir import ops
from penstock.ir.errors import VerifyError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import (
    Interface,
    ParamSpec,
    Program,
    StageSpec,
    TensorSpec,
    parse_program,
    place_frees,
    print_program,
    profile_memory,
    program_lines,
)
from penstock.ir.verify import verify
from penstock.ir.verify.case import Case
from penstock.ir.verify.devices import check_deadlock, check_device_memory
from penstock.ir.verify.training import check_coverage
from penstock.tests.ir.program.handmade import linear_stages, pipeline
from penstock.tests.shown_elsewhere import slow_but

SHAPES = [(1, 1, 1), (1, 3, 2), (2, 2, 1), (2, 4, 3), (3, 7, 2)]
KINDS: dict[str, dict[str, bool]] = {
    "fetched": {},
    "fetched late": {"prefetch": False},
    "clipped": {"clip": True},
    "resident": {"fetched": False},
    "resident, kept": {"fetched": False, "kept": True},
    "split": {"split": True},
    "resident, kept, split": {"fetched": False, "kept": True, "split": True},
}


def edit(programs: list[Program], device: int, *changes: tuple[str, str]) -> list[Program]:
    """The programs read back from their texts, one of them after replacements that must apply."""
    texts = [print_program(program) for program in programs]
    for old, new in changes:
        assert texts[device].count(old) == 1, f"{old!r} stands {texts[device].count(old)} times in\n{texts[device]}"
        texts[device] = texts[device].replace(old, new)
    return [parse_program(text, programs[0].interface, i) for i, text in enumerate(texts)]


def move(line: str, before: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Changes that put one line of text in front of another."""
    return (f"    {line}\n", ""), (f"    {before}\n", f"    {line}\n    {before}\n")


def refusal(programs: list[Program], match: str, hardware: Hardware | None = None) -> VerifyError:
    with pytest.raises(VerifyError, match=match) as caught:
        verify(programs, hardware)
    return caught.value


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_correct_programs_pass(kind: str, shape: tuple[int, int, int]) -> None:
    programs = pipeline(*shape, **KINDS[kind])
    verify(programs)
    verify(programs, Hardware.cpu(shape[0]))
    verify([parse_program(print_program(p), p.interface, p.device) for p in programs], Hardware.cpu(shape[0]))


def test_the_error_carries_device_line_and_excerpt_with_the_lines_of_the_file() -> None:
    programs = pipeline(2, 2, 2)
    text = "# a header\n# of two lines\n" + print_program(programs[1]).replace(
        ", w1, None, [h1_m0]", ", w1, None, [h1_m1]"
    )
    programs[1] = parse_program(text, programs[0].interface, 1)
    error = refusal(programs, "`h1_m1` is of micro-batch 1, the op is of micro-batch 0")
    wrong = next(i for i, line in enumerate(text.splitlines(), 1) if "[h1_m1], [0.5], None" in line)
    assert (error.device, error.line) == (1, wrong)
    marked = [line for line in str(error).splitlines() if line.startswith("-->")]
    assert len(marked) == 1 and str(wrong) in marked[0] and "rt.backward" in marked[0]


VALUES: dict[str, tuple[tuple[tuple[str, str], ...], str]] = {
    "use after free": (
        move(
            "rt.free(x_m0, dy0_m0)", 'g0_m0, = rt.backward("stage0", w0, None, [x_m0], [dy0_m0], None, micro_batch=0)'
        ),
        "`x_m0` is used after it was freed in line 12",
    ),
    "freed in two lines": (
        (("rt.free(w0, x_m1", "rt.free(w0, x_m0, x_m1"),),
        "`x_m0` is freed again after it was freed",
    ),
    "freed twice in one line": ((("rt.free(y0_m0)", "rt.free(y0_m0, y0_m0)"),), "`y0_m0` is freed twice"),
    "leak": ((("rt.free(w0, x_m1, dy0_m1)", "rt.free(w0, dy0_m1)"),), "`x_m1` is never freed"),
    "leak of an unused value": (
        (("    y0_m1, =", '    x9 = rt.load(batch, "x", micro_batch=1)\n    y0_m1, ='),),
        "`x9` is never freed",
    ),
    "taken over, then used": (
        (("g0_m0, micro_batch=1)\n", "g0_m0, micro_batch=1)\n    g9 = rt.offload(g0_m0)\n    rt.free(g9)\n"),),
        "`g0_m0` is used after it was taken over by `backward`",
    ),
    "taken over, then freed": (
        (("rt.free(x_m0, dy0_m0)", "rt.free(x_m0, dy0_m0, g0_m1)"),),
        "used before it is produced",
    ),
    "taken over and read at once": (
        (("    y0_m1, =", "    x2 = rt.add(x_m1, x_m1)\n    y0_m1, ="),),
        "`x_m1` is taken over by `add`, which also reads it",
    ),
    "freed, then returned": ((("return {}", 'return {"x": [x_m0]}'),), "`x_m0` is returned after it was freed"),
    "operand by name": ((("rt.offload(g0_m1)", "rt.offload(value=g0_m1)"),), "write `value` in its place"),
}


@pytest.mark.parametrize("name", VALUES)
def test_wrong_lifetimes_are_refused(name: str) -> None:
    changes, match = VALUES[name]
    with pytest.raises(VerifyError, match=match):
        verify(edit(pipeline(2, 2, 2), 0, *changes))


def test_a_use_that_a_pass_moved_before_production_is_refused() -> None:
    programs = pipeline(2, 2, 2)
    nodes = {node.name: node for node in programs[0].graph.nodes}
    send = next(node for node in programs[0].ops() if node.target is ops.send)
    nodes["x_m0"].prepend(send)
    refusal(programs, "`y0_m0` is used before it is produced")


def test_stale_types_are_refused() -> None:
    programs = pipeline(2, 2, 2)
    node = next(node for node in programs[0].ops() if node.target is ops.recv)
    right = node.meta["type"]
    node.meta["type"] = replace(right, shape=(1, 1))
    error = refusal(programs, r"stale type of `dy0_m0`: f32\[1, 1\]")
    assert error.device == 0 and "rt.recv" in program_lines(programs[0])[error.line - 1]
    node.meta["type"] = right
    verify(programs)


def test_types_that_another_interface_gives_are_stale() -> None:
    programs = pipeline(2, 2, 2)
    interface = programs[0].interface
    stages = dict(interface.stages)
    stages["stage0"] = replace(stages["stage0"], params=(replace(stages["stage0"].params[0], shape=(8, 8)),))
    for program in programs:
        program.interface = replace(interface, stages=stages)
    refusal(programs, "stale type of `w0`")


def test_a_result_without_a_name_is_refused() -> None:
    programs = pipeline(2, 2, 2)
    program = programs[1]
    backward = [node for node in program.ops() if node.target is ops.backward][-1]
    gone = next(user for user in backward.users if user.args[1] == 0)
    for user in list(gone.users):
        program.graph.erase_node(user)
    program.graph.erase_node(gone)
    refusal(programs, "has 2 results and each needs one name")


MESSAGES = {
    "no receive": (1, (('src=0, tag="f0.m1"', 'src=0, tag="f0.m9"'),), "device 1 never receives 'f0.m1' from device 0"),
    "tag twice": (0, (('dst=1, tag="f0.m1"', 'dst=1, tag="f0.m0"'),), "tag 'f0.m0' is used again"),
    "other shape": (1, (('h1_m0 = rt.recv("stage0.h1"', 'h1_m0 = rt.recv("stage1.loss"'),), "found float32"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_that_do_not_match_are_refused(name: str) -> None:
    device, changes, match = MESSAGES[name]
    with pytest.raises(VerifyError, match=match):
        verify(edit(pipeline(2, 2, 2), device, *changes))


def test_a_receive_without_a_send_and_unequal_shapes_are_refused() -> None:
    programs = [Program(d, pipeline(2, 2, 1)[0].interface) for d in range(2)]
    programs[0].emit(ops.recv, "stage0.h1", src=1, tag="t")
    place_frees(programs[0])
    refusal(programs, "device 1 never sends 't' to device 0")
    loss = programs[1].emit(ops.recv, "stage1.loss", src=0, tag="u")[0]
    programs[1].emit(ops.send, loss, dst=0, tag="t")
    x = programs[0].emit(ops.load, programs[0].batch, "x", micro_batch=0)[0]
    programs[0].emit(ops.send, x, dst=1, tag="u")
    for program in programs:
        place_frees(program)
    refusal(programs, r"expects f32\[4, 32\] 512 B, but f32\[\] 4.00 B is sent by device 1")


def test_collectives_must_be_called_by_all_members_alike() -> None:
    programs = pipeline(2, 2, 2, clip=True)
    missing = (
        ('    total, = rt.all_reduce(norm, group="world")\n', ""),
        ("(g1_dram, total, max", "(g1_dram, norm, max"),
        ("rt.free(total)", "rt.free(norm)"),
    )
    error = refusal(edit(programs, 1, *missing), "device 1 calls group 'world' 0 times, this device 1 times")
    assert error.device == 0
    interface = replace(programs[0].interface, groups={"world": ((0, "", ""),)})
    with pytest.raises(VerifyError, match="device 1 has no member in group 'world'"):
        Program(1, interface).emit(ops.all_reduce, group="world")


def test_crossed_messages_deadlock_and_the_error_says_who_waits_for_whom() -> None:
    first, second = (
        'h1_m0 = rt.recv("stage0.h1", src=0, tag="f0.m0")',
        'h1_m1 = rt.recv("stage0.h1", src=0, tag="f0.m1")',
    )
    programs = edit(pipeline(2, 2, 2), 1, *move(second, first))
    text = str(refusal(programs, "deadlock, 2 places wait in a ring"))
    assert 'device 0, line 5: rt.send(y0_m0, dst=1, tag="f0.m0") and device 1, line 4' in text
    assert "follows on stream recv" in text and "follows on stream send" in text


def test_collectives_of_two_groups_in_crossed_order_deadlock() -> None:
    members = tuple((d, "", "") for d in range(2))
    interface = Interface(linear_stages(2, 8, 2, 1.0), {}, num_devices=2, groups={"a": members, "b": members})
    programs = []
    for device, groups in enumerate(("ab", "ba")):
        program = Program(device, interface)
        for group in groups:
            norm = program.emit(ops.norm)[0]
            program.emit(ops.all_reduce, norm, group=group)
        place_frees(program)
        programs.append(program)
    refusal(programs, "deadlock, 2 places wait in a ring(.|\n)*follows on stream comm")


def exchange() -> list[Program]:
    """Two devices that each send what they made before they take what the other one made."""
    stages = linear_stages(3, 32, 64, 1.0)
    stages = {name: replace(s, forward_workspace_bytes=0, light_workspace_bytes=0) for name, s in stages.items()}
    interface = Interface(stages, pipeline(2, 2, 1, rows=64)[0].interface.batch, num_devices=2)
    programs = []
    for device in range(2):
        program = Program(device, interface)
        x = program.emit(ops.load, program.batch, "x", micro_batch=0, names=["x"])[0]
        weights = program.emit(ops.resident, f"stage{device}.weights")[0]
        made = program.emit(ops.forward, f"stage{device}", weights, x, micro_batch=0, keep=False, names=["y"])[0]
        program.emit(ops.send, made, dst=1 - device, tag="t")
        program.emit(ops.free, made)
        taken = program.emit(ops.recv, f"stage{1 - device}.h{2 - device}", src=1 - device, tag="t", names=["z"])[0]
        program.emit(ops.free, x, taken)
        programs.append(program)
    return programs


def test_waiting_for_memory_can_close_a_ring_across_devices() -> None:
    programs = exchange()
    need_bytes = max(profile_memory(program).peak_bytes[ops.DEVICE] for program in programs)
    tight = Case(programs, Hardware.cpu(2, memory=need_bytes))
    check_device_memory(tight)
    with pytest.raises(VerifyError, match=r"deadlock(.|\n)*device memory must be given back first"):
        check_deadlock(tight)
    check_deadlock(Case(programs, Hardware.cpu(2, memory=2 * need_bytes)))
    check_deadlock(Case(programs, None))


def test_memory_is_held_to_the_budget_to_the_byte() -> None:
    programs = pipeline(2, 4, 2, rows=64)
    need_bytes = max(profile_memory(program).peak_bytes[ops.DEVICE] for program in programs)
    verify(programs, Hardware.cpu(2, memory=need_bytes))
    small = Hardware.cpu(2, memory=need_bytes - 1)
    error = refusal(programs, r"missing 1\.00 B\. Live values:", small)
    assert "rt.backward" in str(error) and "arena of fetched weights" in str(error)
    verify(programs, small, memory=False)


def test_dram_is_held_to_the_budget_of_the_host() -> None:
    programs = pipeline(2, 4, 2)
    peaks = [profile_memory(program).peak_bytes[ops.DRAM] for program in programs]
    share = Hardware.cpu(2, dram="1GB").dram_budget_bytes(0) / 1e9
    verify(programs, Hardware.cpu(2, dram=int(sum(peaks) / share) + 2))
    error = refusal(programs, r"dram0: .*missing", Hardware.cpu(2, dram=int(sum(peaks) / share) - 1000))
    assert "weights, kept across steps" in str(error) and "device 1, all" in str(error)


TRAINING = {
    "forward left out": (
        (
            ('    y0_m1, = rt.forward("stage0", w0, x_m1, micro_batch=1, keep=False)\n', ""),
            ('    rt.send(y0_m1, dst=1, tag="f0.m1")\n    rt.free(y0_m1)\n', '    rt.send(x_m1, dst=1, tag="f0.m1")\n'),
        ),
        "no forward of stage0 for micro-batch 1",
    ),
    "forward twice": (
        (("x_m1, micro_batch=1, keep=False)", "x_m0, micro_batch=0, keep=False)"),),
        "forward of stage0, micro-batch 0 is done in line 4",
    ),
    "backward on another micro-batch": (
        (("[x_m1], [dy0_m1], g0_m0, micro_batch=1)", "[x_m1], [dy0_m1], g0_m0, micro_batch=0)"),),
        "backward of stage0, micro-batch 0 is done in line",
    ),
    "gradients not accumulated": (
        (("g0_m0, micro_batch=1)", "None, micro_batch=1)"), ("rt.free(x_m0, dy0_m0)", "rt.free(x_m0, dy0_m0, g0_m0)")),
        "the gradients of stage0 lack micro-batch 0",
    ),
    "no update": ((('    rt.step("stage0", g0_dram)\n', ""),), "the gradients of stage0 reach 0 updates"),
    "update twice": (
        (('    rt.step("stage0", g0_dram)\n', '    rt.step("stage0", g0_dram)\n    rt.step("stage0", g0_dram)\n'),),
        "the gradients of stage0 reach 2 updates",
    ),
    "update on the device of what is fetched": (
        (
            ('rt.step("stage0", g0_dram)', 'rt.step("stage0", g0_m1)'),
            ("    rt.free(g0_m1)\n", ""),
            ("rt.free(g0_dram)", "rt.free(g0_dram, g0_m1)"),
        ),
        "stage0 is fetched, so it is stepped in dram, but its gradients are in device",
    ),
    "resident and fetched": (
        (("    x_m0 =", '    w9 = rt.resident("stage0.weights")\n    x_m0 ='),),
        "stage0 is both fetched and resident, first in line 2",
    ),
    "op of the other function": (
        (("    x_m1 =", '    z, = rt.evaluate("stage0", w0, x_m0, micro_batch=0)\n    rt.free(z)\n    x_m1 ='),),
        "`evaluate` is not allowed in `step`",
    ),
}


@pytest.mark.parametrize("name", TRAINING)
def test_steps_that_would_train_something_else_are_refused(name: str) -> None:
    changes, match = TRAINING[name]
    with pytest.raises(VerifyError, match=match):
        verify(edit(pipeline(2, 2, 2), 0, *changes))


@pytest.mark.parametrize("needing", list(itertools.product((False, True), repeat=2)), ids=str)
def test_a_frozen_stage_runs_backward_if_any_input_needs_a_gradient(needing: tuple[bool, bool]) -> None:
    inputs = tuple(TensorSpec(name, (4,), "float32", requires_grad=needs) for name, needs in zip("xy", needing))
    stage = StageSpec("stage0", inputs, (TensorSpec("h", (4,), "float32"),), (ParamSpec("w", (4,), "float32", False),))
    interface = Interface({"stage0": stage}, {spec.name: spec for spec in inputs})
    program = Program(0, interface)
    (weights,) = program.emit(ops.resident, "stage0.weights")
    loaded = [program.emit(ops.load, program.batch, spec.name, micro_batch=0)[0] for spec in inputs]
    program.emit(ops.forward, "stage0", weights, *loaded, micro_batch=0)
    with pytest.raises(VerifyError, match="no backward of stage0 for micro-batch 0") if any(needing) else nullcontext():
        check_coverage(Case([program]))


def test_backward_needs_the_weights_and_the_micro_batch_of_what_was_kept() -> None:
    programs = pipeline(2, 2, 2, fetched=False, kept=True)
    other = (
        ("    dy0_m0 =", '    w9 = rt.resident("stage0.weights")\n    dy0_m0 ='),
        ("w0, k0_m0, [x_m0]", "w9, k0_m0, [x_m0]"),
    )
    refusal(edit(programs, 0, *other), "`k0_m0` was kept by a forward on `w0`, but backward runs on `w9`")
    crossed = (
        ("w0, k0_m0, [x_m0]", "w0, k0_m1, [x_m0]"),
        ("rt.free(x_m0, k0_m0", "rt.free(x_m0"),
        ("rt.free(x_m1", "rt.free(k0_m0, x_m1"),
    )
    refusal(edit(programs, 0, *crossed), "`k0_m1` is of micro-batch 1")


def test_resident_stages_are_not_updated_in_dram() -> None:
    programs = pipeline(1, 1, 1, fetched=False)
    changes = (('rt.step("stage0", g0_m0)', 'd = rt.offload(g0_m0)\n    rt.step("stage0", d)\n    rt.free(d)'),)
    refusal(
        edit(programs, 0, *changes), "stage0 is resident, so it is stepped in device, but its gradients are in dram"
    )


def test_gradients_may_be_returned_instead_of_an_update() -> None:
    programs = pipeline(1, 1, 2, fetched=False)
    changes = (('    rt.step("stage0", g0_m1)\n    rt.free(g0_m1)\n', ""), ("y0_m1]}", 'y0_m1], "grads": [g0_m1]}'))
    verify(edit(programs, 0, *changes))


def test_tied_parameters_must_be_summed_before_the_update() -> None:
    programs = pipeline(2, 2, 1)
    tie = {"tie": ((0, "stage0", "layer0.weight"), (1, "stage1", "layer1.weight"))}
    for program in programs:
        program.with_interface(groups=tie)
    refusal(programs, "the gradients of stage0 hold a tied parameter and were not summed over tie")
    for stage in range(2):
        changes = (
            (
                f'rt.step("stage{stage}", g{stage}_dram)\n    rt.free(g{stage}_dram)',
                f's, = rt.all_reduce(g{stage}_dram, group="tie")\n    rt.step("stage{stage}", s)\n    rt.free(s)',
            ),
        )
        programs = edit(programs, stage, *changes)
    verify(programs)


def evaluation(change: Callable[[Program], None] | None = None) -> list[Program]:
    interface = pipeline(1, 1, 2)[0].interface
    program = Program(0, interface, function="evaluate")
    weights = program.emit(ops.resident, "stage0.weights")[0]
    losses = []
    for m in range(2):
        x = program.emit(ops.load, program.batch, "x", micro_batch=m)[0]
        losses.append(program.emit(ops.evaluate, "stage0", weights, x, micro_batch=m)[0])
    program.returns({"loss": losses})
    if change is not None:
        change(program)
    place_frees(program)
    return [program]


def test_evaluation_programs() -> None:
    verify(evaluation())

    def forward_too(program: Program) -> None:
        nodes = {node.name: node for node in program.graph.nodes}
        with program.graph.inserting_before(program.graph.find_nodes(op="output")[0]):
            program.emit(ops.forward, "stage0", nodes["resident"], nodes["load"], micro_batch=0, keep=False)

    refusal(evaluation(forward_too), "`forward` is not allowed in `evaluate`; there are all_gather, all_to_all, evalu")


def test_sets_of_programs_that_do_not_belong_together_are_refused() -> None:
    programs = pipeline(2, 2, 2)
    refusal([], "no programs")
    refusal(programs[:1], "expected programs for devices 0 to 1 in order, found 0")
    refusal(programs[::-1], "in order, found 1, 0")
    refusal([programs[0], pipeline(2, 2, 3)[1]], "device 1 is of another plan than device 0")
    refusal(programs, "2 programs, but the hardware has 1 devices", Hardware.cpu(1))
    programs[1].function = "evaluate"
    refusal(programs, "device 1 has `evaluate`, device 0 has `step`")


@pytest.mark.parametrize("kind", slow_but(("fetched late", "clipped", "split"), KINDS))
def test_no_line_of_a_correct_program_can_be_left_out_or_doubled(kind: str) -> None:
    programs = pipeline(2, 2, 2, **KINDS[kind])
    for device, program in enumerate(programs):
        lines = print_program(program).splitlines()
        for i, line in enumerate(lines[1:], 1):
            without, twice = lines[:i] + lines[i + 1 :], lines[: i + 1] + lines[i:]
            if line != "    return {}":
                check_refused(programs, device, without)
            check_refused(programs, device, twice)


def check_refused(programs: list[Program], device: int, lines: list[str]) -> None:
    with pytest.raises(VerifyError):
        verify([parse_program("\n".join(lines), p.interface, d) if d == device else p for d, p in enumerate(programs)])
