"""The arguments of a function in a generated file."""

from __future__ import annotations

import ast

from .names import refuse


def check_signature(function: ast.FunctionDef, names: tuple[str, ...], exact: bool) -> None:
    """Refuse a function with anything but plain arguments, which are `names` or, unless `exact`, begin with these."""
    arguments = function.args
    found = tuple(argument.arg for argument in arguments.args)
    more = (
        function.decorator_list, function.returns, getattr(function, "type_params", None), arguments.posonlyargs,
        arguments.vararg, arguments.kwonlyargs, arguments.kw_defaults, arguments.kwarg, arguments.defaults,
        [argument for argument in arguments.args if argument.annotation is not None],
    )  # fmt: skip
    if any(more):
        refuse(function, f"def {function.name}: it has no decorators, defaults or annotations")
    if (found if exact else found[: len(names)]) != names or len(set(found)) < len(found):
        refuse(function, f"def {function.name} takes ({', '.join(names)}{'' if exact else ', ...'})", beyond=False)
