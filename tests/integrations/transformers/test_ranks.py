"""The same script under torchrun: two ranks train the batch that one process would."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Trainer

from penstock.runtime.processes.local import worker_environment
from penstock.tests.integrations.transformers.runs import TOLERANCE, llama, padding, tell_of, train_steps

SCRIPT = """
import json, sys
from pathlib import Path
from penstock.integrations.transformers import PenstockTrainer
from penstock.ir.machine.hardware import Hardware
from penstock.tests.integrations.transformers.runs import arguments, llama, padding

folder, strategy, resume = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
model, rows = llama()
given = arguments(
    folder, gradient_accumulation_steps=1, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=3,
    per_device_eval_batch_size=2,
)
def count(found):
    return {"rows": len(found.label_ids)}

trainer = PenstockTrainer(
    model=model, args=given, train_dataset=rows[:28], eval_dataset=rows[:7], data_collator=padding,
    compute_metrics=count, hardware=Hardware.cpu(2, memory="8GB"),
    compile_options={"strategy": strategy, "micro_batches": 2},
)
trainer.train(resume_from_checkpoint=resume[0] if resume else None)
trainer.save_model(folder / "model")
if trainer.is_world_process_zero():
    (folder / "told.json").write_text(json.dumps(trainer.state.log_history))
"""


def run(folder: Path, *more: str) -> list[dict]:
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*command, str(script), str(folder), *more], env=worker_environment(1), check=True, timeout=300)
    return json.loads((folder / "told.json").read_text())


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("strategy", ["data-parallel", "mobius"])
def test_two_ranks_train_as_one_process(strategy, tmp_path):
    from safetensors.torch import load_file

    found = run(tmp_path / "ours", strategy)
    alike = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 5, "per_device_eval_batch_size": 4}
    plain = train_steps(
        Trainer, lambda: (llama()[0], llama()[1][:28]), tmp_path / "plain", trainer={"data_collator": padding}, **alike
    )
    losses = torch.tensor([row["loss"] for row in found if "loss" in row])
    torch.testing.assert_close(losses, tell_of(plain, "loss"), rtol=2e-4, atol=TOLERANCE)
    assert [row["eval_rows"] for row in found if "eval_rows" in row] == [7, 7, 7]
    held = torch.tensor([row["eval_loss"] for row in found if "eval_loss" in row])
    torch.testing.assert_close(held, tell_of(plain, "eval_loss"), rtol=2e-4, atol=TOLERANCE)
    saved = load_file(tmp_path / "ours" / "model" / "model.safetensors")
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=name)
    again = run(tmp_path / "ours", strategy, str(tmp_path / "ours" / "checkpoint-3"))
    torch.testing.assert_close(torch.tensor([row["loss"] for row in again if "loss" in row]), losses)
