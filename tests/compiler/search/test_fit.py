"""Does it fit: every memory is checked before anything starts; what is missing is said in bytes."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.compiler.capture.trace import trace
from penstock.compiler.pipeline import parse_pipeline, run_passes
from penstock.compiler.report.explain import _connections
from penstock.compiler.search.candidate import Candidate
from penstock.compiler.search.compiled import CandidateCompiler
from penstock.compiler.search.fit import check_fit, check_states_fit
from penstock.ir.errors import DoesNotFit
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import gpu_connections, profile_memory
from penstock.passes.draft import Draft, Options
from penstock.tests.zoo import zoo


@pytest.fixture(scope="module")
def swapped() -> Draft:
    """A whole compilation on two devices whose weights live in DRAM."""
    model, batch = zoo()["gpt2"](dropout=0.0)
    draft = Draft(trace(model, batch), Hardware.cpu(num_devices=2, memory="220kB"), Options(micro_batches=4))
    run_passes(draft, parse_pipeline("balanced", num_devices=2))
    return draft


def on(draft: Draft, **figures: Any) -> Draft:
    return Draft(**{**vars(draft), "machine": draft.machine.with_(**figures)})


def test_to_the_byte(swapped: Draft) -> None:
    """With exactly the peaks it fits; with a byte less it does not, and a byte is what is missing."""
    peaks = [profile_memory(program).peak_bytes for program in swapped.programs]
    device = max(peak["device"] for peak in peaks)
    dram = sum(peak["dram"] for peak in peaks)
    assert dram > 0
    check_fit(on(swapped, memory=device, dram=dram, dram_usable_fraction=1.0))
    with pytest.raises(DoesNotFit, match=r"cpu[01] has .* missing 1\.00 B at `.*`.*4 micro-batches") as caught:
        check_fit(on(swapped, memory=device - 1))
    assert caught.value.missing_bytes == 1 and caught.value.memory in ("cpu0", "cpu1")
    with pytest.raises(DoesNotFit, match=r"dram0 .* missing 1\.00 B: .*states .*fewer states") as caught:
        check_fit(on(swapped, memory=device, dram=dram - 1, dram_usable_fraction=1.0))
    assert caught.value.missing_bytes == 1 and caught.value.memory == "dram0"


def test_a_plan_leaves_room_for_its_communicators(swapped: Draft) -> None:
    """Over NVLink they take more than is stated for messages. With room for the plan, or for them, the plan becomes
    another, which fits beside them."""

    def compiled_for(memory_bytes: int) -> tuple[Draft, list[int]]:
        device = {**gpu, "memory_bytes": memory_bytes, "usable_fraction": 1.0, "reserve": {"messages_bytes": 1 << 20}}
        hardware = Hardware.model_validate({**machine, "devices": [{**device, "name": name} for name in ("a", "b")]})
        compiler = CandidateCompiler(swapped.graph, hardware, swapped.options)
        draft = compiler.finish(compiler.place(Candidate.parse("1f1b", 2))).draft
        return draft, [profile_memory(program).peak_bytes["device"] for program in draft.programs]

    machine = Hardware.from_any("a100-80gbx2").model_dump()
    gpu = machine["devices"][0]
    roomy, peaks = compiled_for(1 << 34)
    (taken_bytes,) = {each.num_bytes for each in gpu_connections(roomy.programs, roomy.machine).values()}
    assert [*_connections(roomy.programs, roomy.machine)] == [
        "  communicators: 2 for messages and 1 for groups, 396 MiB at rest, 4 connections, buffers up to 576 MiB (not "
        "measured: the most by NCCL's source); 972 MiB of the GPU is reserved, on a, b"
    ]
    tight, tight_peaks = compiled_for(taken_bytes + max(peaks) - 1)
    assert max(tight_peaks) < max(peaks)
    for device in tight.machine.devices:
        assert device.reserve is not None and device.reserve.messages_bytes == taken_bytes == 972 << 20
        assert device.budget_bytes == max(peaks) - 1
    assert tight.lane_hardware is tight.machine


def test_what_lasts_between_steps_is_checked_before_tracing() -> None:
    """Weights and states beyond all memories together: no plan could help, so nothing is traced."""
    with torch.device("meta"):
        model = nn.Linear(1 << 16, 1 << 16)  # 16 GiB of weights, 32 GiB of AdamW's states
    hardware = Hardware.cpu(num_devices=2, memory="1GB", dram="40GB")
    states = partial(check_states_fit, model, hardware)
    with pytest.raises(DoesNotFit, match=r"weights 16\.0 GiB, optimizer states 32\.0 GiB.*missing") as caught:
        states(Options(state_bytes_per_param=8))
    need = 12 * sum(p.numel() for p in model.parameters())
    assert caught.value.missing_bytes == need - hardware.dram_budget_bytes(0) - 2 * hardware.devices[0].budget_bytes
    states(Options(state_bytes_per_param=0))  # plain SGD
    with pytest.raises(DoesNotFit, match="masters"):
        states(Options(state_bytes_per_param=4, precision="bf16"))
    model.requires_grad_(False)
    states(Options(state_bytes_per_param=8))  # frozen weights have no states


@pytest.mark.slow
def test_an_enormous_model_is_refused_within_seconds_with_what_would_do() -> None:
    """GPT-3's shape, cut to a few layers, on a machine with too little DRAM: the advice is a plan that was made."""
    import transformers

    config = transformers.GPT2Config(n_layer=3, n_embd=12288, n_head=96, n_positions=2048)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    tokens = {"shape": [4, 2048], "dtype": "int64"}
    batch = {"input_ids": tokens, "attention_mask": tokens, "labels": tokens}
    hardware = Hardware.preset("mobius-topo2+2", dram="40GB")
    options: dict[str, Any] = {"example_inputs": batch, "precision": "fp16"}
    with pytest.raises(DoesNotFit, match=r"missing .* GiB.*Tried, and fits: .*dram=") as caught:
        penstock.compile(model, hardware, **options)
    assert set(caught.value.nearest) == {"dram"}
    figure = re.search(r'dram="([\d.]+)GB"', str(caught.value))
    assert figure and 80 < float(figure[1]) < 200  # 5.4e9 parameters, 14 to 18 bytes each, less what devices hold
    assert penstock.compile(model, hardware.with_(**caught.value.nearest), **options).plan.predicted is not None
