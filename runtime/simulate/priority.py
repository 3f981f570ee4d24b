"""The order of fetches of weights: the stage that runs first goes first (Mobius 3.3)."""

from __future__ import annotations

from torch import fx

from ...ir import ops
from ...ir.calls import op_of

LAST_TURN = 1 << 20  # more than any number of stages


def is_weights_fetch(node: fx.Node) -> bool:
    return node.target is ops.fetch and node.meta["type"].kind in ("weights", "part", "shard")


def turn_of(fetch: fx.Node) -> int:
    """When the step needs these weights: j for stage j in forward; in backward -j, counted after all forward turns."""
    user: fx.Node | None = fetch
    while user is not None and op_of(user).prepares:
        user = next((u for u in user.users if u.op != "output" and u.target is not ops.free), None)
    stage = int(fetch.meta["type"].stage.removeprefix("stage"))
    return 2 * LAST_TURN - stage if user is not None and op_of(user).is_backward else stage
