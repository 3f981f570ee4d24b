"""torch.distributed.pipelining on two or more processes over gloo, driven from one script.

`TorchPipeline` starts the processes; each builds its stages, traced by torch or cut by hand, and then runs one step per
line on its standard input. Run directly, this file is such a process: python torch_pipeline.py RANK SETUP, where SETUP
is `Setup` as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.bench.peers import models

LR = 1e-4
CALM = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Setup:
    """The settings of a process. `splits` are the modules that begin the stages after the first; stages are dealt to
    the `world` processes in turn. `model` names a function of `models`. With `by_hand` the stages are slices of a GPT-2
    that pass on only its hidden states; else torch traces the model."""

    schedule: str
    splits: list[str]
    micro_batches: int
    world: int
    by_hand: bool = False
    model: str = "untied_gpt2"
    rows: int = 8
    store: str = ""


class TorchPipeline:
    """A pipeline of processes with one thread each. Raises `RuntimeError` with the reason if torch refuses."""

    def __init__(self, schedule: str, splits: list[str], micro_batches: int, world: int = 0, **options: Any):
        self.folder = tempfile.TemporaryDirectory(prefix="bench-")
        world, store = world or len(splits) + 1, str(Path(self.folder.name, "store"))
        setup = json.dumps(asdict(Setup(schedule, splits, micro_batches, world, **options, store=store)))
        self.children = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), setup],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **CALM},
            )
            for rank in range(world)
        ]  # fmt: skip
        try:
            self._answers()
        except BaseException:
            self.close()
            raise

    def step(self) -> float:
        """Run one step on all processes. Returns the mean loss."""
        for child in self.children:
            child.stdin.write("step\n")
            child.stdin.flush()
        return next(answer["loss"] for answer in self._answers() if answer["loss"] is not None)

    def _answers(self) -> list[dict[str, Any]]:
        lines = [child.stdout.readline() for child in self.children]
        if not all(lines):
            raise RuntimeError("a process of torch's pipeline ended; its output says why")
        answers = [json.loads(line) for line in lines]
        refused = [answer["refused"] for answer in answers if "refused" in answer]
        if refused:  # prefer the error that is not only about a neighbour that has left
            raise RuntimeError(min(refused, key=lambda text: text.startswith(("RuntimeError", "DistBackendError"))))
        return answers

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


class Embeddings(nn.Module):
    """The word and position tables of a GPT-2."""

    def __init__(self, words: nn.Module, places: nn.Module):
        super().__init__()
        self.words, self.places = words, places

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words(x) + self.places(torch.arange(x.shape[1]))


class Slice(nn.Module):
    """Modules of a GPT-2, one after another."""

    def __init__(self, parts: Sequence[nn.Module]):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            made = part(x)
            x = made[0] if isinstance(made, tuple) else made
        return x


def slices(model: nn.Module, splits: Sequence[str]) -> list[Slice]:
    """A GPT-2 cut before each of these modules."""
    body = model.transformer
    layers = {f"transformer.h.{i}": layer for i, layer in enumerate(body.h)}
    parts = {"": Embeddings(body.wte, body.wpe), **layers, "transformer.ln_f": body.ln_f, "lm_head": model.lm_head}
    ends = [0, *(list(parts).index(name) for name in splits), len(parts)]
    return [Slice(list(parts.values())[a:b]) for a, b in pairwise(ends)]


def stages_of(setup: Setup, model: nn.Module, inputs: Sequence[torch.Tensor], rank: int) -> list[Any]:
    from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline

    count, device = len(setup.splits) + 1, torch.device("cpu")
    if not setup.by_hand:
        spec = {name: SplitPoint.BEGINNING for name in setup.splits}
        pipe = pipeline(model, mb_args=tuple(t.chunk(setup.micro_batches)[0] for t in inputs), split_spec=spec)
        return [pipe.build_stage(i, device) for i in range(rank, count, setup.world)]
    parts = slices(model, setup.splits)
    return [PipelineStage(parts[i], i, count, device) for i in range(rank, count, setup.world)]


def schedule_of(setup: Setup, stages: list[Any], loss_of: Any) -> Any:
    from torch.distributed import pipelining as torch_pipelining

    names = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}
    kind = getattr(torch_pipelining, names[setup.schedule])
    own = stages if setup.schedule == "interleaved" else stages[0]
    return kind(own, setup.micro_batches, loss_fn=loss_of)


def refuse(error: Exception) -> None:
    reason = str(error).strip().splitlines() or [""]
    print(json.dumps({"refused": f"{type(error).__name__}: {reason[0].strip()}"}), flush=True)


def main(rank: int, setup: Setup) -> None:
    """One process of the pipeline."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{setup.store}", rank=rank, world_size=setup.world)
    model, batch = models.build_model(setup.model).train(), models.batch(setup.rows)
    words, labels = batch["input_ids"], batch["labels"]
    shifts = setup.model == "t5"  # the labels, shifted by one place, are also the decoder's input
    inputs = (words, batch["attention_mask"], model._shift_right(labels)) if shifts else (words,)

    def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
        logits = output["logits"] if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output
        if shifts:
            return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        return model.loss_function(logits=logits, labels=target, vocab_size=models.VOCABULARY)

    try:
        stages = stages_of(setup, model, inputs, rank)
        schedule = schedule_of(setup, stages, loss_of)
    except Exception as error:  # torch's error, whatever it is, is the answer
        refuse(error)
        return
    params = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(params, lr=LR, fused=True)
    print(json.dumps({"parameters": sum(p.numel() for p in params)}), flush=True)
    ends_here = any(stage.is_last for stage in stages)
    for _ in sys.stdin:
        optimizer.zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        given = {"target": labels, "losses": losses} if ends_here else {}
        try:
            schedule.step(*(inputs if stages[0].is_first else ()), **given)
        except Exception as error:
            refuse(error)
            return
        optimizer.step()
        mean = float(torch.stack(losses).detach().mean()) if losses else None
        print(json.dumps({"loss": mean}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Setup(**json.loads(sys.argv[2])))
