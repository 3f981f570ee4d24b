"""Whether forward changes in place what backward reads: eager PyTorch refuses such a step, and so must every plan.

In: a finished recording, whose fake tensors still hold autograd's graph. Stages save tensors in several ways, of which
none counts the versions of what it saves; so autograd is asked here, once for all of them.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from ....graph.opgraph import value_tensors
from ....ir.errors import CaptureError
from ..recorder import Recorder
from ..writer import storage_of

REFUSAL = "modified by an inplace operation"  # torch's words


def require_unchanged(recorder: Recorder, loss: torch.Tensor) -> None:
    """Raise `CaptureError` with the user's lines where autograd refuses the way back from the loss."""
    writes = [step for step in recorder.steps if step.meta["mutates"]] if _may_meet_saves(recorder) else []
    trained = [parameter for parameter in recorder.held.model.parameters() if parameter.requires_grad]
    if not (writes and trained and loss.requires_grad):
        return
    sizes = recorder.fake_mode.shape_env
    try:
        with recorder.fake_mode, nullcontext() if sizes is None else sizes.suppress_guards():
            torch.autograd.grad(loss.sum(), trained, allow_unused=True)
    except RuntimeError as error:
        if REFUSAL not in str(error):
            raise
        lines = dict.fromkeys(str(step.meta["source"]) for step in writes)
        raise CaptureError(
            f"{'; '.join(lines)}\n  a tensor is changed in place that backward needs as it was, so that eager PyTorch "
            f"does not train this model either: change a clone, or make a new tensor (x = x * 2, not x.mul_(2)). "
            f"PyTorch says: {error}"
        ) from error


def _may_meet_saves(recorder: Recorder) -> bool:
    """Whether a write may change what autograd has saved: a tensor with a gradient, or the storage of an argument or a
    result of an earlier step that autograd follows. Asking costs a pass over the steps; autograd takes as long as
    forward."""
    saved = set[int]()
    for step in recorder.steps:
        for target in step.meta["mutates"]:
            if any(x.requires_grad or storage_of(x) in saved for x in value_tensors(target.meta["val"])):
                return True
        if any(x.requires_grad for x in value_tensors(step.meta["val"])):
            values = (node.meta.get("val") for node in [step, *step.all_input_nodes])
            saved |= {storage_of(x) for value in values for x in value_tensors(value)}
    return False
