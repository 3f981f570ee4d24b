"""Training on packed documents equals training on each of them by itself, and no token sees another document."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.compiler.batches.shape import flatten
from penstock.compiler.job.job import Job
from penstock.graph.masks.forms import DocumentBorders
from penstock.ir.errors import BatchError, CaptureError, PlanError
from penstock.tests.compiler.eager_baseline import SGD, Eager, assert_close, assert_same_states
from penstock.tests.compiler.reasons import reasons_of
from penstock.tests.zoo import VOCABULARY, without_cache, zoo

SEQUENCE = 8
# Other rows, and other lengths of them, add the same terms in another order: each addition rounds by at most 2^-24 of
# the running sum, and two steps carry that through the network.
REORDERED = 5e-6


def documents(*lengths: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]


# The same number of rows, with borders at other places in each step.
STEPS = [documents(5, 3, 8, 6, 4, 2, 2), documents(2, 2, 2, 2, 7, 3, 5, 8, seed=1), documents(8, 1, 6, 4, 4, 7, seed=2)]


def make(name: str, attention: str, **sizes: int) -> nn.Module:
    model, _ = zoo()[name](dropout=0.0, **sizes)
    model.set_attn_implementation(attention)  # type: ignore[operator]
    return model


def loss_alone(model: nn.Module, given: Sequence[Tensor]) -> Tensor:
    """The mean over all targets, of documents that are run one by one."""
    total, count = torch.zeros(()), 0
    for document in given:
        logits = model(input_ids=document[None]).logits[0, :-1]
        total = total + F.cross_entropy(logits, document[1:], reduction="sum")
        count += len(document) - 1
    return total / count


def compile_job(model: nn.Module, batch: Any, **options: Any) -> Job:
    hardware = penstock.Hardware.cpu(num_devices=1, memory="64MB", dram="1GB")
    return penstock.compile(model, hardware, example_inputs=batch, optimizer=SGD, strategy="balanced", **options)


def pack_steps() -> list[dict[str, Tensor]]:
    return [penstock.pack_documents(given, SEQUENCE).columns for given in STEPS]


@functools.cache
def packed_job(name: str, attention: str) -> Job:
    return compile_job(make(name, attention), pack_steps()[0], micro_batches=2)


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("llama", "sdpa"),
        *(pytest.param(name, "eager", marks=pytest.mark.slow) for name in ("gpt2", "llama")),
        pytest.param("gpt2", "sdpa", marks=pytest.mark.slow),
        pytest.param("qwen3", "sdpa", marks=pytest.mark.slow),
        pytest.param("mistral", "sdpa", marks=pytest.mark.slow),
    ],
)
def test_packed_training_is_that_of_each_document_by_itself(name: str, attention: str) -> None:
    packed = pack_steps()
    assert {len(rows["input_ids"]) for rows in packed} == {4}
    with packed_job(name, attention) as job:
        eager = Eager(job.model, micro_batches=1, loss_of=loss_alone)
        for rows, given in zip(packed, STEPS):
            assert_close({"loss": job.step(rows)}, {"loss": eager.step(given)}, 1e-6)
        assert_same_states(job, eager, REORDERED)  # momentum: the gradients of all steps
        assert_close(job.state_dict(), eager.model.state_dict(), REORDERED)


@pytest.mark.slow
def test_the_kernel_of_documents_in_a_job() -> None:
    """On CPU plans keep the mask; a plan for a GPU holds this decision."""
    model = make("llama", "sdpa")
    eager = Eager(model, micro_batches=1, loss_of=loss_alone)
    packed = pack_steps()
    plan = packed_job("llama", "sdpa").plan.model_copy(deep=True)
    assert plan.decisions.masks == {}
    places = [f"model.layers.{i}.self_attn" for i in range(2)]
    plan.decisions.masks = dict.fromkeys(places, "documents")
    hardware = penstock.Hardware.cpu(num_devices=1, memory="64MB", dram="1GB")
    with penstock.compile(model, hardware, example_inputs=packed[0], optimizer=SGD, plan=plan) as job:
        assert job.code().count("functions.packed_attention(") == 1  # in the class of both layers
        assert "scaled_dot_product_attention" not in job.code()
        for rows, given in zip(packed, STEPS):
            assert_close({"loss": job.step(rows)}, {"loss": eager.step(given)}, 1e-6)
        assert_same_states(job, eager, REORDERED)


def bordered_jobs(most: int) -> tuple[Job, Job, list[dict[str, Tensor]]]:
    """A job in bf16 whose plan has room for so many documents, one in blocks, and their batches."""
    packed = pack_steps()
    hardware = penstock.Hardware.cpu(num_devices=1, memory="64MB", dram="1GB")
    jobs = []
    for form in (DocumentBorders(most=most, positions="position_ids"), "documents"):
        model, options = make("llama", "sdpa"), {"optimizer": SGD, "precision": "bf16"}
        plan = compile_job(model, packed[0], micro_batches=2, precision="bf16").plan
        plan.decisions.masks = {f"model.layers.{i}.self_attn": form for i in range(2)}
        jobs.append(penstock.compile(model, hardware, example_inputs=packed[0], plan=plan, **options))
    return jobs[0], jobs[1], packed


@pytest.mark.slow
def test_a_plan_with_borders_runs_in_blocks_on_a_cpu() -> None:
    """Borders are made once for both layers; where there is no kernel for them, blocks give the same bits as ever."""
    found, want, packed = bordered_jobs(16)
    assert found.code().count("functions.document_borders(") == 1
    assert found.code().count("borders=document_borders") == 1  # in the class of both layers
    with found, want:
        for rows in packed:
            assert torch.equal(found.step(rows), want.step(rows))
        assert_close(found.state_dict(), want.state_dict(), 0.0)


@pytest.mark.slow
def test_more_documents_than_a_plan_has_room_for_are_refused() -> None:
    packed = penstock.pack_documents(STEPS[0], SEQUENCE).columns["position_ids"]
    most = max(int((part.diff() != 1).sum()) + 2 for part in packed.split(2))
    found, _, batches = bordered_jobs(most)
    crowded = {name: value.clone() for name, value in batches[0].items()}
    crowded["position_ids"][2:] = 0  # each token a document
    with found:
        found.step(batches[0])
        refused = rf"holds {2 * SEQUENCE} documents in micro-batch 1, .*the plan has room for {most}\."
        with pytest.raises(BatchError, match=refused):
            found.step(crowded)
        found.step(batches[0])


@pytest.mark.parametrize(
    ("precision", "machine", "form"),
    [
        ("bf16", "rtx4090x1", "borders"),
        pytest.param("bf16-true", "rtx4090x1", "borders", marks=pytest.mark.slow),
        pytest.param("fp16", "ftpipe-2080ti", None, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_plans_for_gpus_with_flash_attention_take_borders(precision: str, machine: str, form: str | None) -> None:
    """There is room for documents of 64 tokens, or for twice as many as the example has."""
    for lengths, most in (((640,) * 2, 2 * 11), ((300, 339), 2 * 11), ((50,) * 12, 2 * 2 * 13)):
        packed = penstock.pack_documents(documents(*lengths), 640)
        rows = {name: value[:1].expand(2, -1).contiguous() for name, value in packed.columns.items()}
        job = penstock.compile(
            make("llama", "sdpa"), machine, example_inputs=rows, optimizer=SGD, precision=precision, micro_batches=1,
            strategy="balanced",
        )  # fmt: skip
        found = set(job.plan.decisions.masks.values())
        assert found == ({DocumentBorders(most=most, positions="position_ids")} if form else set())


@pytest.mark.slow
def test_a_plan_for_a_gpu_takes_the_kernel_of_documents() -> None:
    spec = {"shape": [2, 1024], "dtype": "int64"}
    packed = {"input_ids": spec, "position_ids": spec, "labels": spec}
    job = penstock.compile(make("llama", "sdpa"), "rtx4090x1", example_inputs=packed, optimizer=SGD)
    assert set(job.plan.decisions.masks.values()) == {"documents"}
    assert "2" in next(line for line in reasons_of(job).splitlines() if "causal in each document" in line)


def flattened(lengths: Sequence[int], seed: int = 0, **options: Any) -> dict[str, Any]:
    from transformers import DataCollatorWithFlattening

    collate = DataCollatorWithFlattening(return_tensors="pt", **options)
    return collate([{"input_ids": document.tolist()} for document in documents(*lengths, seed=seed)])


FLASH = {"return_flash_attn_kwargs": True, "return_seq_idx": True}


@pytest.mark.slow
@pytest.mark.parametrize("options", [FLASH, {}])
def test_the_batches_of_transformers_collator(options: dict[str, bool]) -> None:
    """Flash attention's numbers are others in each batch, and no part of the program."""
    model = make("llama", "sdpa")
    eager = Eager(model, micro_batches=1, loss_of=loss_alone)
    lengths = [(3, 5), (2, 2, 4), (8,)]
    with compile_job(model, flattened(lengths[0], **options)) as job:
        for step, each in enumerate(lengths):
            batch = flattened(each, step, **options)
            assert batch.get("max_length_q", max(each)) == max(each)
            assert_close({"loss": job.step(batch)}, {"loss": eager.step(documents(*each, seed=step))}, 1e-6)
        assert_same_states(job, eager, REORDERED)
        with pytest.raises(BatchError, match="batch lacks position_ids"):
            job.step({name: value for name, value in batch.items() if name != "position_ids"})
        if options:
            with pytest.raises(BatchError, match=r"'max_length_q'.* is absent, compiled as any value"):
                job.step({name: value for name, value in batch.items() if name != "max_length_q"})


def test_any_number_of_tokens() -> None:
    model = make("gpt2", "sdpa", num_layers=1)
    eager = Eager(model, micro_batches=1, loss_of=loss_alone)
    lengths = [(3, 5), (9, 2, 2, 4), (2,)]
    tokens = torch.export.Dim("tokens", max=24)
    with compile_job(model, flattened(lengths[0], **FLASH), dynamic_shapes=tokens) as job:
        for step, each in enumerate(lengths):
            batch = flattened(each, step, **FLASH)
            assert_close({"loss": job.step(batch)}, {"loss": eager.step(documents(*each, seed=step))}, 1e-6)
        assert_same_states(job, eager, REORDERED)


@pytest.mark.parametrize("option", ["return_flash_attn_kwargs", "return_seq_idx"])
def test_borders_without_positions_are_refused(option: str) -> None:
    batch = flattened((3, 5), return_position_ids=False, **{option: True})
    with pytest.raises(PlanError, match=r"no 'position_ids'.*return_position_ids=True"):
        compile_job(make("llama", "sdpa"), batch)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_mask_that_hides_the_borders_is_refused(attention: str) -> None:
    """With a mask of its own in the batch transformers does not look for documents."""
    batch = flattened((3, 5))
    whole = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    with pytest.raises(PlanError, match=r"of model\.layers\.0\.self_attn and 1 more sees .*leave 'attention_mask' out"):
        compile_job(make("llama", attention), whole)


def test_a_model_that_makes_its_mask_without_positions_is_refused() -> None:
    with pytest.raises(PlanError, match=r"and 1 more sees across.*Allowed: an 'attention_mask' of booleans"):
        compile_job(make("opt", "sdpa"), flattened((3, 5)))


@pytest.mark.slow
def test_a_mask_of_all_pairs_is_the_users_own() -> None:
    """It shows OPT's tokens their own document, which the model does not find by itself."""
    model = make("opt", "sdpa")
    batch = flattened((3, 5))
    document = (batch["position_ids"] == 0).cumsum(-1)
    mask = (document[:, None, :, None] == document[:, None, None]).tril()
    eager = Eager(model, micro_batches=1, loss_of=loss_alone)
    with compile_job(model, {**batch, "attention_mask": mask}) as job:
        assert_close({"loss": job.step({**batch, "attention_mask": mask})}, {"loss": eager.step(documents(3, 5))}, 1e-6)


@pytest.mark.slow
def test_padding_on_the_left_is_no_border() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    batch = {
        "input_ids": torch.ones_like(mask), "attention_mask": mask,
        "position_ids": torch.tensor([[1, 1, 0, 1], [0, 1, 2, 3]]), "labels": torch.ones_like(mask),
    }  # fmt: skip
    compile_job(make("llama", "sdpa"), batch).close()


@pytest.mark.slow
def test_a_mask_made_of_another_input_is_the_models_own() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make("opt", "sdpa")

        def forward(self, documents: Tensor, **given: Tensor) -> Any:
            mask = (documents[:, None, :, None] == documents[:, None, None]).tril()
            return self.inner(attention_mask=mask, **given)

    batch = flattened((3, 5))
    batch["documents"] = (batch["position_ids"] == 0).cumsum(-1)
    compile_job(Masked(), batch).close()


class Words(nn.Module):
    """Forward reads what `read` makes of the inputs."""

    def __init__(self, read: Any):
        super().__init__()
        self.table, self.head, self.read = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY), read

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor, **given: Any) -> Tensor:
        hidden = self.table(input_ids) + position_ids[..., None]
        return F.cross_entropy(self.head(self.read(hidden, **given)).flatten(0, 1), labels.flatten())


READS = {
    "max_length_q": [
        lambda x, max_length_q, **_: x * max_length_q,
        lambda x, max_length_q, **_: x if max_length_q > 3 else 2 * x,
        lambda x, max_length_q, **_: x[:, :max_length_q],
        lambda x, max_length_q, **_: x + torch.arange(max_length_q).sum(),
    ],
    "cu_seq_lens_k": [
        lambda x, cu_seq_lens_k, **_: x * cu_seq_lens_k[1],
        lambda x, cu_seq_lens_k, **_: x * torch.cumsum(cu_seq_lens_k, 0)[0],
        lambda x, cu_seq_lens_k, **_: x + cu_seq_lens_k.float().mean(),
        lambda x, cu_seq_lens_k, **_: x * len(cu_seq_lens_k),
    ],
}


@pytest.mark.parametrize(("name", "read"), [(name, read) for name, reads in READS.items() for read in reads])
def test_a_forward_that_reads_flash_attentions_numbers_is_refused(name: str, read: Any) -> None:
    with pytest.raises(CaptureError, match=rf"test_packed_job.py:\d+: .*\n  forward reads '{name}', which differs"):
        compile_job(Words(read), flattened((3, 5), **FLASH))


def test_a_model_without_positions_is_refused() -> None:
    model = Words(lambda x, **_: x)
    model.forward = lambda input_ids, labels, **_: F.cross_entropy(  # type: ignore[method-assign]
        model.head(model.table(input_ids)).flatten(0, 1), labels.flatten()
    )
    with pytest.raises(PlanError, match="the model does not read 'position_ids'"):
        compile_job(model, flattened((3, 5)))


def sinks(x: Tensor, mask: Tensor, sink: Tensor) -> Tensor:
    """gpt-oss's attention: a score of its own takes a share of the weights of all keys."""
    scores = torch.cat([torch.where(mask, x @ x.mT, -torch.inf), sink.expand(*x.shape[:2], 1)], -1)
    weights = (scores - scores.max(-1, keepdim=True).values).softmax(-1)
    return weights[..., :-1] @ x


class Joined(nn.Module):
    """Between two layers tokens meet as `join` says, of hidden values, positions and the module."""

    def __init__(self, join: Any):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head, self.join = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY), join
        self.cell, self.filter, self.sink = (
            nn.GRU(8, 8, batch_first=True),
            nn.Conv1d(8, 8, 3),
            nn.Parameter(torch.ones(())),
        )

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> Any:
        hidden = self.table(input_ids)
        logits = self.head(hidden + self.join(hidden + position_ids[..., None] / 9, position_ids, self))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def document_mask(positions: Tensor) -> Tensor:
    document = (positions == 0).cumsum(-1)
    return (document[..., None] == document[:, None]).tril()


CAUSAL = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
JOINS: dict[str, Any] = {
    "convolution": lambda x, p, m: m.filter(F.pad(x.mT, (2, 0))).mT,
    "recurrence": lambda x, p, m: m.cell(x)[0],
    "sum so far": lambda x, p, m: x.cumsum(1),
    "token before": lambda x, p, m: F.pad(x, (0, 0, 1, -1)),
    "first token": lambda x, p, m: x[:, :1],
    "mean": lambda x, p, m: x.mean(1, keepdim=True),
    "order": lambda x, p, m: x.sort(1).values,
    "linear attention": lambda x, p, m: (x @ x.mT).tril() @ x,
    "state of chunks": lambda x, p, m: x.unflatten(1, (2, -1)).cumsum(1).flatten(1, 2),
    "sinks": lambda x, p, m: sinks(x, CAUSAL, m.sink),
    "attention": lambda x, p, m: F.scaled_dot_product_attention(x, x, x, is_causal=True),
}


@pytest.mark.parametrize("name", JOINS)
def test_whatever_joins_tokens_across_borders_is_refused(name: str) -> None:
    """And it does: what the second document gives depends on the first one."""
    model, batch = Joined(JOINS[name]), pack_steps()[0]
    is_attention = name in ("sinks", "attention")
    said = "the attention of .* sees across" if is_attention else r"reach the next in .*, at test_packed_job\.py:\d+: "
    with pytest.raises(PlanError, match=said):
        compile_job(model, batch, micro_batches=2)
    begin, ids = int((batch["position_ids"][0, 1:] == 0).nonzero()[0]) + 1, batch["input_ids"].clone()
    ids[0, :begin] = (ids[0, :begin] + 1) % VOCABULARY
    first, second = (model(**given)["logits"][0, begin:] for given in (batch, {**batch, "input_ids": ids}))
    assert not torch.allclose(first, second, rtol=0, atol=1e-6)
    compile_job(model, one_document_each(batch), micro_batches=2).close()


def one_document_each(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**batch, "position_ids": torch.arange(SEQUENCE).expand(len(batch["input_ids"]), -1).contiguous()}


@pytest.mark.parametrize("example", ["rows", pytest.param("shapes", marks=pytest.mark.slow)])
def test_a_packed_batch_after_one_that_is_not_is_refused(example: str) -> None:
    """The rule that was found for the example holds for all batches."""
    packed = pack_steps()[0]
    alone = one_document_each(packed)
    shapes = {name: {"shape": [*value.shape], "dtype": "int64"} for name, value in alone.items()}
    with compile_job(Joined(JOINS["convolution"]), alone if example == "rows" else shapes, micro_batches=2) as job:
        job.step(alone)
        refused = r"batch\['position_ids'\] begins anew .* of one document reach the next in the model \(Joined\)"
        for call in (job.step, job.evaluate):
            with pytest.raises(BatchError, match=refused):
                call(packed)
        job.step(alone)


@pytest.mark.slow
def test_a_packed_batch_after_one_that_is_not_is_separated_by_its_positions() -> None:
    packed, model = pack_steps()[0], make("llama", "sdpa")
    eager = Eager(model, micro_batches=1, loss_of=loss_alone)
    with compile_job(model, one_document_each(packed), micro_batches=2) as job:
        assert_close({"loss": job.step(packed)}, {"loss": eager.step(STEPS[0])}, 1e-6)


@pytest.mark.parametrize("name", ["sinks", "attention"])
def test_attention_by_a_mask_of_documents_joins_none(name: str) -> None:
    joins = {
        "sinks": lambda x, p, m: sinks(x, document_mask(p), m.sink),
        "attention": lambda x, p, m: F.scaled_dot_product_attention(x, x, x, document_mask(p)),
    }
    compile_job(Joined(joins[name]), pack_steps()[0]).close()


def test_flash_attentions_numbers_are_neither_tensors_nor_part_of_the_flags() -> None:
    one, other = (flattened(lengths, **FLASH) for lengths in ((3, 5), (2, 2, 4)))
    model = without_cache(make("llama", "sdpa"))
    assert flatten(model, one)[1] == flatten(model, other)[1]
    assert flatten(model, one)[0].keys() == {"input_ids", "labels", "position_ids", "seq_idx"}
