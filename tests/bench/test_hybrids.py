"""Hybrids of attention and state along the sequence train as eager PyTorch does, or are refused by name."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")

import penstock
from penstock.bench import hybrids
from penstock.bench.hybrids import FAMILIES, STEPS, largest, model_class, packed_outcome, token_batch
from penstock.bench.model_zoo.compare import SGD, TOLERANCE, build, differences, train, train_plan
from penstock.compiler.strategies import PIPELINE
from penstock.errors import PassError

TOKENS = 8
REFUSED = {"Qwen4Exp"}  # its indexer makes tensors by values that it reads, of other shapes in each micro-batch
TEAM = (
    "split-context{team=2}, coarsen, mesh{team=2}, partition-balanced, map-round-robin, schedule-1f1b, insert-remat, "
    "insert-fetch, insert-optimizer"
)


def test_padding_on_either_side_is_the_same_text() -> None:
    left, right = (token_batch(TOKENS, side) for side in ("left", "right"))
    texts, targets = ([], []), []
    for batch, found in zip((left, right), texts):
        mask = batch["attention_mask"].bool()
        found += [ids[shown].tolist() for ids, shown in zip(batch["input_ids"], mask)]
        targets.append(batch["labels"][:, 1:][batch["labels"][:, 1:] != -100].tolist())
    assert texts[0] == texts[1] and targets[0] == targets[1]
    assert left["attention_mask"][1].tolist() == right["attention_mask"][1].flip(0).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind", "side"),
    [("Lfm2", "lora", "left"), ("FalconMamba", "full", "right")],
)
def test_a_hybrid_trains_as_eager_does(family: str, kind: str, side: str) -> None:
    model = build(model_class(family))
    model = hybrids.add_adapters(model) if kind == "lora" else model
    batch = token_batch(TOKENS, side)
    wanted = train(copy.deepcopy(model), batch, STEPS)
    planned = train_plan(copy.deepcopy(model), batch, 2, 1, STEPS)
    assert largest(differences(model, wanted, planned)) <= TOLERANCE


def test_documents_whose_state_would_go_on_are_refused_with_their_layer() -> None:
    found = packed_outcome(build(model_class("Lfm2")), TOKENS)
    assert found.startswith("refused: ") and "(Lfm2ShortConv), at modeling_lfm2.py:" in found


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_as_eager_does(family: str) -> None:
    row = hybrids.compare(family, 16, num_cases=2)
    assert row["outcome"] == ("refused" if family in REFUSED else "equal"), row
    assert family in REFUSED or row["packed"].startswith("refused: "), row


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Lfm2", "Mamba2", "Qwen3Next", "Rwkv", "MiniMax"])
def test_tiles_end_where_a_state_goes_on_and_teams_are_refused(family: str) -> None:
    model = build(model_class(family))
    batch = token_batch(16, "none")
    with pytest.raises(PassError, match="lets tokens meet"):
        compile_hybrid(copy.deepcopy(model), batch, TEAM, 2)
    wanted, trained = train(copy.deepcopy(model), batch, 2), copy.deepcopy(model)
    with compile_hybrid(trained, batch, f"tile-sequence{{tokens=5}}, {PIPELINE}", 1) as job:
        assert job.plan.decisions.tiles
        losses = [float(job.step(batch)) for _ in range(2)]
        job.sync()
    planned = {"losses": losses, "state": trained.state_dict()}
    assert largest(differences(model, wanted, planned)) <= TOLERANCE


def compile_hybrid(model: torch.nn.Module, batch: hybrids.Batch, strategy: str, devices: int) -> penstock.Job:
    hardware = penstock.Hardware.cpu(num_devices=devices, memory="3GB", dram="6GB")
    return penstock.compile(model, hardware, example_inputs=batch, optimizer=SGD, strategy=strategy, micro_batches=2)
