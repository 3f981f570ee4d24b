"""Tokens of root complexes: the lowest turn first, chunk by chunk, and nobody waits for a device that is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.ir.errors import WorkerError
from penstock.runtime.device import transfers as device_transfers
from penstock.runtime.device.pacing import Paces, TurnClient
from penstock.runtime.device.setup import DeviceSetup
from penstock.runtime.emulate.turn_server import Tokens, TurnServer
from penstock.runtime.simulate.priority import LAST_TURN, is_weights_fetch, turn_of
from penstock.tests.ir.program.handmade import pipeline
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


def test_forward_turns_come_in_stage_order_and_backward_ones_behind_in_reverse() -> None:
    (program,) = pipeline(1, 3, MICRO_BATCHES)
    turns = [turn_of(node) for node in program.ops() if is_weights_fetch(node)]
    assert turns == [0, 1, 2, 2 * LAST_TURN - 1, 2 * LAST_TURN]


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
    with pytest.raises(OSError):
        holding.__exit__(None, None, None)


def test_a_server_that_is_gone_is_an_error(tmp_path: Path) -> None:
    server = TurnServer(str(tmp_path / "turns"))
    client = TurnClient(server.address, 0)
    with client.hold(1):
        pass
    client._own.channel.shutdown(2)
    with pytest.raises(WorkerError, match="turns of copies"), client.hold(1):
        pass
    server.close()


@pytest.mark.parametrize("moved", ["", "dram"])
def test_weights_in_chunks_are_the_same_weights_without_a_race(
    moved: str, server: TurnServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = install(monkeypatch)
    monkeypatch.setattr(device_transfers, "CHUNK_BYTES", 100)
    plain = run(open_session(tmp_path / "plain", "cpu", moved=moved))
    (program,) = pipeline(1, STAGES, MICRO_BATCHES, width=WIDTH, rows=ROWS, moved=moved)
    (tmp_path / "turns_").mkdir()
    (path,) = write_chain(tmp_path / "turns_", [program], WIDTH)
    asked: list[int] = []
    setup = DeviceSetup(0, path, program.interface, gpu("cuda"), ADAMW, paces=Paces(turns=server.address))
    session = FakeCudaSession(setup, setup.open_file())
    client = session.pacing.turns
    assert client is not None
    hold = client.hold
    monkeypatch.setattr(client, "hold", lambda turn: (asked.append(turn), hold(turn))[1])
    made = torch.Generator().manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, generator=made) / 4 for _ in range(STAGES)]
    session.state.load_weights(lambda stage: ({f"layer{stage[-1]}.weight": weights[int(stage[-1])]}, {}))
    assert run(session) == plain
    assert cuda.races == [] and cuda.not_held == set()
    chunks = -(-WIDTH * WIDTH * 4 // 100)
    assert asked.count(0) % chunks == 0 and asked.count(0) > 0 and (-1 in asked) == bool(moved)
