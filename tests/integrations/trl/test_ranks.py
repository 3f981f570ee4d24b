"""The same script under torchrun: two ranks train the batch that one process of TRL would."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trl import DPOTrainer, SFTTrainer

from penstock.runtime.processes.local import worker_environment
from penstock.tests.integrations.trl import test_dpo, test_sft
from penstock.tests.integrations.trl.case import tell_of

SCRIPT = """
import json, sys
from pathlib import Path
from penstock.integrations.trl import PenstockDPOTrainer, PenstockSFTTrainer
from penstock.ir.machine.hardware import Hardware
from penstock.tests.integrations.trl import test_dpo, test_sft

folder, method = Path(sys.argv[1]), sys.argv[2]
more = {"hardware": Hardware.cpu(2, memory="8GB"), "compile_options": {"micro_batches": 2}}
alike = {"gradient_accumulation_steps": 1, "eval_strategy": "steps", "eval_steps": 2}
if method == "dpo":
    trainer = test_dpo.make(PenstockDPOTrainer, folder, test_dpo.new_adapters, more, **alike)
else:
    trainer = test_sft.make(PenstockSFTTrainer, folder, test_sft.DATA["packed"], more=more, **alike)
trainer.train()
if trainer.is_world_process_zero():
    (folder / "told.json").write_text(json.dumps(trainer.state.log_history))
"""


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_two_ranks_train_as_one_process(method, tmp_path):
    folder = tmp_path / "ours"
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    given = [str(folder / "script.py"), str(folder), method]
    subprocess.run([*command, *given], env=worker_environment(1), check=True, timeout=300)
    evaluating = {"eval_strategy": "steps", "eval_steps": 2}
    if method == "dpo":
        plain = test_dpo.train(DPOTrainer, tmp_path / "plain", **evaluating)
        names = ["loss", "num_tokens", "eval_loss", "eval_rewards/margins"]
    else:
        plain = test_sft.train(SFTTrainer, tmp_path / "plain", test_sft.DATA["packed"], **evaluating)
        names = ["loss", "num_tokens"]
    found = json.loads(Path(folder, "told.json").read_text())
    for name in names:
        ours = torch.tensor([entry[name] for entry in found if name in entry])
        assert len(ours) >= 2
        torch.testing.assert_close(ours, tell_of(plain, name), rtol=2e-4, atol=1e-5, msg=name)
