"""Fair shares against their definition and against filling the links drop by drop."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.ir.machine.links import Link
from penstock.runtime.simulate.sharing import Cost, TasksUnderWay, Traffic, alone_s, fair_rates

NAMES = ("a", "b", "c", "d", "read", "write")


def make_links(bandwidths: list[float]) -> dict[str, Link]:
    """Six links; the last two take turns on one medium."""
    rows = zip(NAMES, bandwidths)
    return {n: Link(n, "x", "y", bw, 0.0, simplex="disk" if n in ("read", "write") else None) for n, bw in rows}


links_of = st.lists(st.integers(1, 20).map(float), min_size=6, max_size=6).map(make_links)
path_of = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True).map(tuple)
flows_of = st.lists(st.tuples(path_of, st.integers(0, 1)), min_size=1, max_size=8)


def use_of(resource: str, paths: list, rates: list[float], links: dict[str, Link]) -> float:
    """Part of a resource that is taken."""
    return sum(
        rate / links[name].bandwidth
        for path, rate in zip(paths, rates)
        for name in path
        if (links[name].simplex or name) == resource
    )


def resources_of(path: tuple[str, ...], links: dict[str, Link]) -> set[str]:
    return {links[name].simplex or name for name in path}


def fill_drop_by_drop(paths: list, links: dict[str, Link], smallest: float = 1e-6) -> list[float]:
    """Give every flow the same drop, in smaller ones as something fills up, until one of its resources is full."""
    rates, open_flows = [0.0] * len(paths), set(range(len(paths)))
    drop = largest = max(link.bandwidth for link in links.values())
    while open_flows:
        more = [rate + drop * (i in open_flows) for i, rate in enumerate(rates)]
        full = {r for path in paths for r in resources_of(path, links) if use_of(r, paths, more, links) > 1.0}
        if not full:
            rates = more
        elif drop > smallest:
            drop /= 2
        else:
            open_flows -= {i for i in open_flows if full & resources_of(paths[i], links)}
            drop = largest
    return rates


def test_examples_worked_out_by_hand() -> None:
    links = make_links([10.0, 4.0, 6.0, 1.0, 8.0, 8.0])
    assert fair_rates([("a",)], links) == [10.0]
    assert fair_rates([("a",), ("a", "b"), ("a", "b")], links) == pytest.approx([6.0, 2.0, 2.0])
    assert fair_rates([("a", "d"), ("a",)], links) == pytest.approx([1.0, 9.0])
    assert fair_rates([("read",), ("write",)], links) == pytest.approx([4.0, 4.0])
    assert fair_rates([()], links) == [math.inf]
    assert fair_rates([("a",), ("b",)], links, counts=[2, 4]) == pytest.approx([5.0, 1.0])


def test_a_lower_class_gets_what_is_left_and_nothing_when_nothing_is() -> None:
    links = make_links([10.0, 4.0, 6.0, 1.0, 8.0, 8.0])
    assert fair_rates([("a",), ("a", "b")], links, [1, 0]) == pytest.approx([6.0, 4.0])
    assert fair_rates([("a",), ("a",)], links, [1, 0]) == [0.0, 10.0]


@settings(max_examples=25, deadline=None)
@given(links_of, st.lists(path_of, min_size=1, max_size=5))
@example(make_links([1, 1, 1, 1, 19, 1]), [("read",), ("a", "write")])
def test_equal_to_filling_the_links_drop_by_drop(links: dict[str, Link], paths: list) -> None:
    assert fair_rates(paths, links) == pytest.approx(fill_drop_by_drop(paths, links), abs=1e-3)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(links_of, flows_of)
def test_saturating_and_max_min_fair_in_every_class(links: dict[str, Link], flows: list) -> None:
    paths, classes = [path for path, _ in flows], [priority for _, priority in flows]
    rates = fair_rates(paths, links, classes)
    for resource in {r for path in paths for r in resources_of(path, links)}:
        assert use_of(resource, paths, rates, links) <= 1.0 + 1e-6
    for i, path in enumerate(paths):
        above = [j for j in range(len(paths)) if classes[j] <= classes[i]]
        full = [
            resource
            for resource in resources_of(path, links)
            if use_of(resource, [paths[j] for j in above], [rates[j] for j in above], links) > 1.0 - 1e-6
        ]
        same = [j for j in above if classes[j] == classes[i]]
        users = [[j for j in same if resource in resources_of(paths[j], links)] for resource in full]
        assert any(all(rates[j] <= rates[i] + 1e-6 for j in use) for use in users), "no bottleneck of its own"


@settings(max_examples=100, deadline=None)
@given(links_of, st.lists(st.tuples(st.booleans(), path_of, st.integers(0, 1)), max_size=20))
def test_changing_one_flow_at_a_time_gives_the_rates_of_solving_anew(links: dict[str, Link], changes: list) -> None:
    traffic = Traffic(links)
    for number, (starts, path, priority) in enumerate(changes):
        running = [group for group in traffic.classes.values() if group.flows]
        if starts or not running:
            traffic.start(traffic.class_of(path, priority), number, 10.0, float(number))
        else:
            traffic.end(running[number % len(running)], float(number))
        running = [group for group in traffic.classes.values() if group.flows]
        anew = fair_rates(
            [group.path for group in running],
            links,
            [group.priority for group in running],
            [len(group.flows) for group in running],
        )
        assert [group.rate for group in running] == pytest.approx(anew)


def test_a_flow_is_held_up_exactly_as_long_as_it_shares() -> None:
    links = make_links([10.0, 10.0, 10.0, 10.0, 10.0, 10.0])
    traffic = Traffic(links)
    short, long = traffic.class_of(("a",), 0), traffic.class_of(("a", "b"), 0)
    traffic.start(long, 1, 100.0, 0.0)
    assert long.next_end_s() == pytest.approx(10.0)
    traffic.start(short, 2, 10.0, 2.0)  # both at 5 bytes/s for 2 s
    assert short.next_end_s() == pytest.approx(4.0)
    assert traffic.end(short, 4.0)[0] == 2
    assert long.next_end_s() == pytest.approx(11.0)


def test_the_parts_of_a_cost_come_one_behind_the_other() -> None:
    links = make_links([10.0, 20.0])
    last = Cost(0.5, ((("b",), 20.0),))
    cost = Cost(1.0, ((("a",), 10.0), (("b",), 10.0)), then=Cost(0.25, then=last))
    assert alone_s(cost, links) == pytest.approx(1.0 + 1.0 + 0.25 + 0.5 + 1.0)
    progress = TasksUnderWay(links)
    progress.begin(7, cost, 2.0)
    ends = []
    while progress.events:
        now_s, over = progress.pop()
        ends += [(now_s, over)] if over is not None else []
    assert ends == [(pytest.approx(2.0 + 1.0 + 1.0 + 0.25 + 0.5 + 1.0), 7)]
    assert [part.fixed_s for part in cost.parts()] == [1.0, 0.25, 0.5]
    assert progress.moved == {("a",): 10.0, ("b",): 30.0}
