"""The optimizer of one stage. It steps like one optimizer over the parameters of all stages, provided that this one
treats each parameter alone.

Its states may be in given places, such as a buffer that is read from SSD before a step and written back after it. A
step may be undone (`snapshot`, `restore`), so it need not wait for the decision whether it counts.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from ...ir.errors import CheckpointError, PlanError
from ...ir.precision import PORTION_ELEMENTS, ROUNDED_ELEMENTS
from .gradients import times_in_full
from .importable import resolve
from .leaves import leaves_of, rebuilt, row_leaves
from .probe import Traits
from .rounding import Rounding
from .saving import load_groups, load_schedule, saved_groups, saved_parts, saved_schedule
from .snapshot import OptimizerSnapshot, keep, put_back, room_bytes
from .spec import OptimizerSpec
from .state_shapes import StateRow
from .tiles import CLASSES, InTiles, Tiled, tile_elements

__all__ = ["OptimizerSnapshot", "OptimizerSpec", "Places", "StageOptimizer", "Workspace"]

Places = Mapping[str, Mapping[str, Tensor]]  # parameter name to state name, as in `state_shapes`, to tensor


class Workspace:
    """The buffer in which gradients are converted, used by every step and by one stage after the other. On a CPU it is
    kept between steps, as fresh memory costs more than the conversion; on a GPU it goes back to torch's allocator."""

    def __init__(self, device: torch.device):
        self.device = device
        self._flat = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def bytes(self) -> int:
        """The size that the buffer has grown to."""
        return self._flat.nbytes

    def row(self, num_bytes: int) -> Tensor:
        """A buffer of at least `num_bytes`, with any contents."""
        if num_bytes > self._flat.nbytes:
            self._flat = torch.empty(0, dtype=torch.uint8, device=self.device)  # give back the old buffer first
            self._flat = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self._flat

    def settle(self) -> None:
        """End a step."""
        if self.device.type != "cpu":
            self._flat = torch.empty(0, dtype=torch.uint8, device=self.device)


@dataclass(frozen=True)
class _Step:
    """The parts of one step; see `StageOptimizer.step`. `converted`: the names of gradients that are converted."""

    grads: Mapping[str, Tensor]
    converted: Collection[str]
    factor: Tensor | None
    weights: Mapping[str, Tensor]
    draw: tuple[int, ...]


class StageOptimizer:
    """Updates one stage's parameters in place, and its learning rate once a step.

    `places`: the tensors in which the states that `OptimizerSpec.state_shapes` names are to be kept; their contents
    before a parameter's first step do not matter. `workspace` may be shared by stages that are stepped by one thread.
    `rounding`: `params` are bf16 weights; each is in fp32 during its step alone, and the result is rounded to it.
    `lasting` has the tensors that hold the parameters between steps.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        params: Mapping[str, Tensor],
        places: Places | None = None,
        workspace: Workspace | None = None,
        rounding: Rounding | None = None,
    ):
        self.spec, self.rounding = spec, rounding
        self.lasting = {name: p.detach() for name, p in params.items()}
        self.params = {name: nn.Parameter(p if rounding is None else _empty(p)) for name, p in self.lasting.items()}
        self.places: Places = {} if places is None else places
        self.optimizer = spec.build(self.params, without_states=bool(self.places)) if self.params else None
        self.scheduler = spec.build_scheduler(self.optimizer) if self.optimizer else None
        self.device = next((p.device for p in self.params.values()), torch.device("cpu"))
        self.workspace = Workspace(self.device) if workspace is None else workspace
        self.waiting: deque[list[dict[str, Any]]] = deque()  # options of steps that shared parameters still lack
        self._layouts: dict[str, tuple[torch.dtype, tuple[int, ...]]] | None = None  # of `params`, once asked for
        self._room: list[Tensor] = []  # for states that the first step makes
        self._members: list[list[str]] = [[] for _ in spec.all_groups]
        for name in self.params:
            self._members[spec.group_of(name)].append(name)

    @property
    def lr(self) -> float | None:
        """The learning rate of the next step, of the first group; None for a stage without trained parameters."""
        return float(self.optimizer.param_groups[0]["lr"]) if self.optimizer else None

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """Those of the next step, of each group that has one."""
        groups = self.optimizer.param_groups if self.optimizer else []
        return tuple(float(group["lr"]) for group in groups if "lr" in group)

    @property
    def started(self) -> bool:
        """Whether any states exist: before that there is nothing to read."""
        return self.optimizer is not None and any(self.optimizer.state.values())

    @property
    def traits(self) -> Traits:
        return self.spec.traits(self.device)

    @property
    def _most_elements(self) -> int:
        """Of the parameters of one call that makes tensors, unless one alone has more."""
        return PORTION_ELEMENTS if self.rounding is None else ROUNDED_ELEMENTS

    @property
    def _makes_temporaries(self) -> bool:
        """Whether a call may make tensors: only fused kernels make none."""
        return self.optimizer is not None and not all(group.get("fused") for group in self.optimizer.param_groups)

    @cached_property
    def _num_elements(self) -> int:
        return sum(p.numel() for p in self.lasting.values())

    @cached_property
    def _rows(self) -> dict[str, StateRow]:
        return {name: self.spec.state_row(name, tuple(p.shape), p.dtype) for name, p in self.params.items()}

    def take_room(self) -> None:
        """Take the memory of states that the first step makes now, on the stream of steps. Made between the values of a
        step, they would be in the way of the largest ones of all steps after it."""
        if self.started or self.places:
            return
        kinds = (self.spec.state_shapes(tuple(p.shape), name, p.dtype) for name, p in self.params.items())
        rows = (row for found in kinds for row in found.values())
        self._room = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in rows]

    # --- stepping

    def step(
        self,
        grads: Mapping[str, Tensor],
        *,
        factor: Tensor | None = None,
        weights: Mapping[str, Tensor] | None = None,
        preserve: bool = False,
        part: str = "",
        draw: tuple[int, ...] = (),
    ) -> None:
        """One step on `grads`, converted to the parameters' dtype; a parameter without a gradient stays as it is.

        factor: the gradients are multiplied by it, in fp32 (fp64 ones in fp64). weights: tensors of another precision
        that follow the parameters. preserve: the gradients are the same after the step, even if the optimizer uses
        their memory. part: "own" if the parameters that stages share are stepped later, by a step of the part "shared",
        which has the learning rate of this one. draw: with a rounding, what its random numbers belong to beside the
        parameter.
        """
        if self.optimizer is None:
            return
        self._check_part(part)
        self._room = []
        given = {name: grad for name in self.params if (grad := grads.get(name)) is not None}
        converted: Collection[str] = self._foreign(given)
        if factor is not None or (preserve and not self.traits.keeps_grads):
            converted = given.keys()
        job = _Step(given, converted, factor, weights or {}, draw)
        small = bool(converted or weights or self.rounding)
        tiled = [name for name in given if self._is_tiled(name, given[name])] if small else []
        others = [name for name in given if name not in tiled] if tiled else [*given]
        with self._options_of(part):
            for names in self._portions(tiled, False) if tiled else ():
                self._step_in_tiles(names, job)
            for names in self._portions(others, small or self._makes_temporaries) if others or not tiled else ():
                self._step_whole(names, job)
        self.workspace.settle()
        if self.scheduler is not None and part != "shared":
            self.scheduler.step()

    def _step_whole(self, names: list[str], job: _Step) -> None:
        """Step these parameters in one call: three passes over memory if anything is converted."""
        if self.rounding is not None:
            for name in names:
                self.params[name].data = self.lasting[name].to(torch.float32)
        params, converted = self.params, job.converted
        self._convert(job.grads, [name for name in names if name in converted] if converted else (), job.factor)
        for name in [name for name in names if name not in converted] if converted else names:
            params[name].grad = job.grads[name]
        self._step_these(names)
        for name in names:
            params[name].grad = None
        for name in names if job.weights else ():
            if name in job.weights:
                job.weights[name].copy_(params[name].detach())
        if self.rounding is not None:
            for name in names:
                self.rounding.store(name, params[name].detach(), self.lasting[name], job.draw)
                params[name].data = _empty(self.lasting[name])

    def _step_in_tiles(self, names: list[str], job: _Step) -> None:
        """Step these parameters in one pass over memory: see `tiles`."""
        work = {}
        for name in names:
            param, low = self.params[name], job.weights.get(name)
            store = None if self.rounding is None else partial(self.rounding.store_piece, name, job.draw)
            work[id(param)] = Tiled(
                self.lasting[name].view(-1), job.grads[name].view(-1), name in job.converted,
                None if low is None else low.view(-1), store,
            )  # fmt: skip
            param.grad = _empty(param, param.dtype)  # the real ones are read by tile
        with InTiles(work, job.factor, self.workspace.row):
            self._step_these(names)
        for name in names:
            self.params[name].grad = None

    def _is_tiled(self, name: str, grad: Tensor) -> bool:
        """Whether a fused kernel steps this parameter, and all tensors of it are rows of elements in one order."""
        assert self.optimizer is not None
        index = self.spec.group_of(name)
        if self.device.type != "cpu" or not self.optimizer.param_groups[index].get("fused"):
            return False
        row = self.optimizer.state.get(self.params[name], {})
        own = (self.lasting[name], grad, *(value for value in row.values() if isinstance(value, Tensor)))
        return resolve(self.spec.class_of(index)[0]) in CLASSES and all(t.is_contiguous() for t in own)

    def _check_part(self, part: str) -> None:
        if part and not self.traits.divisible:
            raise PlanError(
                f"optimizer {self.spec.path} counts the steps of a group, so that parameters which stages share cannot "
                "be stepped later than the others, as asynchronous training does; torch.optim.AdamW can"
            )

    @contextmanager
    def _options_of(self, part: str) -> Iterator[None]:
        """A step of the part "shared" has the options that the step of the part "own" had for the same gradients."""
        assert self.optimizer is not None
        groups = self.optimizer.param_groups
        now = [{key: value for key, value in group.items() if key != "params"} for group in groups] if part else []
        if part == "own":  # a learning rate may be a tensor, which schedules change in place
            self.waiting.append(copy.deepcopy(now))
        for group, options in zip(groups, self.waiting.popleft() if part == "shared" else ()):
            group.update(options)
        yield
        for group, options in zip(groups, now if part == "shared" else ()):
            group.update(options)

    def _foreign(self, grads: Mapping[str, Tensor]) -> set[str]:
        """The gradients to convert in any case: the fused kernels assume the parameter's type and layout."""
        if self._layouts is None:
            self._layouts = {name: (p.dtype, self.lasting[name].stride()) for name, p in self.params.items()}
        layouts = self._layouts
        return {name for name, grad in grads.items() if (grad.dtype, grad.stride()) != layouts[name]}

    def _portions(self, names: list[str], small: bool) -> Iterator[list[str]]:
        """The parameters of one step in one or more calls of the torch optimizer, which makes no difference to them.

        Parameters whose states are made now, and then copied to their places, go one by one; without places they go
        together, apart from the others (fused SGD begins all momenta or none). `small`: the call makes tensors, of
        gradients that are converted or as the foreach form does, so that it is made in several where it is large.
        """
        assert self.optimizer is not None
        if not self.traits.divisible:
            yield names
            return
        states, params = self.optimizer.state, self.params
        fresh = [name for name in names if not states.get(params[name])]
        started = [name for name in names if states.get(params[name])] if fresh else names
        moving = set(names if not self.traits.in_place else fresh) if self.places else set()
        count = 0
        for together in (fresh, started):
            single = [[name] for name in together if name in moving] if moving else []
            rest = [name for name in together if name not in moving] if moving else together
            for portion in (*single, *self._portions_of(rest, small)):
                count += 1
                yield portion
        if not count:  # the torch optimizer is called in every step, also without any gradient
            yield []

    def _portions_of(self, names: list[str], small: bool) -> Iterator[list[str]]:
        if names and (not small or self._num_elements <= self._most_elements):
            yield names
            return
        portion: list[str] = []
        elements = 0
        for name in names:
            numel = self.params[name].numel()
            if portion and elements + numel > self._most_elements:
                yield portion
                portion, elements = [], 0
            portion.append(name)
            elements += numel
        if portion:
            yield portion

    def _convert(self, grads: Mapping[str, Tensor], names: Sequence[str], factor: Tensor | None) -> None:
        flat = self.workspace.row(sum(self.params[name].nbytes for name in names))
        single = None if factor is None else factor.to(self.device, torch.float32)
        offset = 0
        for name in names:
            param, grad = self.params[name], grads[name]
            full = flat[offset : offset + param.nbytes].view(param.dtype).view(param.shape)
            offset += param.nbytes
            if factor is None or single is None:
                full.copy_(grad)
            elif torch.float64 in (param.dtype, grad.dtype):
                full.copy_(times_in_full(grad, factor))
            else:
                full.copy_(grad).mul_(single)
            param.grad = full

    def _step_these(self, names: Sequence[str]) -> None:
        """Call the torch optimizer for these parameters, whose gradients are set."""
        assert self.optimizer is not None
        groups, chosen = self.optimizer.param_groups, set(names)
        for name in names if self.places else ():
            if self._is_fresh(name):
                self._give_birth(name)
        whole = [group["params"] for group in groups]
        for group, members in zip(groups, self._members) if len(chosen) < len(self.params) else ():
            group["params"] = [self.params[name] for name in members if name in chosen]
        try:
            self.optimizer.step()
        finally:
            for group, params in zip(groups, whole):
                group["params"] = params
        if self.places:
            for name in names:
                self._settle(name)

    # --- states in their places

    def _is_fresh(self, name: str) -> bool:
        """Whether a parameter with places has no states yet."""
        assert self.optimizer is not None
        return bool(self.places.get(name)) and not self.optimizer.state.get(self.params[name])

    def _give_birth(self, name: str) -> None:
        """Make the states that the class has before the first step, if any."""
        assert self.optimizer is not None
        if not self.traits.born_empty:
            param = self.params[name]
            alone = self.spec.build_alone(self.spec.group_of(name), [param])
            self.optimizer.state[param] = dict(alone.state[param])

    def _settle(self, name: str) -> None:
        """Copy states that the step has made, or made anew, to their places."""
        assert self.optimizer is not None
        row, places = self.optimizer.state.get(self.params[name], {}), self.places.get(name, {})
        for key, value in row.items():
            outside = {leaf: t for leaf, t in leaves_of(key, value).items() if places.get(leaf) is not t}
            for leaf, tensor in outside.items():
                if leaf in places:
                    self._require_like(name, leaf, tensor, places[leaf])
                    places[leaf].copy_(tensor)
                elif places and tensor.numel() > 1 and leaf not in self._rows[name].shared:
                    raise self._unplanned_error(name, leaf, tensor, "no place was planned for it")
            if outside.keys() & places.keys():
                row[key] = rebuilt(key, value, places)

    def _require_like(self, name: str, leaf: str, tensor: Tensor, place: Tensor) -> None:
        if tensor.shape != place.shape or tensor.dtype != place.dtype:
            planned = f"before its first step it was planned as {place.dtype}{list(place.shape)}"
            raise self._unplanned_error(name, leaf, tensor, planned)

    def _unplanned_error(self, name: str, leaf: str, tensor: Tensor, planned: str) -> PlanError:
        found = f"{tensor.dtype}{list(tensor.shape)}"
        return PlanError(f"optimizer {self._path(name)}: the state {leaf!r} of {name} is {found}; {planned}")

    def _path(self, name: str) -> str:
        return self.spec.class_of(self.spec.group_of(name))[0]

    def bind(self, places: Places, params: Mapping[str, Tensor] | None = None) -> None:
        """From now on these tensors, which hold them already, are the states, and with `params` the parameters."""
        self.places, self._layouts = places, None
        if self.optimizer is None:
            return
        for name, param in self.params.items():
            row = self.optimizer.state.get(param, {})
            row.update({key: rebuilt(key, value, places.get(name, {})) for key, value in row.items()})
            if params is not None:
                self.lasting[name] = params[name].detach()
                param.data = self.lasting[name] if self.rounding is None else _empty(self.lasting[name])

    def state_bytes(self) -> int:
        """Bytes of the states that exist now: none before the first step, for most optimizers."""
        rows = self.optimizer.state.values() if self.optimizer else ()
        found = {id(leaf): leaf.nbytes for row in rows for leaf in row_leaves(row).values()}
        return sum(found.values())

    def workspace_bytes(self) -> int:
        """The bytes that a step needs at most if all gradients are converted: for gradients or weights of another
        precision, and for a step that must preserve gradients if the optimizer does not."""
        sizes = [param.nbytes for param in self.params.values()]
        if not self.traits.divisible:
            return sum(sizes)
        whole = min(sum(sizes), max(4 * self._most_elements, *sizes, 0))
        return max(whole, min(sum(sizes), 4 * tile_elements())) if self.device.type == "cpu" else whole

    # --- undoing a step

    def state_row(self, name: str) -> StateRow:
        """The states of a parameter: names, shapes and dtypes."""
        return self._rows[name]

    def snapshot_bytes(self) -> int:
        """The bytes of parameters and states that `snapshot` copies; numbers are not counted."""
        return room_bytes(self.spec, self.params)

    def snapshot(self, tensors: bool = True, into: OptimizerSnapshot | Tensor | None = None) -> OptimizerSnapshot:
        """Everything that a step changes, as it is now.

        tensors: includes parameters and the states that `OptimizerSpec.state_shapes` names; otherwise the caller brings
        those back. into: an earlier snapshot, which is overwritten, or a flat uint8 tensor of `snapshot_bytes`; without
        it, memory is taken for the copies.
        """
        return keep(self, tensors, into)

    def restore(self, snapshot: OptimizerSnapshot) -> None:
        """Back to the snapshot, bit for bit; states that did not exist then are gone."""
        put_back(self, snapshot)

    # --- saving and loading

    def options(self) -> list[dict[str, Any]]:
        """The options of each group, such as its learning rate, as plain data."""
        assert self.optimizer is not None
        saved = saved_groups(self.optimizer)
        return list(saved.get("groups", [saved]))

    def set_option(self, index: int, key: str, value: Any) -> None:
        """Set an option of a group from the next step on."""
        assert self.optimizer is not None
        load_groups(self.optimizer, [{} for _ in range(index)] + [{key: value}])

    def state_dict(self) -> dict[str, Any]:
        """The state that `load_state_dict` restores: `states` is parameter name to {state name: tensor}, not copied.

        The rest is plain data: `scalars` per parameter, and, equal for all stages, `group` (learning rate and the like;
        of several groups {"groups": one such dict each}) and `scheduler`.
        """
        states: dict[str, dict[str, Tensor]] = {}
        scalars: dict[str, dict[str, Any]] = {}
        if self.optimizer is None:
            return {"states": states, "scalars": scalars, "group": {}, "scheduler": {}}
        for name, param in self.params.items():
            for key, value in self.optimizer.state.get(param, {}).items():
                if leaves := leaves_of(key, value):
                    states.setdefault(name, {}).update(leaves)
                elif value is not None:
                    scalars.setdefault(name, {})[key] = value
        group, schedule = saved_groups(self.optimizer), saved_schedule(self.scheduler)
        return {"states": states, "scalars": scalars, "group": group, "scheduler": schedule}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over copies of the states of this stage's parameters; `state` may hold those of other stages, too.

        Raises `CheckpointError` for a state that the optimizer does not have, or has in another shape, and for another
        number of parameter groups.
        """
        if self.optimizer is None:
            return
        shared: dict[tuple[int, str], Tensor] = {}
        for name in self.params:
            index, common = self.spec.group_of(name), self._rows[name].shared
            given = {**state["states"].get(name, {}), **state["scalars"].get(name, {})}
            self.optimizer.state.pop(self.params[name], None)
            row = self._copy_states(name, given) if given else {}
            del given
            if row:
                for key in row.keys() & common:
                    row[key] = shared.setdefault((index, key), row[key])
                self.optimizer.state[self.params[name]] = row
            elif not self.places:
                self._give_birth(name)
            self._settle(name)
        load_groups(self.optimizer, saved_parts(self.spec, state["group"], state["scheduler"] or {}))
        if self.scheduler is not None and state["scheduler"]:
            load_schedule(self.scheduler, state["scheduler"])

    def _copy_states(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """A parameter's states, made of copies of what was saved."""
        known = self._rows[name]
        self._require_kinds(name, given, known)
        own, found = row_leaves(known.later), dict[str, Any]()
        leaves = {key: self._copy(name, key, value, own[key]) for key, value in given.items() if key in own}
        for key, like in known.later.items():
            inside = leaves_of(key, like).keys()
            if inside and inside <= leaves.keys():
                found[key] = rebuilt(key, like, leaves)
            elif key in given:
                found[key] = given[key]
        return found

    def _require_kinds(self, name: str, given: Mapping[str, Any], known: StateRow) -> None:
        """Raise `CheckpointError` for states that the optimizer does not have, or not in that form."""
        first, later = ({**row, **row_leaves(row)} for row in (known.first, known.later))
        wraps = {key for key in later if leaves_of(key, later[key]).keys() - {key}}
        strange = [key for key in given if key not in later or key in wraps]
        strange += [key for key in first if key not in given and key not in wraps]
        wrong = [key for key, value in given.items() if key in later and not _alike(value, later[key])]
        if strange or wrong:
            names = ", ".join(key for key in later if key not in wraps)
            raise CheckpointError(
                f"optimizer state {(strange or wrong)[0]!r:.60} of {name} is not as {self._path(name)} keeps it; it "
                f"has {names or 'none'}"
            )

    def _copy(self, name: str, key: str, value: Tensor, like: Tensor) -> Tensor:
        """A copy of a saved tensor where and in the dtype that the optimizer keeps it."""
        if (like.dim() or like.numel() > 1) and value.shape != like.shape:
            found, want = list(value.shape), list(like.shape)
            raise CheckpointError(f"optimizer state {key!r} of {name} has shape {found}, not {want}")
        if value.dtype != like.dtype and not (value.is_floating_point() and like.is_floating_point()):
            raise CheckpointError(f"optimizer state {key!r} of {name} is {value.dtype}, not {like.dtype}")
        assert self.optimizer is not None
        group = self.optimizer.param_groups[self.spec.group_of(name)]
        counts = key == "step" and not group.get("fused") and not group.get("capturable")  # torch reads it on the host
        return value.detach().to("cpu" if counts else self.device, like.dtype, copy=True)


def _empty(weight: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of this shape without memory, for between steps."""
    return torch.zeros((), dtype=dtype, device=weight.device).expand(weight.shape)


def _alike(value: Any, known: Any) -> bool:
    """Whether a state is of that kind: a tensor of one element or of another number, which is 0 where a shard has
    nothing of a parameter; a number."""
    if isinstance(known, Tensor) or isinstance(value, Tensor):
        return isinstance(known, Tensor) and isinstance(value, Tensor) and (known.numel() != 1 or value.numel() == 1)
    return type(value) is type(known) or {type(value), type(known)} == {int, float}
