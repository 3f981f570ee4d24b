"""The distance of `partition-mip`'s partitions from the optimum: 8 model shapes, 4 machines, 10 seconds of work each.

Run: python bench/mip_gaps.py [SHAPE ...] [--machine NAME ...] [--deadline SECONDS]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import transformers
from torch import Tensor, nn

from penstock.bench import models, search_time
from penstock.bench.peers import rows
from penstock.compiler.capture.trace import trace
from penstock.compiler.models.named import find_model
from penstock.graph.opgraph import OpGraph
from penstock.ir.errors import DoesNotFit
from penstock.ir.machine.hardware import Hardware
from penstock.passes.draft import Draft, Options
from penstock.passes.partition_mip.partition_mip import MipFound, PartitionMip
from penstock.passes.rewrite.coarsen import Coarsen

MICRO_BATCHES = 8
MACHINES: dict[str, Callable[[], Hardware]] = {
    "8 x 3090 Ti": lambda: Hardware.preset("mobius-8gpu", dram="4TB"),
    "4 x 3090 Ti": lambda: Hardware.preset("mobius-topo2+2", dram="4TB"),
    "4 x 4090": lambda: Hardware.preset("rtx4090x4-2rc", dram="1TB"),
    "3090, 4090, 2080 Ti, 3090": lambda: search_time.machine(("rtx3090x1", "rtx4090x1", "ftpipe-2080ti", "rtx3090x1")),
}


class TowerAndLanguage(nn.Module):
    """A vision tower whose patches come before the words, as in LLaVA 1.5 7B. `pixel_values` f32[b, 3, 336, 336],
    `input_ids` and `labels` i64[b, s]; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
        self.tower = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**sizes, image_size=336, patch_size=14))
        self.projector = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 4096))
        self.language = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32064, use_cache=False))

    def forward(self, pixel_values: Tensor, input_ids: Tensor, labels: Tensor) -> Tensor:
        seen = self.projector(self.tower(pixel_values).last_hidden_state[:, 1:])
        words = self.language.get_input_embeddings()(input_ids)
        logits = self.language(inputs_embeds=torch.cat([seen, words], 1)).logits[:, seen.shape[1] :]
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def name_of(name: str, batch: int, sequence: int) -> OpGraph:
    found = find_model(name)
    return trace_case(found.on_meta(), found.batch_spec(batch, sequence))


def trace_case(model: nn.Module, spec: dict[str, object]) -> OpGraph:
    half = torch.float16
    return trace(model, spec, autocast=half, device_kind="cuda", param_dtype=half)


def tower() -> OpGraph:
    with torch.device("meta"):
        model = TowerAndLanguage().train()
    tokens = {"shape": [1, 512], "dtype": "int64"}
    images = {"shape": [1, 3, 336, 336], "dtype": "float32"}
    return trace_case(model, {"pixel_values": images, "input_ids": tokens, "labels": tokens})


def mixture() -> OpGraph:
    """Dense layers and mixtures of 16 experts in turn."""
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 36, "num_attention_heads": 32}
    experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "decoder_sparse_step": 2}
    config = transformers.Qwen3MoeConfig(**sizes, **experts, num_key_value_heads=4, head_dim=128, use_cache=False)
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config).train()
    model.set_experts_implementation("grouped_mm")
    tokens = {"shape": [1, 1024], "dtype": "int64"}
    return trace_case(model, {"input_ids": tokens, "labels": tokens})


def wide_resnet() -> OpGraph:
    with torch.device("meta"):
        model = models.WideResNet().train()
    images, labels = {"shape": [8, 3, 224, 224], "dtype": "float32"}, {"shape": [8], "dtype": "int64"}
    return trace_case(model, {"pixel_values": images, "labels": labels})


SHAPES: dict[str, Callable[[], OpGraph]] = {
    "GPT-3 175B, 96 equal layers": lambda: name_of("gpt3-175b", 1, 2048),
    "GPT-2 of 96 layers of 2048": lambda: name_of("gpt2:n_layer=96,n_embd=2048,n_head=16", 2, 1024),
    "Llama 8B": lambda: name_of("llama-8b", 1, 2048),
    "BERT 10B, 127 layers": lambda: name_of("mics-bert-10b", 4, 512),
    "T5 3B": lambda: name_of("t5-3b", 2, 512),
    "vision tower and Llama 7B": tower,
    "dense and expert layers in turn": mixture,
    "WideResNet 3B": wide_resnet,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=[*SHAPES], metavar="SHAPE")
    parser.add_argument("--machine", action="append", choices=[*MACHINES], help="may be repeated (default: all)")
    parser.add_argument("--deadline", type=float, default=10.0, help="seconds of work (default: %(default)s)")
    options = parser.parse_args()
    unknown = sorted({*options.shapes} - {*SHAPES})
    if unknown:
        parser.error(f"SHAPE {unknown[0]!r}: there are {', '.join(SHAPES)}")
    for shape in options.shapes:
        graph = SHAPES[shape]()
        for machine in options.machine or MACHINES:
            draft = Draft(graph, MACHINES[machine](), Options(precision="fp16", micro_batches=MICRO_BATCHES))
            coarsen = Coarsen()
            coarsen.rewrite(draft, coarsen.plan(draft))
            row = {"shape": shape, "server": machine, "blocks": len(draft.blocks), "micro_batches": MICRO_BATCHES}
            row["deadline_s"] = options.deadline
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            try:
                found = MipFound.find(draft, PartitionMip(deadline_s=options.deadline, prove=True))
            except DoesNotFit as error:
                rows.save("mip_gaps", {**row, "fits": False, "why": str(error)})
                continue
            took = {"took_s": time.perf_counter() - began_s, "cpu_s": time.process_time() - began_cpu_s}
            rows.save(
                "mip_gaps",
                {
                    **row, "fits": True, "runs": len(found.problem.runs()), "kinds": len(set(found.problem.kinds)),
                    "stages": len(found.best_cuts) - 1, "resident": sum(found.residents), "best_s": found.best_s,
                    "lower_s": found.proof.lower_s, "gap": 1 - found.proof.lower_s / found.best_s,
                    "remark": found.remark(), **took,
                },
            )  # fmt: skip


if __name__ == "__main__":
    main()
