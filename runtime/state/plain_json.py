"""Small states (of schedulers, optimizers, data loaders) as JSON that reads back exactly and holds nothing executable.

JSON has no tuples, no keys other than text and no tensors; these are written as objects with one marked key. Floats
keep every bit, also NaN and infinities.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from ...ir.errors import CheckpointError
from .tensor_file import CODES, code_of

_MARK = "__penstock__"
_MAX_TENSOR_BYTES = 1 << 20


def encode(value: Any, where: str) -> Any:
    """Turn `value` into JSON values. Raises `CheckpointError` naming `where` for a value that has no such form."""
    if value is None or isinstance(value, (bool, int, float, str)):
        if type(value) not in (type(None), bool, int, float, str):
            raise _refusal(value, where)
        return value
    if type(value) is list:
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if type(value) is tuple:
        return {_MARK: "tuple", "items": [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and _MARK not in value and not isinstance(value, Counter):
            return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
        pairs = [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]
        return {_MARK: "counter" if isinstance(value, Counter) else "dict", "items": pairs}
    if isinstance(value, torch.Tensor) and value.numel() * value.itemsize <= _MAX_TENSOR_BYTES:
        flat = value.detach().cpu().contiguous().reshape(-1)
        row = {"dtype": code_of(value.dtype), "shape": list(value.shape)}
        return {_MARK: "tensor", **row, "hex": flat.view(torch.uint8).numpy().tobytes().hex()}
    raise _refusal(value, where)


def decode(value: Any, where: str) -> Any:
    """The reverse of `encode`. Raises `CheckpointError` naming `where` for what `encode` does not write."""
    if isinstance(value, list):
        return [decode(item, where) for item in value]
    if not isinstance(value, dict):
        return value
    if _MARK not in value:
        return {key: decode(item, where) for key, item in value.items()}
    kind = value[_MARK]
    try:
        if kind == "tensor":
            return _tensor(value["dtype"], value["shape"], value["hex"])
        items = [decode(item, where) for item in value["items"]]
        if kind == "tuple":
            return tuple(items)
        if kind in ("dict", "counter"):
            found = {key: item for key, item in items}
            return Counter(found) if kind == "counter" else found
    except (TypeError, ValueError, KeyError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{where}: a {kind!r} that cannot be read ({type(error).__name__}: {error})") from error
    raise CheckpointError(f"{where}: an object of unknown kind {kind!r}")


def _tensor(code: str, shape: list[int], text: str) -> torch.Tensor:
    if len(text) > 2 * _MAX_TENSOR_BYTES:
        raise ValueError(f"{len(text) // 2} bytes")
    dtype, data = CODES[code], bytearray.fromhex(text)
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    if any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"shape {shape}")
    return flat.reshape(shape)


def _refusal(value: Any, where: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: a {type(value).__qualname__} cannot be saved. Use numbers, text, None, lists, tuples, dicts and "
        "tensors of at most 1 MiB."
    )
