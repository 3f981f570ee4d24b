"""Batches as long as they are against batches that are all padded to the most, and against eager PyTorch.

The lengths are those of real text: the paragraphs of Python's own help pages, read byte by byte, in batches of
paragraphs that follow each other; a batch is as long as its longest paragraph. Three sides take the same batches in
turns, in one process: a job with `dynamic_shapes`, the same plan compiled for the longest, and eager PyTorch. Tokens
count without padding. Also simulated: what the dynamic job says of these lengths.

Run: python bench/any_length.py [--rounds N]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import Dim

import penstock
from penstock.bench.peers import rows
from penstock.bench.peers.timing import whole_step

MOST, ROWS, BATCHES = 512, 8, 16
SIZE = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": MOST,
}  # fmt: skip
ADAMW = partial(torch.optim.AdamW, lr=1e-4, fused=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(2)
    batches = text_batches()
    padded = [{name: F.pad(t, (0, MOST - t.shape[1]), value=FILL[name]) for name, t in b.items()} for b in batches]
    model = llama()
    twin, other = copy.deepcopy(model), copy.deepcopy(model)
    machine = penstock.Hardware.cpu(1, memory="4GB")
    options: dict[str, Any] = {"optimizer": ADAMW, "strategy": "mobius", "micro_batches": 1}
    sequence = Dim("sequence", min=2, max=MOST)
    begin_s = time.process_time()
    job = penstock.compile(model, machine, example_inputs=batches[0], dynamic_shapes=sequence, **options)
    planned_s = time.process_time() - begin_s
    fixed = penstock.compile(other, machine, example_inputs=padded[0], **options)
    optimizer = ADAMW(twin.parameters())

    def eager(batch: dict[str, Tensor]) -> float:
        loss = twin(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    sides: dict[str, tuple[Callable[[dict[str, Tensor]], Any], list[dict[str, Tensor]]]] = {
        "dynamic": (partial(whole_step, job), batches),
        "padded": (partial(whole_step, fixed), padded),
        "eager": (eager, batches),
    }
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    losses: dict[str, list[float]] = {name: [] for name in sides}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    with job, fixed:
        for number in range(args.rounds + 1):
            for name, (step, data) in sides.items():
                begin_s = time.perf_counter()
                losses[name] += [step(batch) for batch in data]
                if number:  # the first round is warm-up
                    seconds[name].append(time.perf_counter() - begin_s)
        foreseen = job.throughput([batch["input_ids"].shape[1] for batch in batches])
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    apart = max(abs(a - b) / b for a, b in zip(losses["dynamic"], losses["eager"], strict=True))
    rows.save(
        "any_length",
        {
            "model": f"llama {SIZE['num_hidden_layers']} x {SIZE['hidden_size']}",
            "lengths": sorted(batch["input_ids"].shape[1] for batch in batches),
            "most": MOST,
            "tokens": tokens,
            **{f"{name}_tokens_per_s": round(tokens / took_s) for name, took_s in medians.items()},
            "dynamic_over_padded": round(medians["padded"] / medians["dynamic"], 3),
            "dynamic_over_eager": round(medians["eager"] / medians["dynamic"], 3),
            "simulated_over_padded": round(foreseen.tokens_per_s / foreseen.padded_tokens_per_s, 3),
            "largest_difference_of_losses_to_eager": apart,
            "planned_cpu_s": round(planned_s, 2),
            "rounds": args.rounds,
        },
    )


FILL = {"input_ids": 0, "attention_mask": 0, "labels": -100}


def text_batches() -> list[dict[str, Tensor]]:
    """Batches of paragraphs, each as long as its longest one."""
    paragraphs = [list(p.encode()[:MOST]) for text in topics.values() for p in text.split("\n\n") if len(p) > 1]
    stride = len(paragraphs) // BATCHES  # from all over the pages
    found = []
    for chosen in (paragraphs[i * stride : i * stride + ROWS] for i in range(BATCHES)):
        longest = max(map(len, chosen))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in chosen])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in chosen])
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return found


def llama() -> Any:
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE)).train()


if __name__ == "__main__":
    main()
