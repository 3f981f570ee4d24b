"""Differences between makers of GPUs, hardware queues and the GPU of a rank, by the calls made: no GPU of AMD or Intel
is here."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock import Hardware
from penstock.errors import HardwareError
from penstock.runtime import accelerator
from penstock.runtime.processes.local import worker_environment

QUEUES, VISIBLE = "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES"


@pytest.fixture(autouse=True)
def no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(QUEUES, "")  # so that what a test leaves in the environment is taken back
    monkeypatch.delenv(QUEUES)
    monkeypatch.delenv(VISIBLE, raising=False)


def set_use(monkeypatch: pytest.MonkeyPatch, is_used: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_used)


def test_an_unused_gpu_gets_a_queue_for_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    set_use(monkeypatch, False)
    accelerator.take_queues()
    assert os.environ[QUEUES] == "32"
    set_use(monkeypatch, True)
    accelerator.take_queues()  # a second job of the process


def test_a_gpu_in_use_without_queues_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_use(monkeypatch, True)
    with pytest.raises(HardwareError, match=r"not set, and this process has used its GPU.*CONNECTIONS=32 in its env"):
        accelerator.take_queues()
    assert QUEUES not in os.environ


@pytest.mark.parametrize("is_used", [False, True])
def test_another_number_of_queues_is_refused(is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    set_use(monkeypatch, is_used)
    monkeypatch.setenv(QUEUES, "1")
    with pytest.raises(HardwareError, match="CUDA_DEVICE_MAX_CONNECTIONS: it is 1;"):
        accelerator.take_queues()


@pytest.mark.parametrize("setting", accelerator.BLOCKING)
def test_launches_that_wait_for_each_other_are_refused(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(setting, "0")
    accelerator.require_free_launches()
    monkeypatch.setenv(setting, "1")
    with pytest.raises(HardwareError, match=f"{setting}: it is 1; .*{setting}=0 in its environment"):
        accelerator.require_free_launches()


def test_workers_have_queues_whatever_the_script_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(QUEUES, "1")
    assert worker_environment(1)[QUEUES] == "32"


def test_a_rank_takes_its_own_gpu_or_the_only_one_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [accelerator.gpu_of_rank(rank) for rank in range(4)] == [0, 1, 2, 3]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv(VISIBLE, "3")
    assert accelerator.gpu_of_rank(3) == 0


@pytest.mark.parametrize(("present", "visible", "advice"), [(1, "", "=1"), (2, "0,1", "=2"), (0, "", "=1")])
def test_a_rank_without_a_gpu_is_refused(
    present: int, visible: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: present)
    if visible:
        monkeypatch.setenv(VISIBLE, visible)
    with pytest.raises(HardwareError, match=rf"LOCAL_RANK=2: this process sees {present} GPUs.*nproc-per-node{advice}"):
        accelerator.gpu_of_rank(2)


def test_rocm_has_a_setting_of_its_own(rocm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    set_use(monkeypatch, False)
    monkeypatch.setenv("GPU_MAX_HW_QUEUES", "")
    monkeypatch.delenv("GPU_MAX_HW_QUEUES")
    accelerator.take_queues()
    assert os.environ["GPU_MAX_HW_QUEUES"] == "16" and QUEUES not in os.environ
    assert worker_environment(1)["GPU_MAX_HW_QUEUES"] == "16"


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")


def test_torch_says_whose_gpus_it_drives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    assert accelerator.vendor().queues == "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    assert (
        accelerator.vendor().queues == "GPU_MAX_HW_QUEUES" and accelerator.vendor().visible[0] == "HIP_VISIBLE_DEVICES"
    )


@pytest.mark.parametrize(("kind", "lacking"), [("xpu", "cudaHostRegister"), ("mps", "streams"), ("hpu", "events")])
def test_other_gpus_are_refused_by_what_they_lack(kind: str, lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(type=kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    with pytest.raises(HardwareError, match=rf"computes on {kind!r}.* lacks .*{lacking}.*hardware=Hardware.cpu"):
        Hardware.detect()


@pytest.mark.parametrize("found", [None, SimpleNamespace(type="cuda")])
def test_gpus_of_cuda_and_rocm_and_none_at_all_are_taken(
    found: SimpleNamespace | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    accelerator.require_known_gpus()


@pytest.mark.parametrize(("active", "major", "rate"), [(12, 8, 240e9), (18, 9, 360e9), (18, 10, 720e9), (0, 8, None)])
def test_nvlinks_are_counted(active: int, major: int, rate: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def state(handle: int, link: int) -> int:
        if link >= active:
            raise RuntimeError("not supported")
        return 1

    driver = SimpleNamespace(
        NVMLError=RuntimeError, NVML_NVLINK_MAX_LINKS=18, nvmlInit=lambda: None, nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index, nvmlDeviceGetNvLinkState=state,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert accelerator.links_bandwidth(0, major) == (rate if rate is None else pytest.approx(rate))


XGMI, PCIE = object(), object()


@pytest.mark.parametrize(
    ("links", "rate"),
    [
        ([(PCIE, 256)] + [(XGMI, 512)] * 7, 0.8 * 64e9),  # a card joined with seven others
        ([(XGMI, 400), (XGMI, 800)], 0.8 * 50e9),
        ([(PCIE, 256)], None),
        (None, None),
    ],
)
def test_infinity_fabric_is_one_link_to_each_other_gpu(
    links: list[tuple[object, int]] | None, rate: float | None, rocm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def metrics(handle: str) -> dict[str, list[dict[str, object]]]:
        assert handle == "second"
        if links is None:
            raise RuntimeError("not supported")
        return {"links": [{"link_type": kind, "max_bandwidth": gigabits} for kind, gigabits in links]}

    driver = SimpleNamespace(
        AmdSmiException=RuntimeError, AmdSmiLinkType=SimpleNamespace(AMDSMI_LINK_TYPE_XGMI=XGMI),
        amdsmi_init=lambda: calls.append("init"), amdsmi_shut_down=lambda: calls.append("end"),
        amdsmi_get_processor_handles=lambda: ["first", "second"], amdsmi_get_link_metrics=metrics,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "amdsmi", driver)
    assert accelerator.links_bandwidth(1, 9) == (rate if rate is None else pytest.approx(rate))
    assert calls == ["init", "end"]


def test_without_amds_library_no_links_are_known(rocm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    assert accelerator.links_bandwidth(0, 9) is None


def settings_asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    asked: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append)
    for name in accelerator.ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    return asked


def test_segments_grow_until_the_last_job_of_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, gpu = settings_asked(monkeypatch), torch.device("cuda")
    with accelerator.growing_segments(gpu):
        with accelerator.growing_segments(gpu):
            pass
        assert set(asked) == {"expandable_segments:True"}
    assert asked[-1] == "expandable_segments:False"


@pytest.mark.parametrize("setting", ["expandable_segments:False", "backend:cudaMallocAsync"])
def test_what_the_user_says_of_the_allocator_stands(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = settings_asked(monkeypatch)
    with accelerator.growing_segments(torch.device("cpu")):
        pass
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    with accelerator.growing_segments(torch.device("cuda")):
        pass
    assert not asked


@pytest.mark.parametrize("fails", [False, True])
def test_workspaces_of_a_capture_are_given_back(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Also of a capture that fails: they are in the pool of its graph, which else stays."""
    events: list[str] = []
    graph: Any = SimpleNamespace(
        capture_begin=lambda **options: events.append("begin"), capture_end=lambda: events.append("end")
    )
    monkeypatch.setattr(accelerator, "clear_cublas_workspaces", lambda: events.append("clear"))
    with suppress(ZeroDivisionError), accelerator.capturing(graph, pool=None):
        assert not fails or 1 / 0
    assert events == ["clear", "begin", "end", "clear"]
