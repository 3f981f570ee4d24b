"""The state of one stage that one device keeps across steps: weights, fp32 masters, optimizer states, buffers; on SSD,
too."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ...ir import ops
from ...ir.errors import CheckpointError
from ...ir.program import FIRST_FORM, Interface, ParamSpec, StageHome, StageSpec, TeamPart
from ..optimizer.gradients import Grads
from ..optimizer.hooks import change_params
from ..optimizer.stage_optimizer import OptimizerSnapshot, OptimizerSpec, StageOptimizer, Workspace
from ..ssd.extents import FileRange
from ..ssd.folder import SsdFolder
from ..state.part_params import member_part, whole_of_members
from ..state.tensor_file import Reads
from .arena import BufferLayout, allocate, masters_layout, pages, weights_layout
from .file import Staged, StageFile
from .runner import StageRunner
from .shards import FlatStage, rounding_of, whole_of


@dataclass
class StagePart:
    """One stage's part of a checkpoint, nothing copied: weights (masters if they exist), buffers, and the optimizer's
    `StageOptimizer.state_dict` (None if the stage is not trained)."""

    weights: Mapping[str, Tensor]
    buffers: dict[str, Tensor]
    optimizer: dict[str, Any] | None

    def optimizer_rows(self) -> dict[str, dict[str, Any]]:
        """The optimizer's states of each parameter, tensors and numbers."""
        found = self.optimizer or {"states": {}, "scalars": {}}
        names = dict.fromkeys([*found["states"], *found["scalars"]])
        return {name: {**found["states"].get(name, {}), **found["scalars"].get(name, {})} for name in names}


@dataclass(frozen=True)
class StoreSetup:
    """The way in which a device keeps a stage.

    `optimizer` is None if the stage is not trained here. `flat_stage`: how the stage is spread, if only a shard of it
    is kept here; `load` takes whole tensors, `state` gives pieces. Files go to `folder`, but for whole weights that
    are `in_files` of the user's already; `staging(num_bytes)` lends a buffer of DRAM between steps. `constants`:
    buffers that are neither loaded nor saved. `node`: where DRAM near the device is, see `nodes`. `weights_move`,
    `compiler`: see `StageRunner`.
    """

    device: torch.device
    home: StageHome
    precision: str
    weights_move: bool
    optimizer: OptimizerSpec | None = None
    flat_stage: FlatStage | None = None
    folder: SsdFolder | None = None
    in_files: Mapping[str, FileRange] = field(default_factory=dict)
    staging: Callable[[int], Tensor] | None = None
    workspace: Workspace | None = None
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    node: int | None = None
    compiler: str | None = None
    member: int = 0


class StageStore:
    """The weights, states and buffers of one stage. One flat buffer has the weights, on the device or, for a swapped
    stage, in (pinned) DRAM; or SSDs have them. Those that stay are on the device in any case, in a buffer of their own.

    Masters are the weights themselves, unless the plan's interface asks for fp32 copies beside weights of another
    precision.
    """

    def __init__(self, spec: StageSpec, module: nn.Module, interface: Interface, setup: StoreSetup):
        device, home, optimizer, flat_stage = setup.device, setup.home, setup.optimizer, setup.flat_stage
        self.spec, self.home, self.flat_stage, self.member = spec, home, flat_stage, setup.member
        self._divided = member_params(spec)
        self._constants = dict(setup.constants)
        self.part = spec if flat_stage is None else flat_stage.part
        self._changes = [param for param in self.part.params if param.change]
        self.runner = StageRunner(spec, module, device, setup.precision, setup.weights_move, setup.compiler)
        self.of_forms = {FIRST_FORM: self.runner}  # by the number of a micro-batch's form
        self._constants_of = {FIRST_FORM: self._constants}
        self._where = device if home.weights == ops.DEVICE else torch.device("cpu")
        self._pinned = home.weights == ops.DRAM and device.type == "cuda"
        self._staging = setup.staging
        self.layout = weights_layout(spec) if flat_stage is None else flat_stage.own
        self.node = setup.node
        num_bytes = 0 if home.weights == ops.SSD else self.layout.total_bytes
        self.flat = allocate(num_bytes, self._where, self._pinned, self.node)
        self.weights = {} if home.weights == ops.SSD else self.layout.views(self.flat)
        self.staying: dict[str, Tensor] = {}
        if spec.staying:
            self._where = device
            own = BufferLayout.from_params(spec.staying)
            self.staying = own.views(allocate(own.total_bytes, device))
            self.weights |= self.staying
        self.file: StageFile | None = None
        if ops.SSD in (home.weights, home.states):
            assert setup.folder is not None and setup.staging is not None
            in_files = setup.in_files if flat_stage is None else {}
            self.file = StageFile(self.part, self.layout, interface, home, optimizer, setup.folder, in_files)
        self._trained = [name for name, param in self.runner.parameters.items() if param.requires_grad]
        staged = None if self.file is None else self.file.views(self._stage())
        self.masters = self._make_masters(interface.master and optimizer is not None, staged)
        self.optimizer = None
        if optimizer is not None:
            places = staged.states if staged is not None and home.states == ops.SSD else None
            firsts = {} if flat_stage is None else flat_stage.firsts
            rounding = rounding_of(spec, firsts) if interface.rounds else None
            self.optimizer = StageOptimizer(optimizer, self.masters, places, setup.workspace, rounding)
        self._bound = None if staged is None else staged.flat.data_ptr()
        self._before: OptimizerSnapshot | None = None  # before a speculative step
        self._flat_before: Tensor | None = None
        self.copied_bytes = 0  # for steps that may be undone, since the last step of the job began
        self._draw: tuple[int, ...] = ()

    def _stage(self) -> Tensor:
        assert self._staging is not None and self.file is not None
        return self._staging(self.file.num_bytes)

    def _make_masters(self, separate: bool, staged: Staged | None) -> dict[str, Tensor]:
        if staged is not None and staged.masters:
            return {name: staged.masters[name] for name in self._trained}
        if not separate:
            return {name: self.weights[name] for name in self._trained if name in self.weights}
        layout = masters_layout(self.part)
        flat = allocate(layout.total_bytes, self._where, node=self.node)  # not pinned: no GPU reads masters in DRAM
        views = layout.views(flat)
        return {name: view for name, view in views.items() if name in self._trained}

    def take_form(
        self, number: int, spec: StageSpec, module: nn.Module, constants: Mapping[str, Tensor], kept_bytes: int
    ) -> None:
        """Run micro-batches of a form by a module of their own. `kept_bytes`: the most that a form keeps."""
        first = self.runner
        compiler = None if first.compiled is None else first.compiled.backend
        runner = StageRunner(spec, module, first.device, first.precision.name, first.weights_move, compiler)
        runner.load_buffers({**self._buffers(), **constants})
        self.of_forms[number], self._constants_of[number] = runner, dict(constants)
        for each in self.of_forms.values():
            each.kept_bytes = kept_bytes

    def pick_outputs(self, outputs: Sequence[Tensor], spec: StageSpec) -> list[Tensor]:
        """The outputs of an evaluation of another form by the names that the program has; nothing for one that the form
        lacks."""
        count = len(self.spec.outputs)
        extras = {extra.name: value for extra, value in zip(spec.extra_outputs, outputs[count:])}
        nothing = torch.empty(0)
        return [*outputs[:count], *(extras.get(extra.name, nothing) for extra in self.spec.extra_outputs)]

    # --- the update

    def update(
        self,
        grads: Grads,
        staged: Staged | None = None,
        speculative_factor: Tensor | None = None,
        draw: tuple[int, ...] = (),
    ) -> None:
        """One optimizer step on the masters; weights of another precision follow. `staged`: the buffer that was read
        from SSD and goes back there. With `speculative_factor` the step can be undone by `redo`. `draw`: see
        `StageOptimizer.step`."""
        assert self.optimizer is not None
        self._draw = draw
        self._bind(staged)
        if speculative_factor is None:
            self._step(grads, grads.factor, staged)
            return
        self._before = self.optimizer.snapshot(tensors=staged is None, into=self._before)
        if staged is None:
            self.copied_bytes += self.optimizer.snapshot_bytes()
        elif not staged.masters:  # the weights in DRAM are the masters
            self._flat_before = self.flat.clone() if self._flat_before is None else self._flat_before.copy_(self.flat)
            self.copied_bytes += self.flat.nbytes
        self._step(grads, grads.times(speculative_factor), staged, preserve=True)

    def redo(self, grads: Grads, factor: Tensor | None) -> None:
        """Undo the speculative step, and make it again on gradients times `factor`, if that is given."""
        assert self.optimizer is not None and self._before is not None
        staged = None
        if self.file is not None and self.file.has_states:
            staged = self.file.views(pages(self.file.num_bytes))
            self.file.read(staged.flat)
            self._bind(staged)
            if self._flat_before is not None:
                self.flat.copy_(self._flat_before)
        self.optimizer.restore(self._before)
        if factor is not None:
            self._step(grads, grads.times(factor), staged)
        else:
            self._follow(staged)
        if self.file is not None and staged is not None:
            if factor is None:
                self.file.discard()
            else:
                self.file.write(staged.flat)

    def skip(self, staged: Staged | None) -> None:
        """Replaces `update` if there is no step. Weights that were not read from SSD follow the masters, to go back."""
        self._change(staged)
        if staged is not None:
            self._follow(staged)

    def commit(self) -> None:
        """End a step."""
        if self.file is not None:
            self.file.commit()

    def _step(self, grads: Grads, factor: Tensor | None, staged: Staged | None, preserve: bool = False) -> None:
        assert self.optimizer is not None
        self._change(staged)
        weights = self._followers(staged)
        self.optimizer.step(
            grads.tensors, factor=factor, weights=weights, preserve=preserve, part=grads.part, draw=self._draw
        )
        if staged is not None:  # weights that had no gradient go back whole, too
            self._follow(staged, but=grads.tensors)

    def _change(self, staged: Staged | None) -> None:
        """Change the masters as forward has changed the weights that it ran on."""
        if not self._changes:
            return
        masters = staged.masters if staged is not None and staged.masters else self.masters
        change_params(self._changes, masters)

    def _bind(self, staged: Staged | None) -> None:
        has_states = self.file is not None and self.file.has_states
        if staged is not None and has_states and self.optimizer is not None and staged.flat.data_ptr() != self._bound:
            self.optimizer.bind(staged.states, staged.masters or None)
            self._bound = staged.flat.data_ptr()

    def _followers(self, staged: Staged | None) -> dict[str, Tensor] | None:
        """Weights of another precision than their masters."""
        if staged is None:
            return self._own_followers
        return _followers(staged.weights or self.weights, staged.masters or self.masters)

    @cached_property
    def _own_followers(self) -> dict[str, Tensor] | None:
        return _followers(self.weights, self.masters)

    def _follow(self, staged: Staged | None, but: Container[str] = ()) -> None:
        masters = staged.masters if staged is not None and staged.masters else self.masters
        for name, weight in (self._followers(staged) or {}).items():
            if name not in but:
                weight.copy_(masters[name])

    # --- loading and saving, between steps

    def load(self, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Take over copies of these values. Raises `CheckpointError` for a name or shape that does not fit."""
        self._check(weights)
        if self.file is not None:
            flat, started = self._stage(), self.optimizer is not None and self.optimizer.started
            if started:
                self.file.read_all(flat)
            self.file.fill(flat, self._own_weights(weights), keep_states=started)
            self._write(flat)
        self._load_rest(weights, buffers)

    def _load_rest(self, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Load the tensors that are not on SSD."""
        own = self._own_weights(weights)
        for name in self.weights:
            given = own[name]
            self.weights[name].copy_(given)
            if name in self.masters and (self.file is None or name in self.staying):  # else masters are in the file
                self.masters[name].copy_(given)
        for number, runner in self.of_forms.items():
            runner.load_buffers({**buffers, **self._constants_of[number]})

    def _write(self, flat: Tensor) -> None:
        assert self.file is not None
        self.file.write_all(flat)

    def _check(self, weights: Mapping[str, Tensor]) -> None:
        for param in self.spec.params:
            if param.name not in weights:
                raise CheckpointError(f"{self.spec.name}: no value for the parameter {param.name!r}")
            if not isinstance(weights, Reads):  # else when it is read
                self._check_shape(param, weights[param.name])

    def _check_shape(self, param: ParamSpec, weight: Tensor) -> None:
        found, shape = list(weight.shape), list(param.whole.shape if param.name in self._divided else param.shape)
        if found != shape:
            raise CheckpointError(f"{self.spec.name}: {param.name} has shape {found}, not {shape}")

    def state(self) -> StagePart:
        if self.file is None:
            weights = {name: self.masters.get(name, weight) for name, weight in self.weights.items()}
            optimizer = None if self.optimizer is None else self.optimizer.state_dict()
            return StagePart(weights, self._buffers(), optimizer)
        flat = self._stage()
        self.file.read_all(flat)
        staged = self.file.views(flat)
        self._bind(staged)
        weights = {**self.weights, **staged.weights, **staged.masters}
        weights |= {name: self.masters[name] for name in self.staying}
        optimizer = None if self.optimizer is None else self.optimizer.state_dict()
        if optimizer is not None:
            rows = optimizer["states"].items()
            optimizer["states"] = {name: {key: t.clone() for key, t in row.items()} for name, row in rows}
        copies = {name: t.clone() if name not in self.weights else t for name, t in weights.items()}
        copies |= {name: t.clone() for name, t in staged.masters.items()}
        return StagePart(copies, self._buffers(), optimizer)

    def state_on_ssd(self, buffer: Tensor) -> StagePart:
        """As `state`, but `SsdTensor`s, which read into `buffer`, replace the tensors on SSD."""
        if self.file is None:
            return self.state()
        there = self.file.tensors_on_ssd(buffer)
        weights: dict[str, Any] = {**self.weights, **there["weights"], **there["masters"]}
        weights |= {name: self.masters[name] for name in self.staying}
        optimizer = None if self.optimizer is None else self.optimizer.state_dict()
        if optimizer is not None:
            optimizer["states"] = {
                name: {key: there["states"].get(name, {}).get(key, value) for key, value in row.items()}
                for name, row in optimizer["states"].items()
            }
        return StagePart(weights, self._buffers(), optimizer)

    def _buffers(self) -> dict[str, Tensor]:
        return {name: buffer for name, buffer in self.runner.buffers().items() if name not in self._constants}

    def load_state(self, state: StagePart) -> None:
        """The reverse of `state`, with copies. Tensors on SSD are not read: a checkpoint may have to repair them."""
        if self.optimizer is None or state.optimizer is None:
            self.load(state.weights, state.buffers)
        elif self.file is None or not self.file.has_states:
            self.load(state.weights, state.buffers)
            self.optimizer.load_state_dict(self._own_part(state.optimizer))
        else:
            self._check(state.weights)
            flat = self._stage()
            self.file.fill(flat, self._own_weights(state.weights), keep_states=False)
            self._bind(self.file.views(flat))
            self.optimizer.load_state_dict(self._own_part(state.optimizer))
            self._write(flat)
            self._load_rest(state.weights, state.buffers)

    def _own(self, name: str, whole: Tensor) -> Tensor:
        """This member's piece of a parameter or state."""
        param = self._divided.get(name)
        if param is None or tuple(whole.shape) != param.whole.shape:
            return whole
        return member_part(whole, param, self.member)

    def _own_weights(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """This member's and this shard's pieces of whole weights, each made when it is asked for."""
        flat, params = self.flat_stage, {param.name: param for param in self.spec.params}

        def piece(name: str) -> Tensor:
            whole = weights[name]
            self._check_shape(params[name], whole)
            own = self._own(name, whole)
            return own if flat is None else flat.piece_of(name, own)

        return Reads(weights, piece)

    def _own_part(self, optimizer: dict[str, Any]) -> dict[str, Any]:
        """This member's and this shard's pieces of whole states, those of a parameter when they are asked for."""
        flat, states = self.flat_stage, optimizer["states"]
        shapes = {param.name: param.shape for param in self.spec.params}

        def piece(name: str, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            own = self._own(name, value)
            return flat.piece_of(name, own) if flat is not None and tuple(own.shape) == shapes[name] else own

        own = Reads(states, lambda name: {key: piece(name, value) for key, value in states[name].items()})
        return {**optimizer, "states": own}


def _followers(weights: Mapping[str, Tensor], masters: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    found = {name: weights[name] for name, master in masters.items() if master is not weights[name]}
    return found or None


def member_params(spec: StageSpec) -> dict[str, ParamSpec]:
    """The parameters of a stage of which each member of a team has a part, by name."""
    return {param.name: param for param in spec.params if isinstance(param.part, TeamPart)}


def join_members(states: Sequence[StagePart], spec: StageSpec) -> StagePart:
    """One stage's state, put together from those of all members of a team, in order; what is no part is the first's."""
    first, params = states[0], member_params(spec)
    weights = dict(first.weights)
    for name, param in params.items():
        weights[name] = whole_of_members([state.weights[name] for state in states], param)
    if first.optimizer is None:
        return StagePart(weights, first.buffers, None)
    rows = dict(first.optimizer["states"])
    for name in rows.keys() & params.keys():
        rows[name] = {
            key: whole_of_members([s.optimizer["states"][name][key] for s in states if s.optimizer], params[name])
            if value.shape == first.weights[name].shape
            else value
            for key, value in rows[name].items()
        }
    return StagePart(weights, first.buffers, {**first.optimizer, "states": rows})


def join_shards(states: Sequence[StagePart], spec: StageSpec) -> StagePart:
    """One stage's state, joined from those of all its shards in the order of their pieces."""
    first = states[0]
    weights = {p.name: whole_of([state.weights[p.name] for state in states], p.shape) for p in spec.params}
    if first.optimizer is None:
        return StagePart(weights, first.buffers, None)
    shapes = {param.name: param.shape for param in spec.params}
    rows: dict[str, dict[str, Tensor]] = {}
    for name, row in first.optimizer["states"].items():
        own = first.weights[name].shape
        rows[name] = {
            key: whole_of([s.optimizer["states"][name][key] for s in states if s.optimizer], shapes[name])
            if value.shape == own
            else value
            for key, value in row.items()
        }
    return StagePart(weights, first.buffers, {**first.optimizer, "states": rows})
