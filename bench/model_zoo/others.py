"""Models that are not of transformers, tiny: of diffusers, timm, torchvision, PyTorch Geometric, and torch.nn itself.

Each has a batch of its own. Its loss is a cross entropy where it classifies, else the mean square of the difference
from a drawn target.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .batches import ROWS, Batch

Made = tuple[nn.Module, Batch]
TARGET = "target"
SIDE = 64  # of an image


@dataclass(frozen=True)
class OtherModel:
    """A model by its library, which is its family, and its name there."""

    name: str
    family: str
    kind: str

    has_loss = True

    def make(self) -> Made:
        """A tiny instance in training mode, and its batch with a target."""
        torch.manual_seed(0)
        net, batch = TABLE[self.family, self.kind][self.name]()
        for module in net.modules():
            if hasattr(module, "dropout_prob"):  # of labels: draws of a micro-batch are not those of a whole batch
                module.dropout_prob = 0.0
        with torch.no_grad():
            output = output_of(net.train()(**batch))
        is_class = output.dim() == 2
        target = torch.arange(len(output)) % output.shape[1] if is_class else torch.randn(output.shape)
        return net, {**batch, TARGET: target}

    @property
    def library(self) -> str:
        return self.family


def other_models(only: str = "") -> Iterator[OtherModel]:
    """Every model of the tables, or those in whose name, family or kind one of these expressions is found."""
    wanted = [re.compile(word, re.IGNORECASE) for word in only.split(",") if word]
    for (family, kind), models in TABLE.items():
        for name in models:
            if not wanted or any(word.search(f"{name} {family} {kind}") for word in wanted):
                yield OtherModel(name, family, kind)


def loss_of(output: Any, batch: Batch) -> Tensor:
    """The loss of an output of forward."""
    found, target = output_of(output), batch[TARGET]
    return F.mse_loss(found, target) if target.is_floating_point() else F.cross_entropy(found, target)


def output_of(output: Any) -> Tensor:
    """The tensor that the loss is of: the first, where forward gives several."""
    while not isinstance(output, Tensor):
        output = output[0]
    return output


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape)


# --- diffusers


def _diffusers(name: str, batch: Batch, **config: Any) -> Made:
    diffusers = importlib.import_module("diffusers")
    diffusers.logging.set_verbosity_error()
    return getattr(diffusers, name)(**config), batch


def _steps() -> Tensor:
    """The timestep of each row."""
    return torch.arange(ROWS) * 100 + 1


def _latents(*more: int) -> Tensor:
    return _normal(ROWS, 4, *more, 8, 8)


def _text() -> Tensor:
    return _normal(ROWS, 6, 32)


HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
LEVELS = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}


def _unet(timestep: Tensor) -> Made:
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    return _diffusers("UNet2DModel", {"sample": _normal(ROWS, 3, 16, 16), "timestep": timestep}, sample_size=16,
                      **blocks, **LEVELS)  # fmt: skip


def _conditional_unet(**batch: Tensor) -> Made:
    blocks = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    inputs = {"sample": _latents(), "timestep": _steps(), "encoder_hidden_states": _text(), **batch}
    return _diffusers("UNet2DConditionModel", inputs, sample_size=8, cross_attention_dim=32, attention_head_dim=8,
                      **blocks, **LEVELS)  # fmt: skip


def _flux(**batch: Tensor) -> Made:
    inputs = {
        "hidden_states": _normal(ROWS, 16, 8), "encoder_hidden_states": _text(),
        "pooled_projections": _normal(ROWS, 32), "timestep": torch.linspace(0.1, 0.9, ROWS),
        "guidance": torch.full((ROWS,), 3.5),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0)),
        "txt_ids": torch.zeros(6, 3), **batch,
    }  # fmt: skip
    return _diffusers("FluxTransformer2DModel", inputs, in_channels=8, num_layers=2, num_single_layers=2,
                      joint_attention_dim=32, pooled_projection_dim=32, guidance_embeds=True, axes_dims_rope=(4, 6, 6),
                      **HEADS)  # fmt: skip


class _WithPlaces(nn.Module):
    """A Flux transformer that holds the places of its tokens, which have no rows, so that batches can be cut."""

    def __init__(self, transformer: nn.Module, **places: Tensor):
        super().__init__()
        self.transformer, self.names = transformer, list(places)
        for name, value in places.items():
            self.register_buffer(name, value)

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, pooled_projections: Tensor, timestep: Tensor,
        guidance: Tensor,
    ) -> Any:  # fmt: skip
        places = {name: getattr(self, name) for name in self.names}
        return self.transformer(
            hidden_states, encoder_hidden_states, pooled_projections, timestep, guidance=guidance, **places
        )


def _flux_with_places() -> Made:
    net, batch = _flux()
    places = {name: batch.pop(name) for name in ("img_ids", "txt_ids")}
    return _WithPlaces(net, **places), batch


IMAGES: dict[str, Callable[[], Made]] = {
    "UNet2DModel": lambda: _unet(_steps()),
    "UNet2DModel, one timestep": lambda: _unet(torch.tensor(7)),
    "UNet2DConditionModel": _conditional_unet,
    "UNet2DConditionModel, one timestep": lambda: _conditional_unet(timestep=torch.tensor(7)),
    "UNet2DConditionModel, masked text": lambda: _conditional_unet(
        encoder_attention_mask=(torch.arange(6) < torch.arange(2, 6)[:, None]).long()
    ),
    "DiTTransformer2DModel": lambda: _diffusers(
        "DiTTransformer2DModel",
        {"hidden_states": _latents(), "timestep": _steps(), "class_labels": torch.arange(ROWS)},
        in_channels=4, num_layers=2, sample_size=8, norm_num_groups=8, num_embeds_ada_norm=10, **HEADS,
    ),
    "PixArtTransformer2DModel": lambda: _diffusers(
        "PixArtTransformer2DModel",
        {"hidden_states": _latents(), "encoder_hidden_states": _text(), "timestep": _steps(),
         "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
        num_layers=2, sample_size=8, cross_attention_dim=32, caption_channels=32, norm_num_groups=8, **HEADS,
    ),
    "SD3Transformer2DModel": lambda: _diffusers(
        "SD3Transformer2DModel",
        {"hidden_states": _latents(), "encoder_hidden_states": _text(), "pooled_projections": _normal(ROWS, 32),
         "timestep": _steps()},
        sample_size=8, in_channels=4, out_channels=4, num_layers=2, joint_attention_dim=32, caption_projection_dim=32,
        pooled_projection_dim=32, pos_embed_max_size=8, **HEADS,
    ),
    "FluxTransformer2DModel": _flux,
    "FluxTransformer2DModel, places as buffers": _flux_with_places,
    "AutoencoderKL": lambda: _diffusers(
        "AutoencoderKL", {"sample": _normal(ROWS, 3, 32, 32)}, down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, sample_size=32, **LEVELS,
    ),
}  # fmt: skip
VIDEOS: dict[str, Callable[[], Made]] = {
    "WanTransformer3DModel": lambda: _diffusers(
        "WanTransformer3DModel", {"hidden_states": _latents(3), "timestep": _steps(), "encoder_hidden_states": _text()},
        in_channels=4, out_channels=4, text_dim=32, freq_dim=32, ffn_dim=64, num_layers=2, rope_max_seq_len=32, **HEADS,
    ),
    "HunyuanVideoTransformer3DModel": lambda: _diffusers(
        "HunyuanVideoTransformer3DModel",
        {"hidden_states": _latents(3), "timestep": _steps(), "encoder_hidden_states": _text(),
         "encoder_attention_mask": (torch.arange(6) < torch.arange(2, 6)[:, None]).long(),
         "pooled_projections": _normal(ROWS, 32), "guidance": torch.full((ROWS,), 6.0)},
        in_channels=4, out_channels=4, num_layers=2, num_single_layers=2, num_refiner_layers=1, text_embed_dim=32,
        pooled_projection_dim=32, rope_axes_dim=(4, 6, 6), **HEADS,
    ),
    "CogVideoXTransformer3DModel": lambda: _diffusers(
        "CogVideoXTransformer3DModel",
        {"hidden_states": _normal(ROWS, 3, 4, 8, 8), "timestep": _steps(), "encoder_hidden_states": _text()},
        in_channels=4, out_channels=4, time_embed_dim=32, text_embed_dim=32, num_layers=2, sample_width=8,
        sample_height=8, sample_frames=9, max_text_seq_length=6, **HEADS,
    ),
}  # fmt: skip


# --- timm and torchvision


def import_vision() -> None:
    """Import torchvision if it is there. Its wheels of PyPI are made for CUDA: beside PyTorch for CPUs their operators
    are missing, which no model here calls, and two must be defined before it can be imported."""
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")


def _timm(name: str, side: int = SIDE, argument: str = "x", **config: Any) -> Callable[[], Made]:
    def make() -> Made:
        import_vision()
        net = importlib.import_module("timm").create_model(name, num_classes=5, **config)
        return net, {argument: _normal(ROWS, 3, side, side)}

    return make


def _torchvision(name: str, **config: Any) -> Callable[[], Made]:
    def make() -> Made:
        import_vision()
        net = getattr(importlib.import_module("torchvision.models"), name)(num_classes=5, **config)
        return net, {"x": _normal(ROWS, 3, SIDE, SIDE)}

    return make


VIT = {"img_size": SIDE, "embed_dim": 48, "depth": 3, "num_heads": 3}
TIMM = {
    "resnet50": _timm("resnet50"),
    "resnet18": _timm("resnet18"),
    "mobilenetv3_small_100": _timm("mobilenetv3_small_100"),
    "efficientnet_b0": _timm("efficientnet_b0"),
    "vit_base_patch16_224": _timm("vit_base_patch16_224", **VIT),
    "convnext_tiny": _timm("convnext_tiny", depths=(1, 1, 2, 1), dims=(16, 32, 48, 64)),
    "swin_tiny_patch4_window7_224": _timm("swin_tiny_patch4_window7_224", img_size=SIDE, window_size=4, embed_dim=24,
                                          depths=(2, 2), num_heads=(2, 4), drop_path_rate=0.0),
    "deit_base_distilled_patch16_224": _timm("deit_base_distilled_patch16_224", **VIT),
    "beit_base_patch16_224": _timm("beit_base_patch16_224", **VIT),
    "regnety_002": _timm("regnety_002"),
    "eva02_tiny_patch14_224": _timm("eva02_tiny_patch14_224", 56, **{**VIT, "img_size": 56}),
    "tf_efficientnetv2_b0": _timm("tf_efficientnetv2_b0"),
}  # fmt: skip
TORCHVISION = {
    "resnet18": _torchvision("resnet18"),
    "vit_b_16": _torchvision("VisionTransformer", image_size=SIDE, patch_size=16, num_layers=2, num_heads=2,
                             hidden_dim=32, mlp_dim=64),
}  # fmt: skip


# --- graphs of PyTorch Geometric: nodes of all graphs in one tensor, edges as [2, E]

NODES, FEATURES, GRAPHS = 11, 8, 3


def _edges() -> Tensor:
    return torch.cat([torch.randint(0, NODES, (2, 24)), torch.arange(NODES).expand(2, -1)], 1)


def _graph(layer: str, **more: Any) -> Callable[[], Made]:
    """Classes of nodes, by the library's own model of several layers."""

    def make() -> Made:
        models = importlib.import_module("torch_geometric.nn")
        net = getattr(models, layer)(FEATURES, 16, num_layers=3, out_channels=4, **more)
        return net, {"x": _normal(NODES, FEATURES), "edge_index": _edges()}

    return make


class _Pooled(nn.Module):
    """Classes of whole graphs: the mean of the nodes of each."""

    def __init__(self, layers: nn.Module, pool: Callable[..., Tensor]):
        super().__init__()
        self.layers, self.pool, self.head = layers, pool, nn.Linear(16, 4)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return self.head(self.pool(self.layers(x, edge_index), batch, GRAPHS))


def _graph_classes(layer: str) -> Callable[[], Made]:
    def make() -> Made:
        models = importlib.import_module("torch_geometric.nn")
        net = _Pooled(getattr(models, layer)(FEATURES, 16, num_layers=2), models.global_mean_pool)
        graph_of_node = torch.arange(NODES) * GRAPHS // NODES
        return net, {"x": _normal(NODES, FEATURES), "edge_index": _edges(), "batch": graph_of_node}

    return make


NODE_CLASSES = {
    "GCN": _graph("GCN"), "GAT": _graph("GAT", heads=2), "GAT v2": _graph("GAT", heads=2, v2=True),
    "GraphSAGE": _graph("GraphSAGE"), "GIN": _graph("GIN"),
}  # fmt: skip
GRAPH_CLASSES = {f"{layer}, pooled": _graph_classes(layer) for layer in ("GCN", "GraphSAGE", "GIN")}


# --- torch.nn itself

LENGTH, WIDTH = 10, 16


class _Recurrent(nn.Module):
    """Tokens, a recurrent layer, and the next token of each."""

    def __init__(self, layer: nn.Module, width: int):
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(32, WIDTH), layer, nn.Linear(width, 32)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(ids))[0])


class _Transformer(nn.Module):
    """An encoder and a decoder with their masks, as its page shows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.layers = nn.Transformer(WIDTH, 2, 2, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, src: Tensor, tgt: Tensor, src_key_padding_mask: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        out: Tensor = self.layers(self.embed(src), self.embed(tgt), tgt_mask=mask, tgt_is_causal=True,
                                  src_key_padding_mask=src_key_padding_mask,
                                  memory_key_padding_mask=src_key_padding_mask)  # fmt: skip
        return self.head(out)


def _ids() -> Tensor:
    return torch.randint(0, 32, (ROWS, LENGTH))


def _padding() -> Tensor:
    return torch.arange(LENGTH) >= torch.arange(LENGTH - ROWS, LENGTH)[:, None]


def _encoder(**more: Any) -> Made:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True, **more)
    return nn.TransformerEncoder(layer, 3), {"src": _normal(ROWS, LENGTH, WIDTH), "src_key_padding_mask": _padding()}


def _decoder() -> Made:
    layer = nn.TransformerDecoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerDecoder(layer, 2), {"tgt": _normal(ROWS, LENGTH, WIDTH), "memory": _normal(ROWS, 6, WIDTH)}


def _sequence_first() -> Made:
    net = nn.Transformer(WIDTH, 2, 2, 2, 32, dropout=0.0)
    return net, {"src": _normal(LENGTH, ROWS, WIDTH), "tgt": _normal(LENGTH, ROWS, WIDTH)}


def _tokens(layer: nn.Module, width: int) -> Made:
    return _Recurrent(layer, width), {"ids": _ids()}


NN: dict[str, Callable[[], Made]] = {
    "Transformer": lambda: (_Transformer(), {"src": _ids(), "tgt": _ids(), "src_key_padding_mask": _padding()}),
    "Transformer, sequence first": _sequence_first,
    "TransformerEncoder": _encoder,
    "TransformerEncoder, norm first": lambda: _encoder(norm_first=True, activation="gelu"),
    "TransformerDecoder": _decoder,
    "LSTM": lambda: _tokens(nn.LSTM(WIDTH, 24, 2, batch_first=True), 24),
    "LSTM, both ways": lambda: _tokens(nn.LSTM(WIDTH, 24, batch_first=True, bidirectional=True), 48),
    "GRU": lambda: _tokens(nn.GRU(WIDTH, 24, 2, batch_first=True), 24),
    "RNN": lambda: _tokens(nn.RNN(WIDTH, 24, batch_first=True), 24),
}

TABLE: dict[tuple[str, str], dict[str, Callable[[], Made]]] = {
    ("diffusers", "image"): IMAGES, ("diffusers", "video"): VIDEOS, ("timm", "image"): TIMM,
    ("torchvision", "image"): TORCHVISION, ("torch_geometric", "nodes"): NODE_CLASSES,
    ("torch_geometric", "graphs"): GRAPH_CLASSES, ("torch", "layers"): NN,
}  # fmt: skip
