"""Stochastic rounding of updated fp32 numbers to bf16 weights that have no masters.

A number between two neighbours in bf16 goes up with the probability of its distance from the lower one, so that small
updates count on average. The draw belongs to the element: it is a hash of the seed, the step, the parameter's name and
the element's index, the same on every device, in every shard and in every tier.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

CHUNK_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 26}  # hashed at once; on a CPU they stay in its caches
GOLDEN, FIRST, SECOND = -1640531527, -2048144789, -1028477387  # of Fibonacci hashing and MurmurHash3, as int32
HIGH, LOW_16, LOW_19 = -65536, 0xFFFF, 0x7FFFF


@dataclass(frozen=True)
class Rounding:
    """The rounding of a stage's weights. `names`: a parameter's name in the model, where it is another one here;
    `starts`: where in the whole parameter the elements that are here begin, if not at 0."""

    names: Mapping[str, str] = field(default_factory=dict)
    starts: Mapping[str, int] = field(default_factory=dict)

    def store(self, name: str, full: Tensor, weight: Tensor, draw: tuple[int, ...]) -> None:
        """Round the fp32 `full` into `weight`. `draw`: the seed, the step, and the number of the update in it."""
        self.store_piece(name, draw, full, weight, 0)

    def store_piece(self, name: str, draw: tuple[int, ...], full: Tensor, weight: Tensor, begin: int) -> None:
        """The same for a piece of what is here of the parameter, that begins at this element of it."""
        round_into(weight, full, (*draw, self.names.get(name, name)), self.starts.get(name, 0) + begin)


def round_into(weight: Tensor, full: Tensor, key: tuple[int | str, ...], start: int = 0) -> None:
    """Round `full` (fp32) into `weight` (bf16, of that shape), whose first element has the index `start`."""
    assert (weight.dtype, full.dtype) == (torch.bfloat16, torch.float32) and weight.is_contiguous()
    target, source = weight.view(-1), full.reshape(-1)
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    first, second = (int.from_bytes(half, "little", signed=True) for half in (digest[:4], digest[4:]))
    size = CHUNK_ELEMENTS.get(weight.device.type, CHUNK_ELEMENTS["cuda"])
    for begin in range(0, source.numel(), size):
        part = source[begin : begin + size]
        noise = _hash(start + begin, part.numel(), first, second, weight.device)
        bits = noise.bitwise_and_(LOW_16).add_(part.view(torch.int32)).bitwise_and_(HIGH)
        target[begin : begin + size] = bits.view(torch.float32)  # exact: the low half is 0


def _hash(start: int, count: int, first: int, second: int, device: torch.device) -> Tensor:
    """int32 that look random, one for each of `count` indices from `start` on (modulo 2^32)."""
    begin = (start + 2**31) % 2**32 - 2**31
    found = torch.arange(count, dtype=torch.int32, device=device).add_(begin).mul_(GOLDEN).add_(first)
    found.bitwise_xor_((found >> 16).bitwise_and_(LOW_16)).mul_(FIRST).bitwise_xor_(second)
    found.bitwise_xor_((found >> 13).bitwise_and_(LOW_19)).mul_(SECOND)
    return found.bitwise_xor_((found >> 16).bitwise_and_(LOW_16))
