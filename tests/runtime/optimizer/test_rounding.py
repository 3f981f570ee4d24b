"""Stochastic rounding: unbiased, to a neighbour, by the element alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.optimizer.rounding import round_into


def round_weights(full: torch.Tensor, key: tuple[int | str, ...], start: int = 0) -> torch.Tensor:
    weight = torch.empty(full.shape, dtype=torch.bfloat16)
    round_into(weight, full, key, start)
    return weight


@pytest.mark.parametrize("share", [0.02, 0.3, 0.5, 0.9])
def test_a_number_goes_up_with_the_share_of_its_distance(share: float) -> None:
    """Between 1 and 1 + 2^-7. The mean of 2^20 draws is off by more than five of its deviations once in 10^6 seeds."""
    found = round_weights(torch.full((2**20,), 1 + share * 2**-7), (0, 7, "weight")).float()
    assert set(found.tolist()) == {1.0, 1 + 2**-7}
    deviation = (share * (1 - share) / 2**20) ** 0.5
    assert float((found > 1).double().mean()) == pytest.approx(share, abs=5 * deviation + 2**-16)


@settings(max_examples=50)
@given(seed=st.integers(0, 2**40), size=st.integers(1, 300), cut=st.integers(0, 300), start=st.integers(0, 2**33))
def test_a_piece_is_rounded_as_in_the_whole(seed: int, size: int, cut: int, start: int) -> None:
    full = torch.randn(size, generator=torch.Generator().manual_seed(size))
    whole, cut = round_weights(full, (seed, 1, "w"), start), min(cut, size)
    parts = [round_weights(full[:cut], (seed, 1, "w"), start), round_weights(full[cut:], (seed, 1, "w"), start + cut)]
    assert torch.equal(whole, torch.cat(parts))
    below = (full.view(torch.int32) & -65536).view(torch.float32)  # towards 0
    assert ((whole.float() - full).abs() <= (full - below).abs().clamp(min=0) + below.abs() * 2**-7).all()


def test_what_bf16_holds_stays_and_what_is_not_finite_too() -> None:
    exact = torch.randn(1000).bfloat16()
    assert torch.equal(round_weights(exact.float(), (1, 2, "w")), exact)
    strange = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    assert str(round_weights(strange, (0,)).tolist()) == str(strange.tolist())


def test_steps_parameters_and_seeds_draw_apart() -> None:
    full = torch.full((1000,), 1 + 2**-8)
    rows = [round_weights(full, key) for key in [(0, 0, "a"), (0, 1, "a"), (1, 0, "a"), (0, 0, "b")]]
    for i, left in enumerate(rows):
        for right in rows[:i]:
            assert 0.4 < float((left == right).double().mean()) < 0.6
