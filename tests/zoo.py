"""Tiny models of every family the project handles, each with a batch: `model, batch = zoo()["gpt2"]()`.

Every function takes `dropout` (0.1) and `seed` (0) and returns a freshly initialised model in training mode and a batch
of 2 whose attention mask, where there is one, has padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Made = tuple[nn.Module, Any]
VOCABULARY, BATCH, SEQUENCE = 96, 2, 8


def zoo() -> dict[str, Callable[..., Made]]:
    """Name -> function(dropout=0.1, seed=0) -> (model, batch)."""
    return {**transformers_zoo(), **handwritten_zoo()}


def transformers_zoo() -> dict[str, Callable[..., Made]]:
    """The Hugging Face models."""
    makers = (gpt2, opt, llama, mistral, qwen3, bert, roberta, t5, vit, mixtral)
    return {maker.__name__: maker for maker in makers}


def handwritten_zoo() -> dict[str, Callable[..., Made]]:
    """The models that need nothing but torch."""
    makers = (mlp, wide_resnet, custom_function, in_place, lstm, encoder)
    return {maker.__name__: maker for maker in makers}


def token_batch(batch: int = BATCH, sequence: int = SEQUENCE, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random token ids, a mask with padding at the end of the last row, labels that ignore the padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (batch, sequence), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def without_cache(model: nn.Module) -> nn.Module:
    """Turn `use_cache` off in every configuration: eager then runs the attention kernel that training uses."""
    for module in model.modules():
        if getattr(getattr(module, "config", None), "use_cache", False):
            module.config.use_cache = False  # type: ignore[union-attr]
    return model


def _hugging_interface(config_name: str, model_name: str, seed: int, **options: Any) -> nn.Module:
    import transformers

    torch.manual_seed(seed)
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = getattr(transformers, config_name)(**{**tokens, **options})
    return getattr(transformers, model_name)(config).train()


def _decoder(name: str, seed: int, dropout: float, **options: Any) -> Made:
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "attention_dropout": dropout,
    }  # fmt: skip
    return _hugging_interface(f"{name}Config", f"{name}ForCausalLM", seed, **{**sizes, **options}), token_batch(
        seed=seed
    )


def gpt2(dropout: float = 0.1, seed: int = 0, num_layers: int = 2) -> Made:
    model = _hugging_interface(
        "GPT2Config", "GPT2LMHeadModel", seed, vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=num_layers,
        n_head=4, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return model, token_batch(seed=seed)


def opt(dropout: float = 0.1, seed: int = 0) -> Made:
    model = _hugging_interface(
        "OPTConfig", "OPTForCausalLM", seed, vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, ffn_dim=64,
        num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=32, dropout=dropout,
        attention_dropout=dropout,
    )  # fmt: skip
    return model, token_batch(seed=seed)


def llama(dropout: float = 0.1, seed: int = 0) -> Made:
    return _decoder("Llama", seed, dropout)


def mistral(dropout: float = 0.1, seed: int = 0) -> Made:
    return _decoder("Mistral", seed, dropout, sliding_window=4)


def qwen3(dropout: float = 0.1, seed: int = 0) -> Made:
    return _decoder("Qwen3", seed, dropout, head_dim=8)


def mixtral(dropout: float = 0.1, seed: int = 0, experts: str | None = None) -> Made:
    """A sparse mixture of experts; `experts` is transformers' implementation of the expert layer, None its default."""
    model, batch = _decoder("Mixtral", seed, dropout, num_local_experts=4, num_experts_per_tok=2)
    if experts is not None:
        model.set_experts_implementation(experts)  # type: ignore[operator]
    return model, batch


def qwen3_moe(dropout: float = 0.1, seed: int = 0) -> Made:
    """Eight small experts a layer, of which a token takes three."""
    return _decoder(
        "Qwen3Moe", seed, dropout, head_dim=8, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16,
        norm_topk_prob=True,
    )  # fmt: skip


def deepseek_v3(dropout: float = 0.1, seed: int = 0) -> Made:
    """A dense layer, then one with a shared expert beside eight, of which a token takes two from one of two groups."""
    return _decoder(
        "DeepseekV3", seed, dropout, num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=8,
        num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip


def bert(dropout: float = 0.1, seed: int = 0) -> Made:
    return _encoder("Bert", seed, dropout)


def roberta(dropout: float = 0.1, seed: int = 0) -> Made:
    return _encoder("Roberta", seed, dropout)


def _encoder(name: str, seed: int, dropout: float) -> Made:
    """A classifier; the batch has one label per row."""
    model = _hugging_interface(
        f"{name}Config", f"{name}ForSequenceClassification", seed, vocab_size=VOCABULARY, hidden_size=32,
        num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, max_position_embeddings=64, num_labels=3,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return model, {**token_batch(seed=seed), "labels": torch.tensor([0, 2])}


def t5(dropout: float = 0.1, seed: int = 0) -> Made:
    """Encoder-decoder with cross-attention, shared embeddings and relative position biases."""
    model = _hugging_interface(
        "T5Config", "T5ForConditionalGeneration", seed, vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64,
        num_layers=2, num_heads=4, dropout_rate=dropout, decoder_start_token_id=0, eos_token_id=1,
    )  # fmt: skip
    batch = token_batch(seed=seed)
    return model, {**batch, "labels": batch["labels"][:, :6].contiguous()}


def vit(dropout: float = 0.1, seed: int = 0) -> Made:
    model = _hugging_interface(
        "ViTConfig", "ViTForImageClassification", seed, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, image_size=16, patch_size=4, num_labels=3, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(BATCH, 3, 16, 16, generator=generator)
    return model, {"pixel_values": pixels, "labels": torch.tensor([0, 2])}


class WithLoss(nn.Module):
    """Any classifier body with a cross-entropy loss and its logits as outputs."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.body(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def _features(seed: int, *shape: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(BATCH, *shape, generator=generator), "labels": torch.tensor([0, 2])}


def mlp(dropout: float = 0.1, seed: int = 0) -> Made:
    """A plain nn.Sequential with a loss."""
    torch.manual_seed(seed)
    layers = [nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.LayerNorm(16), nn.Linear(16, 4)]
    return WithLoss(nn.Sequential(*layers)), _features(seed, 8)


class WideBlock(nn.Module):
    """Pre-activation residual block of a wide ResNet (Zagoruyko and Komodakis 2016, section 2)."""

    def __init__(self, num_in: int, num_out: int, stride: int, dropout: float):
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(num_in), nn.BatchNorm2d(num_out)
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride=stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.shortcut = nn.Conv2d(num_in, num_out, 1, stride=stride, bias=False) if num_in != num_out else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.bn1(x))
        skip = x if self.shortcut is None else self.shortcut(h)
        h = self.conv2(self.dropout(F.relu(self.bn2(self.conv1(h)))))
        return h + skip


class WideResNet(nn.Module):
    """Three groups of blocks on small images, batch norm and average pooling."""

    def __init__(self, width: int = 2, depth: int = 2, num_classes: int = 4, dropout: float = 0.1):
        super().__init__()
        sizes = [4, 4 * width, 8 * width, 16 * width]
        self.stem = nn.Conv2d(3, sizes[0], 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(
            WideBlock(sizes[g] if i == 0 else sizes[g + 1], sizes[g + 1], 2 if g and not i else 1, dropout)
            for g in range(3)
            for i in range(depth)
        )
        self.norm = nn.BatchNorm2d(sizes[3])
        self.head = nn.Linear(sizes[3], num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(F.relu(self.norm(x)).mean(dim=(2, 3)))


def wide_resnet(dropout: float = 0.1, seed: int = 0) -> Made:
    torch.manual_seed(seed)
    return WithLoss(WideResNet(dropout=dropout)), _features(seed, 3, 8, 8)


class ScaledGradient(torch.autograd.Function):
    """Identity whose gradient is scaled: lost if a tracer looks inside its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None


class CustomFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(ScaledGradient.apply(torch.tanh(self.first(x)), 0.25))


def custom_function(dropout: float = 0.1, seed: int = 0) -> Made:
    torch.manual_seed(seed)
    return WithLoss(CustomFunction()), _features(seed, 8)


class InPlace(nn.Module):
    """In-place ops of each kind: method, operator, setitem, out=, flag, on a view, on a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.relu = nn.ReLU(inplace=True)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.relu(self.first(x))
        h = h * 2
        h += 1
        h.mul_(0.5)
        h[:, 0] = 0.25
        h.view(-1, 4, 4)[:, 1].add_(0.125)
        F.leaky_relu(h, 0.1, inplace=True)
        with torch.no_grad():
            self.calls += 1
            self.mean.lerp_(h.detach().float().mean(0), 0.1)
            torch.add(self.mean, 1, out=torch.empty_like(self.mean))
        return self.second(h - self.mean)


def in_place(dropout: float = 0.1, seed: int = 0) -> Made:
    torch.manual_seed(seed)
    return WithLoss(InPlace()), _features(seed, 8)


class Recurrent(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.lstm = nn.LSTM(8, 16, num_layers=2, batch_first=True, dropout=dropout)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, (hidden, _) = self.lstm(x)
        return self.head(out[:, -1] + hidden[-1])


def lstm(dropout: float = 0.1, seed: int = 0) -> Made:
    torch.manual_seed(seed)
    return WithLoss(Recurrent(dropout)), _features(seed, 5, 8)


class PooledEncoder(nn.Module):
    """torch's own transformer layers, which have control flow in Python."""

    def __init__(self, dropout: float):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, dim_feedforward=32, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).mean(1))


def encoder(dropout: float = 0.1, seed: int = 0) -> Made:
    torch.manual_seed(seed)
    return WithLoss(PooledEncoder(dropout)), _features(seed, 5, 16)
