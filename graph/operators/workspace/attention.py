"""Attention's fused kernels. All sizes are of queries [batch, heads, rows, width] and of `keys` keys.

The efficient kernel's are those of GPUs with less than 100 KiB of shared memory for a block, such as gaming cards; on
others, gradients of keys and values of heads up to 128 wide stay in registers.
"""

from __future__ import annotations

import math

from ..record import LARGEST, GpuSize
from .sizes import ceil_div, round_up

FLASH_ROWS = 64  # queries of a block of threads in forward
MOST_SPLITS = 128
BLOCK = 64  # queries, keys and columns of a block of threads of the efficient kernel
TILE_BYTES = 4 * BLOCK * BLOCK + 16  # a block of the gradient of queries, its lock and counters
IN_REGISTERS = 96  # the widest heads whose gradients of keys and values stay in registers
NARROW = 128  # wider heads' results are added up in memory, and gradients in wider blocks
MOST_BLOCKS = 200  # heads times parts of the keys


def flash_forward(batch_heads: int, rows: int, keys: int, width: int, gpu: GpuSize = LARGEST) -> int:
    """`set_params_splitkv` (flash_api.cpp): where the heads and rows are too few to fill the GPU, the keys are split,
    and each part's result and sum are added up in fp32. Not with dropout."""
    splits = _splits(batch_heads * ceil_div(rows, FLASH_ROWS), keys, width, gpu)
    return 0 if splits == 1 else 4 * splits * batch_heads * rows * (round_up(width, 32) + 1)


def _splits(blocks: int, keys: int, width: int, gpu: GpuSize) -> int:
    """`num_splits_heuristic` (flash_api.cpp): the fewest parts that fill the GPU to 85 % of the best."""
    processors = 2 * gpu.processors
    if blocks >= 0.8 * processors:
        return 1
    key_blocks = ceil_div(keys, 256 if width <= 64 else 128 if width <= 128 else 64)
    filled = {}
    for splits in range(1, min(MOST_SPLITS, processors, key_blocks) + 1):
        if splits == 1 or ceil_div(key_blocks, splits) != ceil_div(key_blocks, splits - 1):
            waves = blocks * splits / processors
            filled[splits] = waves / math.ceil(waves)
    best = max(filled.values())
    return next(splits for splits, share in filled.items() if share >= 0.85 * best)


def efficient_forward(batch_heads: int, rows: int, value_width: int, is_half: bool) -> int:
    """`_efficient_attention_forward` (attention.cu): `kNeedsOutputAccumulatorBuffer`, the result in fp32."""
    return 4 * batch_heads * rows * value_width if is_half and value_width > NARROW else 0


def efficient_backward(batch_heads: int, rows: int, keys: int, width: int, value_width: int, is_half: bool) -> int:
    """`_efficient_attention_backward` (attention_backward.cu) and `workspace_size` (kernel_backward.h): each row's sum
    of output times its gradient, which in fp32 begins as the whole product; then the gradients of queries, and those of
    keys and values that do not stay in registers, in fp32."""
    sums = 4 * batch_heads * rows
    added = TILE_BYTES * ceil_div(rows, BLOCK) * ceil_div(width, BLOCK)
    if is_half and max(width, value_width) > IN_REGISTERS:
        parts = max(1, min(ceil_div(keys, BLOCK), MOST_BLOCKS // batch_heads))
        columns = [round_up(size, BLOCK if size <= NARROW else NARROW) for size in (width, value_width)]
        added += 4 * parts * BLOCK * sum(columns)
    product = 0 if is_half else 4 * batch_heads * rows * value_width + sums
    return sums + max(batch_heads * added, product)
