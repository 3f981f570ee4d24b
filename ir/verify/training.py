"""Rules about what a step must do: which ops it may hold, every micro-batch once, every gradient to its update."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from .. import ops
from ..calls import op_of
from ..program import Interface, Program, StageSpec, micro_batch_of, operands, producer_of, values_of
from .case import Case, fail, line_of, message_key

HOW = {ops.DEVICE: "resident", ops.DRAM: "fetched", ops.SSD: "read"}  # by where a stage persists


def check_legality(case: Case) -> None:
    """A program has only ops that its function may hold; a stage's weights have one home, where it is updated."""
    function = ops.ASYNCHRONOUS if case.is_asynchronous else case.function
    for program in case.programs:
        homes: dict[str, fx.Node] = {}
        for node in program.ops():
            op = op_of(node)
            if function not in op.allowed_in:
                names = ", ".join(sorted(name for name, other in ops.ALL.items() if function in other.allowed_in))
                fail(program, node, f"`{op.name}` is not allowed in `{case.function}`; there are {names}")
            if op.persists_in and isinstance(node.args[0], str):
                stage, _, what = node.args[0].partition(".")
                if what == "states":
                    continue
                home = homes.setdefault(stage, node)
                if home.kwargs.get("group") != node.kwargs.get("group"):
                    fail(program, node, f"{stage} is fetched otherwise in line {line_of(program, home)}")
                if home.target is not op:
                    names = f"{HOW[op_of(home).persists_in]} and {HOW[op.persists_in]}"
                    fail(program, node, f"{stage} is both {names}, first in line {line_of(program, home)}")
            elif op is ops.step:
                _check_update(program, node, homes)
            elif op.takes_kept:
                _check_kept(program, node)
            elif op is ops.backward_weight:
                _check_rest(program, node)


def _check_update(program: Program, node: fx.Node, homes: dict[str, fx.Node]) -> None:
    stage, memory = str(node.args[0]), operands(node)[0].meta["type"].memory
    if stage not in homes:
        fail(program, node, f"{stage} is updated on a device that has none of its weights")
    home = op_of(homes[stage]).persists_in
    stays = home == ops.DEVICE or program.interface.stages[stage].staying
    wanted = ops.DEVICE if stays else ops.DRAM
    spread, found = homes[stage].kwargs.get("group") or "", operands(node)[0].meta["type"].group
    if spread != found:
        names = [f"spread over {group!r}" if group else "whole" for group in (spread, found)]
        fail(program, node, f"{stage} is {names[0]} here, but these gradients are {names[1]}")
    if memory != wanted:
        how = f"{HOW[home]}, but what is trained of it stays" if stays and home != ops.DEVICE else HOW[home]
        fail(program, node, f"{stage} is {how}, so it is stepped in {wanted}, but its gradients are in {memory}")


def _check_kept(program: Program, node: fx.Node) -> None:
    """Tensors that forward kept refer to the weights that it ran on: backward gets these, for the same micro-batch."""
    bound = op_of(node).bind(node.args, node.kwargs)
    kept, weights = bound["kept"], bound["weights"]
    if kept is None:
        return
    forward = producer_of(kept)
    while op_of(forward).passes_on:  # only classes of saved tensors move, which hold nothing of the weights
        forward = producer_of(operands(forward)[0])
    if not kept.meta["type"].classes and not _same(weights, forward.args[1]):
        made = operands(forward)[0].name
        fail(program, node, f"`{kept.name}` was kept by a forward on `{made}`, but backward runs on `{weights.name}`")
    if bound["micro_batch"] != forward.kwargs["micro_batch"]:
        fail(program, node, f"`{kept.name}` is of micro-batch {forward.kwargs['micro_batch']}")


def _same(first: Any, second: Any) -> bool:
    """Whether two values are the same weights of a stage. Weights that were gathered twice are, because tensors that
    autograd saved of them are known by their place in a parameter."""
    return first is second or first.target is second.target is ops.all_gather


def _check_rest(program: Program, node: fx.Node) -> None:
    """The second half of a backward enters the graph of the first, on the same weights."""
    weights, rest = node.args[1:3]
    assert isinstance(rest, fx.Node)
    first = producer_of(rest)
    if not _same(weights, first.args[1]):
        made, own = (operands(half)[0].name for half in (first, node))
        fail(program, node, f"`{rest.name}` is left by a backward on `{made}`, but this half runs on `{own}`")
    if micro_batch_of(node) != micro_batch_of(first):
        fail(program, node, f"`{rest.name}` is of micro-batch {micro_batch_of(first)}")


def check_coverage(case: Case) -> None:
    """Each stage runs each micro-batch once: forward and backward in `step`, else evaluate. It runs all of them on one
    device, or each on one of several devices that a group joins, which can add up its gradients; members of a team run
    all that their team runs."""
    interface = case.programs[0].interface
    numbers = {program.device: interface.number_in_team(program.device) for program in case.programs}
    done: dict[tuple[str, str, int, int], tuple[Program, fx.Node]] = {}
    homes: dict[str, tuple[Program, fx.Node]] = {}
    for program in case.programs:
        for node in program.ops():
            op = op_of(node)
            if not op.parts:
                continue
            stage, micro_batch, number = str(node.args[0]), micro_batch_of(node), numbers[program.device]
            home = homes.setdefault(stage, (program, node))[0]
            if home is not program and program.device not in _reach(interface, stage, home.device, interface.groups):
                fail(program, node, f"{stage} runs on device {home.device} already, and no group joins the two")
            if done.get((ops.FORWARD, stage, micro_batch, number), (program, node))[0] is not program:
                fail(program, node, f"forward of {stage}, micro-batch {micro_batch} runs on another device")
            for part in op.parts:
                if (part, stage, micro_batch, number) in done:
                    first = line_of(*done[part, stage, micro_batch, number])
                    fail(program, node, f"{op.name} of {stage}, micro-batch {micro_batch} is done in line {first}")
                done[part, stage, micro_batch, number] = (program, node)
    for stage, spec in interface.stages.items():
        program = homes.get(stage, (case.programs[0], case.programs[0].batch))[0]
        for part in _operand_names(case.function, spec):
            every = sorted(set(numbers.values()))
            missing = [
                m for m in range(interface.micro_batches) if any((part, stage, m, n) not in done for n in every)
            ]
            if missing:
                whole = all((ops.BACKWARD_INPUT, stage, m, every[0]) not in done for m in missing)
                name = "backward" if whole and part.startswith("backward") else part
                message = f"no {name} of {stage} for micro-batch {', '.join(map(str, missing))}"
                fail(program, _last_op(program), message)


def _operand_names(function: str, spec: StageSpec) -> tuple[str, ...]:
    if function == "evaluate":
        return ops.evaluate.parts
    return (*ops.forward.parts, *(ops.backward.parts if _has_gradients(spec) else ()))


def _reach(interface: Interface, stage: str, first: int, groups: Collection[str]) -> set[int]:
    """The devices that these groups join with `first`, maybe in several hops, as far as they hold the whole stage."""
    whole = [{d for d, s, param in interface.groups[name] if s in ("", stage) and not param} for name in groups]
    reached, before = {first}, set[int]()
    while reached != before:
        before = set(reached)
        for devices in whole:
            reached |= devices if devices & reached else set()
    return reached


def _has_gradients(spec: StageSpec) -> bool:
    return spec.trained_params > 0 or any(value.requires_grad for value in spec.inputs)


def _last_op(program: Program) -> fx.Node:
    nodes = (node for node in reversed(program.graph.nodes) if node.op == "output" or isinstance(node.target, ops.Op))
    return next(nodes, program.batch)


def check_micro_batches(case: Case) -> None:
    """No op mixes values of different micro-batches, also over messages."""
    owners = {node: program for program in case.programs for node in program.ops()}
    sent = {message_key(p, n): operands(n)[0] for n, p in owners.items() if n.target is ops.send}

    def trace_micro_batch(value: fx.Node) -> int:
        producer = producer_of(value)
        while op_of(producer).passes_on:
            received = producer.target is ops.recv
            value = sent[message_key(owners[producer], producer)] if received else operands(producer)[0]
            producer = producer_of(value)
        return micro_batch_of(producer)

    for node, program in owners.items():
        op = op_of(node)
        kinds = [(value, value.meta["type"]) for value in operands(node)]
        tensors = [value for value, kind in kinds if kind.kind == "tensor" and kind.owned]  # a number is of all
        if not op.parts and node.target is not ops.add and not (op.passes_on and len(tensors) > 1):
            continue
        if not tensors:  # an op on gradients, which are summed over micro-batches
            continue
        own = micro_batch_of(node) if op.parts else trace_micro_batch(tensors[0])
        for value in tensors:
            other = trace_micro_batch(value)
            if other != own:
                fail(program, node, f"`{value.name}` is of micro-batch {other}, the op is of micro-batch {own}")


@dataclass(frozen=True)
class _Sum:
    """The content of a value of gradients: a stage's micro-batches, the groups that it was summed over, and whether the
    user's gradient hooks have run on it."""

    stage: str
    micro_batches: frozenset[int] = frozenset()
    groups: frozenset[str] = frozenset()
    hooked: bool = False


def check_gradients(case: Case) -> None:
    """On each device that runs a trained stage, its gradients reach one update, or the result, summed over all
    micro-batches, over its ties and over all devices that run it."""
    if case.function != "step" or case.is_asynchronous:
        return
    interface = case.programs[0].interface
    updates: dict[str, list[tuple[Program, fx.Node, _Sum]]] = {}
    returned: dict[str, list[tuple[Program, fx.Node, _Sum]]] = {}
    backwards: dict[str, dict[int, set[int]]] = {}  # stage -> device -> micro-batches
    for program in case.programs:
        sums: dict[fx.Node, _Sum] = {}
        for node in program.ops():
            if op_of(node).gives_gradients:
                devices = backwards.setdefault(str(node.args[0]), {})
                devices.setdefault(program.device, set()).add(micro_batch_of(node))
            if node.target is ops.step:
                updates.setdefault(str(node.args[0]), []).append((program, node, sums[operands(node)[0]]))
            else:
                _follow(program, node, sums)
        for values in program.results().values():
            for value in values:
                if value in sums:
                    returned.setdefault(sums[value].stage, []).append((program, _last_op(program), sums[value]))
    for stage, spec in interface.stages.items():
        if spec.trained_params == 0:
            continue
        ends = updates.get(stage) or returned.get(stage, [])
        homes = backwards.get(stage, {})
        for device in homes or (0,):
            own = [end for end in ends if end[0].device == device]
            if len(own) != 1:
                place = own[1] if own else (case.programs[device], _last_op(case.programs[device]))
                fail(place[0], place[1], f"the gradients of {stage} reach {len(own)} updates; one is needed")
            _check_sum(*own[0], homes.get(device, set()), _tied_groups(interface, spec, device))
        if stage in updates:  # gradients that are returned may still be added up
            _check_devices(ends, interface, set(homes))


def _follow(program: Program, node: fx.Node, sums: dict[fx.Node, _Sum]) -> None:
    """Note what the gradients hold that an op produces: each micro-batch once, summed once over each group."""
    made = [value for value in values_of(node) if value.meta["type"].kind == "grads"]
    given = [value for value in operands(node) if value in sums]
    _check_hooks(program, node, [sums[value] for value in given])
    if not made:
        return
    if op_of(node).gives_gradients:
        own = _Sum(str(node.args[0]), frozenset({micro_batch_of(node)}))
        sums[made[0]] = _both(program, node, sums[given[0]], own) if given else own
        return
    group = {str(node.kwargs["group"])} if op_of(node).meets == ops.GROUP else set()
    if group:
        for source in given:
            _check_turns(program, node, sums[source], min(group))
    found = []
    for source in given:
        before = sums[source]
        # The total to which a scattered sum is added was scattered before.
        added = node.target is ops.reduce_scatter and source is not node.args[0]
        if group & before.groups and not added:
            fail(program, node, f"the gradients of {before.stage} were summed over {min(group)!r} before")
        before = before if added else replace(before, groups=before.groups | group)
        found.append(replace(before, hooked=before.hooked or node.target is ops.hook))
    if len(found) > len(made):
        found = [_both(program, node, *found)]
    sums.update(zip(made, found))


def _check_turns(program: Program, node: fx.Node, before: _Sum, group: str) -> None:
    """Devices that run a stage in turn add up its gradients before a parameter that it shares with other stages is
    added up, to which only the first of them adds (`Interface.adding`)."""
    interface = program.interface
    sharers = {d for d, stage, param in interface.groups.get(group, ()) if stage == before.stage and param}
    rest = sharers - _reach(interface, before.stage, program.device, before.groups & interface.groups.keys())
    if rest:
        names = ", ".join(map(str, sorted(rest)))
        fail(program, node, f"the gradients of {before.stage} were not summed with those of device {names} before")


def _check_hooks(program: Program, node: fx.Node, given: list[_Sum]) -> None:
    """Gradient hooks run once, on complete gradients, before anything looks at these."""
    adds = op_of(node).gives_gradients or op_of(node).meets == ops.GROUP or node.target in (ops.add, ops.hook)
    for before in given:
        if before.hooked and adds:
            what = "run twice" if node.target is ops.hook else "have run before all gradients are added up"
            fail(program, node, f"the gradient hooks of {before.stage} {what}")
        if node.target is ops.norm and not before.hooked and program.interface.stages[before.stage].has_hooks:
            fail(program, node, f"the gradient hooks of {before.stage} have not run on these gradients")


def _both(program: Program, node: fx.Node, first: _Sum, second: _Sum) -> _Sum:
    """Two sums of gradients, added."""
    twice = first.micro_batches & second.micro_batches
    if twice:
        fail(program, node, f"the gradients of {first.stage} already hold micro-batch {min(twice)}")
    if first.groups != second.groups:
        names = [" and ".join(sorted(part.groups)) or "no group" for part in (first, second)]
        fail(
            program, node, f"gradients of {first.stage} summed over {names[0]} are added to such summed over {names[1]}"
        )
    return replace(first, micro_batches=first.micro_batches | second.micro_batches)


def _tied_groups(interface: Interface, spec: StageSpec, device: int) -> set[str]:
    """The groups in which a device adds up parameters that the stage shares with others."""
    trained = {param.name for param in spec.params if param.requires_grad}
    rows = [(name, member) for name, members in interface.groups.items() for member in members]
    return {name for name, (d, stage, param) in rows if d == device and stage == spec.name and param in trained}


def _check_sum(program: Program, node: fx.Node, found: _Sum, micro_batches: set[int], groups: set[str]) -> None:
    if node.target is ops.step and program.interface.stages[found.stage].has_hooks and not found.hooked:
        fail(program, node, f"the gradient hooks of {found.stage} have not run on these gradients")
    missing = sorted(micro_batches - found.micro_batches)
    if missing:
        fail(program, node, f"the gradients of {found.stage} lack micro-batch {', '.join(map(str, missing))}")
    if groups - found.groups:
        names = ", ".join(sorted(groups - found.groups))
        fail(program, node, f"the gradients of {found.stage} hold a tied parameter and were not summed over {names}")


def _check_devices(ends: list[tuple[Program, fx.Node, _Sum]], interface: Interface, homes: set[int]) -> None:
    """The groups that the gradients of a stage went through join all its devices, and all lanes."""
    program, node, found = ends[0]
    groups = {name for end in ends for name in end[2].groups}
    for group in ops.MESH_GROUPS if interface.lanes else ():
        if interface.size(group) > 1 and group not in groups:
            fail(program, node, f"the gradients of {found.stage} were not summed over the {group} of other lanes")
    in_team = ops.TEAM in groups
    if interface.lanes and interface.sums_in_team and interface.stages[found.stage].common_grad_bytes and not in_team:
        what = f"the gradients of {found.stage}, of which members of a team have different tokens,"
        fail(program, node, f"{what} were not summed over the {ops.TEAM}")
    reached = _reach(interface, found.stage, program.device, groups & interface.groups.keys())
    if homes - reached:
        names = ", ".join(map(str, sorted(homes - reached)))
        fail(program, node, f"the gradients of {found.stage} were not summed with those of device {names}")
