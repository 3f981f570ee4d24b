"""The example scripts of transformers, TRL and PEFT, unchanged, by themselves and by `penstock.integrations.launch`.

Needs checkouts of the libraries in one directory (transformers, trl, peft) with transformers' test fixtures. No hub is
asked: models are tiny, random and without dropout, data are the fixtures and sentences of few words. Every row has the
number of losses and their largest difference.

Run: python bench/scripts.py CHECKOUTS [--only NAME ...] [--out FILE]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import runpy
import sys
import tempfile
import traceback
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

FIXTURES = "transformers/tests/fixtures/tests_samples"
PYTORCH = "transformers/examples/pytorch"
TRAINER = "--output_dir {out} --seed 3 --do_train --max_steps 4 --logging_steps 1 --report_to none --use_cpu true "
TRAINER += "--per_device_train_batch_size {rows} --learning_rate 1e-3 --save_strategy no"
LOOP = "--output_dir {out} --seed 3 --max_train_steps 4 --per_device_train_batch_size {rows} --learning_rate 1e-3"
TRL = "--output_dir {out} --seed 3 --max_steps 4 --logging_steps 1 --report_to none --use_cpu true --bf16 false "
TRL += (
    "--per_device_train_batch_size {rows} --learning_rate 1e-3 --save_strategy no --model_name_or_path {models}/llama"
)
CSV = "--train_file {data}/labels.csv --validation_file {data}/labels.csv --max_seq_length 32"
TEXT = "--train_file {data}/wiki_text/wiki.txt --validation_file {data}/wiki_text/wiki.txt"
PAIRS = "--train_file {data}/wmt16/sample.json --validation_file {data}/wmt16/sample.json "
PAIRS += "--source_lang en --target_lang ro --max_source_length 32 --max_target_length 24"
SUMS = "--train_file {data}/xsum/sample.json --validation_file {data}/xsum/sample.json"
NER = "--train_file {data}/conll/sample.json --validation_file {data}/conll/sample.json"
QA = "--train_file {data}/SQUAD/sample.json --validation_file {data}/SQUAD/sample.json --max_seq_length 256 "
QA += "--doc_stride 32"
SWAG = "--train_file {data}/swag/sample.json --validation_file {data}/swag/sample.json --max_seq_length 32"
BERT, GPT2, T5 = (f"--model_name_or_path {{models}}/{name}" for name in ("bert", "gpt2", "t5"))
ROWS: dict[str, tuple[str, str]] = {  # name -> script, arguments
    "run_glue": (f"{PYTORCH}/text-classification/run_glue.py", f"{BERT} {CSV} {TRAINER}"),
    "run_classification": (
        f"{PYTORCH}/text-classification/run_classification.py",
        f"{BERT} {CSV} {TRAINER} --text_column_names sentence1,sentence2 --label_column_name label",
    ),
    "run_clm": (f"{PYTORCH}/language-modeling/run_clm.py", f"{GPT2} {TEXT} --block_size 32 {TRAINER}"),
    "run_mlm": (f"{PYTORCH}/language-modeling/run_mlm.py", f"{BERT} {TEXT} --max_seq_length 32 {TRAINER}"),
    "run_qa": (f"{PYTORCH}/question-answering/run_qa.py", f"{BERT} {QA} {TRAINER}"),
    "run_seq2seq_qa": (f"{PYTORCH}/question-answering/run_seq2seq_qa.py", f"{T5} {QA} {TRAINER}"),
    "run_summarization": (
        f"{PYTORCH}/summarization/run_summarization.py",
        f"{T5} {SUMS} --max_source_length 48 --max_target_length 24 {TRAINER}",
    ),
    "run_translation": (f"{PYTORCH}/translation/run_translation.py", f"{T5} {PAIRS} {TRAINER}"),
    "run_ner": (f"{PYTORCH}/token-classification/run_ner.py", f"{BERT} {NER} {TRAINER}"),
    "run_swag": (f"{PYTORCH}/multiple-choice/run_swag.py", f"{BERT} {SWAG} {TRAINER}"),
    "run_glue_no_trainer": (
        f"{PYTORCH}/text-classification/run_glue_no_trainer.py", f"{BERT} {CSV.replace('seq_', '')} {LOOP}",
    ),
    "run_clm_no_trainer": (
        f"{PYTORCH}/language-modeling/run_clm_no_trainer.py", f"{GPT2} {TEXT} --block_size 32 {LOOP}",
    ),
    "run_mlm_no_trainer": (
        f"{PYTORCH}/language-modeling/run_mlm_no_trainer.py", f"{BERT} {TEXT} --max_seq_length 32 {LOOP}",
    ),
    "run_qa_no_trainer": (f"{PYTORCH}/question-answering/run_qa_no_trainer.py", f"{BERT} {QA} {LOOP}"),
    "run_summarization_no_trainer": (
        f"{PYTORCH}/summarization/run_summarization_no_trainer.py",
        f"{T5} {SUMS} --max_source_length 48 --max_target_length 24 {LOOP}",
    ),
    "run_translation_no_trainer": (
        f"{PYTORCH}/translation/run_translation_no_trainer.py", f"{T5} {PAIRS} {LOOP}",
    ),
    "run_ner_no_trainer": (f"{PYTORCH}/token-classification/run_ner_no_trainer.py", f"{BERT} {NER} {LOOP}"),
    "run_swag_no_trainer": (
        f"{PYTORCH}/multiple-choice/run_swag_no_trainer.py",
        f"{BERT} {SWAG} {LOOP}",
    ),
    "sft": ("trl/trl/scripts/sft.py", f"{TRL} --dataset_name {{data}}/chats"),
    "dpo": ("trl/trl/scripts/dpo.py", f"{TRL} --dataset_name {{data}}/pairs"),
    "reward": ("trl/trl/scripts/reward.py", f"{TRL} --dataset_name {{data}}/pairs"),
    "kto": ("trl/trl/scripts/kto.py", f"{TRL} --dataset_name {{data}}/unpaired"),
    "orpo": ("trl/examples/scripts/orpo.py", f"{TRL} --dataset_name {{data}}/pairs"),
    "cpo": ("trl/examples/scripts/cpo.py", f"{TRL} --dataset_name {{data}}/pairs"),
    "gkd": (
        "trl/examples/scripts/gkd.py",
        f"{TRL} --dataset_name {{data}}/chats --teacher_model_name_or_path {{models}}/teacher --lmbda 0",
    ),
    "peft sft": (
        "peft/examples/sft/train.py",
        f"{TRL} --dataset_name {{data}}/chats --use_peft_lora --lora_r 4 --lora_dropout 0 --max_length 64",
    ),
}  # fmt: skip


# --- one run, in a process of its own


def run_script(mode: str, record: str, script: str, *arguments: str) -> None:
    """Run a script by itself or by the launcher, and write its losses, a line each."""
    import accelerate
    import transformers

    transformers.utils.is_offline_mode = lambda: True  # names that older scripts have
    accelerate.DistributedType.TPU = accelerate.DistributedType.XLA
    written: dict[str, list[float]] = {"log": [], "backward": []}
    log = transformers.Trainer.log

    def record_and_call(self: Any, logs: dict[str, float], *more: Any) -> None:
        written["log"] += [logs["loss"]] if "loss" in logs else []
        log(self, logs, *more)

    transformers.Trainer.log = record_and_call
    kinds: list[Any] = [accelerate.Accelerator]
    if mode == "penstock":
        from penstock.integrations import launch
        from penstock.integrations.accelerate import PenstockAccelerator

        kinds = [PenstockAccelerator]
    for kind in kinds:
        kind.backward = _recording(kind.backward, written["backward"])
    try:
        if mode == "penstock":
            options = ["--hardware", "cpu", "--compile-options", '{"strategy": "balanced"}']
            launch.main([*options, script, *arguments])
        else:
            sys.argv = [script, *arguments]
            sys.path.insert(0, str(Path(script).parent))
            runpy.run_path(script, run_name="__main__")
    finally:
        Path(record).write_text(json.dumps(written["log"] or written["backward"]), encoding="utf-8")


def _recording(backward: Any, losses: list[float]) -> Any:
    def record_and_call(self: Any, loss: Any, **more: Any) -> None:
        losses.append(float(loss))
        backward(self, loss, **more)

    return record_and_call


def replace_metrics() -> None:
    """Modules `evaluate` and `nltk` that download nothing, and know nothing."""

    class Metric:
        def compute(self, **given: Any) -> dict[str, Any]:
            return defaultdict(float, accuracy=0.0)

        def add_batch(self, **given: Any) -> None:
            pass

    made = types.ModuleType("evaluate")
    made.load = lambda *args, **options: Metric()  # type: ignore[attr-defined]
    words = types.ModuleType("nltk")
    words.data = types.SimpleNamespace(find=lambda path: path)  # type: ignore[attr-defined]
    words.sent_tokenize = str.splitlines  # type: ignore[attr-defined]
    sys.modules |= {"evaluate": made, "nltk": words}


# --- models and data


def make_models(folder: Path, texts: list[str]) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        T5Config,
        T5ForConditionalGeneration,
    )  # fmt: skip

    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<fim_prefix>", "<fim_middle>", "<fim_suffix>"]
    made = Tokenizer(models.BPE(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=500, special_tokens=marks))
    names = dict(pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")
    template = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' [SEP] ' }}{% endfor %}"
    plain = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="[CLS]", eos_token="[SEP]", chat_template=template, **names
    )
    pair = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    size = len(plain)
    ids = {"vocab_size": size, "pad_token_id": 0, "eos_token_id": 3, "bos_token_id": 2}
    llama = LlamaConfig(
        **ids, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    for name, model in {
        "bert": BertForMaskedLM(BertConfig(
            vocab_size=size, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)),
        "gpt2": GPT2LMHeadModel(GPT2Config(
            **ids, n_embd=32, n_layer=2, n_head=2, n_positions=128, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)),
        "llama": LlamaForCausalLM(llama),
        "teacher": LlamaForCausalLM(llama),
        "t5": T5ForConditionalGeneration(T5Config(
            vocab_size=size, d_model=32, d_kv=16, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0, pad_token_id=0, eos_token_id=3)),
    }.items():  # fmt: skip
        model.save_pretrained(folder / name)
        made.post_processor = pair if name == "bert" else None
        own = PreTrainedTokenizerFast(
            tokenizer_object=made, bos_token="[CLS]", eos_token="[SEP]", chat_template=template, **names
        ) if name == "bert" else plain  # fmt: skip
        own.save_pretrained(folder / name)


def make_data(folder: Path) -> None:
    draw = random.Random(0)

    def words(most: int) -> str:
        return " ".join(draw.choice(["red", "green", "one", "two", "sun", "moon", "is"]) for _ in range(most))

    rows: dict[str, list[Any]] = {"chats": [], "pairs": [], "unpaired": []}
    for number in range(32):
        ask, good, bad = ([{"role": role, "content": words(3 + number % 3)}] for role in ("user", *["assistant"] * 2))
        rows["chats"].append({"messages": [*ask, *good]})
        rows["pairs"].append({"prompt": ask, "chosen": good, "rejected": bad})
        rows["unpaired"].append({"prompt": ask, "completion": good if number % 3 else bad, "label": bool(number % 3)})
    lines = "".join(f"{words(4)},{words(5)},{number % 2}\n" for number in range(32))
    (folder / "labels.csv").write_text(f"sentence1,sentence2,label\n{lines}", encoding="utf-8")
    for name, found in rows.items():
        (folder / name).mkdir()
        for split in ("train", "test"):
            lines = "".join(json.dumps(row) + "\n" for row in found)
            (folder / name / f"{split}.jsonl").write_text(lines, encoding="utf-8")


# --- all runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--only", nargs="*", default=list(ROWS))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "CUDA_VISIBLE_DEVICES": ""}
    replace_metrics()
    for library in ("torch", "datasets", "transformers", "trl", "penstock.integrations.accelerate"):
        importlib.import_module(library)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "data"
        data.mkdir()
        for each in (given.checkouts / FIXTURES).iterdir():
            (data / each.name).symlink_to(each.resolve())
        (data / "wiki_text").unlink()
        (data / "wiki_text").mkdir()
        text = (given.checkouts / FIXTURES / "wiki_text" / "wiki_00").read_text("utf-8")
        (data / "wiki_text" / "wiki.txt").write_text(text[:20000], encoding="utf-8")
        make_data(data)
        texts = [text[:20000], "red green one two sun moon is user assistant"]
        if run_apart(lambda: make_models(folder, texts), folder / "models.txt", folder):
            raise SystemExit((folder / "models.txt").read_text("utf-8"))
        for each in given.only:
            row = compare(each, given.checkouts, folder)
            print(json.dumps(row), flush=True)
            if given.out:
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


def compare(name: str, checkouts: Path, folder: Path) -> dict[str, Any]:
    script, arguments = ROWS[name]
    found, errors = [], []
    for mode in ("alone", "penstock"):
        out = folder / f"{name}-{mode}".replace(" ", "-")
        text = arguments.format(out=out, rows=4, models=folder, data=folder / "data")
        record = folder / "losses.json"
        record.unlink(missing_ok=True)
        printed = Path(tempfile.gettempdir()) / f"{out.name}.txt"
        given = (mode, str(record), str((checkouts / script).resolve()), *text.split())
        if run_apart(lambda given=given: run_script(*given), printed, folder):
            errors.append(f"{mode}: {(printed.read_text('utf-8').strip().splitlines() or [''])[-1][:200]}")
        found.append(json.loads(record.read_text("utf-8")) if record.exists() else [])
    alone, own = found
    same = len(alone) == len(own) > 0
    largest = max((abs(a - b) for a, b in zip(alone, own, strict=True)), default=0.0) if same else None
    return {"script": name, "losses": len(own), "first": own[:1], "last": own[-1:], "largest_difference": largest,
            "errors": errors}  # fmt: skip


def run_apart(body: Any, printed: Path, folder: Path) -> int:
    """Run the body in a fork, which has all libraries already, in this folder. Returns its exit status."""
    process = os.fork()
    if process:
        return os.waitpid(process, 0)[1]
    status = 1
    with printed.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            os.chdir(folder)
            body()
            status = 0
        except SystemExit as end:
            status = int(bool(end.code))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


if __name__ == "__main__":
    main()
