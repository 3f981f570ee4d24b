"""TRL's trainers, whose steps a `Job` takes."""

from ...ir.errors import PlanError

try:
    import trl  # noqa: F401
except ImportError as error:
    raise PlanError("trl is not installed; pip install 'penstock[trl]'") from error

from .dpo import PenstockDPOTrainer
from .sft import PenstockSFTTrainer

__all__ = ["PenstockDPOTrainer", "PenstockSFTTrainer"]
