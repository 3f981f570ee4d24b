"""The records of operators: each is reached, and its rows rule says what PyTorch's DTensor says of shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.testing._internal.distributed.fake_pg import FakeStore

from penstock.graph.operators.record import Elements, RowCall, operator_name, operator_of
from penstock.graph.operators.states import ByRow, Free, Mixed, OverRows, RowState
from penstock.graph.operators.table import OPERATORS
from penstock.graph.opgraph import value_tensors
from penstock.tests.graph.operators.samples import Rows, recorded_calls

SAMPLES = 4  # of each function
CALLS = 24  # of each operator
# Images are followed along the batch, not along their own lines; DTensor gathers what it concatenates along shards, and
# takes a sum or product so far along dimension -1 for one along another dimension. A list that becomes a tensor has no
# rows of the batch.
UNCOMPARED = ("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "cat", "cumsum", "cumprod", "lift_fresh")
# `_fused_rms_norm` is decomposed where torch is built for CPUs, `cholesky` from torch 2.15 on.
SOMETIMES = ("_fused_rms_norm", "cholesky")
COMPARED = 120  # operators, at least


def test_every_record_is_of_an_operator_that_a_mode_sees() -> None:
    """An operator that torch always decomposes first needs no record."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    kernels: dict[str, list[bool]] = {}
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and not name.partition(".")[2].endswith("out"):
            bare, _, overload = name.removeprefix("aten::").partition(".")
            bare = operator_name(getattr(getattr(torch.ops.aten, bare), overload or "default"))
            alone = has(name, "CompositeImplicitAutograd") and not has(name, "AutogradCPU")
            kernels.setdefault(bare, []).append(not alone)
    of_torch = [name for name in OPERATORS if "::" not in name and name not in SOMETIMES]
    assert [name for name in of_torch if not any(kernels.get(name, ()))] == []


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks that send nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def placed_by_dtensor(mesh: DeviceMesh, func: Any, args: Any, kwargs: Any, placed: dict[int, Any]) -> list[Any] | None:
    """DTensor's placements of the results; None where it has no strategy, or would first place operands otherwise."""

    def spec(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return DTensorSpec(mesh, (placed[id(value)],), TensorMeta(value.shape, value.stride(), value.dtype))

    args, kwargs = torch.utils._pytree.tree_map(spec, (args, kwargs))
    propagator = DTensor._op_dispatcher.sharding_propagator
    try:
        sharding = propagator.propagate_op_sharding_non_cached(OpSchema(func, args, kwargs))
    except Exception:  # it has no strategy, in one of many ways
        return None
    if sharding.needs_redistribute or sharding.output_spec is None:
        return None
    specs = sharding.output_spec if isinstance(sharding.output_spec, tuple | list) else [sharding.output_spec]
    return [spec.placements[0] for spec in specs if spec is not None]


@pytest.mark.slow
def test_rows_are_where_dtensor_has_shards(mesh: DeviceMesh) -> None:
    compared, summed, differ = comparison(mesh)
    assert differ == {} and len(compared) >= COMPARED, f"{len(compared)} {differ}"
    assert {"sum", "mean", "dot", "mse_loss"} <= summed


def comparison(mesh: DeviceMesh) -> tuple[set[str], set[str], dict[str, str]]:
    """The operators of which DTensor says something, those of them that add up shards, and the differences."""
    compared, summed, differ = set[str](), set[str](), dict[str, str]()
    for func, args, kwargs, out in recorded_calls(SAMPLES, CALLS):
        if operator_of(func).rows is None:
            continue
        tensors, results = [*value_tensors(args), *value_tensors(kwargs)], list(value_tensors(out))
        first = next((t for t in tensors if t.dim()), None)
        for dim in range(first.dim() if first is not None else 0):
            rows = first.shape[dim]  # type: ignore[union-attr]
            if rows < 2:
                continue
            along = [t for t in tensors if t.dim() == first.dim() and t.shape[dim] == rows]  # type: ignore[union-attr]
            watcher = Rows(rows)
            watcher.states = {id(t): ByRow(dim=dim) for t in along}
            placed = {id(t): Shard(dim) if any(t is other for other in along) else Replicate() for t in tensors}
            shards = placed_by_dtensor(mesh, func, args, kwargs, placed)
            if shards is None or len(shards) != len(results) or operator_name(func) in UNCOMPARED:
                continue
            rule = operator_of(func).rows
            assert rule is not None
            given = rule(RowCall(watcher, func, args, kwargs, out))
            states = given if isinstance(given, list) else [given] * len(results)
            compared.add(operator_name(func))
            summed.update([operator_name(func)] if isinstance(states[0], OverRows) else [])
            for state, shard in zip(states, shards):
                if not is_same(state, shard, func) or (isinstance(shard, Shard) and watcher.kinds):
                    shapes = [tuple(t.shape) for t in tensors]
                    differ[operator_name(func)] = f"{shapes} along {dim}: {shard}, {state}, {watcher.kinds}"
    return compared, summed, differ


def is_same(state: RowState, shard: Any, func: Any) -> bool:
    """Whether a state of a result is a place of shards. Of sums over shards, DTensor also knows some that are not
    linear, such as a norm of order 1."""
    if type(shard) is Shard:
        has_no_elements = isinstance(state, Free) and operator_of(func).elements is Elements.NONE
        return has_no_elements or (isinstance(state, ByRow) and (state.dim, state.order) == (shard.dim, None))
    if isinstance(state, OverRows):
        return type(shard) is Partial and state.scale.power == {"sum": 1, "avg": 0}[shard.reduce_op]
    return isinstance(state, Free if isinstance(shard, Replicate) else Mixed)
