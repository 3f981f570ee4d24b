"""Vision-language models of transformers, tiny: images of several sizes and numbers in one step, against eager."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock

pytest.importorskip("transformers")
from penstock.bench.model_zoo.compare import SGD, build
from penstock.bench.vision import model_class
from penstock.errors import StaleModelWarning

Batch = dict[str, Tensor]
A, B, C = (1, 4, 4), (1, 4, 6), (1, 2, 4)  # grids of patches
STEPS = [[[[A], [B]], [[A, C], []]], [[[A], [B]], [[B], [B, B]]], [[[B], [B, B]], [[A, C], []]]]
TOKENS, MERGED = 40, 4  # of a row; patches of a token


def batch_of(net: nn.Module, rows: list[list[tuple[int, int, int]]], seed: int) -> Batch:
    generator, config = torch.Generator().manual_seed(seed), net.config
    first = getattr(config, "vision_start_token_id", None) or config.image_start_token_id
    last = getattr(config, "vision_end_token_id", None) or config.image_end_token_id
    ids = torch.randint(5, 90, (len(rows), TOKENS), generator=generator)
    for row, images in zip(ids, rows):
        counts = [t * height * width // MERGED for t, height, width in images]
        tokens = [token for n in counts for token in [first, *[config.image_token_id] * n, last]]
        row[1 : 1 + len(tokens)] = torch.tensor(tokens, dtype=ids.dtype)
    grid = torch.tensor([image for images in rows for image in images])
    vision = config.vision_config
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    is_image = ids == config.image_token_id
    found = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "image_grid_thw": grid,
        "pixel_values": torch.randn(int(grid.prod(-1).sum()), width, generator=generator),
        "labels": ids.masked_fill(is_image, -100), "mm_token_type_ids": is_image.long(),
    }  # fmt: skip
    found["labels"][0, :5] = -100
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Glm4v"])
def test_steps_with_images_of_several_sizes(family: str) -> None:
    net = build(model_class(family))
    twin: Any = copy.deepcopy(net)
    batches = [[batch_of(net, rows, 7 * i + j) for j, rows in enumerate(step)] for i, step in enumerate(STEPS)]
    optimizer, hardware = SGD(twin.parameters()), penstock.Hardware.cpu(num_devices=2, memory="3GB", dram="6GB")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", StaleModelWarning)  # what captures a form is no use of the old weights
        job = penstock.compile(net, hardware, example_inputs=batches[0], optimizer=SGD, strategy="gpipe")
        with job:
            for step in batches:
                loss = twin(**{name: torch.cat([each[name] for each in step]) for name in step[0]}).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                torch.testing.assert_close(job.step(step), loss.detach(), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(job.state_dict(), dict(twin.state_dict()), rtol=1e-5, atol=1e-5)


def images_of(net: nn.Module, rows: list[list[tuple[int, int]]], seed: int) -> Batch:
    """Of Mistral 3: images by height and width, in pixels, filled up to the largest."""
    generator, config = torch.Generator().manual_seed(seed), net.config
    sizes = [image for images in rows for image in images]
    height, width = (max(each[dim] for each in sizes) for dim in (0, 1))
    ids, per_token = torch.randint(5, 90, (len(rows), 16), generator=generator), (14 * config.spatial_merge_size) ** 2
    ids.masked_fill_(ids == config.image_token_index, 5)
    for row, images in zip(ids, rows):
        row[1 : 1 + sum(h * w // per_token for h, w in images)] = config.image_token_index
    pixels = torch.randn(len(sizes), 3, height, width, generator=generator)
    labels = ids.masked_fill(ids == config.image_token_index, -100)
    labels[0, :5] = -100
    return {
        "pixel_values": pixels, "image_sizes": torch.tensor(sizes), "input_ids": ids,
        "attention_mask": torch.ones_like(ids), "labels": labels,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_mistral_with_images_in_one_row_of_patches() -> None:
    """Its tower sees all images of a micro-batch in one row, apart by a mask: nothing warns that rows meet."""
    net = build(model_class("Mistral3"))
    twin: Any = copy.deepcopy(net)
    a, b, c = (56, 56), (56, 84), (28, 56)
    first = images_of(net, [[a]] * 4, 0)
    steps: list[Any] = [
        first,
        images_of(net, [[b]] * 4, 1),
        [images_of(net, [[a], [b]], 2), images_of(net, [[c, a], []], 3)],
    ]
    optimizer, hardware = SGD(twin.parameters()), penstock.Hardware.cpu(num_devices=2, memory="3GB", dram="6GB")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*rows of a batch are coupled")
        job = penstock.compile(net, hardware, example_inputs=first, optimizer=SGD, strategy="gpipe", micro_batches=2)
        with job:
            for step in steps:
                parts = step if isinstance(step, list) else [step]
                counts = [(each["labels"][:, 1:] != -100).sum() for each in parts]
                loss = sum(twin(**each).loss * n for each, n in zip(parts, counts)) / sum(counts)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                torch.testing.assert_close(job.step(step), loss.detach(), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(job.state_dict(), dict(twin.state_dict()), rtol=1e-5, atol=1e-5)
