"""Published runs of other systems: a table of them, and each as the model, the machine and the way to train it.

A table is a TSV file with the columns `COLUMNS`. `batch`: "2", "16 (2/GPU)", "micro-batch 4", "1 x 4" (rows of a
micro-batch, and their number) or "96 (3 x 4/GPU)", the same for each GPU. `seq`: tokens, "224x224 images", or "at most
N" where lengths vary, so that only memory is compared. `value`: a number of `unit`, or OOM. `note`: "peak N GiB", and
whether there is activation checkpointing. `system` names the way to train, which is stated once for each system
(`WAYS`): no choice is made for a row.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..ir.errors import PlanError
from ..ir.machine.presets import PARTS
from ..ir.machine.validation import close_names
from ..ir.units import parse_bytes

COLUMNS = (
    "source", "system", "gpu", "n_gpus", "dram", "ssd", "model", "params", "batch", "seq", "precision", "adapters",
    "value", "unit", "note",
)  # fmt: skip
UNITS = ("tokens/s", "tokens/s/GPU", "s/step", "s/micro-batch", "TFLOPS", "fits")
OUT_OF_MEMORY = "OOM"
_MPT = "gpt3-13b:n_layer={},n_embd={},n_head={},vocab_size=50368,n_positions={}"
_LAYERS = "hidden_size={},intermediate_size={},num_hidden_layers={},num_attention_heads={},num_key_value_heads={}"
_QWEN = f"llama-8b:{_LAYERS},vocab_size=152064"
_LLAMA_3B = "hidden_size=3072,intermediate_size=8192,num_hidden_layers=28,num_attention_heads=24"
_VIT_GIANT = "hidden_size=1536,num_hidden_layers=40,num_attention_heads=24,intermediate_size=6144,image_size=224"
MODELS = {  # by the tables' names; any other name is one of Penstock's own
    "Llama3-8B": "llama-8b", "Llama3-70B": "llama-70b", "GPT 13B 40x5120": "gpt3-13b",
    "GPT 175B 96x12288": "gpt3-175b", "vit_giant_patch14_dinov2": f"vit-base:{_VIT_GIANT},patch_size=14",
    "Llama-3.2-3B": f"llama-8b:{_LLAMA_3B},tie_word_embeddings=true",
    "StableLM Alpha": "stablelm-alpha-3b",
    "Qwen2.5-7B": _QWEN.format(3584, 18944, 28, 28, 4), "Qwen2.5-32B": _QWEN.format(5120, 27648, 64, 40, 8),
    "MPT-3b": _MPT.format(32, 2560, 20, "{}"), "MPT-7b": _MPT.format(32, 4096, 32, "{}"),
    "MPT-13b": _MPT.format(40, 5120, 40, "{}"), "MPT-30b": _MPT.format(48, 7168, 64, "{}"),
    "MPT-70b": _MPT.format(80, 8192, 64, "{}"),
}  # fmt: skip
GPUS: dict[str, tuple[str, dict[str, Any]]] = {  # a part, and what differs by the datasheet; or a part's own name
    "A100 80GB": ("a100-80gb", {}), "a100_80gb": ("a100-80gb", {}), "A100 40GB": ("a100-40gb", {}),
    "A100 40GB SXM": ("a100-40gb", {}), "a100_40gb": ("a100-40gb", {}), "h100_80gb": ("h100", {}),
    "RTX 4090 24GB": ("rtx4090", {}),
    "H100 96GB (HBM2e 2.4 TB/s)": ("h100", {"memory_bandwidth": 2.4e12, "memory": "96GiB"}),
    "A6000 48GB": ("rtx4090", {
        "peak_flops": {"fp32": 38.7e12, "bf16": 154.8e12}, "memory_bandwidth": 768e9, "memory": "48GiB",
        "rates": {"source": "the datasheet", "pointwise": {2**28: 768e9}},
    }),
    "RTX 4070 Ti SUPER 16GB": ("rtx4090", {
        "peak_flops": {"fp32": 44.1e12, "bf16": 88.2e12}, "memory_bandwidth": 672e9, "memory": "16GiB",
        "rates": {"source": "the datasheet", "pointwise": {2**28: 672e9}},
    }),
}  # fmt: skip
FUYOU = "fuyou-4090"  # the machine of rows that name SSDs


@dataclass(frozen=True)
class Way:
    """The nearest that Penstock has to a system's own way to train. `passes`: those before and after `insert-remat`;
    `again`: whether that computes layers again, None: as a row's note says. `own_types`: weights, gradients and states
    in bf16, without fp32 masters; `precision`: in place of the row's. `rows`: of a micro-batch, where the table does
    not say; 0: the best. `differs`: the reason where ours differs. `left_out`: the reason why the system's runs cannot
    be compared."""

    why: str
    passes: tuple[str, str] = ("", "")
    again: bool | None = None
    own_types: bool = False
    precision: str = ""
    optimizer: str = "torch.optim.AdamW"
    rows: int | None = None
    differs: str = ""
    left_out: str = ""

    def pipeline(self, note: str) -> str:
        """The passes, for a row with this note."""
        before, after = self.passes
        how = "always" if self.computes_again(note) else "never"
        return f"{before}insert-remat{{{how}=true}}{after}" if after else before

    def computes_again(self, note: str) -> bool:
        """Whether layers are computed again before their backward."""
        said = re.search(r"checkpointing True|(full|activation) checkpointing", note) is not None
        return said if self.again is None else self.again


def _one(form: str = "", offload: str = "") -> tuple[str, str]:
    """Everything on one GPU, a layer a stage. `form`: passes over the op graph; `offload`: the optimizer's pass where
    the CPU steps what is fetched for each use."""
    start = f"{form}coarsen, partition-min-stage{{inputs_leave=true}}, map-round-robin, schedule-1f1b, "
    return start, f", insert-fetch{{swap=true}}, {offload}" if offload else ", insert-fetch, insert-optimizer"


def _fsdp(form: str = "", sums: str = "micro-batch", saved: str = "") -> tuple[str, str]:
    """Every GPU keeps a part of each layer, gathers the next layer ahead, and scatters gradients with each
    micro-batch."""
    start = f"{form}coarsen, mesh{{shards=devices}}, partition-min-stage{{inputs_leave=true}}, map-round-robin, "
    end = f", insert-shard{{tier=device, hold=false, prefetch=1}}, insert-two-hop{{every={sums}}}, insert-optimizer"
    return (f"{start}schedule-1f1b, {saved}{end}", "") if saved else (f"{start}schedule-1f1b, ", end)


MASKS, CHUNKED, FUSED = "drop-masks, ", "chunk-loss, ", "fuse-pointwise, "
_TUNE = MASKS + CHUNKED + FUSED
_COMPILED = "torch.compile fuses pointwise calls"
_IN_BF16 = "all on one GPU; weights, gradients and states in bf16"
_STATES_AWAY = "the CPU steps states in DRAM under the backward pass; weights are fetched for each use, theirs once"
_INPUTS_AWAY = f"{_one(_TUNE)[0]}choose-activations{{to=dram, share=0}}, insert-fetch, insert-optimizer", ""
_FEWER = "a compiler fuses more than chains of one result, and in backward as well"
_TIED = "a tied table counts in the first and in the last stage: 2.9 GiB of weights, gradients and states"
_UNPACKED = "NF4 adds a quarter to a layer of 1,024 tokens; LoRA's branches are priced call by call"
_AT_REST = "weights come and go, and are fetched as early as memory has room; theirs stay"
_HALF_KEPT = "choose-activations{to=device, share=0.5}"
WAYS: dict[str, Way] = {  # by a pattern of the system and the number of GPUs, such as "litgpt x1": the first found
    r"cumulative: baseline": Way("", left_out="rows are not packed, and their lengths are not said"),
    r"cumulative: \+packed": Way(_IN_BF16, _one(MASKS), False, True, differs=_TIED),
    r"cumulative: \+compile": Way(_COMPILED, _one(MASKS + FUSED), False, True, differs=_FEWER),
    r"cumulative: \+chunked": Way("its loss in chunks added", _one(_TUNE), False, True, differs=_FEWER),
    r"cumulative: \+(activation check|optimizer)": Way(
        "each layer computed again, its optimizer after the backward pass", _one(_TUNE), True, True,
        differs=f"{_FEWER}; {_TIED}; stages that stay are stepped after the backward pass, so all gradients wait",
    ),
    r"cumulative: \+activation off": Way(
        "inputs of layers go to DRAM", _INPUTS_AWAY, True, True,
        differs=f"{_FEWER}; {_TIED}; all gradients wait for the update",
    ),
    r"cumulative: \+8-bit": Way(
        "states of 8 bits added", _INPUTS_AWAY, True, True, optimizer="bitsandbytes.optim.AdamW8bit",
        differs=f"{_FEWER}; {_TIED}; all gradients wait for the update",
    ),
    r"cumulative: Q?LoRA": Way(
        "the base on one GPU, each layer computed again, its loss in chunks", _one(_TUNE), True,
        differs=f"{_FEWER}; the tied table counts twice: 0.7 GiB",
    ),
    r"CPUOffloadOptimizer|torchao, gradients|torchao eager": Way(
        _STATES_AWAY, _one(MASKS, "overlap-optimizer"), True, True, differs=_AT_REST
    ),
    r"torchao compiled": Way(
        f"the same; {_COMPILED}", _one(MASKS + FUSED, "overlap-optimizer"), True, True, differs=_AT_REST
    ),
    r"ZeRO-Offload": Way(
        "the same, stepped after the backward pass", _one(MASKS, "overlap-optimizer{overlap=false}"), True, True,
        differs="untuned, its copies and its CPU's step take longer than ours are priced at",
    ),
    r"^torch compiled": Way(f"{_IN_BF16}; {_COMPILED}", _one(MASKS + FUSED), True, True),
    r"^torch(,| eager)": Way(f"{_IN_BF16}; all runs of its table have checkpointing", _one(MASKS), True, True),
    r"HF \+ FlashAttention": Way(
        "all on one GPU, each layer computed again, which is LLaMA-Factory's default", _one(MASKS), True,
        differs=f"{_UNPACKED}; their memory is what the driver reports, with a context of half a GB",
    ),
    r"Unsloth": Way(
        "the same with its loss in chunks, and fused pointwise calls", _one(_TUNE), True,
        differs=f"{_UNPACKED}; their layers' own backward works in place",
    ),
    r"litgpt": Way(
        "all on one GPU, with its loss in chunks", _one(MASKS + CHUNKED), False,
        differs="transformers' Phi spells out its GELU in calls that save more; with NF4 theirs saves 1.1 bytes a "
        "parameter of 1.5, so that their peak may be that of loading; 4 rows of Llama 7B fit ours by little",
    ),
    r"torchtitan FSDP": Way(
        "FSDP2; selective checkpointing keeps attention and every second product, here half of all bytes",
        _fsdp(MASKS, saved=_HALF_KEPT), True,
        differs="collectives and kernels share a GPU's memory bandwidth, which is not simulated",
    ),
    r"LoHan": Way(
        "that of its predecessor Fuyou, with the best pieces of a batch; bf16, as of a loss scale nothing is said",
        ("fuyou", ""), precision="bf16", rows=0,
        differs="in ours a disk reads or writes, and 12 reach 39 % of their rates, by Fuyou's figure 8; with one disk "
        "theirs takes 68 s, less than the 86 s that its bytes take one after the other",
    ),
    r"FSDP1 FULL_SHARD": Way(
        "FSDP in bf16 with fp32 masters; its fused cross entropy keeps no logits in fp32, as a loss in chunks",
        _fsdp(MASKS + CHUNKED), precision="bf16-true",
        differs="their attention has ALiBi in a Triton kernel, slower than the FlashAttention 2 of ours, above all on "
        "H100 and for long rows; their shards have no copy in bf16, 2 bytes a parameter that the tightest row lacks",
    ),
    r"NeMo.* x1$": Way(
        "all on one GPU, 2 rows in a micro-batch; Transformer Engine and Triton fuse pointwise calls",
        _one(MASKS + FUSED), False, rows=2, differs=_FEWER,
    ),
    r"NeMo": Way(
        "FSDP2, each layer computed again, 2 rows in a micro-batch; theirs divides layers among 2 or 8 GPUs as well",
        _fsdp(MASKS, "two-hop"), True, rows=2,
        differs="Llama 70B ran with layers divided by 2 and a pipeline of 4, which ours has not",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class PublishedRun:
    """A published run that can be expressed. `rows`: of a micro-batch. `seconds`: of a step of `batch` rows; None where
    it ran out of memory, or rows are of several lengths."""

    model: str
    adapter: str | None
    base: str | None
    hardware: str
    changes: tuple[tuple[str, Any], ...]
    batch: int
    rows: int
    sequence: int
    precision: str
    seconds: float | None
    peak_bytes: int | None
    fits: bool


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a table as they are, each with its `line`. Raises `PlanError` for a file without rows or columns."""
    with open(path, encoding="utf-8") as file:
        found = csv.DictReader(file, delimiter="\t")
        have = found.fieldnames or []
        missing = [name for name in COLUMNS if name not in have]
        if not have:
            raise PlanError(f"{path} is empty; its first line names the columns, between tabs: {', '.join(COLUMNS)}")
        if missing:
            raise PlanError(f"{path} lacks the column {', '.join(missing)}; it has {', '.join(have)}")
        rows = [{name: row[name] or "" for name in COLUMNS} | {"line": f"{path}:{number}"} for number, row in
                enumerate(found, start=2)]  # fmt: skip
    if not rows:
        raise PlanError(f"{path} has no row below its columns; a row is a run: {', '.join(COLUMNS)}")
    return rows


def way_of(row: Mapping[str, str]) -> Way | None:
    """The way of a row's system; None where none is stated."""
    text = f"{row['system']} x{row['n_gpus']}"
    return next((way for pattern, way in WAYS.items() if re.search(pattern, text)), None)


def run_of(row: Mapping[str, str], short: tuple[int, int] | None = None) -> PublishedRun | str:
    """The run of a row, or the reason why it cannot be expressed. `short`: a batch and a number of tokens to be taken
    for rows whose lengths are not said. Raises `PlanError` for what is no run."""
    if re.search("fp8|float8", row["precision"]):
        return "fp8 is no precision of Penstock's yet"
    varies = row["seq"].startswith("variable")
    if varies and short is None:
        return "the lengths of its rows are not said"
    count = _number(row, "n_gpus", int)
    numbers = [int(word) for word in re.findall(r"\d+", row["batch"])]
    if not numbers:
        raise PlanError(f"{row['line']}: batch {row['batch']!r} has no number; allowed are 2, 1 x 4 and 96 (3 x 4/GPU)")
    batch = numbers[0] * numbers[1] if re.fullmatch(r"\d+ x \d+", row["batch"]) else numbers[0]
    rows = numbers[1] if "/GPU" in row["batch"] else numbers[0] if "x" in row["batch"] else batch // count
    digits = re.search(r"\d+", row["seq"])
    if digits is None and not varies:
        raise PlanError(f"{row['line']}: seq {row['seq']!r} has no number; allowed are 4096 and 'at most 4096'")
    sequence = int(digits[0]) if digits else 0
    if varies and short is not None:
        batch, sequence = short
    hardware, changes = _machine(row, count)
    is_nf4 = re.search("nf4|4-bit|QLoRA", f"{row['system']} {row['precision']} {row['adapters']}", re.IGNORECASE)
    adapter = None if row["adapters"] == "none" else f"lora:r=8{',targets=all-linear' * ('all' in row['adapters'])}"
    precision = "fp16" if "fp16" in row["precision"] else "bf16" if "amp" in row["precision"].lower() else "bf16-true"
    return PublishedRun(
        MODELS.get(row["model"], row["model"]).format(sequence), adapter, "nf4" if is_nf4 and adapter else None,
        hardware, tuple(changes.items()), batch, max(1, rows), sequence, precision,
        _seconds(row, batch * sequence, count), peak_of(row["note"]), row["value"] != OUT_OF_MEMORY,
    )  # fmt: skip


def _machine(row: Mapping[str, str], count: int) -> tuple[str, dict[str, Any]]:
    """The preset of a row's machine, and what differs from it."""
    if row["gpu"] not in GPUS and row["gpu"] not in PARTS:
        raise PlanError(f"{row['line']}: no GPU {row['gpu']!r}{close_names(row['gpu'], [*GPUS, *PARTS])}")
    name, changes = GPUS.get(row["gpu"], (row["gpu"], {}))
    if row["ssd"] not in ("-", ""):
        return FUYOU, {"ssds": int(row["ssd"].split()[0])}
    return f"{name}x{min(count, 8)}{f':{count // 8}' if count > 8 else ''}", changes


def _seconds(row: Mapping[str, str], tokens: int, count: int) -> float | None:
    """The seconds of a step of `tokens`."""
    unit = row["unit"]
    if unit not in UNITS:
        raise PlanError(f"{row['line']}: no unit {unit!r}{close_names(unit, UNITS)}")
    if row["value"] == OUT_OF_MEMORY:
        return None
    value: float = _number(row, "value", float)
    if unit == "fits" or "at most" in row["seq"]:
        return None
    if unit.startswith("s/"):
        return value
    if unit == "TFLOPS":
        return 6 * 1e9 * float(row["params"].removesuffix("B")) * tokens / (value * 1e12)
    return tokens / value / (count if unit.endswith("GPU") else 1)


def _number(row: Mapping[str, str], column: str, kind: type) -> Any:
    try:
        found = kind(row[column])
    except ValueError:
        found = 0
    if not 0 < found < float("inf"):
        allowed = "a number above 0" + (f", or {OUT_OF_MEMORY}" if column == "value" else "")
        raise PlanError(f"{row['line']}: {column} {row[column]!r}; allowed is {allowed}")
    return found


def peak_of(note: str) -> int | None:
    """The bytes of "peak 18.9 GiB" and "peak active 25 GB"."""
    found = re.search(r"peak (?:active )?([\d.]+) (Gi?B)", note)
    return None if found is None else int(parse_bytes(f"{found[1]}{found[2]}"))
