"""The cost of collectives over hosts: bytes on every link by hand, rounds of latency, and one lane for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from penstock.compiler.pipeline import parse_pipeline
from penstock.ir import ops
from penstock.ir.machine.hardware import Hardware
from penstock.ir.ops import Work
from penstock.ir.program import are_alike, bind, build_order, slice_of
from penstock.passes.draft import Draft
from penstock.runtime.simulate import CostModel, simulate
from penstock.runtime.simulate.collectives import devices_by_host, rounds_of
from penstock.runtime.simulate.costs import WholeMachine
from penstock.runtime.simulate.sharing import Cost, TasksUnderWay
from penstock.tests.passes.running import apply, chain, draft_of
from penstock.tests.shown_elsewhere import slow_rows_but

MB = 1e6
NETWORK, PCIE, NVLINK = 10e9, 8e9, 100e9
NETWORK_S, COPY_S, NVLINK_S = 30e-6, 10e-6, 4e-6
BETWEEN_S = NETWORK_S + 2 * COPY_S  # a hop from a device of one host to one of another


def cluster(num_hosts: int, gpus: int = 4, complexes: int = 2, network: float = NETWORK, **shares: Any) -> Hardware:
    """`shares`: what messages reach of the network's rate."""
    host = {
        "dram_bytes": 10**12, "dram_bandwidth": 1e11, "cpu_cores": 16, "optimizer_params_per_s": 1e9,
        "root_complexes": [{"bandwidth_up": PCIE, "bandwidth_down": PCIE}] * complexes,
        "nvlink_bandwidth": NVLINK, "nvlink_latency_s": NVLINK_S,
    }  # fmt: skip
    devices = [
        {
            "name": f"gpu{h * gpus + i}", "kind": "cuda", "host": h, "root_complex": i * complexes // gpus,
            "memory_bytes": 10**10, "peak_flops": {"fp32": 1e12}, "achieved_fraction": 1.0, "memory_bandwidth": 1e12,
            "h2d_bandwidth": PCIE, "d2h_bandwidth": PCIE, "link_latency_s": COPY_S, "op_overhead_s": 0.0,
        }
        for h in range(num_hosts) for i in range(gpus)
    ]  # fmt: skip
    return Hardware.model_validate(
        {"name": "cluster", "source": "made up", "hosts": [host] * num_hosts, "devices": devices,
         "network": {"bandwidth": network, "latency_s": NETWORK_S, **shares}}
    )  # fmt: skip


def collective(hardware: Hardware, moved_bytes: float, times: int = 1, **more: bool) -> Cost:
    work = Work(
        ops.COMM, moved_bytes=int(moved_bytes), source=ops.DEVICE, target=ops.DEVICE, group="all", rounds=times, **more
    )
    return CostModel(hardware, "fp32").collective([(d, work) for d in range(hardware.num_devices)])


def on_links(cost: Cost) -> dict[str, float]:
    """Bytes per link, whatever share of its rate they reach."""
    found: dict[str, float] = {}
    for path, amount in (flow for part in cost.parts() for flow in part.flows):
        for link in path:
            name = link.partition("@")[0]
            found[name] = found.get(name, 0.0) + amount
    return found


def alone_s(cost: Cost, hardware: Hardware) -> float:
    """Seconds of a collective that has the machine to itself."""
    links, total_s = hardware.links(), 0.0
    for part in cost.parts():
        load = on_links(Cost(flows=part.flows))
        total_s += part.fixed_s + max(amount / links[link].bandwidth for link, amount in load.items())
    return total_s


def test_messages_through_dram_have_a_rate_of_their_own() -> None:
    """Of GPUs without P2P and NVLink, whose links are faster; fetches and offloads keep the links' rate."""
    hardware = cluster(1).with_(nvlink_bandwidth=None, staged_bandwidth=1e9)
    once = 3 / 4 * 64 * MB
    cost = collective(hardware, 64 * MB)
    assert on_links(cost)["gpu0.messaging"] == pytest.approx(once)
    model = CostModel(hardware, "fp32")
    assert model.links["gpu0.messaging"].bandwidth == 1e9
    fetch = Work(ops.COMM, moved_bytes=10**6, source=ops.DRAM, target=ops.DEVICE)
    assert not any("messaging" in link for path, _ in model.transfer(0, fetch, 1).flows for link in path)
    for other in ({"p2p": True}, {"nvlink_bandwidth": NVLINK}, {"staged_bandwidth": None}):
        assert "gpu0.messaging" not in CostModel(hardware.with_(**other), "fp32").links


@pytest.mark.parametrize(("num_hosts", "times"), [(2, 1), (4, 1), (4, 2)])
def test_a_ring_passes_each_network_card_once(num_hosts: int, times: int) -> None:
    """A gather brings (n-1)/n of the value into every host and out of it, a sum that all get twice that (MiCS 2.2)."""
    hardware, count = cluster(num_hosts), 4 * num_hosts
    cost = collective(hardware, 64 * MB, times)
    once = times * (count - 1) / count * 64 * MB
    load = on_links(cost)
    for host in range(num_hosts):
        assert load[f"nic{host}.up"] == load[f"nic{host}.down"] == pytest.approx(once)
        # Two rings: each root complex has one of the two borders out of the host, and one into it.
        assert [load[f"rc{host}.{i}.{way}"] for i in (0, 1) for way in ("up", "down")] == pytest.approx([once / 2] * 4)
    trees = 2 * 2 * (2 + 3)  # of four hosts with four devices each: they are two deep, a chain in a host three
    assert cost.fixed_s == pytest.approx((trees if times == 2 else count - 1) * BETWEEN_S)
    assert alone_s(cost, hardware) == pytest.approx(cost.fixed_s + once / NETWORK)


@pytest.mark.parametrize(("num_hosts", "rounds"), [(2, 2), (4, 6), (8, 12), (256, 32), (1280, 44)])
def test_sums_over_many_hosts_take_trees(num_hosts: int, rounds: int) -> None:
    hardware = cluster(num_hosts, gpus=1, complexes=1)
    cost = collective(hardware, 64 * MB, times=2)
    assert cost.fixed_s == pytest.approx(rounds * BETWEEN_S)
    assert on_links(cost)["nic0.up"] == pytest.approx(2 * (num_hosts - 1) / num_hosts * 64 * MB)
    cpus = [device.model_copy(update={"kind": "cpu"}) for device in hardware.devices]
    (ring,) = rounds_of(range(num_hosts), hardware.model_copy(update={"devices": cpus}), 64 * MB, 2)
    assert ring.count == 2 * (num_hosts - 1)  # gloo knows no trees


def test_a_ring_inside_a_host_uses_nvlink_alone() -> None:
    cost = collective(cluster(1), 64 * MB)
    assert on_links(cost).keys() == {f"gpu{i}.nvlink.{way}" for i in range(4) for way in ("up", "down")}
    assert alone_s(cost, cluster(1)) == pytest.approx(3 * NVLINK_S + 0.75 * 64 * MB / NVLINK)


def test_members_are_taken_host_by_host() -> None:
    """Whatever the order of a group, neighbours of the ring are on one host where they can be."""
    hardware = cluster(2)
    assert devices_by_host([7, 0, 4, 1], hardware) == [[0, 1], [4, 7]]
    (ring,) = rounds_of([0, 4, 1, 5], hardware, 4 * MB, 1)
    hosts = [{hardware.devices[device].host for device in hop} for hop in ring.hops]
    assert sum(len(pair) == 2 for pair in hosts) == 2 and len(ring.hops) == 4


@pytest.mark.parametrize("num_hosts", [2, 4])
def test_a_hierarchical_gather_moves_what_the_paper_says(num_hosts: int) -> None:
    """(p-k) M / p bytes between hosts, not (p-1) M / p (MiCS 3.3), and rounds over hosts instead of members."""
    hardware, count, local = cluster(num_hosts), 4 * num_hosts, 4
    cost = collective(hardware, 64 * MB, hierarchical=True)
    load = on_links(cost)
    assert load["nic0.up"] == load["nic0.down"] == pytest.approx((count - local) / count * 64 * MB)
    assert load["gpu0.nvlink.up"] == pytest.approx((local - 1) / local * 64 * MB)
    between, inside = cost.parts()
    assert between.fixed_s == pytest.approx((num_hosts - 1) * BETWEEN_S)
    assert inside.fixed_s == pytest.approx((local - 1) * NVLINK_S)  # every piece arrived at its place: none is moved
    flat = collective(hardware, 64 * MB)
    assert on_links(flat)["nic0.up"] / load["nic0.up"] == pytest.approx((count - 1) / (count - local))
    assert alone_s(cost, hardware) < alone_s(flat, hardware)


def test_what_has_no_grid_of_hosts_is_a_plain_ring() -> None:
    hardware = cluster(2)
    for members in ([0, 1, 2, 3], [0, 4], [0, 1, 4]):
        assert rounds_of(members, hardware, MB, 1, hierarchical=True) == rounds_of(members, hardware, MB, 1)


def test_effective_bandwidth_falls_with_scale_and_rises_with_size() -> None:
    """MiCS figure 2: small messages over many hosts are bound by rounds, not by the network."""

    def effective(num_hosts: int, moved_bytes: float) -> float:
        hardware = cluster(num_hosts)
        count = hardware.num_devices
        return (count - 1) / count * moved_bytes / alone_s(collective(hardware, moved_bytes), hardware)

    small, large = ([effective(hosts, size) for hosts in (2, 8, 32)] for size in (16 * MB, 1024 * MB))
    assert small == sorted(small, reverse=True) and large == sorted(large, reverse=True)
    assert small[-1] < 0.35 * small[0] and large[-1] > 0.9 * large[0]
    assert all(rate < NETWORK for rate in small + large)


SHARES = {"message_shares": {"1MB": 0.5, "4MB": 1.0}, "host_shares": {2: 1.0, 4: 0.8}}


@pytest.mark.parametrize(
    ("num_hosts", "size_mb", "share"), [(2, 64, 1.0), (2, 16, 0.5), (4, 128, 0.8), (4, 64, 0.5**0.5 * 0.8)]
)
def test_small_messages_between_many_hosts_reach_a_share_of_the_network(
    num_hosts: int, size_mb: int, share: float
) -> None:
    """A ring of n members in two rings beside each other passes on M / 2n bytes a round. Bytes stay what they are, and
    what goes on inside a host is as fast as ever."""
    hardware, plain = cluster(num_hosts, **SHARES), cluster(num_hosts)
    cost, before = collective(hardware, size_mb * MB), collective(plain, size_mb * MB)
    assert on_links(cost) == on_links(before) and cost.fixed_s == before.fixed_s
    count = hardware.num_devices
    ends_s = run_alone(hardware, cost)
    assert ends_s == pytest.approx(cost.fixed_s + (count - 1) / count * size_mb * MB / (share * NETWORK), rel=1e-3)


def run_alone(hardware: Hardware, *costs: Cost) -> float:
    """The second at which tasks that begin together have all ended, as the simulator shares links."""
    model = CostModel(hardware, "fp32")
    links = dict(model.links)
    for name in {link for cost in costs for part in cost.parts() for path, _ in part.flows for link in path}:
        whole, _, share = name.partition("@")
        links[name] = model.links[whole].with_share(float(share)) if share else model.links[whole]
    progress, end_s = TasksUnderWay(links), 0.0
    for number, cost in enumerate(costs):
        progress.begin(number, cost, 0.0)
    while progress.events:
        now_s, over = progress.pop()
        end_s = now_s if over is not None else end_s
    return end_s


def test_messages_that_reach_less_of_a_link_leave_less_of_it_to_others() -> None:
    """Two messages of 1 MB at half of the rate take as long together as one after the other."""
    hardware = cluster(2, **SHARES)
    work = Work(ops.SEND, moved_bytes=int(MB), source=ops.DEVICE, target="device4")
    cost = CostModel(hardware, "fp32").transfer(0, work, 0)
    one_s, two_s = run_alone(hardware, cost), run_alone(hardware, cost, cost)
    assert one_s == pytest.approx(BETWEEN_S + MB / (0.5 * NETWORK)) == pytest.approx(BETWEEN_S + MB / 5e9)
    assert two_s - BETWEEN_S == pytest.approx(2 * (one_s - BETWEEN_S))


def lanes_draft(hardware: Hardware, mesh: str, micro_batches: int, strategy: str) -> Draft:
    draft = draft_of(chain(depth=6, width=512, rows=64), hardware, micro_batches=micro_batches)
    return apply(draft, *parse_pipeline(f"coarsen, mesh{mesh}, {strategy}", hardware.num_devices))


REST = "map-round-robin, schedule-pipeline, insert-remat{always=true}"
SHARDED = f"partition-min-stage, {REST}, insert-shard{{hold=false, hierarchical=false}}, insert-optimizer"
WHOLE = f"partition-balanced{{stages=2}}, {REST}, insert-fetch, insert-optimizer"


def one_lane_s(draft: Draft) -> float:
    """The step as a lane's part of the machine sees it, however few devices there are."""
    from penstock.runtime.simulate import engine as module

    interface = draft.programs[0].interface
    sliced = slice_of(draft.machine, interface.lanes)
    case = module.Case(draft.programs, sliced)
    order = build_order(draft.programs, case.memories)
    engine = module._Engine(order, CostModel(sliced, "fp32", WholeMachine(draft.machine, interface)))
    engine.run(None)
    return max(engine.ended_s.values())


@pytest.mark.parametrize(
    ("num_hosts", "gpus", "mesh", "strategy"),
    slow_rows_but(
        [(2, 4, "{shards=4}", SHARDED), (2, 4, "", WHOLE), (4, 2, "{depth=2}", WHOLE)],
        [
            (2, 4, "{shards=8}", SHARDED), (2, 4, "{shards=4}", SHARDED), (4, 4, "{shards=8}", SHARDED),
            (2, 4, "{shards=2}", SHARDED), (2, 4, "", WHOLE), (4, 2, "{depth=2}", WHOLE),
            (2, 4, "{shards=2, depth=2, nearest=pipeline}", SHARDED),
        ],
    ),
)  # fmt: skip
@pytest.mark.parametrize("network", [NETWORK, pytest.param(1e8, marks=pytest.mark.slow)])
def test_one_lane_takes_what_all_take(num_hosts: int, gpus: int, mesh: str, strategy: str, network: float) -> None:
    """On machines that look the same from every lane, a lane on its part of them is as fast as all lanes on all."""
    hardware = cluster(num_hosts, gpus, network=network)
    draft = lanes_draft(hardware, mesh, 2 * hardware.num_devices, strategy)
    assert draft.mesh.lanes
    assert one_lane_s(draft) == pytest.approx(simulate(bind(draft.programs), hardware).step_s, rel=0.02)


def test_one_lane_reaches_the_shares_that_all_reach_and_moves_the_same_bytes() -> None:
    low = {"message_shares": {"1kB": 0.05, "1MB": 0.3}, "host_shares": {2: 0.5}}
    hardware = cluster(2, **low)
    draft = lanes_draft(hardware, "{shards=8}", 16, SHARDED)
    whole = simulate(bind(draft.programs), hardware)
    assert one_lane_s(draft) == pytest.approx(whole.step_s, rel=0.02)
    plain = simulate(bind(draft.programs), cluster(2))
    assert whole.moved_bytes == plain.moved_bytes and whole.step_s > 1.5 * plain.step_s
    assert whole.link_busy["nic0.up"] > 1.5 * plain.link_busy["nic0.up"]
    lane = simulate(draft.programs, hardware, written_out=0)
    assert lane.step_s == pytest.approx(whole.step_s, rel=0.02)
    assert 8 * lane.moved_bytes["nic0.up"] / 2 == pytest.approx(whole.moved_bytes["nic0.up"], rel=0.02)


def on_nics(moved: dict[str, int], hosts: Sequence[int]) -> list[float]:
    return [moved[f"nic{host}.up"] for host in hosts]


def test_bytes_between_hosts_are_theorys() -> None:
    """Shards inside a host: only the sum over replicas passes the network, 2 (R-1) / R of each host's gradients, once a
    step. Shards over all: every gather and scatter passes it."""
    hardware = cluster(2)
    inside = lanes_draft(hardware, "{shards=4}", 16, SHARDED)
    weights = sum(stage.spec.weight_bytes for stage in inside.stages)
    moved = simulate(inside.programs, hardware).moved_bytes
    assert on_nics(moved, (0, 1)) == pytest.approx([weights] * 2, rel=0.02)
    everywhere = lanes_draft(hardware, "{shards=8}", 16, SHARDED)
    last = everywhere.stages[-1].spec.weight_bytes  # gathered once for both phases
    moved = simulate(everywhere.programs, hardware).moved_bytes
    assert on_nics(moved, (0, 1)) == pytest.approx([7 / 8 * (3 * weights - last)] * 2, rel=0.02)


def test_lanes_are_alike_whichever_root_complex_they_are_under() -> None:
    hardware = cluster(2)
    assert are_alike(hardware, [[device] for device in range(8)])
    assert are_alike(hardware, [[0, 4], [1, 5], [2, 6], [3, 7]])
    assert not are_alike(hardware, [[0], [1], [2]])  # one of them has its root complex to itself
    assert not are_alike(hardware, [[0, 1], [2, 4], [3, 5]])
