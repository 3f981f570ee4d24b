"""Tables of tokens whose rows the members of a team divide evenly: the lookups of one member in its own rows, and the
statistics of all members' classes together (`part_loss.py` has those of one; Megatron-LM 3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..torch_names import assert_async


def member_lookup(ids: Tensor, weight: Tensor, member: Tensor, members: int, padding_idx: int | None = None) -> Tensor:
    """The rows of a table of which `weight` is a member's part: zeros for tokens whose rows others have, so that the
    sum over members is the lookup in the whole table, to the bit. `member`: the part's number of `members`, [1];
    `padding_idx`: the row of the whole table that gets no gradient. Raises IndexError for a token that is no row; on a
    GPU that is an assertion on the device."""
    own = len(weight)
    check_ids(ids, own * members)
    place = ids - member * own
    here = (place >= 0) & (place < own)
    found = F.embedding(place.where(here, 0), weight).masked_fill(~here.unsqueeze(-1), 0.0)
    if padding_idx is None:
        return found
    return torch.where((ids == padding_idx).unsqueeze(-1), found.detach(), found)


def joined_members(statistics: Tensor) -> Tensor:
    """The statistics [3, tokens] of all classes, from those of each member's, one after the other: [3 N, tokens]."""
    each = statistics.view(-1, 3, statistics.shape[-1])
    return torch.cat((each[:, :1].logsumexp(0), each[:, 1:].sum(0)))


def check_ids(ids: Tensor, rows: int) -> None:
    if type(ids) is not Tensor or ids.is_meta:  # a tensor without values
        return
    wrong = (ids < 0) | (ids >= rows)
    if ids.is_cuda:
        assert_async(~wrong.any(), f"a token is no row of a table of {rows}")
    elif wrong.any():
        raise IndexError(f"index out of range: token {ids[wrong][0].item()} is no row of a table of {rows}")
