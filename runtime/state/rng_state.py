"""The random generators of this process as plain values, so that a checkpoint can hold them without pickle.

A plan draws all of its randomness from the seed and the step. The generators here serve code outside the plan: the
user's shuffling and augmentation.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """States of torch's CPU generator, Python's `random` and NumPy's global generator, fit for `RunPosition.rng`."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).copy()), int(position), int(has_gauss), float(cached)),
    }


def restore_rng_state(state: dict[str, Any]) -> None:
    """Set the generators that are in `state` to what `rng_state` returned."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state:
        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, keys.numpy(), position, has_gauss, cached))
