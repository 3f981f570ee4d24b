"""transformers' trainers, whose steps a `Job` takes."""

from .trainer import PenstockSeq2SeqTrainer, PenstockTrainer

__all__ = ["PenstockSeq2SeqTrainer", "PenstockTrainer"]
