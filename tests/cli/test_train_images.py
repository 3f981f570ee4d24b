"""`penstock train` on chats with images, for a model that sees: rows and losses are those of its processor in eager."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from rich.console import Console
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from penstock.cli.options import TrainOptions
from penstock.cli.task import prepare
from penstock.compiler.models.named import SEES
from penstock.data.codec import Codec
from penstock.data.files import Record
from penstock.data.images import encode_images
from penstock.data.read import read_rows
from penstock.data.spec import DataSpec
from penstock.errors import PlanError
from penstock.tests.cli import small_runs
from penstock.tests.cli.small_runs import run
from penstock.tests.cli.test_train_kinds import eager
from penstock.tests.integrations.trl.case import image_chats, llava, processor, tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ '<a> ' if m['role'] == 'assistant' else '<u> ' }}{% for part in m['content'] %}"
    "{{ '<image> ' if part['type'] == 'image' else part['text'] + ' ' }}{% endfor %}<e> {% endfor %}"
    "{% if add_generation_prompt %}<a> {% endif %}"
)
TALK = [{"role": "user", "content": "<image>\nw9 w8"}, {"role": "assistant", "content": "w7 w6"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llava")
    llava().save_pretrained(directory)
    own = processor()
    own.chat_template = TEMPLATE
    own.save_pretrained(directory)
    return directory


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "noise.png"
    Image.frombytes("RGB", (40, 28), bytes(range(256)) * 13 + bytes(32)).save(path)
    return path


def encode(model: Path, messages: list[dict[str, Any]], images: Any, folder: Path, tools: Any = None) -> dict[str, Any]:
    return encode_images(messages, images, Codec.read(model, sees=True), folder, "rows, line 1", tools)


def test_labels_are_on_the_assistants_turns(model: Path, image: Path) -> None:
    """There is a placeholder for each patch of the image."""
    found = encode(model, [*TALK, {"role": "user", "content": "w5"}, TALK[1]], ["noise.png"], image.parent)
    tokenizer = Codec.read(model, sees=True).tokenizer
    text = tokenizer.decode([token for token in found["labels"] if token != -100])
    assert text == "w7 w6 <e> w7 w6 <e>"
    assert tokenizer.decode(found["input_ids"]).count("<image>") == 4
    assert found["pixel_values"].shape == (1, 3, 28, 28)


@pytest.mark.parametrize("form", ["path", "column of bytes", "part", "one image"])
def test_the_forms_of_images(form: str, model: Path, image: Path) -> None:
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "w9 w8"}]
    talk, images, folder = TALK, [str(image)], Path()
    if form == "column of bytes":
        images = [{"bytes": image.read_bytes(), "path": None}]
    elif form == "part":
        own = {"role": "user", "content": [{**parts[0], "path": "noise.png"}, parts[1]]}
        talk, images, folder = [own, TALK[1]], None, image.parent
    elif form == "one image":
        talk, images = [{"role": "user", "content": parts}, TALK[1]], Image.open(image)
    expected = encode(model, TALK, ["noise.png"], image.parent)
    found = encode(model, talk, images, folder)
    assert found["input_ids"] == expected["input_ids"] and found["labels"] == expected["labels"]
    assert torch.equal(found["pixel_values"], expected["pixel_values"])


@pytest.mark.parametrize(
    ("images", "said"),
    [
        ([], 'more places of images than "images" has images'),
        (["noise.png"] * 2, "more images than its messages have places"),
        (["gone.png"], "an image cannot be read .*gone.png.*; allowed are images, bytes, files here"),
        ([3], "an image cannot be read"),
    ],
)
def test_mistakes(images: Any, said: str, model: Path, image: Path) -> None:
    with pytest.raises(PlanError, match=f"rows, line 1: .*{said}"):
        encode(model, TALK, images, image.parent)


def options(model: Path, data: Path, out: Path, **changes: Any) -> TrainOptions:
    given = {"model": str(model), "max_steps": 3, "dropout": False, "strategy": "mobius", "optimizer": "sgd",
             "sequence": 32, "micro_batches": None}  # fmt: skip
    return small_runs.options(data, out, **{**given, **changes})


def write(folder: Path, image: Path, count: int = 12) -> Path:
    path = folder / "rows.jsonl"
    talks = [[TALK[0], {**TALK[1], "content": "w7 " * (1 + number % 3)}] for number in range(count)]
    path.write_text("\n".join(json.dumps({"messages": talk, "images": [image.name]}) for talk in talks))
    return path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("streaming", [False, True])
def test_losses_of_eager(streaming: bool, model: Path, image: Path, tmp_path: Path) -> None:
    chosen = options(model, write(tmp_path, image), tmp_path / "out", streaming=streaming)
    result, said = run(chosen)
    assert ("rows of chat read" if streaming else "chat, 32 tokens each") in said
    assert len(result.losses) == 3
    if not streaming:
        assert result.losses == pytest.approx(eager(chosen), rel=1e-5, abs=1e-5)
    assert transformers.AutoProcessor.from_pretrained(tmp_path / "out" / "model").chat_template == TEMPLATE


MARKS = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]


class QwenProcessor:
    """The work of Qwen's processor, whose class needs torchvision for its videos."""

    def __init__(self) -> None:
        self.tokenizer = tokenizer()
        self.tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
        self.image_processor = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=56 * 56)
        self.chat_template = TEMPLATE.replace("<image> ", "<|vision_start|> <|image_pad|> <|vision_end|> ")

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool = False, **_: Any) -> dict[str, Any]:
        text = self.tokenizer.apply_chat_template(
            messages, chat_template=self.chat_template, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        images = [part["image"] for message in messages for part in message["content"] if part["type"] == "image"]
        found = self.image_processor(images, return_tensors="pt")
        text = text.replace("<|image_pad|>", "<|image_pad|> " * (int(found["image_grid_thw"][0].prod()) // 4))
        ids = torch.tensor([self.tokenizer(text, add_special_tokens=False)["input_ids"]])
        kinds = (ids == self.tokenizer.convert_tokens_to_ids("<|image_pad|>")).long()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds, **found}

    def save_pretrained(self, directory: str) -> None:
        self.tokenizer.save_pretrained(directory)


def qwen(directory: Path, own: Any) -> Path:
    """Qwen2.5-VL in small, whose grids of patches say where tokens are."""
    ids = dict(zip(MARKS, own.convert_tokens_to_ids(MARKS)))
    torch.manual_seed(0)
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": len(own), "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}  # fmt: skip
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
              "patch_size": 14, "fullatt_block_indexes": [1], "window_size": 56}  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=ids[MARKS[0]], vision_start_token_id=ids[MARKS[1]],
        vision_end_token_id=ids[MARKS[2]], video_token_id=ids[MARKS[3]],
    )  # fmt: skip
    transformers.Qwen2_5_VLForConditionalGeneration(config).save_pretrained(directory)
    own.save_pretrained(directory)
    return directory


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_qwen_vl(image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patches of all images come one after another, and a grid for each."""
    own = QwenProcessor()
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lambda *_, **__: own)
    chosen = options(qwen(tmp_path / "qwen", own.tokenizer), write(tmp_path, image), tmp_path / "out")
    result, _ = run(chosen)
    assert result.losses == pytest.approx(eager(chosen), rel=1e-5, abs=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_images_of_several_sizes(image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is a micro-batch, in evaluations, too."""
    own = QwenProcessor()
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lambda *_, **__: own)
    data, sizes = write(tmp_path, image, count=16), [(28, 28), (56, 56), (28, 56)]
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    for number, (row, size) in enumerate(zip(rows, sizes * 6)):
        Image.open(image).resize(size).save(tmp_path / f"{number}.png")
        row["images"] = [f"{number}.png"]
    data.write_text("\n".join(map(json.dumps, rows)))
    directory = qwen(tmp_path / "qwen", own.tokenizer)
    chosen = options(directory, data, tmp_path / "out", eval_fraction=0.25)
    result, said = run(chosen)
    assert f"several sizes: a step takes {chosen.batch} micro-batches" in said
    assert result.losses == pytest.approx(eager(chosen), rel=1e-5, abs=1e-5)
    assert result.after["loss"] < result.before["loss"]
    with pytest.raises(PlanError, match="--streaming: each row has the same number of images"):
        run(dataclasses.replace(chosen, out=tmp_path / "stream", streaming=True, eval_fraction=0.0))


def test_a_processor_that_cannot_be_loaded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ImportError("Qwen2VLVideoProcessor requires the Torchvision library")

    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", fail)
    with pytest.raises(PlanError, match=r"the processor in .*llava.* cannot be loaded: .*Torchvision library"):
        Codec.read(model, sees=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_data_set_with_images_inside(model: Path, tmp_path: Path) -> None:
    """As `datasets` saves it, with an adapter around the model."""
    image_chats().save_to_disk(str(tmp_path / "rows"))
    result, _ = run(options(model, tmp_path / "rows", tmp_path / "out", adapter="lora:r=2,targets=q_proj"))
    assert len(result.losses) == 3


def test_images_of_two_sizes_are_brought_to_one(model: Path, image: Path, tmp_path: Path) -> None:
    """A processor that keeps sizes says how many patches each has."""
    own = transformers.AutoProcessor.from_pretrained(model)
    own.image_processor = CLIPImageProcessorPil(do_resize=False, do_center_crop=False)
    own.save_pretrained(tmp_path / "keeps")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "keeps" / name).symlink_to(model / name)
    Image.open(image).resize((56, 28)).save(tmp_path / "wide.png")
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"messages": TALK, "images": [n]}) for n in ("noise.png", "wide.png")))
    with pytest.raises(PlanError, match=r"row 2: its images are \[1, 3, 28, 56\] as pixel_values, .*--image-size 448"):
        prepare(options(tmp_path / "keeps", path, tmp_path / "out"), Console(quiet=True))
    task = prepare(options(tmp_path / "keeps", path, tmp_path / "out", image_size="28"), Console(quiet=True))
    assert task.rows is not None and task.rows.take([0, 1])["pixel_values"].shape == (2, 3, 28, 28)


def test_an_image_that_changes_is_read_again(model: Path, image: Path, tmp_path: Path) -> None:
    """Rows of a data file that stays the same are in the cache."""
    path, codec = write(tmp_path, image, count=2), Codec.read(model, sees=True)
    parts = [{"type": "image", "path": image.name}, {"type": "text", "text": "w9"}]
    own = tmp_path / "parts.jsonl"
    own.write_text(json.dumps({"messages": [{"role": "user", "content": parts}, TALK[1]]}))
    specs = [DataSpec(paths=(each,), sequence=32) for each in (path, own)]
    before = [read_rows(spec, codec, SEES).rows.columns["pixel_values"] for spec in specs]
    Image.open(image).rotate(180).save(image)
    for spec, old in zip(specs, before):
        assert not torch.equal(read_rows(spec, codec, SEES).rows.columns["pixel_values"], old)
        image_of_a_row = encode(model, TALK, [image.name], tmp_path)["pixel_values"]
        assert torch.equal(read_rows(spec, codec, SEES).rows.columns["pixel_values"][0], image_of_a_row)


@pytest.mark.parametrize("first", [[], ["noise.png"]], ids=["without", "with"])
def test_rows_with_and_without_images(first: list[str], model: Path, image: Path, tmp_path: Path) -> None:
    text = [{"role": "user", "content": "w9 w8"}, TALK[1]]
    rows = [{"messages": talk, "images": names} for talk, names in ((TALK, ["noise.png"]), (text, []))]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in (rows if first else rows[::-1])))
    with pytest.raises(PlanError, match=r"row 2: its images are .* as pixel_values") as found:
        read_rows(DataSpec(paths=(path,), sequence=32), Codec.read(model, sees=True), SEES)
    assert "none" in str(found.value)


def test_functions_that_a_template_leaves_out(model: Path, image: Path) -> None:
    with pytest.raises(PlanError, match="line 1: the chat template has no place for tools: functions"):
        encode(model, TALK, ["noise.png"], image.parent, tools=[{"type": "function", "function": {"name": "add"}}])


def test_rows_of_images_are_not_cut(model: Path, image: Path, tmp_path: Path) -> None:
    path = write(tmp_path, image)
    with pytest.raises(PlanError, match=r"line 1: has \d+ tokens with those of its images, which are not cut"):
        prepare(options(model, path, tmp_path / "out", sequence=6), Console(quiet=True))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"image_size": "0"}, "--image-size '0': allowed are pixels"),
        ({"model": small_runs.GPT, "image_size": "28"}, "--image-size 28: .* reads text alone"),
        ({"pack": True}, "--pack: rows of a model that sees"),
    ],
)
def test_options_that_do_not_fit(changes: dict[str, Any], said: str, model: Path, image: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=said):
        given = options(model, write(tmp_path, image), tmp_path / "out")
        prepare(dataclasses.replace(given, **changes), Console(quiet=True))


def test_images_for_a_model_of_text(tmp_path: Path) -> None:
    from penstock.tests.data.test_read import MARKED, codec_with, read

    with pytest.raises(PlanError, match='"images" has images, and this model reads text'):
        read(tmp_path, [{"messages": TALK, "images": ["a.png"]}], codec_with(MARKED), sequence=32)
    part = [{"role": "user", "content": [{"type": "image"}]}, TALK[1]]
    with pytest.raises(PlanError, match='a part of its "content" is an image; allowed for models that see'):
        read(tmp_path, [{"messages": part}], codec_with(MARKED), sequence=32)


def test_the_folder_of_a_record() -> None:
    assert Record("a/b, c.jsonl, line 2", {}).folder == Path("a") and Record("d/e.txt", {}).folder == Path("d")
