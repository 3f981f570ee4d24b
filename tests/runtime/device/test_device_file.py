"""Generated files read back: an edited text is what runs, and what is wrong with it is said with file and line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from penstock.ir.errors import VerifyError
from penstock.runtime.device.file import open_device_file, open_directory
from penstock.runtime.source.trust import TRUSTED, Trust
from penstock.tests.codegen.generated import Generated, generate, run
from penstock.tests.codegen.tiny import Tiny, tiny_batch


@pytest.fixture
def generated() -> Generated:
    torch.manual_seed(0)
    return generate(Tiny(), tiny_batch())


def edit(generated: Generated, folder: Path, old: str, new: str) -> Path:
    generated.load(folder)
    assert generated.text.count(old) == 1, old
    path = folder / "device0.py"
    path.write_text(generated.text.replace(old, new))
    return path


def line_of(path: Path, text: str) -> int:
    return next(i for i, line in enumerate(path.read_text().splitlines(), 1) if text in line)


def test_an_edit_is_what_runs_even_in_the_same_second(generated: Generated, tmp_path: Path) -> None:
    file = generated.load(tmp_path)
    before = run(generated, file, tiny_batch(), training=False)["loss"]
    path = tmp_path / "device0.py"
    stat = path.stat()
    assert "torch.tanh(" in generated.text
    path.write_text(generated.text.replace("torch.tanh(", "torch.sinh("))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    again = open_directory(tmp_path)[0]
    assert not torch.equal(run(generated, again, tiny_batch(), training=False)["loss"], before)
    assert torch.equal(run(generated, file, tiny_batch(), training=False)["loss"], before)
    assert again.text == path.read_text()


def assert_refused(generated: Generated, path: Path, marked: str, message: str, *trust: Trust) -> None:
    """The file is refused at the line that holds `marked`, with this message."""
    with pytest.raises(VerifyError, match=message) as caught:
        open_device_file(path, generated.interface, 0, *trust)
    assert caught.value.line == line_of(path, marked)
    assert f"{path}:{caught.value.line}" in str(caught.value)
    assert caught.value.device == 0


@pytest.mark.parametrize(
    ("old", "new", "marked", "message"),
    [
        ("        x = self.embed(ids)  ", "        x = = self.embed(ids)  ", "x = = self", "not Python"),
        ("    return {}", "    rt.teleport(batch)\n    return {}", "rt.teleport", "no op `teleport`"),
        ("    return {}", "    for i in range(3): rt.free()", "for i in range(3): rt", "only `names = rt.op"),
        ("import torch\n", "import torch\nimport no_such_module\n", "import no_such", "imports torch, math, operator"),
        ("self.embed = nn.Embedding(8, 4)", "self.embed = nn.Embeding(8, 4)", "nn.Embeding", "`nn` has no 'Embeding'"),
        ("torch.tanh(", "torch.tanhh(", "torch.tanhh", "`torch` has no 'tanhh'"),
        ("nn.Embedding(8, 4)", "nn.Embedding(8, 5)", "class Stage0", r"embed.weight of stage0 is \[8, 4\]"),
        ("nn.Embedding(8, 4)", "nn.Embedding(8)", "nn.Embedding(8)", "building Stage0 failed: TypeError"),
        ("self.register_buffer(", "self.register_buffers(", "self.register_buffers(", "nothing that is printed"),
        ('("scale", torch', '("scales", torch', "class Stage0", "but Stage0 lacks it"),
        ('STAGES = {"stage0": Stage0}', 'STAGES = {"stage7": Stage0}', "STAGES =", "there are stage0"),
        ('STAGES = {"stage0": Stage0}', 'STAGES = {"stage0": nn.Linear}', "STAGES =", "not a class of this file"),
    ],
)
def test_a_wrong_edit_is_refused_with_its_place(
    generated: Generated, tmp_path: Path, old: str, new: str, marked: str, message: str
) -> None:
    assert_refused(generated, edit(generated, tmp_path, old, new), marked, message)


@pytest.mark.parametrize(
    ("old", "new", "marked", "message"),
    [
        ("import torch\n", "import torch\nimport no_such_module\n", "import no_such", "ModuleNotFoundError"),
        ("self.embed = nn.Embedding(8, 4)", "self.embed = nn.Embeding(8, 4)", "nn.Embeding", "AttributeError"),
        ("self.register_buffer(", "self.register_buffers(", "self.register_buffers(", "building Stage0 failed"),
        ('STAGES = {"stage0": Stage0}', 'STAGES = {"stage0": nn.Linear}', "STAGES =", "building Linear failed"),
    ],
)
def test_a_wrong_edit_of_a_trusted_file_is_refused_with_its_place(
    generated: Generated, tmp_path: Path, old: str, new: str, marked: str, message: str
) -> None:
    assert_refused(generated, edit(generated, tmp_path, old, new), marked, message, TRUSTED)


def test_only_a_trusted_file_runs_what_is_never_printed(
    generated: Generated, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = edit(generated, tmp_path, "\nSTAGES =", "\nprint('here')\n\nSTAGES =")
    with pytest.raises(VerifyError, match=r"`print\('here'\)`: a file holds its imports.*trust=True") as caught:
        open_device_file(path, generated.interface, 0)
    assert caught.value.line == line_of(path, "print(")
    assert capsys.readouterr().out == ""
    open_device_file(path, generated.interface, 0, TRUSTED)
    assert capsys.readouterr().out == "here\n"


def test_missing_parts_are_named(generated: Generated, tmp_path: Path) -> None:
    path = edit(generated, tmp_path, 'STAGES = {"stage0": Stage0}\n', "")
    with pytest.raises(VerifyError, match="no STAGES"):
        open_device_file(path, generated.interface, 0)
    path = edit(generated, tmp_path, "def step(rt, batch):", "def walk(rt, batch):")
    with pytest.raises(VerifyError, match=r"device0.py: .*one function `step"):
        open_device_file(path, generated.interface, 0)
    path.unlink()
    with pytest.raises(VerifyError, match=r"device0\.py: cannot be read"):
        open_directory(tmp_path)
    with pytest.raises(VerifyError, match=r"holds no interface\.json"):
        open_directory(tmp_path / "elsewhere")
    (tmp_path / "interface.json").write_text('{"stages": 3}')
    with pytest.raises(VerifyError, match="not an interface"):
        open_directory(tmp_path)
