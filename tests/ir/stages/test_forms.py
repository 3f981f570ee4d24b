"""Programs that run several forms: what they must have in common, and the room of the larger values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.ir.program import FORM, SIZES, Interface, StageSpec, TensorSpec, larger_interface, why_unlike


def interface_of(patches: int, tokens: int = 8, kept_bytes: int = 100) -> Interface:
    """A tower and a head, with an input of patches and one of tokens; names have numbers, as traces give them."""
    seen = TensorSpec(f"add_{patches}", (patches, 4), "float32", requires_grad=True)
    pixels, ids = TensorSpec("pixels", (patches, 6), "float32"), TensorSpec("ids", (2, tokens), "int64")
    loss = TensorSpec(f"mean_{patches}", (), "float32", requires_grad=True)
    stages = {
        "stage0": StageSpec("stage0", (pixels,), (seen,), (), kept_bytes=kept_bytes),
        "stage1": StageSpec("stage1", (seen, ids), (loss,), (), loss=loss.name),
    }
    return Interface(stages, {"pixels": pixels, "ids": ids}, num_devices=2, micro_batches=2)


def test_each_value_has_the_room_of_the_larger_one() -> None:
    room = larger_interface(interface_of(6), interface_of(10, kept_bytes=50))
    room = larger_interface(room, interface_of(4, tokens=9))
    assert room.stages["stage0"].kept_bytes == 100 and room.stages["stage0"].outputs[0].bytes == 10 * 4 * 4
    assert room.batch["pixels"].shape == (60,) and room.batch["ids"].shape == (18,)
    assert room.stages["stage1"].inputs[0].name == "add_6" and room.stages["stage1"].outputs[0].shape == ()
    assert list(room.sizes) == [FORM] and room.batch[SIZES].shape == (1, 1)
    assert Interface.from_json(room.to_json()) == room


def test_names_of_values_may_differ() -> None:
    assert why_unlike(interface_of(6), interface_of(10)) == ""


@pytest.mark.parametrize(("changes", "words"), [
    ({"inputs": ()}, "stage1 takes or gives other values"),
    ({"draws": True}, "stage1 takes or gives other values"),
    ({"outputs": (TensorSpec("mean_6", (), "float64"),)}, "stage1 takes or gives other values"),
])  # fmt: skip
def test_stages_that_cannot_share_programs(changes: dict, words: str) -> None:
    first = interface_of(6)
    stages = {**first.stages, "stage1": replace(first.stages["stage1"], **changes)}
    assert why_unlike(first, replace(first, stages=stages)) == words
    assert why_unlike(first, replace(first, stages={"stage0": first.stages["stage0"]})) == "there are other stages"
