"""The machines, programs and counting rules of MiCS's evaluation (VLDB 2022, section 5) for `reproduce_mics`.

Programs are planned for one lane with a few micro-batches, once per model and form, and simulated on as many hosts as a
figure asks for: a lane's text does not say how many others there are. A step of more micro-batches takes as much longer
as the last one began behind the one before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...compiler.models.named import find_model
from ...ir import ops
from ...ir.calls import op_of
from ...ir.machine.hardware import Hardware
from ...ir.program import WRITTEN_OUT, Program, infer_all, micro_batch_of, profile_memory
from ...runtime.simulate import CostModel, Timeline, simulate
from ...runtime.simulate.sharing import TasksUnderWay
from ..fuyou.bench import step_flops
from ..lab import Case, Lab, Trial

GPUS = 8  # of a host
FEW_HOSTS = WRITTEN_OUT // GPUS + 1
FEW = 2  # micro-batches of a lane that are simulated one by one
V100, A100 = "mics-p3dn", "mics-p4d"
# A micro-batch's inputs of all stages are there at a time, not those of all micro-batches.
START = "coarsen, mesh{{shards={shards}}}, partition-min-stage{{inputs_leave=true}}, map-round-robin, schedule-1f1b, "


@dataclass(frozen=True)
class Form:
    """A way to train. `remat`, `shard` and `sums`: options of the passes of these names."""

    name: str
    remat: str = "always=true"
    shard: str = "tier=device, hold=false"
    sums: str = "every=two-hop"

    def line(self, shards: int) -> str:
        named = (("insert-remat", self.remat), ("insert-shard", self.shard), ("insert-two-hop", self.sums))
        parts = [f"{name}{{{options}}}" if options else name for name, options in named]
        return START.format(shards=shards) + ", ".join([*parts, "insert-optimizer"])


MICS = Form("MiCS")
FLAT = Form("MiCS, plain gathers", shard="tier=device, hold=false, hierarchical=false")
ONE_HOP = Form("MiCS, sums with every micro-batch", sums="every=micro-batch")
ZERO3 = Form("ZeRO-3", shard="tier=device, hold=false, hierarchical=false")
ZERO3_LATE = Form("ZeRO-3, nothing ahead", shard="tier=device, hold=false, hierarchical=false, prefetch=0")
OURS = Form("ours", remat="", shard="tier=device, prefetch=8", sums="")
NO_REMAT = replace(MICS, remat=""), replace(ZERO3, remat=""), replace(ZERO3_LATE, remat="")


@dataclass(frozen=True)
class Model:
    """`shards`: the paper's partition group on p3dn; `micro_batch`: rows; `micro_batches`: of a GPU, where the global
    batch follows from it and not the other way round."""

    name: str
    shards: int
    micro_batch: int = 8
    micro_batches: int | None = None
    precision: str = "fp16"
    sequence: int = 512


@dataclass(frozen=True)
class Setup:
    models: Mapping[str, Model]
    strong: Mapping[str, Sequence[int]]  # figures 7 and 8: model -> hosts
    fast: Mapping[str, Sequence[int]]  # figure 10
    small: str  # of figures 2, 12, 14, 15
    two_hosts: str  # of figure 13
    hosts: Sequence[int]  # of figures 13 to 15
    groups: Sequence[int]  # figure 12: shards over `grouped` hosts
    grouped: int
    image: str
    huge: Mapping[str, Sequence[int]]  # section 5.1.5: model -> hosts
    scaled: str  # of our own scaling
    scales: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)  # hosts
    batch: int = 8192
    sizes: Sequence[float] = (16e6, 32e6, 64e6, 128e6, 256e6)  # of figure 13's messages
    weak: int = 8  # micro-batches of a GPU
    known: Mapping[str, object] = field(default_factory=dict)  # models that are not of `compiler/models`


@dataclass(frozen=True)
class Run:
    """One simulated step of a whole machine."""

    hosts: int
    gpus: int
    batch: int
    step_s: float
    timeline: Timeline
    tflops: float | None  # of a GPU, as the paper counts them

    @property
    def rows_s(self) -> float:
        """Rows of the batch per second, of all GPUs."""
        return self.batch / self.step_s


@dataclass(frozen=True)
class Bench:
    """Runs of one setup."""

    lab: Lab
    setup: Setup

    def run(
        self, model: str, form: Form, hosts: int, shards: int | None = None, kind: str = V100, each: int | None = None
    ) -> Run | None:
        """None where it does not fit. `shards`: all GPUs where it is 0, the model's own number where it is None;
        `each`: micro-batches of a GPU, else what the model or the setup's batch says."""
        spec, machine = self.setup.models[model], hardware(kind, hosts)
        gpus = machine.num_devices
        count = each or spec.micro_batches or max(1, self.setup.batch // (spec.micro_batch * gpus))
        key = (spec, form, machine.name, gpus if shards == 0 else shards, count)
        if key not in self.lab.kept:
            programs = self.programs(model, form, hosts, shards, kind, min(count, FEW))
            self.lab.kept[key] = programs and self._run(spec, programs, machine, hosts, count)
        found: Run | None = self.lab.kept[key]
        return found

    def programs(
        self, model: str, form: Form, hosts: int, shards: int | None = None, kind: str = V100, few: int = FEW
    ) -> list[Program] | None:
        """Those of a lane with a few micro-batches; None where they do not fit."""
        machine = hardware(kind, hosts)
        group = machine.num_devices if shards == 0 else shards or self.setup.models[model].shards
        return self._programs(model, form, machine, group, few, kind) if group <= machine.num_devices else None

    def _programs(
        self, model: str, form: Form, machine: Hardware, shards: int, few: int, kind: str
    ) -> list[Program] | None:
        """Those of a lane, planned for a small machine with the same text, whose lanes are not written out: with
        replicas, or, where a group of many GPUs is everything, with another that is; for the machine itself where that
        does not fit, as a larger group has smaller parts."""
        everything = shards == machine.num_devices > WRITTEN_OUT
        small = FEW_HOSTS if everything else max(FEW_HOSTS, 2 * shards // GPUS)
        for hosts in dict.fromkeys((small, len(machine.hosts)) if everything else (small,)):
            planned = hardware(kind, hosts)
            trial = self.plan(model, form, planned, planned.num_devices if everything else shards, few)
            found = spread(trial.programs, machine.num_devices, shards)
            if trial.timeline is not None and fits(found, machine):
                return found
        return None

    def plan(self, model: str, form: Form, machine: Hardware, shards: int, few: int = FEW) -> Trial:
        self.lab.models.update(self.setup.known)  # type: ignore[arg-type]
        spec = self.setup.models[model]
        case = Case(spec.name, spec.micro_batch, few * machine.num_devices, spec.sequence, precision=spec.precision)
        return self.lab.trial(case, machine, form.line(shards))

    def _run(self, spec: Model, programs: list[Program], machine: Hardware, hosts: int, count: int) -> Run:
        timeline = simulate(programs, machine, precision=spec.precision, written_out=0)
        few = programs[0].interface.micro_batches
        step_s = timeline.step_s + (count - few) * period_s(programs, timeline)
        batch = count * spec.micro_batch * machine.num_devices
        flops = self.flops(spec, batch)
        tflops = flops / step_s / machine.num_devices / 1e12 if flops else None
        return Run(hosts, machine.num_devices, batch, step_s, timeline, tflops)

    def flops(self, spec: Model, batch: int) -> float | None:
        """Of a step of a language model as section 5.1.1 counts them, recomputation included."""
        if spec.name in self.setup.known:
            return None
        config = find_model(spec.name).config
        return step_flops(batch, spec.sequence, config.num_hidden_layers, config.hidden_size, config.vocab_size)


def hardware(kind: str, hosts: int) -> Hardware:
    return Hardware.preset(f"{kind}:{hosts}")


def spread(programs: Sequence[Program], gpus: int, shards: int) -> list[Program]:
    """A lane's programs among `gpus` lanes of one device, of which `shards` share their weights."""
    found = []
    for program in programs:
        changed = program.copy().with_interface(lanes=tuple((device,) for device in range(gpus)), shards=shards)
        infer_all(changed)
        found.append(changed)
    return found


def fits(programs: Sequence[Program], machine: Hardware) -> bool:
    """Whether the first devices' memories hold a lane."""
    return all(profile_memory(p).peak_bytes[ops.DEVICE] <= machine.devices[p.device].budget_bytes for p in programs)


def period_s(programs: Sequence[Program], timeline: Timeline) -> float:
    """Seconds from the beginning of the last micro-batch but one of a lane to that of the last; 0 where there is only
    one."""
    (first,) = programs
    nodes = [node for node in first.ops() if op_of(node).streams]
    begins: dict[int, float] = {}
    for node, span in zip(nodes, timeline.spans, strict=True):
        if node.target is ops.forward:
            begins.setdefault(micro_batch_of(node), span.start_s)
    ordered = sorted(begins.values())
    return ordered[-1] - ordered[-2] if len(ordered) > 1 else 0.0


def collective_s(
    machine: Hardware, members: Sequence[int], num_bytes: float, times: int = 1, hierarchical: bool = False
) -> float:
    """Seconds of one collective that has the machine to itself."""
    work = ops.Work(
        ops.COMM, moved_bytes=round(num_bytes), source=ops.DEVICE, target=ops.DEVICE, group="all", rounds=times,
        hierarchical=hierarchical,
    )  # fmt: skip
    model = CostModel(machine, "fp16")
    progress = TasksUnderWay(model.links)
    progress.begin(0, model.collective([(device, work) for device in members]), 0.0)
    end_s = 0.0
    while progress.events:
        now_s, over = progress.pop()
        end_s = now_s if over is not None else end_s
    return end_s


def effective(machine: Hardware, members: Sequence[int], num_bytes: float) -> float:
    """Bytes/s of a plain gather as section 3.1 means it: what a member gets from the others, over its time."""
    share = (len(members) - 1) / len(members)
    return share * num_bytes / collective_s(machine, members, num_bytes)
