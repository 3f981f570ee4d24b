"""The Hugging Face hub: models in this machine's cache, downloads, and its errors in words that say what works."""

from __future__ import annotations

import re
from pathlib import Path

from ...ir.errors import PlanError
from ...runtime.quantised.libraries import why_missing

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.txt", "vocab.json")
SETTINGS = (  # of a tokenizer, and of the processor of a model that sees
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt", "chat_template.jinja",
    "chat_template.json", "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
)  # fmt: skip


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

        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]))
    except ImportError as error:
        raise PlanError(f"--download: huggingface_hub is {why_missing('huggingface_hub', error)}") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise PlanError(f"--download: {hub_refusal(name, error)}. A directory with the model's files works") from error


def hub_refusal(name: str, error: BaseException, kind: str = "") -> str:
    """The reason why a model, or with kind="datasets/" a data set, is not had from the hub, and what to do."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    kinds = {each.__name__ for cause in causes for each in type(cause).__mro__}
    page = f"https://huggingface.co/{kind}{name}"
    if "GatedRepoError" in kinds or "gated" in str(error):
        return (
            f"{name!r} is gated on the Hugging Face hub: accept its terms on {page}, then log in here with "
            "`hf auth login`, or set HF_TOKEN"
        )
    if kinds & {"RepositoryNotFoundError", "DatasetNotFoundError"}:
        return f"the Hugging Face hub has no {name!r}, or shows it to logged-in accounts only (`hf auth login`)"
    if kinds & {"ConnectionError", "ConnectError", "LocalEntryNotFoundError", "TimeoutError", "TimeoutException"}:
        return f"{name!r} is not in this machine's cache, and the Hugging Face hub cannot be reached from here"
    return f"{name!r} is not had from the Hugging Face hub: {str(error).strip() or type(error).__name__}"
