"""Under torchrun one rank searches for a plan, and all others carry it out.

A search ends by the time that it took, so that every rank might end with another plan; and the ranks of a host would
search on the same cores.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ..runtime import errors
from ..runtime.errors import PenstockError, PlanError
from ..runtime.job_setup import TIMEOUT_S
from ..runtime.ranks import Ranks
from ..runtime.store_thread import connect_store
from ..runtime.torchrun import TorchrunDriver
from ..runtime.worker import describe_error
from .plan import Plan

Compile = TypeVar("Compile", bound=Callable[..., Any])


def planned_once(function: Compile) -> Compile:
    """`compile` that searches on the first rank only, where it is called on all ranks of a torchrun without a plan.

    An error of the first rank is raised on all.
    """

    @functools.wraps(function)
    def together(*args: Any, **given: Any) -> Any:
        searches = given.get("plan") is None and given.get("strategy", "auto") == "auto"
        if not (searches and TorchrunDriver.is_present()):
            return function(*args, **given)
        ranks = _meet(given.get("timeout_s", TIMEOUT_S))
        try:
            if ranks.rank == 0:
                return _tell(ranks, lambda: function(*args, **given))
            plan = _be_told(ranks)
        finally:
            ranks.leave("its plan is made")
        return function(*args, **{**given, "plan": plan})

    return cast(Compile, together)


def _meet(timeout_s: float) -> Ranks:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return Ranks(connect_store(timeout_s), rank, size, timeout_s, node=os.environ.get("GROUP_RANK", ""))


def _tell(ranks: Ranks, make: Callable[[], Any]) -> Any:
    try:
        job = make()
    except PenstockError as error:
        ranks.exchange({"error": describe_error(error, None)})
        raise
    ranks.exchange({"plan": job.plan.model_dump_json()})
    return job


def _be_told(ranks: Ranks) -> Plan:
    said = ranks.exchange(None)[0]
    if "error" not in said:
        return Plan.model_validate_json(said["plan"])
    error = getattr(errors, said["error"]["type"], PlanError)(said["error"]["message"])
    vars(error).update(said["error"]["details"])
    raise error
