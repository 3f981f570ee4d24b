"""Peak of tensors in a training step with attention's masks and without them, predicted and measured, on CPU.

One stage of two layers at 4096 tokens: forward and backward of one micro-batch, every tensor counted as it lives.

Run: python bench/attention.py [--sequence N]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import nn

from penstock.bench.peers import rows
from penstock.compiler.capture.trace import trace
from penstock.graph.opgraph import OpGraph
from penstock.ir.machine.hardware import Hardware
from penstock.passes.rewrite.drop_masks import DropMasks
from penstock.tests.passes.running import all_passes, apply, draft_of
from penstock.tests.passes.stage_runs import Peak, stages_of

PEAK_TARGET = 0.05
WINDOW = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequence", type=int, default=4096)
    args = parser.parse_args()
    for name in ("llama", "mistral"):
        graph = trace(model(name, args.sequence), batch(args.sequence))
        without = apply(draft_of(graph), DropMasks())
        for masks, taken in (("kept", graph), ("dropped", without.graph)):
            figures = compare(taken, batch(args.sequence))
            rows.save("attention", {"model": name, "sequence": args.sequence, "masks": masks, **figures})


def model(name: str, sequence: int) -> nn.Module:
    """Two layers of width 256 with eight heads; Mistral's see a window of 512 keys."""
    import transformers

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": sequence, "use_cache": False,
    }  # fmt: skip
    if name == "mistral":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, sliding_window=WINDOW))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def batch(sequence: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 512, (1, sequence), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def compare(graph: OpGraph, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    """One step's peak by the stage's costs, and that of its real tensors; weights and their gradients are not new."""
    machine = Hardware.cpu(num_devices=1, memory="8GB")
    draft = apply(draft_of(graph, machine), *all_passes(stages=1)[:4])
    (found,) = stages_of(draft, given, interpreted=True)
    spec, runner, inputs = found
    results = sum(output.bytes for output in spec.outputs)
    predicted = spec.kept_bytes + max(spec.forward_workspace_bytes + results, spec.backward_workspace_bytes)
    grads = _step(runner, inputs, None)
    with Peak() as peak:
        begin_s = time.perf_counter()
        _step(runner, inputs, grads)
        step_s = time.perf_counter() - begin_s
    return {
        "predicted_peak_bytes": predicted, "measured_peak_bytes": peak.most, "error": predicted / peak.most - 1,
        "target": PEAK_TARGET, "step_s": step_s,
    }  # fmt: skip


def _step(runner: Any, inputs: Any, grads: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    kept = runner.forward(inputs, 0)[1]
    found: dict[str, torch.Tensor] = runner.backward(kept, inputs, [1.0], grads, 0)[1]
    return found


if __name__ == "__main__":
    main()
