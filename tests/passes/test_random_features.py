"""Random models that do more than compute, under random plans: equal to the user's own module, or refused.

Eager is the module itself with its own hooks: its loss is the mean over the micro-batches, and one backward runs the
hooks on the gradient of all. Nothing is compared with what was captured.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from penstock.compiler.capture.trace import trace
from penstock.compiler.changed_params import require_lasting
from penstock.ir.errors import PenstockError
from penstock.ir.verify import verify
from penstock.passes.draft import Draft
from penstock.tests.passes.running import SGD, join_batches, reference
from penstock.tests.passes.test_random_plans import coarsen_graph, random_draft
from penstock.tests.random_features import Featured, featured_model
from penstock.tests.random_models import Batch

MODELS, MANY_MODELS, STEPS = 4, 200, 3
# fp64; sums in another order, through three steps of a few layers. The norm to which max_norm scales a row twice, where
# its stage computes forward again, is off by its own epsilon of 1e-7.
TOLERANCE, RENORMED = 1e-11, 1e-6
EQUAL, REFUSED = "equal", "refused"


@pytest.mark.slow
def test_some_random_features_equal_eager_or_are_refused() -> None:
    found = Counter(outcome(seed) for seed in range(MODELS))
    assert found[EQUAL] > 0


@pytest.mark.slow
def test_many_random_features_equal_eager_or_are_refused() -> None:
    found = Counter(outcome(seed) for seed in range(MANY_MODELS))
    print(dict(found))
    assert found.total() == MANY_MODELS and found[EQUAL] > MANY_MODELS // 2 and found[REFUSED] > 0


def outcome(seed: int) -> str:
    """Compare one model with eager under one random plan. Raises where they differ."""
    model, batches, features = featured_model(seed)
    draw, made = random.Random(f"plan {seed}"), dict[str, object]()
    try:
        graph = trace(model, batches[0])
        draft = random_draft(draw, graph, coarsen_graph(graph), made)
        require_lasting(graph, draft.programs)
    except PenstockError as error:
        assert must_be_refused(model, features, str(error)), f"model {seed}, {features}, {made}"
        return REFUSED
    try:
        verify(draft.programs, draft.lane_hardware)
        compare(draft, model, seed, batches[: draft.options.micro_batches])
    except Exception as error:
        error.add_note(f"model {seed}, {features}, {made}")
        raise
    return EQUAL


def must_be_refused(model: Featured, features: Sequence[str], message: str) -> bool:
    """Whether the model does what no program, or not this plan, can do."""
    never = model.decays or model.counts or any(feature.endswith(("by norm", "logs")) for feature in features)
    return never or "in place, which this plan would lose" in message or "embed.weight in place" in message


def compare(draft: Draft, model: Featured, seed: int, batches: Sequence[Batch]) -> None:
    eager = copy.deepcopy(model)
    again, _, features = featured_model(seed)
    _give_hooks(eager, again)
    machine, optimizer = reference(draft), SGD([p for p in eager.parameters() if p.requires_grad])
    tolerance = RENORMED if "max_norm" in features else TOLERANCE
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses = torch.stack([eager(**batch)["loss"] for batch in batches])
        losses.mean().backward()
        optimizer.step()
        found = machine.step(join_batches(batches))["results"]
        torch.testing.assert_close(torch.stack(found["loss"]), losses.detach(), rtol=0, atol=tolerance)
        grads = {name: p.grad for name, p in eager.named_parameters() if p.grad is not None}
        ties = draft.graph.ties()
        mine = {ties.get(name, name): g for name, g in machine.grads.items()}
        torch.testing.assert_close(mine, grads, rtol=0, atol=tolerance)
    weights = {draft.graph.ties().get(name, name): w for name, w in machine.weights().items()}
    wanted = {name: p.detach() for name, p in eager.named_parameters() if name in weights}
    torch.testing.assert_close(weights, wanted, rtol=0, atol=tolerance)
    buffers = dict(eager.named_buffers(remove_duplicate=False))
    own = machine.buffers()
    torch.testing.assert_close(own, {name: buffers[name] for name in own}, rtol=0, atol=tolerance)


def _give_hooks(copied: Featured, original: Featured) -> None:
    """A copy of a model has no hooks."""
    for mine, theirs in zip(copied.parameters(), original.parameters(), strict=True):
        for hook in (theirs._backward_hooks or {}).values():
            mine.register_hook(hook)
        for hook in (theirs._post_accumulate_grad_hooks or {}).values():
            mine.register_post_accumulate_grad_hook(hook)
