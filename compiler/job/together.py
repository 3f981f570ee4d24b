"""Compiling under torchrun: the first rank plans, the others carry its plan out.

A search under a time limit may end differently on machines of different speed, and on one host the ranks' searches
would take each other's cores. An error on any rank is raised on all of them.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec

from ...ir.errors import PenstockError, PlanError, error_from_data, error_to_data
from ...ir.machine.hardware import Hardware
from ...runtime.processes.agreement import differences
from ...runtime.processes.joint_hardware import joint_hardware
from ...runtime.processes.ranks import Ranks, Told
from ...runtime.processes.rows import Member
from ...runtime.processes.store_thread import connect_store
from ...runtime.processes.torchrun import TorchrunDriver
from ..own_copy import own_copy_bytes, reserve_copies
from ..plan import Plan
from .job import Job

PLANNING_S = 3600.0  # a search has its own limit; a rank that dies meanwhile is noticed all the same
SEARCHED = {"strategy": "auto", "micro_batches": "auto"}  # for ranks that are given the plan, which has the values
SAME = (
    "hardware",
    "strategy",
    "micro_batches",
    "precision",
    "gradient_dtype",
    "boundary_dtype",
    "max_grad_norm",
    "seed",
)
_RATE = "optimizer, as in optimizer=partial(torch.optim.AdamW, lr=1e-4)"
MEANT = {  # keywords of other libraries -> the argument of `compile` for it
    "lr": _RATE, "learning_rate": _RATE, "weight_decay": _RATE, "batch": "example_inputs", "inputs": "example_inputs",
    "batch_size": "example_inputs, whose rows are a step's", "device": "hardware", "devices": "hardware",
    "dtype": "precision", "mixed_precision": "precision", "gradient_accumulation_steps": "micro_batches",
}  # fmt: skip
P = ParamSpec("P")


def check_call(make: Callable[..., Any], args: Sequence[Any], names: Iterable[str]) -> None:
    """Raise `PlanError` for keywords that a function has not, and for arguments that it takes by keyword only."""
    parameters = inspect.signature(make).parameters.values()
    plain = [each.name for each in parameters if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    call, known = make.__name__, [each.name for each in parameters]
    if len(args) > len(plain):
        raise PlanError(
            f"{call}({', '.join(plain)}) got {len(args)} arguments without a name; the others are keywords: "
            f"{call}({', '.join(plain)}, optimizer=...)"
        )
    for name in names:
        if name not in known:
            near = MEANT.get(name) or difflib.get_close_matches(name, known, 1, 0.0)[0]
            raise PlanError(
                f"{call}({name}=...): there is no such argument; the nearest is {near}. There are {', '.join(known)}"
            )


def planned_once(make: Callable[P, Job]) -> Callable[P, Job]:
    """Make `penstock.compile` plan once for all ranks of torchrun, which must all call it."""

    @functools.wraps(make)
    def plan_together(*args: P.args, **kwargs: P.kwargs) -> Job:
        check_call(make, args, kwargs)
        if not TorchrunDriver.is_present():
            return make(*args, **kwargs)
        bound = inspect.signature(make).bind(*args, **kwargs)
        bound.apply_defaults()
        return _on_all_ranks(make, bound.arguments)

    return plan_together


def _meet(timeout_s: float) -> Ranks:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    node = os.environ.get("GROUP_RANK", "")
    return Ranks(connect_store(PLANNING_S), rank, size, timeout_s, node=node, patience_s=PLANNING_S)


def _on_all_ranks(make: Callable[..., Job], given: dict[str, Any]) -> Job:
    ranks = _meet(float(given["timeout_s"]))
    rank = ranks.rank
    try:
        differing = differences(ranks.exchange({name: _text_of(given[name]) for name in SAME}), ranks.members)
        if differing:
            raise PlanError(f"{differing}. Nothing was planned")
        if isinstance(given["hardware"], str) and given["hardware"] == "auto":
            given["hardware"] = joint_hardware(ranks)
        machine = Hardware.from_any(given["hardware"])
        given["hardware"] = reserve_copies(machine, ranks.exchange(own_copy_bytes(given["model"])))
        if given["plan"] is not None:
            return make(**given)
        job, failure = _attempt(make, given) if rank == 0 else (None, None)
        said = ranks.exchange({"error": failure, "plan": None if job is None else job.plan.model_dump_json()})[0]
        if rank != 0 and said["plan"] is not None:
            plan = Plan.model_validate_json(said["plan"])
            job, failure = _attempt(make, {**given, **SEARCHED, "plan": plan})
        failures = ranks.exchange(failure)
        _raise_first(failures, ranks.members)
        assert job is not None
        return job
    except Told as told:
        raise error_from_data(told.failure.error, str(ranks.members[told.failure.rank])) from None
    finally:
        ranks.leave()


def _text_of(value: Any) -> str:
    if isinstance(value, Hardware):
        return f"{value.name} {hashlib.sha256(value.model_dump_json().encode()).hexdigest()[:10]}"
    return str(value)


def _attempt(make: Callable[..., Job], given: dict[str, Any]) -> tuple[Job | None, dict[str, Any] | None]:
    try:
        return make(**given), None
    except PenstockError as error:
        return None, error_to_data(error)


def _raise_first(failures: list[dict[str, Any] | None], members: list[Member]) -> None:
    """Raise the first failure, if there is one; a failure of another rank than the first names that rank."""
    for failure, member in zip(failures, members, strict=True):
        if failure is not None:
            prefix = f"{member} cannot carry out the first rank's plan: " if member.rank else ""
            raise error_from_data(failure, str(member), prefix=prefix)
