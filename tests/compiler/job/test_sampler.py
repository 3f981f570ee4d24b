"""Samplers: together the ranks read what one process alone would, in its order, also after a resume on other ranks."""

from __future__ import annotations

import json
from itertools import islice

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from penstock.compiler.job.sampler import LASTS, RankSampler, SampleOrder, lane_rows
from penstock.ir.errors import CheckpointError, PlanError
from penstock.ir.program import Interface
from penstock.tests.shown_elsewhere import slow_but


def ranks_of(num_samples: int, batch: int, lanes: int, last: str, **more: int) -> list[RankSampler]:
    interface = Interface({}, {}, lanes=tuple((lane,) for lane in range(lanes)))
    rows = [lane_rows(batch, interface, lane) for lane in range(lanes)]
    return [RankSampler(num_samples, batch, rows=part, last=last, **more) for part in rows]


def read(ranks: list[RankSampler], count: int) -> list[list[int]]:
    """So many global batches, put together from what each rank reads; all ranks end their passes together."""
    found: list[list[int]] = []
    while len(found) < count:
        for parts in islice(zip(*ranks, strict=True), count - len(found)):
            assert len({len(part) for part in parts}) == 1
            found.append([sample for part in parts for sample in part])
    return found


def flat(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


SIZES = st.tuples(st.integers(1, 4), st.integers(1, 4))  # lanes, rows of each


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 40), SIZES, SIZES, st.integers(0, 9), st.integers(1, 9), st.booleans(), st.integers(0, 3))
def test_every_sample_once_an_epoch_in_one_ranks_order_whatever_resumes(
    num_samples: int, before: tuple[int, int], after: tuple[int, int], done: int, more: int, shuffle: bool, seed: int
) -> None:
    batches = before[0] * before[1], after[0] * after[1]
    first = ranks_of(num_samples, batches[0], before[0], "carry", shuffle=shuffle, seed=seed)
    seen = flat(read(first, done))
    states = [json.loads(json.dumps(rank.state_dict())) for rank in first]
    assert all(state == states[0] for state in states) and states[0]["position"] == done * batches[0]
    second = ranks_of(num_samples, batches[1], after[0], "carry", shuffle=shuffle, seed=seed)
    for rank in second:
        rank.load_state_dict(states[0])
    seen += flat(read(second, more))
    assert seen == SampleOrder(num_samples, shuffle, seed).take(0, len(seen))
    for begin in range(0, len(seen) - num_samples + 1, num_samples):
        assert sorted(seen[begin : begin + num_samples]) == list(range(num_samples))


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 40), SIZES, st.sampled_from(("drop", "pad")), st.integers(0, 12))
def test_an_uneven_end_is_dropped_or_filled_and_every_epoch_begins_anew(
    num_samples: int, size: tuple[int, int], last: str, done: int
) -> None:
    batch = size[0] * size[1]
    assume(last == "pad" or num_samples >= batch)
    batches = num_samples // batch if last == "drop" else -(-num_samples // batch)
    first = ranks_of(num_samples, batch, size[0], last)
    seen = read(first, done)
    one = RankSampler(num_samples, batch, last=last)
    one.load_state_dict(first[0].state_dict())
    seen += read([one], 3 * batches - done % batches)
    order = SampleOrder(num_samples, True, 0)
    for number, found in enumerate(seen):
        epoch, place = divmod(number, batches)
        whole = order.take(epoch * num_samples, num_samples)
        wanted = (whole * (batch // num_samples + 2))[place * batch : (place + 1) * batch]
        assert found == wanted


def test_a_dropped_end_stays_dropped_where_a_bigger_batch_resumes() -> None:
    small, big = RankSampler(10, 2, last="drop", shuffle=False), RankSampler(10, 4, last="drop", shuffle=False)
    read([small], 4)
    big.load_state_dict(small.state_dict())
    assert (len(big), big.epoch, next(iter(big))) == (2, 1, [0, 1, 2, 3])


def test_a_pass_is_as_long_as_its_length_and_epochs_differ() -> None:
    for last in LASTS:
        sampler = RankSampler(10, 4, last=last)
        passes = []
        for epoch in range(3):
            assert sampler.epoch == epoch
            length = len(sampler)
            passes.append(list(sampler))
            assert len(passes[-1]) == length
        assert passes[0] != passes[1]
        assert [len(batches) for batches in passes] == {"carry": [3, 2, 3], "drop": [2] * 3, "pad": [3] * 3}[last]


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Sample i is the number i."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor(index)}


def batches_of(loader: DataLoader[dict[str, torch.Tensor]], count: int) -> list[int]:
    return [int(value) for batch in islice(loader, count) for value in batch["x"]]


def test_loaders_with_workers_read_ahead_but_only_steps_count() -> None:
    sampler = RankSampler(23, 2)
    sampler.counts_steps = True
    loader = DataLoader(Numbers(), batch_sampler=sampler, num_workers=2)
    order = SampleOrder(23, True, 0)
    for trained, _ in zip(range(3), loader):  # the third batch has been read, but not trained, when the loop breaks
        if trained < 2:
            sampler.advance()
    assert sampler.state_dict()["position"] == 4
    assert batches_of(loader, 2) == order.take(4, 4)


def test_a_pass_begun_before_its_last_batches_were_trained_does_not_repeat_them() -> None:
    sampler = RankSampler(8, 4, shuffle=False)
    sampler.counts_steps = True
    assert list(sampler) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    sampler.advance()
    assert sampler.epoch == 1 and next(iter(sampler)) == [0, 1, 2, 3] and sampler.position == 4


@pytest.mark.parametrize("num_workers", slow_but([0], [0, 2]))
def test_a_stateful_loader_goes_on_with_other_ranks(num_workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def loaders(lanes: int) -> list[DataLoader[dict[str, torch.Tensor]]]:
        samplers = ranks_of(23, 4, lanes, "carry")
        return [stateful(Numbers(), batch_sampler=sampler, num_workers=num_workers) for sampler in samplers]

    def global_batches(ranks: list[DataLoader[dict[str, torch.Tensor]]], count: int | None) -> list[int]:
        return [int(v) for parts in islice(zip(*ranks, strict=True), count) for part in parts for v in part["x"]]

    order = SampleOrder(23, True, 0)
    for done in (3, 6):  # inside an epoch, and after its last batch
        before = loaders(4)
        assert global_batches(before, done) == order.take(0, 4 * done)
        state = json.loads(json.dumps(before[0].state_dict()))
        after = loaders(2)
        for loader in after:
            loader.load_state_dict(state)
        assert global_batches(after, None) == order.take(4 * done, 24 - 4 * done)  # the rest of this epoch
        assert global_batches(after, 2) == order.take(24, 8)  # then the next one


def test_what_a_sampler_refuses() -> None:
    for arguments, said in (
        ((0, 4), "empty"),
        ((3, 4, "drop"), "drop' leaves nothing: .* 3 samples.*last='pad'.*batch of 3 or less"),
        ((8, 4, "keep"), "last='keep'; allowed are carry, drop, pad"),
    ):
        with pytest.raises(PlanError, match=said):
            RankSampler(arguments[0], arguments[1], last=arguments[2] if len(arguments) > 2 else "carry")
    with pytest.raises(PlanError, match=r"rows=range\(2, 6\); allowed are rows .* between 0 and 4"):
        RankSampler(8, 4, rows=range(2, 6))
    state = RankSampler(8, 4, seed=1).state_dict()
    with pytest.raises(CheckpointError, match="seed=1, this one has 0; resume with the same"):
        RankSampler(8, 4).load_state_dict(state)
    with pytest.raises(CheckpointError, match="num_samples=8, this one has 9"):
        RankSampler(9, 4, seed=1).load_state_dict(state)
    with pytest.raises(CheckpointError, match="no state of a sampler: found step"):
        RankSampler(8, 4).load_state_dict({"step": 3})
