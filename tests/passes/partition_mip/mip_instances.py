"""Random and regular problems for tests of the partition search."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate

from hypothesis import strategies as st

from penstock.passes.partition_mip.problem import MipProblem, Unit, UpdateCost


def problem(
    kinds: Sequence[int],
    speeds: Sequence[float],
    complexes: Sequence[int],
    budgets: Sequence[float],
    micro_batches: int = 4,
    seconds: Sequence[float] = (1.0, 0.5, 2.0, 1.5),
    weights: Sequence[float] = (4.0, 1.0, 8.0, 2.0),
    state_bytes: float = 12.0,
    barrier: bool = False,
    rate: float = 1.0,
    both: float | None = None,
    shared: float = 0.0,
    tied: bool = False,
) -> MipProblem:
    """`kinds` indexes the tables; times in seconds, sizes in GB, `rate` in GB/s of every link, `both` times that of
    both directions of a root complex together. `shared`: of the saved tensors, those that all blocks share. `tied`: the
    first block shares half of a parameter with the last one."""
    giga, length = 1e9, len(kinds)

    def sums(values: list[float]) -> list[float]:
        return [0.0, *accumulate(values)]

    def table(values: list[float], more: float) -> list[list[float]]:
        running = sums(values)
        return [[running[b] - running[a] + more for a in range(b)] for b in range(length + 1)]

    def work(values: list[float]) -> list[list[float]]:
        found = table([value - shared * giga for value in values], (0.05 + shared) * giga)
        found[length][0] -= tied * min(w[0], w[-1]) / 2
        return found

    w = [weights[k] * giga for k in kinds]
    t = [seconds[k] for k in kinds]
    kept = [max(0.1, shared) * giga for _ in kinds]
    units = tuple(
        Unit(
            budget_bytes=budget * giga,
            fetch_s=1 / (rate * giga),
            offload_s=1 / (rate * giga),
            shared_fetch_s=1 / (rate * giga),
            shared_offload_s=1 / (rate * giga),
            shared_both_s=0.0 if both is None else 1 / (both * rate * giga),
            latency_s=1e-3,
            own_s=1e-3,
            step_s=1e-12,
            call_s=1e-5,
            byte_s=1e-11,
            complex=complex_,
        )
        for budget, complex_ in zip(budgets, complexes)
    )
    n = len(units)
    return MipProblem(
        names=tuple(f"block{i}" for i in range(length)),
        kinds=tuple(kinds),
        units=units,
        micro_batches=micro_batches,
        forward_s=[sums([x / speed for x in t]) for speed in speeds],
        backward_s=[sums([2 * x / speed for x in t]) for speed in speeds],
        again_s=[sums([x / speed for x in t]) for speed in speeds],
        weight_bytes=sums(w),
        grad_bytes=sums(w),
        params=sums([x / 2 for x in w]),
        tensors=sums([4.0] * length),
        kept_bytes=sums(kept),
        work_bytes=work([x + y for x, y in zip(w, kept)]),
        input_bytes=table([0.0] * length, 0.01 * giga),
        message_bytes=[0.0, *[0.01 * giga] * (length - 1), 0.0],
        message_s=[[0.0 if d == e else 1 / (rate * giga) for e in range(n)] for d in range(n)],
        message_latency_s=[[0.0 if d == e else 2e-3 for e in range(n)] for d in range(n)],
        message_shares=[[d != e for e in range(n)] for d in range(n)],
        update=UpdateCost((0.2 / giga,), (0.01 / giga,), state_bytes, barrier),
        ties=((0, length - 1, min(w[0], w[-1]) / 2),) if tied else (),
    )


@st.composite
def small_problems(draw: st.DrawFn, most_blocks: int = 9) -> MipProblem:
    """Up to `most_blocks` blocks of up to four kinds, on one to four unequal devices."""
    n = draw(st.integers(1, 4))
    kinds = draw(st.lists(st.integers(0, 3), min_size=2, max_size=most_blocks))
    return problem(
        sorted(kinds) if draw(st.booleans()) else kinds,
        speeds=draw(st.lists(st.sampled_from([1.0, 1.7, 3.0]), min_size=n, max_size=n)),
        complexes=draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)),
        budgets=draw(st.lists(st.sampled_from([25.0, 60.0, 150.0, 600.0]), min_size=n, max_size=n)),
        micro_batches=draw(st.integers(1, 5)),
        barrier=draw(st.booleans()),
        rate=draw(st.sampled_from([0.5, 4.0, 50.0])),
        both=draw(st.sampled_from([None, 1.0, 1.4])),
        shared=draw(st.sampled_from([0.0, 0.08, 3.0])),
        tied=draw(st.booleans()),
    )


def alike(p: MipProblem) -> MipProblem:
    """The problem on devices like its first one, in turn under two root complexes."""
    n = len(p.units)
    units = tuple(dataclasses.replace(p.units[0], complex=d % 2) for d in range(n))
    rows = {name: [getattr(p, name)[0]] * n for name in ("forward_s", "backward_s", "again_s")}
    return dataclasses.replace(p, units=units, **rows)
