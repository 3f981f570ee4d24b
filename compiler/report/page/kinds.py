"""The kinds of work that the page tells apart by colour."""

from __future__ import annotations

from torch import fx

from ....ir import ops

KINDS: dict[str, tuple[ops.Op, ...]] = {
    "forward": (ops.forward, ops.evaluate),
    "backward": (ops.backward, ops.backward_input, ops.backward_weight),
    "optimizer": (ops.step, ops.redo, ops.norm, ops.clip, ops.hook, ops.stash, ops.predict),
    "to the device": (ops.load, ops.fetch),
    "from the device": (ops.offload,),
    "SSD": (ops.read, ops.write),
    "messages": (
        ops.send, ops.recv, ops.all_reduce, ops.all_gather, ops.reduce_scatter,
        ops.all_to_all, ops.gather_parts, ops.scatter_sum, ops.sum_parts, ops.pass_on,
        ops.to_experts, ops.from_experts,
    ),
    "other": (ops.add, ops.split, ops.own_part),
}  # fmt: skip
_KIND_OF = {op: kind for kind, members in KINDS.items() for op in members}


def kind_of(node: fx.Node) -> str:
    assert isinstance(node.target, ops.Op)
    return _KIND_OF[node.target]
