"""torch.distributed.pipelining on two or more processes over gloo, driven from one script.

`TorchPipeline` starts the processes; each traces the model, takes its stage and then runs one step per line on its
standard input. Run directly, this file is such a process: python torch_pipeline.py RANK WORLD SPLIT SCHEDULE M STORE
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.bench.peers import models

LR = 1e-4
CALM = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class TorchPipeline:
    """A pipeline of `world` processes with one thread each. `splits`: modules that begin the later stages."""

    def __init__(self, schedule: str, splits: list[str], micro_batches: int):
        self.folder = tempfile.TemporaryDirectory(prefix="bench-")
        store = str(Path(self.folder.name, "store"))
        self.children = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), schedule, str(micro_batches), store, *splits],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **CALM},
            )
            for rank in range(len(splits) + 1)
        ]  # fmt: skip
        try:
            self._answers()
        except BaseException:
            self.close()
            raise

    def step(self) -> float:
        """One step on all processes. Returns the mean loss."""
        for child in self.children:
            child.stdin.write("step\n")
            child.stdin.flush()
        return self._answers()[-1]["loss"]

    def _answers(self) -> list[dict[str, Any]]:
        lines = [child.stdout.readline() for child in self.children]
        if not all(lines):
            raise RuntimeError("a process of torch's pipeline ended; its output says why")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        for child in self.children:
            child.stdin.close()
        for child in self.children:
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            child.stdout.close()
        self.folder.cleanup()

    def __enter__(self) -> TorchPipeline:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def main(rank: int, schedule_name: str, micro_batches: int, store: str, splits: list[str]) -> None:
    """One process of the pipeline."""
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline

    torch.set_num_threads(1)
    world = len(splits) + 1
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    model, batch = models.gpt2(tied=False).train(), models.batch()
    words, labels = batch["input_ids"], batch["labels"]
    piece = words.chunk(micro_batches)[0]
    pipe = pipeline(model, mb_args=(piece,), split_spec={name: SplitPoint.BEGINNING for name in splits})
    stage = pipe.build_stage(rank, torch.device("cpu"))
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=LR, fused=True)

    def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
        logits = output["logits"] if isinstance(output, dict) else output
        return model.loss_function(logits=logits, labels=target, vocab_size=models.VOCABULARY)

    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule_name]
    schedule = kind(stage, micro_batches, loss_fn=loss_of)
    print(json.dumps({"parameters": sum(p.numel() for p in stage.submod.parameters())}), flush=True)
    for _ in sys.stdin:
        optimizer.zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(words)
        elif rank == world - 1:
            schedule.step(target=labels, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        mean = float(torch.stack(losses).detach().mean()) if losses else None
        print(json.dumps({"loss": mean}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5:])
