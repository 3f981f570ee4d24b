"""The random generators of this process as plain values, so that a checkpoint can hold them without pickle.

A plan draws all of its randomness from the seed and the step. The generators here serve code outside the plan: the
user's shuffling and augmentation.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ...ir.errors import CheckpointError

_WORDS = 624  # of a Mersenne Twister: NumPy and Python's `random` index them without looking


def rng_state() -> dict[str, Any]:
    """States of torch's CPU generator, Python's `random` and NumPy's global generator, fit for `RunPosition.rng`."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).copy()), int(position), int(has_gauss), float(cached)),
    }


def restore_rng_state(state: Mapping[str, Any]) -> None:
    """Set the generators that are in `state` to what `rng_state` returned. `require_rng_state` has accepted it."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state:
        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, keys.numpy(), position, has_gauss, cached))


def require_rng_state(state: Any, where: str) -> None:
    """Raise `CheckpointError` naming `where` for states that `rng_state` cannot have returned: a position beyond the
    words of a generator would be read from foreign memory."""
    checks = {"torch": _is_torch, "python": _is_python, "numpy": _is_numpy}
    wrong = [name for name, value in state.items() if name not in checks or not checks[name](value)]
    if wrong:
        raise CheckpointError(f"{where}: the state of the random generator {wrong[0]!r} is none; it was altered.")


def _is_torch(state: Any) -> bool:
    now = torch.get_rng_state()
    if not (isinstance(state, torch.Tensor) and state.dtype == now.dtype and state.shape == now.shape):
        return False
    try:
        torch.Generator().set_state(state)
    except RuntimeError:  # torch looks at the words' position itself
        return False
    return True


def _is_python(state: Any) -> bool:
    if not (isinstance(state, tuple) and len(state) == 3 and state[0] == 3 and isinstance(state[1], tuple)):
        return False
    words, spare = state[1], state[2]
    return (
        len(words) == _WORDS + 1
        and all(type(word) is int and 0 <= word < 2**32 for word in words)
        and words[-1] <= _WORDS
        and (spare is None or isinstance(spare, float))
    )


def _is_numpy(state: Any) -> bool:
    if not (isinstance(state, tuple) and len(state) == 5 and state[0] == "MT19937"):
        return False
    _, words, position, has_spare, spare = state
    return (
        isinstance(words, torch.Tensor)
        and words.dtype == torch.uint32
        and words.shape == (_WORDS,)
        and type(position) is int
        and 0 <= position <= _WORDS
        and has_spare in (0, 1)
        and isinstance(spare, float)
    )
