"""Programs built by hand, for tests and benchmarks that need programs without any pass."""

from __future__ import annotations

from torch import fx

from penstock.ir import ops
from penstock.ir.program import Interface, ParamSpec, Program, StageSpec, TensorSpec, place_frees

MAX_NORM = 1.0  # of a program with `clip`


def linear_stages(num_stages: int, width: int, rows: int, flops: float) -> dict[str, StageSpec]:
    """A chain of stages x -> h1 -> ... -> loss with one square weight each."""
    stages = {}
    for i in range(num_stages):
        last = i == num_stages - 1
        source = TensorSpec("x" if i == 0 else f"h{i}", (rows, width), "float32", requires_grad=i > 0)
        name, shape = ("loss", ()) if last else (f"h{i + 1}", (rows, width))
        target = TensorSpec(name, shape, "float32", True)
        stages[f"stage{i}"] = StageSpec(
            name=f"stage{i}",
            inputs=(source,),
            outputs=(target,),
            params=(ParamSpec(f"layer{i}.weight", (width, width), "float32"),),
            loss="loss" if last else None,
            kept_bytes=2 * source.bytes,
            forward_workspace_bytes=source.bytes,
            backward_workspace_bytes=2 * source.bytes,
            forward_flops=flops,
            backward_flops=2 * flops,
            forward_traffic_bytes=3 * source.bytes,
            backward_traffic_bytes=6 * source.bytes,
            launches=1,
        )
    return stages


def pipeline(
    num_devices: int = 2,
    num_stages: int = 2,
    micro_batches: int = 2,
    *,
    width: int = 32,
    rows: int = 4,
    flops: float = 1e6,
    fetched: bool = True,
    kept: bool = False,
    prefetch: bool = True,
    clip: bool = False,
    ssd: str = "",
    moved: str = "",
    speculative: bool = False,
    split: bool = False,
) -> list[Program]:
    """A fill-and-drain pipeline; stage i runs on device i modulo `num_devices`.

    `fetched`: weights come from DRAM for each pass over the micro-batches and gradients go back there, else all is
    resident. `kept`: backward uses what forward kept, else it rematerialises. `prefetch`: the next stage is fetched
    before the running one. `clip`: gradients are clipped by their global norm. `speculative`: stages are stepped before
    the norm is known, and redone after it. `ssd`: "states" or "all" of each stage lies on SSD. `moved`: "dram" or
    "ssd", the memory in which a stage's inputs lie between forward and backward. `split`: gradients of a stage's
    parameters are made after those of its inputs, for all micro-batches.
    """
    stages = linear_stages(num_stages, width, rows, flops)
    groups = {"world": tuple((device, "", "") for device in range(num_devices))} if clip else {}
    batch = {"x": TensorSpec("x", (rows, width), "float32")}
    interface = Interface(stages, batch, num_devices=num_devices, micro_batches=micro_batches, groups=groups)
    kind = {"fetched": fetched, "kept": kept, "prefetch": prefetch, "clip": clip}
    return [
        _Builder(interface, device, **kind, ssd=ssd, moved=moved, speculative=speculative, split=split).build()
        for device in range(num_devices)
    ]


class _Builder:
    def __init__(
        self, interface: Interface, device: int, fetched: bool, kept: bool, prefetch: bool, clip: bool, ssd: str,
        moved: str, speculative: bool, split: bool,
    ):  # fmt: skip
        self.interface = interface
        self.program = Program(device, interface)
        self.fetched, self.kept, self.prefetch, self.clip = fetched, kept, prefetch, clip
        self.ssd, self.moved, self.speculative, self.split = ssd, moved, speculative, split
        self.own = [i for i in range(len(interface.stages)) if i % interface.num_devices == device]
        self.weights: dict[int, fx.Node] = {}
        self.outputs: dict[tuple[int, int], fx.Node] = {}
        self.inputs: dict[tuple[int, int], fx.Node] = {}
        self.keeps: dict[tuple[int, int], fx.Node] = {}
        self.douts: dict[tuple[int, int], fx.Node] = {}
        self.grads: dict[int, fx.Node] = {}
        self.rests: dict[tuple[int, int], fx.Node] = {}
        self.in_dram: dict[int, fx.Node] = {}

    def device_of(self, stage: int) -> int:
        return stage % self.interface.num_devices

    def emit(self, op: ops.Op, *args, names=(), **fields) -> list[fx.Node]:
        return self.program.emit(op, *args, names=names, **fields)

    def bring(self, stage: int) -> None:
        op = ops.fetch if self.fetched else ops.resident
        what: str | fx.Node = f"stage{stage}.weights"
        if self.ssd == "all":
            (what,) = self.emit(ops.read, what, names=[f"w{stage}_dram"])
        self.weights[stage] = self.emit(op, what, names=[f"w{stage}"])[0]

    def build(self) -> Program:
        self.sweep(self.own, self.forward)
        if self.fetched and not self.kept:
            last = self.own[-1:]
            self.weights = {stage: self.weights[stage] for stage in last}
        self.sweep(self.own[::-1], self.backward)
        self.update()
        losses = [
            self.outputs[i, m] for i in self.own for m in range(self.interface.micro_batches) if i == self.last_stage
        ]
        if losses:
            self.program.returns({"loss": losses})
        place_frees(self.program)
        return self.program

    @property
    def last_stage(self) -> int:
        return len(self.interface.stages) - 1

    def sweep(self, stages, run) -> None:
        for place, stage in enumerate(stages):
            for wanted in stages[place : place + 2] if self.prefetch else [stage]:
                if wanted not in self.weights:
                    self.bring(wanted)
            for m in range(self.interface.micro_batches):
                run(stage, m)
            for m in [m for i, m in self.rests if i == stage and run == self.backward]:
                self.backward_weight(stage, m)
            if run == self.backward and self.fetched:
                self.in_dram[stage] = self.emit(ops.offload, self.grads[stage], names=[f"g{stage}_dram"])[0]

    def forward(self, i: int, m: int) -> None:
        if i == 0:
            x = self.emit(ops.load, self.program.batch, "x", micro_batch=m, names=[f"x_m{m}"])[0]
        elif self.device_of(i - 1) == self.program.device:
            x = self.outputs[i - 1, m]
        else:
            source, tag = self.device_of(i - 1), f"f{i - 1}.m{m}"
            x = self.emit(ops.recv, f"stage{i - 1}.h{i}", src=source, tag=tag, names=[f"h{i}_m{m}"])[0]
        names = [f"y{i}_m{m}", f"k{i}_m{m}"]
        made = self.emit(ops.forward, f"stage{i}", self.weights[i], x, micro_batch=m, keep=self.kept, names=names)
        if self.moved and i > 0:
            (x,) = self.emit(ops.offload, x, names=[f"x{i}_m{m}_dram"])
            if self.moved == "ssd":
                (x,) = self.emit(ops.write, x, names=[f"x{i}_m{m}_ssd"])
        self.inputs[i, m], self.outputs[i, m] = x, made[0]
        if self.kept:
            self.keeps[i, m] = made[1]
        if i < self.last_stage and self.device_of(i + 1) != self.program.device:
            self.emit(ops.send, made[0], dst=self.device_of(i + 1), tag=f"f{i}.m{m}")

    def backward(self, i: int, m: int) -> None:
        dout: fx.Node | float
        if i == self.last_stage:
            dout = 1.0 / self.interface.micro_batches
        elif self.device_of(i + 1) == self.program.device:
            dout = self.douts[i + 1, m]
        else:
            source = self.device_of(i + 1)
            dout = self.emit(ops.recv, f"stage{i}.h{i + 1}", src=source, tag=f"b{i + 1}.m{m}", names=[f"dy{i}_m{m}"])[0]
        if self.moved and i > 0:
            x = self.inputs[i, m]
            if self.moved == "ssd":
                (x,) = self.emit(ops.read, x, names=[f"x{i}_m{m}_again"])
            (self.inputs[i, m],) = self.emit(ops.fetch, x, names=[f"x{i}_m{m}_back"])
        operands = (f"stage{i}", self.weights[i], self.keeps.get((i, m)), [self.inputs[i, m]], [dout])
        if self.split and i > 0:
            made = self.emit(ops.backward_input, *operands, micro_batch=m, names=[f"dx{i}_m{m}", f"r{i}_m{m}"])
            self.rests[i, m] = made[-1]
        else:
            names = ([f"dx{i}_m{m}"] if i > 0 else []) + [f"g{i}_m{m}"]
            made = self.emit(ops.backward, *operands, self.grads.get(i), micro_batch=m, names=names)
            self.grads[i] = made[-1]
        if i > 0:
            self.douts[i, m] = made[0]
            if self.device_of(i - 1) != self.program.device:
                self.emit(ops.send, made[0], dst=self.device_of(i - 1), tag=f"b{i}.m{m}")

    def backward_weight(self, i: int, m: int) -> None:
        operands = (f"stage{i}", self.weights[i], self.rests[i, m], self.grads.get(i))
        (self.grads[i],) = self.emit(ops.backward_weight, *operands, micro_batch=m, names=[f"g{i}_m{m}"])

    def update(self) -> None:
        final = self.in_dram if self.fetched else self.grads
        total = None
        if self.speculative:
            for i in self.own[::-1]:
                self.step(i, final[i], speculative=True)
        if self.clip:
            own = self.emit(ops.norm, *final.values(), names=["norm"])[0]
            total = self.emit(ops.all_reduce, own, group="world", names=["total"])[0]
        for i in self.own[::-1]:
            grads = final[i]
            if self.speculative:
                self.emit(ops.redo, f"stage{i}", grads, total, max_norm=MAX_NORM)
                continue
            if total is not None:
                grads = self.emit(ops.clip, grads, total, max_norm=MAX_NORM, names=[f"c{i}"])[0]
            self.step(i, grads)

    def step(self, i: int, grads: fx.Node, **fields) -> None:
        if not self.ssd:
            self.emit(ops.step, f"stage{i}", grads, **fields)
            return
        (states,) = self.emit(ops.read, f"stage{i}.{self.ssd}", names=[f"s{i}"])
        (states,) = self.emit(ops.step, f"stage{i}", grads, None, states, names=[f"s{i}_new"], **fields)
        self.emit(ops.write, states, to=f"stage{i}.{self.ssd}")


def in_turns(programs: list[Program]) -> list[Program]:
    """The programs, with turns for their fetches of weights: stage by stage, and in backward the other way."""
    for program in programs:
        seen: set[str] = set()
        for node in program.ops():
            if node.target is ops.fetch and node.meta["type"].kind == "weights":
                stage = str(node.meta["type"].stage)
                number = int(stage.removeprefix("stage"))
                turn = 2 * len(program.interface.stages) - number if stage in seen else number
                node.kwargs = {**node.kwargs, "link_turn": turn}
                seen.add(stage)
    return programs
