"""TRL's trainers, whose steps a `Job` takes."""

from .sft import PenstockSFTTrainer

__all__ = ["PenstockSFTTrainer"]
