"""TRL's trainers, whose steps a `Job` takes. Each is imported at its first use: some are experimental in TRL."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ...ir.errors import PlanError
from ...runtime.quantised.libraries import why_missing

try:
    import trl  # noqa: F401
except ImportError as error:
    raise PlanError(f"penstock.integrations.trl: trl is {why_missing('trl', error, 'trl')}") from error

if TYPE_CHECKING:
    from .cpo import PenstockCPOTrainer, PenstockORPOTrainer
    from .dpo import PenstockDPOTrainer
    from .gkd import PenstockGKDTrainer
    from .kto import PenstockKTOTrainer
    from .reward import PenstockRewardTrainer
    from .sft import PenstockSFTTrainer

__all__ = [
    "PenstockCPOTrainer",
    "PenstockDPOTrainer",
    "PenstockGKDTrainer",
    "PenstockKTOTrainer",
    "PenstockORPOTrainer",
    "PenstockRewardTrainer",
    "PenstockSFTTrainer",
]
GENERATE = ("Distillation", "GRPO", "NashMD", "OnlineDPO", "PPO", "RLOO", "XPO")


def __getattr__(name: str) -> Any:
    """Raises `PlanError` for a trainer that generates while it trains."""
    method = name.removeprefix("Penstock").removesuffix("Trainer")
    if name in __all__:
        return getattr(import_module(f".{'cpo' if method == 'ORPO' else method.lower()}", __name__), name)
    if method in GENERATE:
        raise PlanError(
            f"{name}: it generates while it trains, and the weights are on the job's devices then; use one that trains "
            f"on given answers: {', '.join(__all__)}"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
