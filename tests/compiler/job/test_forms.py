"""Batches with images of other sizes and numbers than the example's: one plan, and code of its own for each form."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import penstock
from penstock.compiler.job import forms
from penstock.errors import BatchError, PlanError
from penstock.runtime.processes.local import worker_environment

IMAGE, TOKENS = 3, 12
Batch = dict[str, Tensor]
OPTIONS: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.5, momentum=0.9)}


class Seeing(nn.Module):
    """Patches of one image see each other, in a loop over the images; tokens have places that Python counts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places, self.head = nn.Embedding(20, 8), nn.Embedding(16, 8), nn.Linear(8, 20)
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 8)

    def see(self, pixels: Tensor, grid: Tensor) -> Tensor:
        images = torch.split(self.inner(pixels), grid.prod(-1).tolist())
        return self.outer(torch.cat([image + image.mean(0, keepdim=True) for image in images]))

    def count(self, ids: Tensor) -> Tensor:
        counts = [[0, *accumulate(int(token != IMAGE) for token in row[:-1])] for row in ids.tolist()]
        return torch.tensor(counts).clamp(max=15)

    def forward(self, ids: Tensor, grid: Tensor, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        is_image = ids == IMAGE
        torch._check_tensor_all_with(ValueError, is_image.sum() == len(pixels), lambda: "images and tokens differ")
        h = self.embed(ids).masked_scatter(is_image[..., None], self.see(pixels, grid))
        logits = self.head((h + self.places(self.count(ids))).tanh())
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def batch_of(*rows: tuple[tuple[int, int], ...], seed: int = 0, tokens: int = TOKENS) -> Batch:
    """A batch with these images in each row, by height and width."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 20, (len(rows), tokens), generator=generator)
    for row, images in zip(ids, rows):
        row[1 : 1 + sum(height * width for height, width in images)] = IMAGE
    grid = torch.tensor([image for images in rows for image in images])
    pixels = torch.randn(int(grid.prod(-1).sum()), 6, generator=generator)
    labels = torch.randint(0, 20, ids.shape, generator=generator)
    labels[0, :5] = -100
    return {"ids": ids, "grid": grid, "pixels": pixels, "labels": labels}


def eager_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a batch, or the mean over all targets of a list of micro-batches."""
    if not isinstance(batch, list):
        return model(**batch)["loss"]
    counts = [(each["labels"] != -100).sum() for each in batch]
    return sum(model(**each)["loss"] * n for each, n in zip(batch, counts)) / sum(counts)


def job_of(
    example: Any, num_devices: int = 1, memory: str = "256MB", model: nn.Module | None = None, **options: Any
) -> penstock.Job:
    torch.manual_seed(0)
    hardware = penstock.Hardware.cpu(num_devices=num_devices, memory=memory, dram="1GB")
    given = {"strategy": "balanced" if num_devices == 1 else "gpipe", **OPTIONS, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return penstock.compile(model or Seeing(), hardware, example_inputs=example, **given)


def assert_trains_like_eager(job: penstock.Job, batches: list[Any]) -> None:
    """Each batch a dict, or a list of micro-batches."""
    twin = copy.deepcopy(job.model)
    optimizer = OPTIONS["optimizer"](twin.parameters())
    for batch in batches:
        loss = eager_loss(twin, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(job.step(batch), loss.detach(), rtol=1e-5, atol=1e-6, check_device=False)
    found, wanted = job.state_dict(), dict(twin.state_dict())
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, check_device=False)


SMALL, WIDE, HIGH = ((2, 2),), ((1, 6),), ((3, 2),)
LISTED = [
    [batch_of(WIDE, SMALL), batch_of(SMALL, (), seed=1)],
    [batch_of(((1, 2), (2, 2)), HIGH, seed=2), batch_of((), WIDE, seed=3)],
    [batch_of(SMALL, (), seed=4), batch_of(WIDE, SMALL, seed=5)],
]


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_batches_of_other_grids_one_after_another(num_devices: int) -> None:
    batches = [batch_of(*[images] * 4, seed=i) for i, images in enumerate((SMALL, WIDE, HIGH, WIDE, SMALL))]
    with job_of(batches[0], num_devices=num_devices, micro_batches=2) as job:
        assert_trains_like_eager(job, batches[: 3 if num_devices == 1 else None])


@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_micro_batches_of_other_images_in_one_step(num_devices: int) -> None:
    """Several images a row and rows without one; a later micro-batch has more patches than the example's largest."""
    with job_of(LISTED[0], num_devices=num_devices) as job:
        assert job.plan.micro_batches == 2
        assert_trains_like_eager(job, LISTED)
        job.sync()
        found = job.evaluate(LISTED[1], outputs=False).loss
        torch.testing.assert_close(found, eager_loss(job.model, LISTED[1]).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["data-parallel", "zero3-offload", "zero-bubble", "mobius"])
def test_lanes_shards_halves_of_backward_and_fetched_stages(strategy: str) -> None:
    with job_of(LISTED[0], num_devices=1 if strategy == "mobius" else 2, strategy=strategy) as job:
        assert_trains_like_eager(job, LISTED)


class Optional(Seeing):
    """Does without images, too."""

    def forward(self, ids: Tensor, labels: Tensor, **images: Tensor) -> dict[str, Tensor]:
        if images:
            return super().forward(ids, labels=labels, **images)
        logits = self.head((self.embed(ids) + self.places(self.count(ids))).tanh())
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


@pytest.mark.parametrize("is_empty", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_micro_batch_without_an_image(is_empty: bool) -> None:
    """It is refused, and what the error says trains as eager does without an image."""
    batch = [batch_of(SMALL, SMALL, seed=1), batch_of((), (), seed=2)]
    alone = {name: value for name, value in batch[1].items() if name not in ("grid", "pixels")}
    if is_empty:
        alone |= {"grid": torch.zeros(0, 2, dtype=torch.int64), "pixels": torch.zeros(0, 6)}
    with job_of([batch_of(SMALL, SMALL)] * 2, model=Optional()) as job:
        before = job.state_dict()
        with pytest.raises(BatchError, match=r"lacks grid, pixels; every micro-batch (.|\n)*labels that are all -100"):
            job.step([batch[0], alone])
        torch.testing.assert_close(job.state_dict(), before, rtol=0, atol=0)
        twin = copy.deepcopy(job.model)
        more = batch_of(SMALL, seed=3)
        more["labels"][:] = -100
        ids, labels = (torch.cat([batch[1][name], more[name]]) for name in ("ids", "labels"))
        loss = job.step([batch[0], {"labels": labels, "ids": ids, "pixels": more["pixels"], "grid": more["grid"]}])
        expected = eager_loss(twin, [batch[0], {name: batch[1][name] for name in ("ids", "labels")}])
        expected.backward()
        OPTIONS["optimizer"](twin.parameters()).step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(job.state_dict(), dict(twin.state_dict()), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_old_forms_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices keep code of a few forms, and the host no more: neither images, nor files, nor what it counts by."""
    monkeypatch.setattr(forms, "MOST_FORMS", 3)
    first = [batch_of(SMALL, SMALL)] * 2
    others = [batch_of(((1, 1 + i),), SMALL, seed=i) for i in range(5)]
    with job_of(first) as job:
        assert_trains_like_eager(job, [[each, first[0]] for each in (*others, others[0])])
        inputs: Any = job._inputs
        kept = inputs.forms.forms
        assert sorted(form.number for form in kept) == [1, 2, 3]
        assert {len(inputs._counters), len(inputs._picks)} <= {2, 3}
        assert len([*kept[-1].directory.parent.glob("form*")]) == 2
        assert all(form.prologue.example["pixels"].is_meta for form in kept[1:])


@pytest.mark.slow
def test_more_forms_in_a_step_than_devices_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "MOST_FORMS", 3)
    batch = [batch_of(((1, 2 + i),), SMALL, seed=i) for i in range(4)]
    with job_of([batch_of(SMALL, SMALL)] * 4) as job:
        with pytest.raises(BatchError, match=r"more than 3 forms(.|\n)*round the sizes"):
            job.step(batch)
        assert_trains_like_eager(job, [[*batch[:2], *batch[:2]], [batch_of(SMALL, SMALL, seed=9)] * 4])


@pytest.mark.slow
def test_rows_of_other_lengths() -> None:
    longer = [batch_of(SMALL, SMALL, seed=1, tokens=15), batch_of(WIDE, HIGH, seed=2, tokens=9)]
    with job_of([batch_of(SMALL, SMALL)] * 2) as job:
        assert_trains_like_eager(job, [longer, [batch_of(SMALL, SMALL, seed=3)] * 2])


class Paired(Seeing):
    """Takes images as a pair of tensors, in a dict, and a switch."""

    def forward(self, ids: Tensor, grid: Tensor, labels: Tensor, images: dict[str, Any], twice: bool) -> Any:
        first, second = images["pair"]
        return super().forward(ids, grid, first * 2 + second if twice else first, labels)


def pair_of(batch: Batch) -> dict[str, Any]:
    pixels = batch["pixels"]
    return {"images": {"pair": (pixels, pixels / 2)}, "twice": True} | {n: batch[n] for n in ("labels", "ids", "grid")}


@pytest.mark.parametrize("is_listed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_tensors_in_a_dict_and_a_switch(is_listed: bool) -> None:
    batches = [[*map(pair_of, batch)] for batch in LISTED]
    example: Any = [pair_of(batch_of(SMALL, SMALL))] * 2 if is_listed else pair_of(batch_of(*[SMALL] * 4))
    with job_of(example, model=Paired(), micro_batches=2) as job:
        assert_trains_like_eager(job, batches[:2])


class Axes(Seeing):
    """Makes places whose first dimension is no row's, as Qwen2-VL does."""

    def axes(self, ids: Tensor) -> Tensor:
        places = self.count(ids)
        return torch.stack([places, places // 2, places * 0])

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        places = self.places(self.axes(batch["ids"])).sum(0)
        found = super().forward(**batch)
        return {**found, "loss": found["loss"] + places.square().mean()}


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", ["auto", 2])
def test_places_whose_first_dimension_is_of_no_row(micro_batches: int | str) -> None:
    with job_of(batch_of(SMALL, SMALL), model=Axes(), micro_batches=micro_batches) as job:
        assert_trains_like_eager(job, [batch_of(WIDE, WIDE, seed=1), batch_of(SMALL, SMALL, seed=2)])


@pytest.mark.slow
def test_a_list_is_not_cut_anew() -> None:
    """Its micro-batches together have the shapes of the example's, and each has other ones."""
    uneven = [batch_of(HIGH, HIGH, seed=1), batch_of(((1, 2),), ((1, 2),), seed=2)]
    with job_of([batch_of(SMALL, SMALL)] * 2) as job:
        assert_trains_like_eager(job, [uneven, [batch_of(SMALL, SMALL, seed=3)] * 2])


def test_a_form_is_captured_once_and_told() -> None:
    with job_of([batch_of(SMALL, SMALL)] * 2) as job, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for seed in (1, 2):
            job.step([batch_of(SMALL, SMALL, seed=seed), batch_of(HIGH, SMALL, seed=seed)])
    (found,) = [str(each.message) for each in told]
    assert "pixels [10, 6], grid [[3, 2], [2, 2]]" in found and "of the 2 forms" in found


class Counting(Seeing):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, **batch: Tensor) -> dict[str, Any]:
        self.calls += batch["labels"].float().mean()
        return super().forward(**batch)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (Seeing, "other sizes, such as images, are captured when they first come"),
        (Counting, "with buffers that forward changes, all batches must"),
    ],
)
def test_compile_says_what_becomes_of_other_sizes(model: type[Seeing], told: str) -> None:
    example, hardware = batch_of(SMALL, SMALL), penstock.Hardware.cpu(1, memory="256MB")
    with pytest.warns(UserWarning, match=f"reads the values of grid, ids: .*{told}"):
        given = {**OPTIONS, "strategy": "balanced", "micro_batches": 1}
        job = penstock.compile(model(), hardware, example_inputs=example, **given)
    if model is Counting:
        with job, pytest.raises(BatchError, match="compiled for"):
            job.step(batch_of(WIDE, WIDE))


def _run_ranks(folder: Path, *arguments: str) -> None:
    script = Path(__file__).with_name("forms_of_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(
        [*command, str(folder), *arguments], env=worker_environment(1), capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("strategy", ["data-parallel", "gpipe"])
def test_each_rank_of_torchrun_has_micro_batches_of_its_own(strategy: str, tmp_path: Path) -> None:
    """A form that comes on one rank is captured on all. What one rank refuses, all do, and go on."""
    _run_ranks(tmp_path, strategy)
    torch.manual_seed(0)
    model = Seeing()
    optimizer, losses = OPTIONS["optimizer"](model.parameters()), []
    for batch in LISTED:
        loss = eager_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}.pt")
        torch.testing.assert_close(found["losses"], losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["weights"], dict(model.state_dict()), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["evaluated"], eager_loss(model, LISTED[1]).detach(), rtol=1e-5, atol=1e-6)
        assert "images and tokens differ" in found["refused"]


# For each call what the ranks hand over, each as one dict of its two micro-batches; beside it why rank 1's is refused.
PARTS: list[tuple[list[Any], str]] = [
    ([batch_of(*[WIDE] * 4, seed=1), batch_of(((1, 2),), ((1, 6),), SMALL, SMALL)], "Hand over a list of the 2"),
    ([batch_of(*[SMALL] * 4, seed=2), batch_of(*[HIGH] * 4, seed=3)], ""),
    ([batch_of(*[WIDE] * 4, seed=4), batch_of(*[HIGH] * 4, seed=5)], ""),
    ([batch_of(*[((3, 3),)] * 4, seed=6), None], "batch is None"),
    ([batch_of(*[SMALL] * 4, seed=7), batch_of(*[WIDE] * 4, seed=8)], ""),
]


@pytest.mark.slow
@pytest.mark.multi
def test_ranks_of_torchrun_have_parts_of_other_forms(tmp_path: Path) -> None:
    """Each rank hands over micro-batches of one form, others than the other rank. Of a call that one rank refuses
    nothing stays, and the next call has the same meaning on all."""
    torch.manual_seed(0)
    _run_ranks(tmp_path, "parts")
    model = Paired()
    optimizer, losses = OPTIONS["optimizer"](model.parameters()), []
    for parts, refused in PARTS:
        if not refused:
            loss = eager_loss(model, [pair_of({n: x.chunk(2)[i] for n, x in p.items()}) for p in parts for i in (0, 1)])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}.pt")
        torch.testing.assert_close(found["losses"], losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["weights"], dict(model.state_dict()), rtol=1e-5, atol=1e-6)
        told = [refused for _, refused in PARTS if refused]
        assert len(told) == len(found["refused"]) and all(map(str.__contains__, found["refused"], told))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.linear(self.norm(h)).tanh()


class Layered(Seeing):
    """Sees images through blocks of one class."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Sequential(Layer(), Layer(), Layer())  # type: ignore[assignment]


@pytest.mark.slow
def test_blocks_are_compiled_for_each_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.device.state.BACKEND", "aot_eager")
    torch._dynamo.reset()
    counters.clear()
    with job_of(LISTED[0], model=Layered(), compile_stages=True) as job:
        assert_trains_like_eager(job, LISTED[:2])
        inputs: Any = job._inputs
        found, num_forms = counters["aot_autograd"]["ok"], len(inputs.forms.forms)
        assert num_forms > 1 and found >= num_forms and found % num_forms == 0
        assert job.last is not None and not job.last.eager_blocks


@pytest.mark.slow
def test_devices_that_start_again_get_the_forms(tmp_path: Any) -> None:
    with job_of(LISTED[0]) as job:
        job.step(LISTED[0])
        job.save(tmp_path / "checkpoint")
        losses = [job.step(batch) for batch in LISTED[1:]]
    job.resume(tmp_path / "checkpoint")
    torch.testing.assert_close([job.step(batch) for batch in LISTED[1:]], losses, rtol=1e-6, atol=1e-6)
    job.close()


def test_images_that_do_not_match_their_tokens_are_refused_before_the_step() -> None:
    wrong = batch_of(HIGH, SMALL)
    wrong["ids"][0, 1] = 5
    with job_of([batch_of(SMALL, SMALL)] * 2) as job:
        before = job.state_dict()
        with pytest.raises(BatchError, match=r"grid \[\[3, 2\], \[2, 2\]\](.|\n)*images and tokens differ"):
            job.step([batch_of(SMALL, SMALL), wrong])
        torch.testing.assert_close(job.state_dict(), before, rtol=0, atol=0)
        assert_trains_like_eager(job, [LISTED[0]])


def test_a_batch_beyond_the_memory_is_refused_with_its_sizes() -> None:
    large = batch_of(((10, 15),), SMALL, tokens=156)
    with job_of([batch_of(SMALL, SMALL)] * 2, memory="100kB") as job:
        with pytest.raises(BatchError, match=r"pixels \[154, 6\](.|\n)*memory(.|\n)*smaller images"):
            job.step([large, large])
        assert_trains_like_eager(job, [LISTED[0]])


class Showing(Seeing):
    """Returns a tensor for each image."""

    def forward(self, **batch: Tensor) -> dict[str, Any]:
        images = torch.split(batch["pixels"] * 2, batch["grid"].prod(-1).tolist())
        return {**super().forward(**batch), "images": images}


@pytest.mark.slow
def test_outputs_that_the_example_has_not() -> None:
    with job_of(batch_of(SMALL), model=Showing(), micro_batches=1) as job:
        assert job.evaluate(batch_of(SMALL, seed=1))["images_0"].shape == (4, 6)
        batch = batch_of(((1, 2), (2, 2)))
        with pytest.raises(BatchError, match=r"returns images_1 for this batch(.|\n)*outputs=False"):
            job.evaluate(batch)
        found, loss = job.evaluate(batch, outputs=False).loss, job.model(**batch)["loss"]
        torch.testing.assert_close(found, loss.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_refused_form_changes_nothing() -> None:
    """Also where its values are the largest so far."""
    with job_of(batch_of(SMALL), model=Showing(), micro_batches=1) as job:
        assert_trains_like_eager(job, [batch_of(WIDE, seed=1)])
        with pytest.raises(BatchError, match="returns images_1"):
            job.evaluate(batch_of(((2, 2), (3, 2))))
        with pytest.raises(BatchError, match="batch is None"):
            job.step(None)
        job.sync()
        batch = batch_of(WIDE, seed=2)
        found, loss = job.evaluate(batch, outputs=False).loss, job.model(**batch)["loss"]
        torch.testing.assert_close(found, loss.detach(), rtol=1e-5, atol=1e-6)


def test_a_whole_batch_that_nobody_can_cut() -> None:
    words = r"'grid'\] has 5 entries(.|\n)*hand over a list of 2 micro-batches"
    with job_of(batch_of(*[SMALL] * 4), micro_batches=2) as job, pytest.raises(BatchError, match=words):
        job.step(batch_of(SMALL, SMALL, SMALL, ((1, 2), (2, 2))))


@pytest.mark.slow
def test_a_whole_batch_whose_micro_batches_have_other_forms() -> None:
    """Forward on all of it may do something else than on each."""
    with job_of(batch_of(*[WIDE] * 4), micro_batches=2) as job, pytest.raises(BatchError, match="Hand over a list"):
        job.step(batch_of(SMALL, ((2, 4),), WIDE, WIDE))


@pytest.mark.slow
def test_another_number_of_micro_batches_than_the_example_lists() -> None:
    with pytest.raises(PlanError, match="micro_batches=3, but example_inputs is a list of 2"):
        job_of(LISTED[0], micro_batches=3)
    with job_of(LISTED[0]) as job, pytest.raises(BatchError, match="list of 3 micro-batches, and 2 make a step"):
        job.step([*LISTED[0], LISTED[0][0]])
