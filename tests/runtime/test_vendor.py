"""What differs between makers of GPUs, by the calls made: no GPU of AMD or Intel is here."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from penstock.errors import HardwareError
from penstock.ir.machine.hardware import Hardware
from penstock.runtime import vendor


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")


def test_torch_says_whose_gpus_it_drives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    assert vendor.vendor().queues == "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    assert vendor.vendor().queues == "GPU_MAX_HW_QUEUES" and vendor.vendor().visible[0] == "HIP_VISIBLE_DEVICES"


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
    vendor.require_known_gpus()


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
    assert vendor.links_bandwidth(0, major) == (rate if rate is None else pytest.approx(rate))


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
    assert vendor.links_bandwidth(1, 9) == (rate if rate is None else pytest.approx(rate))
    assert calls == ["init", "end"]


def test_without_amds_library_no_links_are_known(rocm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    assert vendor.links_bandwidth(0, 9) is None
