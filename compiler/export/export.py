"""A trained model for programs that serve it: a directory with all its files, a file of GGUF, and the commands."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...ir.documents import read_json
from ...ir.errors import PlanError
from ...runtime.state.wrapped import PEFT, is_a, module_to_save
from ..models.hub import SETTINGS, TOKENIZER_FILES, cached_directory
from .gguf_file import library, require_known, require_type, write_gguf

GGUF_FILE = "model.gguf"
ADAPTER_CONFIG = "adapter_config.json"
VLLM_RANK = 16  # of LoRA, without --max-lora-rank
RANKS_OF_VLLM = (8, 16, 32, 64, 128, 256, 320, 512)  # that it takes
COPIED = (*TOKENIZER_FILES, *SETTINGS, "generation_config.json")  # from the base, where the directory lacks them


@dataclass(frozen=True)
class Export:
    """The files of an exported model. `commands` serve them; `remarks` say what is missing for that."""

    directory: Path
    gguf: Path | None = None
    commands: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    def describe(self) -> str:
        return "\n".join([*self.remarks, "to serve it:", *(f"  {command}" for command in self.commands)])


def require_exportable(model: Any, merge: bool, gguf: str | None) -> None:
    """Raise `PlanError` for a file of GGUF that could not be written, before anything is."""
    if gguf is None:
        return
    saved: Any = module_to_save(model).module
    if is_a(saved, PEFT) and not merge:
        raise PlanError("export(gguf=...): a file of GGUF has the whole model; give merge=True")
    config: Any = getattr(saved, "config", None)
    require_type(gguf)
    require_known(config.to_dict() if hasattr(config, "to_dict") else {})
    library()


def base_directory(*names: str | Path | None) -> Path | None:
    """The first of these that is a directory of a model here, or the name of one in the hub's cache."""
    for name in names:
        if name and Path(name).is_dir():
            return Path(name)
        if name and (cached := cached_directory(str(name))) is not None:
            return cached
    return None


def complete(directory: Path, base: Path | None, gguf: str | None) -> Export:
    """Copy files that a written directory lacks from the base, write the file of GGUF, and say how to serve both."""
    for name in COPIED:
        if base is not None and (base / name).is_file() and not (directory / name).exists():
            shutil.copy(base / name, directory / name)
    remarks = []
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        remarks.append(f"{directory} has no tokenizer, which vLLM and llama.cpp need: copy its files there")
    file = None if gguf is None else write_gguf(directory, directory / GGUF_FILE, gguf)
    if (directory / ADAPTER_CONFIG).is_file():
        return Export(directory, None, _commands_of_adapter(directory, base), tuple(remarks))
    commands = [f"vllm serve {directory}"]
    if file is None:
        commands.append(f"python convert_hf_to_gguf.py {directory} --outfile {directory / GGUF_FILE}  # of llama.cpp")
    commands.append(f"llama-server -m {directory / GGUF_FILE}")
    return Export(directory, file, tuple(commands), tuple(remarks))


def _commands_of_adapter(directory: Path, base: Path | None) -> tuple[str, ...]:
    config = read_json(directory / ADAPTER_CONFIG)
    model = base or config.get("base_model_name_or_path") or "BASE"
    if config.get("peft_type") != "LORA" or config.get("use_dora") or config.get("modules_to_save"):
        return ("merge it first, as vLLM and llama.cpp serve adapters of plain LoRA alone",)
    rank = max([config["r"], *(config.get("rank_pattern") or {}).values()])
    most = next((each for each in RANKS_OF_VLLM if each >= rank), rank)
    more = f" --max-lora-rank {most}" if rank > VLLM_RANK else ""
    return (
        f"vllm serve {model} --enable-lora{more} --lora-modules {directory.name}={directory}",
        f"python convert_lora_to_gguf.py {directory} --base {model} --outfile {directory}/adapter.gguf  # of llama.cpp",
        f"llama-server -m BASE.gguf --lora {directory}/adapter.gguf",
    )
