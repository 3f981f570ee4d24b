"""The written files of a wrapped model are read back by `from_pretrained`, or nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import penstock
from penstock.compiler.job.job import Job
from penstock.errors import PlanError
from penstock.runtime.state.pretrained import save_pretrained
from penstock.tests.compiler.eager_baseline import SGD
from penstock.tests.runtime.state.test_pretrained import assert_loads, bert, gpt2, llama, on_meta, stages_of
from penstock.tests.shown_elsewhere import slow_but

IDS = torch.arange(16).view(4, 4)


class Called(nn.Module):
    """A wrapper that adds no tensor, but another name for one."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.head = model.lm_head
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, labels=input_ids, use_cache=False).loss


class Headed(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.config = model.config  # as wrappers that imitate a model have it
        self.encoder, self.score = model, nn.Linear(16, 3)

    def can_generate(self) -> bool:
        return False

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.score(self.encoder(input_ids=input_ids).last_hidden_state).square().mean()


def job_of(model: nn.Module) -> Job:
    return penstock.compile(
        model, penstock.Hardware.cpu(num_devices=1), example_inputs={"input_ids": IDS}, optimizer=SGD, micro_batches=2,
        strategy="balanced",
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("make", [gpt2, llama], ids=["tied", "not tied"])
def test_a_wrapper_that_adds_nothing_is_written_as_the_model_in_it(make: Callable[[], Any], tmp_path: Path) -> None:
    model = make()
    with job_of(Called(model)) as job:
        job.step({"input_ids": IDS})
        job.save_pretrained(tmp_path / "saved")
        job.sync()
    assert_loads(tmp_path / "saved", model)


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, lambda m: nn.Sequential(nn.ModuleDict({"m": m}))])
def test_names_in_front_are_left_out(wrap: Callable[[nn.Module], Any], tmp_path: Path) -> None:
    model = gpt2()
    save_pretrained(tmp_path / "saved", stages_of(wrap(model), 2), wrap(model))
    assert_loads(tmp_path / "saved", model)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Headed(bert("MaskedLM").bert), r"Headed holds BertModel as 'encoder' and score\.weight.*model\.encoder\.save"),
        (nn.ModuleList([gpt2(), gpt2()]), r"holds GPT2LMHeadModel as '0', GPT2LMHeadModel as '1'"),
    ],
)
def test_a_wrapper_with_more_is_refused(model: nn.Module, message: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=message):
        save_pretrained(tmp_path / "saved", stages_of(model, 2), model)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_refusal_comes_before_the_devices_are_asked_and_its_way_out_works(tmp_path: Path) -> None:
    model = Headed(bert("MaskedLM").bert)
    with job_of(model) as job:
        job.step({"input_ids": IDS})
        with pytest.raises(PlanError, match=r"job\.sync\(\)"):
            job.save_pretrained(tmp_path / "saved")
        job.sync()
    model.encoder.save_pretrained(tmp_path / "encoder")
    found = load_file(tmp_path / "encoder" / "model.safetensors")
    assert all(torch.equal(tensor, model.encoder.state_dict()[name]) for name, tensor in found.items())
    assert found.keys() == model.encoder.state_dict().keys()


def exchange_modules() -> nn.Module:
    model: Any = bert()
    model.classifier = nn.Linear(16, 5)
    return model


def extend() -> nn.Module:
    model: Any = gpt2()
    model.transformer.h[0].attn.extra = nn.Linear(16, 2)
    return model


@pytest.mark.parametrize(
    ("make", "name"), [(exchange_modules, r"classifier\.weight \[5, 16\]"), (extend, r"attn\.extra\.weight \[2, 16\]")]
)
def test_parts_that_the_configuration_does_not_know_are_refused(make: Any, name: str, tmp_path: Path) -> None:
    model = make()
    with pytest.raises(PlanError, match=name):
        save_pretrained(tmp_path / "saved", stages_of(model, 2), model)
    if make is exchange_modules:
        model.config.num_labels = 5
        save_pretrained(tmp_path / "saved", stages_of(model, 2), model)
        assert_loads(tmp_path / "saved", model)


def test_a_class_that_takes_more_than_a_configuration_is_written(tmp_path: Path) -> None:
    class Sized(transformers.GPT2LMHeadModel):
        def __init__(self, config: Any, width: int):
            super().__init__(config)
            self.extra = nn.Linear(16, width)

    model = Sized(gpt2().config, 3)
    save_pretrained(tmp_path / "saved", stages_of(model, 2), model)
    found = Sized.from_pretrained(tmp_path / "saved", width=3)
    assert torch.equal(found.extra.weight, model.extra.weight)


def test_a_model_of_another_library_is_left_to_it(tmp_path: Path) -> None:
    class Hub(nn.Linear):
        @classmethod
        def from_pretrained(cls, path: str) -> Hub:
            raise NotImplementedError

    with pytest.raises(PlanError, match=r"Hub, which is not of transformers.*model\.save_pretrained"):
        save_pretrained(tmp_path / "saved", [], Hub(2, 2))
    save_pretrained(tmp_path / "saved", [], nn.Sequential(nn.Embedding(3, 2)))  # its `from_pretrained` reads no files


# --- PEFT


def lora(model: Any, **options: Any) -> Any:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **{"init_lora_weights": False, **options})
    return peft.get_peft_model(model, config)


def assert_adapters_load(directory: Path, model: Any, base: nn.Module) -> None:
    import peft

    loaded = peft.PeftModel.from_pretrained(base, directory)
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


OPTIONS: list[dict[str, Any]] = [{}, {"modules_to_save": ["lm_head"]}, {"bias": "all"}, {"use_dora": True}]


@pytest.mark.parametrize("options", slow_but([{"modules_to_save": ["lm_head"]}], OPTIONS))
def test_adapters_are_written_as_peft_reads_them(options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = llama()
    weights = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = lora(base, **options)

    class Loss(Called):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.model = model

    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "model.safetensors").touch()  # of an earlier save, which would be loaded beside
    (tmp_path / "saved" / "README.md").write_text("our notes")
    with job_of(Loss()) as job:
        job.step({"input_ids": IDS})
        job.save_pretrained(tmp_path / "saved")
        job.sync()
    assert {p.name for p in (tmp_path / "saved").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "README.md",
    }  # fmt: skip
    assert "our notes" in (tmp_path / "saved" / "README.md").read_text()
    again = llama()
    again.load_state_dict(weights)
    assert_adapters_load(tmp_path / "saved", model, again)


def test_what_peft_would_not_write_is_refused(tmp_path: Path) -> None:
    model = lora(llama())
    model.base_model.model.lm_head.weight.requires_grad_(True)
    with pytest.raises(PlanError, match=r"lm_head\.weight is trained, and PEFT does not write it"):
        save_pretrained(tmp_path / "saved", stages_of(model, 2), model)
    assert not list(tmp_path.iterdir())


def test_adapters_of_a_base_model_on_meta_are_written(tmp_path: Path) -> None:
    model = lora(llama())
    stages = list(stages_of(model, 2))
    save_pretrained(tmp_path / "saved", stages, on_meta(lambda: lora(llama())))
    assert_adapters_load(tmp_path / "saved", model, model.unload())
