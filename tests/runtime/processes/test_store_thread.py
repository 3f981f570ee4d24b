"""The address of the rendezvous store, and a thread that goes on whatever it receives there."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from penstock.ir.errors import WorkerError
from penstock.runtime.processes import store_thread
from penstock.runtime.processes.store_thread import StoreLost, StoreThread, connect_store


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def listening_at(port: int) -> set[str]:
    """The addresses, as the kernel writes them, at which this host listens on a port."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    places = [row[1].split(":") for row in rows if row[3] == "0A"]
    return {address for address, number in places if int(number, 16) == port}


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> int:
    port = free_port()
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return port


def test_the_store_listens_on_the_endpoints_address_only(endpoint: int) -> None:
    store = connect_store(5.0)
    assert listening_at(endpoint) == {"0100007F"}
    store.set("key", "value")
    assert connect_store(5.0).get("key") == b"value"  # another connection, to the same store


def test_where_other_hosts_could_not_reach_it_it_says_so(endpoint: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a host knows its own name as loopback."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.warns(UserWarning, match="MASTER_ADDR=127.0.0.1 is 127.0.0.1 here, .* listens on all addresses"):
        connect_store(5.0)
    assert listening_at(endpoint) - {"0100007F"}


def test_a_port_in_use_is_said(endpoint: int) -> None:
    with socket.create_server(("127.0.0.1", endpoint)), pytest.raises(WorkerError, match="choose another MASTER_PORT"):
        connect_store(2.0)


def test_an_address_of_a_gateway_is_out_of_reach() -> None:
    assert store_thread._is_out_of_reach("192.0.2.7") and not store_thread._is_out_of_reach("127.0.0.1")


def test_whatever_a_look_raises_the_thread_answers_for() -> None:
    """Not with silence until a timeout."""
    looked = threading.Event()

    def look(store: dist.Store) -> None:
        looked.set()
        raise KeyError("a row without its field")

    thread = StoreThread(dist.HashStore(), look, period_s=0.01)
    assert looked.wait(5)
    with pytest.raises(StoreLost, match="a row without its field"):
        while True:
            thread.ask(lambda store: store.set_timeout(timedelta(seconds=1)), 5.0)
    thread.close()
