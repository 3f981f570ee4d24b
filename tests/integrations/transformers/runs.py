"""The same run by `Trainer` and by `PenstockTrainer`."""

from __future__ import annotations

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from penstock.integrations.transformers import PenstockTrainer
from penstock.integrations.transformers.steps import StepsByJob
from penstock.ir.machine.hardware import Hardware

TOLERANCE = 1e-5  # fp32 on one device and one thread, micro-batches summed in another order
FAST = {"strategy": "mobius", "micro_batches": 2}  # no search
VOCABULARY, IMAGE = 61, 60


def causal():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config), [row(i) for i in range(32)]


def row(number, length=12):
    """Tokens, of which the first have no label: how many differs from row to row."""
    tokens = torch.randint(1, VOCABULARY, (length,), generator=torch.Generator().manual_seed(number))
    labels = tokens.clone()
    labels[: 1 + number % 7] = -100
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def llama():
    """Rows of 8 to 14 tokens with all labels."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip
    rows = [row(i, 8 + i % 7) for i in range(30)]
    return LlamaForCausalLM(config), [{**each, "labels": each["input_ids"].clone()} for each in rows]


def classifier():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip
    return BertForSequenceClassification(config), [{**row(i), "labels": torch.tensor(i % 3)} for i in range(32)]


def seq2seq():
    """Sources of 8 to 14 tokens, targets of 4 to 6."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    rows = [{**row(i, 8 + i % 7), "labels": row(99 + i, 4 + i % 3)["input_ids"]} for i in range(32)]
    return T5ForConditionalGeneration(config), rows


class Eyes(torch.nn.Module):
    """Reads how many patches an image has, as vision-language models do, and puts them in the place of tokens."""

    def __init__(self):
        super().__init__()
        self.embed, self.inner, self.head = (
            torch.nn.Embedding(VOCABULARY, 16), torch.nn.Linear(6, 16), torch.nn.Linear(16, VOCABULARY),
        )  # fmt: skip

    def forward(self, input_ids, pixel_values, image_grid_thw, labels, attention_mask=None):
        images = self.inner(pixel_values).split(image_grid_thw.prod(-1).tolist())
        seen = torch.cat([image + image.mean(0) for image in images])
        h = self.embed(input_ids).masked_scatter((input_ids == IMAGE)[..., None], seen)
        logits = self.head(h + h.cumsum(1) / 8)
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def vision():
    """Rows of 8 to 14 tokens, of which the first four are those of an image of four patches."""
    torch.manual_seed(0)
    rows = [row(i, 8 + i % 7) for i in range(30)]
    for each in rows:
        each["input_ids"].clamp_(max=IMAGE - 1)
        each["input_ids"][:4], each["labels"][:4] = IMAGE, -100
        each |= {"pixel_values": torch.randn(4, 6), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    return Eyes(), rows


def many_sizes():
    """The same with two images in some rows, none in one, and images of two to six patches."""
    model, rows = vision()
    for i, each in enumerate(rows):
        sizes = [[(1, 2, 2)], [(1, 1, 2), (1, 2, 1)], [(1, 2, 3)], [(1, 1, 3)]][i % 4] if i != 3 else []
        count = sum(height * width for _, height, width in sizes)
        each["input_ids"][:4], each["labels"][:-2] = 5, -100  # a Trainer's mean is that of batches, which count alike
        each["input_ids"][:count] = IMAGE
        grid = torch.tensor(sizes, dtype=torch.long).reshape(-1, 3)
        each |= {"pixel_values": torch.randn(count, 6), "image_grid_thw": grid}
    return model, rows


def joining(rows):
    """A collator that pads tokens and joins images."""
    images = {name: torch.cat([each[name] for each in rows]) for name in ("pixel_values", "image_grid_thw")}
    return {**images, **padding([{name: each[name] for name in each if name not in images} for each in rows])}


def padding(rows):
    """A collator that pads to the longest row of the batch."""
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    pad = torch.nn.utils.rnn.pad_sequence
    return {name: pad([each[name] for each in rows], batch_first=True, padding_value=fill[name]) for name in rows[0]}


def as_tensors(rows):
    """A collator of rows of lists."""
    return padding([{name: torch.tensor(value) for name, value in row.items()} for row in rows])


def arguments(folder, kind=TrainingArguments, **changes):
    known = dict(
        output_dir=str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=5,
        learning_rate=1e-3, warmup_steps=2, weight_decay=0.1, max_grad_norm=0.5, logging_steps=1, save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    return kind(**{**known, **changes})


def make_case(kind, model, rows, folder, trainer=None, **changes):
    """A trainer of that kind; `trainer`: what else it is given."""
    ours = {"hardware": Hardware.cpu(1, memory="8GB"), "compile_options": FAST}
    given = {"train_dataset": rows, "eval_dataset": rows[:7]}
    given |= (ours if issubclass(kind, StepsByJob) else {}) | (trainer or {})
    of = Seq2SeqTrainingArguments if issubclass(kind, Seq2SeqTrainer) else TrainingArguments
    return kind(model=model, args=arguments(folder, of, **changes), **given)


def train_steps(kind, make, folder, resume=None, trainer=None, **changes):
    found = make_case(kind, *make(), folder, trainer, **changes)
    found.train(resume_from_checkpoint=resume)
    return found


def both(make, folder, trainer=None, **changes):
    ours = train_steps(PenstockTrainer, make, folder / "ours", trainer=trainer, **changes)
    return ours, train_steps(Trainer, make, folder / "plain", trainer=trainer, **changes)


def tell_of(trainer, name):
    return torch.tensor([entry[name] for entry in trainer.state.log_history if name in entry])


def require_equal(ours, plain, tolerance=TOLERANCE):
    assert len(tell_of(plain, "loss")) == len(tell_of(ours, "loss")) > 0
    for name in ("loss", "learning_rate", "grad_norm"):
        torch.testing.assert_close(tell_of(ours, name), tell_of(plain, name), rtol=2e-4, atol=tolerance)
    for (name, a), b in zip(ours.model.named_parameters(), plain.model.parameters()):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=name)
