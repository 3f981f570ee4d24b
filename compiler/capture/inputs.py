"""Example inputs to fake tensors, and a model's output to named results with the loss first.

In: the user's batch (dict, tuple or tensor; tensors real, fake, on meta, or shape descriptions) and output object.
Out: `TraceInputs` (the batch on fake tensors, placeholder names), the part of it that forward takes
(`forward_arguments`), and a dict of named output tensors.
"""

from __future__ import annotations

import builtins
import inspect
import keyword
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn

from ...graph.loss_terms import NUM_ITEMS
from ...ir.errors import CaptureError
from ...ir.names import identifier
from ...runtime.torch_names import FakeTensorMode, tree_map, tree_map_only
from ..packing.varying_inputs import UnreadLeaf
from .dynamic import DynamicDims, TracedSizes


@dataclass(frozen=True)
class SingleEntry:
    """A tensor without dimensions: forward gets the only entry of `tensor`, which the program is given."""

    tensor: torch.Tensor


@dataclass
class TraceInputs:
    """The user's batch on fake tensors, those without dimensions as `SingleEntry`s."""

    batch: Any = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # placeholder name -> fake tensor
    symbols: dict[str, Any] = field(default_factory=dict)
    leaves: dict[str, UnreadLeaf] = field(default_factory=dict)  # texts and numbers that nobody may have to read

    def take_entries(self) -> TraceInputs:
        """The inputs with the entry in place of each `SingleEntry`. Called while forward is recorded."""
        batch = tree_map(lambda x: x.tensor.reshape(()) if type(x) is SingleEntry else x, self.batch)
        return replace(self, batch=batch)

    def read_leaves(self) -> set[str]:
        """The texts and numbers of the batch that forward or the loss has read."""
        return {name for name, leaf in self.leaves.items() if leaf.is_read}

    def add_item_count(self, fake_mode: FakeTensorMode) -> None:
        """Add the input that holds `num_items_in_batch`: one number per micro-batch, like all inputs."""
        with fake_mode:
            self.tensors[NUM_ITEMS] = torch.empty(1, dtype=torch.int64)

    def item_count(self) -> dict[str, torch.Tensor]:
        """The argument of forward that is no part of the user's batch: the scalar of `NUM_ITEMS`, if it was added."""
        return {NUM_ITEMS: self.tensors[NUM_ITEMS][0]} if NUM_ITEMS in self.tensors else {}


def takes_item_count(model: nn.Module) -> bool:
    """Whether forward takes `num_items_in_batch`: by name, or as transformers' models take it among their `kwargs`."""
    parameters = inspect.signature(model.forward).parameters
    if NUM_ITEMS in parameters:
        return True
    if "labels" not in parameters or not any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__):
        return False
    accepts = getattr(model, "accepts_loss_kwargs", None)
    return any(p.kind == p.VAR_KEYWORD for p in parameters.values()) and accepts is not False


def fake_inputs(
    model: nn.Module,
    example_inputs: Any,
    fake_mode: FakeTensorMode,
    dynamic: DynamicDims | None,
    given: Collection[str] | None = None,
) -> TraceInputs:
    """Make the fake batch, with symbols for the sizes that are `dynamic`. `given`: the texts and numbers that stay as
    they are; None for all of them.

    Raises CaptureError for a batch without tensors, or names that collide once made legal.
    """
    made = TraceInputs()
    faker = _Faker(fake_mode, dynamic, made, given)
    if isinstance(example_inputs, Mapping) and not is_spec(example_inputs):
        made.batch = {str(key): faker.convert(str(key), value) for key, value in example_inputs.items()}
    elif isinstance(example_inputs, (tuple, list)):
        names = entry_names(model, len(example_inputs))
        made.batch = tuple(faker.convert(name, value) for name, value in zip(names, example_inputs))
    else:
        made.batch = faker.convert(entry_names(model, 1)[0], example_inputs)
    if not made.tensors:
        raise CaptureError(
            f"example_inputs holds no tensor (found {type(example_inputs).__name__}); pass a dict or tuple of tensors, "
            'or shapes such as {"input_ids": {"shape": [2, 128], "dtype": "int64"}}'
        )
    return made


class _Faker:
    """Turns each leaf of the batch into a fake tensor and names it."""

    def __init__(
        self, fake_mode: FakeTensorMode, dynamic: DynamicDims | None, made: TraceInputs, given: Collection[str] | None
    ):
        self.fake_mode, self.made, self.given = fake_mode, made, given
        self.sizes = None if dynamic is None else TracedSizes(dynamic, fake_mode, made.symbols)

    def convert(self, name: str, value: Any) -> Any:
        if is_spec(value) or is_tensor_like(value):
            return self._fake(input_name(name), value)
        if isinstance(value, Mapping):
            return {key: self.convert(f"{name}.{key}", item) for key, item in value.items()}
        if isinstance(value, (tuple, list)):
            return rebuilt(value, [self.convert(f"{name}.{i}", item) for i, item in enumerate(value)])
        name = input_name(name)
        if type(value) in (str, int, float) and self.given is not None and name not in self.given:
            return self.made.leaves.setdefault(name, UnreadLeaf(name, value))
        return value  # part of the program, not an input

    def _fake(self, name: str, value: Any) -> torch.Tensor | SingleEntry:
        if name in self.made.tensors:
            raise CaptureError(f"two inputs are both called {name!r} once made legal Python names: rename one")
        shape = tuple(value["shape"] if is_spec(value) else value.shape)
        dtype = _dtype(name, value.get("dtype", "float32") if is_spec(value) else value.dtype)
        sizes = shape or (1,) if self.sizes is None else self.sizes.shape(name, shape)
        with self.fake_mode:
            if shape and isinstance(value, torch.Tensor) and self.sizes is None and value.layout == torch.strided:
                fake = torch.empty_strided(sizes, value.stride(), dtype=dtype, device="cpu")
            else:
                fake = torch.empty(sizes, dtype=dtype, device="cpu")
        if isinstance(value, torch.Tensor) and value.requires_grad:
            fake.requires_grad_()
        self.made.tensors[name] = fake
        return fake if shape else SingleEntry(fake)


def repeat(micro_batch: Mapping[str, Any], count: int) -> dict[str, Any]:
    """A batch of `count` micro-batches that are all this one."""
    found: dict[str, Any] = tree_map_only(
        torch.Tensor, lambda x: torch.cat([x] * count) if x.dim() else x, dict(micro_batch)
    )
    return found


def rebuilt(like: Any, items: list[Any]) -> Any:
    """A list, tuple or named tuple of the type of `like` with these items."""
    return like._make(items) if hasattr(like, "_make") else type(like)(items)


def is_spec(value: Any) -> bool:
    """A shape description: {"shape": [2, 128], "dtype": "int64"}."""
    return (
        isinstance(value, Mapping)
        and "shape" in value
        and set(value) <= {"shape", "dtype"}
        and not isinstance(value["shape"], torch.Tensor)
    )


def is_tensor_like(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (
        hasattr(value, "shape") and hasattr(value, "dtype") and isinstance(value.shape, (tuple, list))
    )


def _dtype(name: str, dtype: Any) -> torch.dtype:
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise CaptureError(f'input {name!r}: unknown dtype {dtype!r}; use a torch dtype or its name, e.g. "int64"')
    return found


def input_name(name: str) -> str:
    """The legal name of an input, as nodes of torch.fx have it: that of "pixelValues" is "pixel_values"."""
    return legal_name(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())


def legal_name(name: str) -> str:
    """A Python name: "a.b" becomes "a_b"; no keyword or builtin ("input" becomes "input_"), no digit in front."""
    legal = identifier(name)
    if keyword.iskeyword(legal) or hasattr(builtins, legal):
        return f"{legal}_"
    return f"input_{legal}" if legal[:1].isdigit() else legal


def entry_names(model: nn.Module, count: int) -> list[str]:
    """Names of a tuple batch's entries: those of forward's positional parameters, then "batch_1" and so on."""
    names, many, _ = _positional(model)
    more = f"{many}_{{}}" if many else "batch_{}"
    return [*names, *(more.format(i - len(names) if many else i) for i in range(len(names), count))][:count]


def forward_arguments(
    model: nn.Module, batch: Any, has_loss_fn: bool, for_loss: Collection[str] = ()
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of forward: the whole batch, or with a loss function the entries that forward takes.

    A dict's entries go by name: to forward those that it names, or all but `for_loss` if it has `**kwargs`; others go
    to `loss_fn(output, batch)` alone. A tuple's go by place: a forward with N parameters gets the first N. Raises
    CaptureError where forward takes fewer entries and there is no loss function, or where it is unclear whether an
    entry is for an optional parameter.
    """
    if isinstance(batch, Mapping):
        parameters = inspect.signature(model.forward).parameters
        if has_loss_fn and any(key in parameters for key in batch):
            rest = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
            taken = {key for key in batch if key in parameters or (rest and key not in for_loss)}
            return (), {key: value for key, value in batch.items() if key in taken}
        return (), dict(batch)
    if not isinstance(batch, (tuple, list)):
        return (batch,), {}
    names, many, required = _positional(model)
    if has_loss_fn and len(batch) > required and len(names) > required:
        raise CaptureError(
            f"the batch has {len(batch)} entries and {type(model).__name__}.forward({', '.join(names)}) needs "
            f"{required} of them: it is open which of the others are for loss_fn alone; pass the batch as a dict"
        )
    if not many and len(batch) > len(names) and not has_loss_fn:
        raise CaptureError(
            f"example_inputs has {len(batch)} positional inputs, but {type(model).__name__}.forward takes {len(names)} "
            f"({', '.join(names)}); pass loss_fn(output, batch) if the others are for the loss"
        )
    return tuple(batch) if many else tuple(batch[: len(names)]), {}


def untaken_key(model: nn.Module, error: Exception, keys: Collection[str]) -> str | None:
    """The key, among those that forward got by `**kwargs`, that a module inside does not take, as this error says."""
    found = (
        re.search(r"got an unexpected keyword argument '(.*?)'", str(error)) if isinstance(error, TypeError) else None
    )
    key = "" if found is None else found[1]
    return key if key in keys and key not in inspect.signature(model.forward).parameters else None


def _positional(model: nn.Module) -> tuple[list[str], str, int]:
    """Forward's positional parameters, the name of its `*args` (or ""), and the number of those without a default."""
    parameters = inspect.signature(model.forward).parameters.values()
    fixed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    many = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), "")
    return [p.name for p in fixed], many, sum(p.default is p.empty for p in fixed)


def floating_as(dtype: torch.dtype | None, arguments: Any) -> Any:
    """The arguments of forward with floating tensors in another dtype; None leaves all as they are."""
    if dtype is None:
        return arguments
    return tree_map(lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, arguments)


def named_outputs(
    model: nn.Module, output: Any, inputs: TraceInputs, loss_fn: Callable[[Any, Any], Any] | None
) -> dict[str, torch.Tensor]:
    """The model's output tensors by name, "loss" first: `loss_fn(output, batch)`, `output.loss`, or a scalar output.

    Raises CaptureError when there is no scalar loss; it names the outputs that were found and says what to do.
    """
    found = _flatten_output("", output)
    if loss_fn is not None:
        loss = loss_fn(output, inputs.batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise CaptureError(f"loss_fn must return a tensor with one element; it returned {_describe(loss)}")
        found.pop("loss", None)
        found = {name: value for name, value in found.items() if value is not loss}
    elif "loss" in found:
        loss = found.pop("loss")
        if loss.numel() != 1:
            raise CaptureError(
                f"the model's loss must be one number, not {_describe(loss)}: average it, or pass loss_fn"
            )
    elif isinstance(output, torch.Tensor) and output.numel() == 1:
        return {"loss": output}
    else:
        raise CaptureError(_no_loss(model, found, inputs))
    return {"loss": loss, **found}


def _flatten_output(name: str, output: Any) -> dict[str, torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return {legal_name(name or "output"): output}
    if isinstance(output, Mapping):
        items = [(str(key), item) for key, item in output.items()]
    elif is_dataclass(output) and not isinstance(output, type):
        items = [(f.name, getattr(output, f.name)) for f in fields(output)]
    elif isinstance(output, (tuple, list)):
        names = getattr(output, "_fields", None) or [str(i) for i in range(len(output))]
        items = list(zip([n if name or not n.isdigit() else f"output_{n}" for n in names], output))
    else:
        return {}
    flat: dict[str, torch.Tensor] = {}
    for key, item in items:
        flat.update(_flatten_output(f"{name}_{key}" if name else key, item))
    return flat


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"


def _no_loss(model: nn.Module, found: dict[str, torch.Tensor], inputs: TraceInputs) -> str:
    names = ", ".join(f"{name} ({_describe(value)})" for name, value in found.items()) or "no tensor at all"
    message = f"{type(model).__name__} gave no loss to train on; its outputs are: {names}."
    given = inputs.batch.get("labels") if isinstance(inputs.batch, Mapping) else None
    if "labels" in inspect.signature(model.forward).parameters and given is None:
        return f'{message} Add "labels" to the batch, so that the model computes its loss, or pass loss_fn.'
    return f"{message} Return a scalar loss (as the output, output.loss or output['loss']), or pass loss_fn."
