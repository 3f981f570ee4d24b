"""States of 8 and 4 bits: counted as they are, and the same bits as the library's own optimizer, in whatever place they
lie, undone, saved and loaded. Nothing is compiled here, as both sides step the same code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torchao.optim
from torch import Tensor, nn
from torch.optim import lr_scheduler

from penstock.errors import CheckpointError, PlanError
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec, StageOptimizer
from penstock.tests.runtime.optimizer.low_bits import BYTES, EACH, LOW_BITS

# A matrix of whole blocks, one with a block that is not full, one too small for few bits, and a number.
SHAPES: dict[str, tuple[int, ...]] = {"even": (64, 160), "odd": (67, 131), "small": (37,), "one": ()}


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=made).to(dtype) for name, shape in SHAPES.items()}


def gradients(step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(100 + step)
    found = {name: torch.randn(shape, generator=made).to(dtype) for name, shape in SHAPES.items()}
    if step == 1:
        del found["odd"]
    return found


def places_for(spec: OptimizerSpec, dtype: torch.dtype = torch.float32) -> dict[str, dict[str, Tensor]]:
    """Tensors full of what must not matter."""
    return {
        name: {key: torch.full(own, 7.0).to(kind) for key, (own, kind) in spec.state_shapes(shape, name, dtype).items()}
        for name, shape in SHAPES.items()
    }


def found_bytes(part: StageOptimizer, spec: OptimizerSpec, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of the states that exist, without numbers and what all parameters share."""
    known = {name: spec.state_row(name, shape, dtype) for name, shape in SHAPES.items()}
    rows = part.state_dict()["states"].items()
    return sum(t.nbytes for name, row in rows for key, t in row.items() if t.dim() and key not in known[name].shared)


def write(state: Mapping[str, Any]) -> dict[str, Any]:
    """The saved state, with its plain data read back from JSON."""
    return {**state, **json.loads(json.dumps({key: state[key] for key in ("scalars", "group", "scheduler")}))}


@pytest.mark.parametrize("placed", [False, True], ids=["own", "placed"])
@pytest.mark.parametrize("name", EACH)
def test_the_same_bits_undone_saved_and_loaded(name: str, placed: bool) -> None:
    schedule: Callable[..., Any] = lr_scheduler.ExponentialLR
    spec = OptimizerSpec.from_json(OptimizerSpec.from_callable(LOW_BITS[name], halve).to_json())
    mine, plain = weights(), {n: nn.Parameter(w) for n, w in weights().items()}
    eager = LOW_BITS[name](list(plain.values()))
    follow = schedule(eager, gamma=0.5)
    part = StageOptimizer(spec, mine, places_for(spec) if placed else None)
    for step in range(5):
        if step == 2:
            before = part.snapshot()
            part.step({n: torch.full_like(w, 3.0) for n, w in mine.items()})
            part.restore(before)
        if step == 3:
            saved = write(part.state_dict())
            part = StageOptimizer(spec, mine, places_for(spec) if placed else None)
            part.load_state_dict(saved)
        part.step(gradients(step))
        for n, param in plain.items():
            param.grad = gradients(step).get(n)
        eager.step()
        follow.step()
        for n, param in plain.items():
            assert torch.equal(mine[n], param.detach()), (step, n)
    assert found_bytes(part, spec) == spec.state_bytes(SHAPES)
    if placed:
        own = {t.data_ptr() for row in part.places.values() for t in row.values()}
        assert own == {
            t.data_ptr()
            for n, row in part.state_dict()["states"].items()
            for key, t in row.items()
            if t.dim() and key not in part.state_row(n).shared
        }


def halve(optimizer: Any) -> lr_scheduler.LRScheduler:
    return lr_scheduler.ExponentialLR(optimizer, gamma=0.5)


@pytest.mark.parametrize("name", EACH)
def test_bytes_by_hand(name: str) -> None:
    spec = OptimizerSpec.from_callable(LOW_BITS[name])
    assert spec.state_bytes([(64, 160)]) == BYTES[name]
    assert spec.state_bytes([(40, 100)]) % (4 * 4000) in (0, 4), "below 4096 elements states are fp32"
    large = spec.state_bytes([(12288, 49152)]) / (12288 * 49152)
    assert large == pytest.approx(BYTES[name] / 10240, rel=0.2), "no memory is taken to find that out"


@pytest.mark.parametrize("name", EACH)
def test_states_of_bf16_parameters(name: str) -> None:
    spec, kind = OptimizerSpec.from_callable(LOW_BITS[name]), torch.bfloat16
    mine, plain = weights(kind), {n: nn.Parameter(w) for n, w in weights(kind).items()}
    part, eager = StageOptimizer(spec, mine, places_for(spec, kind)), LOW_BITS[name](list(plain.values()))
    for step in range(4):
        if step == 2:
            saved = write(part.state_dict())
            part = StageOptimizer(spec, mine, places_for(spec, kind))
            part.load_state_dict(saved)
        part.step(gradients(step, kind))
        for n, param in plain.items():
            param.grad = gradients(step, kind).get(n)
        eager.step()
    for n, param in plain.items():
        assert torch.equal(mine[n], param.detach()), n
    assert found_bytes(part, spec, kind) == spec.state_bytes(SHAPES, kind)


def test_what_all_parameters_share_stays_shared_behind_a_checkpoint() -> None:
    spec = OptimizerSpec.from_callable(LOW_BITS["bitsandbytes AdamW8bit"])
    part = StageOptimizer(spec, weights())
    part.step(gradients(0))
    again = StageOptimizer(spec, weights())
    again.load_state_dict(write(part.state_dict()))
    assert again.state_bytes() == part.state_bytes()
    assert again.state_row("even").shared == {"qmap1", "qmap2"}


@pytest.mark.parametrize("name", EACH)
def test_blocks_are_not_cut(name: str) -> None:
    assert OptimizerSpec.from_callable(LOW_BITS[name]).is_elementwise() == (name == "bitsandbytes AdamW")


def test_states_of_another_number_of_bits_are_refused() -> None:
    saved = StageOptimizer(OptimizerSpec.from_callable(LOW_BITS["torchao AdamW8bit"]), weights())
    saved.step(gradients(0))
    for other, says in (("torchao AdamW4bit", "has shape"), ("bitsandbytes AdamW8bit", "not as .* keeps it")):
        spec = OptimizerSpec.from_callable(LOW_BITS[other])
        with pytest.raises(CheckpointError, match=says):
            StageOptimizer(spec, weights()).load_state_dict(saved.state_dict())


def test_what_a_plan_does_itself_is_refused() -> None:
    with pytest.raises(PlanError, match=r"CPUOffloadOptimizer: a plan itself keeps states in DRAM.*AdamW"):
        OptimizerSpec.from_callable(torchao.optim.CPUOffloadOptimizer)
