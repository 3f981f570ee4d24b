"""Accelerate's loops, whose steps a `Job` takes."""

from ...ir.errors import PlanError
from ...runtime.quantised.libraries import why_missing

try:
    import accelerate  # noqa: F401
except ImportError as error:
    raise PlanError(f"PenstockAccelerator: accelerate is {why_missing('accelerate', error)}") from error

from .accelerator import PenstockAccelerator

__all__ = ["PenstockAccelerator"]
