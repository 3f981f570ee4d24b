"""Lower bounds of a step without a solver: no partition into S stages is faster.

In: a `MipProblem` and a number of stages. Out: seconds. For identical layers on equal devices the first one is

    sum (T^f + T^b) + 2 (S - 1) c + (M - 1) ceil(L / S) (T^f + T^b)

the first micro-batch passes every stage forward and back, and after it the others pass the largest stage, which holds
at least ceil(L / S) blocks. Here each block takes its time on the fastest device. The second is the time of the busiest
device, which has at least an N-th part of the work. Neither counts the optimizer.
"""

from __future__ import annotations

import math

from ..problem import MipProblem


def closed_form_s(p: MipProblem, count: int, literal: bool = False) -> float:
    """Seconds that every partition into `count` stages takes at least, whatever stays resident."""
    n, m, length = len(p.units), p.micro_batches, p.num_blocks
    forward = fastest(p.forward_s)
    backward = fastest(p.backward_s)
    if literal:
        backward = [b + a for b, a in zip(backward, fastest(p.again_s))]
    own_s = 0.0 if literal else min(unit.own_s for unit in p.units)
    messages = _messages_s(p, count)
    most = -(-length // count)
    path = sum(forward) + sum(backward) + 2 * (count * own_s + messages)
    waits = sum(max(max(t), _least(t, most)) + own_s for t in (forward, backward))
    busiest = m * (sum(forward) + sum(backward) + 2 * own_s * count) / n
    return max(path + (m - 1) * waits, busiest)


def fastest(sums: list[list[float]]) -> list[float]:
    """Per block its time on the fastest device."""
    return [min(row[i + 1] - row[i] for row in sums) for i in range(len(sums[0]) - 1)]


def _least(times: list[float], count: int) -> float:
    """The least time of `count` consecutive blocks."""
    return min(math.fsum(times[i : i + count]) for i in range(len(times) - count + 1))


def _messages_s(p: MipProblem, count: int) -> float:
    """The least seconds that the first micro-batch travels over `count` - 1 borders."""
    n = len(p.units)
    total = 0.0
    for cut in range(1, count):
        d, e = (cut - 1) % n, cut % n
        a = min(p.message_bytes[cut : p.num_blocks - (count - cut) + 1])
        total += p.message_latency_s[d][e] + a * p.message_s[d][e]
    return total
