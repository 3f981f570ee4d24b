"""Models of images and sound train as eager does, from tiny configurations, some by the way out that an error names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.compiler.capture.trace import trace
from penstock.ir.errors import CaptureError, WorkerError
from penstock.tests.compiler.eager_baseline import assert_close

ROWS, IMAGE = 4, 63
TEXT: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
EYES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
}  # fmt: skip
SGD = partial(torch.optim.SGD, lr=1.0)


def tokens(num_image_tokens: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 59, (ROWS, 12))
    ids[:, 2 : 2 + num_image_tokens] = IMAGE
    labels = torch.randint(0, 59, (ROWS, 12))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def llava() -> tuple[nn.Module, dict[str, Any]]:
    import transformers as hf

    eyes = hf.CLIPVisionConfig(**EYES, patch_size=8)
    config = hf.LlavaConfig(
        vision_config=eyes, text_config=hf.LlamaConfig(**TEXT), image_token_index=IMAGE, vision_feature_layer=-1
    )
    return hf.LlavaForConditionalGeneration(config), {**tokens(4), "pixel_values": torch.randn(ROWS, 3, 16, 16)}


class OneGrid(nn.Module):
    """Qwen2-VL on images of one size, which it holds, and with positions whose first dimension is the row."""

    def __init__(self, model: nn.Module, grid: Tensor):
        super().__init__()
        self.model, self.grid = model, grid

    def forward(self, position_ids: Tensor, input_ids: Tensor, **batch: Tensor) -> Any:
        grids = self.grid.expand(len(input_ids), 3)
        positions = position_ids.transpose(0, 1)
        return self.model(input_ids=input_ids, position_ids=positions, image_grid_thw=grids, **batch)


def qwen2_vl() -> tuple[nn.Module, dict[str, Any]]:
    import transformers as hf

    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    special = {"bos_token_id": 1, "eos_token_id": 2}
    config = hf.Qwen2VLConfig(
        text_config={**TEXT, **special, "num_key_value_heads": 2, "rope_parameters": rope},
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4},
        image_token_id=IMAGE, video_token_id=62, vision_start_token_id=61, vision_end_token_id=60,
    )  # fmt: skip
    model, batch, grid = hf.Qwen2VLForConditionalGeneration(config), tokens(4), torch.tensor([1, 4, 4])
    batch["input_ids"][:, 1], batch["input_ids"][:, 6] = 61, 60
    kinds = (batch["input_ids"] == IMAGE).int()
    positions, _ = model.model.get_rope_index(
        batch["input_ids"], kinds, image_grid_thw=grid.expand(ROWS, 3), attention_mask=batch["attention_mask"]
    )
    batch["position_ids"] = positions.transpose(0, 1).contiguous()
    return OneGrid(model, grid), {**batch, "pixel_values": torch.randn(ROWS * 16, 3 * 2 * 4 * 4)}


def gemma3() -> tuple[nn.Module, dict[str, Any]]:
    import transformers as hf

    text = {**TEXT, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8}
    config = hf.Gemma3Config(
        text_config=text, vision_config={**EYES, "patch_size": 4}, mm_tokens_per_image=4, image_token_index=IMAGE,
        boi_token_index=61, eoi_token_index=60,
    )  # fmt: skip
    batch = tokens(4)
    kinds = (batch["input_ids"] == IMAGE).long()
    return hf.Gemma3ForConditionalGeneration(config), {
        **batch, "token_type_ids": kinds, "pixel_values": torch.randn(ROWS, 3, 16, 16),
    }  # fmt: skip


def clip() -> tuple[nn.Module, dict[str, Any]]:
    import transformers as hf

    special = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
    text, eyes = hf.CLIPTextConfig(**TEXT, **special), hf.CLIPVisionConfig(**EYES, patch_size=8)
    model = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=eyes, projection_dim=16))
    ids = torch.randint(3, 64, (ROWS, 8))
    return model, {"input_ids": ids, "pixel_values": torch.randn(ROWS, 3, 16, 16), "return_loss": True}


def wav2vec2() -> tuple[nn.Module, dict[str, Any]]:
    import transformers as hf

    sizes = {key: TEXT[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
    drops = ("hidden", "attention", "activation", "feat_proj", "final")
    config = hf.Wav2Vec2Config(
        **sizes, **{f"{name}_dropout": 0.0 for name in drops}, vocab_size=32, conv_dim=(32, 32), conv_stride=(5, 2),
        conv_kernel=(10, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2,
        layerdrop=0.0, apply_spec_augment=False,
    )  # fmt: skip
    batch = {"input_values": torch.randn(ROWS, 400), "labels": torch.randint(1, 32, (ROWS, 6))}
    return hf.Wav2Vec2ForCTC(config), batch


def qwen2_vl_as_it_is() -> tuple[nn.Module, dict[str, Any]]:
    """With the grid in the batch and without `position_ids`, which forward makes of it."""
    model, batch = qwen2_vl()
    del batch["position_ids"]
    return model, batch


def wav2vec2_without_labels() -> tuple[nn.Module, dict[str, Any]]:
    model, batch = wav2vec2()
    return model, {"input_values": batch["input_values"], "targets": batch["labels"]}


def ctc(output: Any, batch: Any) -> Tensor:
    found, targets = F.log_softmax(output.logits, -1).transpose(0, 1), batch["targets"]
    steps, rows = found.shape[:2]
    return F.ctc_loss(found, targets, (steps,) * rows, (targets.shape[1],) * rows)


def assert_trains_like_eager(
    make: Callable[[], Any], micro_batches: int, num_devices: int, loss_fn: Any = None
) -> None:
    """Loss and updated weights after a step of SGD with learning rate 1: their change is the gradient. Other orders of
    additions differ by a few units of rounding; 4e-7 of the largest gradient was measured."""
    torch.manual_seed(0)
    model, batch = make()
    twin = copy.deepcopy(model.train())
    hardware = penstock.Hardware.cpu(num_devices=num_devices, memory="1GB", dram="2GB")
    options: dict[str, Any] = {"optimizer": SGD, "micro_batches": micro_batches, "strategy": "balanced"}
    with penstock.compile(model, hardware, example_inputs=batch, loss_fn=loss_fn, **options) as job:
        loss, found = job.step(batch), job.state_dict()
    given = {name: value for name, value in batch.items() if name != "targets"}
    expected = loss_fn(twin(**given), batch) if loss_fn else twin(**given).loss
    expected.backward()
    SGD(twin.parameters()).step()
    assert_close({"loss": loss}, {"loss": expected.detach()}, 1e-6)
    assert_close(found, twin.state_dict(), 1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:pixel_values has 16 entries for each of the 4 rows")
def test_qwen2_vl_on_patches_of_images_of_one_size() -> None:
    assert_trains_like_eager(qwen2_vl, 2, 1)


SLOW = [
    (llava, 2, None), (qwen2_vl, 2, None), (gemma3, 2, None), (clip, 1, None),
    (wav2vec2_without_labels, 2, ctc), (wav2vec2, 2, None),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize(("make", "micro_batches", "loss_fn"), SLOW)
def test_models_of_images_and_sound_on_two_devices(make: Any, micro_batches: int, loss_fn: Any) -> None:
    assert_trains_like_eager(make, micro_batches, 2, loss_fn)


def test_gemma3_makes_its_masks_of_images_by_vmap() -> None:
    """Tokens of an image see each other; layers with a window take another mask."""
    torch.manual_seed(0)
    model, batch = gemma3()
    graph = trace(model.train(), batch)
    assert "aten.index.Tensor" in " ".join(str(node.target) for node in graph.nodes)
    loss = model(**batch).loss
    assert_close({"loss": graph.module(**batch)["loss"].detach()}, {"loss": loss.detach()}, 1e-6)
    others = {**batch, "token_type_ids": torch.zeros_like(batch["token_type_ids"])}
    assert abs(graph.module(**others)["loss"] - loss) > 1e-4
    assert_close({"loss": graph.module(**others)["loss"].detach()}, {"loss": model(**others).loss.detach()}, 1e-6)


def test_what_cannot_be_captured_names_the_line_and_the_way_out() -> None:
    model, batch = wav2vec2()
    shapes = {name: {"shape": list(value.shape), "dtype": str(value.dtype)[6:]} for name, value in batch.items()}
    with pytest.raises(CaptureError, match=r"modeling_|loss_(.|\n)*masked_select(.|\n)*pass loss_fn, and the labels"):
        trace(model, shapes)


@pytest.mark.slow
def test_images_that_are_not_those_of_their_rows_fail_the_models_own_check() -> None:
    torch.manual_seed(0)
    model, batch = llava()
    hardware = penstock.Hardware.cpu(num_devices=1, memory="1GB", dram="2GB")
    options: dict[str, Any] = {"optimizer": SGD, "micro_batches": 2, "strategy": "balanced"}
    with penstock.compile(model.train(), hardware, example_inputs=batch, **options) as job:
        batch["input_ids"][0, 2] = 5
        with pytest.raises(WorkerError, match="image"):
            job.step(batch)


class Packed(nn.Module):
    """Attention inside sequences that are packed one after the other; `lengths` has one entry for each."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        torch._check_tensor_all(lengths.sum() == len(x))
        ends = F.pad(lengths.cumsum(0), (1, 0))
        of = torch.bucketize(torch.arange(len(x), device=x.device), ends[1:], right=True)
        h = self.inside(x)[None]
        h = F.scaled_dot_product_attention(h, h, h, attn_mask=of[:, None] == of[None, :])[0]
        return (self.out(h)[:, 0] - y).square().mean()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* entries for each of the 4 rows")
def test_packed_sequences_are_cut_by_the_counts_of_each_input() -> None:
    torch.manual_seed(0)
    model = Packed()
    batch = {"x": torch.randn(24, 8), "lengths": torch.tensor([8, 4, 5, 7]), "y": torch.randn(24)}
    twin = copy.deepcopy(model)
    hardware = penstock.Hardware.cpu(num_devices=1, memory="64MB", dram="1GB")
    with penstock.compile(model, hardware, example_inputs=batch, optimizer=SGD, micro_batches=2) as job:
        loss, found = job.step(batch), job.state_dict()
        expected = twin(**batch)
        expected.backward()
        SGD(twin.parameters()).step()
        assert_close({"loss": loss}, {"loss": expected.detach()}, 1e-6)
        assert_close(found, twin.state_dict(), 1e-6)
        batch["lengths"] = torch.tensor([8, 3, 6, 7])  # the second sequence would lose its last entry
        with pytest.raises(WorkerError, match=r"lengths\.sum\(\) == len\(x\)"):
            job.step(batch)
