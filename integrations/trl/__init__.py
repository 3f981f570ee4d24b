"""TRL's trainers, whose steps a `Job` takes."""

from .dpo import PenstockDPOTrainer
from .sft import PenstockSFTTrainer

__all__ = ["PenstockDPOTrainer", "PenstockSFTTrainer"]
