"""Fine-tune a causal language model on chats with TRL's SFTTrainer: loss on the assistant's turns, packed if you like.

Three lines differ from the script without Penstock; they are marked. The same script runs under torchrun.

Run: python examples/sft_trl.py --train_file CHATS.jsonl --tokenizer_name DIRECTORY --output_dir out/sft
[--model_name_or_path DIRECTORY] [--packing] [--lora_r 16] [any option of SFTConfig]
A line of CHATS.jsonl: {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, set_seed
from trl import SFTConfig

from penstock.integrations.trl import PenstockSFTTrainer  # 1: without Penstock: from trl import SFTTrainer


@dataclass
class ScriptArguments:
    train_file: str = field(metadata={"help": "Chats, one in a line of JSON."})
    tokenizer_name: str = field(metadata={"help": "A directory with a tokenizer."})
    model_name_or_path: str | None = field(default=None, metadata={"help": "Weights to begin from; new ones if not."})
    config_overrides: str = field(default="", metadata={"help": "Of a model with new weights: hidden_size=64"})
    lora_r: int = field(default=0, metadata={"help": "Rank of the adapters to train; 0 trains all weights."})
    validation_share: float = 0.1
    hardware: str = field(default="auto", metadata={"help": "As `penstock.compile` takes it."})


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = HfArgumentParser((ScriptArguments, SFTConfig))
    script, args = parser.parse_args_into_dataclasses(arguments)
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(script.tokenizer_name)
    if script.model_name_or_path:
        model = AutoModelForCausalLM.from_pretrained(script.model_name_or_path)
    else:
        config = AutoConfig.for_model("llama", vocab_size=len(tokenizer))
        config.update_from_string(script.config_overrides)
        model = AutoModelForCausalLM.from_config(config)
    chats = load_dataset("json", data_files=script.train_file, split="train")
    chats = chats.train_test_split(script.validation_share, seed=args.seed)
    lora = LoraConfig(task_type="CAUSAL_LM", r=script.lora_r, target_modules="all-linear") if script.lora_r else None

    trainer = PenstockSFTTrainer(  # 2: without Penstock: trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=chats["train"],
        eval_dataset=chats["test"],
        processing_class=tokenizer,
        peft_config=lora,
        hardware=script.hardware,  # 3: without Penstock:
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    return trainer.evaluate()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    main()
