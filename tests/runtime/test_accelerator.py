"""Hardware queues and the GPU of a rank, by what torch and the environment say."""

from __future__ import annotations

import os

import pytest
import torch

from penstock.errors import HardwareError
from penstock.runtime import accelerator
from penstock.runtime.processes.local import worker_environment


@pytest.fixture(autouse=True)
def no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(accelerator.QUEUES, "")  # so that what a test leaves in the environment is taken back
    monkeypatch.delenv(accelerator.QUEUES)
    monkeypatch.delenv(accelerator.VISIBLE, raising=False)


def used(monkeypatch: pytest.MonkeyPatch, is_used: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_used)


def test_an_unused_gpu_gets_a_queue_for_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    used(monkeypatch, False)
    accelerator.take_queues()
    assert os.environ[accelerator.QUEUES] == "32"
    used(monkeypatch, True)
    accelerator.take_queues()  # a second job of the process


def test_a_gpu_in_use_without_queues_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    used(monkeypatch, True)
    with pytest.raises(HardwareError, match=r"not set, and this process has used its GPU.*CONNECTIONS=32 in its env"):
        accelerator.take_queues()
    assert accelerator.QUEUES not in os.environ


@pytest.mark.parametrize("is_used", [False, True])
def test_another_number_of_queues_is_refused(is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    used(monkeypatch, is_used)
    monkeypatch.setenv(accelerator.QUEUES, "1")
    with pytest.raises(HardwareError, match="CUDA_DEVICE_MAX_CONNECTIONS: it is 1;"):
        accelerator.take_queues()


def test_workers_have_queues_whatever_the_script_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(accelerator.QUEUES, "1")
    assert worker_environment(1)[accelerator.QUEUES] == "32"


def test_a_rank_takes_its_own_gpu_or_the_only_one_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [accelerator.gpu_of_rank(rank) for rank in range(4)] == [0, 1, 2, 3]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv(accelerator.VISIBLE, "3")
    assert accelerator.gpu_of_rank(3) == 0


@pytest.mark.parametrize(("present", "visible", "advice"), [(1, "", "=1"), (2, "0,1", "=2"), (0, "", "=1")])
def test_a_rank_without_a_gpu_is_refused(
    present: int, visible: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: present)
    if visible:
        monkeypatch.setenv(accelerator.VISIBLE, visible)
    with pytest.raises(HardwareError, match=rf"LOCAL_RANK=2: this process sees {present} GPUs.*nproc-per-node{advice}"):
        accelerator.gpu_of_rank(2)
