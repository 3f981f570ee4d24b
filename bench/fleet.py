"""Four gloo processes on two hosts with a slow link between them: Penstock's sharded plans against FSDP2.

The hosts are network namespaces, the link a pair of virtual Ethernet devices held to a rate each way (`hosts.py`; needs
root on Linux). Both sides train the same unmodified model under torchrun, two ranks a host, one thread a rank, with the
same micro-batches; losses of every step are compared. What each host sends to the other in a step is counted by the
kernel, and compared with the theory (`peers/fleet_theory.py`): MiCS 3.3's (p-k)M/p against (p-1)M/p, and two hops
against one in every micro-batch. Then a step's time, turn by turn, against the fastest settings of FSDP2.

Run: python bench/fleet.py [--rate-mbit 400] [--rounds 8] [--tied]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

import penstock
from penstock.bench.hosts import TwoHosts, two_hosts
from penstock.bench.peers import fsdp_fleet, models, penstock_fleet, rows
from penstock.bench.peers.fleet_theory import EXCHANGE, HIERARCHICAL, RING, Fleet
from penstock.bench.peers.ranks import Ranks
from penstock.bench.peers.timing import alternate
from penstock.ir import ops
from penstock.ir.program import work_of

TARGET_TIME, TARGET_BYTES = 1.0, 1.02
LOSS_LIMIT = 1e-4  # relative, between the sides
FLEET = {"hosts": 2, "per_host": 2}
PORTS = {"penstock": 29611, "fsdp2": 29612}
RANKS = 4
Sides = dict[str, Callable[[], dict[str, Any]]]

STAGED = "partition-balanced{stages=10}, map-round-robin, schedule-pipeline, insert-remat"
PEER = "fsdp2, "
AUTO = "penstock, its own choice"
TWO_HOP = "penstock, 2 shards x 2 replicas"
ALWAYS = "penstock, 2 shards x 2 replicas, summed in every micro-batch"
FLAT = "penstock, 4 shards, flat"
BY_HOST = "penstock, 4 shards, by host"
STRATEGIES = {
    AUTO: "auto",
    TWO_HOP: f"coarsen, mesh{{shards=2}}, {STAGED}, insert-shard, insert-two-hop, insert-optimizer",
    ALWAYS: f"coarsen, mesh{{shards=2}}, {STAGED}, insert-shard, insert-two-hop{{every=micro-batch}}, insert-optimizer",
    FLAT: f"coarsen, mesh{{shards=4}}, {STAGED}, insert-shard{{hierarchical=false}}, insert-two-hop{{every=auto}}, "
    "insert-optimizer",
    BY_HOST: f"coarsen, mesh{{shards=4}}, {STAGED}, insert-shard, insert-two-hop{{every=auto}}, insert-optimizer",
}
COLLECTIVES: dict[Any, str] = {ops.all_gather: "gathered", ops.reduce_scatter: "scattered", ops.all_reduce: "summed"}
# Settings of FSDP2 and their numbers of gathers and scatters of the whole model in a step with s micro-batches a rank.
FSDP: dict[str, Callable[[int], tuple[int, int]]] = {
    fsdp_fleet.KINDS[0]: lambda s: (2 * s, s),
    fsdp_fleet.KINDS[1]: lambda s: (2 * s, 1),
    fsdp_fleet.KINDS[2]: lambda s: (1, 1),
    fsdp_fleet.KINDS[3]: lambda s: (1, 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate-mbit", type=float, default=400.0, help="of the link, each way")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=8, help="of the global batch, on four ranks")
    parser.add_argument("--tied", action="store_true", help="one table for embedding and head")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rate_bytes_s = args.rate_mbit * 1e6 / 8
    settings: dict[str, Any] = {
        "layers": 8, "width": 256, "vocabulary": models.VOCABULARY, "batch": 16, "lr": 1e-4, "tied": args.tied,
        "micro_batches": args.micro_batches,
    }  # fmt: skip
    facts = {
        "model": f"gpt2 8 x 256 {'tied' if args.tied else 'untied'}, vocabulary 8192, sequence 128, batch 16",
        "micro_batches": args.micro_batches, "ranks": "2 hosts x 2", "link_mbit_s": args.rate_mbit,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, two_hosts(rate_bytes_s) as hosts, ExitStack() as stack:
        jobs = plan_for(settings, rate_bytes_s, Path(folder))
        sides = start(stack, hosts, settings, Path(folder), list(jobs))
        theory = theories(jobs, settings)
        found = count(sides, theory)
        for name, row in found.items():
            rows.save("fleet", {"figure": "bytes", **facts, "side": name, **row, "target": TARGET_BYTES})
        time_of(sides, jobs, args.rounds, facts, rate_bytes_s)


def machine(rate_bytes_s: float) -> penstock.Hardware:
    """This machine described as two hosts, with its cores shared by four processes."""
    here = penstock.Hardware.detect(measure=True).model_dump(mode="python")
    share = len(here["devices"]) / RANKS
    own = here["devices"][0]
    peak_flops = {dtype: share * flops for dtype, flops in own["peak_flops"].items()}
    scaled = {"peak_flops": peak_flops, "memory_bytes": int(share * own["memory_bytes"])}
    host = {**here["hosts"][0], "ssds": []}
    for name in ("dram_bytes", "optimizer_params_per_s"):
        host[name] = type(host[name])(host[name] / FLEET["hosts"])
    host["cpu_cores"] = max(1, host["cpu_cores"] // FLEET["hosts"])
    return penstock.Hardware.model_validate(
        {
            **here, "name": "two-hosts", "hosts": [host] * FLEET["hosts"],
            "devices": [{**own, **scaled, "name": f"cpu{i}", "host": i // FLEET["per_host"]} for i in range(RANKS)],
            "network": {"bandwidth": rate_bytes_s, "latency_s": 100e-6},
        }
    )  # fmt: skip


def plan_for(settings: dict[str, Any], rate_bytes_s: float, folder: Path) -> dict[str, penstock.Job]:
    """Make every plan once, and save it for the ranks."""
    settings["hardware"], settings["plans"] = str(folder / "hardware.yaml"), {}
    machine(rate_bytes_s).save(settings["hardware"])
    jobs = {name: penstock_fleet.compile_job(settings, strategy=text) for name, text in STRATEGIES.items()}
    for number, (name, job) in enumerate(jobs.items()):
        settings["plans"][name] = str(folder / f"plan{number}.json")
        job.plan.save(settings["plans"][name])
    return jobs


def start(
    stack: ExitStack, hosts: TwoHosts, settings: Mapping[str, Any], folder: Path, plans: list[str]
) -> Sides:  # fmt: skip
    """For each side, a function that trains one step on all its ranks."""
    here = Path(penstock_fleet.__file__).parent
    ours = stack.enter_context(Ranks(hosts, here / "penstock_fleet.py", settings, PORTS["penstock"]))
    peers = {**settings, "sides": fsdp_fleet.SIDES}
    theirs = stack.enter_context(Ranks(hosts, here / "fsdp_fleet.py", peers, PORTS["fsdp2"]))
    found: Sides = {name: partial(ours.run, name) for name in plans}
    return found | {PEER + name: partial(theirs.run, name) for name in fsdp_fleet.SIDES}


def theories(jobs: Mapping[str, penstock.Job], settings: Mapping[str, Any]) -> dict[str, tuple[float, str]]:
    """For each side, the bytes that a host sends in a step by theory, and a text that explains them."""
    model = models.gpt2(settings["layers"], settings["width"], settings["tied"], settings["vocabulary"])
    weights = sum(param.numel() * param.element_size() for param in model.parameters())
    found = {name: bytes_of_programs(job) for name, job in jobs.items()}
    share = settings["micro_batches"] // RANKS
    for shape, kind in ((shape, kind) for shape in (fsdp_fleet.FULL, fsdp_fleet.HSDP) for kind in FSDP):
        shards = RANKS if shape == fsdp_fleet.FULL else FLEET["per_host"]
        gathers, scatters = FSDP[kind](share)
        sums = int(shards < RANKS)
        text = f"{gathers} gathers, {scatters} scatters, {sums} sums of {weights / 1e6:.2f} MB"
        found[PEER + shape + kind] = Fleet(**FLEET, model_bytes=weights).step(shards, gathers, scatters, sums), text
    return found


def bytes_of_programs(job: penstock.Job) -> tuple[float, str]:
    """The bytes that a host's lanes send for a plan's collectives, by the formulas from each op's bytes."""
    parts: dict[str, list[float]] = {}
    for program in job.programs:
        for node in program.ops():
            if node.target in COLLECTIVES and node.kwargs["group"] in ops.MESH_GROUPS:
                work = work_of(program, node)
                part = parts.setdefault(COLLECTIVES[node.target] + " by host" * work.hierarchical, [0.0, 0.0])
                part[0] += sent_by(node.target, work, job.folder.interface.shards)
                part[1] += work.moved_bytes
    if job.folder.interface.num_devices > FLEET["per_host"] or not parts:
        return 0.0, "messages between stages, see the plan"
    text = ", ".join(f"{sent / 1e6:.2f} MB of {whole / 1e6:.2f} {what}" for what, (sent, whole) in parts.items())
    return sum(sent for sent, _ in parts.values()), text


def sent_by(op: Any, work: ops.Work, shards: int) -> float:
    """The bytes that one host sends for a collective of all groups at once."""
    fleet = Fleet(**FLEET, model_bytes=work.moved_bytes)
    if op is ops.all_gather:
        return fleet.gather(shards, HIERARCHICAL if work.hierarchical else RING)
    if op is ops.reduce_scatter:
        return fleet.scatter(shards, HIERARCHICAL if work.hierarchical else EXCHANGE)
    return shards * fleet.sum_replicas(shards)  # the op sums one piece, and a stage has one piece for each shard


def count(sides: Sides, theory: Mapping[str, tuple[float, str]]) -> dict[str, dict[str, Any]]:
    """Run two steps of each side; a row has the losses and the second step's bytes. Raises RuntimeError if losses
    differ."""
    found = {}
    for name, run in sides.items():
        steps = [run() for _ in range(2)]
        sent, (num_bytes, text) = max(steps[-1]["sent_bytes"]), theory[name]
        ratio = sent / num_bytes if num_bytes else None
        found[name] = {
            "sent_bytes": sent, "theory_bytes": num_bytes, "ratio": ratio, "theory": text,
            "losses": [step["loss"] for step in steps],
        }  # fmt: skip
    wanted = next(row["losses"] for name, row in found.items() if name.startswith(PEER))
    for name, row in found.items():
        if any(abs(a - b) > LOSS_LIMIT * abs(b) for a, b in zip(row["losses"], wanted)):
            raise RuntimeError(f"{name}: losses are {row['losses']}, those of FSDP2 {wanted}")
    return found


def time_of(
    sides: Sides, jobs: Mapping[str, penstock.Job], rounds: int, facts: Mapping[str, Any], rate_bytes_s: float
) -> None:  # fmt: skip
    """Time the fastest settings of FSDP2 and our plans, one after another in each round."""
    quick = {name: min(run()["took_s"] for _ in range(2)) for name, run in sides.items() if name.startswith(PEER)}
    best = {
        shape: min((name for name in quick if name.startswith(PEER + shape)), key=quick.__getitem__)
        for shape in (fsdp_fleet.FULL, fsdp_fleet.HSDP)
    }
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in [*jobs, *best.values()]}
    alternate({name: partial(keep, sides[name], steps[name]) for name in steps}, rounds)
    steps = {name: kept[-rounds:] for name, kept in steps.items()}
    times_s = {name: [step["took_s"] for step in kept] for name, kept in steps.items()}
    for name, job in jobs.items():
        predicted = job.plan.predicted
        own, link_s = times_s[name], [max(step["sent_bytes"]) / rate_bytes_s for step in steps[name]]
        rows.save(
            "fleet",
            {
                "figure": "time", **facts, "side": name, "target": TARGET_TIME,
                "ratios": {peer: ratios(own, times_s[peer]) for peer in best.values()},
                "times": {side: rows.spread(times_s[side]) for side in (name, *best.values())},
                "cpu_s": {side: median_of(steps[side], "cpu_s") for side in (name, *best.values())},
                "passes": job.plan.passes, "predicted_s": predicted.step_s if predicted else None,
                "share_of_link": statistics.median(busy_s / took_s for busy_s, took_s in zip(link_s, own)),
            },
        )  # fmt: skip


def ratios(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """The ratios of the medians and of the fastest steps, and the median ratio over rounds, which the load of other
    processes disturbs least."""
    return {
        "of_medians": statistics.median(ours) / statistics.median(theirs), "of_fastest": min(ours) / min(theirs),
        "of_pairs": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
    }  # fmt: skip


def median_of(steps: list[dict[str, Any]], key: str) -> float:
    return statistics.median(step[key] for step in steps)


def keep(run: Callable[[], dict[str, Any]], into: list[dict[str, Any]]) -> None:
    into.append(run())


if __name__ == "__main__":
    main()
