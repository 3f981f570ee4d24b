"""Train a language model whose state is four times the DRAM that it may use: weights and optimizer states on SSD.

Run: python examples/finetune_on_ssd.py --ssd /mnt/nvme0 [--ssd /mnt/nvme1]
Uses the first GPU if there is one, else a CPU device with a budget of its own. Downloads nothing: the text is Python's
language reference, byte by byte. Without --ssd the files go to a folder of this checkout, and are gone afterwards.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import penstock
from penstock.ir.units import format_bytes, format_seconds

STATE_BYTES = 16  # a parameter: fp32 weight, gradient and the two moments of AdamW
ALPHABET, LENGTH, BATCH, MICRO_BATCHES = 256, 128, 8, 2


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ssd", action="append", help="directory for files; one per SSD")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args(arguments)
    directories = args.ssd or [str(Path(__file__).resolve().parents[1] / "out" / "ssd")]
    for directory in directories:
        Path(directory).mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    model = language_model(args.layers, args.width)
    state_bytes = STATE_BYTES * sum(p.numel() for p in model.parameters())
    batches = text_batches()
    job = penstock.compile(
        model,
        machine(state_bytes),
        example_inputs=next(batches),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        micro_batches=MICRO_BATCHES,
        strategy="fuyou",
        ssd_dirs=directories,
    )
    print(job.explain())
    with job:
        losses = [float(job.step(batch)) for _, batch in zip(range(args.steps), batches)]
        report = job.last
    print(
        f"\nstate {format_bytes(state_bytes)}; loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {args.steps} steps"
    )
    print(f"step predicted {format_seconds(report.predicted_s)}, last {format_seconds(report.seconds)}")
    for memory, peak in report.peak_bytes.items():
        print(f"  {memory:6} peak {format_bytes(peak)}")
    for route, moved in report.moved_bytes.items():
        print(f"  {route:16} {format_bytes(moved)} a step")
    print(f"mean loss of the last five steps {statistics.mean(losses[-5:]):.3f}")
    return losses


def language_model(layers: int, width: int) -> GPT2LMHeadModel:
    shape = {"n_layer": layers, "n_embd": width, "n_head": max(1, width // 64), "n_positions": LENGTH}
    ends = {"bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(**shape, **ends, vocab_size=ALPHABET, use_cache=False))


def machine(state_bytes: int) -> penstock.Hardware:
    """The GPU of this machine, or a CPU device; DRAM for a quarter of the state."""
    dram = max(state_bytes // 4, 16 << 20)
    if torch.cuda.is_available():
        return penstock.Hardware.detect().with_(num_devices=1, dram=dram, dram_usable_fraction=1.0)
    disk = penstock.Hardware.cpu(1, memory=f"{max(state_bytes, 64 << 20)}B", dram=f"{dram}B", ssd="10GB")
    return disk


def text_batches() -> Iterator[dict[str, torch.Tensor]]:
    """Batches of consecutive passages, over and over."""
    data = torch.tensor(list("\n".join(topics.values()).encode()), dtype=torch.int64)
    rows = data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH)
    while True:
        for start in range(0, len(rows) - BATCH + 1, BATCH):
            ids = rows[start : start + BATCH]
            yield {"input_ids": ids, "labels": ids}


if __name__ == "__main__":
    main()
