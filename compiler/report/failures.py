"""The cost of failures to a run of a plan, and how often it should save: see `runtime/simulate/failures.py`.

A checkpoint has the trained weights, as masters where there are any, and optimizer states, once for all replicas. The
hosts of one copy of the weights have equal parts of it. A save holds steps up while each host brings its part together
in DRAM: over the network where a copy is shared by several hosts, and over its root complexes. It is then written
beside the next steps (docs/checkpoints.md).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ...ir.errors import HardwareError
from ...ir.machine.hardware import Hardware
from ...ir.program import Interface
from ...ir.units import format_bytes, time_text
from ...runtime.simulate.failures import FailingRun, TimeShares, draw_failures
from ..plan import Plan


@dataclass(frozen=True)
class FailureReport:
    """`steps`: the best number of steps between saves; `useful_share`: of the time, in closed form; `shares`: where
    time goes, from drawn failures."""

    run: FailingRun
    checkpoint_bytes: int
    steps: int
    step_s: float
    useful_share: float
    shares: TimeShares

    @property
    def interval_s(self) -> float:
        return self.steps * self.step_s

    def document(self) -> dict[str, Any]:
        """Plain figures, for scripts."""
        return {
            "mtbf_s": self.run.mtbf_s,
            "checkpoint_bytes": self.checkpoint_bytes,
            "save_every_steps": self.steps,
            "interval_s": self.interval_s,
            "useful_share": self.useful_share,
            "drawn": asdict(self.shares),
        }


def with_failures(hardware: Hardware, mtbf: str | None, storage: str | None) -> Hardware:
    """The machine with this mean time between failures of a device, and this rate of writing checkpoints, in place of
    what its document says. Raises `HardwareError` for a rate alone, and where nothing says how fast checkpoints are
    written: before a plan is looked for."""
    if mtbf is None and storage is None:
        if hardware.failures is not None:
            _write_rate(hardware, 1)
        return hardware
    known = hardware.failures.model_dump() if hardware.failures is not None else {}
    said = {"device_mtbf_s": mtbf, "storage_bandwidth": storage}
    if mtbf is None and not known:
        raise HardwareError(
            f"--storage {storage}: it is for failures, of which {hardware.name} says nothing; give --mtbf, too, such "
            "as --mtbf 50000h for a device"
        )
    failing = hardware.with_(failures=known | {name: value for name, value in said.items() if value is not None})
    _write_rate(failing, 1)
    return failing


def failure_text(report: FailureReport) -> str:
    """In one sentence: failures, the best interval, and where the time goes."""
    shares, run = report.shares, report.run
    often = "after every step" if report.steps == 1 else f"every {report.steps:,} steps"
    return (
        f"one in {time_text(run.mtbf_s)}; best is a save {often} ({time_text(report.interval_s)}) "
        f"of {format_bytes(report.checkpoint_bytes)}: {1 - report.useful_share:.1%} of the time is lost ("
        f"{shares.saves:.1%} saves, {shares.lost:.1%} steps made again, {shares.restarts:.1%} restarts)"
    )


def failure_report(plan: Plan, interface: Interface, hardware: Hardware) -> FailureReport | None:
    """None where the document says nothing of failures. Raises `HardwareError` where it does not say how fast
    checkpoints are written."""
    failures = hardware.failures
    if failures is None or plan.predicted is None:
        return None
    lane_hosts = _hosts_of_a_copy(interface, hardware)
    part_bytes = checkpoint_bytes(interface) / lane_hosts
    first, network = hardware.hosts[0], hardware.network
    gather_rate = sum(complex_.bandwidth_up for complex_ in first.root_complexes)
    if lane_hosts > 1 and network is not None:
        gather_rate = min(gather_rate, network.bandwidth_at(part_bytes, lane_hosts))
    write_s = part_bytes / _write_rate(hardware, lane_hosts)
    run = FailingRun(
        failures.mtbf_s(hardware.num_devices, len(hardware.hosts)),
        part_bytes / gather_rate,
        write_s,
        failures.restart_s + write_s,  # what was written is read
    )
    step_s = plan.predicted.step_s
    steps = run.best_steps(step_s)
    shares = draw_failures(run, steps * step_s)
    return FailureReport(run, checkpoint_bytes(interface), steps, step_s, run.useful_share(steps * step_s), shares)


def checkpoint_bytes(interface: Interface) -> int:
    """Bytes of trained weights and optimizer states of all stages."""
    found = 0
    for spec in interface.stages.values():
        trained = [param for param in spec.params if param.requires_grad]
        weights = sum(4 * param.numel if interface.master else param.bytes for param in trained)
        found += weights + interface.state_bytes(spec)
    return found


def _hosts_of_a_copy(interface: Interface, hardware: Hardware) -> int:
    """The number of hosts that have a part of one copy of the weights."""
    lanes = interface.lanes[: interface.shards] or [range(interface.num_devices)]
    return len({hardware.devices[index].host for lane in lanes for index in lane})


def _write_rate(hardware: Hardware, hosts: int) -> float:
    """Bytes/s at which each of `hosts` hosts writes its part of a checkpoint."""
    assert hardware.failures is not None
    storage = hardware.failures.storage_bandwidth
    if storage is not None:
        return storage / hosts
    host = hardware.hosts[0]
    _, rate = host.ssd_bandwidths
    if not rate:
        raise HardwareError(
            "failures.storage_bandwidth: missing, and the hosts have no SSDs; say how fast all hosts together write "
            "checkpoints, such as --storage 100GB/s"
        )
    return rate if host.ssd_uplink_bandwidth is None else min(rate, host.ssd_uplink_bandwidth)
