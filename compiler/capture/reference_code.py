"""The reference code of transformers in place of optional kernels (causal-conv1d, flash-linear-attention, mamba-ssm).

Where one of these packages is installed, transformers' convolutions and scans over tokens call its kernels, which take
the addresses of tensors on a GPU. A trace has fake tensors, and what such a call computes, saves and holds is not known
here. Transformers keeps its own code in PyTorch beside each kernel, for exports: traces take that, and say so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from torch import nn

from ...ir.errors import CaptureError
from .guard import replace_functions

CHOOSER = "transformers.integrations.hub_kernels"
# Top modules of packages with kernels, and the names to install or remove them by.
PACKAGES = {
    "causal_conv1d": "causal-conv1d", "fla": "flash-linear-attention", "mamba_ssm": "mamba-ssm", "triton": "triton",
    "xlstm": "xlstm", "mlstm_kernels": "mlstm-kernels",
}  # fmt: skip


@contextmanager
def reference_code() -> Iterator[dict[str, list[str]]]:
    """Let functions of transformers that have chosen a kernel run their reference code. Yields the kernels that were
    left out, by package, as they are called."""
    left_out: dict[str, list[str]] = {}
    chooser = sys.modules.get(CHOOSER)

    def is_exporting() -> bool:
        given = sys._getframe(2).f_locals  # of the function that chooses, which asks only where it has a kernel
        names = left_out.setdefault(str(given.get("package", "a package of kernels")), [])
        name = str(given.get("func_name", ""))
        if name and name not in names:
            names.append(name)
        return True

    question = "is_torchdynamo_exporting"
    with replace_functions(*([(chooser, question, is_exporting)] if hasattr(chooser, question) else [])):
        yield left_out


def require_own_forwards(model: nn.Module) -> None:
    """Raise `CaptureError` where transformers has put kernels of the Hub in the place of layers' forwards."""
    if any(getattr(module, "use_kernels", False) is True for module in model.modules()):
        raise CaptureError(
            f"{type(model).__name__} was loaded with use_kernels=True: forwards of its layers are kernels of the Hub, "
            "which no program can hold, and transformers cannot take them out again; load the model without use_kernels"
        )


def reference_note(left_out: dict[str, list[str]]) -> str:
    """A line that says which kernels a trace has left out."""
    rows = "; ".join(f"{PACKAGES.get(package, package)} ({', '.join(names)})" for package, names in left_out.items())
    return (
        f"forward calls kernels of {rows}, which no program can hold: the plan runs the reference code of transformers "
        "in their place, as where these packages are not installed, and counts its time and memory as they are"
    )


def kernel_refusal(error: BaseException | None) -> str | None:
    """The refusal of an error that a package of kernels caused, or its absence; None for any other error."""
    if error is None:
        return None
    traceback, layer, inside = error.__traceback__, "the model", None
    while traceback is not None:
        layer = _module_type(traceback) or layer
        top = str(traceback.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        inside = top if top in PACKAGES else inside
        traceback = traceback.tb_next
    missing = error.name.partition(".")[0] if isinstance(error, ImportError) and error.name else None
    if missing in PACKAGES:
        return (
            f"{layer} needs the kernels of {PACKAGES[missing]}, which is not installed: choose the model's own code in "
            "PyTorch, which is what a program can hold (the model's class in transformers has it where the package is "
            f"absent); pip install {PACKAGES[missing]} alone would not do, as no program holds its kernels"
        )
    if inside is not None:
        return (
            f"{layer} calls kernels of {PACKAGES[inside]}, which no program can hold ({type(error).__name__}: "
            f"{error}); choose the model's own code in PyTorch (without use_kernels; transformers takes its own where "
            "the package is not installed), or put the kernel into a torch.autograd.Function whose forward takes fake "
            "tensors"
        )
    if isinstance(error, ValueError) and "packed sequences" in str(error):
        return (
            f"{layer} carries its state from token to token: only kernels would end it with a document, where "
            "'seq_idx' or 'cu_seq_lens_q' tells the borders, and no program holds these, whether or not their package "
            f"is installed ({error}). Allowed: one document in a row, without these inputs"
        )
    return None


def _module_type(traceback: TracebackType) -> str | None:
    """The class of the module whose method a frame runs."""
    owner: Any = traceback.tb_frame.f_locals.get("self")
    return type(owner).__name__ if isinstance(owner, nn.Module) else None
