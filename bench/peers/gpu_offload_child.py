"""FSDP2 with CPU offload, and DeepSpeed's ZeRO-Offload and ZeRO-Infinity, training the benchmark's GPT on one GPU.

Run by `children.Child`; needs the standard library, torch and, for DeepSpeed's two, deepspeed. All peers compute in
bf16 on fp32 weights, recompute each block in the backward pass, and may take the same GPU memory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

BUCKET_PARAMS = 500_000_000  # DeepSpeed's own choice


def prepare(settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """See `children.serve`."""
    import gpt
    import torch

    size, device = gpt.GptSize(**settings["size"]), settings["device"]
    if settings["memory_bytes"] is not None:
        _, total_bytes = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(1.0, settings["memory_bytes"] / total_bytes))
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    os.environ.setdefault("MASTER_PORT", str(settings["port"]))
    model = gpt.gpt(size, device).train()
    recompute_blocks(model, use_reentrant=settings["peer"] == "zero-infinity")  # zero_infinity.py says why
    batch = {name: value.to(device) for name, value in gpt.batch_of(size, settings["batch"]).items()}
    pieces = [dict(zip(batch, parts)) for parts in zip(*(v.chunk(settings["micro_batches"]) for v in batch.values()))]
    start = fsdp if settings["peer"].startswith("fsdp") else zero
    return start(model, pieces, settings)


def recompute_blocks(model: Any, use_reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    for block in model.blocks:
        inner = block.forward
        block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=use_reentrant)


def fsdp(model: Any, pieces: list[dict[str, Any]], settings: dict[str, Any]) -> tuple[Callable[[], float], Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    on_gpu = settings["device"] == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.device_mesh.init_device_mesh(settings["device"], (1,))
    policy = {
        "mesh": mesh, "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }  # fmt: skip
    for part in (*model.blocks, model):
        fully_shard(part, **policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["lr"], fused=True)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        losses = []
        for number, piece in enumerate(pieces):
            model.set_requires_gradient_sync(number == len(pieces) - 1)  # gradients stay on the device until then
            loss = model(**piece)["loss"]
            (loss / len(pieces)).backward()
            losses.append(loss.detach())
        optimizer.step()
        return float(torch.stack(losses).mean())

    return step, {"version": torch.__version__}


def zero(model: Any, pieces: list[dict[str, Any]], settings: dict[str, Any]) -> tuple[Callable[[], float], Any]:
    import deepspeed
    from extensions import ready_to_build
    from zero_infinity import read_each_weight_once

    ready_to_build()
    if settings["peer"] == "zero-infinity":
        read_each_weight_once()
    deepspeed.init_distributed(dist_backend="nccl")
    block_params = sum(p.numel() for p in model.blocks[0].parameters())
    params = [p.numel() for p in model.parameters()]
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(),
        config=configuration(settings, block_params, max(params), sum(params)),
    )  # fmt: skip

    def step() -> float:
        losses = []
        for piece in pieces:
            loss = engine(**piece)["loss"]
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        return sum(losses) / len(losses)

    return step, {"version": deepspeed.__version__}


def configuration(settings: dict[str, Any], block_params: int, largest_params: int, all_params: int) -> dict[str, Any]:
    """DeepSpeed's configuration. ZeRO-Offload has weights on the GPU, gradients and the optimizer on the CPU, and
    buckets of DeepSpeed's own size, or of the whole model where that is less; ZeRO-Infinity has everything in files."""
    shared = {
        "train_micro_batch_size_per_gpu": settings["batch"] // settings["micro_batches"],
        "gradient_accumulation_steps": settings["micro_batches"],
        "gradient_clipping": 0.0, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": settings["lr"], "weight_decay": 0.01, "adam_w_mode": True}},
    }  # fmt: skip
    if settings["peer"] == "zero-offload":
        bucket = min(BUCKET_PARAMS, all_params)
        return {
            **shared,
            "zero_optimization": {
                "stage": 2, "overlap_comm": True, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
            },
        }  # fmt: skip
    files, live = {"nvme_path": settings["directory"], "pin_memory": True, "device": "nvme"}, 3 * block_params
    return {
        **shared,
        "zero_optimization": {
            "stage": 3, "sub_group_size": live, "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": live, "stage3_prefetch_bucket_size": block_params,
            "stage3_param_persistence_threshold": 0, "reduce_bucket_size": block_params,
            "contiguous_gradients": True, "overlap_comm": True,
            "offload_param": {**files, "buffer_count": 40, "buffer_size": largest_params, "max_in_cpu": 0},
            "offload_optimizer": {**files, "buffer_count": 12, "pipeline_read": True, "pipeline_write": True},
        },
        "aio": {"block_size": 2**20, "queue_depth": 16, "single_submit": False, "overlap_events": True},
    }  # fmt: skip


def moved_bytes(step: Callable[[], float]) -> dict[str, int]:
    """Bytes that a step copies to the GPU and from it, and that this process reads from disks and writes to them."""
    import torch
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    moved = {"h2d": 0, "d2h": 0}

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            pairs: list[tuple[Tensor, Tensor]] = []
            if func is aten._to_copy.default:
                pairs = [(args[0], made)]
            elif func is aten.copy_.default:
                pairs = [(args[1], args[0])]
            elif func is aten._foreach_copy_.default:
                pairs = list(zip(args[1], args[0]))
            for source, target in pairs:
                way = {("cpu", "cuda"): "h2d", ("cuda", "cpu"): "d2h"}.get((source.device.type, target.device.type))
                if way is not None:
                    moved[way] += target.numel() * target.element_size()
            return made

    before = disk_bytes()
    with Copies():
        step()
    return {**moved, **{name: now - before[name] for name, now in disk_bytes().items()}}


def disk_bytes() -> dict[str, int]:
    """The bytes that the kernel counts for this process; empty where it counts none."""
    counts = Path("/proc/self/io")
    lines = dict(line.split(": ") for line in counts.read_text().splitlines()) if counts.is_file() else {}
    return {"read": int(lines.get("read_bytes", 0)), "write": int(lines.get("write_bytes", 0))}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))  # no Penstock in the other Python
    import children

    children.serve(prepare, moved_bytes)
