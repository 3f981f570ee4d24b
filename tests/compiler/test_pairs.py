"""Ways to divide a model and its batch, composed pairwise: each pair trains as eager does, or is refused by name.

All of them on real processes, with a table: pytest -m slow -s tests/compiler/test_pairs.py -k processes
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from penstock.compiler.job.job import Job
from penstock.ir import ops
from penstock.ir.errors import PassError
from penstock.ir.program import bind, team_of, work_of
from penstock.runtime.simulate.collectives import rounds_of
from penstock.tests.compiler.pair_ranks import train_on_ranks
from penstock.tests.compiler.pairs import ROWS, TOLERANCE, TOO_FEW, WAYS, Difference, Pair, by_reference, pairs
from penstock.tests.zoo import SEQUENCE

LEAST, MOST_REFUSED = 120, 4  # pairs that must train, and those that may be refused
TRAINED = [pair for pair in pairs() if not pair.refused]


def name_of(pair: Pair) -> str:
    return pair.name


def does_exchange_all(pair: Pair) -> bool:
    """Whether a team divides all that theory says: members leave whole what is in parts already."""
    return pair.divides and "experts" not in pair and not ("layers" in pair and "width" in pair)


def test_few_pairs_are_refused() -> None:
    assert len(TRAINED) >= LEAST and sum(bool(pair.refused) for pair in pairs()) <= MOST_REFUSED
    assert {name for pair in TRAINED for name in (pair.first, pair.second)} == set(WAYS)


@pytest.mark.slow
@pytest.mark.parametrize("pair", TRAINED, ids=name_of)
def test_a_pair_trains_as_eager(pair: Pair) -> None:
    found = by_reference(pair)
    assert found.largest <= TOLERANCE, found


@pytest.mark.slow
@pytest.mark.parametrize("pair", [pair for pair in pairs() if pair.refused], ids=name_of)
def test_what_cannot_be_composed_is_refused(pair: Pair) -> None:
    with pytest.raises(PassError, match=pair.refused):
        pair.compiled()


@pytest.mark.slow
@pytest.mark.parametrize("pair", pairs(on_too_few=True), ids=name_of)
def test_a_pair_on_too_few_devices_is_refused(pair: Pair) -> None:
    with pytest.raises(PassError, match=TOO_FEW):
        pair.compiled()


@pytest.mark.slow
@pytest.mark.parametrize("pair", filter(does_exchange_all, TRAINED), ids=name_of)
def test_members_exchange_what_theory_says(pair: Pair) -> None:
    """Whatever the way is composed with. Over a step, of hidden states, queries, keys and values in fp32 (M bytes over
    all members of a team of N): Ulysses sends (N-1)/N of queries, keys, values and results (DeepSpeed-Ulysses 3.2); a
    ring all keys and values N-1 times (Liu 2023, 3.1); width adds up twice a layer, 2 (N-1) M each (Megatron-LM 3), in
    a step as much for the vocabulary, and the gradients of norms' weights that heads share. A token goes once to each
    other member that has some of its k experts, with k weights of the router, and one result comes back (GShard, 3.2,
    where each expert gets its own). As much goes back in backward, for which keys and values go round once more, unless
    a ring's stages lie on several devices of a pipeline, and tokens go to experts once more that run again."""
    way = next(name for name in ("Ulysses", "ring", "routing", "width") if name in pair)
    config: Any = pair.make_case()[0].config
    heads, team = config.num_attention_heads, pair.beside
    groups = getattr(config, "num_key_value_heads", heads)
    tokens_bytes = ROWS * SEQUENCE * config.hidden_size * 4
    expected = {
        "Ulysses": tokens_bytes * (2 * heads + 2 * groups) // heads * (team - 1) // team,
        "ring": tokens_bytes * 2 * groups // heads * (team - 1),
        "width": 2 * tokens_bytes * 2 * (team - 1),
    }
    norms = 2 * config.num_hidden_layers if "qwen3" in pair.model else 0
    norms_bytes = 4 * norms * (getattr(config, "head_dim", None) or 0) * pair.micro_batches
    more = expected["width"] + 2 * (team - 1) * norms_bytes if way == "width" else 0
    job = pair.compiled()
    if "routing" in pair:
        experts, each = config.num_local_experts, config.num_experts_per_tok
        visits = team * (1 - math.comb(experts - experts // team, each) / math.comb(experts, each))
        leaves = visits * (team - 1) / team * config.num_hidden_layers
        shares_bytes = ROWS * SEQUENCE * each * 4
        again = 1 if "depth" not in pair.mesh and job.plan.decisions.rematerialise else 0
        sent_bytes = leaves * (tokens_bytes * (2 + again) + shares_bytes * (1 + again))
        assert on_links_bytes(job, ops.to_experts) == pytest.approx(sent_bytes, rel=1e-3)  # whole bytes of a message
        returned_bytes = leaves * (2 * tokens_bytes + shares_bytes)
        assert on_links_bytes(job, ops.from_experts) == pytest.approx(returned_bytes, rel=1e-3)
    if "width" in pair and way != "width":  # sums of a region's results and of their gradients; of what is looked up
        sums = sum(1 if "embed" in name else 2 for name in job.plan.decisions.width.regions)
        assert on_links_bytes(job, ops.scatter_sum) == sums * (team - 1) * tokens_bytes
    if way != "routing":
        op = {"Ulysses": ops.all_to_all, "ring": ops.pass_on, "width": ops.sum_parts}[way]
        times = 3 if way == "ring" and "depth" not in pair.mesh else 2
        assert on_links_bytes(job, op) == expected[way] * times * config.num_hidden_layers + more


def on_links_bytes(job: Job, op: ops.Op) -> float:
    """The bytes that all devices send each other in a step by the calls of an op that a team makes together."""
    sent = 0.0
    for program in bind([program for program in job.programs if program.function == "step"]):
        team = team_of(program.interface, program.device)
        for work in (work_of(program, node) for node in program.ops() if node.target is op):
            for run in rounds_of(team, job.hardware, work.moved_bytes, work.rounds, pattern=work.pattern):
                sent += sum(amount for (sender, _), amount in run.hops.items() if sender == program.device)
    return sent


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("devices", [2, 4])
def test_processes_train_as_eager(devices: int) -> None:
    """On 2 and 4 processes joined by gloo."""
    wrong = []

    def tell(row: dict[str, Any]) -> None:
        print(row)
        found = None if "error" in row else Difference(row["loss"], row["gradients"], row["weights"])
        if found is None or not found.largest <= TOLERANCE:
            wrong.append(row)

    rows = train_on_ranks(TRAINED, devices, tell)
    assert len(rows) == sum(pair.devices == devices for pair in TRAINED)
    assert wrong == []
