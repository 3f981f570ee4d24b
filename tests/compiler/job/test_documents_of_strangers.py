"""Whatever a stranger has altered in a checkpoint, a job's folder, a plan or a machine: an error of ours says so, no
code in it runs, and nothing outside its folder is touched."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import penstock
from penstock.compiler.job.job import Job
from penstock.ir.errors import PenstockError, WorkerError
from penstock.runtime.state.weights import open_directory
from penstock.tests.mutated_documents import CANARY, change_values, mutate, nasty_values

FEW, MANY = 12, 290  # changes per kind of document: MANY for seven kinds are some 2,000
BATCH = {"x": torch.linspace(-1, 1, 32).reshape(8, 4)}


class SmallNet(nn.Module):
    """Has buffers, parameters of several dimensions and of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b, self.c = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.n(torch.relu(self.a(x))))).square().mean()


def sign(document: Any) -> str:
    """A manifest whose digest agrees, whatever stands in it."""
    if isinstance(document, dict):
        rest = {key: value for key, value in document.items() if key != "sha256"}
        document = {**rest, "sha256": hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}
    return json.dumps(document)


class Place:
    """A trained job, and its documents to be altered: `c` a checkpoint, `f` a folder, `w` weights."""

    def __init__(self, root: Path):
        self.root, self.canary = root, root / CANARY
        self.model = SmallNet()
        hardware = penstock.Hardware.cpu(num_devices=1, memory="64MB", dram="1GB")
        schedule = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=10)
        self.job = penstock.compile(
            self.model, hardware, example_inputs=BATCH, lr_scheduler=schedule, micro_batches=2, strategy="balanced"
        )
        self.job.step(BATCH)
        self.job.save(root / "good" / "c")
        self.job.write(root / "good" / "f")
        _write_shards(self.job.save_pretrained(root / "good" / "w"))
        self.before = self.listing()

    def listing(self) -> list[str]:
        return sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*") if "try" not in path.parts)

    def altered(self, name: str, number: int) -> Path:
        """A copy of everything, with one file of the named kind altered."""
        draw, target = random.Random(f"{name}/{number}"), self.root / "try"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.root / "good", target)
        values = nasty_values(self.canary)
        if name == "manifest":
            mutate(target / "c" / "manifest.json", draw, values, sign)
        elif name == "shard":
            mutate(draw.choice(sorted((target / "c").glob("*.safetensors"))), draw, values, None)
        elif name == "weights":
            file = draw.choice(sorted((target / "w").iterdir()))
            mutate(file, draw, values, json.dumps if file.suffix == ".json" else None)
        elif name == "hardware.yaml":
            path = target / "f" / name
            document = change_values(yaml.safe_load(path.read_text()), draw, values)
            path.write_bytes(json.dumps(document).encode("utf-8", "surrogatepass"))  # JSON is YAML
            if draw.random() < 0.3:
                mutate(path, draw, values, None)
        else:
            mutate(target / "f" / name, draw, values, json.dumps)
        return target


def _write_shards(directory: Path) -> None:
    """Divide the weights among two files and an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    files = {"a.safetensors": sorted(tensors)[:3], "b.safetensors": sorted(tensors)[3:]}
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, directory / file)
    index = {"metadata": {}, "weight_map": {name: file for file, names in files.items() for name in names}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    found = Place(tmp_path_factory.mktemp("strangers"))
    yield found
    found.job.close()


def resume(place: Place, target: Path) -> None:
    place.job.resume(target / "c")
    place.job.step(BATCH)
    place.job.save(target / "c2")


def read_weights(place: Place, target: Path) -> None:
    source = open_directory(target / "w", place.model)
    for name in place.model.state_dict():
        source.read(name)


def load(place: Place, target: Path) -> None:
    with penstock.load(target / "f", place.model) as job:
        job.explain(full=True)
        job.simulate()
        job.step(BATCH)
        job.save(target / "c2")


def load_for_another_machine(place: Place, target: Path) -> None:
    """An altered machine need not be this one, so that nothing runs."""
    job: Job = penstock.load(target / "f", place.model)
    job.explain(full=True)
    job.simulate()


USES: dict[str, Callable[[Place, Path], None]] = {
    "manifest": resume, "shard": resume, "weights": read_weights, "settings.json": load, "interface.json": load,
    "plan.json": load, "hardware.yaml": load_for_another_machine,
}  # fmt: skip


def try_changes(place: Place, name: str, numbers: range) -> Counter[str]:
    """The outcome of each change: "accepted", or the type of the error, all of them ours."""
    found: Counter[str] = Counter()
    for number in numbers:
        target = place.altered(name, number)
        try:
            USES[name](place, target)
            found["accepted"] += 1
        except WorkerError as error:  # nobody expected it
            pytest.fail(f"{name}, change {number}: {error}")
        except PenstockError as error:
            found[type(error).__name__] += 1
        assert not place.canary.exists(), f"{name}, change {number}: code has run"
        assert place.listing() == place.before, f"{name}, change {number}: something was written elsewhere"
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", USES)
def test_an_altered_document_is_refused_or_harmless(place: Place, name: str) -> None:
    found = try_changes(place, name, range(FEW))
    assert found.total() == FEW and found["accepted"] < FEW  # most changes matter
    place.job.resume(place.root / "good" / "c")
    place.job.step(BATCH)  # a refused checkpoint does not end the job


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", USES)
def test_many_altered_documents(place: Place, name: str) -> None:
    found = try_changes(place, name, range(FEW, FEW + MANY))
    print(f"{name}: {dict(found)}")


@pytest.mark.parametrize("position", [-1, 625, 10**9])
def test_a_position_beyond_a_generators_words_is_refused(place: Place, position: int) -> None:
    target = place.root / "try"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(place.root / "good", target)
    path = target / "c" / "manifest.json"
    document = json.loads(path.read_text())
    document["rng"]["numpy"]["items"][2] = position
    path.write_text(sign(document))
    with pytest.raises(penstock.errors.CheckpointError, match="generator 'numpy'"):
        place.job.resume(target / "c")
