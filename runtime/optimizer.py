"""The optimizer: what a user asked for as plain data, and its part for one stage.

An `OptimizerSpec` travels in plans and to workers as JSON; each stage has a `StageOptimizer` of its own on that stage's
fp32 parameters, which is the same as one optimizer over all of them, for optimizers that treat each parameter alone.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .errors import CheckpointError, PlanError

MACHINE_KEYS = ("params", "fused", "foreach", "capturable", "differentiable")  # of a param group: not saved
TINY = (64, 64)  # large enough that factored and per-tensor states do not count as states per parameter
FUNCTION = "function:"  # how a keyword argument that is an importable function is written down


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer class and its learning rate schedule by import path ("torch.optim:AdamW") and keyword arguments."""

    path: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    scheduler_path: str | None = None
    scheduler_kwargs: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def from_callable(optimizer: Any, lr_scheduler: Any = None) -> OptimizerSpec:
        """From a class or a `partial` of one with keyword arguments; `lr_scheduler` takes the optimizer first.

        Raises `PlanError` for what cannot be imported by a worker (a lambda, a class in the script itself), for
        arguments that are no plain data, and for optimizers that cannot step on gradients alone.
        """
        example = "optimizer=partial(torch.optim.AdamW, lr=5e-5)"
        path, kwargs = _path_and_kwargs(optimizer, "optimizer", example)
        cls = _resolve(path)
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            raise PlanError(f"optimizer: {path} is no torch.optim.Optimizer class; pass one, like {example}")
        spec = OptimizerSpec(path, kwargs)
        if lr_scheduler is not None:
            example = "lr_scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=1000)"
            spec = OptimizerSpec(path, kwargs, *_path_and_kwargs(lr_scheduler, "lr_scheduler", example))
        spec._try()
        return spec

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> OptimizerSpec:
        raw = json.loads(text)
        for key in ("kwargs", "scheduler_kwargs"):
            raw[key] = {name: _tupled(value) for name, value in raw[key].items()}
        return OptimizerSpec(**raw)

    def build(self, params: Iterable[Tensor]) -> torch.optim.Optimizer:
        """The torch optimizer on these tensors, all on one device.

        The fused kernels are used where the class has them for that device and neither `fused` nor `foreach` is given.
        """
        cls, kwargs = _resolve(self.path), _loaded(self.kwargs)
        params = list(params)
        if params and "fused" not in kwargs and "foreach" not in kwargs and self._has_fused(params[0]):
            kwargs["fused"] = True
        return cls(params, **kwargs)

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
        if self.scheduler_path is None:
            return None
        return _resolve(self.scheduler_path)(optimizer, **_loaded(self.scheduler_kwargs))

    def state_bytes_per_param(self) -> float:
        """Bytes of optimizer state for each trained fp32 parameter, found by stepping a small one."""
        param = _tiny(TINY)
        optimizer = self.build([param])
        optimizer.step()
        states = (s for s in optimizer.state[param].values() if isinstance(s, Tensor) and s.numel() > 1)
        return sum(s.numel() * s.element_size() for s in states) / param.numel()

    def is_elementwise(self) -> bool:
        """Whether two steps update each element by its own gradients alone, so that a parameter may be updated in
        pieces: tried on a matrix, whole and as two rows."""
        made = torch.Generator().manual_seed(0)
        whole = nn.Parameter(torch.randn(4, 6, generator=made))
        pieces = [nn.Parameter(piece.detach().clone()) for piece in whole.flatten().split(12)]
        optimizers = [self.build([whole]), self.build(pieces)]
        for _ in range(2):
            whole.grad = torch.randn(4, 6, generator=made)
            for piece, grad in zip(pieces, whole.grad.flatten().split(12)):
                piece.grad = grad.clone()
            for optimizer in optimizers:
                optimizer.step()
        return torch.allclose(torch.cat(list(pieces)), whole.flatten(), rtol=1e-5, atol=1e-7)

    def _has_fused(self, like: Tensor) -> bool:
        cls = _resolve(self.path)
        if "fused" not in inspect.signature(cls).parameters:
            return False
        param = _tiny((2,), like.device, like.dtype)
        try:
            cls([param], **_loaded(self.kwargs), fused=True).step()
        except (RuntimeError, TypeError, ValueError):  # torch says in one of these that this device has none
            return False
        return True

    def _try(self) -> None:
        """Step a small parameter once. Raises `PlanError` with what torch says where that fails."""
        try:
            optimizer = self.build([_tiny(TINY)])
            scheduler = self.build_scheduler(optimizer)
            optimizer.step()
        except (TypeError, ValueError, RuntimeError) as error:
            hint = "; pass one that needs only gradients, like torch.optim.AdamW" if "closure" in str(error) else ""
            raise PlanError(f"optimizer {self.path} does not work with {self.kwargs}: {error}{hint}") from error
        if scheduler is not None and "metrics" in inspect.signature(scheduler.step).parameters:
            raise PlanError(
                f"lr_scheduler {self.scheduler_path} needs a metric at every step; pass one that counts steps, "
                "like torch.optim.lr_scheduler.CosineAnnealingLR"
            )


class StageOptimizer:
    """Updates one stage's parameters in place, and its learning rate once a step."""

    def __init__(self, spec: OptimizerSpec, params: Mapping[str, Tensor]):
        self.params = {name: nn.Parameter(p.detach()) for name, p in params.items()}  # shares their memory
        self.optimizer = spec.build(self.params.values()) if self.params else None
        self.scheduler = spec.build_scheduler(self.optimizer) if self.optimizer else None

    @property
    def lr(self) -> float | None:
        """The learning rate of the next step; None for a stage without trained parameters."""
        return float(self.optimizer.param_groups[0]["lr"]) if self.optimizer else None

    def step(self, grads: Mapping[str, Tensor]) -> None:
        """One step on `grads`, converted to the parameters' dtype; a parameter without a gradient stays as it is."""
        if self.optimizer is None:
            return
        for name, param in self.params.items():
            grad = grads.get(name)
            param.grad = None if grad is None else grad.to(param.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            self.scheduler.step()

    def state_bytes(self) -> int:
        """Bytes of the states that exist now: none before the first step, for most optimizers."""
        states = self.optimizer.state.values() if self.optimizer else ()
        return sum(s.numel() * s.element_size() for row in states for s in row.values() if isinstance(s, Tensor))

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes back: `states` is parameter name to {state name: tensor}, not copied.

        The rest is plain data: `scalars` per parameter, and, equal for all stages, `group` (learning rate and the like)
        and `scheduler`.
        """
        states: dict[str, dict[str, Tensor]] = {}
        scalars: dict[str, dict[str, Any]] = {}
        if self.optimizer is None:
            return {"states": states, "scalars": scalars, "group": {}, "scheduler": {}}
        for name, param in self.params.items():
            for key, value in self.optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor):
                    states.setdefault(name, {})[key] = value
                elif value is not None:
                    scalars.setdefault(name, {})[key] = value
        group = {k: _plain(v, k) for k, v in self.optimizer.param_groups[0].items() if k not in MACHINE_KEYS}
        scheduler = _plain(self.scheduler.state_dict(), "lr_scheduler") if self.scheduler else {}
        return {"states": states, "scalars": scalars, "group": group, "scheduler": scheduler}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over copies of the states of this stage's parameters; `state` may hold those of others, too.

        Raises `CheckpointError` where a state's shape is not its parameter's optimizer's.
        """
        if self.optimizer is None:
            return
        rows = {}
        for i, (name, param) in enumerate(self.params.items()):
            row = {**state["states"].get(name, {}), **state["scalars"].get(name, {})}
            for key, value in row.items():
                if isinstance(value, Tensor):
                    if value.numel() == param.numel() != 1 and value.shape != param.shape:
                        found, want = list(value.shape), list(param.shape)
                        raise CheckpointError(f"optimizer state {key!r} of {name} has shape {found}, not {want}")
                    row[key] = value.detach().clone()
            if row:
                rows[i] = row
        groups = self.optimizer.state_dict()["param_groups"]
        for group in groups:
            group.update({key: _tupled(value) for key, value in state["group"].items()})
        self.optimizer.load_state_dict({"state": rows, "param_groups": groups})
        if self.scheduler is not None and state["scheduler"]:
            self.scheduler.load_state_dict(dict(state["scheduler"]))


def _tiny(shape: tuple[int, ...], device: Any = "cpu", dtype: torch.dtype = torch.float32) -> nn.Parameter:
    param = nn.Parameter(torch.ones(shape, device=device, dtype=dtype))
    param.grad = torch.ones_like(param)
    return param


def _path_and_kwargs(given: Any, what: str, example: str) -> tuple[str, dict[str, Any]]:
    if isinstance(given, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
        raise PlanError(f"{what}: found a {type(given).__name__}, of one process; pass a class: {example}")
    positional: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(given, partial):
        given, positional, kwargs = given.func, given.args, given.keywords
    if positional:
        raise PlanError(f"{what}: the partial has positional arguments {positional!r}; pass them by keyword: {example}")
    written = {name: _written(value, f"{what} argument {name!r}", example) for name, value in kwargs.items()}
    return _import_path(given, what, example), written


def _import_path(given: Any, what: str, example: str) -> str:
    """ "module:name" of a class or function that any process can import. Raises `PlanError` for others."""
    module, name = getattr(given, "__module__", None), getattr(given, "__qualname__", None)
    if not callable(given) or module is None or name is None:
        raise PlanError(f"{what}: found {given!r}; pass a class or a functools.partial of one: {example}")
    if name.endswith("<lambda>"):
        raise PlanError(f"{what}: a lambda cannot be sent to a worker; pass a function of a module, or {example}")
    if "<locals>" in name or module == "__main__":
        where = "a function" if "<locals>" in name else "the script itself"
        raise PlanError(
            f"{what}: {name} is defined in {where}, where a worker cannot import it; "
            f"move it to a module of its own, or pass {example}"
        )
    if module.startswith("torch.optim.") and getattr(torch.optim, name, None) is given:
        module = "torch.optim"  # the public place: torch.optim.adamw and its like come and go
    return f"{module}:{name}"


def _resolve(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise PlanError(f"cannot import {name!r} from module {module!r}: {error}") from error
    return found


def _written(value: Any, what: str, example: str) -> Any:
    """The value as plain data; importable functions become text."""
    if isinstance(value, Tensor):
        raise PlanError(f"{what} is a tensor; pass a number, like {example}")
    if isinstance(value, list | tuple):
        return tuple(_written(v, what, example) for v in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if callable(value):
        return FUNCTION + _import_path(value, what, example)
    raise PlanError(f"{what} is {value!r}; only numbers, texts, lists of them and importable functions are allowed")


def _loaded(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    def load(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(load(v) for v in value)
        if isinstance(value, str) and value.startswith(FUNCTION):
            return _resolve(value.removeprefix(FUNCTION))
        return value

    return {name: load(value) for name, value in kwargs.items()}


def _tupled(value: Any) -> Any:
    """JSON's lists as the tuples that they were."""
    return tuple(_tupled(v) for v in value) if isinstance(value, list) else value


def _plain(value: Any, what: str) -> Any:
    """The value if JSON can hold it; tensors of one element become numbers.

    A dict with other keys than texts is left out: it comes from a constructor (the milestones of MultiStepLR).
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if not (isinstance(v, dict) and any(not isinstance(i, str) for i in v))}
        return {k: _plain(v, f"{what}.{k}") for k, v in kept.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, what) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(f"{what} of the optimizer is {value!r}, which cannot be saved as plain data")
