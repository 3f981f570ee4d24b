"""Every error that a user of Penstock can meet. All derive from `PenstockError`.

A message names the argument or key, what was found, what is allowed, and the nearest thing that would work.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from typing import Any

_OWN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_STDLIB = os.path.join(os.path.dirname(os.path.abspath(os.__file__)), "")
_LIBRARIES = ("site-packages", "dist-packages")


class PenstockError(Exception):
    """Base of all errors raised on purpose."""

    def _render_traceback_(self) -> list[str]:
        """The text that IPython and notebooks print instead of a traceback: the user's own lines, then the message."""
        frames = [f for f in traceback.extract_tb(self.__traceback__) if _is_users(f.filename)]
        lines = [line for text in traceback.format_list(frames) for line in text.rstrip("\n").split("\n")]
        return [*lines, *"".join(traceback.format_exception_only(self)).rstrip("\n").split("\n")]


def _is_users(file: str) -> bool:
    tests = os.path.join(_OWN, "tests", "")
    own = file.startswith(_OWN) and not file.startswith(tests)
    installed = any(name in file.split(os.sep) for name in _LIBRARIES)
    return not (own or installed or file.startswith(("<frozen", _STDLIB)))


class CaptureError(PenstockError):
    """The model cannot be traced; the message names the user's source line and what to do."""


class ExtensionError(PenstockError):
    """An entry point of another distribution cannot be used: which one, of which distribution, and why."""


class HardwareError(PenstockError):
    """A hardware document is malformed: the key, the value found, what is allowed."""


class DoesNotFit(PenstockError):
    """No plan fits the memories: which memory, by how many bytes, the nearest plan that fits.

    `nearest` is a change that was tried and fits: arguments of `compile` ("micro_batches", "strategy") or of
    `Hardware.with_` ("memory", "dram"); empty where none was found.
    """

    def __init__(
        self, message: str, *, memory: str = "", missing_bytes: int = 0, nearest: Mapping[str, Any] | None = None
    ):
        super().__init__(message)
        self.memory = memory
        self.missing_bytes = missing_bytes
        self.nearest = dict(nearest or {})


class PlanError(PenstockError):
    """A plan, or an argument of `compile`, cannot be carried out as asked."""


class PassError(PenstockError):
    """A pass was asked for something that its contract (needs, gives, options) does not allow."""


class VerifyError(PenstockError):
    """A program breaks an invariant. The message carries the program text around the place.

    `device` and `line` (1-based, in the program's text) say where.
    """

    def __init__(self, message: str, *, device: int | None = None, line: int | None = None):
        super().__init__(message)
        self.device = device
        self.line = line


class BatchError(PenstockError):
    """A batch differs in names, shapes or dtypes from what was compiled, or a forward does not take its values."""


class NonFiniteLoss(PenstockError):
    """The loss became NaN or infinite; the message says whether the weights have taken the step."""


class BudgetExceeded(PenstockError):
    """An op needs more of a memory than its budget; the message lists the op and the live values."""


class CheckpointError(PenstockError):
    """A checkpoint is missing, truncated, altered or of another model; the message names the file."""


class NoRoomForCopy(CheckpointError):
    """DRAM has no room for the copy that a save in the background needs: `missing_bytes` more are needed; `wait=True`
    needs none."""

    def __init__(self, message: str, missing_bytes: int = 0):
        super().__init__(message)
        self.missing_bytes = missing_bytes


class SsdError(PenstockError):
    """A file on SSD could not be read or written, or does not hold what was written there.

    `file` is its path, `offset_bytes` the place in it, `errno` the system's error number (None: Penstock found it).
    """

    def __init__(self, message: str, *, file: str = "", offset_bytes: int = 0, errno: int | None = None):
        super().__init__(message)
        self.file = file
        self.offset_bytes = offset_bytes
        self.errno = errno


class StaleModelWarning(UserWarning):
    """The user's model was used, saved or copied while the devices of its job held newer weights than it."""


class WorkerError(PenstockError):
    """A worker process failed or vanished; every other worker has been stopped.

    `device` is its index, `line` the text of the program line that it ran, `remote` its own traceback.
    """

    def __init__(self, message: str, *, device: int | None = None, line: str | None = None, remote: str = ""):
        super().__init__(message)
        self.device = device
        self.line = line
        self.remote = remote


def error_to_data(error: BaseException) -> dict[str, Any]:
    """An error as plain data for another process: the name of its type, its message, the fields of a `PenstockError`,
    and its traceback, which is empty if it was never raised."""
    known = vars(error).items() if isinstance(error, PenstockError) else ()
    return {
        "type": type(error).__name__,
        "message": str(error),
        "fields": {key: value for key, value in known if isinstance(value, (str, int, dict))},
        "traceback": "" if error.__traceback__ is None else "".join(traceback.format_exception(error)),
    }


def error_from_data(data: Mapping[str, Any], who: str, device: int | None = None, prefix: str = "") -> PenstockError:
    """The error that `error_to_data` turned into data in another process, with `prefix` before its message.

    An error that is no `PenstockError` becomes a `WorkerError` that says `who` raised it, on `device`.
    """
    kind, message = globals().get(data["type"]), prefix + data["message"]
    if kind is WorkerError or not (isinstance(kind, type) and issubclass(kind, PenstockError)):
        message = message if kind is WorkerError else f"{who}: {data['type']}: {message}"
        return WorkerError(message, device=device, line=data["fields"].get("line"), remote=data["traceback"])
    found = kind(message)
    vars(found).update(data["fields"])
    return found
