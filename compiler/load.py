"""`load(directory, model)`: the job whose files `Job.write` wrote. Its files are verified before any of them runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..ir import ops
from ..ir.errors import PlanError, VerifyError
from ..ir.machine.hardware import Hardware
from ..ir.program import Interface, Program, lane_of, whole_params
from ..ir.verify import verify
from ..runtime.device.file import ProgramFile, open_directory, read_directory
from ..runtime.model_names import named_tensors, ties_of
from ..runtime.optimizer.written import read_optimizer
from ..runtime.processes.torchrun import TorchrunDriver
from ..runtime.source.trust import TRUSTED, Trust
from ..runtime.stage.split_backward import require_halves
from ..runtime.state.weights import with_bytes_of
from .check.release import check_release
from .folder import COUNTS_FILE, Folder
from .job.counts import open_counts
from .job.job import Job
from .job.preflight import plain_directories
from .own_copy import reserve_own_copy


def load(
    directory: str | Path,
    model: nn.Module,
    ssd_dirs: Sequence[str | Path] | None = None,
    *,
    loss_weight: Callable[[Any], Any] | None = None,
    trust: bool = False,
) -> Job:
    """The job whose files `Job.write` wrote, also after a person edited them. `ssd_dirs` replaces its directories.
    `loss_weight` is the function that was given to `compile`, if one was: files cannot hold it.

    The files are read back as programs and verified before anything runs; their classes are run only where they hold
    no more than `compile` prints. `trust`: run the files as they are, and import what settings.json names, because
    their author may run code here. Raises `VerifyError` with file and line where an edit would deadlock, overrun a
    memory or lose a value, or goes beyond what is printed; `PlanError` where a file is missing.
    """
    check_release(torch.__version__)
    folder, files = _read(directory)
    model, _ = with_bytes_of(model, folder.settings.weights)
    _check_model(model, folder)
    if folder.settings.reads:
        raise PlanError(
            f"directory={str(directory)!r}: the model reads {', '.join(folder.settings.reads)} of each batch and makes "
            "inputs of them, which files cannot hold: compile again"
        )
    _check_loss_weight(loss_weight, folder)
    folder.settings.ssd_dirs = plain_directories(ssd_dirs) or folder.settings.ssd_dirs
    trusted = TRUSTED if trust else Trust.here([*folder.files.values(), *folder.smaller.values(), folder.counts])
    read_optimizer(folder.settings.optimizer, f"{Path(directory, 'settings.json')}", trust)
    open_directory(directory, folder.interface, trusted)
    if folder.counts:
        open_counts(folder.settings, Path(directory, COUNTS_FILE), trusted)
    programs = [file.step for file in files]
    if any(node.target is ops.backward_input for program in programs for node in program.ops()):
        require_halves()
    folder.hardware = _reserve_model(folder, files, model)
    return Job(
        model, folder, programs, ties=ties_of(model), directory=directory, trust=trusted, loss_weight=loss_weight
    )


def _reserve_model(folder: Folder, files: list[ProgramFile], model: nn.Module) -> Hardware:
    """The folder's machine less the memory that this model takes now. Raises `PlanError` where the files were written
    for a model that took less, on meta for instance, and have no room beside this one."""
    if TorchrunDriver.is_present():
        return folder.hardware  # as the ranks that compiled counted it
    machine = reserve_own_copy(folder.hardware, model)
    if machine != folder.hardware:
        try:
            _verify(folder.interface, machine, files)
        except VerifyError as error:
            raise PlanError(
                "model: it is in memory, and the programs have no room beside it; build it on the meta device, and "
                f"compile with weights=DIRECTORY. {error}"
            ) from error
    return machine


def _verify(interface: Interface, machine: Hardware, files: list[ProgramFile]) -> None:
    """Verify the files' programs, and those for evaluation if all files have one."""
    hardware = lane_of(interface, machine)
    verify([file.step for file in files], hardware)
    evaluation = [file.evaluate for file in files if file.evaluate is not None]
    if len(evaluation) == len(files):
        verify(evaluation, hardware)


def read_programs(directory: str | Path) -> tuple[Folder, list[Program]]:
    """The programs that `load` reads, verified, without the model: enough to simulate them. No file is run. Raises as
    `load` does."""
    folder, files = _read(directory)
    return folder, [file.step for file in files]


def _read(directory: str | Path) -> tuple[Folder, list[ProgramFile]]:
    folder = Folder.read(directory)
    files = read_directory(directory, folder.interface)
    try:
        _verify(folder.interface, folder.hardware, files)
    except VerifyError as error:
        path = files[error.device or 0].path
        place = f"{path}:{error.line}" if error.line else str(path)
        raise VerifyError(f"{place}: {error}", device=error.device, line=error.line) from error
    if folder.settings.evaluation is None and any(file.evaluate is None for file in files):
        folder.settings.evaluation = "not all of its files have an `evaluate`"
    return folder, files


def _check_loss_weight(loss_weight: Any, folder: Folder) -> None:
    """Raises `PlanError` where the files were compiled with `loss_weight` and it is missing, or the other way round."""
    if folder.settings.counts.by_user and loss_weight is None:
        raise PlanError(
            "loss_weight: the files were compiled with one, and cannot hold a function: pass the same to penstock.load"
        )
    if loss_weight is not None and not folder.settings.counts.by_user:
        raise PlanError("loss_weight: the files were compiled without one; compile again, or leave it out")


def _check_model(model: nn.Module, folder: Folder) -> None:
    """Raises `PlanError` where the model is not the one that the files were written for."""
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
    wrong = [
        f"{row.name} {list(row.shape)} ({list(shapes[row.name]) if row.name in shapes else 'absent'} here)"
        for spec in folder.interface.stages.values()
        for row in (*whole_params(spec.params), *spec.model_buffers)
        if shapes.get(row.name) != row.shape
    ]
    if wrong:
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise PlanError(f"model: the files are for {folder.plan.model}, with {', '.join(wrong[:4])}{more}")
