"""Models of the Hugging Face hub: those in this machine's cache, and downloads."""

from __future__ import annotations

import re
from pathlib import Path

from ...ir.errors import PlanError
from ...runtime.quantised.libraries import why_missing


def cached_directory(name: str) -> Path | None:
    """The model's directory in this machine's cache of the Hugging Face hub; None where the cache does not have it."""
    if name.count("/") > 1 or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # no name that a hub could have
        return None
    return Path(found).parent if isinstance(found, str) else None


def download_model(name: str) -> Path:
    """Put the files of a model into the hub's cache, and return their directory. Raises `PlanError` with a way out
    where the hub gives none."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"]))
    except ImportError as error:
        raise PlanError(f"--download: huggingface_hub is {why_missing('huggingface_hub', error)}") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise PlanError(f"cannot download {name!r} from the Hugging Face hub: {_why_not(name, error)}") from error


def _why_not(name: str, error: Exception) -> str:
    """The reason why the hub gives no model, and a way out, by the class of the error in huggingface_hub."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return (
            f"it is gated: accept its terms on https://huggingface.co/{name} and log in with `hf auth login`, or set "
            "HF_TOKEN"
        )
    if "RepositoryNotFoundError" in kinds:
        return "it has no model of this name, or a private one: log in with `hf auth login`, or set HF_TOKEN"
    if kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "ConnectError", "ConnectTimeout"}:
        return (
            "it cannot be reached from here. Download the model where there is a network (`hf download "
            f"{name} --local-dir DIR`) and name the directory"
        )
    return " ".join(str(error).split())
