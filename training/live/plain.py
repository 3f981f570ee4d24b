"""A snapshot as plain data for a page. Numbers that are not finite are null."""

from __future__ import annotations

from typing import Any

from ..plain import finite
from .state import Snapshot

NAMED = ("plan", "hardware", "strategy")  # what is shown of a run's configuration


def facts(now: Snapshot) -> dict[str, Any]:
    run, last, slowest = now.run, now.last, now.slowest
    found = {
        "phase": now.phase,
        "name": "" if run is None else run.name,
        "about": {} if run is None else {key: run.config[key] for key in NAMED if key in run.config},
        "step": now.step,
        "total_steps": now.total_steps,
        "remaining_s": now.remaining_s,
        "loss": now.loss,
        "tokens_per_s": now.tokens_per_s,
        "step_s": now.step_s,
        "predicted_s": now.predicted_s,
        "learning_rate": last.learning_rates[0] if last is not None and last.learning_rates else None,
        "gradient_norm": None if last is None else last.gradient_norm,
        "model_flops_utilisation": None if last is None else last.model_flops_utilisation,
        "busy_share": now.busy_share,
        "slowest": None if slowest is None else dict(zip(("device", "stream", "share"), slowest)),
        "peak_bytes": now.peak_bytes,
        "limit_bytes": now.limit_bytes,
        "curve": now.curve,
        "evaluations": now.evaluations,
        "offer": None if now.offer is None else {"step": now.offer.step, "text": now.offer.text, "how": now.offer.how},
    }
    plain = finite(found)
    assert isinstance(plain, dict)
    return plain
