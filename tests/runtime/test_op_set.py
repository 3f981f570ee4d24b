"""No runtime lacks an op: the same names, and parameters that any program's call fits."""

from __future__ import annotations

import inspect

import pytest

from penstock.runtime import ops, reference

RUNTIMES = [reference.ReferenceRuntime]


@pytest.mark.parametrize("op", ops.ALL.values(), ids=ops.ALL)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_every_op_is_a_method_with_the_ops_signature(runtime: type, op: ops.Op) -> None:
    found = list(inspect.signature(getattr(runtime, op.name)).parameters.values())[1:]
    want = list(op.signature.parameters.values())
    assert [(p.name, p.kind, p.default) for p in found] == [(p.name, p.kind, p.default) for p in want]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_runtime_has_no_op_of_its_own(runtime: type) -> None:
    own = {name for name, member in inspect.getmembers(runtime, callable) if not name.startswith("_")}
    assert own == ops.ALL.keys()
