"""The record of an op, the type of a value, and the work that an op stands for.

A record holds the op's name, the streams it may occupy, its inference (operand types to result types; raises on bad
operands), its work (how much of which resource), and traits: what everyone else asks about an op, so that nobody lists
ops by name. The signature of `infer` is the op's signature. All three runtimes implement exactly these names.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..machine.call_mix import NO_CALLS, CallMix
from ..names import BACKWARD_INPUT, BACKWARD_WEIGHT, DEVICE, EVERYWHERE, LANE_GROUPS
from ..stages.interface import Interface
from ..stages.stage import StageSpec, TensorSpec


@dataclass(frozen=True)
class Value:
    """The type of one value: what it is, how many bytes, and in which memory it lives.

    `owned` is False for a value that stays across steps (resident weights); no program frees it. `group` names the
    devices over which weights or gradients are spread; the value is then one member's piece. `classes` are the classes
    of saved tensors that a forward kept, if it did not keep everything. `part` is "own" or "shared" where gradients of
    parameters that stages share are a value of their own. `spread` is the group over which whole weights were gathered,
    or whole gradients will be scattered: both are laid out as the shards are, one after the other.
    """

    # tensor | weights | part or shard (of weights) | kept | grads | norm | states (optimizer states and fp32 masters of
    # a stage) | all (its weights, masters and states)
    kind: str
    bytes: int
    memory: str = DEVICE
    shape: tuple[int, ...] = ()
    dtype: str = ""
    stage: str = ""
    requires_grad: bool = False
    owned: bool = True
    group: str = ""
    classes: tuple[str, ...] = ()
    part: str = ""
    spread: str = ""


@dataclass(frozen=True)
class Work:
    """The resources that one op occupies: a stream, and an amount of exactly one resource.

    `flops` and `traffic_bytes` for computation, `moved_bytes` with `source` and `target` for transfers ("device",
    "dram", "ssd" or "device3"), `params` for the optimizer, `launches` torch calls. An update that may be undone first
    copies `copied_bytes` inside their memory. `workspace_bytes` of `workspace_memory` are held while the op runs. `tag`
    and `peer` match a send with its receive. `group` is that of a collective, whose `moved_bytes` are those of the
    whole value; this goes round the ring of members `rounds` times, after each member has moved `traffic_bytes` inside
    its own memory. A `hierarchical` collective runs once between
    hosts, among the members at the same place on each, and once inside each host (MiCS 3.3). With a `pattern`, the
    bytes are those of a member's value: PAIRS sends each member its equal part of it, RING_STEP all of it to the next.
    """

    stream: str
    flops: float = 0.0
    traffic_bytes: float = 0.0
    launches: int = 0
    moved_bytes: int = 0
    source: str = ""
    target: str = ""
    params: int = 0
    copied_bytes: int = 0
    workspace_bytes: int = 0
    workspace_memory: str = DEVICE
    peer: int = -1
    tag: str = ""
    group: str = ""
    rounds: int = 0
    hierarchical: bool = False
    pattern: str = ""
    seconds: tuple[tuple[str, float], ...] = ()  # of computation, by device, where it was measured
    mix: CallMix = NO_CALLS  # the calls at whose average rates `flops` and `traffic_bytes` run


@dataclass(frozen=True)
class Context:
    """The tables in which an op's names are looked up."""

    interface: Interface
    device: int

    def stage(self, name: str) -> StageSpec:
        if name not in self.interface.stages:
            raise ValueError(f"no stage {name!r}; there are {', '.join(self.interface.stages)}")
        return self.interface.stages[name]

    def group(self, name: str) -> list[tuple[str, str]]:
        """This device's members of a group: (stage, parameter)."""
        if self.interface.lanes and name in LANE_GROUPS:
            return [("", "")]
        if name not in self.interface.groups:
            raise ValueError(f"no group {name!r}; there are {', '.join(self.interface.groups) or 'none'}")
        found = [(stage, param) for device, stage, param in self.interface.groups[name] if device == self.device]
        if not found:
            raise ValueError(f"device {self.device} has no member in group {name!r}")
        return found


@dataclass(frozen=True, eq=False)
class Op:
    """A record of the instruction set. Instances are the targets of a program's graph nodes.

    The traits, beside `streams`, which is empty for an op that takes no time:
    - `donates`: the operands whose memory the op takes over.
    - `allowed_in`: the functions that may hold the op.
    - `parts`: the parts of a stage's work on one micro-batch that the op does; its first operands are then the stage
      and its weights.
    - `passes_on`: the op moves or adds up its first operand, so the result is of the same micro-batch.
    - `prepares`: the op brings operands of the computation that comes after it in the text.
    - `transfers`: the op moves a value over links; a receive does not, as its send does.
    - `meets`: a call waits for other devices: for `Work.peer` (PEER), or for the members of `Work.group` (GROUP).
    - `persists_in`: the memory of the persistent state that the op names, such as "stage1.weights".
    - `updates`: the operand that names the stage whose persistent state the op changes.
    - `result_in_arena`: the result may have a place in the arena of its memory.
    - `workspace_in_arena`: the workspace has a place in the device's arena.
    """

    name: str
    streams: tuple[str, ...]
    infer: Callable[..., Any]
    work: Callable[..., Work]
    donates: tuple[str, ...] = ()
    allowed_in: tuple[str, ...] = EVERYWHERE
    parts: tuple[str, ...] = ()
    passes_on: bool = False
    prepares: bool = False
    transfers: bool = False
    meets: str = ""
    persists_in: str = ""
    updates: str = ""
    result_in_arena: bool = False
    workspace_in_arena: bool = False
    paper: str = ""
    signature: inspect.Signature = field(init=False)

    def __post_init__(self) -> None:
        own = inspect.signature(self.infer)
        object.__setattr__(self, "signature", own.replace(parameters=list(own.parameters.values())[1:]))
        object.__setattr__(self, "__name__", self.name)
        object.__setattr__(self, "__qualname__", self.name)
        object.__setattr__(self, "__module__", __package__)  # where a graph finds it

    @property
    def takes_kept(self) -> bool:
        """Whether the op takes what a forward kept."""
        return BACKWARD_INPUT in self.parts

    @property
    def gives_gradients(self) -> bool:
        """Whether the op computes gradients of a stage's parameters."""
        return BACKWARD_WEIGHT in self.parts

    @property
    def is_backward(self) -> bool:
        """Whether the op is a backward, or one half of it."""
        return self.takes_kept or self.gives_gradients

    @functools.cached_property
    def _operands(self) -> tuple[list[str], str, dict[str, Any]]:
        """The names of operands by position, that of all further ones ("" if there are none), and the defaults."""
        parameters = self.signature.parameters.values()
        places = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        return places, rest, {rest: (), **defaults} if rest else defaults

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Operands and fields by name, in the signature's order, defaults filled in. Raises `TypeError` where they are
        not the signature's."""
        places, rest, defaults = self._operands
        found = defaults | dict(zip(places, args)) | kwargs
        if rest:
            found[rest] = args[len(places) :]
        twice = rest in kwargs or any(name in kwargs for name in places[: len(args)])
        if twice or found.keys() != self.signature.parameters.keys() or (len(args) > len(places) and not rest):
            self.signature.bind(*args, **kwargs)  # says what is wrong
        return {name: found[name] for name in self.signature.parameters}

    def operand(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operand of a call that `bind` has stored under the signature's name."""
        places, rest, defaults = self._operands
        if name == rest:
            return args[len(places) :]
        at = places.index(name)
        return args[at] if at < len(args) else kwargs.get(name, defaults.get(name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"op {self.name!r} is a record; a runtime executes it")

    def __repr__(self) -> str:
        return f"ops.{self.name}"


def want(value: Any, kind: str, what: str, memory: str | None = None) -> Value:
    if not isinstance(value, Value) or value.kind != kind:
        raise ValueError(f"{what} must be {kind}, found {value.kind if isinstance(value, Value) else value!r}")
    if memory is not None and value.memory != memory:
        raise ValueError(f"{what} must be in {memory}, it is in {value.memory}")
    return value


def tensor(spec: TensorSpec, requires_grad: bool | None = None) -> Value:
    grad = spec.requires_grad if requires_grad is None else requires_grad
    return Value("tensor", spec.bytes, DEVICE, spec.shape, spec.dtype, requires_grad=grad)


def match(value: Any, spec: TensorSpec, what: str) -> None:
    want(value, "tensor", what, DEVICE)
    if (value.shape, value.dtype) != (spec.shape, spec.dtype):
        raise ValueError(f"{what} is {spec.dtype}{list(spec.shape)}, found {value.dtype}{list(value.shape)}")
