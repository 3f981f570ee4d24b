"""The zoo of transformers and other libraries: its classes, their small configurations and batches, and its page."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")

from penstock.bench import zoo
from penstock.bench.model_zoo import compare as comparing
from penstock.bench.model_zoo.batches import ROWS, batches, left_out
from penstock.bench.model_zoo.compare import build, compare
from penstock.bench.model_zoo.others import OtherModel, other_models
from penstock.bench.model_zoo.page import write_page
from penstock.bench.model_zoo.registry import ModelClass, model_classes
from penstock.bench.model_zoo.small import VOCABULARY, small_config
from penstock.tests.bench.ending_classes import Computes, Ends, Hangs


def only(name: str) -> ModelClass:
    return next(model_classes(f"^{name} "))


def test_every_class_has_one_kind() -> None:
    names = [model.name for model in model_classes()]
    assert len(names) == len(set(names)) > 500
    assert only("LlamaForCausalLM").kind == "causal_lm" and only("LlamaForCausalLM").has_loss
    assert not ModelClass("LlamaModel", "llama", "causal_lm").has_loss
    assert {model.family for model in model_classes("qwen3_vl")} == {"qwen3_vl", "qwen3_vl_moe"}


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LlavaForConditionalGeneration", "DeepseekV3ForCausalLM"])
def test_small_configurations_can_be_built(name: str) -> None:
    model = only(name)
    with torch.device("meta"):
        net = model.cls(small_config(model.cls.config_class))
    assert sum(param.numel() for param in net.parameters()) < 1_000_000


def test_widths_stay_equal_and_special_tokens_are_in_the_vocabulary() -> None:
    config = small_config(only("Qwen2_5_VLForConditionalGeneration").cls.config_class)
    text, vision = config.text_config, config.vision_config
    assert text.hidden_size == vision.out_hidden_size == text.num_attention_heads * 16
    tokens = [config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id]
    assert len(set(tokens)) == 4 and max(tokens) < text.vocab_size == VOCABULARY


def test_each_kind_of_layer_is_there() -> None:
    config = small_config(only("Qwen3NextForCausalLM").cls.config_class)
    assert set(config.layer_types) == {"linear_attention", "full_attention"}
    assert config.num_hidden_layers == len(config.layer_types) == 4


def test_a_batch_has_the_tokens_that_its_images_need() -> None:
    model = only("LlavaForConditionalGeneration")
    net = build(model)
    batch = next(batches(model, net))
    assert not isinstance(batch, Exception)
    features = net.get_image_features(batch["pixel_values"]).pooler_output  # type: ignore[operator]
    found = (batch["input_ids"] == net.config.image_token_id).sum()  # type: ignore[union-attr]
    assert found == sum(len(each) for each in features) > ROWS
    assert (batch["labels"] == -100).sum() == 3  # the padding


def test_a_class_whose_images_no_form_fits_gets_tokens_alone() -> None:
    model = only("LlavaForConditionalGeneration")
    net = build(model)
    whole, tokens = (next(batches(model, net, without=kind)) for kind in ("", "features"))
    assert not isinstance(whole, Exception) and not isinstance(tokens, Exception)
    assert (left_out(model, whole), left_out(model, tokens)) == ("", "features")
    assert tokens["input_ids"].shape[1] < whole["input_ids"].shape[1]  # no places of images
    assert not list(batches(only("LlamaForCausalLM"), net, without="features"))


def test_a_class_that_eager_cannot_train_says_why() -> None:
    found = compare(ModelClass("LlamaModel", "llama", "causal_lm"))
    assert found["outcome"] == "fails in eager" and "no loss" in found["detail"]


class Drawing(torch.nn.Sequential):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (super().forward(x) * torch.rand(3)).square().mean()}


@pytest.mark.slow
def test_a_class_that_draws_is_compared_with_fixed_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    net, batch = Drawing(torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)), {"x": torch.randn(4, 2)}
    trained = comparing.train(copy.deepcopy(net), batch)
    monkeypatch.setattr(comparing, "train_first", lambda _: (net, batch, trained))
    found = compare(only("LlamaForCausalLM"))
    assert found["outcome"] == "equal" and found["detail"] == "torch.rand gives fixed numbers", found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "ViTForImageClassification", "ResNetForImageClassification"])
def test_a_class_trains_as_eager_does(name: str) -> None:
    found = compare(only(name))
    assert found["outcome"] == "equal", found
    assert found["micro_batches"] == (1 if name.startswith("ResNet") else 2)  # BatchNorm couples rows


def test_models_of_other_libraries_have_a_name_each() -> None:
    models = list(other_models())
    assert len({(model.family, model.name) for model in models}) == len(models) > 40
    assert {model.family for model in other_models("^(LSTM|GCN) ")} == {"torch", "torch_geometric"}


@pytest.mark.parametrize("name", ["LSTM", pytest.param("Transformer", marks=pytest.mark.slow)])
def test_layers_of_torch_train_as_in_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "DEVICES", 1)
    found = compare(OtherModel(name, "torch", "layers"))
    assert found["outcome"] == "equal" and found["micro_batches"] == 2, found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "kind", "name", "micro_batches"),
    [
        ("diffusers", "image", "UNet2DModel, one timestep", 1),
        ("diffusers", "image", "DiTTransformer2DModel", 2),
        ("diffusers", "video", "WanTransformer3DModel", 2),
        ("timm", "image", "vit_base_patch16_224", 2),
        ("torch_geometric", "nodes", "GAT", 1),
    ],
)
def test_a_model_of_another_library_trains_as_in_eager(library: str, kind: str, name: str, micro_batches: int) -> None:
    pytest.importorskip(library, reason="only the zoo needs it: make zoo-others installs it beside .venv")
    found = compare(OtherModel(name, library, kind))
    assert found["outcome"] == "equal" and found["micro_batches"] == micro_batches, found


def test_the_page_counts_outcomes_and_names_the_line_of_a_refusal() -> None:
    common = {"kind": "causal_lm", "transformers": "5.0"}
    rows = [
        {**common, "class": "AForCausalLM", "family": "a", "outcome": "equal"},
        {**common, "class": "AModel", "family": "a", "outcome": "refused", "detail": "this line needs the value",
         "line": "transformers/models/a/modeling_a.py:7: if x.any():"},
        {**common, "class": "BForCausalLM", "family": "b", "outcome": "equal", "without": "features"},
        {**common, "class": "CForCausalLM", "family": "c", "outcome": "fails in eager", "detail": "TypeError: c"},
    ]  # fmt: skip
    page = write_page(rows, 9)
    assert "of 4 classes; the registries list 9" in page
    assert "tokens alone (1 classes)" in page and "sound alone (0)" in page
    assert "2 of the 3 classes that eager trains are equal (66.7%)" in page
    assert "all of whose classes must be equal: 1 of 2 (50.0%)" in page
    assert "| causal lm | 4 | 2 | 1 | 1 | 0 | 0 |" in page
    assert "| AModel | `modeling_a.py:7: if x.any():` | this line needs the value |" in page
    assert "- causal lm: AForCausalLM, BForCausalLM" in page and "Other libraries" not in page
    other = {"family": "timm", "kind": "image", "timm": "1.0", "outcome": "equal"}
    others = [
        {**other, "class": "vit", "micro_batches": 2},
        {**other, "class": "resnet", "micro_batches": 1, "detail": "rows are coupled: bn1"},
        {**other, "class": "odd", "outcome": "refused", "detail": "no value"},
    ]
    page = write_page(rows, 9, others)
    assert "| timm 1.0 | image | 2 | 1 | 0 | 0 | 0 | 1 |" in page
    assert "| vit | timm | equal | 2 |  |" in page and "| resnet | timm | equal | 1 | rows are coupled: bn1 |" in page
    assert "| odd | timm | refused |  | no value |" in page


@pytest.mark.slow
def test_a_crash_and_a_hang_are_rows_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = zoo.Trainer()
    try:
        found = trainer.row(Ends("Crash", "crash", "causal_lm"))
        assert found == {"outcome": "raw error", "detail": "the process ended with exit code 3"}
        assert trainer.row(ModelClass("LlamaModel", "llama", "causal_lm")).keys() == {"seconds"}  # it has no loss
        monkeypatch.setattr(zoo, "MOST_PROCESSOR_S", 1)
        found = trainer.row(Computes("Compute", "compute", "causal_lm"))
        assert found["detail"] == "not done after 1 s of a processor"
        monkeypatch.setattr(zoo, "MOST_PROCESSOR_S", 60)  # the next process begins with imports
        monkeypatch.setattr(zoo, "MOST_S", 2)
        assert trainer.row(Hangs("Hang", "hang", "causal_lm"))["detail"] == "not done after 2 s"
    finally:
        trainer.close()
