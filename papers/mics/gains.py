"""The gain of each part of MiCS: bandwidth, bytes, groups, hierarchical gathers, two hops, WideResNet (2.3, 3.3, 5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ...ir import ops
from ...ir.program import work_of
from ..figures import Bars, Curves
from ..report import Finding
from ..rule import INFINITE
from ..table import AT_LEAST_ONE, ELSEWHERE, FigureTable
from .experiments import FleetRun, Mics
from .programs import (
    DEEPSPEED,
    FLAT,
    GPUS,
    MICS,
    NO_REMAT,
    ONE_HOP,
    RIVALS,
    V100,
    ZERO3,
    collective_s,
    effective,
    hardware,
    with_factors,
)  # fmt: skip
from .scale import CALLS, EACH_CALL, WHY_ZERO3, add_largest, gains, why

MB = 1e6
FIG2_HOSTS, FIG2_SIZES = (1, 2, 4, 8, 16, 32), (16 * MB, 64 * MB, 128 * MB, 256 * MB, 1024 * MB)
LARGE = 1024 * MB


def members(hosts: int) -> range:
    return range(GPUS * hosts)


def fig2(paper: Mics) -> Finding:
    """Figure 2: the effective bandwidth of gathers."""
    table, curves = FigureTable(), {}
    for size in FIG2_SIZES:
        rates = [effective(hardware(V100, hosts), members(hosts), size) / 1e9 for hosts in FIG2_HOSTS]
        curves[f"{size / MB:.0f} MB"] = list(zip(FIG2_HOSTS[1:], rates[1:]))
    inside = effective(hardware(V100, 1), members(1), LARGE) / 1e9
    across = effective(hardware(V100, 8), members(8), LARGE) / 1e9
    table.add("1 host, 1 GB", "effective bandwidth", inside, " GB/s", 1, 128.0, "the NVLink of the preset")
    table.add("64 GPUs, 1 GB", "effective bandwidth", across, " GB/s", 1, 11.0, "the network of the preset")
    table.ratio("64 GPUs", "in a host / over 8 hosts", inside, across, 11.6, "", apart="128 / 11 GB/s")
    found = []
    for size in (16 * MB, 128 * MB):
        four, many = (effective(hardware(V100, hosts), members(hosts), size) / 1e9 for hosts in (4, 32))
        table.ratio(f"{size / MB:.0f} MB", "4 hosts / 32 hosts", four, many, (2.7, 4.9), "", apart=ELSEWHERE)
        found.append(four / many)
    why = "the paper does not say for which sizes; 32 MB and 128 MB were fitted"
    table.ends("16 and 128 MB", "4 hosts / 32 hosts", found, (2.7, 4.9), "x", why=why)
    return Finding(
        "fig2",
        "effective bandwidth of all-gather on p3dn (sections 2.3, 3.2)",
        "about 128 GB/s inside a host and 11 GB/s over 64 GPUs; 128 MB do not saturate 16 and 32 hosts; groups of 4 "
        "hosts gather 2.7 to 4.9 times as fast as 32 hosts.",
        "bytes that a member gets from others over the time of one gather that has the network to itself.",
        table,
        charts=[Curves("fig2", "Effective bandwidth of a gather, p3dn", "hosts of 8", "GB/s", curves, points=True)],
    )


def gathers(paper: Mics) -> Finding:
    """Section 2.3: how long a forward's gathers take."""
    table, hosts = FigureTable(), max(paper.hosts)
    run, where = paper.run(paper.usual, DEEPSPEED, hosts, 0), f"{paper.usual}, {GPUS * hosts} GPUs"
    if run is None:
        table.add(where, "gathers / computation of a forward", None)
    else:
        moved_s, computed_s = run.forward_s
        why = (
            f"{1e3 * moved_s:.0f} and {1e3 * computed_s:.0f} ms a micro-batch; the paper does not say on how many GPUs"
        )
        table.ratio(where, "gathers / computation of a forward", moved_s, computed_s, 2.85, why=why)
    return Finding(
        "gathers",
        "how long ZeRO-3's gathers take (section 2.3)",
        "gathering parameters can take 2.85 times as long as the computation of a forward, for BERT 10B.",
        "simulated seconds of all gathers, and of all computation, before the first backward of DeepSpeed's step, on "
        "the largest of figure 7's machines.",
        table,
    )


def traffic(paper: Mics) -> Finding:
    """Section 3.3: the bytes between hosts."""
    table = FigureTable()
    for model, hosts in ((paper.two_hosts, 4), (paper.usual, paper.grouped)):
        shards = paper.models[model].shards if model == paper.two_hosts else GPUS * paper.grouped
        moved = {}
        for form in (MICS, FLAT):
            if run := paper.run(model, form, hosts, shards):
                moved[form] = run.timeline.moved_bytes["nic0.up"]
            else:
                table.add(model, f"{form.name}, bytes between hosts", None)
        if len(moved) < 2:
            continue
        whole = _gathered_bytes(paper, model, hosts, shards)
        in_theory = (shards - 1) / shards - (shards - GPUS) / shards
        what = "bytes a GPU spares between hosts by hierarchical gathers / bytes gathered"
        spared = (moved[FLAT] - moved[MICS]) / (whole / GPUS)
        where, follows = f"{model}, groups of {shards}", "the bytes of gathers, an identity"
        table.add(where, what, spared, digits=3, claim=in_theory, apart=follows)
    return Finding(
        "traffic",
        "bytes between hosts (section 3.3)",
        "gathers over p GPUs on hosts of k move (p-k)M/p between hosts in a hierarchy, and (p-1)M/p in a ring.",
        "simulated bytes through a host's network card, of which a GPU's lane has 1/8; M: the weights of each gather.",
        table,
    )


def _gathered_bytes(paper: Mics, model: str, hosts: int, shards: int) -> float:
    """The bytes of whole weights that a GPU gathers in the simulated step."""
    (program,) = paper.programs(model, MICS, hosts, shards) or []
    return sum(work_of(program, node).moved_bytes for node in program.ops() if node.target is ops.all_gather)


def fig11c(paper: Mics) -> Finding:
    """Figure 11c: WideResNet."""
    table = FigureTable()
    mics, theirs, own = (
        paper.swept(paper.image, form, paper.hosts, shards=shards) for form, shards in zip(NO_REMAT, (None, 0, 0))
    )
    for hosts in paper.hosts:
        where = f"{paper.image}, {GPUS * hosts} GPUs"
        if not all(hosts in runs for runs in (mics, theirs, own)):
            table.add(where, "MiCS / DeepSpeed", None)
            continue
        rates = [runs[hosts].rows_s for runs in (mics, theirs, own)]
        table.ratio(where, "MiCS / DeepSpeed", rates[0], rates[1], said="{:.1f} / {:.1f} images/s")
        table.ratio(where, f"MiCS / {ZERO3.name}", rates[0], rates[2], said="")
    if mics and theirs:
        add_largest(table, paper.image, mics, theirs, own, 2.89)
    return Finding(
        "fig11c",
        "WideResNet with 3B parameters (section 5.1.4)",
        "up to 2.89x DeepSpeed ZeRO-3, fp32, no recomputation, 8 images a GPU.",
        "200 convolutions, width 8, blocks [6, 8, 46, 6], one micro-batch a step; normalisations are frozen.",
        table,
        WHY_ZERO3,
    )


def fig12(paper: Mics) -> Finding:
    """Figure 12: the size of the groups."""
    table, where = FigureTable(), f"{paper.usual}, {GPUS * paper.grouped} GPUs"
    bars: dict[str, list[float | None]] = {MICS.name: [], FLAT.name: []}
    for shards in paper.groups:
        for form in (MICS, FLAT):
            run = paper.run(paper.usual, form, paper.grouped, shards)
            bars[form.name].append(run.rows_s if run else None)
            table.add(f"{where}, groups of {shards}", f"{form.name}, rows/s", bars[form.name][-1], digits=1)
    first, last = (paper.groups.index(end(paper.groups)) for end in (min, max))
    for form, found in zip((MICS, FLAT), bars.values()):
        what = f"{form.name}: groups of {paper.groups[first]} / groups of {paper.groups[last]}"
        one, most = (paper.run(paper.usual, form, paper.grouped, end(paper.groups)) for end in (min, max))
        why = (
            f"in groups of {paper.groups[first]} a GPU {one.said}, of {paper.groups[last]} {most.said}"
            if one and most
            else ""
        )
        table.ratio(where, what, found[first], found[last], 1.6, "", why=why, apart=ELSEWHERE if form is MICS else "")
    title, names = f"{paper.usual} on {GPUS * paper.grouped} V100", [str(shards) for shards in paper.groups]
    chart = Bars("fig12", title, "rows/s", names, bars, xlabel="GPUs in a group")
    return Finding(
        "fig12",
        "size of the partition group",
        "groups of 8 have 1.6x the throughput of groups of 64, which is ZeRO-3.",
        "rows a second, with hierarchical gathers and with plain ones, which are the same inside a host. Judged are "
        "plain ones, as the paper calls groups of 64 ZeRO-3, which has no others (5.2.1, 5.3).",
        table,
        charts=[chart],
    )


def fig13(paper: Mics) -> Finding:
    """Figure 13: the gain of hierarchical gathers."""
    table, two, shares = FigureTable(), hardware(V100, 2), []
    measured = {128 * MB: 72.1}
    for size in paper.sizes:
        plain, stages = (collective_s(two, members(2), size, hierarchical=way) for way in (False, True))
        shares.append(100 * stages / plain)
        where = f"2 hosts, {size / MB:.0f} MB"
        why = f"{1e3 * stages:.1f} and {1e3 * plain:.1f} ms: between 2 hosts of 8 a hierarchy moves 8/15 of the bytes"
        checks = {
            f"{share:.0%} of the network's rate in the hierarchy": partial(_share_of_plain, size, share, plain)
            for share in (0.75, 0.5)
        }
        table.add(where, "hierarchical / plain gather", shares[-1], "%", 1, measured.get(size), why, checks=checks)
    flat = partial(Mics.run, model=paper.two_hosts, form=FLAT)
    due_with, due_without = (
        partial(Mics.run, model=paper.two_hosts, form=replace(form, shard=f"{form.shard}, prefetch=0"))
        for form in (MICS, FLAT)
    )
    mics = partial(Mics.run, model=paper.two_hosts, form=MICS)
    changed: dict[str, Gain] = {
        "a network at half its rate": (paper.on(bandwidth=0.5), mics, flat),
        "gathers when they are due": (paper, due_with, due_without),
    }
    what = "gain of hierarchical gathers"
    _add_parts_gain(table, paper.two_hosts, (paper, mics, flat), what, (30.6, 38.0), changed)
    bars: dict[str, Sequence[float | None]] = {"ours": shares, "paper": [measured.get(size) for size in paper.sizes]}
    names = [f"{size / MB:.0f} MB" for size in paper.sizes]
    return Finding(
        "fig13",
        "hierarchical gathers",
        "72.1% of the plain gather's time at 128 MB over 2 hosts; 30.6% to 38% more throughput for BERT 15B.",
        "one gather alone; then whole steps with groups of 16, with and without.",
        table,
        "a hierarchy moves 8/15 of the bytes between 2 hosts, so that 72.1% of the time leaves the paper's 8 rings of "
        "2 hosts at three quarters of its plain ring's rate; ours share a network card at its full rate. A gain of "
        "30.6% to 38% is nearly the 1 / 72.1% of the gather alone: the paper's steps wait for gathers with a "
        "hierarchy, too, ours only without one.",
        charts=[Bars("fig13", "Hierarchical over plain gather, 2 hosts", "% of the time", names, bars)],
    )


def _share_of_plain(size: float, share: float, plain_s: float) -> float:
    slow = with_factors(hardware(V100, 2), bandwidth=share)
    return 100 * collective_s(slow, members(2), size, hierarchical=True) / plain_s


Runner = Callable[..., FleetRun | None]  # of experiments, with `hosts`
Gain = tuple[Mics, Runner, Runner]  # experiments, and a run with and without a part of MiCS


def _add_parts_gain(
    table: FigureTable, model: str, gain: Gain, what: str, claim: tuple[float, float], changed: Mapping[str, Gain]
) -> None:
    """Add the percentage of throughput that a part of MiCS gains: by the number of hosts, and the ends of the range.
    `changed`: the same with what the reason names changed."""
    pairs = _pairs(*gain)
    for hosts in gain[0].hosts:
        more = _percent(*pairs[hosts]) if hosts in pairs else None
        table.add(f"{model}, {GPUS * hosts} GPUs", what, more, "%", 1, claim, apart=ELSEWHERE)
    if pairs:
        reason = why(*pairs[max(pairs)], "without it a GPU")
        checks = {change: partial(_percents, *other) for change, other in changed.items()}
        table.ends(model, what, _percents(*gain), claim, "%", 1, reason, checks)


def _pairs(paper: Mics, with_it: Runner, without: Runner) -> dict[int, tuple[FleetRun, FleetRun]]:
    """By hosts the runs with and without a part, where both fit."""
    found = {hosts: (with_it(paper, hosts=hosts), without(paper, hosts=hosts)) for hosts in paper.hosts}
    return {hosts: (one, other) for hosts, (one, other) in found.items() if one and other}


def _percent(one: FleetRun, other: FleetRun) -> float:
    return 100 * (one.rows_s / other.rows_s - 1)


def _percents(paper: Mics, with_it: Runner, without: Runner) -> list[float]:
    return [_percent(*pair) for pair in _pairs(paper, with_it, without).values()]


def fig14(paper: Mics) -> Finding:
    """Figure 14: the gain of sums in two hops."""
    table = FigureTable()
    mics = partial(Mics.run, model=paper.usual, form=MICS)
    changed: dict[str, Gain] = {
        "a network at 90% of its rate": (paper.on(bandwidth=0.9), mics, _one_ring),
        "sums of the same pieces between hosts": (paper, mics, partial(Mics.run, model=paper.usual, form=ONE_HOP)),
    }
    _add_parts_gain(table, paper.usual, (paper, mics, _one_ring), "gain of sums in two hops", (11.0, 24.9), changed)
    hosts = max(paper.hosts)
    table.add(
        f"one GPU on each of {hosts} hosts, 4 micro-batches", "communication spared by two hops (section 3.4)",
        min(_sum_saving(hosts, shards) for shards in (2, 4, 8) if shards < hosts), "%", 0, (25, INFINITE),
        "the paper's bound leaves out latencies",
    )  # fmt: skip
    return Finding(
        "fig14",
        "sums of gradients in two hops",
        "11% to 24.9% more throughput for BERT 10B in groups of 8, most at 128 GPUs.",
        "against the same program that adds up over all GPUs with every micro-batch, in one ring as section 3.4 has "
        "it: 2M(n-1)/n bytes between hosts in 2(n-1) rounds. It is simulated as sums of pieces between hosts, which "
        "are all that its network carries, with the bytes and rounds of the ring. 25%: collectives alone.",
        table,
        "sums over the groups run beside the backward of the layers before and are hidden as far as the network keeps "
        "up.",
    )


def _one_ring(paper: Mics, hosts: int) -> FleetRun | None:
    """Sums of whole gradients over all GPUs with every micro-batch, in one ring."""
    gpus, shards = GPUS * hosts, paper.models[paper.usual].shards
    rounds = (gpus - 1) / (gpus // shards - 1)
    factors = {"bandwidth": (gpus - shards) / (gpus - 1), "latency": rounds}
    both = {name: factor * paper.changes.get(name, 1.0) for name, factor in factors.items()}
    return paper.on(**both).run(paper.usual, ONE_HOP, hosts)


def _sum_saving(hosts: int, shards: int, steps: int = 4) -> float:
    """The percent of the time of its sums that two hops spare where all bandwidths are equal, as section 3.4 counts
    them: an all-reduce over all with every micro-batch, against a scatter over the group with every micro-batch and one
    all-reduce of the shards over the groups."""
    machine, every = hardware(V100, hosts), range(0, GPUS * hosts, GPUS)
    plain_s = steps * collective_s(machine, every, LARGE, times=2)
    scattered_s = steps * collective_s(machine, every[:shards], LARGE)
    return 100 * (1 - (scattered_s + collective_s(machine, every[::shards], LARGE / shards, times=2)) / plain_s)


def fig15(paper: Mics) -> Finding:
    """Figure 15: ZeRO-3 as MiCS implements it."""
    table, model = FigureTable(), paper.usual
    mics, theirs, own = (paper.swept(model, form, paper.hosts, shards=shards) for form, shards in RIVALS)
    for hosts, gain in gains(own, theirs).items():
        claim, what = 54.1 if hosts == max(paper.hosts) else None, f"{ZERO3.name} / DeepSpeed"
        reason = f"{ZERO3.name} {own[hosts].said}, DeepSpeed {theirs[hosts].said}"
        checks = {
            EACH_CALL: partial(_more_than_deepspeed, paper, hosts, latency=CALLS),
            "a network at 90% of its rate under DeepSpeed": partial(_more_than_deepspeed, paper, hosts, bandwidth=0.9),
        }
        where, more = f"{model}, {GPUS * hosts} GPUs", 100 * (gain - 1)
        table.add(where, what, more, "% more", 1, claim, reason, checks=checks)
    for hosts, gain in gains(mics, own).items():
        reason = why(mics[hosts], own[hosts], ZERO3.name)
        table.add(f"{model}, {GPUS * hosts} GPUs", f"MiCS / {ZERO3.name}", gain, "x", 2, AT_LEAST_ONE, reason)
    return Finding(
        "fig15",
        "ZeRO-3 as MiCS implements it",
        "54.1% more throughput than DeepSpeed's ZeRO-3 on 128 GPUs; MiCS with small groups significantly more still.",
        "ZeRO-3 that gathers two layers ahead against one that gathers each when it is due.",
        table,
        WHY_ZERO3,
    )


def _more_than_deepspeed(paper: Mics, hosts: int, **changes: float) -> float | None:
    """The percent by which ZeRO-3 that gathers ahead is faster than DeepSpeed on a changed network."""
    own = paper.run(paper.usual, ZERO3, hosts, 0)
    theirs = paper.on(**changes).run(paper.usual, DEEPSPEED, hosts, 0)
    return 100 * (own.rows_s / theirs.rows_s - 1) if own and theirs else None
