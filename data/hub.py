"""Data sets by their names on the Hugging Face hub, which `datasets` downloads, as files of arrow in its cache."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..compiler.models.hub import hub_refusal
from ..ir.errors import PlanError
from .files import READERS, require_datasets

NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?(?:/([\w.-]+))?")  # OWNER/NAME:CONFIGURATION/SPLIT
TIMEOUT_S = 10.0  # of the first question to the hub


def is_on_hub(path: Path) -> bool:
    """Whether a path is no file or folder here, and has the form of a name on the hub."""
    is_name = NAME.fullmatch(str(path)) is not None and path.suffix not in READERS
    return is_name and not path.exists() and not Path(path.parts[0]).exists()


def local_paths(paths: Sequence[Path], split: str) -> list[Path]:
    """The paths, with the files of its split in place of each name on the hub. Raises `PlanError` for a name whose data
    set cannot be loaded."""
    return [file for path in paths for file in (_download(path, split) if is_on_hub(path) else [path])]


def _download(path: Path, split: str) -> list[Path]:
    found = NAME.fullmatch(str(path))
    assert found is not None
    name, configuration, own_split = found.groups()
    datasets = require_datasets(path)
    try:
        _require_answer(name, datasets)
        rows: Any = datasets.load_dataset(name, configuration, split=own_split or split)
    except Exception as error:  # of the hub, of its files, of unknown configurations and splits
        why = hub_refusal(name, error, "datasets/")
        raise PlanError(
            f"--data {path}: there is no such file or folder, and {why}. A local file works: --data FILE, which ends "
            f"in one of {', '.join(READERS)}"
        ) from error
    return [Path(file["filename"]) for file in rows.cache_files]


def _require_answer(name: str, datasets: Any) -> None:
    """Raise what the hub says, or what `datasets` says of its cache where the hub does not answer; its own attempts
    would take half a minute."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().dataset_info(name, timeout=TIMEOUT_S)
    except HfHubHTTPError:
        raise
    except Exception as error:  # of whichever library asks, and of offline mode
        try:
            datasets.load.CachedDatasetModuleFactory(name).get_module()
        except Exception:
            raise ConnectionError(name) from error
