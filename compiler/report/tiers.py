"""The tiers of a stage's weights, optimizer states and activations, in words."""

from __future__ import annotations

from ...ir import ops
from ...ir.program import StageSpec
from ...ir.units import format_bytes
from ...passes.decisions import Activations
from ..plan import Decisions

AGAIN = "computed again"
PLACES = {ops.DEVICE: "on the device", ops.DRAM: "in DRAM", ops.SSD: "on SSD"}


def weights_tier(decisions: Decisions, stage: str) -> str:
    if decisions.sharding is not None:
        where = PLACES[ops.SSD if decisions.ssd.stages.get(stage) == "all" else decisions.sharding.tier]
        often = "once a step" if stage in decisions.sharding.held else "for each use"
        return f"shards {where}, gathered {often}"
    home = weights_home(decisions, stage)
    if home == ops.DEVICE:
        return PLACES[home]
    return "SSD, read and fetched for each use" if home == ops.SSD else "DRAM, fetched for each use"


def weights_home(decisions: Decisions, stage: str) -> str:
    """The memory that holds the weights of a stage that is not sharded between their uses."""
    if stage not in decisions.fetch:
        return ops.DEVICE
    return ops.SSD if decisions.ssd.stages.get(stage) == "all" else ops.DRAM


def weights_text(decisions: Decisions, spec: StageSpec) -> str:
    """Bytes and tier of a stage's weights, and apart those of what is trained, where that alone stays on the device."""
    tier = weights_tier(decisions, spec.name)
    if not spec.staying or spec.name not in decisions.fetch:
        return f"{format_bytes(spec.all_weight_bytes)} {tier}"
    trained = format_bytes(spec.staying_bytes)
    return f"{format_bytes(spec.weight_bytes)} {tier}, and {trained} that are trained on the device"


def states_tier(decisions: Decisions, stage: str) -> str:
    """The tier of masters and optimizer states; empty for a stage that is not trained."""
    return PLACES.get(decisions.optimizer.get(stage, ""), "")


def activations_tier(decisions: Decisions, stage: str) -> str:
    """The fate of saved tensors: "kept", "computed again", or the number of classes that are kept, and the tiers of
    these and of the stage's inputs until its backward."""
    if stage not in decisions.rematerialise:
        return "kept"
    row = decisions.activations.get(stage, Activations())
    again = f"computed again but for {len(row.classes)} classes {PLACES[row.classes_to]}" if row.classes else AGAIN
    return again if row.inputs_to == ops.DEVICE else f"{again}, inputs {PLACES[row.inputs_to]}"


def activations_homes(decisions: Decisions) -> list[str]:
    """The memories to which activations of any stage move until its backward."""
    rows = decisions.activations.values()
    used = {row.inputs_to for row in rows} | {row.classes_to for row in rows if row.classes}
    return [memory for memory in PLACES if memory in used and memory != ops.DEVICE]
