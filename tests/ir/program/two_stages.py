"""Two stages by hand, the programs that train them on two devices, and eager PyTorch doing the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from penstock.ir import ops
from penstock.ir.program import (
    HookCall,
    Interface,
    ParamSpec,
    Program,
    StageSpec,
    TensorSpec,
    infer_all,
    place_frees,
)
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec
from penstock.runtime.stage.draws import micro_batch_seed
from penstock.runtime.stage.runner import StageRunner

ROWS, WIDTH, WORDS, MICRO_BATCHES = 4, 8, 10, 3
TIE = "tie.embed.weight"


class First(nn.Module):
    """Embedding, BatchNorm, a frozen layer, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.register_buffer("shift", torch.arange(WIDTH) / WIDTH, persistent=False)

    def forward(self, ids: Tensor) -> tuple[Tensor]:
        h = self.frozen(self.norm(self.embed(ids)) + self.shift)
        return (F.dropout(torch.tanh(h), 0.3, self.training),)


class Second(nn.Module):
    """Dropout and a head whose weight may be the embedding's; the logits exist in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, h: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(F.dropout(F.relu(self.inner(h)), 0.2, self.training))
        full = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(full, labels), logits


def models(tied: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[First, Second]:
    torch.manual_seed(seed)
    first, second = First().to(dtype), Second().to(dtype)
    if tied:
        second.head.weight = first.embed.weight
    return first, second


def batch_of(step: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(step)
    return {n: torch.randint(WORDS, (ROWS * MICRO_BATCHES,), generator=made) for n in ("ids", "labels")}


def weights_of(*parts: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for part in parts for name, p in part.named_parameters()}


def buffers_of(*parts: nn.Module) -> dict[str, Tensor]:
    return {name: b.clone() for part in parts for name, b in part.named_buffers()}


def interface_of(
    first: First, second: Second, dtype: torch.dtype = torch.float32, tied: bool = False, master: bool = False
) -> Interface:
    """The interface of both stages, with measured `kept_bytes`."""
    name = str(dtype).removeprefix("torch.")
    h = TensorSpec("h", (ROWS, WIDTH), name, True)
    ids, labels = TensorSpec("ids", (ROWS,), "int64"), TensorSpec("labels", (ROWS,), "int64")
    loss = TensorSpec("loss", (), "float64" if name == "float64" else "float32", True)
    logits = TensorSpec("logits", (ROWS, WORDS), name)
    stages = {
        "stage0": StageSpec("stage0", (ids,), (h,), _params(first, name), _buffers(first, name)),
        "stage1": StageSpec("stage1", (h, labels), (loss,), _params(second, name), (), (logits,), "loss"),
    }
    stages["stage0"] = replace(stages["stage0"], changing_buffers=tuple(buffers_of(first)))
    if tied:
        head = next(p for p in stages["stage1"].params if p.name == "head.weight")
        rest = tuple(p for p in stages["stage1"].params if p.name != "head.weight")
        stages["stage1"] = replace(stages["stage1"], params=(*rest, replace(head, owner=False)))
    groups = {"world": ((0, "", ""), (1, "", ""))}
    if tied:
        groups[TIE] = ((0, "stage0", "embed.weight"), (1, "stage1", "head.weight"))
    interface = Interface(stages, {"ids": ids, "labels": labels}, 2, MICRO_BATCHES, groups, master=master)
    if name in ("float32", "float64"):
        inputs = {"stage0": [torch.zeros(ROWS, dtype=torch.int64)]}
        inputs["stage1"] = [torch.zeros(ROWS, WIDTH, dtype=dtype), torch.zeros(ROWS, dtype=torch.int64)]
        for stage, part in (("stage0", first), ("stage1", second)):
            stages[stage] = replace(stages[stage], kept_bytes=_kept_bytes(stages[stage], part, inputs[stage]))
    return interface


def _kept_bytes(spec: StageSpec, part: nn.Module, inputs: list[Tensor]) -> int:
    with torch.device("meta"):
        runner = StageRunner(spec, type(part)(), torch.device("cpu"), "fp32")
    runner.load_buffers(buffers_of(part))
    runner.bind(weights_of(part))
    kept = runner.forward(inputs, 0)[1]
    assert kept is not None and kept.num_bytes > 0
    return kept.num_bytes


def _params(part: nn.Module, dtype: str) -> tuple[ParamSpec, ...]:
    return tuple(ParamSpec(n, tuple(p.shape), dtype, p.requires_grad) for n, p in part.named_parameters())


def _buffers(part: nn.Module, dtype: str) -> tuple[ParamSpec, ...]:
    def kind(b: Tensor) -> str:
        return dtype if b.is_floating_point() else str(b.dtype).removeprefix("torch.")

    return tuple(ParamSpec(n, tuple(b.shape), kind(b), False) for n, b in part.named_buffers())


def training(
    interface: Interface,
    *,
    swap: bool = False,
    remat: bool = False,
    max_norm: float | None = None,
    scaled: bool = False,
) -> list[Program]:
    """Fill and drain over two devices. `swap`: weights are fetched for each pass, gradients offloaded."""
    first, second = Program(0, interface), Program(1, interface)
    ids, labels, kept0, kept1, heads = [], [], [], [], []
    weights = [_weights(p, i, swap, "forward") for i, p in enumerate((first, second))]
    for m in range(interface.micro_batches):
        ids += first.emit(ops.load, first.batch, "ids", micro_batch=m, names=[f"ids_m{m}"])
        out = first.emit(
            ops.forward, "stage0", weights[0], ids[m], micro_batch=m, keep=not remat, names=[f"h_m{m}", f"kept_m{m}"]
        )
        kept0.append(None if remat else out[1])
        first.emit(ops.send, out[0], dst=1, tag=f"f.m{m}")
        heads += second.emit(ops.recv, "stage0.h", src=0, tag=f"f.m{m}", names=[f"h_m{m}"])
        labels += second.emit(ops.load, second.batch, "labels", micro_batch=m, names=[f"labels_m{m}"])
    losses = []
    for m in range(interface.micro_batches):
        operands = ("stage1", weights[1], heads[m], labels[m])
        out = second.emit(ops.forward, *operands, micro_batch=m, keep=not remat, names=[f"loss_m{m}", f"kept_m{m}"])
        losses.append(out[0])
        kept1.append(None if remat else out[1])
    if swap:
        weights = [_weights(p, i, swap, "backward") for i, p in enumerate((first, second))]
    grads: list[fx.Node | None] = [None, None]
    for m in range(interface.micro_batches):
        inputs = [heads[m], labels[m]]
        dh, grads[1] = second.emit(
            ops.backward, "stage1", weights[1], kept1[m], inputs, [1 / interface.micro_batches], grads[1],
            micro_batch=m, names=[f"dh_m{m}", f"g1_m{m}"],
        )  # fmt: skip
        second.emit(ops.send, dh, dst=0, tag=f"b.m{m}")
        (dout,) = first.emit(ops.recv, "stage0.h", src=1, tag=f"b.m{m}", names=[f"dh_m{m}"])
        (grads[0],) = first.emit(
            ops.backward, "stage0", weights[0], kept0[m], [ids[m]], [dout], grads[0], micro_batch=m, names=[f"g0_m{m}"]
        )
    for program, stage, value in zip((first, second), ("stage0", "stage1"), grads):
        assert value is not None
        _update(program, stage, value, swap, max_norm, scaled)
    first.returns({})
    second.returns({"loss": losses})
    return [_finished(first), _finished(second)]


def with_hooks(interface: Interface, *calls: HookCall) -> Interface:
    """The same with a gradient hook on the first trained parameter of each stage."""
    stages = {}
    for name, spec in interface.stages.items():
        first = next(p for p in spec.params if p.requires_grad)
        params = [replace(p, hook=calls) if p is first else p for p in spec.params]
        stages[name] = replace(spec, params=tuple(params))
    return replace(interface, stages=stages)


def _weights(program: Program, i: int, swap: bool, when: str) -> fx.Node:
    op = ops.fetch if swap else ops.resident
    return program.emit(op, f"stage{i}.weights", names=[f"w{i}_{when}"])[0]


def _update(program: Program, stage: str, grads: fx.Node, swap: bool, max_norm: float | None, scaled: bool) -> None:
    if swap:
        (grads,) = program.emit(ops.offload, grads, names=["g_dram"])
    if TIE in program.interface.groups:
        (grads,) = program.emit(ops.all_reduce, grads, group=TIE, names=["g_tied"])
    if program.interface.stages[stage].has_hooks:
        (grads,) = program.emit(ops.hook, grads, names=["g_hooked"])
    norm = []
    if max_norm is not None:
        (own,) = program.emit(ops.norm, grads, names=["norm"])
        norm = program.emit(ops.all_reduce, own, group="world", names=["norm_world"])
        (grads,) = program.emit(ops.clip, grads, norm[0], max_norm=max_norm, names=["g_clipped"])
    program.emit(ops.step, stage, grads, *(norm if scaled else []))


def spread(interface: Interface) -> list[Program]:
    """Both devices run both stages, each on micro-batches of its own, and keep a shard of each in DRAM."""
    interface = replace(interface, groups={"shards": ((0, "", ""), (1, "", ""))})
    programs = []
    for device in range(2):
        program = Program(device, interface)
        mine = [m for m in range(interface.micro_batches) if m % 2 == device]
        whole = [_gather(program, stage) for stage in interface.stages]
        losses, grads = [], dict.fromkeys(interface.stages)
        for m in mine:
            (ids,) = program.emit(ops.load, program.batch, "ids", micro_batch=m)
            (labels,) = program.emit(ops.load, program.batch, "labels", micro_batch=m)
            h, kept0 = program.emit(ops.forward, "stage0", whole[0], ids, micro_batch=m)
            loss, kept1 = program.emit(ops.forward, "stage1", whole[1], h, labels, micro_batch=m)
            losses.append(loss)
            last = ([h, labels], [1.0 / interface.micro_batches], grads["stage1"])
            dh, grads["stage1"] = program.emit(ops.backward, "stage1", whole[1], kept1, *last, micro_batch=m)
            first = ([ids], [dh], grads["stage0"])
            (grads["stage0"],) = program.emit(ops.backward, "stage0", whole[0], kept0, *first, micro_batch=m)
        for stage, total in grads.items():
            (own,) = program.emit(ops.reduce_scatter, total, group="shards", names=[f"{stage}_own"])
            (own,) = program.emit(ops.offload, own, names=[f"{stage}_dram"])
            program.emit(ops.step, stage, own)
        program.returns({"loss": losses})
        place_frees(program)
        programs.append(program)
    return programs


def _gather(program: Program, stage: str) -> fx.Node:
    (shard,) = program.emit(ops.fetch, f"{stage}.weights", group="shards", names=[f"{stage}_shard"])
    return program.emit(ops.all_gather, shard, group="shards", names=[f"{stage}_whole"])[0]


def with_team_ops(interface: Interface, team: int = 2) -> Program:
    """The ops of a lane on one input, where `team` lanes of a device are a team: every op of `ir/ops/team.py`."""
    lanes = tuple((device,) for device in range(team))
    rows = interface.batch["ids"].shape[0]
    batch = {**interface.batch, "routes": TensorSpec("routes", (team * rows, 2), "int32")}  # two experts of each row
    lane = replace(interface, batch=batch, lanes=lanes, team=team, num_devices=1, groups={})
    program = Program(0, lane, function="evaluate")
    (routes,) = program.emit(ops.load, program.batch, "routes", micro_batch=0, names=["routes"])
    (given,) = program.emit(ops.load, program.batch, "ids", micro_batch=0, names=["given"])
    (number,) = program.emit(ops.member, group=ops.TEAM, names=["number"])
    (part,) = program.emit(ops.own_part, given, group=ops.TEAM, dim=0, names=["part"])
    made = [
        *program.emit(ops.gather_parts, part, group=ops.TEAM, dim=0, names=["whole"]),
        *program.emit(ops.all_to_all, given, group=ops.TEAM, split_dim=0, concat_dim=0, names=["traded"]),
        *program.emit(ops.scatter_sum, given, group=ops.TEAM, dim=0, names=["part_of_sum"]),
        *program.emit(ops.sum_parts, part, group=ops.TEAM, names=["total"]),
        *program.emit(ops.pass_on, part, group=ops.TEAM, names=["passed"]),
        *program.emit(ops.pass_on, part, group=ops.TEAM, back=True, names=["passed_back"]),
        *program.emit(ops.to_experts, given, routes, group=ops.TEAM, experts=2 * team, names=["routed"]),
    ]
    made += program.emit(ops.from_experts, made[-1], routes, group=ops.TEAM, experts=2 * team, names=["returned"])
    program.returns({node.name: [node] for node in (part, number, *made)})
    return _finished(program)


def evaluation(interface: Interface) -> list[Program]:
    first, second = Program(0, interface, function="evaluate"), Program(1, interface, function="evaluate")
    (w0,), (w1,) = first.emit(ops.resident, "stage0.weights"), second.emit(ops.resident, "stage1.weights")
    results: dict[str, list[fx.Node]] = {"loss": [], "logits": []}
    for m in range(interface.micro_batches):
        (ids,) = first.emit(ops.load, first.batch, "ids", micro_batch=m)
        (h,) = first.emit(ops.evaluate, "stage0", w0, ids, micro_batch=m)
        first.emit(ops.send, h, dst=1, tag=f"f.m{m}")
        (h,) = second.emit(ops.recv, "stage0.h", src=0, tag=f"f.m{m}")
        (labels,) = second.emit(ops.load, second.batch, "labels", micro_batch=m)
        loss, logits = second.emit(ops.evaluate, "stage1", w1, h, labels, micro_batch=m)
        results["loss"].append(loss)
        results["logits"].append(logits)
    second.returns(results)
    return [_finished(first), _finished(second)]


def _finished(program: Program) -> Program:
    place_frees(program)
    infer_all(program)
    return program


class Eager:
    """One process, one optimizer, the same micro-batches and seeds; `grads` are the last step's, after clipping."""

    def __init__(self, first: First, second: Second, optimizer: Any, scheduler: Callable[..., Any] | None = None):
        self.parts = (first, second)
        self.params = {name: p for part in self.parts for name, p in part.named_parameters()}
        trained = list(dict.fromkeys(p for p in self.params.values() if p.requires_grad))
        self.trained = trained
        self.optimizer = OptimizerSpec.from_callable(optimizer).build(trained)
        self.scheduler = scheduler(self.optimizer) if scheduler else None
        self.steps = 0
        self.grads: dict[str, Tensor] = {}

    def step(self, batch: dict[str, Tensor], seed: int = 0, max_norm: float | None = None) -> Tensor:
        losses = []
        for m in range(MICRO_BATCHES):
            ids, labels = (batch[n][m * ROWS : (m + 1) * ROWS] for n in ("ids", "labels"))
            torch.manual_seed(micro_batch_seed(seed, self.steps, m))
            (h,) = self.parts[0](ids)
            torch.manual_seed(micro_batch_seed(seed, self.steps, m))
            loss, _ = self.parts[1](h, labels)
            (loss / MICRO_BATCHES).backward()
            losses.append(loss.detach())
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self.trained, max_norm)
        self.grads = {name: p.grad.clone() for name, p in self.params.items() if p.grad is not None}
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler:
            self.scheduler.step()
        self.steps += 1
        return torch.stack(losses).mean()
