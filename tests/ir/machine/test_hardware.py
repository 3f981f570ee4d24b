"""Hardware documents: presets, routes, overrides, and what is said about a wrong one."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import yaml

from penstock.compiler.search.what_helps import FASTER, faster_links
from penstock.ir.errors import HardwareError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.machine.overrides import with_slower
from penstock.ir.machine.presets import preset_document, preset_names
from penstock.ir.program import slice_of
from penstock.runtime.simulate.sharing import fair_rates


def two_unequal_cards() -> dict[str, Any]:
    """A 3090 and a 4090 in one host, as a document."""
    document = preset_document("rtx3090x2") or {}
    other = preset_document("rtx4090x1") or {}
    document["devices"][1] = other["devices"][0] | {"name": "fast"}
    return document


# -- presets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_valid_says_its_source_and_survives_a_file(name: str, tmp_path: Path) -> None:
    hardware = Hardware.preset(name)
    assert hardware.name == name
    assert len(hardware.source) > 30
    hardware.save(tmp_path / "machine.yaml")
    assert Hardware.load(tmp_path / "machine.yaml") == hardware
    assert hardware.describe().startswith(f"{name}: ")


def test_the_papers_machines_have_the_papers_figures() -> None:
    mobius = Hardware.preset("mobius-topo1+3")
    assert [device.root_complex for device in mobius.devices] == [0, 1, 1, 1]
    assert mobius.devices[0].memory_bytes == 24 * 2**30
    assert mobius.links()["rc0.1.down"].bandwidth == 13.1e9
    assert (mobius.hosts[0].dram_bytes, mobius.hosts[0].p2p) == (1.5e12, False)
    assert Hardware.preset("mobius-8gpu").num_devices == 8
    assert len(Hardware.preset("mobius-topo4").hosts[0].root_complexes) == 1
    assert len(Hardware.preset("fuyou-4090").hosts[0].ssds) == 12
    fuyou = Hardware.preset("fuyou-a100")
    assert fuyou.devices[0].achieved_flops("bf16") == pytest.approx(200e12, rel=0.02)
    mics = Hardware.preset("mics-p4d:3")
    assert (mics.num_devices, len(mics.hosts)) == (24, 3)
    assert mics.network is not None and mics.network.bandwidth == 50e9
    assert Hardware.preset("ftpipe-2080ti").devices[7].memory_bytes == 11 * 2**30


def test_families_take_other_counts() -> None:
    odd = Hardware.preset("rtx4090x3-2rc-pcie3")
    assert [device.root_complex for device in odd.devices] == [0, 0, 1]
    assert odd.devices[0].h2d_bandwidth == 13.1e9
    assert Hardware.preset("h100x2").hosts[0].dram_bytes == 5 * 10**11


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fuyou4090", "did you mean 'fuyou-4090'"),
        ("mobius-topo2-2", "did you mean 'mobius-topo2\\+2'"),
        ("zzz", "no known GPU has a name like it"),
        ("rtx4090x0", "1 to 4096"),
        ("rtx4090x1-2rc", "cannot sit under 2"),
        ("h100x9", "at most 8"),
        ("mics-p3dn:0", "1 to 4096"),
    ],
)
def test_wrong_preset_names_are_answered_helpfully(name: str, said: str) -> None:
    with pytest.raises(HardwareError, match=said):
        Hardware.preset(name)


# -- routes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "src", "dst", "path"),
    [
        ("mobius-topo2+2", "dram0", "gpu1", "rc0.0.down gpu1.down"),
        ("mobius-topo2+2", "gpu3", "dram0", "gpu3.up rc0.1.up"),
        ("mobius-topo2+2", "gpu0", "gpu1", "gpu0.up rc0.0.up rc0.0.down gpu1.down"),  # no P2P: staged in DRAM
        ("mobius-topo2+2", "gpu0", "gpu3", "gpu0.up rc0.0.up rc0.1.down gpu3.down"),
        ("mobius-v100", "gpu0", "gpu3", "gpu0.nvlink.up gpu3.nvlink.down"),
        ("fuyou-a100", "ssd0.3", "gpu0", "ssd0.3.read rc0.0.down gpu0.down"),
        ("fuyou-a100", "dram0", "ssd0", "ssd0.write"),
        ("mics-p3dn:2", "gpu1", "gpu8", "gpu1.up rc0.0.up nic0.up nic1.down rc1.0.down gpu8.down"),
        ("mics-p3dn:2", "dram1", "dram0", "nic1.up nic0.down"),
        ("mics-p3dn:2", "dram0", "dram0", ""),
    ],
)
def test_paths(name: str, src: str, dst: str, path: str) -> None:
    hardware = Hardware.preset(name)
    assert hardware.path(src, dst) == path.split()
    assert set(hardware.path(src, dst)) <= set(hardware.links())


def test_peer_to_peer_skips_the_root_complex_only_below_the_same_one() -> None:
    hardware = Hardware.preset("mobius-topo2+2", p2p=True)
    assert hardware.path("gpu0", "gpu1") == ["gpu0.up", "gpu1.down"]
    assert hardware.path("gpu0", "gpu2") == ["gpu0.up", "rc0.0.up", "rc0.1.down", "gpu2.down"]


def test_disks_may_share_an_uplink() -> None:
    hardware = Hardware.preset("fuyou-a100", ssd_uplink_bandwidth="16GB/s")
    assert hardware.path("ssd0.1", "dram0") == ["ssd0.1.read", "ssdbus0.up"]
    assert hardware.path("dram0", "ssd0") == ["ssdbus0.down", "ssd0.write"]
    assert hardware.bandwidth("ssd0", "dram0") == 16e9
    assert Hardware.preset("fuyou-a100").bandwidth("ssd0", "dram0") == pytest.approx(0.39 * 12 * 6.5e9)
    assert hardware.links()["ssd0.1.read"].simplex == hardware.links()["ssd0.1.write"].simplex == "ssd0.1"


def duplex(hardware: Hardware, bandwidth: float) -> Hardware:
    """The machine with root complexes whose directions slow each other down."""
    document = hardware.model_dump()
    for host in document["hosts"]:
        host["root_complexes"] = [each | {"bandwidth_both": bandwidth} for each in host["root_complexes"]]
    return Hardware.model_validate(document)


def test_both_directions_of_a_root_complex_share_what_was_measured_together() -> None:
    hardware = duplex(Hardware.preset("rtx4090x2"), 30e9)
    down, up = hardware.path("dram0", "gpu0"), hardware.path("gpu1", "dram0")
    assert down == ["rc0.0.down", "rc0.0.both", "gpu0.down"] and up == ["gpu1.up", "rc0.0.both", "rc0.0.up"]
    alone = hardware.bandwidth("dram0", "gpu0")
    assert alone == Hardware.preset("rtx4090x2").bandwidth("dram0", "gpu0") and 15e9 < alone < 30e9
    assert fair_rates([down], hardware.links()) == pytest.approx([alone])
    assert fair_rates([down, up], hardware.links()) == pytest.approx([15e9, 15e9])
    across = hardware.path("gpu0", "gpu1")  # through DRAM: up and down the same root complex
    assert fair_rates([across], hardware.links()) == pytest.approx([15e9])
    assert slice_of(hardware, [[0], [1]]).hosts[0].root_complexes[0].bandwidth_both == 15e9
    assert faster_links(hardware).hosts[0].root_complexes[0].bandwidth_both == 30e9 * FASTER


@pytest.mark.parametrize("name", ["mobius-topo1+3", "mobius-v100", "fuyou-a100", "mics-p3dn:2", "rtx4090x2-2rc"])
def test_every_path_is_a_walk_in_the_graph(name: str) -> None:
    hardware = Hardware.preset(name, ssd_uplink_bandwidth="20GB/s") if name == "fuyou-a100" else Hardware.preset(name)
    if name == "rtx4090x2-2rc":
        hardware = duplex(hardware, 30e9)
    graph, links = hardware.graph(), hardware.links()
    assert isinstance(graph, nx.MultiDiGraph) and nx.is_strongly_connected(graph)
    for src in hardware.memories():
        for dst in hardware.memories():
            at = src
            for link in hardware.path(src, dst):
                assert links[link].tail == at
                at = links[link].head
            assert at == dst


def test_unknown_memories_are_named() -> None:
    with pytest.raises(HardwareError, match="no memory 'gpu9'; it has gpu0, gpu1, gpu2, gpu3, dram0"):
        Hardware.preset("mobius-topo4").path("dram0", "gpu9")


def test_budgets_and_costs() -> None:
    hardware = Hardware.preset("rtx3090x2", dram="100GB")
    device = hardware.devices[0]
    assert hardware.dram_budget_bytes() == 90_000_000_000
    assert device.reserve is not None and device.reserve.gaps_bytes == 24 * 2**30 // 32
    assert hardware.budget_bytes("gpu1") == device.budget_bytes == 24 * 2**30 - device.reserve.num_bytes
    assert device.compute_s(35.6e12 * 0.85, 1.0) == pytest.approx(1.0, rel=1e-4)  # bound by arithmetic
    assert device.compute_s(1.0, 936e9, "bf16", launches=1000) == pytest.approx(1.008)  # bound by memory
    assert hardware.latency_s("gpu0", "gpu1") == pytest.approx(40e-6)


def test_a_missing_rate_is_an_error_not_a_guess() -> None:
    with pytest.raises(HardwareError, match="gpu0 has no rate for dtype 'bf16'; it has fp32, fp16"):
        Hardware.preset("mobius-v100").devices[0].compute_s(1e9, 1e6, "bf16")


# -- unequal devices, overrides, CPU -----------------------------------------------------------------------------------


def test_unequal_gpus_in_one_host() -> None:
    hardware = Hardware.from_any(two_unequal_cards())
    slow, fast = hardware.devices
    assert fast.compute_s(1e12, 1e6, "fp16") < slow.compute_s(1e12, 1e6, "fp16")
    assert hardware.path("gpu0", "fast")[-1] == "fast.down"
    assert hardware.describe().count("1 x cuda") == 2


def test_overrides_reach_every_part_and_are_noted_in_the_source() -> None:
    base = Hardware.preset("mobius-topo2+2")
    changed = base.with_(dram="4TB", ssds=2, memory="48GB", root_complex_bandwidth="26GB/s", h2d_bandwidth="26GB/s")
    assert changed.hosts[0].dram_bytes == 4 * 10**12
    assert [ssd.size_bytes for ssd in changed.hosts[0].ssds] == [3_840_000_000_000] * 2
    assert {device.memory_bytes for device in changed.devices} == {48_000_000_000}
    assert changed.bandwidth("dram0", "gpu0") == 26e9
    assert "dram='4TB'" in changed.source
    assert base.hosts[0].ssds == []


def test_num_devices_takes_fewer_or_repeats_the_pattern() -> None:
    base = Hardware.preset("mobius-topo2+2")
    assert [device.name for device in base.with_(num_devices=3).devices] == ["gpu0", "gpu1", "gpu2"]
    more = base.with_(num_devices=6)
    assert [(device.name, device.root_complex) for device in more.devices[4:]] == [("gpu4", 0), ("gpu5", 0)]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"dramm": "4TB"}, "cannot override 'dramm'; did you mean 'dram'"),
        ({"dram": "-4TB"}, r"hosts\[0\].dram_bytes: found '-4TB', allowed: greater than 0"),
        ({"num_devices": 0}, "num_devices: found 0, allowed: a whole number from 1 to 4096"),
        ({"num_devices": 1_000_000}, "num_devices: found 1000000"),
        ({"ssds": -1}, "ssds: found -1, allowed: a whole number from 0 to 4096"),
        ({"ssds": "two"}, "ssds: found 'two'"),
        ({"threads": 0.5}, "threads: found 0.5"),
    ],
)
def test_wrong_overrides(overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(HardwareError, match=said):
        Hardware.preset("rtx4090x1", **overrides)


def test_cpu_machines() -> None:
    free = Hardware.cpu(3, memory="10MB", dram="1GB", threads=2)
    assert [device.budget_bytes for device in free.devices] == [10_000_000] * 3
    assert (free.dram_budget_bytes(), free.throttled, free.devices[0].threads) == (10**9, False, 2)
    assert free.path("cpu0", "cpu2") == ["cpu0.nvlink.up", "cpu2.nvlink.down"]
    slow = Hardware.cpu(2, ssd="1GB", h2d="100MB/s", link="50MB/s")
    assert slow.throttled
    assert (slow.bandwidth("dram0", "cpu1"), slow.bandwidth("cpu1", "dram0")) == (1e8, 1e8)
    assert slow.bandwidth("cpu0", "cpu1") == 5e7
    assert "ssd0.0" in slow.memories()


def test_cpu_machines_of_several_hosts() -> None:
    two = Hardware.cpu(5, dram="1GB", ssd="2GB", ssd_dir="/x", hosts=2, network="10MB/s")
    assert [device.host for device in two.devices] == [0, 0, 0, 1, 1]
    assert two.throttled and not Hardware.cpu(2, hosts=2).throttled
    assert (two.bandwidth("cpu0", "cpu1"), two.bandwidth("cpu2", "cpu3"), two.bandwidth("dram0", "dram1")) == (
        2e9, 1e7, 1e7,
    )  # fmt: skip
    assert [two.dram_budget_bytes(host) for host in (0, 1)] == [10**9] * 2
    assert two.ssd_directories(1) == ["/x"]
    for wrong in ({"hosts": 3}, {"hosts": 0}, {"network": "1GB/s"}):
        with pytest.raises(HardwareError, match=r"hosts(=[13]|: found 0)"):
            Hardware.cpu(2, **wrong)


@pytest.mark.parametrize("name", ["num_devices", "threads", "hosts"])
@pytest.mark.parametrize("found", [0, 2.5, "two", True, 1_000_000])
def test_counts_of_cpu_machines_are_whole_numbers(name: str, found: Any) -> None:
    with pytest.raises(HardwareError, match=f"{name}: found {found!r}, allowed: a whole number from 1 to 4096"):
        Hardware.cpu(**{name: found})


def test_a_zero_link_rate_is_refused() -> None:
    with pytest.raises(HardwareError, match="h2d_bandwidth: found 0, allowed: greater than 0"):
        Hardware.cpu(2, h2d=0)


def test_documents_travel_between_processes() -> None:
    hardware = Hardware.preset("fuyou-a100")
    hardware.links()
    assert pickle.loads(pickle.dumps(hardware)) == hardware


# -- what is said about wrong documents --------------------------------------------------------------------------------


def change(document: Any, path: list[Any], value: Any) -> None:
    for key in path[:-1]:
        document = document[key]
    document[path[-1]] = value


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["hosts", 0, "dram_bytes"], -5, r"hosts\[0\].dram_bytes: found -5, allowed: greater than 0"),
        (["hosts", 0, "dram_bytes"], "0GB", r"hosts\[0\].dram_bytes: found '0GB', allowed: greater than 0"),
        (["hosts", 0, "dram_bytes"], "64 gigs", r"dram_bytes: found '64 gigs', allowed: unknown unit 'gigs'"),
        (["hosts", 0, "dram_byte"], 5, r"hosts\[0\].dram_byte: unknown key; did you mean 'dram_bytes'"),
        (["hosts", 0, "ssds", 0, "read"], 5, r"hosts\[0\].ssds\[0\].read: unknown key; did you mean 'read_bandwidth'"),
        (["hosts", 0, "price_dollars"], "inf", "price_dollars: found 'inf', allowed: a finite number"),
        (["device"], [], "device: unknown key; did you mean 'devices'"),
        (["devices"], [], "devices: found \\[\\], allowed: .*at least 1 item"),
        (["devices", 1, "kind"], "tpu", r"devices\[1\].kind: found 'tpu', allowed: 'cuda' or 'cpu'"),
        (["devices", 1, "host"], 3, r"devices\[1\].host: found 3, allowed: 0 to 0"),
        (["devices", 1, "root_complex"], 1, r"devices\[1\].root_complex: found 1, allowed on host 0: 0 to 0"),
        (["devices", 1, "name"], "gpu0", r"devices\[1\].name: 'gpu0' is already the name of devices\[0\]"),
        (["devices", 1, "name"], "dram0", r"devices\[1\].name: 'dram0' is the name of a host's memory"),
        (["devices", 1, "name"], "gpu 0", r"devices\[1\].name: found 'gpu 0'"),
        (["devices", 0, "h2d_bandwidth"], "13GB", r"h2d_bandwidth: found '13GB', allowed: unknown unit 'GB'"),
        (["devices", 0, "usable_fraction"], 1.5, r"usable_fraction: found 1.5, allowed: less than or equal to 1"),
        (["devices", 0, "peak_flops", "fp64"], 1, r"devices\[0\].peak_flops.fp64: found 'fp64', allowed: 'fp32'"),
        (["devices", 0, "link_latency_s"], "-1us", r"link_latency_s: found '-1us', allowed: greater than or equal"),
    ],
)
def test_errors_name_the_key_the_value_and_what_is_allowed(path: list[Any], value: Any, said: str) -> None:
    document = Hardware.preset("rtx4090x2").model_dump()
    change(document, path, value)
    with pytest.raises(HardwareError, match=said):
        Hardware.from_any(document)


def test_missing_keys_and_networks() -> None:
    document = Hardware.preset("mics-p3dn:2").model_dump()
    del document["network"], document["hosts"][1]["cpu_cores"]
    with pytest.raises(HardwareError, match=r"hosts\[1\].cpu_cores: missing"):
        Hardware.from_any(document)
    document["hosts"][1]["cpu_cores"] = 48
    with pytest.raises(HardwareError, match="network: missing for 2 hosts"):
        Hardware.from_any(document)


@pytest.mark.parametrize(
    ("key", "example", "number"), [("dram_bytes", "24GB", 24e9), ("dram_bandwidth", "13.1GB/s", 13.1e9)]
)
def test_a_host_without_figures_of_its_dram_is_told_how_to_write_them(
    key: str, example: str, number: float, tmp_path: Path
) -> None:
    Hardware.preset("rtx4090x1").save(tmp_path / "machine.yaml")
    document = yaml.safe_load((tmp_path / "machine.yaml").read_text())
    del document["hosts"][0][key]
    (tmp_path / "machine.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(HardwareError, match=rf"machine.yaml: hosts\[0\].{key}: missing; write .* such as '{example}'"):
        Hardware.load(tmp_path / "machine.yaml")
    document["hosts"][0][key] = example  # the way out
    (tmp_path / "machine.yaml").write_text(yaml.safe_dump(document))
    assert getattr(Hardware.load(tmp_path / "machine.yaml").hosts[0], key) == number


def test_every_problem_is_listed_at_once() -> None:
    document = Hardware.preset("rtx4090x2").model_dump()
    change(document, ["hosts", 0, "dram_bytes"], -1)
    change(document, ["devices", 0, "memory_bytes"], "much")
    with pytest.raises(HardwareError) as caught:
        Hardware.from_any(document)
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: a\nhosts: [\ndevices: }\n", "malformed YAML, line 3, column 10"),
        ("name: a\nhosts: []\nname: b\n", "malformed YAML, line 3, column 1: the key 'name' is given twice"),
        ("- a\n- b\n", "found a list, allowed: a mapping with the keys name, source, hosts"),
        ("", "found a NoneType"),
        ("name: 3\n", "name: found 3, allowed: a valid string"),
    ],
)
def test_malformed_files_are_named_with_the_place(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(HardwareError, match=rf"(?s)wrong\.yaml.*{said}"):
        Hardware.from_any(path)


def test_a_missing_file_and_a_wrong_type(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match=r"cannot read .*nowhere\.yaml"):
        Hardware.from_any(str(tmp_path / "nowhere.yaml"))
    with pytest.raises(HardwareError, match="found a int, allowed: Hardware, a preset's name, a path, 'auto'"):
        Hardware.from_any(4)  # type: ignore[arg-type]


def test_from_any_takes_presets_and_machines() -> None:
    hardware = Hardware.from_any("rtx4090x1")
    assert Hardware.from_any(hardware) is hardware


def test_a_changed_copy_knows_nothing_of_the_original() -> None:
    hardware = Hardware.cpu(num_devices=2)
    assert hardware.device_kinds[0] == hardware.device_kinds[1]
    other = with_slower(hardware, {1: 2.0})
    assert other.device_kinds[0] != other.device_kinds[1]


def test_different_cards_in_one_machine() -> None:
    mixed, twice = Hardware.preset("4090+3090"), Hardware.preset("rtx4090+rtx3090x2")
    assert [device.memory_bandwidth for device in mixed.devices] == [1.008e12, 0.936e12]
    assert len(twice.devices) == 3 and twice.devices[1].peak_flops == twice.devices[2].peak_flops
    assert mixed.hosts == Hardware.preset("rtx4090x2").hosts
    with pytest.raises(HardwareError, match="no hardware preset"):
        Hardware.preset("rtx4090+h100")


def test_network_cards_that_read_gpu_memory_pass_dram_by_and_wait_for_no_copy() -> None:
    staged, direct = Hardware.preset("mics-p3dn:2"), Hardware.preset("mics-p4d:2")
    first, same, other = (direct.devices[index].name for index in (0, 1, 8))
    assert direct.path(first, other) == [f"{first}.up", "nic0.up", "nic1.down", f"{other}.down"]
    assert direct.latency_s(first, other) == pytest.approx(30e-6)
    assert staged.path(first, other)[1] == "rc0.0.up" and staged.latency_s(first, other) == pytest.approx(70e-6)
    assert direct.path(first, same) == [f"{first}.nvlink.up", f"{same}.nvlink.down"]
    assert direct.path("dram0", "dram1") == ["nic0.up", "nic1.down"]  # from DRAM as ever
    assert direct.latency_s("dram0", other) == pytest.approx(50e-6)
    assert "to and from GPU memory" in str(direct.describe()) and "GPU memory" not in staged.describe()
