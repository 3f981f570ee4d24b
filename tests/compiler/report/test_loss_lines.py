"""`explain` describes each term of the loss in a sentence, for every kind of divisor."""

from __future__ import annotations

import re

import pytest
from torch import nn

from penstock.compiler.loss import capture
from penstock.compiler.report.loss import loss_lines
from penstock.graph.loss_terms import LossTerm
from penstock.tests.compiler.loss.rules import RULES, Loss, class_weights, masked_mean_at_least_one, plain, rows
from penstock.tests.compiler.loss.test_whole_batch import TakesCount

COUNTED = "a sum over the global batch, divided by {} in it, whatever micro_batches is"
DIVISORS = (
    r"the number of targets other than -?\d+|the number of targets \(num_items_in_batch\)|"
    r"the sum of the class weights of targets other than -?\d+|the total of the denominator"
)


@pytest.mark.parametrize(
    ("model", "divisor"),
    [
        (Loss(plain), "the number of targets other than -100"),
        (Loss(class_weights), "the sum of the class weights of targets other than -100"),
        (Loss(masked_mean_at_least_one), "the total of the denominator"),
        (TakesCount(), "the number of targets (num_items_in_batch)"),
    ],
    ids=["targets", "class weights", "quotient", "items"],
)
def test_a_counted_term_names_its_divisor(model: nn.Module, divisor: str) -> None:
    lines = loss_lines(capture(model, rows()).loss.terms)
    assert [line.partition(": ")[2] for line in lines] == [COUNTED.format(divisor)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_rule_divides_by_a_noun(rule: object) -> None:
    for line in loss_lines(capture(Loss(rule), rows()).loss.terms):
        assert "divided by" not in line or re.search(f"divided by ({DIVISORS}) (in it|of each)", line), line


def test_an_uncounted_term_and_a_mini_batch() -> None:
    term = LossTerm(kind="uncounted", source="loss.py:3: x", counts="the number of targets other than -100")
    assert loss_lines([term])[0].startswith(
        "loss.py:3: divided by the number of targets other than -100 of each micro-batch alone: "
    )
    counted = term.model_copy(update={"kind": "counted"})
    assert loss_lines([counted], mini_batch=2) == [
        "loss.py:3: a sum over the mini-batch, divided by the number of targets other than -100 in it, whatever "
        "micro_batches is; every 2 micro-batches are a mini-batch"
    ]
