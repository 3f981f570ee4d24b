"""Values that no file holds: parameters of a new head, and buffers that a model computes for itself.

A model on the meta device has names and shapes only. The values that its constructor would have set are recomputed by
running the model's own initialisers (`reset_parameters`, and `_init_weights` of Hugging Face style models) on one
tensor at a time, in a copy of the model that is otherwise on meta. Values that the initialisers leave untouched come
from constructing the owning module again, if its arguments are known for certain. Each value depends only on the seed
and its name, so all stages, devices and processes get the same values.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...ir.errors import PlanError
from ...ir.units import format_bytes
from ..model_names import meta_twin

_MAX_REBUILT_BYTES = 1 << 30


class FreshValues:
    """Initial values of a model's parameters and buffers. The model itself does not change and may be on meta."""

    def __init__(self, model: nn.Module, seed: int = 0):
        self._model = model
        self._seed = seed
        self._copy: nn.Module | None = None

    def value(self, name: str) -> Tensor:
        """Return a new CPU tensor with the initial value of the parameter or buffer `name`.

        Raises `PlanError` if neither an initialiser nor a second construction of its module gives the value.
        """
        first = self._initialise(name, 0)
        if first is not None and _is_complete(first):
            # Integers have no NaN to mark untouched elements, so a second run with another filling must agree.
            if first.is_floating_point() or first.is_complex():
                return first
            second = self._initialise(name, 1)
            if second is not None and torch.equal(first, second):
                return first
        return self._rebuilt(name)

    def _initialise(self, name: str, filling: int) -> Tensor | None:
        """Run the initialisers of the owning module and the modules around it on a filled tensor, and return it."""
        skeleton = self._skeleton()
        path, _, leaf = name.rpartition(".")
        owner = skeleton.get_submodule(path)
        tensors = owner._parameters if leaf in owner._parameters else owner._buffers
        # A buffer may be computed from other buffers of its module, so all of them get memory.
        names = [leaf] if tensors is owner._parameters else [n for n, t in tensors.items() if t is not None]
        before = {n: tensors[n] for n in names}
        for n in names:
            tensors[n] = _filled_tensor(before[n], filling)  # type: ignore[assignment]
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(_seed_of(self._seed, name))
                if not _initialise_adapter(skeleton, name):
                    _run_initialisers(_chain(skeleton, path))
            result = tensors[leaf]
            return None if result is None or result.is_meta else result.detach()
        except (NotImplementedError, RuntimeError):  # an initialiser that reads values which are on meta
            return None
        finally:
            tensors.update(before)  # type: ignore[arg-type]

    def _rebuilt(self, name: str) -> Tensor:
        """Return the value that `name` has in a second construction, on CPU, of its owning module."""
        path, _, leaf = name.rpartition(".")
        owner = self._model.get_submodule(path)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed_of(self._seed, name))
            twin = _construct_again(owner, name)
        tensor: Tensor = getattr(twin, leaf)
        return tensor.detach().clone()

    def _skeleton(self) -> nn.Module:
        """A copy of the model with all tensors on meta, made at the first call."""
        if self._copy is None:
            self._copy = meta_twin(self._model)
        return self._copy


def _chain(root: nn.Module, path: str) -> list[nn.Module]:
    """The module at `path` and the modules around it, innermost first."""
    parts = path.split(".") if path else []
    return [root.get_submodule(".".join(parts[:depth])) for depth in range(len(parts), -1, -1)]


def _initialise_adapter(root: nn.Module, name: str) -> bool:
    """Initialise a tensor of an adapter as PEFT does, which knows nothing of the model's own initialisers. False for
    other tensors. Raises `PlanError` for adapters that begin with anything but numbers of their own."""
    parts = name.split(".")
    places = (i for i in range(len(parts)) if hasattr(_submodule(root, parts[:i]), "adapter_layer_names"))
    depth = max(places, default=None)  # the innermost: the adapter of a second parameter wraps that of the first
    if depth is None or parts[depth] in ("base_layer", "original_module", "modules_to_save"):
        return False
    tuner: Any = _submodule(root, parts[:depth])
    adapter = parts[depth + 1] if len(parts) > depth + 1 else ""
    configs = (getattr(module, "peft_config", None) for module in _chain(root, ".".join(parts[:depth])))
    config = next((found[adapter] for found in configs if isinstance(found, dict) and adapter in found), None)
    how = getattr(config, "init_lora_weights", None)
    reset = getattr(tuner, "reset_lora_parameters", None)
    if reset is None or len(inspect.signature(reset).parameters) < 2 or how not in (True, False, "gaussian"):
        raise _unknown(name, f"PEFT initialises it by more than a formula ({type(tuner).__name__}, {how!r})")
    owner = _submodule(root, parts[:-1])
    if isinstance(owner, nn.Linear):
        owner.reset_parameters()
    reset(adapter, how)
    return True


def _submodule(root: nn.Module, parts: list[str]) -> nn.Module:
    return root.get_submodule(".".join(parts))


def _run_initialisers(chain: list[nn.Module]) -> None:
    """Initialise from the inside out, as construction does: by a module's reset, then its model's `_init_weights`."""
    for depth, module in enumerate(chain):
        model = next((m for m in chain[depth:] if callable(getattr(m, "_init_weights", None))), None)
        if depth == 0 or model is None:
            for method in ("reset_parameters", "_reset_parameters"):
                if callable(getattr(module, method, None)):
                    getattr(module, method)()
        if model is not None:
            model._init_weights(module)  # type: ignore[operator]


def _filled_tensor(tensor: Tensor | None, filling: int) -> Tensor:
    """A CPU tensor of the same shape and dtype, full of NaN, or for integers of `filling` (0 or 1)."""
    assert tensor is not None
    value = float("nan") if tensor.is_floating_point() or tensor.is_complex() else filling
    full = torch.full(tensor.shape, value, dtype=tensor.dtype, device="cpu")
    return nn.Parameter(full, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else full


def _is_complete(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) or not bool(tensor.isnan().any())


def _construct_again(owner: nn.Module, name: str) -> nn.Module:
    """Construct `owner` again on CPU. It must keep every constructor argument under the argument's name."""
    held_bytes = sum(t.numel() * t.itemsize for t in (*owner.parameters(), *owner.buffers()))
    if held_bytes > _MAX_REBUILT_BYTES:
        raise _unknown(name, f"its module is too large to construct again ({format_bytes(held_bytes)})")
    try:
        twin = type(owner)(**dict(_arguments(owner, name))).to("cpu")
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise _unknown(name, f"{type(owner).__name__} cannot be constructed again ({error})") from error
    if _shape(owner) != _shape(twin) or _settings(owner) != _settings(twin):
        raise _unknown(name, f"a second {type(owner).__name__} of the arguments that it keeps differs from it")
    return twin


def _arguments(owner: nn.Module, name: str) -> Iterator[tuple[str, object]]:
    parameters = list(inspect.signature(type(owner).__init__).parameters.values())[1:]
    for parameter in parameters:
        kept = vars(owner).get(parameter.name, inspect.Parameter.empty)
        if parameter.kind is parameter.POSITIONAL_ONLY or parameter.kind is parameter.VAR_POSITIONAL:
            raise _unknown(name, f"{type(owner).__name__} takes arguments by position")
        if kept is not inspect.Parameter.empty:
            yield parameter.name, kept
        elif parameter.name not in ("device", "dtype") and parameter.kind is not parameter.VAR_KEYWORD:
            raise _unknown(name, f"{type(owner).__name__} does not keep its argument {parameter.name!r}")


def _shape(module: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors}


def _settings(module: nn.Module) -> dict[str, object]:
    return {k: v for k, v in vars(module).items() if isinstance(v, (int, float, str, tuple)) and k != "training"}


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big")


def _unknown(name: str, why: str) -> PlanError:
    return PlanError(
        f"model: {name!r} is on the meta device and no `reset_parameters` of its module and no "
        f"`_init_weights` of the model sets it, and {why}. Construct the model on CPU, save this tensor with the "
        "weights, or set it in a `reset_parameters` of its module."
    )
