"""Preference training equals eager PyTorch and its equation, and moves no more weights than plain fine-tuning does."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn

import penstock
from penstock.compiler.job.job import Job
from penstock.errors import CaptureError, PlanError
from penstock.graph.follow.rows import RowFacts
from penstock.tests.compiler.eager_baseline import SGD, Eager, assert_close, assert_same_states
from penstock.tests.preference_case import adapt, pairs
from penstock.tests.zoo import zoo

STEPS = 2
# Each parameter's gradient comes from one stage, added up over micro-batches in eager's order: bit for bit. Losses are
# means over micro-batches, of two fp32 numbers.
LOSS = 2e-7
BEFORE_BLOCKS = "drop-masks, chunk-loss, interleave-forwards"
SWAPPED = (
    f"{BEFORE_BLOCKS}, coarsen, partition-balanced{{stages=3}}, map-round-robin, schedule-pipeline, "
    "insert-remat{swap=true}, insert-fetch{swap=true}, insert-optimizer"
)


class Plain(nn.Module):
    """Fine-tuning on the chosen answers: one forward of the same model."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        tokens, mask = batch["chosen_input_ids"], batch["chosen_attention_mask"]
        logits = self.model(input_ids=tokens, attention_mask=mask).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["chosen_labels"][:, 1:].flatten())


class Ipo(penstock.DPO):
    """Another loss of the same margins (Azar et al. 2023, equation 17)."""

    def pair_loss(self, margins: Tensor) -> Tensor:
        return (margins / self.beta - 0.5 / self.beta).square().mean()


class Distil(nn.Module):
    """A wrapper of one's own: the policy stays near its reference."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad(), self.model.disable_adapter():
            teacher = self.model(input_ids=input_ids).logits
        student = self.model(input_ids=input_ids).logits
        near = F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="none").sum(-1).mean()
        return F.cross_entropy(student.flatten(0, 1), labels.flatten()) + near


def job_of(
    model: nn.Module, strategy: str, num_devices: int = 1, memory: str = "64MB", batch: Any = None, **options: Any
) -> Job:
    hardware = penstock.Hardware.cpu(num_devices=num_devices, memory=memory, dram="1GB")
    given = pairs() if batch is None else batch
    return penstock.compile(
        model, hardware, example_inputs=given, **{"optimizer": SGD, "micro_batches": 2, "strategy": strategy, **options}
    )


def assert_trains_like_eager(
    job: Job, model: nn.Module, batch: Any = None, tolerance: float = 0.0, rewards: float = 1e-5
) -> None:
    """Losses, gradients (as momentum) and adapters after some steps, and rewards, are those of eager PyTorch."""
    eager, batch = Eager(model, micro_batches=job.plan.micro_batches), pairs() if batch is None else batch
    with job:
        for _ in range(STEPS):
            assert_close({"loss": job.step(batch)}, {"loss": eager.step(batch)}, LOSS)
        assert_same_states(job, eager, tolerance)
        assert_close(job.state_dict(), eager.model.state_dict(), tolerance)
        if isinstance(model, penstock.DPO):
            found = job.evaluate(batch)
            with torch.no_grad():
                want = eager.model.eval()(**batch)
            for name in ("chosen_rewards", "rejected_rewards", "margins"):
                assert_close({name: getattr(found, name)}, {name: want[name]}, rewards)  # other rows in a product


def test_the_loss_is_equation_7_of_the_paper() -> None:
    model, batch, beta = adapt(), pairs(), 0.3

    def log_prob(side: str) -> Tensor:
        tokens, mask, labels = (batch[f"{side}_{part}"] for part in ("input_ids", "attention_mask", "labels"))
        found = model(input_ids=tokens, attention_mask=mask).logits.double().log_softmax(-1)
        rows = []
        for row in range(len(tokens)):
            places = [t for t in range(1, tokens.shape[1]) if labels[row, t] != -100]
            rows.append(torch.stack([found[row, t - 1, tokens[row, t]] for t in places]).sum())
        return torch.stack(rows)

    policy = {side: log_prob(side) for side in ("chosen", "rejected")}
    with torch.no_grad(), model.disable_adapter():
        reference = {side: log_prob(side) for side in policy}
    chosen, rejected = (beta * (policy[side] - reference[side]) for side in policy)
    want = -torch.log(torch.sigmoid(chosen - rejected)).mean()
    found = penstock.DPO(model, beta=beta)(**batch)
    # A row adds up at most 7 logarithms below 10, each rounded to 2^-24 of itself in fp32.
    torch.testing.assert_close(found["chosen_rewards"].double(), chosen.detach(), atol=2e-5, rtol=0)
    torch.testing.assert_close(found["rejected_rewards"].double(), rejected.detach(), atol=2e-5, rtol=0)
    torch.testing.assert_close(found["loss"].double(), want, atol=2e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_resident_on_one_device(kind: str) -> None:
    model = penstock.DPO(adapt(kind, num_layers=1))
    job = job_of(model, "balanced")
    assert not job.plan.decisions.fetch and job.folder.settings.rows == RowFacts()
    assert_trains_like_eager(job, model)


@pytest.mark.slow
def test_weights_swapped_from_dram() -> None:
    model = penstock.DPO(adapt(num_layers=6))
    job = job_of(model, "mobius", memory="270kB", micro_batches=4)
    # Once for all forwards, and once for all backwards; the weights of the last stage stay in between.
    assert fetches(job) == {"stage0": 2, "stage1": 2, "stage2": 1}
    assert_trains_like_eager(job, model)


@pytest.mark.slow
@pytest.mark.multi
def test_two_devices_with_dropout() -> None:
    """The reference draws masks of its own, as in eager: its modules are in training mode, too."""
    model = penstock.DPO(adapt("gpt2", dropout=0.2))
    job = job_of(model, "mobius", num_devices=2)
    assert set(job.plan.decisions.devices) == {0, 1} and job.plan.decisions.interleaved
    assert_trains_like_eager(job, model)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["1f1b", pytest.param("ftpipe", marks=pytest.mark.slow)])
def test_other_strategies(strategy: str) -> None:
    model = penstock.DPO(adapt("gpt2", num_layers=2))
    assert_trains_like_eager(job_of(model, strategy), model)


@pytest.mark.slow
@pytest.mark.parametrize("make", [Ipo, Distil])
def test_wrappers_of_ones_own(make: Any) -> None:
    model = make(adapt())
    batch = pairs() if make is Ipo else {"input_ids": pairs()["chosen_input_ids"], "labels": pairs()["chosen_labels"]}
    job = job_of(model, SWAPPED, batch=batch)
    assert job.plan.decisions.interleaved
    if make is Distil:  # the labels that count differ between micro-batches
        eager = Eager(model, micro_batches=1)
        with job:
            assert_close({"loss": job.step(batch)}, {"loss": eager.step(batch)}, 1e-6)
    else:
        assert_trains_like_eager(job, model, batch)


def fetches(job: Job) -> Counter[str]:
    """The number of fetches of each stage; one that comes in two parts counts once."""
    step = job.code(0).split("def step(")[1].split("def evaluate(")[0]
    return Counter(re.findall(r'rt\.fetch\("(stage\d+)\.weights"(?!.*params=)', step))


@pytest.mark.slow
def test_every_stage_is_fetched_once_for_both_forwards() -> None:
    plain = job_of(Plain(adapt()), SWAPPED)
    plan = job_of(penstock.DPO(adapt()), SWAPPED).plan.model_copy(deep=True)
    plan.decisions.stages = plain.plan.decisions.stages  # the same parts of the same model
    plan.decisions.fetch = plain.plan.decisions.fetch
    found = job_of(penstock.DPO(adapt()), "auto", plan=plan)
    assert found.plan.decisions.interleaved and not plain.plan.decisions.interleaved
    assert fetches(found) == fetches(plain) == {"stage0": 1, "stage1": 1, "stage2": 1}  # they stay for backward
    stages, others = found.folder.interface.stages, plain.folder.interface.stages
    names = Counter(param.name for spec in stages.values() for param in spec.params)
    assert set(names.values()) == {1}

    def frozen(spec: Any) -> int:
        return sum(param.bytes for param in spec.params if not param.requires_grad)

    assert {name: frozen(spec) for name, spec in stages.items()} == {n: frozen(spec) for n, spec in others.items()}


@pytest.mark.slow
def test_nothing_of_the_reference_is_saved() -> None:
    """What backward keeps is what a forward of the policy alone keeps, for twice the rows."""
    batch = pairs()
    doubled = {name: torch.cat([rows, rows]) for name, rows in batch.items()}
    found = job_of(penstock.DPO(adapt()), "balanced").folder.interface.stages
    alone = job_of(Plain(adapt()), "balanced", batch=doubled).folder.interface.stages
    kept = [sum(spec.kept_bytes for spec in stages.values()) for stages in (found, alone)]
    logits = 2 * 2 * 10 * 61 * 4  # `Plain` leaves the last place out and copies what is left
    assert abs(kept[0] - kept[1]) <= logits


@pytest.mark.slow
def test_the_adapter_is_saved(tmp_path: Path) -> None:
    model = penstock.DPO(adapt(num_layers=1))
    with job_of(model, "balanced") as job:
        job.step(pairs())
        job.save_pretrained(tmp_path)
        want = {name: tensor for name, tensor in job.state_dict().items() if "lora_" in name}
    found = load_file(tmp_path / "adapter_model.safetensors")
    assert len(found) == len(want)
    for name, tensor in found.items():
        assert torch.equal(tensor, want[f"model.{name.replace('.weight', '.default.weight')}"])


def test_models_that_have_no_reference_are_refused() -> None:
    base = adapt().get_base_model()
    with pytest.raises(PlanError, match=r"LlamaForCausalLM is no PeftModel.*frozen copy.*get_peft_model"):
        penstock.DPO(base)
    whole = adapt()
    whole.requires_grad_(True)
    with pytest.raises(PlanError, match=r"embed_tokens.weight and .* more of the base model is trained.*freeze"):
        penstock.DPO(whole)
    with pytest.raises(PlanError, match="bias"):
        penstock.DPO(adapt("gpt2", bias="all"))
    frozen = adapt()
    frozen.requires_grad_(False)
    with pytest.raises(PlanError, match=r"no adapter is trained.*is_trainable=True"):
        penstock.DPO(frozen)
    with pytest.raises(PlanError, match="beta=0"):
        penstock.DPO(adapt(), beta=0)


def test_models_that_are_called_otherwise_are_refused() -> None:
    prompted = get_peft_model(
        adapt(num_layers=1).unload(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    with pytest.raises(PlanError, match=r"PromptTuningConfig adds tokens.*LoRA"):
        penstock.DPO(prompted)
    translator, _ = zoo()["t5"]()
    with pytest.raises(PlanError, match=r"an encoder and a decoder.*docs/preference.md"):
        penstock.DPO(get_peft_model(translator, LoraConfig(task_type="SEQ_2_SEQ_LM", target_modules=["q", "v"])))


@pytest.mark.slow
def test_a_copy_of_a_layer_may_be_trained() -> None:
    model = penstock.DPO(adapt(modules_to_save=["lm_head"]))
    assert_trains_like_eager(job_of(model, "balanced"), model)


@pytest.mark.slow
def test_bad_batches_are_refused() -> None:
    model = penstock.DPO(adapt(num_layers=1))
    missing, more, shorter = pairs(), pairs(), pairs()
    missing.pop("rejected_labels")
    more["prompt_input_ids"] = more["chosen_input_ids"]
    shorter |= {name: rows[:, :8] for name, rows in pairs().items() if name.startswith("rejected")}
    with pytest.raises(CaptureError, match=r"lacks 'rejected_labels'; its entries are chosen_input_ids"):
        job_of(model, "balanced", batch=missing)
    with pytest.raises(CaptureError, match="has 'prompt_input_ids'"):
        job_of(model, "balanced", batch=more)
    with pytest.raises(CaptureError, match=r"rejected_labels \[2, 8\].*same length"):
        job_of(model, "balanced", batch=shorter)


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "preference.md").read_text("utf-8")
    first, *others = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"torch": torch, "penstock": penstock}
    exec(first, names)
    assert float(names["loss"]) == pytest.approx(0.6931, abs=1e-4)  # an adapter begins as zero: log 2
    assert names["margins"].shape == (4,) and (tmp_path / "out" / "adapter" / "adapter_model.safetensors").is_file()
    for block in others:
        exec(block, names)
    tokens = names["tokens"][0]
    assert set(names["IPO"](names["policy"])(**names["batch"])) == {
        "loss", "chosen_rewards", "rejected_rewards", "margins",
    }  # fmt: skip
    near = names["NearBase"](names["policy"])
    hardware = penstock.Hardware.cpu(num_devices=1)
    batch = {"input_ids": tokens, "labels": tokens}
    with penstock.compile(near, hardware, example_inputs=batch, micro_batches=1, strategy="balanced") as job:
        assert job.plan.decisions.interleaved
        assert float(job.step(batch)) == pytest.approx(float(near(**batch)), rel=1e-5)


@pytest.mark.slow
def test_the_logits_of_both_forwards_are_made_in_chunks() -> None:
    """Neither the policy's logits nor the reference's stand whole, and nothing else is as large."""
    model, batch = penstock.DPO(adapt(vocabulary=20000)), pairs(rows=8)
    whole_bytes = 8 * 10 * 20000 * 4  # logits of one forward of a micro-batch
    for memory in ("64MB", "4GB"):
        job = job_of(model, SWAPPED, batch=batch, memory=memory)
        spec = job.folder.interface.stages["stage2"]
        peaks = spec.forward_workspace_bytes, spec.light_workspace_bytes, spec.backward_workspace_bytes
        chunks = job.plan.decisions.chunks
        if memory == "64MB":
            assert [chunk.tokens for chunk in chunks.values()] == [52, 52] and max(peaks) < whole_bytes
            # Sums over classes in another order. A small reward is the difference of sums of 7 logarithms near 10.
            assert_trains_like_eager(job, model, batch, 2e-6, rewards=1e-4)
        else:
            assert not chunks and min(peaks) > whole_bytes
