"""The order in which the host of a GPU issues its ops: where it has to wait, and which ops come only after that.

One thread issues all ops of a device, in text order. Ops of the GPU's streams wait for each other on the GPU, but what
a thread of the host does (an update in DRAM, a disk, a sum in host memory) is known to the host alone: before the issue
of an op that needs it, the host waits until it is over. It also waits for a norm before the update that may be skipped
because of it. An op after such a place in the text, a send for instance, waits with it. So does another
device that receives it, and a plan is free of deadlock only if what the host waits for never comes from there.

This is proved for one step, and holds for steps one right after another. Between two steps a host waits for results of
the step that it has issued, and for the end of earlier ones; its ops wait for those of their own step as in one step
alone, and for ops of earlier steps. So nothing waits for a later step, and a ring of waits would be within one step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import fx

from .. import ops
from ..calls import op_of
from .order import Order, Task
from .program import Program, operands, producer_of, takes_turns, values_of

ALWAYS_THREADS = (ops.CPU, ops.READ, ops.WRITE)  # the streams that are threads of a GPU's host


def add_host_waits(order: Order, programs: Sequence[Program], on_gpu: Collection[int]) -> None:
    """Let the ops of devices that are GPUs wait for their hosts, too. Where fetches have turns, a thread of the host
    waits for these."""
    in_dram = {
        work.group for work in order.work_of.values() if work.group and ops.DRAM in (work.source, work.target)
    }  # one such member, and all meet in host memory
    hosts = [_Host(program, order, in_dram) for program in programs if program.device in on_gpu]
    looks = [look for host in hosts if (look := host.look_at_losses()) is not None]
    for host in hosts:
        host.connect(looks)


def losses_of(program: Program) -> set[fx.Node]:
    """The losses that a program returns; of a sum of a team's parts the parts, as an update does not wait for it."""
    losses = set(program.results().get("loss", ()))
    return losses.union(*(node.all_input_nodes for node in losses if node.target is ops.sum_parts))


def judging_op(program: Program) -> fx.Node | None:
    """The op after which the host of a GPU looks at the losses of a step: the first backward after the last of them,
    which keeps the GPU at work meanwhile. None where the device computes no loss."""
    nodes, losses = list(program.ops()), losses_of(program)
    last = max((i for i, node in enumerate(nodes) if _makes(node, losses)), default=len(nodes))
    return next((node for node in nodes[last:] if node.target in (ops.backward, ops.backward_input)), None)


def _makes(node: fx.Node, losses: Collection[fx.Node]) -> bool:
    return node.target is ops.forward and any(value in losses for value in values_of(node))


class _Host:
    def __init__(self, program: Program, order: Order, in_dram: Collection[str]):
        self.program, self.order, self.in_dram = program, order, in_dram
        self.judging = None if program.interface.asynchronous else judging_op(program)
        self.look: int | None = None  # the task in which the host looks at the losses
        self.nodes = {order.task_of[node]: node for node in program.ops()}
        reads = any(order.work_of[node].stream == ops.READ for node in self.nodes.values())
        self.threads = (*ALWAYS_THREADS, ops.H2D) if reads or takes_turns(program) else ALWAYS_THREADS

    def look_at_losses(self) -> int | None:
        """Add the task in which the host looks at the losses of its device."""
        if self.judging is not None:
            losses = losses_of(self.program)
            needs = [index for index, node in self.nodes.items() if _makes(node, losses)]
            self.look = self._pause(self.judging, needs, "its host looks at the loss")
        return self.look

    def _pause(self, node: fx.Node, needs: Sequence[int], why: str) -> int:
        work = self.order.work_of[node]
        self.order.tasks.append(Task([(self.program.device, node, work)], [(index, why) for index in needs]))
        return len(self.order.tasks) - 1

    def connect(self, looks: Sequence[int]) -> None:
        """Add the host's waits. `looks`: the tasks in which hosts look at losses."""
        last: int | None = None  # the task at whose end the host goes on
        for index, node in self.nodes.items():
            if not op_of(node).streams:
                continue
            needs = {self.order.task_of[producer_of(value)] for value in _asked_for(node)}
            verdict = set(looks if node.target is ops.step else ())
            if not self._has_thread(node):
                needs |= {other for other in self._predecessors(index) if self._has_thread(self.nodes[other])} | verdict
            else:
                self.order.tasks[index].waits += [(look, "it needs the verdict on the losses") for look in verdict]
            if needs:
                pause = self._pause(node, sorted(needs), "its host goes on when this is over")
                if last is not None:
                    self.order.tasks[pause].waits.append((last, "its host waits at an earlier op"))
                last = pause
            if last is not None:
                self.order.tasks[index].waits.append((last, "its host issues it after that"))
            if node is self.judging and self.look is not None:
                if last is not None:
                    self.order.tasks[self.look].waits.append((last, "its host waits at an earlier op"))
                last = self.look

    def _has_thread(self, node: fx.Node) -> bool:
        work = self.order.work_of[node]
        return work.stream in self.threads or work.group in self.in_dram

    def _predecessors(self, index: int) -> Iterator[int]:
        """The ops of this device that an op waits for; a `free` takes no time and passes on its waits."""
        for other, _ in self.order.tasks[index].waits:
            node = self.nodes.get(other)
            if node is None:
                continue
            if op_of(node).streams:
                yield other
            else:
                yield from self._predecessors(other)


def _asked_for(node: fx.Node) -> list[fx.Node]:
    """The values that the host itself reads when it issues an op."""
    if node.target is not ops.step:
        return []
    norm = ops.step.bind(node.args, node.kwargs)["norm"]
    return [value for value in operands(node) if value is norm]
