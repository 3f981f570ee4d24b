"""Links shared in real time, by threads that ask; which transfers of a held-down machine must ask."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.ir.errors import WorkerError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.machine.links import Link
from penstock.ir.program import Program
from penstock.runtime.device.pacing import LinkClient
from penstock.runtime.emulate.link_server import LinkServer
from penstock.runtime.emulate.throttle import shared_transfers
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec
from penstock.runtime.processes.local import LocalWorkers
from penstock.runtime.processes.setup import RunSetup
from penstock.runtime.simulate import simulate
from penstock.runtime.simulate.sharing import Cost
from penstock.runtime.source.trust import TRUSTED
from penstock.tests.ir.program.handmade import pipeline
from penstock.tests.runtime.generated_files import write_chain

LINKS = {name: Link(name, "a", "b", 100.0, 0.0) for name in ("shared", "other")}
SLOW = 0.15  # what a loaded machine may take longer, in seconds


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LinkServer]:
    """Per device: 20 bytes over the shared link, the same after 0.1 s, urgent and not, 20 bytes over another."""
    rows = [
        Cost(0.0, ((("shared",), 20.0),)),
        Cost(0.1, ((("shared",), 20.0),)),
        Cost(0.0, ((("shared",), 20.0),), priority=1),
        Cost(0.0, ((("other",), 20.0), (("shared",), 20.0))),
    ]
    made = LinkServer(str(tmp_path / "links"), LINKS, [rows] * 3)
    yield made
    made.close()


def times_s(server: LinkServer, *asked: tuple[int, int]) -> list[float]:
    """Seconds that these ops (device, index) take when they begin together, each on a thread of its own."""
    found: dict[int, float] = {}
    together = threading.Barrier(len(asked))

    def ask(number: int, device: int, index: int) -> None:
        client = LinkClient(server.address, device)
        together.wait()
        begin_s = time.perf_counter()
        client.begin(index)()
        found[number] = time.perf_counter() - begin_s

    threads = [threading.Thread(target=ask, args=(i, *pair)) for i, pair in enumerate(asked)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[i] for i in range(len(asked))]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ([(0, 0), (1, 0)], [0.4, 0.4]),
        ([(0, 0), (1, 2)], [0.2, 0.4]),  # the urgent one first
        *(pytest.param([(0, index)], [s], marks=pytest.mark.slow) for index, s in ((0, 0.2), (1, 0.3))),
        pytest.param([(0, 3), (1, 0)], [0.4, 0.4], marks=pytest.mark.slow),
    ],
)
def test_transfers_share(server: LinkServer, asked: list[tuple[int, int]], expected: list[float]) -> None:
    for found, want in zip(times_s(server, *asked), expected, strict=True):
        assert want - 0.01 < found < want + SLOW


def test_time_may_be_stretched(tmp_path: Path) -> None:
    server = LinkServer(str(tmp_path / "links"), LINKS, [[Cost(0.01, ((("shared",), 1.0),))]], time_scale=10)
    assert 0.19 < times_s(server, (0, 0))[0] < 0.2 + SLOW
    server.close()


def test_who_waits_is_told_of_the_end(server: LinkServer) -> None:
    wait = LinkClient(server.address, 0).begin(0)
    server.close()
    with pytest.raises(WorkerError, match="gone"):
        wait()


def test_a_client_that_goes_leaves_the_others_alone(server: LinkServer) -> None:
    client = LinkClient(server.address, 0)
    client.begin(0)
    client._own.channel.close()
    assert times_s(server, (1, 0))[0] < 0.4 + SLOW
    assert times_s(server, (1, 0))[0] == pytest.approx(0.2, abs=SLOW)


# --- machines that are held down


def programs_and(hardware: Hardware, **options: object) -> tuple[list[dict], Hardware]:
    made = pipeline(2, 4, 2, width=256, **options)  # type: ignore[arg-type]
    return [{"step": program} for program in made], hardware


def test_links_of_their_own_need_no_server() -> None:
    slow = Hardware.cpu(2, h2d="20MB/s", d2h="20MB/s", link="20MB/s")
    assert not shared_transfers(*programs_and(slow), "fp32")
    assert not shared_transfers(*programs_and(Hardware.cpu(2)), "fp32")
    assert not shared_transfers(*programs_and(slow.with_(root_complex_bandwidth="50MB/s")), "fp32")


def test_a_narrow_root_complex_is_shared() -> None:
    narrow = Hardware.cpu(2, h2d="20MB/s", d2h="20MB/s", link="20MB/s").with_(root_complex_bandwidth="30MB/s")
    programs, hardware = programs_and(narrow)
    found = shared_transfers(programs, hardware, "fp32")
    for own, numbers in zip(programs, found.numbers, strict=True):
        listed = {node.target.name for i, node in enumerate(own["step"].ops()) if i in numbers["step"]}
        assert listed == {"fetch", "offload"}  # messages have links of their own


def real_step_s(programs: list[Program], hardware: Hardware, width: int, folder: Path) -> float:
    """The fastest of three steps of real workers, as their spans say."""
    sgd = OptimizerSpec("torch.optim:SGD", {"lr": 0.0})
    setup = RunSetup(write_chain(folder, programs, width), programs[0].interface, hardware, sgd, trust=TRUSTED)
    found = []
    driver = LocalWorkers(setup)
    with driver:
        for stage in setup.interface.stages.values():
            driver.load_stage(stage.name, {p.name: torch.zeros(p.shape) for p in stage.params}, {})
        batch = {"x": torch.zeros(8, width)}
        for _ in range(3):
            driver.step(batch)
            found.append(driver.timeline().step_s)
    return min(found)


@pytest.mark.slow
def test_a_real_step_shares_links_as_the_simulation_does(tmp_path: Path) -> None:
    width, rate = 512, "10MB/s"  # 1 MiB a stage, 105 ms alone, twice that where both devices fetch
    hardware = Hardware.cpu(2, h2d=rate, d2h=rate).with_(root_complex_bandwidth=rate)
    programs = pipeline(2, 4, 2, width=width, flops=1e6)
    simulated_s = simulate(programs, hardware).step_s
    assert simulated_s > 1.3 * simulate(programs, hardware.with_(root_complex_bandwidth="1GB/s")).step_s
    assert 0.97 * simulated_s < real_step_s(programs, hardware, width, tmp_path) < 1.15 * simulated_s


@pytest.mark.slow
def test_messages_and_sums_take_what_slow_links_need(tmp_path: Path) -> None:
    width = 64
    hardware = Hardware.cpu(2, link="1GB/s").with_(nvlink_latency_s="100ms")
    programs = pipeline(2, 2, 2, width=width, rows=4, flops=1e6, fetched=False, clip=True)
    collective_s = shared_transfers([{"step": program} for program in programs], hardware, "fp32").collective_s
    assert [list(rows["step"].values()) for rows in collective_s] == [[pytest.approx(0.2, rel=0.01)]] * 2
    simulated_s = simulate(programs, hardware).step_s
    assert simulated_s > 0.5
    assert 0.97 * simulated_s < real_step_s(programs, hardware, width, tmp_path) < 1.15 * simulated_s
