"""Every error and warning that a user of Penstock can meet: `from penstock.errors import DoesNotFit`."""

from .ir.errors import (
    BatchError,
    BudgetExceeded,
    CaptureError,
    CheckpointError,
    DoesNotFit,
    ExtensionError,
    HardwareError,
    NonFiniteLoss,
    NoRoomForCopy,
    PassError,
    PenstockError,
    PlanError,
    SsdError,
    StaleModelWarning,
    VerifyError,
    WorkerError,
)

__all__ = [
    "BatchError",
    "BudgetExceeded",
    "CaptureError",
    "CheckpointError",
    "DoesNotFit",
    "ExtensionError",
    "HardwareError",
    "NoRoomForCopy",
    "NonFiniteLoss",
    "PassError",
    "PenstockError",
    "PlanError",
    "SsdError",
    "StaleModelWarning",
    "VerifyError",
    "WorkerError",
]
