"""The records of operators: each is reached, and its rows rule says what PyTorch's DTensor says of shards."""

from __future__ import annotations

import itertools
from collections import Counter
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
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.graph.operators.pointwise import elementwise
from penstock.graph.operators.record import Elements, RowCall, operator_name, operator_of
from penstock.graph.operators.states import ByRow, Free, Kind, Mixed, OverRows, RowState, Scale, whole
from penstock.graph.operators.table import OPERATORS
from penstock.graph.opgraph import value_tensors

SAMPLES = 4  # of each function
CALLS = 24  # of each operator
# Images are followed along the batch, not along their own lines; DTensor gathers what it concatenates along shards, and
# takes a sum so far along dimension -1 for one along another dimension.
UNCOMPARED = ("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "cat", "cumsum")
CUDA_ONLY = "_fused_rms_norm"  # decomposed where torch is built for CPUs
LEFT_OUT = ("_refs", "jiterator", "linalg", "masked", "sparse", "special", "svd", "torch.ops")
COMPARED = 120  # operators, at least


def test_every_record_is_of_an_operator_that_a_mode_sees() -> None:
    """An operator that torch always decomposes first needs no record."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    kernels: dict[str, list[bool]] = {}
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and not name.partition(".")[2].endswith("out"):
            bare = name.removeprefix("aten::").partition(".")[0].rstrip("_")
            alone = has(name, "CompositeImplicitAutograd") and not has(name, "AutogradCPU")
            kernels.setdefault(bare, []).append(not alone)
    of_torch = [name for name in OPERATORS if "::" not in name and name != CUDA_ONLY]
    assert [name for name in of_torch if not any(kernels.get(name, ()))] == []


class Rows:
    """A watcher of single calls."""

    def __init__(self, rows: int):
        self.rows, self.is_clear, self.kinds = rows, True, list[Kind]()
        self.states: dict[int, RowState] = {}
        self.orders = itertools.count()

    def state(self, tensor: Tensor) -> RowState:
        return self.states.get(id(tensor)) or Free(varies=whole(range(tensor.dim())))

    def note(self, kind: Kind) -> None:
        self.kinds.append(kind)

    def scale(self, number: float) -> Scale:
        return Scale(unsure=True)

    def new_order(self) -> int:
        return next(self.orders)


class Recorded(TorchDispatchMode):
    """Records the calls of operators that have a rule for rows."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if operator_of(func).rows is not None and not func._schema.is_mutable:
            self.calls.append((func, args, kwargs or {}, out))
        return out


def recorded_calls() -> Iterator[tuple[Any, Any, Any, Any]]:
    """Calls of operators with a rule, made by torch's own samples of its functions; of each some."""
    # Imported here: it takes seconds, and forbids other tests of the process to set cuDNN's flags.
    from torch.testing._internal.common_methods_invocations import op_db

    counts = Counter[str]()
    for info in op_db:
        if torch.float32 not in info.dtypes or info.name.startswith(LEFT_OUT):
            continue
        for sample in itertools.islice(info.sample_inputs("cpu", torch.float32), SAMPLES):
            mode = Recorded()
            with torch.no_grad(), mode:
                info.op(sample.input, *sample.args, **sample.kwargs)
            for call in mode.calls:
                counts[operator_name(call[0])] += 1
                if counts[operator_name(call[0])] <= CALLS:
                    yield call


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
    for func, args, kwargs, out in recorded_calls():
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


SPD = torch.randn(4, 3, 3).matmul(torch.randn(4, 3, 3).mT * 0.1) + 3 * torch.eye(3)
FURTHER: dict[str, tuple[Any, tuple[Tensor, ...]]] = {
    "transform of tokens": (lambda x: torch.fft.fft(x, dim=1).real, (torch.randn(4, 6),)),
    "transform and back": (lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1).abs(), dim=1), (torch.randn(4, 6),)),
    "cross product": (lambda x, y: torch.linalg.cross(x, y, dim=1), (torch.randn(4, 3), torch.randn(4, 3))),
    "determinant": (torch.linalg.det, (SPD,)),
    "logarithm of a determinant": (lambda x: torch.linalg.slogdet(x)[1], (SPD,)),
    "inverse": (torch.linalg.inv, (SPD,)),
}


def traced_state(function: Any, operands: tuple[Tensor, ...], dim: int) -> tuple[RowState, list[Kind]]:
    """The state of a function's result, of operands with rows along a dimension, and the ways in which rows met."""
    watcher = Rows(operands[0].shape[dim])
    watcher.states = {id(t): ByRow(dim=dim) for t in operands}
    kept: list[Any] = []

    class Followed(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            call = RowCall(watcher, func, args, kwargs or {}, out)
            if not call.results():
                return out
            given = (operator_of(func).rows or elementwise)(call)
            states = given if isinstance(given, list) else [given] * len(call.results())
            watcher.states.update({id(t): state for t, state in zip(call.results(), states)})
            kept.append(out)
            return out

    with torch.no_grad(), Followed():
        out = function(*operands)
    return watcher.state(out), watcher.kinds


@pytest.mark.parametrize("name", FURTHER)
def test_halves_of_the_rows_give_what_the_whole_gives(name: str) -> None:
    function, operands = FURTHER[name]
    state, kinds = traced_state(function, operands, 0)
    assert isinstance(state, ByRow) and (state.dim, state.inner, kinds) == (0, 1, [])
    halves = [function(*(t[at] for t in operands)) for at in (slice(0, 2), slice(2, 4))]
    torch.testing.assert_close(torch.cat(halves), function(*operands))


@pytest.mark.parametrize("name", FURTHER)
def test_rows_meet_along_the_other_dimension(name: str) -> None:
    function, operands = FURTHER[name]
    state, kinds = traced_state(function, operands, 1)
    assert isinstance(state, Mixed) and kinds == [Kind.ACROSS]
