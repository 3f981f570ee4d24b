"""Fine-tune a causal language model on a text file with transformers' Trainer, in the manner of its `run_clm` script.

Three lines differ from the script without Penstock; they are marked. The same script runs under torchrun.

Run: python examples/with_trainer.py --train_file TEXT --output_dir out/clm [--model_name_or_path DIRECTORY] [any option
of TrainingArguments]
"""

from __future__ import annotations

import logging
import math
import sys
from dataclasses import dataclass, field
from itertools import chain

from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from penstock.integrations.transformers import PenstockTrainer  # 1: without Penstock: from transformers import Trainer

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    tokenizer_name: str = field(metadata={"help": "A directory with a tokenizer."})
    model_name_or_path: str | None = field(default=None, metadata={"help": "Weights to begin from; new ones if not."})
    model_type: str = field(default="llama", metadata={"help": "Of a model with new weights."})
    config_overrides: str = field(default="", metadata={"help": "Of a model with new weights: hidden_size=64"})


@dataclass
class DataArguments:
    train_file: str = field(metadata={"help": "Text, one paragraph a line."})
    block_size: int = field(default=128, metadata={"help": "Tokens of a row."})
    validation_share: float = 0.1
    hardware: str = field(default="auto", metadata={"help": "As `penstock.compile` takes it."})


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses(arguments)
    set_seed(training_args.seed)

    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name)
    if model_args.model_name_or_path:
        model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    else:
        config = AutoConfig.for_model(model_args.model_type, vocab_size=len(tokenizer))
        config.update_from_string(model_args.config_overrides)
        model = AutoModelForCausalLM.from_config(config)

    text = load_dataset("text", data_files=data_args.train_file, split="train")
    with training_args.main_process_first(desc="tokenising"):
        tokens = text.map(lambda part: tokenizer(part["text"]), batched=True, remove_columns=["text"])

        def group(part: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
            joined = {name: list(chain.from_iterable(part[name])) for name in ("input_ids", "attention_mask")}
            size = data_args.block_size
            whole = len(joined["input_ids"]) // size * size
            found = {name: [ids[i : i + size] for i in range(0, whole, size)] for name, ids in joined.items()}
            found["labels"] = [list(row) for row in found["input_ids"]]
            return found

        rows = tokens.map(group, batched=True, remove_columns=tokens.column_names)
    rows = rows.train_test_split(data_args.validation_share, seed=training_args.seed)

    trainer = PenstockTrainer(  # 2: without Penstock: trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
        hardware=data_args.hardware,  # 3: without Penstock:
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    return metrics


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    main()
