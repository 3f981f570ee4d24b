"""Models that read values of their batch: a prologue makes inputs of these, and training equals eager PyTorch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.compiler.capture.trace import TraceOptions, record_steps
from penstock.compiler.check.check import check
from penstock.errors import BatchError, CaptureError, PlanError
from penstock.tests.shown_elsewhere import slow_but, slow_rows_but

IMAGE, ROWS, TOKENS, PATCHES = 3, 4, 8, 4
OPTIONS: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.5), "strategy": "balanced"}


class Places(nn.Module):
    """Tokens of images share a place: numbers that Python counts, as vision-language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 8)

    def count(self, ids: Tensor, types: Tensor) -> Tensor:
        found = torch.zeros_like(ids)
        for i, row in enumerate(types):
            place = 0
            for j, is_image in enumerate(row.tolist()):
                found[i, j] = place
                place += 0 if is_image else 1
        return found

    def forward(self, ids: Tensor, types: Tensor) -> Tensor:
        return self.table(self.count(ids, types))


class Eyes(nn.Module):
    """Patches of one image see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, pixels: Tensor, grid: Tensor) -> Tensor:
        images = torch.split(self.inner(pixels), grid.prod(-1).tolist())
        return self.outer(torch.cat([image + image.mean(0, keepdim=True) for image in images]))


class Seeing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places, self.eyes, self.head = nn.Embedding(20, 8), Places(), Eyes(), nn.Linear(8, 20)

    def forward(self, ids: Tensor, types: Tensor, grid: Tensor, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if labels.max() >= 20:
            raise ValueError("labels beyond the vocabulary")
        is_image = ids == IMAGE
        torch._check_tensor_all_with(ValueError, types.sum() == len(pixels), lambda: "images and tokens do not match")
        h = self.embed(ids).masked_scatter(is_image[..., None], self.eyes(pixels, grid))
        logits = self.head(h + self.places(ids, types))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def batch_of(seed: int, patches: int = PATCHES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randint, generator=generator)
    ids = draw(4, 20, (ROWS, TOKENS))
    for row in ids:
        first = int(draw(0, TOKENS - patches + 1, ()))
        row[first : first + patches] = IMAGE
    grid = torch.tensor([[2, patches // 2]] * ROWS)
    pixels = torch.randn(ROWS * patches, 6, generator=generator)
    labels = draw(0, 20, (ROWS, TOKENS))
    labels[0, :3] = -100
    return {"pixels": pixels, "grid": grid, "ids": ids, "types": (ids == IMAGE).long(), "labels": labels}


def job_of(
    model: nn.Module | None = None, batch: dict[str, Any] | None = None, num_devices: int = 1, **options: Any
) -> penstock.Job:
    torch.manual_seed(0)
    hardware = penstock.Hardware.cpu(num_devices=num_devices, memory="256MB", dram="1GB")
    given = {**OPTIONS, "example_inputs": batch or batch_of(0), **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return penstock.compile(model or Seeing(), hardware, **given)


def assert_trains_like_eager(job: penstock.Job, batches: list[dict[str, Tensor]]) -> None:
    """Losses and weights of some steps: additions are made in another order."""
    twin = copy.deepcopy(job.model)
    optimizer = OPTIONS["optimizer"](twin.parameters())
    for batch in batches:
        loss = twin(**copy.deepcopy(batch))
        loss = loss["loss"] if isinstance(loss, dict) else loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(job.step(batch), loss.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(job.state_dict(), dict(twin.state_dict()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("micro_batches", "num_devices"), slow_rows_but([(2, 1)], [(1, 1), (2, 1), (4, 2)]))
def test_batches_with_images_at_other_places_train_like_eager(micro_batches: int, num_devices: int) -> None:
    """Positions and masks differ from batch to batch; the first input has several entries for each row."""
    with job_of(num_devices=num_devices, micro_batches=micro_batches) as job:
        assert job.inputs == sorted(batch_of(0))
        assert_trains_like_eager(job, [batch_of(seed) for seed in (0, 1, 2)])
        job.sync()
        found, loss = job.evaluate(batch_of(3)).loss, job.model(**batch_of(3))["loss"]
        torch.testing.assert_close(found, loss.detach(), rtol=1e-6, atol=1e-6)


def test_auto_finds_the_number_of_micro_batches() -> None:
    with job_of(micro_batches="auto", search_s=1) as job:
        assert_trains_like_eager(job, [batch_of(5)])


@pytest.mark.slow
def test_a_check_of_the_job_compares_it_with_the_model_itself() -> None:
    job = job_of(Windowed(), micro_batches=2)
    report = check(job, copy.deepcopy(job.model), [batch_of(1), batch_of(2)])
    assert report.passed and report.skipped is None and {d.against for d in report.differences} == {
        "captured graph", "model itself"
    }  # fmt: skip


@pytest.fixture(scope="module")
def seeing() -> Iterator[penstock.Job]:
    """A job of two micro-batches, which no test trains."""
    with job_of(micro_batches=2) as job:
        yield job


@pytest.mark.slow
def test_the_program_reads_what_the_prologue_makes(seeing: penstock.Job) -> None:
    code = seeing.code()
    assert "self.places.table(prologue_0)" in code or "self.table(prologue_0)" in code
    assert "zeros" not in code and "types" not in code.split("def step")[0]
    assert ", [4, 4], dim=0)" in code  # the patches of each image


def test_a_list_of_numbers_is_read_in_one_call() -> None:
    batch = batch_of(0)
    options = TraceOptions(lent={name: batch[name] for name in ("ids", "types", "grid", "labels")})
    called = [
        getattr(node.target, "__name__", node.target) for node in record_steps(Seeing(), batch, options).recorder.steps
    ]
    assert called.count("unbind") == 1, called  # of `types` into rows, none of these or of `grid` into numbers


@pytest.mark.slow
def test_compile_says_what_is_read() -> None:
    with pytest.warns(UserWarning, match="reads the values of grid, .*types.*comes in as prologue_0"):
        torch.manual_seed(0)
        hardware = penstock.Hardware.cpu(memory="256MB", dram="1GB")
        penstock.compile(Seeing(), hardware, example_inputs=batch_of(0), micro_batches=2, **OPTIONS)


def test_images_that_do_not_match_their_tokens_fail_the_models_own_check(seeing: penstock.Job) -> None:
    other = batch_of(1)
    other["types"][0] = 1
    with pytest.raises(BatchError, match="images and tokens do not match"):
        seeing.step(other)


def test_other_errors_of_a_batch_come_first(seeing: penstock.Job) -> None:
    with pytest.raises(BatchError, match="lacks pixels"):
        seeing.step({name: value for name, value in batch_of(0).items() if name != "pixels"})


def test_files_cannot_hold_a_prologue(seeing: penstock.Job, tmp_path: Any) -> None:
    seeing.write(tmp_path)
    with pytest.raises(PlanError, match=r"the model reads grid, types of each batch.*compile again"):
        penstock.load(tmp_path, seeing.model)


def test_an_example_without_values_is_refused_with_the_line() -> None:
    example = {name: {"shape": list(t.shape), "dtype": str(t.dtype)[6:]} for name, t in batch_of(0).items()}
    hardware = penstock.Hardware.cpu(memory="256MB", dram="1GB")
    with pytest.raises(CaptureError, match=r"test_prologue\.py:.*grid\.prod"):
        penstock.compile(Seeing(), hardware, example_inputs=example, micro_batches=2, **OPTIONS)


class Selecting(nn.Module):
    """Drops what is zero, and writes to the places of a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        h = self.inner(x).clone()
        h[kept] = h[kept] + self.outer(x[kept])
        real = x.abs().sum(-1) != 0
        real[0] |= ~real.any()
        return h.square().mean() + self.outer(x[real].contiguous()).square().mean()


@pytest.mark.slow
def test_elements_that_the_batch_chooses() -> None:
    kept = torch.tensor([[1, 0, 1, 0], [0, 0, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)
    batches = [{"x": torch.randn(4, 6), "kept": each} for each in kept]
    with job_of(Selecting(), batches[0], micro_batches=1) as job:
        assert_trains_like_eager(job, [*batches, {**batches[0], "kept": torch.ones(4, dtype=torch.bool)}])


class Joining(nn.Module):
    """Patches to which a token points go to it; those that are left come after the tokens, as in Udop."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.eyes, self.head = nn.Embedding(20, 8), nn.Linear(6, 8), nn.Linear(8, 1)

    def join(self, h: Tensor, patches: Tensor, places: Tensor) -> Tensor:
        rows = torch.arange(len(places))[:, None].expand_as(places)
        pairs = torch.stack([rows, places], -1).flatten(0, 1)
        is_left = torch.full_like(patches[:, :, 0], True).bool()
        numbers, columns = zip(*pairs)
        is_left[numbers, columns] = False
        left = [own[mask] for own, mask in zip(patches, is_left)]
        return torch.stack([torch.cat(row) for row in zip(h + patches[rows, places], left)])

    def forward(self, ids: Tensor, places: Tensor, pixels: Tensor) -> Tensor:
        joined = self.join(self.embed(ids), self.eyes(pixels), places)
        order = torch.arange(1.0, joined.shape[1] + 1)[:, None]
        return self.head((joined * order).tanh()).square().mean()


@pytest.mark.slow
def test_a_mask_of_the_form_of_activations_is_written_by_the_batch() -> None:
    """Sequences of tensors are its places."""

    def batch(shift: int) -> dict[str, Tensor]:
        places = (torch.tensor([[0, 2], [1, 0]]) + shift) % 5
        return {"ids": torch.randint(20, (2, 2)), "places": places, "pixels": torch.randn(2, 5, 6)}

    with job_of(Joining(), batch(0), micro_batches=1) as job:
        assert_trains_like_eager(job, [batch(shift) for shift in range(3)])


class Drawing(nn.Module):
    """Draws all patches that are there, in some order, as ViLT does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def choose(self, h: Tensor, real: Tensor) -> Tensor:
        places = real.nonzero()
        drawn = torch.multinomial(torch.ones(len(places)), real.sum())
        chosen = torch.cat([places[drawn], places[:1]])
        return h[chosen[:, 0], chosen[:, 1]]

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        return self.choose(self.inner(x).tanh(), real).square().mean()


def test_a_draw_among_what_the_batch_chooses() -> None:
    real = torch.tensor([[1, 0, 1, 1], [0, 0, 1, 1]], dtype=torch.bool)
    batches = [{"x": torch.randn(2, 4, 6), "real": each} for each in (real, real.flip(1))]
    with job_of(Drawing(), batches[0], micro_batches=1) as job:
        assert_trains_like_eager(job, batches)


class Picking(nn.Module):
    """Fills a table with places, of long rows those that activations choose, as the indexer of Qwen4Exp does."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 1)

    def forward(self, ids: Tensor, seen: Tensor) -> Tensor:
        h = self.table(ids)
        picked = torch.full_like(ids, ids.shape[1])
        for i in range(len(ids)):
            places = torch.nonzero(seen[i]).flatten()
            if len(places) > 4:
                places = places[h[i, places].sum(-1).topk(3).indices]
            picked[i, : len(places)] = places
        kept = torch.zeros(ids.shape[0], ids.shape[1] + 1).scatter(1, picked, 1)[:, :-1]
        return (self.head(h) * kept[..., None]).square().mean()


def test_a_tensor_that_activations_write_to_after_the_batch() -> None:
    batches = [{"ids": batch_of(seed)["ids"], "seen": torch.zeros(ROWS, TOKENS).long()} for seed in (0, 1)]
    for first, batch in enumerate(batches):
        for i in range(ROWS):  # short, long, short, long
            batch["seen"][i, first : first + (6 if i % 2 else 3)] = 1
    with job_of(Picking(), batches[0], micro_batches=1) as job:
        assert_trains_like_eager(job, batches)


class Shifting(nn.Module):
    """Forward writes to its ids in place, then counts their padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def shift(self, ids: Tensor) -> Tensor:
        ids.masked_fill_(ids == -100, 1)
        found = ids.clone()
        found[:, 1:] = ids[:, :-1]
        return found

    def padding(self, ids: Tensor) -> Tensor | None:
        mask = ids == 1
        return mask if mask.any() else None

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        shifted = self.shift(ids)
        h, padding = self.table(shifted) + self.table(ids), self.padding(shifted)
        h = h if padding is None else h.masked_fill(padding[..., None], 0)
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def test_an_input_that_is_changed_in_place_before_it_is_read() -> None:
    batches = [{name: batch_of(seed)[name] for name in ("ids", "labels")} for seed in (0, 1)]
    for batch in batches:
        batch["ids"][:, -3:] = -100
    with job_of(Shifting(), copy.deepcopy(batches[0]), micro_batches=2) as job:
        assert_trains_like_eager(job, batches)


def _count_in_parts(lengths: Tensor) -> Tensor:
    first, second = (lengths + 0).chunk(2)
    return torch.maximum(first.unsqueeze_(1).max(), second.unsqueeze_(1).max())


COUNTS: dict[str, Any] = {
    "read": lambda lengths: lengths.unsqueeze_(0).max(),
    "back": lambda lengths: lengths.unsqueeze_(0).squeeze_(0).max(),
    "written": lambda lengths: lengths.unsqueeze_(0).add_(1).t_().max() - 1,
    "in parts": _count_in_parts,
}


class Counting(nn.Module):
    """Lengths that become views of themselves before forward reads them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(6, 6), kind

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        most = int(COUNTS[self.kind](lengths.clone()))
        return self.linear(x)[:, :most].square().mean()


@pytest.mark.parametrize("kind", COUNTS)
def test_views_in_place_of_what_is_read(kind: str) -> None:
    torch.manual_seed(0)
    model = Counting(kind)
    batches = [{"x": torch.randn(4, 6), "lengths": torch.tensor([most, 2, 1, most])} for most in (3, 5, 4)]
    options: dict[str, Any] = {"micro_batches": 1, "strategy": "balanced", "optimizer": partial(torch.optim.SGD, lr=0)}
    expected = [model(**batch).detach() for batch in batches]
    with penstock.compile(model, penstock.Hardware.cpu(1), example_inputs=batches[0], **options) as job:
        found = [job.step(batch) for batch in batches]
    torch.testing.assert_close(torch.stack(found), torch.stack(expected))


class Config:
    """As transformers' configurations: models keep a cache of keys unless it says no."""

    def __init__(self) -> None:
        self.use_cache = True

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


class Caching(Seeing):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        found = super().forward(**batch)
        return {**found, "cache": torch.zeros(1, 2)} if self.config.use_cache else found


@pytest.mark.slow
@pytest.mark.parametrize("check", [True, False])
def test_caches_are_off_whenever_forward_runs(check: bool) -> None:
    """The comparison at compile runs forward with caches off, and may be the first to need a recording."""
    model = Caching()
    with job_of(model, micro_batches=4, check=check) as job:
        assert_trains_like_eager(job, [batch_of(5)])
    assert model.config.use_cache is True


class Windowed(Seeing):
    """Makes something of the sizes of images that is the same whatever the rows are."""

    def window(self, grid: Tensor) -> tuple[Tensor, Tensor]:
        return torch.arange(2) * grid[0].tolist()[0], torch.empty(0)

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        (window, nothing), found = self.window(batch["grid"]), super().forward(**batch)
        table = self.places.table(window).flatten()
        return {"loss": found["loss"] * torch.cat([table, nothing]).square().mean()}


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_what_is_the_same_for_all_rows_is_a_constant(micro_batches: int) -> None:
    with job_of(Windowed(), micro_batches=micro_batches) as job:
        assert len(job.folder.constants) == 2
        assert_trains_like_eager(job, [batch_of(5), {**batch_of(5), "grid": torch.tensor([[1, 4]] * ROWS)}])


class Deep(Seeing):
    """Adds to the tokens of images, at places that a mask of the batch has, as Qwen3-VL does."""

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        found = super().forward(**batch)
        h, is_image = self.embed(batch["ids"]), batch["ids"] == IMAGE
        if (batch["types"].sum(-1) != PATCHES).any():
            raise ValueError
        h[is_image, :] = h[is_image, :] * self.eyes(batch["pixels"], batch["grid"])
        return {"loss": found["loss"] + h[batch["types"].bool()].square().sum() / h.numel()}


class Shared(Seeing):
    """Makes positions smaller by the largest of all rows."""

    def scale(self, grid: Tensor) -> Tensor:
        return torch.tensor([height for height, _ in grid.tolist()]) / max(height for height, _ in grid.tolist())

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        rows = self.embed(batch["ids"]).square().mean((1, 2))
        return {"loss": super().forward(**batch)["loss"] + (rows * self.scale(batch["grid"])).mean()}


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_places_are_those_in_a_micro_batch(micro_batches: int) -> None:
    with job_of(Deep(), micro_batches=micro_batches) as job:
        assert_trains_like_eager(job, [batch_of(0), batch_of(1)])


class Chosen(Seeing):
    """Takes the loss of the tokens that have a label, as Granite Speech does."""

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        kept = batch["labels"] != -100
        logits, labels = super().forward(**batch)["logits"][kept], batch["labels"][kept]
        return {"loss": F.cross_entropy(logits, labels)}


def test_targets_that_a_prologue_makes_are_counted() -> None:
    with job_of(Chosen(), micro_batches=1) as job:
        assert_trains_like_eager(job, [batch_of(0), batch_of(1)])


class Ordered(Seeing):
    """Puts the patches of each image in another order, by places that Python counts over all images, as Qwen2.5-VL
    does; `table`: they are also looked up, by which micro-batches would differ."""

    table = False

    def order(self, grid: Tensor) -> Tensor:
        found, first = [], 0
        for size in grid.prod(-1).tolist():
            found.append(torch.arange(size).flip(0) + first)
            first += size
        return torch.cat(found)

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        order = self.order(batch["grid"])
        h = self.eyes.inner(batch["pixels"])[order, :].tanh() * torch.arange(len(order)).remainder(PATCHES)[:, None]
        loss = super().forward(**batch)["loss"] + h[torch.argsort(order)].square().mean()
        return {"loss": loss + self.embed.weight[order].mean() if self.table else loss}


@pytest.mark.parametrize("micro_batches", slow_but([2], [1, 2, 4]))
def test_places_that_are_counted_over_all_rows(micro_batches: int) -> None:
    with job_of(Ordered(), micro_batches=micro_batches) as job:
        assert_trains_like_eager(job, [batch_of(0), batch_of(1)])


def test_a_table_of_places_that_are_counted_over_all_rows_is_refused() -> None:
    model = Ordered()
    model.table = True
    with pytest.raises(CaptureError, match="rows of a batch meet"):
        job_of(model, micro_batches=2)


class Placed(nn.Module):
    """Reads the places of a token. `use`: what it does with them."""

    def __init__(self, use: str):
        super().__init__()
        self.use, self.embed, self.rows = use, nn.Embedding(20, 8), nn.Embedding(40, 8)

    def forward(self, ids: Tensor) -> Tensor:
        places, h = (ids == 0).flatten().nonzero()[:, 0], self.embed(ids).tanh()
        wide = torch.cat([h, h.sin()], 1).flatten(0, 1)
        h = h.flatten(0, 1)[places] if self.use != "selected" else h.flatten(0, 1).index_select(0, places)
        uses = {"places of others": lambda: wide[places], "table": lambda: self.rows(places)}
        uses["numbers"] = lambda: places[:, None] * self.rows.weight[0]
        return (h * uses.get(self.use, lambda: 1)()).square().mean()


def placed_job(use: str) -> penstock.Job:
    ids = torch.randint(1, 20, (4, 6), generator=torch.Generator().manual_seed(0))
    ids[[0, 1, 2, 3], [2, 0, 5, 3]] = 0
    hardware = penstock.Hardware.cpu(1, memory="64MB")
    return penstock.compile(
        Placed(use), hardware, example_inputs={"ids": ids}, optimizer=torch.optim.SGD, strategy="balanced",
        micro_batches=2,
    )  # fmt: skip


@pytest.mark.parametrize("use", ["places of others", "table", "numbers"])
def test_places_that_are_more_than_places_in_rows_of_one_size_are_refused(use: str) -> None:
    with pytest.raises(CaptureError, match="rows of a batch meet"):
        placed_job(use)


@pytest.mark.parametrize("use", ["alone", "selected"])
def test_places_in_rows_of_one_size(use: str) -> None:
    placed_job(use).close()


UNEVEN = torch.tensor([[2, 2], [2, 2], [1, 4], [1, 4]])  # the halves have other largest heights


def test_rows_that_meet_in_a_prologue_are_no_micro_batches() -> None:
    batch = {**batch_of(0), "grid": UNEVEN}
    words = r"test_prologue\.py:.*max\(height(.|\n)*rows of a batch meet(.|\n)*micro_batches=1"
    with pytest.raises(CaptureError, match=words):
        job_of(Shared(), batch, micro_batches=2)
    with job_of(Shared(), batch, micro_batches=1) as job:
        assert_trains_like_eager(job, [batch])
    options, hardware = {**OPTIONS, "example_inputs": batch, "micro_batches": "auto"}, penstock.Hardware.cpu(1)
    with pytest.warns(UserWarning, match=r'"auto" means one micro-batch: .*max\(height'):
        assert penstock.compile(Shared(), hardware, **options).plan.micro_batches == 1


def test_rows_that_meet_in_a_later_batch_alone_are_refused_with_it() -> None:
    with job_of(Shared(), micro_batches=2) as job:
        job.step(batch_of(1))
        with pytest.raises(BatchError, match="rows of this batch meet in what forward makes of grid"):
            job.step({**batch_of(1), "grid": UNEVEN})
