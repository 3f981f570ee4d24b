"""Adapters of PEFT: equality with eager PyTorch over ten families of models, and what a frozen base saves of traffic.

Part 1 trains a tiny model of each family, from random weights, for 5 steps in fp32 with AdamW: by PyTorch as it is, and
by a job of three stages whose weights come from DRAM. A row has the largest difference of losses and of weights.
Part 2 counts the bytes that a step moves between DRAM and the device, for LoRA and for all weights, and what was
predicted; of `llama-8b` on an RTX 4090 only the prediction.
Run: python bench/adapters.py [FAMILY ...] [traffic]
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn

import penstock
from penstock.bench.peers import rows
from penstock.compiler.models.named import find_model

STEPS, ROWS, TOKENS, MICRO_BATCHES = 5, 8, 16, 4
ADAMW = partial(torch.optim.AdamW, lr=1e-3)
SWAPPED = (
    "coarsen, partition-balanced{stages=3}, map-cross, schedule-pipeline, insert-remat, insert-fetch{swap=true}, "
    "insert-optimizer"
)
LLAMA = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {  # class, dimensions, the module that modules_to_save names
    "gpt2": ("CausalLM", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32}, "lm_head"),
    "llama": ("CausalLM", LLAMA, "lm_head"),
    "qwen3": ("CausalLM", LLAMA, "lm_head"),
    "mistral": ("CausalLM", {**LLAMA, "sliding_window": 8}, "lm_head"),
    "gemma3_text": ("CausalLM", {**LLAMA, "sliding_window": 8}, "lm_head"),
    "phi3": ("CausalLM", {k: v for k, v in LLAMA.items() if k != "head_dim"}, "lm_head"),
    "opt": (
        "CausalLM",
        {
            "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
            "word_embed_proj_dim": 32, "max_position_embeddings": 32,
        },
        "lm_head",
    ),
    "gpt_neox": (
        "CausalLM",
        {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "vocab_size": 64,
        },
        "lm_head",
    ),
    "bert": (
        "SequenceClassification",
        {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "vocab_size": 64, "num_labels": 3,
        },
        "classifier",
    ),
    "t5": (
        "Seq2SeqLM",
        {
            "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64,
            "decoder_start_token_id": 0,
        },
        "lm_head",
    ),
}  # fmt: skip
ADAPTERS: dict[str, dict[str, Any]] = {"lora": {}, "dora": {"use_dora": True}, "modules_to_save": {}}


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    chosen = sys.argv[1:] or [*FAMILIES, "traffic"]
    for family in FAMILIES:
        for adapter in ADAPTERS if family in chosen else ():
            found = equal(family, adapter)
            rows.save("adapters", {"part": "equality", "family": family, "adapter": adapter, **found})
    if "traffic" in chosen:
        for row in traffic():
            rows.save("adapters", {"part": "traffic", **row})


def equal(family: str, adapter: str) -> dict[str, Any]:
    """Train by both and compare."""
    model = adapt(family, adapter)
    batch = random_batch(family)
    eager = copy.deepcopy(model)
    expected = train(eager, batch)
    with compile_job(model, batch) as job:
        assert job.plan.decisions.fetch
        losses = [float(job.step(batch)) for _ in range(STEPS)]
        found = job.state_dict()
    trained = {name: p.detach() for name, p in eager.named_parameters() if p.requires_grad}
    frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    return {
        "stages": len(job.plan.decisions.stages),
        "trained": sum(t.numel() for t in trained.values()),
        "frozen": sum(t.numel() for t in frozen.values()),
        "loss_difference": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "weight_difference": max(float((found[name] - t).abs().max()) for name, t in trained.items()),
        "frozen_changed": sum(not torch.equal(found[name], t) for name, t in frozen.items()),
        "last_loss": losses[-1],
    }


def adapt(family: str, adapter: str) -> nn.Module:
    kind, dimensions, head = FAMILIES[family]
    config = transformers.AutoConfig.for_model(family, **dimensions)
    dropouts = {key: 0.0 for key, value in config.to_dict().items() if "drop" in key and isinstance(value, float)}
    config = transformers.AutoConfig.for_model(family, **dimensions, **dropouts)
    config.use_cache = False
    torch.manual_seed(0)
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(config).train()
    given = {"modules_to_save": [head]} if adapter == "modules_to_save" else ADAPTERS[adapter]
    tasks = {"CausalLM": "CAUSAL_LM", "SequenceClassification": "SEQ_CLS", "Seq2SeqLM": "SEQ_2_SEQ_LM"}
    # Both factors begin with numbers, so that a mistake in either shows at once.
    chosen = peft.LoraConfig(r=4, target_modules="all-linear", task_type=tasks[kind], init_lora_weights=False, **given)
    return peft.get_peft_model(model, chosen)


def random_batch(family: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 64, (ROWS, TOKENS))
    labels = torch.randint(0, 3, (ROWS,)) if FAMILIES[family][0] == "SequenceClassification" else ids.clone()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def train(model: nn.Module, batch: Mapping[str, Tensor]) -> list[float]:
    """By PyTorch as it is, with gradients of micro-batches added up."""
    optimizer, losses = ADAMW([p for p in model.parameters() if p.requires_grad]), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for part in range(MICRO_BATCHES):
            loss = model(**{name: t.chunk(MICRO_BATCHES)[part] for name, t in batch.items()}).loss
            (loss / MICRO_BATCHES).backward()
            total += float(loss.detach()) / MICRO_BATCHES
        optimizer.step()
        losses.append(total)
    return losses


def compile_job(model: nn.Module, batch: Mapping[str, Tensor], memory: str = "64MB", strategy: str = SWAPPED) -> Any:
    machine = penstock.Hardware.cpu(num_devices=1, memory=memory, dram="1GB")
    return penstock.compile(
        model, machine, example_inputs=batch, optimizer=ADAMW, micro_batches=MICRO_BATCHES, strategy=strategy
    )


def traffic() -> Iterator[dict[str, Any]]:
    """Bytes over the link of one device in a step, predicted and counted."""
    batch = random_batch("llama")
    config = transformers.AutoConfig.for_model("llama", **{**LLAMA, "num_hidden_layers": 16}, use_cache=False)
    for what in ("all weights", "lora on all layers", "lora on the last two layers"):
        torch.manual_seed(0)
        model: Any = transformers.AutoModelForCausalLM.from_config(config).train()
        if what != "all weights":
            layers = [14, 15] if "last" in what else None
            chosen = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], layers_to_transform=layers)
            model = peft.get_peft_model(model, chosen)
        with compile_job(model, batch, "700kB", SWAPPED.replace("stages=3", "stages=8")) as job:
            told = job.simulate().moved_bytes
            for _ in range(2):
                job.step(batch)
            assert job.last is not None
            yield {
                "model": "llama, 16 tiny layers", "what": what, "memory": "700kB",
                "predicted_to_device": told["cpu0.down"], "counted_to_device": job.last.moved_bytes["dram0 -> cpu0"],
                "predicted_from_device": told["cpu0.up"],
                "counted_from_device": job.last.moved_bytes.get("cpu0 -> dram0", 0),
            }  # fmt: skip
    for what, adapter in (("all weights", None), ("lora on all layers", "lora:r=16,targets=all-linear")):
        found = find_model("llama-8b", adapter=adapter)
        spec = {name: row for name, row in found.batch_spec(8, 2048).items() if name != "attention_mask"}
        machine = penstock.Hardware.preset("rtx4090x1", dram="256GB")
        job = penstock.compile(
            found.on_meta(), machine, example_inputs=spec, precision="bf16-mixed", strategy="mobius", micro_batches=4
        )
        told, predicted = job.simulate().moved_bytes, job.plan.predicted
        assert predicted is not None
        yield {
            "model": "llama-8b, 8 x 2048 tokens, bf16-mixed, rtx4090x1", "what": what, "memory": "24GB",
            "predicted_to_device": told["gpu0.down"], "predicted_from_device": told["gpu0.up"],
            "step_s": predicted.step_s, "peak_bytes": predicted.peak_bytes,
        }  # fmt: skip


if __name__ == "__main__":
    main()
