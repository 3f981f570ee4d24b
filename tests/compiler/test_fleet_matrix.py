"""Every synchronous combination of pipeline, shards and replicas, tiers and precisions trains to eager's weights.

All of them, with a list of those that are refused and by whom:
pytest -m slow -s tests/compiler/test_fleet_matrix.py
"""

from __future__ import annotations

from collections import Counter

import pytest

from penstock.runtime.model_names import ties_of
from penstock.tests.compiler.fleet_matrix import (
    MODELS,
    STEPS,
    TOLERANCE,
    Combination,
    Outcome,
    by_eager,
    combinations,
    compile_job,
    distance,
    make,
    outcome_of,
)

LEAST = 60  # combinations that must train, of each model

# A few of each kind: (model, depth, shards, schedule, tier, precision).
SOME = [
    Combination("gpt2", 2, 2, "schedule-zero-bubble", "ssd", "fp32"),
    *(
        pytest.param(Combination(*each), marks=pytest.mark.slow)
        for each in (
            ("t5", 2, 2, "schedule-1f1b", "device", "bf16"),
            ("gpt2", 2, 1, "schedule-1f1b", "ssd", "fp32"),
            ("gpt2", 1, 2, "schedule-pipeline", "dram", "bf16"),
            ("gpt2", 4, 1, "schedule-1f1b", "device", "bf16"),
            ("t5", 1, 2, "schedule-1f1b", "dram", "fp32"),
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_some_train_as_eager(case: Combination) -> None:
    found = outcome_of(case)
    assert not found.refused
    assert found.is_eagers(case.precision), found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", MODELS)
def test_all_that_are_admitted_train_as_eager(model: str) -> None:
    found = {case: outcome_of(case) for case in combinations() if case.model == model}
    trained = {case: outcome for case, outcome in found.items() if not outcome.refused}
    print(summary(found))
    assert [case.name for case, outcome in trained.items() if not outcome.is_eagers(case.precision)] == []
    assert len(trained) >= LEAST


def summary(found: dict[Combination, Outcome]) -> str:
    """The number that trained, the furthest from eager of each precision, and who refused what."""
    trained = {case: outcome for case, outcome in found.items() if not outcome.refused}
    lines = ["", f"{len(trained)} of {len(found)} combinations trained {STEPS} steps"]
    for precision, limit in TOLERANCE.items():
        rows = [outcome for case, outcome in trained.items() if case.precision == precision]
        loss, weights = max(row.loss for row in rows), max(row.weights for row in rows)
        lines.append(f"{precision}: furthest {loss:.1e} (loss), {weights:.1e} (weights); allowed {limit:.0e}")
    refusals = Counter(outcome.refused.partition(":")[0] for outcome in found.values() if outcome.refused)
    lines += [f"{count} refused by {who}" for who, count in refusals.items()]
    lines += [f"  {case.name}: {outcome.refused}" for case, outcome in found.items() if outcome.refused]
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize(
    "case",
    [
        Combination("gpt2", 2, 2, "schedule-1f1b", "dram", "fp32"),
        Combination("t5", 2, 1, "schedule-pipeline", "dram", "fp32"),
        Combination("gpt2", 1, 2, "schedule-pipeline", "dram", "bf16"),
    ],
    ids=lambda case: case.name,
)
def test_processes_train_as_eager(case: Combination) -> None:
    """On four processes joined by gloo."""
    model, batch = make(case.model)
    want_losses, want, start = by_eager(case.model, case.precision)
    with compile_job(case) as job:
        losses = [float(job.step(batch)) for _ in range(STEPS)]
        assert losses == pytest.approx(want_losses, rel=TOLERANCE[case.precision])
        ties = ties_of(model)
        found = {ties.get(name, name): weight for name, weight in job.state_dict().items()}
        assert distance(want, found) <= TOLERANCE[case.precision] * distance(want, start)
