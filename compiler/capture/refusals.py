"""Models that no program can hold, known by the file of torch in which forward failed: the reason and a way out."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from ...ir.errors import CaptureError
from .reference_code import kernel_refusal

_ROOT = os.path.dirname(torch.__file__)
_WAYS_OUT = {
    os.path.join(_ROOT, "nn", "attention", "flex_attention.py"): (
        "flex_attention takes Python functions of scores and positions, which no program can hold: use "
        "F.scaled_dot_product_attention with attn_mask, a mask of booleans in place of mask_mod or of numbers to add "
        'in place of score_mod (transformers: attn_implementation="sdpa")'
    ),
    os.path.join(_ROOT, "_functorch", ""): (
        "this function transform (torch.func, torch.vmap, torch.autograd.functional) cannot be captured here: write it "
        "as operations on whole batches, and a derivative as a torch.autograd.Function, which is one call to a "
        "program; torch.vmap may stay where no gradient goes through it, and its function reads no value, draws "
        "nothing and writes nothing in place"
    ),
}


def add_way_out(error: CaptureError) -> CaptureError:
    """The error with a way out in place of its reason, where the file of torch that failed has a known way out."""
    files = [*_files(error), *_files(error.__cause__)]
    known = (text for place, text in _WAYS_OUT.items() if any(place in file for file in files))
    way_out = kernel_refusal(error.__cause__) or next(known, None)
    if way_out is None:
        return error
    lines = str(error).splitlines()
    places = [lines[0], *(line for line in lines[1:2] if line.startswith("  in "))]  # the user's, a library's
    return CaptureError("\n".join([*places, f"  {way_out}"]))


def _files(error: BaseException | None) -> Iterator[str]:
    """The files that an error came through."""
    traceback = error.__traceback__ if error is not None else None
    while traceback is not None:
        yield traceback.tb_frame.f_code.co_filename
        traceback = traceback.tb_next
