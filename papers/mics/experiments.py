"""MiCS's setup, and the simulation of a step on a whole fleet.

Programs are planned for one lane with a few micro-batches, once per model and form, and simulated on the number of
hosts that a figure asks for, as a lane's text does not depend on the number of lanes. Each further micro-batch adds to
the step the time between the begins of the last two simulated ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...compiler.models.named import find_model
from ...ir import ops
from ...ir.machine.hardware import Hardware
from ...ir.program import WRITTEN_OUT, Program
from ...runtime.simulate import Timeline, simulate
from ..experiments import Experiments, said_products, said_shares, said_traffic, step_flops
from ..lab import Lab, SimulatedStep, Workload
from ..wide_resnet import NamedWideResNet
from .programs import (
    A100,
    DEEPSPEED,
    FEW,
    FEW_HOSTS,
    GPUS,
    MICS,
    OURS,
    STEP_SHARES,
    V100,
    ZERO3,
    Form,
    fits,
    hardware,
    period_s,
    spread,
    with_factors,
)  # fmt: skip

_ROBERTA = "hidden_size=5120,intermediate_size=20480,num_hidden_layers=62,num_attention_heads=40"
_GPT2 = "n_embd=5120,n_layer=62,n_head=40,vocab_size=50265"
_100B = "hidden_size=10240,intermediate_size=40960,num_hidden_layers=80,num_attention_heads=80"


@dataclass(frozen=True)
class MicsModel:
    """A model of the paper. `shards` is the paper's partition group on p3dn, `micro_batch` its rows. `micro_batches` is
    their number per GPU if the global batch follows from it; None if it follows from the global batch."""

    name: str
    shards: int
    micro_batch: int = 8
    micro_batches: int | None = None
    precision: str = "fp16"
    sequence: int = 512


@dataclass(frozen=True)
class FleetRun:
    """One simulated step of a whole machine."""

    hosts: int
    gpus: int
    batch: int
    step_s: float
    timeline: Timeline
    tflops: float | None  # per GPU, as the paper counts them

    @property
    def computing(self) -> float:
        """The share of its time in which the first GPU computes."""
        return self.timeline.busy_share[0, ops.COMPUTE]

    @property
    def moving(self) -> float:
        """The share of its time in which the first GPU is in a collective."""
        return self.timeline.busy_share.get((0, ops.COMM), 0.0)

    @property
    def said(self) -> str:
        return f"computes {self.computing:.0%} of its time and is in collectives {self.moving:.0%} of it"

    @property
    def forward_s(self) -> tuple[float, float]:
        """Seconds of a lane's gathers and of its computation before its first backward."""
        spans = self.timeline.spans
        end_s = min(span.start_s for span in spans if span.op == "backward")
        before = [span for span in spans if span.start_s < end_s and span.device == spans[0].device]
        gathered = sum(span.end_s - span.start_s for span in before if span.op == "all_gather")
        return gathered, sum(span.end_s - span.start_s for span in before if span.stream == ops.COMPUTE)

    @property
    def useful_tflops(self) -> float | None:
        """Without what is computed again: a forward in four."""
        return self.tflops and 0.75 * self.tflops

    @property
    def computing_tflops(self) -> float | None:
        """The TFLOPS of the seconds in which a GPU computes."""
        return self.tflops and self.tflops / self.computing

    @property
    def rows_s(self) -> float:
        """Rows of the batch per second, over all GPUs."""
        return self.batch / self.step_s


class Mics(Experiments):
    """MiCS's setup, with models by the paper's names."""

    title = "MiCS (VLDB 2022) in simulation"
    left_out = {
        "figures 1, 3 to 6": "drawings of the mechanisms: groups, hierarchical gathers, sums in two hops.",
        "figures 11a, 11b, table 2": "against Megatron-LM-3D. `split-width` divides what these encoders' MLPs compute, "
        "but not their attention, so that it is no Megatron-LM: with 128 layers on 128 GPUs configuration 1 (8 "
        "members) does not fit, and 2 and 3 reach 13 and 34 rows/s where MiCS has 152.",
        "figure 16": "the loss of a run on real GPUs; here tests compare sharded steps with eager PyTorch's.",
    }
    factors = {
        f"{STEP_SHARES[V100]:.1%} of the rates on p3dn": "a free number for both systems alike, of computation and "
        "collectives, fitted to the 42% of figure 9; it changes no ratio",
        f"{STEP_SHARES[A100]:.1%} of the rates on p4d": "the same, fitted to the 179 TFLOPS of 52B on 128 "
        "GPUs (section 5.1.5)",
    }
    models: Mapping[str, MicsModel] = {
        "BERT 10B": MicsModel("mics-bert-10b", 8),
        "BERT 15B": MicsModel("mics-bert-15b", 16),
        "BERT 20B": MicsModel("mics-bert-20b", 16),
        "BERT 50B": MicsModel("mics-bert-50b", 64),
        "RoBERTa 20B": MicsModel(f"roberta-large:{_ROBERTA}", 16),
        "GPT2 20B": MicsModel(f"gpt2-xl:{_GPT2}", 16),
        "WideResNet 3B": MicsModel("wide-resnet-3b", 8, micro_batches=1, precision="fp32"),
        "52B": MicsModel("mics-bert-50b:num_hidden_layers=64", 64, 16, 4),
        "100B": MicsModel(f"mics-bert-50b:{_100B}", 128, 16, 4),
    }
    unnamed = {"wide-resnet-3b": NamedWideResNet((6, 8, 46, 6), 8)}
    strong: Mapping[str, Sequence[int]] = {  # figures 7 and 8: model -> hosts
        "BERT 10B": (2, 4, 8, 16),
        "BERT 15B": (2, 4, 8, 16),
        "BERT 20B": (2, 4, 8, 16),
        "BERT 50B": (8, 16),
        "RoBERTa 20B": (2, 16),
        "GPT2 20B": (2, 16),
    }
    fast: Mapping[str, Sequence[int]] = {"BERT 15B": (2, 4, 8), "BERT 20B": (2, 4, 8)}  # figure 10
    presets = ("mics-p3dn:2", "mics-p4d:2")
    usual = "BERT 10B"  # of figures 2, 12, 14, 15
    two_hosts = "BERT 15B"  # of figure 13
    hosts: Sequence[int] = (2, 4, 8, 16)  # of figures 13 to 15
    groups: Sequence[int] = (8, 16, 32, 64)  # figure 12: shards over `grouped` hosts
    grouped = 8
    image = "WideResNet 3B"
    huge: Mapping[str, Sequence[int]] = {"52B": (16,), "100B": (16, 64)}  # section 5.1.5: model -> hosts
    zero2_rows = 4  # of a micro-batch
    scaled = "BERT 10B"  # of our own scaling
    scales: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)  # hosts
    batch = 8192
    sizes: Sequence[float] = (16e6, 32e6, 64e6, 128e6, 256e6)  # of figure 13's messages
    weak = 8  # micro-batches of a GPU

    def __init__(self, lab: Lab | None = None):
        super().__init__(lab)
        self.runs: dict[tuple[object, ...], FleetRun | None] = {}

    def small(self) -> Iterator[tuple[str, Workload, Hardware, str]]:
        machine = hardware(V100, FEW_HOSTS)
        work = self.workload("bert-large:num_hidden_layers=3,vocab_size=1024", 8, FEW * machine.num_devices)
        for form, shards in ((MICS, GPUS), (DEEPSPEED, machine.num_devices)):
            yield form.name, work, machine, form.line(shards)

    def machine(self, kind: str, hosts: int) -> Hardware:
        """A fleet of hosts. `changes`: see `with_factors`."""
        return with_factors(hardware(kind, hosts), **self.changes)

    def run(
        self, model: str, form: Form, hosts: int, shards: int | None = None, kind: str = V100, each: int | None = None
    ) -> FleetRun | None:
        """Simulate a step; None if it does not fit. `shards` 0 means all GPUs, None the model's own number. `each` is
        the number of micro-batches per GPU; by default it follows from the model or the setup's batch."""
        spec, machine = self.models[model], self.machine(kind, hosts)
        gpus = machine.num_devices
        count = each or spec.micro_batches or max(1, self.batch // (spec.micro_batch * gpus))
        key = (spec, form, machine.name, gpus if shards == 0 else shards, count, *self.changes.items())
        if key not in self.runs:
            programs = self.programs(model, form, hosts, shards, kind, min(count, FEW))
            self.runs[key] = self._run(spec, programs, kind, hosts, count) if programs else None
        return self.runs[key]

    def programs(
        self, model: str, form: Form, hosts: int, shards: int | None = None, kind: str = V100, few: int = FEW
    ) -> list[Program] | None:
        """The programs of a lane with a few micro-batches; None if they do not fit."""
        machine = self.machine(kind, hosts)
        group = machine.num_devices if shards == 0 else shards or self.models[model].shards
        return self._programs(model, form, machine, group, few, kind) if group <= machine.num_devices else None

    def _programs(
        self, model: str, form: Form, machine: Hardware, shards: int, few: int, kind: str
    ) -> list[Program] | None:
        """The programs of a lane, planned for a small machine on which they have the same text: one with replicas, or,
        if one group has all of many GPUs, one that is also a single group. If that does not fit, they are planned for
        the machine itself, as a larger group has smaller parts. Lanes are not written out on either."""
        everything = shards == machine.num_devices > WRITTEN_OUT
        small = FEW_HOSTS if everything else max(FEW_HOSTS, 2 * shards // GPUS)
        for hosts in dict.fromkeys((small, len(machine.hosts)) if everything else (small,)):
            planned = self.machine(kind, hosts)
            trial = self.plan(model, form, planned, planned.num_devices if everything else shards, few)
            found = spread(trial.programs, machine.num_devices, shards)
            if trial.timeline is not None and fits(found, machine):
                return found
        return None

    def plan(self, model: str, form: Form, machine: Hardware, shards: int, few: int = FEW) -> SimulatedStep:
        spec = self.models[model]
        work = self.workload(spec.name, spec.micro_batch, few * machine.num_devices, spec.sequence)
        return self.lab.trial(replace(work, precision=spec.precision), machine, form.line(shards))

    def _run(self, spec: MicsModel, programs: list[Program], kind: str, hosts: int, count: int) -> FleetRun:
        machine = self.machine(kind, hosts)
        timeline = simulate(programs, machine, precision=spec.precision, written_out=0)
        few = programs[0].interface.micro_batches
        step_s = (timeline.step_s + (count - few) * period_s(programs, timeline)) / STEP_SHARES[kind]
        batch = count * spec.micro_batch * machine.num_devices
        flops = self.flops(spec, batch)
        tflops = flops / step_s / machine.num_devices / 1e12 if flops else None
        return FleetRun(hosts, machine.num_devices, batch, step_s, timeline, tflops)

    def flops(self, spec: MicsModel, batch: int) -> float | None:
        """FLOPs of a language model's step as section 5.1.1 counts them, recomputation included; else None."""
        if spec.name in self.unnamed:
            return None
        config = find_model(spec.name).config
        return step_flops(batch, spec.sequence, config.num_hidden_layers, config.hidden_size, config.vocab_size)

    def swept(
        self, model: str, form: Form, hosts: Sequence[int], kind: str = V100, shards: int | None = None
    ) -> dict[int, FleetRun]:
        """The runs that fit, by the number of hosts."""
        found = {count: self.run(model, form, count, shards, kind) for count in hosts}
        return {count: run for count, run in found.items() if run is not None}

    def assumptions(self) -> dict[str, str]:
        """The assumptions of all figures, taken from the presets that are simulated."""
        old, new = hardware(V100, 2), hardware(A100, 2)

        def gpu(machine: Hardware, half: str) -> str:
            device, host = machine.devices[0], machine.hosts[0]
            assert host.nvlink_bandwidth is not None
            return (
                f"{half}: {said_products(device, 'fp16')}; {said_traffic(device)}; NVLink "
                f"{host.nvlink_bandwidth / 1e9:.0f} GB/s a GPU and direction"
            )

        assert old.network is not None and new.network is not None
        hop_s, direct_s = (each.latency_s(each.devices[0].name, each.devices[GPUS].name) for each in (old, new))
        return {
            "GPUs": f"{gpu(old, 'p3dn, V100')}; {gpu(new, 'p4d, A100')}",
            "network": f"{old.network.bandwidth / 1e9:g} and {new.network.bandwidth / 1e9:g} GB/s a host and "
            "direction (100 and 400 Gb/s), of which messages reach "
            f"{said_shares(old.network.message_shares, lambda size: f'{size / 1e6:g} MB')}, and collectives "
            f"{said_shares(old.network.host_shares, lambda hosts: f'{hosts:.0f} hosts')}: fitted to figure 2, which is "
            "of p3dn, once. A message is what a GPU passes on in one round of a ring",
            "collectives": "rings host by host, one for each PCIe switch between hosts, so that each network card "
            "carries (n-1)/n of the value once; a sum that all get is a scatter and a gather",
            "latency": f"a ring of n has n-1 rounds (section 2.3, footnote 1) of {hop_s * 1e6:.0f} us between hosts: "
            f"{old.network.latency_s * 1e6:.0f} us of network and {old.devices[0].link_latency_s * 1e6:.0f} us of "
            f"PCIe on either side, assumed; {direct_s * 1e6:.0f} us on p4d, whose network cards read GPU memory "
            f"themselves (GPUDirect RDMA, by AWS's documents; p3dn has none); "
            f"{old.hosts[0].nvlink_latency_s * 1e6:.0f} us inside a host. All "
            "parameters of a layer go in one call",
            "memory": f"{old.devices[0].memory_bytes / 2**30:.0f} and {new.devices[0].memory_bytes / 2**30:.0f} GiB, "
            f"{old.devices[0].usable_fraction:.0%} of it usable; 2 + 2 + 12 bytes a parameter over the group",
            "models": "table 1 as encoders with a classifier, without the output layer over the vocabulary; BERT 50B "
            "with 64 heads, as 40 do not divide 8192. The paper does not describe 52B and 100B: 64 layers of 8192 and "
            "80 of 10240 here",
            "batch": f"{self.batch} rows of 512 in micro-batches of 8 a GPU; of those, {FEW} are simulated, and each "
            "further one takes as long as the second began behind the first",
            "activations between layers": "in fp16, as all that a GPU keeps of a micro-batch for its recomputation",
            "TFLOPS": "the paper's formula, which counts recomputation: 96 T l L h^2 (1 + l / 6h + V / 16Lh); three "
            "quarters of them are useful work. 'Computation alone' has the seconds that a GPU computes under it",
            "whole steps": "all parts of a step, computation and collectives alike, at "
            f"{STEP_SHARES[V100]:.1%} of the rates above on p3dn: fitted once, to the 42% of figure 9, taken for 16 "
            f"GPUs; and at {STEP_SHARES[A100]:.1%} on p4d, fitted to the 179 TFLOPS of 52B; it changes no ratio",
            MICS.name: f"`{MICS.line(8)}`",
            DEEPSPEED.name: "ZeRO-3: all GPUs in one group, plain gathers, each layer gathered when it is due, as its "
            "streams wait for each other and its decisions are made on the fly (section 4). Its sums are scattered; "
            "all-reduced, as section 3.4 says of it, they would move twice the bytes: "
            f"`{DEEPSPEED.line(128)}`",
            ZERO3.name: "what figure 15 calls so, the same with MiCS's streams: gathers run two layers ahead",
            OURS.name: f"what MiCS's passes choose when they may choose more: `{OURS.line(8)}`",
        }
