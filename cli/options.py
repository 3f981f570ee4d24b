"""The options that several commands share, as one dataclass that makes a `Job` of them.

Heavy imports are inside the functions, so that a mistake in the options is reported before torch is loaded.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from ..compiler.planning import rare_collections, share
from ..ir.errors import PlanError

if TYPE_CHECKING:
    from torch import nn

    from ..compiler.job.job import Job
    from ..compiler.models.named import NamedModel
    from ..compiler.plan import Plan
    from ..data.spec import DataSpec
    from ..ir.machine.hardware import Hardware
    from ..passes.draft import Draft

MOST_ROWS = 10**9
MOST_EPOCHS = 1e6
MOST_RATE = 1e6  # more would end in weights that are no numbers
MOST_PRICE = 1e9
MOST_SEED = 2**63 - 1  # of torch's generators, and room for one more each epoch


@dataclass(frozen=True)
class JobOptions:
    """The model to plan, the machine and the settings. Every field is an option of the command line."""

    model: Annotated[
        str | None,
        typer.Option(
            help="a name (gpt2, llama-8b), a config.json or a directory; with other dimensions: gpt2:n_layer=96"
        ),
    ] = None
    hardware: Annotated[
        list[str] | None,
        typer.Option(
            help="a preset (4090x2), a YAML file, cpu (small CPU devices), or auto, the default: this machine. "
            "`penstock plan` compares several: repeat it"
        ),
    ] = None
    set: Annotated[
        list[str] | None, typer.Option(help="change a figure of the hardware, such as dram=4TB; repeatable")
    ] = None
    dram: Annotated[str | None, typer.Option(help="DRAM of each host, such as 64GB, in place of the hardware's")] = None
    ssd: Annotated[
        str | None, typer.Option(help="SSDs of each host, such as 2TB or 4x2TB; 0 for none; in place of the hardware's")
    ] = None
    batch: Annotated[int, typer.Option(min=1, max=MOST_ROWS, help="rows of the global batch")] = 4
    sequence: Annotated[int, typer.Option(min=1, help="tokens in a row")] = 512
    micro_batches: Annotated[
        int | None, typer.Option(help="number of micro-batches, a divisor of the batch; default: by search")
    ] = None
    precision: Annotated[
        str,
        typer.Option(
            help="fp32, bf16-mixed (or bf16), fp16-mixed (or fp16), bf16-true, bf16-pure, fp8-rowwise (or fp8), "
            "fp8-tensorwise, fp8-rowwise-gw-hp; auto: bf16-mixed where all GPUs compute in bf16, else fp32"
        ),
    ] = "auto"
    gradient_dtype: Annotated[
        str, typer.Option(help="type in which gradients of micro-batches are summed: fp32, or compute")
    ] = "fp32"
    boundary_dtype: Annotated[
        str, typer.Option(help="type of activations between stages that autocast leaves in fp32: compute, or fp32")
    ] = "compute"
    strategy: Annotated[
        str,
        typer.Option(
            help="auto, the name of a strategy (mobius, ftpipe, fuyou, gpipe, zero3-offload), or a pipeline of passes"
        ),
    ] = "auto"
    search_seconds: Annotated[
        float | None, typer.Option(min=0.0, help="seconds of a core for the search of auto; default 33")
    ] = None
    plan: Annotated[Path | None, typer.Option(help="file of a saved plan to carry out instead of a search")] = None
    profile: Annotated[
        bool,
        typer.Option(help="time one block of each kind on this machine instead of using the hardware's rates"),
    ] = False
    profile_cache: Annotated[
        Path | None, typer.Option(help="directory of times that --profile measured; default ~/.cache/penstock/profiles")
    ] = None
    optimizer: Annotated[str, typer.Option(help="a class of torch.optim, in any case")] = "adamw"
    lr: Annotated[float, typer.Option(min=0.0, max=MOST_RATE, help="learning rate")] = 5e-5
    weight_decay: Annotated[
        float | None, typer.Option(min=0.0, max=MOST_RATE, help="weight decay; default: the optimizer's")
    ] = None
    no_decay: Annotated[
        list[str] | None,
        typer.Option(help='pattern of parameter names without weight decay, such as "*.bias"; repeatable'),
    ] = None
    max_grad_norm: Annotated[float | None, typer.Option(help="clip gradients to this norm")] = None
    ssd_dir: Annotated[
        list[Path] | None,
        typer.Option(help="directory for the files of a plan that uses SSDs; repeat it for each SSD"),
    ] = None
    ssd_verify: Annotated[bool, typer.Option(help="verify the checksums of all data read from SSD")] = False
    kernels: Annotated[
        str, typer.Option(help="written: a model's calls one by one; fused: chains of pointwise calls as one kernel")
    ] = "written"
    compile_stages: Annotated[bool, typer.Option(help="run repeated blocks by torch.compile")] = False
    cuda_graphs: Annotated[bool, typer.Option(help="run stages that stay on their GPU from CUDA graphs")] = False
    timeout: Annotated[
        float, typer.Option(min=1.0, help="seconds of silence after which a device or rank counts as lost")
    ] = 600.0
    head: Annotated[
        str | None,
        typer.Option(
            help="causal-lm, classification, seq2seq, image-classification, image-text-to-text; default: by model"
        ),
    ] = None
    labels: Annotated[int | None, typer.Option(min=1, help="number of classes of a classifier")] = None
    adapter: Annotated[
        str | None,
        typer.Option(help="train a LoRA adapter only: lora:r=16,alpha=32,targets=q_proj+v_proj,dora,rslora"),
    ] = None
    base: Annotated[
        str | None,
        typer.Option(
            help="form of the frozen weights under --adapter: bf16, int8, nf4 (bitsandbytes); the rest is bf16-true"
        ),
    ] = None
    dropout: Annotated[bool, typer.Option(help="dropout as in the model, or none")] = True
    seed: Annotated[
        int, typer.Option(min=-MOST_SEED, max=MOST_SEED, help="seed of dropout, new weights and the order of the data")
    ] = 0
    download: Annotated[bool, typer.Option(help="download the model from the Hugging Face hub")] = False

    def machine(self) -> Hardware:
        """The only machine. Raises `PlanError` if several are named."""
        names = self.hardware or ["auto"]
        if len(names) > 1:
            raise PlanError(
                f"--hardware: found {len(names)} machines ({', '.join(names)}); only `penstock plan` compares"
            )
        return self.machines()[0]

    def machines(self) -> list[Hardware]:
        """All machines that were named, each with every --set, --dram and --ssd applied."""
        from ..runtime.processes.joint_hardware import typed_hardware

        changes = [*(self.set or ())]
        if self.dram is not None:
            changes.append(f"dram={_size('dram', self.dram)}")
        found = [typed_hardware(name, changes) for name in self.hardware or ["auto"]]
        return found if self.ssd is None else [with_ssds(each, self.ssd) for each in found]

    def named_model(self) -> NamedModel:
        from ..compiler.models.named import find_model

        if self.model is None:
            raise PlanError("name a model: --model gpt2, --model t5-3b, --model DIRECTORY ...")
        return find_model(
            self.model,
            head=self.head,
            num_labels=self.labels,
            dropout=self.dropout,
            download=self.download,
            adapter=self.adapter,
            base=self.base,
        )

    def items(self) -> tuple[int, str]:
        """The number of items of a step, and the word for one item."""
        return self.named_model().items(self.batch, self.sequence)

    def compile(self, dump: Callable[[str, Draft], None] | None = None, hardware: Hardware | None = None) -> Job:
        """Compile the job for the model on the meta device. `dump` is called after each pass of the chosen plan only;
        `hardware` replaces the machine that was named."""
        with rare_collections():
            return self._compile(dump, self.machine() if hardware is None else hardware)

    def _compile(self, dump: Callable[[str, Draft], None] | None, hardware: Hardware) -> Job:
        named = self.named_model()
        weights, example = named.weights, named.batch_spec(self.batch, self.sequence)
        job = self.compile_model(self._shared_model(named), hardware, example, weights)
        if dump is None:
            return job
        chosen = dataclasses.replace(self, strategy="auto", micro_batches=None)
        return chosen.compile_model(named.describe(), hardware, example, weights, plan=job.plan, dump=dump)

    def find_plan(self, hardware: Hardware) -> Plan:
        """The plan of the job that `compile` would make for a machine."""
        from ..compiler import api

        named = self.named_model()
        model, example = self._shared_model(named), named.batch_spec(self.batch, self.sequence)
        with rare_collections():
            return api.find_plan(model, hardware, example_inputs=example, **self._wishes(hardware, named.weights))

    def _shared_model(self, named: NamedModel) -> nn.Module:
        return share((JobOptions, self.model, self.adapter, self.base), named.describe)

    def compile_model(
        self, model: Any, hardware: Hardware, example_inputs: Any, weights: Path | None = None, **more: Any
    ) -> Job:
        """Compile the job for a given model and batch. `more` is passed on to `penstock.compile`."""
        from ..compiler import api

        wishes = {**self._wishes(hardware, weights), **more}
        return api.compile(model, hardware, example_inputs=example_inputs, **wishes)

    def _wishes(self, hardware: Hardware, weights: Path | None) -> dict[str, Any]:
        """The arguments of `penstock.compile` beside the model, its batch and the machine."""
        return {
            "optimizer": self.optimizer_partial(),
            "param_groups": self.param_groups(),
            "strategy": self.strategy,
            "plan": self.plan,
            "micro_batches": "auto" if self.micro_batches is None else self.micro_batches,
            "precision": self.precision_on(hardware),
            "gradient_dtype": self.gradient_dtype,
            "boundary_dtype": self.boundary_dtype,
            "max_grad_norm": self.max_grad_norm,
            "seed": self.seed,
            "weights": weights,
            **({} if self.search_seconds is None else {"search_s": self.search_seconds}),
            "profile": self.profile and (self.profile_cache or True),
            "ssd_dirs": self.ssd_dir,
            "ssd_verify": self.ssd_verify,
            "kernels": self.kernels,
            "compile_stages": self.compile_stages,
            "cuda_graphs": self.cuda_graphs,
            "timeout_s": self.timeout,
        }

    def precision_on(self, hardware: Hardware) -> str:
        """The precision, which is that of the base where only that is named, and else by the machine's parts."""
        from ..compiler.models.bases import PRECISION

        if self.precision != "auto":
            return self.precision
        named = self.named_model() if self.adapter is not None else None
        is_on_base = named is not None and bool(named.base or named.is_published_packed)
        return PRECISION if is_on_base else natural_precision(hardware)

    def optimizer_partial(self) -> Any:
        """A partial of the torch.optim class. Raises `PlanError` with close names for an unknown one."""
        import torch

        kinds = {n.lower(): kind for n, kind in vars(torch.optim).items() if isinstance(kind, type)}
        kinds.pop("optimizer")
        if self.optimizer.lower() not in kinds:
            close = difflib.get_close_matches(self.optimizer.lower(), kinds, n=3) or sorted(kinds)
            raise PlanError(f"--optimizer {self.optimizer!r} is no class of torch.optim; try {', '.join(close)}")
        decay = {} if self.weight_decay is None else {"weight_decay": self.weight_decay}
        return functools.partial(kinds[self.optimizer.lower()], lr=self.lr, **decay)

    def param_groups(self) -> list[dict[str, Any]] | None:
        """The argument `param_groups` of `penstock.compile`."""
        return [{"params": list(self.no_decay), "weight_decay": 0.0}] if self.no_decay else None

    def remember(self, directory: Path) -> None:
        """Write a file beside a written job that says how to make its model again, for `penstock check --job`."""
        from .remembered import Remembered

        Remembered.model_validate(self, from_attributes=True).write(directory)

    @staticmethod
    def recall(directory: Path) -> JobOptions:
        """The options that `remember` wrote. Raises `PlanError` if there are none."""
        from .remembered import Remembered

        return JobOptions(**Remembered.read(directory).model_dump())


@dataclass(frozen=True)
class PlanOptions(JobOptions):
    """The options that `penstock plan` takes in addition: of batches that do not exist, and of the plan's proof."""

    padding: Annotated[
        bool, typer.Option(help="plan for rows that may end in padding, with a mask; otherwise for full rows")
    ] = True
    prove: Annotated[
        bool,
        typer.Option(
            "--prove", help="bound the distance of the stages of partition-mip from the optimum; may improve them"
        ),
    ] = False

    def named_model(self) -> NamedModel:
        return dataclasses.replace(super().named_model(), padding=self.padding)

    def compile_with_proof(self, dump: Callable[[str, Draft], None] | None = None) -> Job:
        """Search a plan, and compile it again with the proof of its stages, where a faster partition may be found.

        Raises `PlanError` for a plan whose stages come from another pass than `partition-mip`.
        """
        from ..compiler.pipeline import parse_pipeline, pipeline_text
        from ..passes.partition_mip.partition_mip import PartitionMip

        plan, machine = self.compile().plan, self.machine()
        passes = parse_pipeline(plan.passes, machine.num_devices)
        if not any(isinstance(each, PartitionMip) for each in passes):
            raise PlanError(
                f"--prove: only the stages of {PartitionMip.name} can be proved, and this plan has others: "
                f"{plan.passes}; --strategy mobius has such stages"
            )
        proved = [dataclasses.replace(each, prove=True) if isinstance(each, PartitionMip) else each for each in passes]
        again = dataclasses.replace(self, strategy=pipeline_text(proved), micro_batches=plan.micro_batches)
        return again.compile(dump)


@dataclass(frozen=True)
class TrainOptions(JobOptions):
    """The options that `penstock train` takes in addition."""

    data: Annotated[
        list[Path] | None,
        typer.Option(
            help=".txt, .jsonl, .json, .csv, .parquet, .arrow, a folder of them or of `datasets`, or OWNER/NAME on the "
            "hub; repeatable"
        ),
    ] = None
    kind: Annotated[
        str,
        typer.Option(help="text, classification, chat, completion, preference or seq2seq; auto: by the columns"),
    ] = "auto"
    column: Annotated[
        list[str] | None,
        typer.Option(help="name of a column in the file, such as text=body; repeatable"),
    ] = None
    split: Annotated[str, typer.Option(help="split to train on, of a folder that `datasets` saved with several")] = (
        "train"
    )
    long_rows: Annotated[str, typer.Option(help="rows of more than --sequence tokens: truncate, drop or error")] = (
        "truncate"
    )
    targets: Annotated[
        int | None, typer.Option(min=1, help="tokens in a row of an encoder-decoder's labels; default: the longest")
    ] = None
    pack: Annotated[
        bool,
        typer.Option(help="pack whole texts or chats into rows; documents do not attend to each other"),
    ] = False
    image_size: Annotated[
        str | None, typer.Option(help="bring all images of chats to this size: 448, or HEIGHTxWIDTH")
    ] = None
    streaming: Annotated[bool, typer.Option(help="read and tokenise while training, for data larger than memory")] = (
        False
    )
    beta: Annotated[float | None, typer.Option(help="beta of DPO, for preference pairs; default 0.1")] = None
    out: Annotated[Path, typer.Option(help="directory for checkpoint, trained model and programs")] = Path("out/train")
    epochs: Annotated[
        float, typer.Option(min=0.0, max=MOST_EPOCHS, help="passes over the data, unless --max-steps is given")
    ] = 1.0
    max_steps: Annotated[int | None, typer.Option(min=1, help="number of training steps")] = None
    schedule: Annotated[str, typer.Option(help="schedule of the learning rate: constant, linear or cosine")] = (
        "constant"
    )
    warmup_steps: Annotated[int, typer.Option(min=0, help="steps in which the learning rate rises from 0")] = 0
    warmup_ratio: Annotated[float, typer.Option(min=0.0, max=1.0, help="the same as a share of all steps")] = 0.0
    save_every: Annotated[int, typer.Option(min=0, help="steps between checkpoints; 0: at the end only")] = 0
    save_total_limit: Annotated[
        int,
        typer.Option(min=1, help="checkpoints to keep: 1 is OUT/checkpoint itself, more are OUT/checkpoint/step-N"),
    ] = 1
    save_on_stop: Annotated[bool, typer.Option(help="save a checkpoint when Ctrl-C ends the run")] = True
    eval_every: Annotated[
        int, typer.Option(min=0, help="steps between evaluations; the best model is kept in OUT/best")
    ] = 0
    best_by: Annotated[str, typer.Option(help="figure of the best model: the lowest loss, or the highest accuracy")] = (
        "loss"
    )
    patience: Annotated[int, typer.Option(min=0, help="stop after N evaluations without improvement; 0: never")] = 0
    resume: Annotated[bool, typer.Option(help="continue from the checkpoint in OUT")] = False
    elastic: Annotated[
        bool,
        typer.Option(help="continue from the checkpoint in OUT if there is one, else start anew"),
    ] = False
    offered: Annotated[
        bool,
        typer.Option(
            help="carry out the plan that a run offered and left in OUT/offer, in place of --hardware, --set, --dram, "
            "--ssd, --strategy and --micro-batches"
        ),
    ] = False
    merge: Annotated[
        bool, typer.Option(help="with --adapter: also write the model with the adapter merged in")
    ] = False
    gguf: Annotated[
        str | None,
        typer.Option(help="also write OUT/model/model.gguf, for llama.cpp: f16, bf16, q8_0 or f32"),
    ] = None
    log: Annotated[
        list[str] | None,
        typer.Option(
            "--log",
            "--logger",  # torchrun takes --log for an abbreviation of its own options
            help="write OUT/logs: jsonl, tensorboard or wandb (Weights & Biases); repeatable; under torchrun --logger",
        ),
    ] = None
    serve: Annotated[
        str | None,
        typer.Option(help="show the run while it trains as a page of this machine: 127.0.0.1:PORT; port 0 finds one"),
    ] = None
    eval_fraction: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="share of the rows to hold out for evaluations")
    ] = 0.0
    eval_data: Annotated[
        list[Path] | None, typer.Option(help="files of held-out data of the same kind; repeatable")
    ] = None

    @property
    def offer_directory(self) -> Path:
        """The folder in which a run leaves the plan that it offers."""
        return self.out / "offer"

    def with_offer(self) -> TrainOptions:
        """The options to plan by: with --offered, machine and plan are those of the offer in OUT. Raises `PlanError`
        where there is none, and for --plan beside it."""
        from ..compiler.search.offer import HARDWARE_FILE, PLAN_FILE

        if not self.offered:
            return self
        if self.plan is not None:
            raise PlanError(f"--offered and --plan {self.plan}: a run has one plan; leave one of them out")
        plan, hardware = self.offer_directory / PLAN_FILE, self.offer_directory / HARDWARE_FILE
        if not (plan.is_file() and hardware.is_file()):
            raise PlanError(
                f"--offered: {self.offer_directory} holds no offer; a run leaves one there where a device is slower "
                "than planned and another plan is faster. Leave --offered out"
            )
        known: dict[str, Any] = {"hardware": [str(hardware)], "set": None, "dram": None, "ssd": None, "plan": plan}
        return dataclasses.replace(self, **known, strategy="auto", micro_batches=None)

    @property
    def size_of_images(self) -> tuple[int, int] | None:
        """Height and width of --image-size, "448" or "480x640". Raises `PlanError` for another text."""
        if self.image_size is None:
            return None
        found = re.fullmatch(r"(\d+)(?:x(\d+))?", self.image_size.strip().lower())
        if found is None or not int(found[1]) or not int(found[2] or 1):
            raise PlanError(f"--image-size {self.image_size!r}: allowed are pixels: 448, or 480x640 (height x width)")
        return int(found[1]), int(found[2] or found[1])

    def data_spec(self, paths: list[Path]) -> DataSpec:
        """The request for data in these files. Raises `PlanError` for an unknown kind or wish, with those there are."""
        from ..data.hub import local_paths
        from ..data.spec import DataKind, DataSpec, LongRows
        from ..ir.machine.spelling import each_once, key_and_value

        wishes = (("kind", self.kind, get_args(DataKind)), ("long-rows", self.long_rows, get_args(LongRows)))
        for option, value, allowed in wishes:
            if value not in allowed:
                near = difflib.get_close_matches(value, allowed, 1, 0.0)[0]
                raise PlanError(f"--{option} {value!r}; allowed are {', '.join(allowed)}; the nearest is {near}")
        columns = each_once("--column", (key_and_value("column", text, "text=body") for text in self.column or ()))
        given = {"kind": self.kind, "columns": columns, "sequence": self.sequence, "targets": self.targets}
        given |= {"long_rows": self.long_rows, "pack": self.pack, "split": self.split}
        return DataSpec.model_validate({"paths": local_paths(paths, self.split), **given})


def natural_precision(hardware: Hardware) -> str:
    """The usual precision on such parts: bf16-mixed where all are GPUs that compute in bf16, else fp32."""
    has_bf16 = all(device.kind == "cuda" and "bf16" in device.peak_flops for device in hardware.devices)
    return "bf16-mixed" if has_bf16 else "fp32"


def _size(option: str, text: str) -> str:
    """An amount of bytes with its unit as `parse_bytes` takes it: "64gb" and "64 G" are "64GB". Raises `PlanError` for
    one without a unit, and for what is no amount."""
    from ..ir.machine.spelling import missing_unit
    from ..ir.units import BYTES

    units = {unit.lower(): unit for unit in BYTES.units}
    units |= {short.removesuffix("b"): unit for short, unit in units.items() if short != "b"}
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in {"", *units}:
        raise PlanError(f"--{option} {text!r}: allowed is an amount with its unit, such as 64GB, 64GiB or 2TB")
    if not found[2]:
        raise PlanError(missing_unit(f"--{option} ", text))
    return found[1] + units[found[2]]


def with_ssds(hardware: Hardware, text: str) -> Hardware:
    """The machine with other SSDs on each host, "2TB" or "4x2TB", at the rates of those that it has."""
    from ..ir.machine.overrides import STOCK_SSD, require_count

    count, times, size = text.replace("X", "x").replace("*", "x").rpartition("x")
    if (times and not count.strip().isdecimal()) or size.strip() == "":
        raise PlanError(f"--ssd {text!r}: allowed are a size, such as 2TB, a number and a size, such as 4x2TB, and 0")
    if text.strip() == "0":
        return hardware.with_(ssds=0)
    like = hardware.hosts[0].ssds[0].model_dump() if hardware.hosts[0].ssds else STOCK_SSD
    disk = {**like, "size_bytes": _size("ssd", size), "directory": None}
    disks = [disk] * require_count("--ssd", int(count or 1))
    return hardware.with_(ssds=disks)


@dataclass
class AnswerOptions:
    """Options of the answer of `penstock plan`."""

    tokens: Annotated[
        str | None, typer.Option(help="tokens to train in all, such as 100M: prints hours and wear of SSDs")
    ] = None
    price: Annotated[
        float | None, typer.Option(min=0.0, max=MOST_PRICE, help="dollars an hour, if the hardware names no price")
    ] = None
    mtbf: Annotated[
        str | None,
        typer.Option(help="mean time between failures of a device, such as 50000h: how often to save, what is lost"),
    ] = None
    storage: Annotated[
        str | None,
        typer.Option(help="rate at which all hosts together write checkpoints, such as 100GB/s; default: their SSDs"),
    ] = None
    alternatives: Annotated[
        bool | None,
        typer.Option(help="also plan a larger batch, more DRAM, LoRA and bf16; default: unless that takes minutes"),
    ] = None
    full: Annotated[
        bool, typer.Option("--full", help="print stages, memories, links, rivals and remarks as tables")
    ] = False


def _options_of(group: type) -> list[inspect.Parameter]:
    """A parameter for each field of a dataclass, in the group of its section of a file."""
    from .config import SECTIONS

    hints, kind = get_type_hints(group, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    sections = {name: section for section, names in SECTIONS.items() for name in names}
    found = []
    for field in dataclasses.fields(group):
        kept, option = get_args(hints[field.name])
        option = copy.copy(option)
        option.rich_help_panel = sections.get(field.name, "answer" if group is AnswerOptions else "plan").capitalize()
        annotation = Annotated[kept, option]  # type: ignore[valid-type]
        found.append(inspect.Parameter(field.name, kind, default=field.default, annotation=annotation))
    return found


def takes(*groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command that has parameters of these dataclasses: each of their fields becomes an option."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        taken = {p.name: p.annotation for p in own if p.annotation in groups}
        kept = [field for p in own for field in (_options_of(taken[p.name]) if p.name in taken else [p])]
        kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in kept]

        @functools.wraps(command)
        def call(**given: Any) -> None:
            for name, group in taken.items():
                given[name] = group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
            command(**given)

        del call.__wrapped__  # typer would look at the signature of the wrapped function
        call.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in kept}
        return call

    return decorate
