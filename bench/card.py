"""Some layers of Llama-8B's shape on one GPU that holds them, LoRA and full, in bf16: eager transformers beside
Penstock with its blocks as written.

Each side has the card for itself: seconds of a step, and the bytes that torch's allocator gave out and reserved at its
peak; of Penstock also what its plan says of both. Both sides begin from the same weights (views of one short row of
numbers) and see the same batch, so that their losses can be compared. Three sides are eager's: "eager" updates the bf16
weights themselves, as a model after `.to(torch.bfloat16)` does, "eager, masters" updates fp32 copies as "bf16-true"
does, "eager, recomputed" is the first with gradient checkpointing.

Run: python bench/card.py [--hardware FILE] [--mode lora] [--side penstock] [--device cpu --small] [--out FILE]
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock.bench.peers import rows
from penstock.bench.peers.gpu_reservoir import give_values
from penstock.bench.peers.timing import whole_step
from penstock.compiler.models.adapters import LoraChoice
from penstock.compiler.models.named import NamedModel, find_model
from penstock.ir.errors import PenstockError

SHAPE = "llama-8b:num_hidden_layers={layers},max_position_embeddings={length}"
TINY = SHAPE + ",hidden_size=64,intermediate_size=128,num_attention_heads=4,num_key_value_heads=2,head_dim=16," \
    "vocab_size=256"  # fmt: skip
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MODES = {"lora": LoraChoice(r=16, targets=LINEAR), "full": None}
EAGER, MASTERS, RECOMPUTED, OURS = "eager", "eager, masters", "eager, recomputed", "penstock"
SIDES = (OURS, EAGER, MASTERS, RECOMPUTED)
PRECISION, LR, WARM_UP = "bf16-true", 1e-5, 2
Batch = Mapping[str, Tensor]


def main() -> None:
    args = parsed_texts()
    hardware = machine(args)
    for mode in args.mode or MODES:
        for side in args.side or SIDES:
            tidy(args.device)
            what: dict[str, Any] = {
                "mode": mode, "side": side, "layers": args.layers, "batch": args.batch, "sequence": args.sequence,
                "precision": PRECISION if side == OURS else "bf16",
                "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
            }  # fmt: skip
            try:
                what |= measure(args, hardware, mode, side)
            except (PenstockError, RuntimeError) as error:  # torch's for a full GPU, too
                what["error"] = f"{type(error).__name__}: {error}"[:1000]
            rows.save("card", what, args.out)


def parsed_texts() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", help="a document of this machine; without it rates are those of datasheets")
    parser.add_argument("--mode", action="append", choices=list(MODES))
    parser.add_argument("--side", action="append", choices=SIDES)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2, help="rows")
    parser.add_argument("--sequence", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--micro-batches", type=int, default=1, help="of each side")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model: a rehearsal")
    parser.add_argument("--out", type=Path, help="another file for the rows")
    args = parser.parse_args()
    if args.small:
        args.layers, args.sequence = 2, 64
    return args


def machine(args: argparse.Namespace) -> penstock.Hardware:
    if args.device == "cpu":
        return penstock.Hardware.cpu(num_devices=1, memory="1GB", dram="4GB")
    found = penstock.Hardware.load(args.hardware) if args.hardware else penstock.Hardware.detect()
    return found.with_(num_devices=1)


def measure(args: argparse.Namespace, hardware: penstock.Hardware, mode: str, side: str) -> dict[str, Any]:
    """The figures of one side, alone on the device."""
    name = (TINY if args.small else SHAPE).format(layers=args.layers, length=args.sequence)
    named = find_model(name)
    model = NamedModel(named.name, named.config, named.head, adapter=MODES[mode], padding=False).on_meta()
    words = torch.randint(
        0, model.config.vocab_size, (args.batch, args.sequence), generator=torch.Generator().manual_seed(0)
    )
    batch = {"input_ids": words, "labels": words}
    begin_s = time.perf_counter()
    with ours(args, hardware, model, batch) if side == OURS else eager(args, model, side) as (step, facts):
        ready_s = time.perf_counter() - begin_s
        losses = [step(batch)]
        first_s = time.perf_counter() - begin_s - ready_s
        losses += [step(batch) for _ in range(WARM_UP - 1)]
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times_s = []
        for _ in range(args.steps):
            step_begin_s = time.perf_counter()
            losses.append(step(batch))
            synchronize(args.device)
            times_s.append(time.perf_counter() - step_begin_s)
        found = {**rows.spread(times_s), **facts()}
    predicted_s = found.get("predicted_step_s")
    return {
        "parameters": sum(param.numel() for param in model.parameters()),
        "trained": sum(param.numel() for param in model.parameters() if param.requires_grad),
        **found, "tokens_per_s": args.batch * args.sequence / found["median_s"],
        **({} if predicted_s is None else {"predicted_over_measured": predicted_s / found["median_s"]}),
        "ready_s": ready_s, "first_step_s": first_s, "losses": [losses[0], losses[-1]],
    }  # fmt: skip


@contextmanager
def ours(
    args: argparse.Namespace, hardware: penstock.Hardware, model: nn.Module, batch: Batch
) -> Iterator[tuple[Callable[[Batch], float], Callable[[], dict[str, Any]]]]:
    begin_s = time.perf_counter()
    job = penstock.compile(
        model, hardware, example_inputs=batch, optimizer=partial(torch.optim.AdamW, lr=LR), precision=PRECISION,
        micro_batches=args.micro_batches,
    )  # fmt: skip
    planned_s = time.perf_counter() - begin_s
    fill(model)
    (device,) = hardware.devices

    def step(batch: Batch) -> float:
        return whole_step(job, batch)

    def facts() -> dict[str, Any]:
        predicted = job.plan.predicted
        return {
            **allocator_figures(args.device), "accounted_bytes": job.last.peak_bytes[device.name],
            "predicted_peak_bytes": predicted.peak_bytes[device.name], "predicted_step_s": predicted.step_s,
            "planned_s": planned_s, "micro_batches": job.plan.micro_batches, "passes": job.plan.passes,
            "bottleneck": predicted.bottleneck, "busy_share": next(iter(job.last.busy_share.values())),
        }  # fmt: skip

    with job:
        yield step, facts


@contextmanager
def eager(
    args: argparse.Namespace, model: nn.Module, side: str
) -> Iterator[tuple[Callable[[Batch], float], Callable[[], dict[str, Any]]]]:
    fill(model)
    model = on_device(model, args.device)
    anyhow: Any = model
    if side == RECOMPUTED:
        anyhow.enable_input_require_grads()  # else a frozen table leaves the first block without a gradient
        anyhow.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = [param for param in model.parameters() if param.requires_grad]
    masters = [param.detach().float() for param in trained] if side == MASTERS else trained
    optimizer = torch.optim.AdamW(masters, lr=LR, fused=True)

    def step(batch: Batch) -> float:
        optimizer.zero_grad(set_to_none=True)
        pieces = {name: value.to(args.device).chunk(args.micro_batches) for name, value in batch.items()}
        losses = []
        for number in range(args.micro_batches):
            loss = model(**{name: parts[number] for name, parts in pieces.items()}, use_cache=False).loss
            (loss / args.micro_batches).backward()
            losses.append(loss.detach())
            del loss
        for master, param in zip(masters, trained, strict=True) if side == MASTERS else ():
            master.grad, param.grad = param.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, trained, strict=True) if side == MASTERS else ():
                param.copy_(master)
        return float(torch.stack(losses).mean())

    yield step, partial(allocator_figures, args.device)


def fill(model: nn.Module) -> None:
    """Values for a model on meta that take no memory; what is trained stays so."""
    trained = {name: param.requires_grad for name, param in model.named_parameters()}
    give_values(model)
    for name, param in model.named_parameters():
        param.requires_grad_(trained[name])
    for module in model.modules():
        for kind in ("rotary_emb",):
            if hasattr(module, kind):  # its buffers are computed, not drawn
                setattr(module, kind, type(getattr(module, kind))(module.config))


def on_device(model: nn.Module, device: str) -> nn.Module:
    """The weights in bf16 and the buffers as they are, as "bf16-true" has them."""
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                low = param.detach().to(device, torch.bfloat16).contiguous()
                module._parameters[name] = nn.Parameter(low, requires_grad=param.requires_grad)
    return model.to(device).train()


def allocator_figures(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {}
    return {
        "reserved_bytes": torch.cuda.max_memory_reserved(), "allocated_bytes": torch.cuda.max_memory_allocated(),
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
    }  # fmt: skip


def tidy(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
