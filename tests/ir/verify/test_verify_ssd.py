"""The verifier on programs that use SSDs: right ones pass, each way to break one is refused."""

from __future__ import annotations

import pytest

from penstock.ir.errors import VerifyError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import Program, parse_program, print_program
from penstock.ir.verify import verify
from penstock.tests.ir.program.handmade import pipeline

KINDS: dict[str, dict[str, object]] = {
    "states": {"ssd": "states"},
    "all": {"ssd": "all"},
    "activations": {"moved": "ssd"},
    "speculative": {"clip": True, "speculative": True},
    "everything": {"ssd": "all", "moved": "ssd", "clip": True, "speculative": True},
    "exact": {"ssd": "all", "clip": True},
}


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 3, 2), (2, 4, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_correct_programs_pass(kind: str, shape: tuple[int, int, int]) -> None:
    programs = pipeline(*shape, **KINDS[kind])
    hardware = Hardware.cpu(shape[0], ssd="1GB")
    verify(programs, hardware)
    verify([parse_program(print_program(p), p.interface, p.device) for p in programs], hardware)


def fail(kind: str, *changes: tuple[str, str], devices: int = 1) -> list[Program]:
    """Two stages' programs, read back from texts of which the first is changed; each change must apply once."""
    programs = pipeline(devices, 2, 1, **KINDS[kind])
    texts = [print_program(program) for program in programs]
    for old, new in changes:
        assert texts[0].count(old) == 1, f"{old!r} stands {texts[0].count(old)} times in\n{texts[0]}"
        texts[0] = texts[0].replace(old, new)
    return [parse_program(text, programs[0].interface, i) for i, text in enumerate(texts)]


STEP = '    s1_new = rt.step("stage1", g1_dram, None, s1)\n'
BACK = '    rt.write(s1_new, to="stage1.states")\n    rt.free(s1_new)\n'
READ = '    s1 = rt.read("stage1.states")\n'
REDO = '    rt.redo("stage1", g1_dram, total, max_norm=1.0)\n'
WRITE_X = "    x1_m0_ssd = rt.write(x1_m0_dram)\n"
AGAIN = "    x1_m0_again = rt.read(x1_m0_ssd)\n    rt.free(x1_m0_ssd)\n"
LATE = '    w9 = rt.read("stage1.weights")\n    rt.free(w9)\n'
BROKEN: dict[str, tuple[str, tuple[tuple[str, str], ...], str]] = {
    "states that no step takes": (
        "states",
        ((READ, READ + '    s9 = rt.read("stage0.states")\n    rt.free(s9)\n'),),
        "`s9` is taken by 0 steps of stage0",
    ),
    "states read twice": (
        "states",
        (("    s0 = rt.read", '    s9 = rt.read("stage1.states")\n    rt.free(s9)\n    s0 = rt.read'),),
        r"the states of stage1 are read in line \d+",
    ),
    "states of another stage": (
        "states",
        ((READ, READ.replace("stage1", "stage0")),),
        "stage1 is stepped on its own states",
    ),
    "states not written back": ("states", ((BACK, "    rt.free(s1_new)\n"),), "stage1 are written back 0 times"),
    "states written twice": (
        "states",
        ((BACK, BACK.partition("\n")[0] + "\n" + BACK),),
        "stage1 are written back 2 times",
    ),
    "states written to another place": ("states", (('to="stage1.states"', 'to="stage1.all"'),), "not the place of"),
    "states written without a step": (
        "states",
        ((READ, READ + '    rt.write(s1, to="stage1.states")\n'),),
        "the states of stage1 are for its step",
    ),
    "a step without its states": (
        "states",
        ((STEP, '    rt.step("stage1", g1_dram)\n'), (BACK, "    rt.free(s1)\n")),
        "`s1` is taken by 0 steps",
    ),
    "weights on SSD, updated in DRAM": (
        "all",
        (
            ('    s1 = rt.read("stage1.all")\n', ""),
            (STEP, '    rt.step("stage1", g1_dram)\n'),
            (BACK.replace("states", "all"), ""),
        ),
        r"stage1 persists on SSD, so it is stepped on what `read\('stage1.all'\)` gives",
    ),
    "weights on SSD, states alone written": (
        "all",
        (('s1 = rt.read("stage1.all")', 's1 = rt.read("stage1.states")'), ('to="stage1.all"', 'to="stage1.states"')),
        "stage1 persists on SSD",
    ),
    "weights read on their way back": ("all", ((STEP, STEP + LATE),), "stage1 was stepped in line .* not written back"),
    "no redo": ("speculative", ((REDO, ""),), "stage1 is stepped before the norm is known, and no redo follows"),
    "two redos": ("speculative", ((REDO, REDO + REDO),), "stage1 is redone already"),
    "a redo of a step that knew": (
        "speculative",
        (('rt.step("stage1", g1_dram, speculative=True)', 'rt.step("stage1", g1_dram)'),),
        "no speculative step of stage1 is before this",
    ),
    "a redo on other gradients": (
        "speculative",
        (
            (REDO, f"    c1 = rt.clip(g1_dram, total, max_norm=1.0)\n{REDO.replace('g1_dram', 'c1')}    rt.free(c1)\n"),
            ("    rt.free(g1_dram)\n", ""),
        ),
        "stage1 was stepped on `g1_dram` and is redone on `c1`",
    ),
    "a norm of some gradients": (
        "speculative",
        (("rt.norm(g1_dram, g0_dram)", "rt.norm(g1_dram)"),),
        "the norm for a redo lacks the gradients of stage0",
    ),
    "activations used on SSD": (
        "activations",
        ((AGAIN, ""), ("rt.fetch(x1_m0_again)", "rt.fetch(x1_m0_ssd)"), ("rt.free(x1_m0_again)", "rt.free(x1_m0_ssd)")),
        "only weights and activations in DRAM can be fetched",
    ),
    "activations never read": (
        "activations",
        (
            (
                "    x1_m0_ssd = rt.write(x1_m0_dram)\n    rt.free(x1_m0_dram)\n",
                "    x1_m0_ssd = rt.write(x1_m0_dram)\n",
            ),
            (AGAIN, "    rt.free(x1_m0_ssd)\n"),
            ("rt.fetch(x1_m0_again)", "rt.fetch(x1_m0_dram)"),
            ("rt.free(x1_m0_again)", "rt.free(x1_m0_dram)"),
        ),
        "`x1_m0_ssd` is written to SSD and never read",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_programs_are_refused(name: str) -> None:
    kind, changes, match = BROKEN[name]
    with pytest.raises(VerifyError, match=match):
        verify(fail(kind, *changes))


def test_the_norm_of_one_device_does_not_judge() -> None:
    """Both devices' programs step one stage each; a redo needs the norm of both."""
    changes = (('    total, = rt.all_reduce(norm, group="world")\n', ""),)
    programs = pipeline(2, 2, 1, **KINDS["speculative"])
    texts = [print_program(p).replace(changes[0][0], "").replace("total", "norm") for p in programs]
    with pytest.raises(VerifyError, match="its norm lacks the gradients of device 1"):
        verify([parse_program(text, programs[0].interface, i) for i, text in enumerate(texts)])


def test_ssds_have_a_budget() -> None:
    programs = pipeline(1, 2, 1, ssd="all")
    with pytest.raises(VerifyError, match="ssd0"):
        verify(programs, Hardware.cpu(1))
    with pytest.raises(VerifyError, match="ssd0"):
        verify(programs, Hardware.cpu(1, ssd="10kB"))
