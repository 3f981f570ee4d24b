"""Errors of the Hugging Face hub in words that say what works."""

from __future__ import annotations


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
