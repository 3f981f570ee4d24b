"""transformers' Trainer, whose steps a `Job` takes."""

from .trainer import PenstockTrainer

__all__ = ["PenstockTrainer"]
