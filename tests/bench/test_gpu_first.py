"""The first hour on a GPU: its order, what a later call goes on with, what is packed, what is refused."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.tags import Tag, sys_tags

from penstock.bench import gpu_first
from penstock.bench.gpu import calls, left_out, libaio, part_list, wheels
from penstock.bench.gpu.device_tests import BEGUN, LEFT_OUT, OVER, Recorder
from penstock.bench.gpu.inside import union_length
from penstock.bench.gpu.ledger import BEGINS, ENDS, FILE, Ledger, Part, State
from penstock.bench.gpu.part_list import PARTS

FIRST, SECOND, THIRD = FAST = [Part(1, "first", 5), Part(1, "second", 5), Part(2, "third", 5)]
FIELDS = {"bench", "call", "part", "figure", "measured", "target", "ok"}
ORIGIN = {"date", "commit", "small", "command", "device", "driver", "torch", "cuda"}
FAILED = subprocess.CompletedProcess([], 1, "", "a compiler is missing")
SPEED = ("hardware", "step-time", "accounting", "swapping", "large-model")


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ledger_at(folder: Path, **origin: Any) -> Ledger:
    return Ledger(folder / FILE, {"device": "a GPU", "small": False, **origin})


def end(ledger: Ledger, part: Part, ok: bool | None = None) -> None:
    ledger.write(part, {"figure": BEGINS, "measured": 1, "target": None, "ok": None})
    ledger.write(part, {"figure": ENDS, "measured": 1, "target": None, "ok": ok, "reason": "it broke"})


def test_the_limits_of_each_call_add_up_to_less_than_it_may_take() -> None:
    numbers = [part.call for part in PARTS]
    assert numbers == sorted(numbers) and set(numbers) == set(range(1, calls.NUM_CALLS + 1))
    assert len({part.name for part in PARTS}) == len(PARTS)
    for number in range(1, calls.NUM_CALLS + 1):
        assert calls.START_S + sum(part.limit_s for part in PARTS if part.call == number) <= calls.TOTAL_S
    assert calls.TOTAL_S < 600


@given(
    shares=st.lists(st.floats(0.02, 1.0), min_size=len(PARTS), max_size=len(PARTS)),
    failing=st.sets(st.sampled_from(PARTS)),
    scale=st.sampled_from([1.0, 4.0]),
)
def test_the_calls_try_every_part_in_time_and_failures_again(
    shares: list[float], failing: set[Part], scale: float
) -> None:
    """Whatever share of its limit each part takes, and whichever fail at first."""
    share = dict(zip(PARTS, shares))
    states = {part.name: State(0, False, 0, "") for part in PARTS}
    for number in range(1, calls.NUM_CALLS + 1):
        left_s, begun = scale * (calls.TOTAL_S - calls.START_S), list[str]()
        current = calls.current_call(PARTS, states)
        while found := calls.next_part(PARTS, states, current, left_s, begun, scale):
            part, limit_s = found
            assert scale * part.limit_s - 1e-6 <= limit_s <= left_s and part.name not in begun
            before = states[part.name]
            failed = part in failing and not before.failed
            states[part.name] = State(before.begun + 1, not failed, before.failed + failed, "")
            begun.append(part.name)
            left_s -= share[part] * limit_s
        assert left_s >= -1e-6 and all(states[part.name].begun for part in PARTS if part.call <= number)
        # A failure is tried again in the next call, unless no part that failed fitted into what was left.
        waiting = [part for part in PARTS if states[part.name].failed and not states[part.name].done]
        assert all(part.name in begun or scale * part.limit_s > left_s for part in waiting)


def test_what_failed_is_tried_in_later_calls_until_it_is_given_up(tmp_path: Path) -> None:
    ledger, order = ledger_at(tmp_path), []
    for _ in range(5):
        states, begun = calls.states_of(FAST, ledger), list[str]()
        number = calls.current_call(FAST, states)
        while found := calls.next_part(FAST, calls.states_of(FAST, ledger), number, 100.0, begun):
            part, _ = found
            begun.append(part.name)
            end(ledger, part, ok=False if part in (FIRST, THIRD) else None)
        order.append(begun)
    tries = [["first", "third"]] * (FIRST.tries - 1)
    assert order == [["first", "second", "third"], *tries, [], []]
    report = calls.report(FAST, calls.states_of(FAST, ledger))
    assert report == {"done": ["second"], "failed": {"first": "it broke", "third": "it broke"}, "left": []}


def test_too_little_time_still_tries_one_part() -> None:
    states = {part.name: State(0, False, 0, "") for part in PARTS}
    assert calls.next_part(PARTS, states, 1, 3.0, []) == (PARTS[0], 3.0)
    assert calls.next_part(PARTS, states, 1, 3.0, ["context"]) is None


def test_what_was_cut_is_first_again_and_rows_of_other_gpus_do_not_count(tmp_path: Path) -> None:
    def following(ledger: Ledger) -> Part:
        found = calls.next_part(FAST, calls.states_of(FAST, ledger), 1, 100.0, [])
        assert found is not None
        return found[0]

    ledger = ledger_at(tmp_path)
    for other in (ledger_at(tmp_path, device="another GPU"), ledger_at(tmp_path, small=True)):
        end(other, FIRST)
    assert following(ledger) == FIRST
    end(ledger, FIRST)
    ledger.write(SECOND, {"figure": BEGINS, "measured": 1, "target": None, "ok": None})
    with open(ledger.path, "a") as file:
        file.write('{"bench": "gpu_fi')  # a row that was cut in the writing
    later = Ledger(tmp_path / "later" / FILE, ledger.origin, (ledger.path,))
    assert following(ledger) == following(later) == SECOND and not later.path.exists()
    assert ledger.state(SECOND).reason == "it was cut with its call"
    end(ledger, THIRD)
    assert [row["figure"] for row in ledger.rows("third")] == [BEGINS, ENDS]  # the cut row spoils no later one


@pytest.mark.slow
def test_a_call_that_is_killed_loses_nothing_and_the_next_goes_on(tmp_path: Path) -> None:
    """Where a CPU device has nothing to probe, parts take no time beside their start."""
    command = [sys.executable, gpu_first.__file__, "--device", "cpu", "--small", "--out", str(tmp_path), "--call", "1"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    for line in running.stdout:
        row = json.loads(line)
        if (row["part"], row["figure"]) == ("pinning", BEGINS):
            running.send_signal(signal.SIGKILL)
            break
    running.stdout.read()  # until the call's child is gone, too: it has this pipe
    running.wait()
    running.stdout.close()
    rows = rows_of(tmp_path / FILE)
    assert [row["figure"] for row in rows if row["part"] == "context"] == [BEGINS, "memory of a context", ENDS]
    assert all(row.keys() >= FIELDS | ORIGIN for row in rows) and str(tmp_path) not in json.dumps(rows)
    again = [*command, "--seconds", "1"]  # too few for more than one part
    assert subprocess.run(again, stdout=subprocess.DEVNULL, check=False).returncode == 1
    after = rows_of(tmp_path / FILE)[len(rows) :]
    assert after[0]["part"] == "machine" and {row["part"] for row in after} == {"machine", "pinning"}
    report = after[-1]["measured"]
    assert report["done"] == ["context"] and list(report["failed"]) == ["pinning"] and "copies" in report["left"]


@pytest.mark.slow
def test_sections_run_and_their_rows_are_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """But those that have tests of their own; what depends on the clock of a shared machine may miss its target."""
    named = [f"--part={name}" for name in SPEED]
    assert gpu_first.main(["--device", "cpu", "--small", "--out", str(tmp_path), *named]) == 0
    rows = rows_of(tmp_path / FILE)
    assert [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")] == rows
    assert {row["part"] for row in rows} == {"machine", *SPEED}
    exact = [row for row in rows if row["ok"] is not None and "step" not in row["figure"]]
    assert len(exact) > 10 and [row for row in exact if not row["ok"]] == []


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = gpu_first.parsed_texts(["--device", "cpu", "--small", "--out", str(tmp_path)])
    ledger, child = ledger_at(tmp_path), tmp_path / "child.py"
    monkeypatch.setenv(gpu_first.EXTENSIONS, str(tmp_path))
    lock = tmp_path / "cpu_adam" / "lock"  # of a build that was killed with an earlier part
    lock.parent.mkdir()
    lock.touch()
    child.write_text("import sys, time; sys.exit(3) if sys.argv[2] == 'first' else time.sleep(60)")
    monkeypatch.setattr(gpu_first, "__file__", str(child))
    gpu_first.run_child(args, ledger, FIRST, 20.0, tmp_path)
    gpu_first.run_child(args, ledger, SECOND, 1.0, tmp_path)
    reasons = [row["reason"] for row in rows_of(ledger.path) if row["figure"] == ENDS]
    assert reasons == ["ended with exit code 3", "took more than 1 s"]
    assert [ledger.state(part).done for part in (FIRST, SECOND)] == [False, False] and not lock.exists()


def test_a_row_with_an_error_fails_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the part goes on after it, as those of several plans do."""
    rows = [{"figure": "the plan runs", "ok": False, "error": "half a step"}, {"figure": "another plan"}]
    monkeypatch.setattr(part_list, "rows_of", lambda *_: iter(rows))
    monkeypatch.setattr(gpu_first.ctypes, "CDLL", lambda _: SimpleNamespace(prctl=lambda *_: 0))
    words = [
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
        "--run",
        "host",
        "--origin",
        '{"device": "a GPU", "small": true}',
    ]
    assert gpu_first.run_part(gpu_first.parsed_texts(words)) == 1 and len(rows_of(tmp_path / FILE)) == 2
    rows.pop(0)
    assert gpu_first.run_part(gpu_first.parsed_texts(words)) == 0


@pytest.mark.parametrize("device", ["emulated NVIDIA GeForce RTX 4090", "cpu", "NVIDIA H100"])
def test_rows_that_are_not_of_a_real_gpu_are_refused(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = {"device": device, "driver": "1", "torch": "2", "cuda": "13", "emulated": device.startswith("emulated")}
    monkeypatch.setattr(gpu_first, "identity", lambda args: dict(seen))
    monkeypatch.setattr(gpu_first, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu_first, "run_child", lambda *_: pytest.fail("a part began"))
    small = ["--small"] if device == "NVIDIA H100" else []
    args = gpu_first.parsed_texts(["--out", str(tmp_path), "--device", "cpu" if device == "cpu" else "cuda", *small])
    assert gpu_first.call(args, {}, tmp_path, 0.0) == 2 and not list(tmp_path.iterdir())
    assert "name a folder by --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--device", "cpu", "--small", "--part", "pinnin"], "--part 'pinnin': there is none of this name"),
        pytest.param(["--device", "cuda"], "--device cuda: torch does not find one here", marks=pytest.mark.slow),
    ],
)
def test_a_part_or_a_device_that_is_not_there_is_refused(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_first.main([*words, "--out", str(tmp_path)]) == 2
    assert told in capfd.readouterr().err and not list(tmp_path.iterdir())


def test_what_is_packed_is_what_setup_cfg_requires_but_for_torch() -> None:
    names = [wheels.name_of(line) for line in wheels.requirements(gpu_first.ROOT / "setup.cfg")]
    assert {"pydantic", "networkx", "mip", "highspy", "pymetis", "nvidia-ml-py", "expecttest", "pytest"} <= set(names)
    assert "torch" not in names and "torchao" not in names and len(set(names)) == len(names)


def test_the_smallest_wheels_are_kept_and_what_is_left_out_is_said(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    for name, size in (("large", 900), ("small", 100), ("middle", 300)):
        (made / f"{name}-1.0-py3-none-any.whl").write_bytes(b"x" * size)
    said = wheels.keep(made.iterdir(), tmp_path / "kept", limit_bytes=500)
    kept = {path.name.split("-")[0] for path in (tmp_path / "kept").iterdir()}
    assert kept == {"small", "middle"} and "large-1.0" in said[0] and "left out" in said[0]


def test_wheels_are_for_the_machine_that_they_go_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever Python, glibc and processor pack them."""
    asked = list[list[str]]()
    monkeypatch.setattr(wheels.subprocess, "run", lambda command, **_: asked.append(command) or FAILED)
    wheels.pack(gpu_first.ROOT / "setup.cfg", tmp_path / "kept", wheels.Target("3.13", "2.34", "aarch64"))
    words = asked[0]
    platforms = [words[at + 1] for at, word in enumerate(words) if word == "--platform"]
    assert words[words.index("--python-version") + 1] == "3.13"
    assert platforms[0] == "manylinux_2_34_aarch64" and {"manylinux_2_17_aarch64", "manylinux2014_aarch64"} <= {
        *platforms
    }
    assert not [name for name in platforms if "x86_64" in name or "_2_35" in name]


def test_a_machine_unpacks_what_it_lacks_and_what_suits_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for variable in ("PYTHONPATH", "PATH"):
        monkeypatch.setenv(variable, os.environ.get(variable, ""))
    best = next(iter(sys_tags()))
    other = f"{best.interpreter}-{best.abi}-macosx_11_0_arm64"  # its Python, another system
    for name in ("lacked_here-1.0-py3-none-any", f"here_too-1.0-{best}", "torch-9.0-py3-none-any", f"far-1.0-{other}"):
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as wheel:
            wheel.writestr(f"{name.split('-')[0]}.py", "VALUE = 7")
            wheel.writestr("lacked_here-1.0.data/scripts/lacked", "#!/bin/sh")
            wheel.writestr(f"{'-'.join(name.split('-')[:2])}.dist-info/RECORD", "")
    done = wheels.unpack(tmp_path, tmp_path / "site")
    assert (done.installed, done.there_already, done.unsuited) == (["here-too", "lacked-here"], ["torch"], ["far"])
    assert importlib.import_module("lacked_here").VALUE == 7
    assert os.access(tmp_path / "site" / "bin" / "lacked", os.X_OK)
    unpacked = (tmp_path / "site" / "lacked_here.py").stat()
    monkeypatch.setattr(wheels, "is_installed", lambda name: name == "torch")  # as in the next call
    assert wheels.unpack(tmp_path, tmp_path / "site").installed == ["here-too", "lacked-here"]
    again = (tmp_path / "site" / "lacked_here.py").stat()
    assert (again.st_ino, again.st_mtime_ns) == (unpacked.st_ino, unpacked.st_mtime_ns)


def test_tags_of_the_machine_choose() -> None:
    lent = {Tag("cp312", "cp312", "manylinux_2_39_x86_64"), Tag("cp310", "abi3", "manylinux_2_17_x86_64")}
    suited = ["a-1-cp312-cp312-manylinux_2_28_x86_64.manylinux_2_39_x86_64", "a-1-cp310-abi3-manylinux_2_17_x86_64"]
    others = [
        "a-1-cp311-cp311-manylinux_2_39_x86_64",
        "a-1-cp312-cp312-manylinux_2_39_aarch64",
        "a-1-cp310-abi3-win_amd64",
    ]
    assert all(wheels.suits(f"{name}.whl", lent) for name in suited)
    assert not any(wheels.suits(f"{name}.whl", lent) for name in others)


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="a system without Debian's packages")
def test_libaio_is_found_where_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in libaio.VARIABLES:
        monkeypatch.setenv(variable, "before")
    monkeypatch.setattr(libaio, "HEADER", tmp_path / "none")
    package = tmp_path / "package"
    for name in ("DEBIAN/control", "usr/include/libaio.h", "usr/lib/x86_64-linux-gnu/libaio.so"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(
            "Package: libaio-dev\nVersion: 1\nArchitecture: all\nDescription: a\nMaintainer: a\n"
        )
    build = ["dpkg-deb", "-b", str(package), str(tmp_path / "libaio-dev_1_all.deb")]
    subprocess.run(build, check=True, capture_output=True)
    assert libaio.unpack(tmp_path, tmp_path / "site") == ["libaio-dev"]
    where = {variable: os.environ[variable].split(os.pathsep) for variable in libaio.VARIABLES}
    assert (Path(where["CPATH"][0]) / "libaio.h").is_file() and where["CPATH"][1:] == ["before"]
    assert all((Path(where[variable][0]) / "libaio.so").is_file() for variable in ("LIBRARY_PATH", "LD_LIBRARY_PATH"))
    monkeypatch.setattr(libaio, "HEADER", package / "usr/include/libaio.h")
    assert libaio.unpack(tmp_path, tmp_path / "other") == []


def test_tests_that_passed_or_failed_twice_are_left_out() -> None:
    begun = [
        {"figure": BEGUN, "test": name} for name in ("passed", "hangs", "hangs", "cut", "failed", "flaky", "flaky")
    ]
    over = [("passed", True), ("skipped", None), ("failed", False), ("flaky", False), ("flaky", True)]
    recorder = Recorder([*begun, *({"figure": OVER, "test": name, "ok": ok} for name, ok in over)], list[Any]().append)
    assert recorder.left_out == {"passed", "skipped", "flaky", "hangs"} and recorder.given_up == {"hangs"}


def test_processes_of_pytest_leave_out_the_same_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(LEFT_OUT, str(tmp_path / "names"))
    (tmp_path / "names").write_text("a.py::one\na.py::more[1]")
    items = [SimpleNamespace(nodeid=name) for name in ("a.py::one", "a.py::one_more", "a.py::more[1]", "a.py::more[2]")]
    gone: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: gone.extend(items))
    left_out.pytest_collection_modifyitems(SimpleNamespace(hook=hook), items)
    assert [item.nodeid for item in items] == ["a.py::one_more", "a.py::more[2]"] and len(gone) == 2
    rows: list[Any] = []
    recorder = Recorder([], rows.append)
    recorder.pytest_xdist_node_collection_finished([item.nodeid for item in items])
    recorder.pytest_xdist_node_collection_finished([item.nodeid for item in items])  # another process, the same tests
    assert recorder.open == {"a.py::one_more", "a.py::more[2]"} and len(rows) == 1


def test_a_row_of_a_failed_test_says_what_was_found(tmp_path: Path) -> None:
    text = "def test_it():\n    found, counted = 7, 4\n    assert found <= counted, (found,)"
    (tmp_path / "test_it.py").write_text(text)
    rows: list[Any] = []
    pytest.main(["-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(tmp_path)], plugins=[Recorder([], rows.append)])
    (row,) = [row for row in rows if row["figure"] == OVER]
    assert row["ok"] is False and "test_it.py:3: AssertionError" in row["why"]
    assert "(7,)" in row["why"] and "assert 7 <= 4" in row["why"]


def test_time_at_work_counts_what_overlaps_once() -> None:
    assert union_length([(4.0, 6.0), (0.0, 2.0), (1.0, 3.0), (4.5, 5.0)]) == pytest.approx(5.0)
    assert union_length([]) == 0.0


def test_a_clone_of_any_name_can_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    gpu_first.make_importable(tmp_path)
    assert (Path(sys.path[0]) / "penstock" / "ir" / "ops" / "table.py").is_file()
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [sys.path[0], "elsewhere"]
