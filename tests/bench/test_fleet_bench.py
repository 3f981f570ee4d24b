"""The benchmark of two hosts: both sides train alike on ranks of two namespaces, and their bytes are the theory's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.bench import fleet
from penstock.bench.hosts import two_hosts, why_not
from penstock.bench.peers import fsdp_fleet
from penstock.bench.peers.ranks import Ranks
from penstock.ir.machine.hardware import Hardware

pytestmark = [
    pytest.mark.slow, pytest.mark.multi,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "two hosts can be made here"),
]  # fmt: skip
RATE_BYTES_S = 50e6
SMALL = {"layers": 2, "width": 64, "vocabulary": 512, "batch": 8, "lr": 1e-3, "tied": False, "micro_batches": 8}
OVER = (1.0, 1.06)  # sent per byte of the theory: headers, and what ranks say to each other beside a small model


def machine(rate_bytes_s: float) -> Hardware:
    document = Hardware.cpu(num_devices=4, memory="64MB", dram="1GB", hosts=2).model_dump(mode="python")
    return Hardware.model_validate({**document, "network": {"bandwidth": rate_bytes_s, "latency_s": 1e-4}})


def test_bytes_of_both_sides_are_the_theorys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = {name: text for name, text in fleet.STRATEGIES.items() if name != fleet.AUTO}
    monkeypatch.setattr(fleet, "STRATEGIES", {name: text.replace("=10", "=4") for name, text in plans.items()})
    monkeypatch.setattr(fleet, "machine", machine)
    settings: dict[str, Any] = dict(SMALL)
    jobs = fleet.plan_for(settings, RATE_BYTES_S, tmp_path)
    theory = fleet.theories(jobs, settings)
    peers = {**settings, "sides": (fsdp_fleet.FULL, fsdp_fleet.HSDP)}
    sides: fleet.Sides = {}
    here = Path(fsdp_fleet.__file__).parent
    with (
        two_hosts(RATE_BYTES_S) as hosts,
        Ranks(hosts, here / "penstock_fleet.py", settings, 29621) as ours,
        Ranks(hosts, here / "fsdp_fleet.py", peers, 29622) as theirs,
    ):
        sides |= {name: lambda name=name: ours.run(name) for name in jobs}  # type: ignore[misc]
        sides |= {fleet.PEER + name: lambda name=name: theirs.run(name) for name in peers["sides"]}  # type: ignore[misc]
        found = fleet.count(sides, theory)  # which compares the losses
    ratios = {name: row["ratio"] for name, row in found.items()}
    assert all(OVER[0] <= ratio <= OVER[1] for ratio in ratios.values()), ratios
    sent = {name: row["sent_bytes"] for name, row in found.items()}
    assert sent[fleet.ALWAYS] == pytest.approx(2 * sent[fleet.TWO_HOP], rel=0.05)  # two micro-batches a rank
    assert sent[fleet.BY_HOST] < 0.75 * sent[fleet.FLAT]


def test_a_rank_that_does_not_start_is_told(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text("raise SystemExit('no such model')\n")
    with two_hosts() as hosts, pytest.raises(RuntimeError, match=r"(?s)do not start.*no such model"):
        Ranks(hosts, script, {}, 29623)
