"""Fuyou's models and the largest that fit: tables 2 and 4, figure 4."""

from __future__ import annotations

from ..experiments import billions, sizes_table
from ..figures import Bars
from ..report import Finding
from ..table import FigureTable
from .experiments import Fuyou
from .programs import FUYOU, ZERO_INFINITY, lacks_device, machine, repeated_blocks

NONE = "none"
BY_SHAPE = "the shapes of a block's products"
TRAINABLE = {  # section 5.2: the largest models that its text names; 135B follows from its ratios 5.96 and 2.04
    ("Fuyou", "A100", "768GB"): "805B",
    ("Fuyou", "4090", "768GB"): "276B",
    ("Fuyou", "4090", "128GB"): "65B",
    ("ZeRO-Infinity", "A100", "768GB"): "135B",
    ("ZeRO-Infinity", "4090", "768GB"): "135B",
    ("ZeRO-Infinity", "A100", "512GB"): "65B",
    ("ZeRO-Infinity", "A100", "128GB"): NONE,
    ("ZeRO-Infinity", "4090", "128GB"): NONE,
}


def table2(paper: Fuyou) -> Finding:
    """Table 2: the benefit of swapping each layer's output."""
    work = paper.workload(paper.models[paper.usual], 8, 1)
    block = repeated_blocks(paper.blocks(work, machine("A100")))[0]
    calls = [call for call in block.cost.calls or () if "attention" not in str(block.nodes[call.node].target)]
    names = ("Linear_qkv", "Linear_htoh", "Linear_hto4h", "Linear_4htoh")
    unit, least = calls[1].bytes, min(call.flops / call.bytes for call in calls)
    table = FigureTable()
    for name, call, size, benefit in zip(names, calls, (3, 1, 4, 1), (1, 1, 1, 4)):
        table.add(name, "bytes of its output / those of Linear_htoh", call.bytes / unit, claim=size, apart=BY_SHAPE)
        found = call.flops / call.bytes / least
        table.add(name, "swap benefit, FLOPs per byte / the least", found, claim=benefit, apart=BY_SHAPE)
    return Finding(
        "table2",
        "benefit of swapping, per layer of a block",
        "outputs of 3, 1, 4 and 1 times b s h, whose benefits are as 1 to 1 to 1 to 4.",
        "the costs of a traced block's calls, as the planner uses them; the paper prints h^3 where h^2 is meant.",
        table,
        "the traced block makes other matrix products than the paper's four.",
    )


def table4(paper: Fuyou) -> Finding:
    """Table 4: the models."""
    named = {model: float(model[:-1]) for model in paper.models if model.endswith("B")}  # names that give the size
    table = sizes_table(paper.models, named)
    return Finding(
        "table4",
        "the models",
        "layers, heads and hidden sizes of GPT-3 from 13B to 805B.",
        "every parameter once, the output layer tied to the token embedding, vocabulary 50257, 2048 positions.",
        table,
    )


def fig4(paper: Fuyou) -> Finding:
    """Figure 4: the largest trainable model."""
    table = FigureTable()
    sizes: dict[str, list[float | None]] = {}
    for system, line in (("Fuyou", FUYOU), ("ZeRO-Infinity", ZERO_INFINITY)):
        for gpu in paper.gpus:
            found = largest_models(paper, gpu, line)
            sizes[f"{system}, {gpu}"] = [billions(paper.models[name]) if name != NONE else None for name in found]
            for dram, name in zip(paper.drams, found):
                claim, next_one = TRAINABLE.get((system, gpu, dram), ""), _next(paper, name)
                trial = paper.trial(next_one, 1, machine(gpu, dram), line) if next_one else None
                why = f"the next, {next_one}: {trial.misses}" if trial else "it is the largest of all"
                table.words(f"{gpu}, {dram}", f"largest model, {system}", claim, name, why)
    if len(paper.gpus) == 2:
        pairs = zip(paper.drams, *(sizes[f"Fuyou, {gpu}"] for gpu in paper.gpus))
        more = [dram for dram, first, second in pairs if (first or 0) > (second or 0)]
        claim = "384GB, 512GB, 640GB, 768GB"
        why = "from 128 GB on DRAM holds the buffers of any model here, so that the GPU alone decides"
        table.words("Fuyou", "A100 trains larger models than 4090 at", claim, ", ".join(more) or NONE, why)
    chart = Bars("fig4", "Largest trainable model", "B parameters", list(paper.drams), sizes, xlabel="DRAM")
    return Finding(
        "fig4",
        "the largest trainable model by DRAM size, batch 1",
        "805B on A100 and 276B on 4090 with 768 GB, 5.96x and 2.04x those of ZeRO-Infinity; 65B on 4090 with 128 GB, "
        "where ZeRO-Infinity fails to train 13B; it trains 65B from 512 GB on. From 384 GB on the A100 trains larger "
        "models than the 4090.",
        "the largest model of table 4 whose programs fit all memories, the smaller ones included: an exact count of "
        f"device, pinned DRAM and SSD bytes, {int(100 * machine('A100').hosts[0].dram_usable_fraction)}% of DRAM "
        "usable. ZeRO-Infinity: our program under its rules.",
        table,
        "our programs hold the buffers of a few blocks in DRAM and nothing else, so both need less of it. DeepSpeed's "
        "limits imply 4 to 6 bytes of DRAM a parameter and over 100 GB besides (13B fails in 128 GB, 65B in 384 GB, "
        "175B in 768 GB), of which the paper names no source; our program under its rules holds the gradients until "
        "the optimizer stage, 2 bytes a parameter, and pinned buffers of exactly the size that they need. On the 4090 "
        "a block's weights and gradients take 4 bytes a parameter, and the next block's weights come early only where "
        "there is room; the paper's prefetch queue takes its share always.",
        [chart],
    )


def _next(paper: Fuyou, name: str) -> str:
    """The model after the largest that fits; empty after the last."""
    names = [*paper.models, ""]
    return names[names.index(name) + 1] if name != NONE else names[0]


def largest_models(paper: Fuyou, gpu: str, line: str) -> list[str]:
    """For each DRAM size, the largest model that fits together with all smaller ones. More DRAM holds all that less
    does, so no model that fits is tried again."""
    names = list(paper.models)
    found, count, stuck = [], 0, False
    for dram in paper.drams:
        while count < len(names) and not stuck:
            trial = paper.trial(names[count], 1, machine(gpu, dram), line)
            if trial.timeline is None:
                stuck = lacks_device(trial)
                break
            count += 1
        found.append(names[count - 1] if count else NONE)
    return found
