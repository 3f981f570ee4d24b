"""A video diffusion transformer of 14 billion parameters, planned by its configuration, without its weights:

    penstock plan --model examples/video_dit.py:wan_14b --hardware h100x8 --batch 8
    penstock plan --model examples/video_dit.py:wan_14b --hardware rtx4090 --batch 1 \\
        --adapter lora:r=32,targets=to_q+to_k+to_v

Needs diffusers. The figures are those of Wan2.1-T2V-14B (https://github.com/Wan-Video/Wan2.1,
wan/configs/wan_t2v_14B.py), which are also the defaults of diffusers' class. A row is a video of 81 frames at 480p:
its autoencoder makes 21 x 60 x 104 latents of it, of which patches of 1 x 2 x 2 make 32,760 tokens; its text has 512.
"""

import torch.nn.functional as F
from torch import Tensor, nn

WAN_14B = {
    "num_layers": 40, "num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "freq_dim": 256,
    "text_dim": 4096, "in_channels": 16, "out_channels": 16, "patch_size": (1, 2, 2), "cross_attn_norm": True,
}  # fmt: skip
WAN_1B = {**WAN_14B, "num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960}
LATENTS, TEXT_TOKENS = (16, 21, 60, 104), 512


class FlowMatching(nn.Module):
    """Trains a transformer to predict the velocity between noise and a video, at one time of each row."""

    def __init__(self, transformer: nn.Module, latents: tuple[int, ...], text: tuple[int, ...]):
        super().__init__()
        self.transformer, self.latents, self.text = transformer, latents, text

    def example_inputs(self, rows: int) -> dict[str, dict[str, object]]:
        shapes = {"video": self.latents, "noise": self.latents, "time": (), "text": self.text}
        return {name: {"shape": [rows, *shape], "dtype": "float32"} for name, shape in shapes.items()}

    def forward(self, video: Tensor, noise: Tensor, time: Tensor, text: Tensor) -> Tensor:
        share = time.view(-1, 1, 1, 1, 1)
        mixed = share * noise + (1 - share) * video
        velocity = self.transformer(mixed, 1000 * time, text, return_dict=False)[0]
        return F.mse_loss(velocity.float(), (noise - video).float())


def wan_14b() -> nn.Module:
    return _wan(WAN_14B, LATENTS, TEXT_TOKENS)


def wan_1b() -> nn.Module:
    return _wan(WAN_1B, LATENTS, TEXT_TOKENS)


def tiny() -> nn.Module:
    small = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 64, "text_dim": 32}
    return _wan({**WAN_14B, **small}, (16, 3, 8, 8), 6)


def _wan(config: dict[str, object], latents: tuple[int, ...], text_tokens: int) -> nn.Module:
    from diffusers import WanTransformer3DModel

    return FlowMatching(WanTransformer3DModel(**config), latents, (text_tokens, int(config["text_dim"])))
