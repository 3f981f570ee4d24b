"""Penstock: a graph compiler over torch.fx that fine-tunes models far bigger than your GPUs.

job = penstock.compile(model, hardware, example_inputs=batch, optimizer=partial(torch.optim.AdamW, lr=5e-5))
for batch in loader:
    loss = job.step(batch)
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 10):  # noqa: UP036  (a clone may be imported by any Python)
    raise ImportError(f"Penstock needs Python 3.10 or newer; this is Python {sys.version.split()[0]}")

__version__ = "0.2.0"

if TYPE_CHECKING:
    from .compiler.api import compile
    from .compiler.job.background import BackgroundSave
    from .compiler.job.job import Job
    from .compiler.job.outputs import Outputs
    from .compiler.job.sampler import RankSampler
    from .compiler.job.step_report import StepReport
    from .compiler.load import load
    from .compiler.packing.documents import PackedRows, pack_documents
    from .compiler.plan import Plan
    from .compiler.preference import DPO
    from .ir import errors
    from .ir.machine.hardware import Hardware
    from .runtime.optimizer.param_groups import hidden_matrices
    from .runtime.simulate import Timeline

__all__ = [
    "DPO",
    "BackgroundSave",
    "Hardware",
    "Job",
    "Outputs",
    "PackedRows",
    "Plan",
    "RankSampler",
    "StepReport",
    "Timeline",
    "compile",
    "errors",
    "hidden_matrices",
    "load",
    "pack_documents",
]

# Imported at first use: a worker needs the runtime only, and starts seconds sooner without the compiler.
_HOMES = {
    "DPO": ".compiler.preference",
    "BackgroundSave": ".compiler.job.background",
    "Hardware": ".ir.machine.hardware",
    "Job": ".compiler.job.job",
    "Outputs": ".compiler.job.outputs",
    "PackedRows": ".compiler.packing.documents",
    "Plan": ".compiler.plan",
    "RankSampler": ".compiler.job.sampler",
    "StepReport": ".compiler.job.step_report",
    "Timeline": ".runtime.simulate",
    "compile": ".compiler.api",
    "hidden_matrices": ".runtime.optimizer.param_groups",
    "load": ".compiler.load",
    "pack_documents": ".compiler.packing.documents",
}


def _detect(measure: bool = False) -> "Hardware":
    """Describe this machine; with `measure`, time its links, disks, matrix products and optimizer (20 s).

    Under a torchrun over several hosts all ranks must call it: the hosts describe the machine that they form, with one
    device per rank, and time the network between them where their devices are CPUs.
    """
    from .runtime.processes.joint_hardware import detect

    return detect(measure)


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module(".errors", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name], __name__), name)
    if name == "Hardware":
        value.detect = staticmethod(_detect)  # the class itself imports no runtime
    return value


def __dir__() -> list[str]:
    return __all__
