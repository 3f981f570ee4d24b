"""Logs by the names that users give."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path

from ...ir.errors import PlanError
from .jsonl import JsonLog
from .queued import QueuedListener
from .tensorboard import TensorBoardLog
from .wandb import WandbLog

KINDS: dict[str, Callable[[Path], QueuedListener]] = {
    kind.name: kind for kind in (JsonLog, TensorBoardLog, WandbLog)
}
LIBRARIES = ("tensorboard", "wandb")  # each is an extra of the same name


def find_logs(names: Iterable[str], directory: str | Path) -> list[QueuedListener]:
    """The logs of these names, each once, which write below the directory. Raises `PlanError` for an unknown name, with
    the nearest one, and for a log whose library is not installed."""
    chosen = list(dict.fromkeys(names))
    for name in chosen:
        if name not in KINDS:
            near = difflib.get_close_matches(name, KINDS, 1, 0.0)[0]
            raise PlanError(f"--log {name!r}: the logs are {', '.join(KINDS)}; the nearest is {near}")
        if name in LIBRARIES and importlib.util.find_spec(name) is None:
            raise PlanError(f"--log {name}: its library is not installed; pip install 'penstock[{name}]'")
    return [KINDS[name](Path(directory)) for name in chosen]
