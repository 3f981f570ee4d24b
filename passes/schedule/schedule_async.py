"""`schedule-async`: every few micro-batches are a mini-batch with its own updates, for which no stage waits (FTPipe 4).

In: stages on devices. Out: `draft.programs`, complete: no optimizer, rematerialisation or fetch follows. A stage at
distance d from the end does d + 1 forwards, then backward and forward in turn, and is updated right after the last
backward of each mini-batch (`async_order`, which also says what stages do whose updates wait for others). All but the
last stage compute their forward again in backward, on the weights as they are then; the last one runs both together and
keeps what it saved. A step of the job takes M micro-batches through the pipeline: it fills at the beginning and drains
at the end, and a large M makes that cheap. `accumulate` of them make a mini-batch (FTPipe's table 4: Accum).

A forward of micro-batch k reads weights that lack the updates with the micro-batches still under way. `weights` says
what is done about it: `current` nothing (FTPipe: backward has what is newest); `stash` keeps the version of a
micro-batch's forward for its backward (PipeDream), one copy of the weights for each version under way; `predict`
forwards on what the optimizer is expected to have made of the weights by the time of the update (SpecTrain, XPipe).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ...ir import ops
from ...ir.errors import PassError
from ...ir.machine.hardware import Hardware
from ...ir.precision import Precision
from ...ir.program import Interface, Program, profile_memory
from ..base import Explanation
from ..decisions import FETCH, OPTIMIZER, REMATERIALISE, SCHEDULE, SHARDING, SSD, Decision, OnSsd, Sharding, StageTiers
from ..draft import Draft
from ..memory.insert_fetch import KINDS
from ..optimizer.timing import Updates, updates_of
from .async_emitter import AsyncEmitter
from .async_order import Alternating, Staleness, stages_to_recompute, staleness_of
from .async_tiers import TIERS, place
from .flow import Flow
from .schedule import Schedule

WEIGHTS = ("current", "stash", "predict")
# stage -> the number of updates that its forward lacks
STALENESS = Decision("staleness", dict[str, Annotated[int, Field(ge=0)]], {}, hashed=True)


@dataclass(frozen=True)
class ScheduleAsync(Schedule):
    """`weights`: "current", "stash" or "predict"; `accumulate`: the micro-batches of a mini-batch, of all lanes;
    `tier`: the home of stages: all on their device; weights and states in DRAM ("dram"); states on SSD; or all on SSD;
    auto: the first of these that fits.

    Raises `PassError` for what asynchronous training cannot do, such as stages before the last that must not be
    computed again."""

    name: ClassVar[str] = "schedule-async"
    rank: ClassVar[int] = 80
    gives: ClassVar[tuple[str, ...]] = ("programs", "remat", "tiers", "optimizer")
    word: ClassVar[str] = "async"
    decides: ClassVar[tuple[Decision, ...]] = (
        SCHEDULE,
        REMATERIALISE,
        FETCH,
        SHARDING,
        SSD,
        OPTIMIZER,
        STALENESS,
    )
    synchronous: ClassVar[bool] = False
    final: ClassVar[str] = (
        "an asynchronous schedule decides it itself, as updates come between its turns: its option tier is the home of "
        "stages, and all but the last compute their forward again. For other choices use a synchronous strategy, "
        'such as "ftpipe" or "mobius"'
    )
    weights: str = "current"
    accumulate: int = 1
    tier: str = "device"

    @classmethod
    def explain(cls, decisions: Any, programs: Sequence[Program]) -> Explanation:
        if not decisions.staleness:
            return Explanation()
        each = programs[0].interface.micro_batches_of_update
        own = "each micro-batch has updates of its own" if each == 1 else f"every {each} micro-batches have updates"
        begin = f"asynchronous, {own}; most updates between the weights of a forward and the update with its gradients"
        counts = ", ".join(f"{stage} {count}" for stage, count in decisions.staleness.items())
        return Explanation([f"{begin}: {counts}"])

    def plan(self, draft: Draft) -> dict[str, Any]:
        """`staleness`: per stage, and per group of copies of a parameter that stages share, the most updates that occur
        between the weights of a forward and the update with its gradients."""
        if self.weights not in WEIGHTS:
            raise PassError(f"{self.name}: weights={self.weights!r}; there are {', '.join(WEIGHTS)}")
        _check_options(draft)
        _check_mini_batches(self, draft)
        _check_tier(self, draft)
        flow = Flow(self.interface(draft), draft.devices)
        again = stages_to_recompute(flow)
        _check_rematerialisable(flow, again)
        _check_scaled(flow, draft)
        chosen = self.choose(flow, draft)
        staleness, most = chosen.staleness, flow.interface.mini_batches - 1
        late = min(staleness.updates(staleness.lateness), most)
        fetched = {} if chosen.sharding else chosen.early
        where = ops.DEVICE if not fetched else ops.SSD if chosen.on_ssd else ops.DRAM
        fetches = {spec.name: dict.fromkeys(KINDS, len(spec.params)) for spec in flow.specs}
        return {
            "schedule": self.word,
            "rematerialise": again,
            "fetch": {name: fetches[name] if is_early else {} for name, is_early in fetched.items()},
            "sharding": chosen.sharding,
            "ssd": OnSsd(stages=chosen.on_ssd, ahead=0) if chosen.on_ssd else OnSsd(),
            "optimizer": {spec.name: where for spec in flow.specs if spec.trained_params},
            "staleness": {
                **{s.name: min(staleness.lacking(s.name), most) for s in flow.specs if staleness.has_unshared(s)},
                **{group: late for group, rows in flow.interface.groups.items() if rows[0][1]},
            },
        }

    def gather(self, decided: Mapping[str, Any] | None) -> Any:
        """As in the base, but a plan without shards says nothing of them."""
        found = super().gather(None if decided is None else {**decided, "sharding": decided.get("sharding") or ""})
        return None if found is None else {**found, "sharding": found["sharding"] or None}

    def write(self, draft: Draft) -> None:
        chosen = self.choose(Flow(self.interface(draft), draft.devices), draft)
        draft.programs, draft.sharding = chosen.programs, chosen.sharding
        draft.ssd = OnSsd(stages=chosen.on_ssd, ahead=0) if chosen.on_ssd else OnSsd()

    def choose(self, flow: Flow, draft: Draft) -> _Chosen:
        """The programs of the tier that is asked for, or of the first that fits."""
        auto = [t for t in TIERS if t in ("device", "dram") or all(host.ssds for host in draft.lane_hardware.hosts)]
        stays = self.weights != "current" or draft.mesh.shards > 1
        tries = [self.tier] if self.tier != "auto" else auto[:1] if stays else auto
        for tier in tries[:-1]:
            found = self.on(tier, flow, draft)
            if fits(found.programs, draft.lane_hardware):
                return found
        return self.on(tries[-1], flow, draft)  # the check of the budgets says what is missing

    def on(self, tier: str, flow: Flow, draft: Draft) -> _Chosen:
        """The programs with stages in one tier; weights come early where devices have room for that."""
        is_shared = draft.mesh.shards > 1
        names = [spec.name for spec in flow.specs if spec.params] if tier != "device" or is_shared else []
        staleness, updates = staleness_of(flow, self.updates(draft).max_norm is not None, names), self.updates(draft)
        turns = Alternating(flow, draft, staleness).run()
        on_ssd: StageTiers = dict.fromkeys(names, tier) if tier in ("states", "all") else {}  # type: ignore[arg-type]
        early: dict[str, bool] = {}
        programs = []
        for device in flow.devices:
            budget = draft.lane_hardware.devices[device].budget_bytes
            own = [spec.name for spec in flow.on(device) if spec.name in names]
            for ahead in (True, False) if own else (False,):
                emitter = AsyncEmitter(flow, device, turns, self.weights, staleness, updates)
                program = emitter.write()
                if own or flow.interface.lanes:
                    place(program, emitter.complete, dict.fromkeys(own, ahead), on_ssd, is_shared)
                if not ahead or profile_memory(program).peak_bytes[ops.DEVICE] <= budget:
                    break
            early.update(dict.fromkeys(own, ahead))
            programs.append(program)
        order = [spec.name for spec in flow.specs]
        early = {name: early[name] for name in order if name in early}
        sharding = Sharding(tier=ops.DEVICE, ahead=int(all(early.values()))) if is_shared else None
        return _Chosen(early, on_ssd, sharding, staleness, programs)

    def interface(self, draft: Draft) -> Interface:
        groups = self.updates(draft).groups
        made = replace(super().interface(draft), groups=groups, asynchronous=True, accumulate=self.each(draft))
        if not Precision.of(draft.options.precision).scales_loss:
            return made
        staleness = self.staleness(Flow(made, draft.devices), draft)
        return replace(made, scale_lag=staleness.updates(staleness.lateness))

    def each(self, draft: Draft) -> int:
        """The micro-batches of a mini-batch in each lane."""
        return max(1, self.accumulate // max(1, len(draft.mesh.lanes)))

    def updates(self, draft: Draft) -> Updates:
        return updates_of(draft, {s.spec.name: ops.DEVICE for s in draft.stages})

    def staleness(self, flow: Flow, draft: Draft) -> Staleness:
        return staleness_of(flow, self.updates(draft).max_norm is not None)


@dataclass(frozen=True)
class _Chosen:
    """`early`: the stages that are fetched, or gathered, and whether before their turns; `on_ssd`: their tiers on
    SSD; `sharding`: None where lanes share nothing."""

    early: dict[str, bool]
    on_ssd: StageTiers
    sharding: Sharding | None
    staleness: Staleness
    programs: list[Program]


def fits(programs: Sequence[Program], hardware: Hardware) -> bool:
    """Whether programs keep to the budgets of all memories."""
    hosts: dict[str, list[int]] = {memory: [0] * len(hardware.hosts) for memory in (ops.DRAM, ops.SSD)}
    for program in programs:
        device, peaks = hardware.devices[program.device], profile_memory(program).peak_bytes
        if peaks[ops.DEVICE] > device.budget_bytes:
            return False
        for memory, taken in hosts.items():
            taken[device.host] += peaks[memory]
    budgets = {ops.DRAM: hardware.dram_budget_bytes, ops.SSD: hardware.ssd_budget_bytes}
    return all(
        num_bytes <= budgets[memory](host)
        for memory, taken in hosts.items()
        for host, num_bytes in enumerate(taken)
        if num_bytes
    )


def _check_tier(p: ScheduleAsync, draft: Draft) -> None:
    if p.tier not in ("auto", *TIERS):
        raise PassError(f"{p.name}: tier={p.tier!r}; there are auto, {', '.join(TIERS)}")
    if p.tier in ("states", "all") and not all(host.ssds for host in draft.lane_hardware.hosts):
        raise PassError(f"{p.name}: tier={p.tier}, but {draft.machine.name} has a host without SSDs; use tier=dram")
    if p.tier not in ("auto", "device") and draft.mesh.shards > 1:
        raise PassError(f"{p.name}: tier={p.tier} with shards, which stay on their devices here; use tier=device")
    if p.weights != "current" and draft.mesh.shards > 1:
        raise PassError(f"{p.name}: weights={p.weights} with shards, which are gathered anew; use weights=current")
    if p.weights != "current" and p.tier not in ("auto", "device"):
        raise PassError(
            f"{p.name}: weights={p.weights} with tier={p.tier}: versions of weights are made of what stays on the "
            "device; use weights=current, or tier=device"
        )


def _check_mini_batches(p: ScheduleAsync, draft: Draft) -> None:
    """Raise `PassError` where the batch is no whole number of mini-batches, or these cannot be shared out to lanes."""
    lanes = max(1, len(draft.mesh.lanes))
    count = draft.options.micro_batches * lanes
    if p.accumulate < 1 or p.accumulate % lanes or count % p.accumulate:
        near = [k for k in range(lanes, count + 1, lanes) if count % k == 0]
        best = min(near, key=lambda k: (abs(k - p.accumulate), k))
        shared = f", of which each of {lanes} copies of the pipeline takes an equal part" if lanes > 1 else ""
        raise PassError(
            f"{p.name}: accumulate={p.accumulate}, but {count} micro-batches must be a whole number of mini-batches of "
            f"this size{shared}; the nearest that works is accumulate={best}"
        )


def _check_options(draft: Draft) -> None:
    if draft.graph.hooks:
        raise PassError(
            f"{min(draft.graph.hooks)} has a gradient hook, which runs on the gradient of a whole batch, but an "
            "asynchronous stage never has that: remove the hook (handle.remove()), or use a synchronous strategy"
        )
    if draft.graph.changes:
        raise PassError(
            f"forward changes {min(draft.graph.changes)} in place ({next(iter(draft.graph.changes.values())).source}), "
            "which reaches other versions of the weights in asynchronous training than in eager: leave it out, or use "
            "a synchronous strategy"
        )
    if draft.mesh.team > 1 or draft.mesh.micro_batches:
        what = f"teams of {draft.mesh.team}" if draft.mesh.team > 1 else "unequal shares of the batch"
        raise PassError(
            f"mesh has {what}: of an asynchronous pipeline all lanes run mini-batches of one size, each on its own. "
            "Leave that out, or use a synchronous schedule, such as schedule-1f1b"
        )


def _check_scaled(flow: Flow, draft: Draft) -> None:
    """Raise `PassError` where a loss scale would not be known where it is needed: a device learns of it from its own
    updates, and the loss is scaled by that device."""
    if not Precision.of(draft.options.precision).scales_loss:
        return
    loss = next(spec for spec in flow.specs if spec.loss)
    idle = next((d for d in flow.devices if not any(spec.trained_params for spec in flow.on(d))), None)
    if not loss.trained_params or idle is not None:
        what = f"{loss.name}, which makes the loss," if not loss.trained_params else f"what device {idle} runs"
        raise PassError(
            f'precision="fp16-mixed": {what} has no trained parameters, so that its device never learns by which loss '
            'scale mini-batches count. Use precision="bf16-mixed" or "fp32", or fewer stages'
        )


def _check_rematerialisable(flow: Flow, again: Sequence[str]) -> None:
    for name in again:
        if not flow.interface.stages[name].rematerialisable:
            raise PassError(
                f"{name} writes a buffer that its forward reads, so that it cannot be computed again in backward, as "
                "all asynchronous stages but the last are. Use fewer stages, or a synchronous strategy, such as "
                '"1f1b"'
            )
