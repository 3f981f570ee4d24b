"""Parameter groups: which parameters of a model get which arguments of the optimizer, or an optimizer of their own.

The groups are in the user's order, and parameters that no group names come last, with the class's own arguments. So a
job trains like `cls([*param_groups, {"params": the rest}], **arguments)`, or like `cls(param_groups, **arguments)` if
nothing is left over. A group with an "optimizer" of its own trains like that optimizer on these parameters, beside the
other one. Lists with a value per group, as some learning rate schedules take them, have the same order.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from ...ir.errors import PlanError
from ..model_names import aliases_of, ties_of
from .importable import path_and_kwargs, write_value

EXAMPLE = 'param_groups=[{"params": ["*.bias", "*norm*"], "weight_decay": 0.0}]'
OPTIMIZER = "optimizer"  # the key of a group's own optimizer
KnownOptions = Callable[[str, Mapping[str, Any]], Collection[str]]  # of an optimizer's path and arguments


@dataclass(frozen=True)
class ParamGroup:
    """`names`: its parameters under every name that they have, also tied ones; None for all parameters that no other
    group names. `options`: the arguments of the optimizer that differ for this group. `path`, `kwargs`: the group's own
    optimizer and its arguments; without them it is the one of all groups."""

    names: tuple[str, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    path: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)


def make_groups(
    model: nn.Module, given: Sequence[Mapping[str, Any]], known: Collection[str], known_of: KnownOptions | None = None
) -> tuple[ParamGroup, ...]:
    """The groups that a user wrote: "params" is a list of the model's parameters, or of names or patterns of names
    ("*.bias", as in `fnmatch`), "optimizer" a class or a partial of one for this group alone; the other keys are
    options among `known`, or among what `known_of` finds for the group's own optimizer.

    Raises `PlanError` for a pattern that matches nothing, a tensor that is no parameter of the model, a parameter in
    two groups, an option that the optimizer does not have.
    """
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise PlanError(f"param_groups: found {type(given).__name__}; pass a list of dicts, like {EXAMPLE}")
    finder, owner, made = _Finder(model), dict[str, str](), []
    for index, group in enumerate(given):
        where = f"param_groups[{index}]"
        if not isinstance(group, Mapping) or "params" not in group:
            raise PlanError(f'{where}: found {group!r}; it must be a dict with "params", like {EXAMPLE}')
        found = finder.find(group["params"], where)
        for name in found:
            if name in owner:
                raise PlanError(f"{where}: {name} is in {owner[name]} already; a parameter can be in one group only")
            owner[name] = where
        names = tuple(alias for name in found for alias in finder.aliases.get(name, [name]))
        made.append(_make_group(names, group, known, known_of, where))
    if any(param.requires_grad and name not in owner for name, param in finder.params.items()):
        made.append(ParamGroup())
    return tuple(made)


def _make_group(
    names: tuple[str, ...],
    group: Mapping[str, Any],
    known: Collection[str],
    known_of: KnownOptions | None,
    where: str,
) -> ParamGroup:
    if OPTIMIZER not in group:
        return ParamGroup(names, _options(group, known, where))
    example = '{"params": ["*.mlp.*.weight"], "optimizer": partial(torch.optim.Muon, lr=0.02)}'
    path, kwargs = path_and_kwargs(group[OPTIMIZER], f"{where}: {OPTIMIZER}", example)
    known = known_of(path, kwargs) if known_of is not None else known
    return ParamGroup(names, _options(group, known, where), path, kwargs)


def _options(group: Mapping[str, Any], known: Collection[str], where: str) -> dict[str, Any]:
    options = {key: value for key, value in group.items() if key not in ("params", OPTIMIZER)}
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=3) or sorted(known)
            raise PlanError(f"{where}: the optimizer has no option {key!r}; it has {', '.join(near)}")
    return {key: write_value(value, f"{where} option {key!r}", EXAMPLE) for key, value in options.items()}


class _Finder:
    """Finds a model's parameters by tensor, name or pattern; `params` by their first names, `aliases` of tied ones."""

    def __init__(self, model: nn.Module):
        self.params = dict(model.named_parameters())
        self.names = {id(param): name for name, param in self.params.items()}
        self.ties = ties_of(model)
        self.aliases = aliases_of(self.ties)
        self.known = [*self.params, *(alias for alias, first in self.ties.items() if first in self.params)]

    def find(self, given: Any, where: str) -> list[str]:
        """The first names of the given parameters, in the order given, each once."""
        items = [given] if isinstance(given, str | Tensor) else given
        if not isinstance(items, Iterable):
            raise PlanError(f'{where}["params"]: found {given!r}; pass parameters of the model, or names of them')
        found: dict[str, None] = {}
        for item in items:
            if isinstance(item, tuple) and len(item) == 2:  # as of model.named_parameters()
                item = item[1]
            found.update(dict.fromkeys(self.matches(item, where)))
        return list(found)

    def matches(self, item: Any, where: str) -> list[str]:
        if isinstance(item, Tensor):
            if id(item) not in self.names:
                raise PlanError(
                    f'{where}["params"]: a tensor of shape {list(item.shape)} is no parameter of the model; pass '
                    f"parameters of the very model that is compiled, or names{self._with_shape(item)}"
                )
            return [self.names[id(item)]]
        if not isinstance(item, str):
            raise PlanError(f'{where}["params"]: found {item!r}; pass parameters of the model, or names of them')
        if item in self.known:
            return [self.ties.get(item, item)]
        found = [self.ties.get(name, name) for name in self.known if fnmatchcase(name, item)]
        if not found:
            near = difflib.get_close_matches(item.strip("*"), self.known, n=3, cutoff=0.3) or self.known[:3]
            raise PlanError(f'{where}["params"]: {item!r} matches no parameter; near are {", ".join(near)}')
        return found

    def _with_shape(self, like: Tensor) -> str:
        same = [name for name, param in self.params.items() if param.shape == like.shape]
        return f" (of that shape: {', '.join(same[:3])})" if same else f" like {next(iter(self.params), '')}"


def hidden_matrices(model: nn.Module) -> list[str]:
    """The names of a model's trained parameters of two dimensions, without those of embeddings and of the head: what
    torch.optim.Muon is for. The head is what `model.get_output_embeddings()` returns, or else the last module with a
    matrix. For `param_groups=[{"params": penstock.hidden_matrices(model), "optimizer": ...}]`.

    Raises `PlanError` for a model that has none.
    """
    outer, last = set[int](), list[nn.Parameter]()
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p.dim() == 2]
        if isinstance(module, nn.Embedding):
            outer.update(map(id, own))
        elif own and head is None:
            last = own
    outer.update(map(id, head.parameters() if isinstance(head, nn.Module) else last))
    found = [name for name, p in model.named_parameters() if p.requires_grad and p.dim() == 2 and id(p) not in outer]
    if not found:
        raise PlanError(
            f"hidden_matrices: {type(model).__name__} has no trained matrix beside embeddings and its last layer; name "
            'the parameters, like {"params": ["*.weight"], ...}'
        )
    return found
