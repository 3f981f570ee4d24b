"""A tokenizer of few words with a chat template, tiny models, and runs of TRL's trainers and of ours."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from penstock.integrations.transformers.steps import StepsByJob
from penstock.ir.machine.hardware import Hardware

CONFIGS: dict[type, type] = {
    DPOTrainer: DPOConfig,
    GKDTrainer: GKDConfig,
    SFTTrainer: SFTConfig,
    RewardTrainer: RewardConfig,
    KTOTrainer: KTOConfig,
    CPOTrainer: CPOConfig,
    ORPOTrainer: ORPOConfig,
}  # the most special first
# Ours sums log probabilities in another order than TRL's chunks of them.
TOLERANCE = 1e-5

VOCABULARY = 100
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<a> {% generation %}{{ m['content'] }} <e> "
    "{% endgeneration %}{% else %}<u> {{ m['content'] }} <e> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a> {% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    marks = ["<p>", "<e>", "<u>", "<a>", "<unk>"]
    words = {name: number for number, name in enumerate(marks)}
    words |= {f"w{number}": number for number in range(len(marks), VOCABULARY)}
    made = Tokenizer(WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<p>", eos_token="<e>", unk_token="<unk>", chat_template=TEMPLATE
    )


def words(draw: torch.Generator, least: int, most: int) -> str:
    count = int(torch.randint(least, most + 1, (), generator=draw))
    return " ".join(f"w{number}" for number in torch.randint(5, VOCABULARY, (count,), generator=draw).tolist())


def completions(rows: int = 16, seed: int = 0) -> Dataset:
    draw = torch.Generator().manual_seed(seed)
    pairs = [(words(draw, 2, 6), words(draw, 3, 9)) for _ in range(rows)]
    return Dataset.from_list([{"prompt": prompt, "completion": f" {completion}"} for prompt, completion in pairs])


def chats(rows: int = 16, seed: int = 0) -> Dataset:
    draw = torch.Generator().manual_seed(seed)
    turns = ("user", "assistant", "user", "assistant")
    return Dataset.from_list(
        [{"messages": [{"role": role, "content": words(draw, 1, 5)} for role in turns]} for _ in range(rows)]
    )


def texts(rows: int = 40, seed: int = 0) -> Dataset:
    draw = torch.Generator().manual_seed(seed)
    return Dataset.from_list([{"text": words(draw, 2, 14)} for _ in range(rows)])


IMAGES = (
    "{% for m in messages %}{{ '<a> ' if m['role'] == 'assistant' else '<u> ' }}{% for part in m['content'] %}"
    "{{ '<image> ' if part['type'] == 'image' else part['text'] + ' ' }}{% endfor %}<e> {% endfor %}"
)


def image_chats(rows: int = 16, seed: int = 0) -> Dataset:
    """Turns with a small image of noise each, which the collator gives to the processor."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(rows):
        noise = torch.randint(0, 256, (28, 40, 3), generator=draw, dtype=torch.uint8).numpy()
        question = [{"type": "image", "text": None}, {"type": "text", "text": words(draw, 2, 5)}]
        answer = [{"type": "text", "text": words(draw, 2, 6)}]
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        made.append({"images": [Image.fromarray(noise)], "messages": turns})
    return Dataset.from_list(made)


def processor() -> LlavaProcessor:
    own = tokenizer()
    own.add_special_tokens({"additional_special_tokens": ["<image>"]})
    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    return LlavaProcessor(
        image_processor=images, tokenizer=own, patch_size=14, vision_feature_select_strategy="default",
        chat_template=IMAGES, image_token="<image>", num_additional_image_tokens=1,
    )  # fmt: skip


def llava() -> LlavaForConditionalGeneration:
    """Four tokens an image; the id of that token follows those of the words."""
    torch.manual_seed(0)
    text = LlamaConfig(**{**llama().config.to_dict(), "vocab_size": VOCABULARY + 1})
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=VOCABULARY, image_seq_length=4)
    return LlavaForConditionalGeneration(config)


def llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def experts() -> MixtralForCausalLM:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1,
        bos_token_id=None,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def options(folder: Any, **changes: Any) -> dict[str, Any]:
    known = dict(
        output_dir=str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4,
        learning_rate=1e-2, warmup_steps=1, weight_decay=0.1, max_grad_norm=0.5, logging_steps=1, save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True, bf16=False, max_length=32,
    )  # fmt: skip
    return {**known, **changes}


def tell_of(trainer: Any, name: str) -> torch.Tensor:
    return torch.tensor([entry[name] for entry in trainer.state.log_history if name in entry])


def run_of(kind: type, folder: Any, rows: Any, more: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A trainer of TRL's or of ours; `more` are its own arguments, `changes` those of its config."""
    config = next(config for trainer, config in CONFIGS.items() if issubclass(kind, trainer))
    ours = {"hardware": Hardware.cpu(num_devices=1), "compile_options": {"strategy": "balanced", "micro_batches": 2}}
    ours = ours if issubclass(kind, StepsByJob) else {}
    given = {"args": config(**options(folder, **changes)), "processing_class": tokenizer(), **ours, **(more or {})}
    return kind(train_dataset=rows(), eval_dataset=rows(7, 1), **given)


def require_equal(ours: Any, plain: Any, *names: str) -> None:
    """The same logged numbers and weights."""
    logged = ("num_tokens",) if len(tell_of(plain, "num_tokens")) else ()
    for name in ("loss", "learning_rate", "grad_norm", *logged, *names):
        assert len(tell_of(plain, name)) >= 2
        torch.testing.assert_close(tell_of(ours, name), tell_of(plain, name), rtol=2e-4, atol=TOLERANCE, msg=name)
    for (name, a), b in zip(ours.model.named_parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


def preferences(rows: int = 16, seed: int = 0) -> Dataset:
    draw = torch.Generator().manual_seed(seed)
    sides = ("chosen", "rejected")
    return Dataset.from_list(
        [{"prompt": words(draw, 2, 6), **{side: " " + words(draw, 3, 9) for side in sides}} for _ in range(rows)]
    )


def chat_preferences(rows: int = 16, seed: int = 0) -> Dataset:
    return preferences(rows, seed).map(
        lambda row: {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "chosen": [{"role": "assistant", "content": row["chosen"].strip()}],
            "rejected": [{"role": "assistant", "content": row["rejected"].strip()}],
        }
    )
