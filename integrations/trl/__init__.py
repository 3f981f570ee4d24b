"""TRL's trainers, whose steps a `Job` takes."""

from ...ir.errors import PlanError
from ...runtime.quantised.libraries import why_missing

try:
    import trl  # noqa: F401
except ImportError as error:
    raise PlanError(f"penstock.integrations.trl: trl is {why_missing('trl', error, 'trl')}") from error

from .dpo import PenstockDPOTrainer
from .sft import PenstockSFTTrainer

__all__ = ["PenstockDPOTrainer", "PenstockSFTTrainer"]
