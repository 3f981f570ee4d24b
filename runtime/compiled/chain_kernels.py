"""Kernels for the chains of pointwise calls of a stage, made and tried before any step: same results, no more memory?

In: a stage's chains (`functions.fuse`), as a run of it on fake tensors makes them. Out: kernels in `KERNELS`, one for
forward and one for backward of each kind of call, and for others why they run as written. The calls of a chain, and of
autograd's way back through it, are taken down on made-up values and given to a backend of torch.compile as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...ir.precision import Precision
from ..accelerator import begin_peak, peak_bytes, taken_bytes
from ..functions import linear_float8
from ..functions.chains import KERNELS, Chain, ChainKernels, backward_key, fuse, note_chains
from .block_trial import NO_ROOM, difference, draw_like
from .blocks import lacks_triton

_CHAINED = {fuse.__name__, linear_float8.__name__}  # functions that run chains
KernelCall = Callable[..., Sequence[Tensor]]


def has_chains(module: nn.Module) -> bool:
    """Whether a forward of a stage runs chains of calls."""
    codes = (getattr(type(part).forward, "__code__", None) for part in module.modules())
    return any(code is not None and not _CHAINED.isdisjoint(code.co_names) for code in codes)


def make_kernels(
    run: Callable[[], None], device: torch.device, precision: Precision, backend: str
) -> dict[str, str]:
    """Make kernels for the chains that `run` calls. Returns why some run as written, by their names."""
    if lacks_triton(device, backend):
        return {"every chain of calls": "Python has no Triton"}
    with note_chains() as calls:
        run()
    reasons: dict[str, str] = {}
    for call, operands in calls:
        made = [draw_like(operand, device, keep=True) for operand in operands]
        wanted = tuple(operand.requires_grad for operand in operands)
        known = KERNELS.get(call.key(made))
        if known is not None and known.has_backward(wanted):
            continue
        try:
            reason = _try(call, made, wanted, precision, backend)
        except torch.OutOfMemoryError:
            reason = NO_ROOM
        except Exception as error:  # of any kind, by the backend
            reason = f"{backend} failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if reason:
            reasons.setdefault(_name(call), reason)
    return reasons


def _try(
    call: Chain, operands: Sequence[Tensor], wanted: tuple[bool, ...], precision: Precision, backend: str
) -> str:
    """Make the kernels of a call, and use them if they agree with it as written; else the reason for which they are
    not used."""
    from ..torch_names import lookup_backend

    device = operands[0].device
    with torch.no_grad():
        compile_graph, plain = lookup_backend(backend), [operand.detach() for operand in operands]
        forward = _compile(lambda *given: [call.run(*given)], plain, range(len(plain)), compile_graph)
        read = [0, *(1 + i for i in call.needed)]
        rows: list[tuple[KernelCall, Sequence[Tensor]]] = [(forward, plain)]
        as_written = [lambda: [call.run(*operands)]]
        if any(wanted):
            grad = draw_like(call.run(*operands), operands[0].device)
            as_written.append(lambda: call.gradients(grad, operands, wanted))
            backward = _compile(
                lambda grad, *given: call.gradients(grad, given, wanted), [grad, *plain], read, compile_graph
            )
            rows.append((backward, [grad, *(plain[i] for i in call.needed)]))
        for (kernel, given), what, run in zip(rows, ("outputs", "gradients"), as_written):
            kernel(*given)  # chooses its launches
            expected, most_bytes = _measure(run, device)
            found, its_bytes = _measure(partial(kernel, *given), device)
            if reason := difference(what, expected, found, precision):
                return reason
            if its_bytes > most_bytes:
                return f"its kernel would take {its_bytes} bytes; as written it takes {most_bytes}"
    made = KERNELS.setdefault(call.key(operands), ChainKernels(call.body.__code__, forward))
    if any(wanted):
        made.backward[backward_key(wanted, rows[1][1])] = backward
    return ""


def _measure(run: Callable[[], Sequence[Tensor]], device: torch.device) -> tuple[list[Tensor], int]:
    """The results of a run, and the bytes that it takes of a GPU at its peak."""
    begin_peak(device)
    before_bytes = taken_bytes(device)
    made = list(run())
    return made, peak_bytes(device) - before_bytes


def _compile(run: KernelCall, operands: Sequence[Tensor], read: Sequence[int], compile_graph: Any) -> KernelCall:
    """A kernel for a function of these operands, which takes those at the places `read`."""
    from ..torch_names import make_fx

    made = make_fx(run)(*operands)
    made.graph.eliminate_dead_code()
    places = [node for node in made.graph.nodes if node.op == "placeholder"]
    for i, node in enumerate(places):
        if i not in read:
            made.graph.erase_node(node)  # nobody reads it, as the plan has found
    made.recompile()
    kernel: KernelCall = compile_graph(made, [operands[i] for i in read])
    return kernel


def _name(call: Chain) -> str:
    names = ", ".join(call.body.__code__.co_varnames[: call.body.__code__.co_argcount])
    return f"{call.body.__qualname__.partition('.')[0]}'s {call.body.__name__}({names})"
