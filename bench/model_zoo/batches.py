"""A batch for any class, from the arguments of its forward and its configuration: tokens, images, sound, labels.

A row has padding, whose labels are ignored. Where a model puts features of images or sound in the place of tokens, the
model itself is asked how many there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import ModelClass
from .small import get

ROWS, TOKENS, PADDING, FRAMES, BOXES = 4, 12, 3, 2, 2
SOUND, MEL = 3200, 64
Batch = dict[str, Any]


def batches(model: ModelClass, net: nn.Module, seed: int = 0, without: str = "") -> Iterator[Batch | Exception]:
    """Batches that may fit, the likeliest first: images and sound are handed over in several forms. An exception in the
    place of a batch is what the model says of a form. `without`: "features" or "tokens", to leave out of a class that
    takes both; no batches of other classes."""
    config: Any = net.config
    draw = _Draw(config, seed)
    if without and not all(_have(model.arguments, kind) for kind in KINDS_OF_INPUTS):
        return
    arguments = [name for name in model.arguments if not (without and name.startswith(KINDS_OF_INPUTS[without]))]
    forms: list[list[Batch]] = [[{}]]
    if {"pixel_values", "image_pixel_values", "pixel_values_videos", "images"} & set(arguments):
        forms.append(_images(arguments, draw, "video" in model.kind))
    if {"input_features", "input_values", "audio_input_features", "audio_values"} & set(arguments):
        forms.append(_sounds(arguments, draw, SOUND * 3 if "xvector" in model.kind else SOUND))
    if len(forms) == 3:  # images and sound, or either
        forms = [forms[0], [*forms[1], {}], [*forms[2], {}]]
    for chosen in itertools.product(*forms):
        if len(forms) == 3 and not any(chosen):
            continue
        inputs: Batch = {name: value for form in chosen for name, value in form.items()}
        try:
            if "past_values" in arguments:
                inputs.update(_series(arguments, draw))
            if "input_ids" in arguments or ("inputs" in arguments and not inputs):
                inputs.update(_tokens(model, net, draw, inputs))
            inputs.update(_features(arguments, draw))
            inputs.update(_labels(model, net, draw, inputs))
        except Exception as error:
            yield error
        else:
            yield inputs


def left_out(model: ModelClass, batch: Batch) -> str:
    """The kind of inputs that a batch lacks, of a class that takes tokens and features; "" where it has both."""
    takes = all(_have(model.arguments, kind) for kind in KINDS_OF_INPUTS)
    return next((kind for kind in KINDS_OF_INPUTS if takes and not _have(batch, kind)), "")


def _have(names: Iterable[str], kind: str) -> bool:
    return any(name.startswith(KINDS_OF_INPUTS[kind]) for name in names)


class _Draw:
    """Random numbers, and the sizes that a configuration or a nested one states."""

    def __init__(self, config: Any, seed: int):
        self.config = config
        self.generator = torch.Generator().manual_seed(seed)

    def find(self, *names: str, default: Any = None, inside: tuple[str, ...] = ()) -> Any:
        """The first of these fields that the configuration, or one nested in it, has."""
        for name in names:
            for config in _all_configs(self.config, inside):
                value = get(config, name)
                if value is not None:
                    return value
        return default

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)


def _all_configs(config: Any, inside: tuple[str, ...] = ()) -> Iterator[Any]:
    nested = [(name, each) for name, each in vars(config).items() if hasattr(each, "to_dict")]
    if not inside:
        yield config
    for name, each in nested:
        if not inside or any(word in name for word in inside):
            yield from _all_configs(each)
    if inside:
        yield config
        for _, each in nested:
            yield from _all_configs(each)


VISION = ("vision", "vit", "image", "backbone")
TEXT = ("text", "llm", "language", "decoder", "thinker")
WORDS = {
    "image": ("pixel", "image_", "spatial", "target", "qformer", "high_res"), "video": ("video",),
    "audio": ("input_features", "input_values", "audio", "padding_mask", "feature_attention"),
}  # fmt: skip
KINDS_OF_INPUTS = {"features": ("pixel", "image", "audio", "input_features", "input_values"), "tokens": ("input_ids",)}
SOUNDS = ("audio", "sound", "speech", "encoder")


def _pair(size: Any) -> tuple[int, int]:
    if isinstance(size, (list, tuple)):
        return int(size[0]), int(size[-1])
    return int(size), int(size)


def _images(arguments: list[str], draw: _Draw, video: bool) -> list[Batch]:
    """Images in each form that processors make: patches with their grid, or pixels with 4, 5 or 6 dimensions."""
    height, width = _pair(draw.find("image_size", "img_size", "input_size", default=64, inside=VISION))
    channels = draw.find("num_channels", "in_channels", "in_chans", default=3, inside=VISION)
    channels = channels if isinstance(channels, int) else 3
    patch = _pair(draw.find("patch_size", "spatial_patch_size", default=16, inside=VISION))[0]
    if "image_grid_thw" in arguments or "spatial_shapes" in arguments or "image_position_ids" in arguments:
        side = 4
        temporal = draw.find("temporal_patch_size", default=1, inside=VISION)
        temporal = _pair(temporal)[0] if "image_grid_thw" in arguments else 1
        content = channels * temporal * patch * patch
        if "image_grid_thw" in arguments:
            patches = draw.normal(ROWS * side * side, content)
            grid = torch.tensor([[1, side, side]] * ROWS)
            squares = patches.view(-1, channels, patch, patch) if temporal == 1 else patches
            more: Batch = {}
            if "image_merge_sizes" in arguments:
                more["image_merge_sizes"] = torch.full((ROWS,), draw.find("spatial_merge_size", default=1))
            padded = patches.view(ROWS, side * side, content)
            return [{"pixel_values": each, "image_grid_thw": grid, **more} for each in (patches, squares, padded)]
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).expand(ROWS, -1, -1).contiguous()
        patches = draw.normal(ROWS, side * side, content)
        if "image_position_ids" in arguments:
            return [{"pixel_values": patches, "image_position_ids": places}]
        shapes = torch.full((ROWS, 2), side)
        mask = torch.ones(ROWS, side * side, dtype=torch.long)
        return [{"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes}]
    name = next(n for n in ("pixel_values", "image_pixel_values", "pixel_values_videos", "images") if n in arguments)
    sizes = torch.tensor([[height, width]] * ROWS)
    extra: Batch = {each: sizes for each in ("image_sizes", "target_sizes") if each in arguments}
    needed: Batch = {}
    if "qformer_input_ids" in arguments:
        needed["qformer_input_ids"] = draw.integers(4, 90, ROWS, TOKENS)
    if "high_res_pixel_values" in arguments:
        side = _pair(draw.find("image_size", inside=("high_res",)))[0]
        needed["high_res_pixel_values"] = draw.normal(ROWS, channels, side, side)
    if "image_attention_mask" in arguments and name == "pixel_values":
        needed["image_attention_mask"] = torch.ones(ROWS, TOKENS, 1, dtype=torch.long)
    pixels = draw.normal(ROWS, channels, height, width)
    frames = draw.find("num_frames", "frames_per_clip", default=FRAMES)
    stacks = draw.normal(ROWS, frames, channels, height, width)
    tiles = draw.normal(ROWS, 1, channels, height, width)
    forms: list[Batch] = [{name: pixels}, {name: tiles}, {name: stacks}]
    if video or name == "pixel_values_videos":
        forms = [{name: stacks}]
    elif "image_sizes" in arguments and draw.find("image_grid_pinpoints") is not None:
        forms = [{name: draw.normal(ROWS, 2, channels, height, width)}]
    elif "pixel_attention_mask" in arguments:
        mask = torch.ones(ROWS, 1, height, width, dtype=torch.long)
        forms = [{name: tiles, "pixel_attention_mask": mask}, {name: tiles}, {name: pixels}]
    elif "aspect_ratio_ids" in arguments:
        most = draw.find("max_num_tiles", default=4, inside=VISION)
        mask = torch.zeros(ROWS, 1, most, dtype=torch.long)
        mask[..., 0] = 1
        ids = torch.ones(ROWS, 1, dtype=torch.long)
        stack = draw.normal(ROWS, 1, most, channels, height, width)
        forms = [{name: stack, "aspect_ratio_ids": ids, "aspect_ratio_mask": mask}]
    elif "keypoint" in type(draw.config).__name__.lower() or "glue" in type(draw.config).__name__.lower():
        forms = [{name: draw.normal(ROWS, 2, channels, height, width)}]
    if "pixel_mask" in arguments:
        forms = [{**form, "pixel_mask": torch.ones(ROWS, height, width, dtype=torch.long)} for form in forms] + forms
    forms = [{**form, **needed} for form in forms]
    return [*forms, *({**form, **extra} for form in forms if extra)]


def _features(arguments: list[str], draw: _Draw) -> Batch:
    """Features of images that another model has made."""
    found: Batch = {}
    if "visual_embeds" in arguments:
        found["visual_embeds"] = draw.normal(ROWS, BOXES, draw.find("visual_embedding_dim", default=64))
        found["visual_attention_mask"] = torch.ones(ROWS, BOXES, dtype=torch.long)
    if "visual_feats" in arguments:
        found["visual_feats"] = draw.normal(ROWS, BOXES, draw.find("visual_feat_dim"))
        found["visual_pos"] = draw.normal(ROWS, BOXES, draw.find("visual_pos_dim"))
    if "flattened_patches" in arguments:
        places = torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0)).expand(ROWS, -1, -1)
        patches = draw.normal(ROWS, 16, draw.find("patch_embed_hidden_size"))
        found["flattened_patches"] = torch.cat([places, patches], -1)
    return found


def _sounds(arguments: list[str], draw: _Draw, length: int) -> list[Batch]:
    """Sound as samples, or as features per frame with either dimension last."""
    sizes = ("feature_projection_input_dim", "num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels")
    bins = draw.find(*sizes, default=80)
    frames = MEL
    positions = draw.find("max_source_positions", inside=SOUNDS)
    if isinstance(positions, int) and positions <= 64:
        frames = 2 * positions
    if "input_features" in arguments or "audio_input_features" in arguments:
        name = "input_features" if "input_features" in arguments else "audio_input_features"
        forms = [{name: draw.normal(ROWS, bins, frames)}, {name: draw.normal(ROWS, frames, bins)}]
        mask = torch.ones(ROWS, frames, dtype=torch.long)
        if "feature_attention_mask" in arguments:
            forms = [{**form, "feature_attention_mask": mask} for form in forms]
        masked = [{**form, "input_features_mask": mask} for form in forms] if "input_features_mask" in arguments else []
        if "attention_mask" in arguments and "input_ids" not in arguments:
            forms += [{**form, "attention_mask": mask} for form in forms]
        waves: list[Batch] = [{"input_values": draw.normal(ROWS, length)}] if "input_values" in arguments else []
        return [*masked, *forms, *waves]
    name = "input_values" if "input_values" in arguments else "audio_values"
    samples = draw.normal(ROWS, length)
    if "padding_mask" in arguments:
        mask = torch.ones(ROWS, length, dtype=torch.long)
        forms = [{name: samples[:, None]}, {name: samples, "padding_mask": mask}, {name: samples}]
        return [*forms, {name: samples[:, None], "padding_mask": mask}]
    return [{name: samples}, {name: draw.normal(ROWS, MEL, bins)}, {name: draw.normal(ROWS, bins, MEL)},
            {name: samples[:, None]}]  # fmt: skip


def _series(arguments: list[str], draw: _Draw) -> Batch:
    length = draw.find("context_length", default=64)
    channels = draw.find("num_input_channels", default=1)
    if "future_values" in arguments:
        values = draw.normal(ROWS, length)
        return {"past_values": values, "future_values": draw.normal(ROWS, draw.find("horizon_length", default=8))}
    return {"past_values": draw.normal(ROWS, length, channels)}


def _tokens(model: ModelClass, net: nn.Module, draw: _Draw, inputs: Batch) -> Batch:
    """Token ids with the places of images and sound, their mask, and what the library derives of them."""
    vocabulary = draw.find("vocab_size", default=128, inside=TEXT)
    vocabulary = vocabulary if isinstance(vocabulary, int) else 128
    special = {value for config in _all_configs(draw.config) for name, value in vars(config).items()
               if name.endswith(("_id", "_index")) and isinstance(value, int)}  # fmt: skip
    usable = torch.tensor([each for each in range(vocabulary) if each not in special and each > 3])
    choices = 2 if model.kind == "multiple_choice" else 0
    shape = (ROWS, choices, TOKENS) if choices else (ROWS, TOKENS)
    ids = usable[draw.integers(0, len(usable), *shape)]
    mask = torch.ones_like(ids)
    mask[-1, ..., -PADDING:] = 0
    kinds = torch.zeros_like(ids)
    for name, number in (("image", 1), ("audio", 3), ("video", 2)):
        count = _feature_count(net, name, inputs)
        token = draw.find(f"{name}_token_id", f"{name}_token_index", f"{name}_token")
        if count and isinstance(token, int):
            places = torch.full((ROWS, count), token)
            before = [draw.find(f"{name}_start_token_id", "vision_start_token_id", "boi_token_id")]
            after = [draw.find(f"{name}_end_token_id", "vision_end_token_id", "eoi_token_id")]
            row = [torch.full((ROWS, 1), each) for each in before if isinstance(each, int)]
            row += [places, *(torch.full((ROWS, 1), each) for each in after if isinstance(each, int))]
            put = torch.cat(row, 1)
            ids = torch.cat([ids[:, :1], put, ids[:, 1:]], 1)
            mask = torch.cat([torch.ones_like(put), mask], 1)
            kinds = torch.cat([kinds[:, :1], (put == token).long() * number, kinds[:, 1:]], 1)
    eos = draw.find("eos_token_id", inside=TEXT)
    if model.kind == "sequence_classification" and isinstance(eos, int) and "decoder_input_ids" in model.arguments:
        ids[:, -PADDING - 1] = eos  # these read the hidden state of the last end of a sentence
    pad = draw.find("pad_token_id", inside=TEXT)
    if isinstance(pad, int):
        ids = ids.masked_fill(mask == 0, pad)
    found: Batch = {"input_ids" if "input_ids" in model.arguments else "inputs": ids}
    if "attention_mask" in model.arguments:
        found["attention_mask"] = mask
    if "mm_token_type_ids" in model.arguments:
        found["mm_token_type_ids"] = kinds
    if "token_type_ids" in model.arguments and kinds.any():
        found["token_type_ids"] = kinds
    if "bbox" in model.arguments:
        found["bbox"] = torch.tensor([1, 2, 3, 4]).expand(*ids.shape, 4).contiguous()
    if "image_embeds_position_mask" in model.arguments:
        count = draw.find("latent_query_num", default=4)
        places = torch.zeros_like(ids)
        places[:, 1 : 1 + count] = 1
        found["image_embeds_position_mask"] = places
    return found


def _feature_count(net: nn.Module, name: str, inputs: Batch) -> int:
    """The number of tokens of a row whose place its image, video or sound takes."""
    question = f"get_{name}_features"
    ask = getattr(net, question, None) or getattr(getattr(net, "model", None), question, None)
    words = WORDS[name]
    given = {key: value for key, value in inputs.items() if key.startswith(words)}
    if ask is None or not given:
        return 0
    with torch.no_grad():
        found = ask(**given)
    if hasattr(found, "pooler_output"):
        found = found.last_hidden_state if found.pooler_output is None else found.pooler_output
    if isinstance(found, (list, tuple)):
        found = torch.cat([each.reshape(-1, each.shape[-1]) for each in found])
    return found.numel() // found.shape[-1] // ROWS


def _labels(model: ModelClass, net: nn.Module, draw: _Draw, inputs: Batch) -> Batch:
    arguments, kind, config = model.arguments, model.kind, draw.config
    ids = inputs.get("input_ids", inputs.get("inputs"))
    classes = getattr(config, "num_labels", 2) or 2
    found: Batch = {}
    if "return_loss" in arguments:
        found["return_loss"] = True
    if "start_positions" in arguments:
        return {"start_positions": draw.integers(0, 4, ROWS), "end_positions": draw.integers(4, 8, ROWS)}
    if "target_values" in arguments:
        is_class = "classification" in kind
        targets = draw.find("num_targets", default=1)
        return {"target_values": draw.integers(0, targets, ROWS) if is_class else draw.normal(ROWS, targets)}
    if "bool_masked_pos" in arguments and "labels" not in arguments:
        pixels = inputs["pixel_values"]
        patch = _pair(draw.find("patch_size", default=16, inside=VISION))
        places = (pixels.shape[-2] // patch[0]) * (pixels.shape[-1] // patch[1])
        places *= pixels.shape[1] // draw.find("tubelet_size") if pixels.dim() == 5 else 1
        mask = torch.zeros(ROWS, places, dtype=torch.bool)
        mask[:, ::2] = True
        return {**found, "bool_masked_pos": mask}
    if "mask_labels" in arguments:
        height, width = inputs["pixel_values"].shape[-2:]
        masks = [draw.integers(0, 2, BOXES, height, width).float() for _ in range(ROWS)]
        return {"mask_labels": masks, "class_labels": [draw.integers(0, classes, BOXES) for _ in range(ROWS)]}
    if "labels" not in arguments:
        return found
    if kind in ("object_detection", "zero_shot_object_detection", "image_segmentation", "instance_segmentation",
                "universal_segmentation"):  # fmt: skip
        boxes = [0.2 + 0.3 * torch.rand(BOXES, 4, generator=draw.generator) for _ in range(ROWS)]
        targets = [{"class_labels": draw.integers(0, classes, BOXES), "boxes": each} for each in boxes]
        if "segmentation" in kind:
            height, width = inputs["pixel_values"].shape[-2:]
            targets = [{**each, "masks": draw.integers(0, 2, BOXES, height, width).float()} for each in targets]
        return {"labels": targets}
    if kind == "depth_estimation":
        return {"labels": draw.normal(ROWS, *inputs["pixel_values"].shape[-2:]).abs() + 0.1}
    if kind == "semantic_segmentation":
        height, width = inputs["pixel_values"].shape[-2:]
        return {"labels": draw.integers(0, classes, ROWS, height, width)}
    if kind in ("sequence_classification", "image_classification", "audio_classification", "video_classification",
                "next_sentence_prediction", "audio_xvector"):  # fmt: skip
        return {"labels": draw.integers(0, classes, ROWS)}
    if kind == "audio_frame_classification":
        frames = next(iter(inputs.values())).shape[1]
        if "input_values" in inputs:
            frames = int(net._get_feat_extract_output_lengths(frames))  # type: ignore[operator]
        return {"labels": F.one_hot(draw.integers(0, classes, ROWS, frames), classes)}
    if kind == "multiple_choice":
        return {"labels": draw.integers(0, 2, ROWS)}
    if kind == "token_classification":
        return {"labels": draw.integers(0, classes, *ids.shape)}
    if kind in ("ctc", "rnnt", "tdt"):
        return {"labels": draw.integers(4, min(draw.find("vocab_size", default=32), 96), ROWS, 4)}
    if kind == "visual_question_answering" and "decoder_input_ids" not in arguments:
        return {"labels": torch.rand(ROWS, classes, generator=draw.generator)}
    if kind == "visual_question_answering":
        return {"labels": ids.clone()}  # which the decoder reads, too
    if kind == "question_answering":
        return {"labels": draw.integers(0, draw.find("num_qa_labels"), ROWS)}
    if "next_sentence_label" in arguments or "sentence_order_label" in arguments:
        name = "next_sentence_label" if "next_sentence_label" in arguments else "sentence_order_label"
        found[name] = draw.integers(0, 2, ROWS)
    if ids is None or ("input_features" in inputs and "decoder_input_ids" in arguments):
        vocabulary = draw.find("vocab_size", default=96, inside=TEXT)
        return {**found, "labels": draw.integers(4, min(vocabulary, 90), ROWS, TOKENS // 2)}
    if "visual_embeds" in inputs:  # and in the output come after the tokens
        ids = torch.cat([ids, ids[:, :BOXES]], 1)
    mask = inputs.get("attention_mask")
    labels = ids if mask is None or mask.shape != ids.shape else ids.masked_fill(mask == 0, -100)
    if inputs.get("mm_token_type_ids") is not None:
        labels = labels.masked_fill(inputs["mm_token_type_ids"] > 0, -100)
    if model.name.startswith("Musicgen"):  # has a dimension of codebooks
        labels = labels[..., None]
    return {**found, "labels": labels.clone()}
