"""Ways to divide a model and its batch, composed pairwise: each pair trains to eager's weights."""

from __future__ import annotations

import pytest

from penstock.tests.compiler.pairs import STEPS, TOLERANCE, Pair, compared, made, outcome_of, pairs

QUICK = (Pair("unequal shares", "pipeline"),)


@pytest.mark.parametrize(
    "pair", [p if p in QUICK else pytest.param(p, marks=pytest.mark.slow) for p in pairs()], ids=lambda pair: pair.name
)
def test_a_pair_trains_as_eager(pair: Pair) -> None:
    found = outcome_of(pair)
    assert not found.refused
    assert max(found.loss, found.weights) <= TOLERANCE, found


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize(
    "pair",
    [Pair("unequal shares", "unequal shares"), Pair("unequal shares", "pipeline"), Pair("unequal shares", "shards")],
    ids=lambda pair: pair.name,
)
def test_processes_train_as_eager(pair: Pair) -> None:
    """On four processes joined by gloo."""
    _, batch = made()
    with pair.compiled() as job:
        losses = [float(job.step(batch)) for _ in range(STEPS)]
        found = compared(losses, job.state_dict())
    assert max(found.loss, found.weights) <= TOLERANCE, found
