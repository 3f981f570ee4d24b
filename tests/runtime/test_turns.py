"""Tokens of root complexes: the lowest turn first, chunk by chunk, and nobody waits for a device that is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import PAGE
from penstock.ir.units import parse_bytes
from penstock.runtime.device.pacing import CHUNK_S, Paces, Pacing
from penstock.runtime.device.setup import DeviceSetup
from penstock.runtime.source.trust import TRUSTED
from penstock.runtime.turns import Tokens, TurnClient, TurnServer, TurnsLost
from penstock.tests.ir.program.handmade import in_turns, pipeline
from penstock.tests.runtime.device.fake_cuda import FakeCudaSession, install
from penstock.tests.runtime.device.test_cuda_order import (
    ADAMW,
    MICRO_BATCHES,
    ROWS,
    STAGES,
    WIDTH,
    gpu,
    open_session,
    run,
)
from penstock.tests.runtime.generated_files import write_chain
from penstock.tests.shown_elsewhere import slow_but

PATIENCE_S = 10.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TurnServer]:
    made = TurnServer(str(tmp_path / "turns"))
    yield made
    made.close()


def wait_until(condition) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def test_who_waits_with_the_lowest_turn_is_next() -> None:
    tokens, order = Tokens(), []
    tokens.take(0, 9)

    def ask(turn: int) -> None:
        tokens.take(0, turn)
        order.append(turn)
        tokens.give(0)

    threads = []
    for count, turn in enumerate([5, 1, 3], 1):
        threads.append(threading.Thread(target=ask, args=(turn,)))
        threads[-1].start()
        wait_until(lambda: len(tokens._waiting[0]) == count)  # noqa: B023
    tokens.take(1, 100)  # another root complex is free
    tokens.give(0)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert order == [1, 3, 5]


def test_the_token_of_a_device_that_is_gone_comes_back(server: TurnServer) -> None:
    lost, other = TurnClient(server.address, 0), TurnClient(server.address, 0)
    holding = lost.hold(1)
    holding.__enter__()
    lost._own.channel.close()
    done = threading.Thread(target=lambda: other.hold(2).__enter__())
    done.start()
    done.join(PATIENCE_S)
    assert not done.is_alive()
    holding.__exit__(None, None, None)


def test_a_server_that_is_gone_is_an_error(tmp_path: Path) -> None:
    server = TurnServer(str(tmp_path / "turns"))
    client = TurnClient(server.address, 0)
    with client.hold(1):
        pass
    client._own.channel.shutdown(2)
    with pytest.raises(TurnsLost, match="turns of copies"), client.hold(1):
        pass
    server.close()


def in_chunks(folder: Path, server: TurnServer, moved: str = "") -> FakeCudaSession:
    """A session of a GPU whose weights come in three chunks, of which the end does not hold up the next one."""
    (program,) = in_turns(pipeline(1, STAGES, MICRO_BATCHES, width=WIDTH, rows=ROWS, moved=moved))
    folder.mkdir()
    (path,) = write_chain(folder, [program], WIDTH)
    setup = DeviceSetup(
        0, path, program.interface, gpu("cuda"), ADAMW, paces=Paces(turns=server.address), trust=TRUSTED
    )
    session = FakeCudaSession(setup, setup.open_file())
    session.pacing.chunk_bytes, session.pacing.hand_over_bytes = 100, 40
    made = torch.Generator().manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, generator=made) / 4 for _ in range(STAGES)]
    session.state.load_weights(lambda stage: ({f"layer{stage[-1]}.weight": weights[int(stage[-1])]}, {}))
    return session


@pytest.mark.parametrize("moved", slow_but(["dram"], ["", "dram"]))
def test_weights_in_chunks_are_the_same_weights_without_a_race(
    moved: str, server: TurnServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = install(monkeypatch)
    plain = run(open_session(tmp_path / "plain", "cpu", moved=moved))
    session, asked = in_chunks(tmp_path / "in_turns", server, moved), list[int]()
    client = session.pacing.turns
    assert client is not None
    hold = client.hold
    monkeypatch.setattr(client, "hold", lambda turn: (asked.append(turn), hold(turn))[1])
    assert run(session) == plain
    assert cuda.races == [] and cuda.not_held == set()
    chunks = -(-WIDTH * WIDTH * 4 // 100)
    assert asked.count(0) % chunks == 0 and asked.count(0) > 0 and (-1 in asked) == bool(moved)


def test_a_lower_turn_overtakes_a_fetch_under_way_after_its_chunk(
    server: TurnServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    session, order = in_chunks(tmp_path / "in_turns", server), list[str]()
    client, tokens = session.pacing.turns, server._server.tokens
    assert client is not None
    hold, urgent = client.hold, TurnClient(server.address, client.complex_)

    def overtake() -> None:
        with urgent.hold(-1):
            order.append("urgent")

    overtaking = threading.Thread(target=overtake)

    @contextmanager
    def watch(turn: int) -> Iterator[None]:
        with hold(turn):
            order.append(f"turn {turn}")
            if len(order) == 2:
                overtaking.start()
                wait_until(lambda: bool(tokens._waiting[client.complex_]))
            yield

    monkeypatch.setattr(client, "hold", watch)
    run(session)
    overtaking.join(PATIENCE_S)
    assert order[:4] == ["turn 0", "turn 0", "urgent", "turn 0"]


@pytest.mark.parametrize("rate", ["12GB/s", "100MB/s"])
def test_a_chunk_is_what_the_link_moves_in_its_time(rate: str) -> None:
    hardware = Hardware.cpu(2, h2d=rate)
    pacing = Pacing(hardware, 1, Paces())
    assert pacing.chunk_bytes == pytest.approx(parse_bytes(rate.removesuffix("/s")) * CHUNK_S, abs=PAGE)
    assert pacing.hand_over_bytes < 0.1 * pacing.chunk_bytes


def test_every_host_has_root_complexes_of_its_own() -> None:
    pacings = [Pacing(Hardware.cpu(4, hosts=2), index, Paces(turns="nowhere")) for index in range(4)]
    assert [pacing.turns and pacing.turns.complex_ for pacing in pacings] == [0, 0, 1, 1]
