"""DeepSpeed's ZeRO-Infinity on a CPU: weights and optimizer states in files, the optimizer after the backward pass.

Run by `children.Child` with a Python that has torch, transformers and deepspeed but no Penstock. On a CPU it needs:
DS_ACCELERATOR=cpu; libaio with its header, a compiler and ninja for its extensions; and no gradient clipping, which is
on unless set to 0. The extensions are built at the first use (minutes) and kept in TORCH_EXTENSIONS_DIR; a build that
was killed leaves a file `lock` there, for which the next build waits for ever.

Two mistakes of deepspeed 0.19.8 prevent weights in files; both are avoided here so that it is timed at its best.
`deepspeed.initialize` asks for weights of the model's own type but reads them back as bfloat16 on an accelerator
without fp16; `zero.Init` with a configuration and without a type keeps fp32. The prefetch lists a weight that ends the
forward pass and begins the backward pass twice, and then refuses to read it twice; listed once, it works. Without the
prefetch it works too, but takes a quarter more time.
Checkpointed blocks must be re-entrant: with the other kind, losses silently differ from the second step on.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))


def configuration(settings: dict[str, Any], block_params: int, largest_params: int) -> dict[str, Any]:
    """DeepSpeed's configuration. `block_params` is the number of parameters of one transformer block, `largest_params`
    that of the largest weight."""
    files = {"nvme_path": settings["directory"], "pin_memory": False, "device": "nvme"}
    live = 3 * block_params
    return {
        "train_micro_batch_size_per_gpu": settings["batch"] // settings["micro_batches"],
        "gradient_accumulation_steps": settings["micro_batches"],
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": settings["lr"], "weight_decay": 0.01, "adam_w_mode": True}},
        "zero_optimization": {
            "stage": 3, "sub_group_size": live, "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": live, "stage3_prefetch_bucket_size": block_params,
            "stage3_param_persistence_threshold": 0, "reduce_bucket_size": block_params,
            "contiguous_gradients": True, "overlap_comm": False,
            "offload_param": {**files, "buffer_count": 40, "buffer_size": largest_params, "max_in_cpu": 0},
            "offload_optimizer": {**files, "buffer_count": 12, "pipeline_read": True, "pipeline_write": True},
        },
        "aio": {"block_size": 2**20, "queue_depth": 16, "single_submit": False, "overlap_events": True},
    }  # fmt: skip


def prepare(settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A GPT-2 of the settings' size under ZeRO-Infinity; see `children.serve`."""
    import deepspeed
    import models
    import torch

    read_each_weight_once()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    os.environ.setdefault("MASTER_PORT", str(settings["port"]))
    model = models.gpt2(settings["layers"], settings["width"], settings["tied"], settings["vocabulary"]).train()
    block_params = sum(p.numel() for p in model.transformer.h[0].parameters())
    largest_params = max(p.numel() for p in model.parameters())
    if settings["checkpoint"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    config = configuration(settings, block_params, largest_params)
    deepspeed.zero.Init(module=model, config_dict_or_path=config, remote_device="nvme", pin_memory=False)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    batch = models.batch(settings["batch"], vocabulary=settings["vocabulary"])
    pieces = [dict(zip(batch, parts)) for parts in zip(*(v.chunk(settings["micro_batches"]) for v in batch.values()))]

    def step() -> float:
        losses = []
        for piece in pieces:
            loss = engine(**piece).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        return sum(losses) / len(losses)

    return step, {"version": deepspeed.__version__}


def read_each_weight_once() -> None:
    """Patch deepspeed so that its prefetch may list a weight twice, and reads it once."""
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper as Swapper

    whole = Swapper.swap_in

    def swap_in(self: Any, params: Any, async_op: bool = True, swap_in_buffers: Any = None) -> None:
        if swap_in_buffers is None:
            params = list({param.ds_id: param for param in params}.values())
        whole(self, params, async_op, swap_in_buffers)

    Swapper.swap_in = swap_in


if __name__ == "__main__":
    import children

    children.serve(prepare)
