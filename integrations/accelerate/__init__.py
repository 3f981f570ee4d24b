"""Accelerate's loops, whose steps a `Job` takes."""

from ...ir.errors import PlanError

try:
    import accelerate  # noqa: F401
except ImportError as error:
    raise PlanError("accelerate is not installed; pip install 'penstock[hf]'") from error

from .accelerator import PenstockAccelerator

__all__ = ["PenstockAccelerator"]
