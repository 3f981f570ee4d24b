"""Stages of a draft on real weights and inputs, for tests that run them one by one."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.graph.stages import PlannedStage
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import StageSpec
from penstock.passes.draft import Draft
from penstock.runtime.stage.runner import StageRunner
from penstock.tests.passes.running import all_passes, apply, draft_of, generate_stages

CPU = torch.device("cpu")


class Peak(TorchDispatchMode):
    """The most bytes of new tensors that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given | self.known:
                storage = tensor.untyped_storage()
                self.known.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.live)
        return out

    def forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


class Interpreted(nn.Module):
    """A stage's graph, run node by node: every value dies with its last use, as costs assume."""

    def __init__(self, stage: PlannedStage):
        super().__init__()
        made = copy.deepcopy(stage.graph)
        self._modules, self._parameters, self._buffers = made._modules, made._parameters, made._buffers
        self.graph = stage.graph.graph

    def forward(self, *inputs: Tensor) -> Any:
        return _InItsMode(self, graph=self.graph).run(*inputs)


class _InItsMode(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not n.meta.get("no_grad", False)):
            return super().run_node(n)


def stages_of(
    draft: Draft, batch: dict[str, Tensor], precision: str = "fp32", interpreted: bool = False, warm: bool = True
) -> Iterator[tuple[StageSpec, Any, Any]]:
    """Per stage its spec, a runner on real weights, and its real inputs. Without `warm`, no stage runs, so there are no
    inputs."""
    held = {**draft.graph.parameters(), **draft.graph.buffers(), **draft.graph.constants}
    values = dict(batch)
    kinds = {} if interpreted else generate_stages(draft)
    for stage in draft.stages:
        spec = stage.spec
        with torch.device("meta"):
            module = Interpreted(stage) if interpreted else kinds[spec.name]()
        runner = StageRunner(spec, module, CPU, precision)
        runner.load_buffers(held)
        runner.bind({p.name: held[p.name].detach().to(getattr(torch, p.dtype)) for p in spec.params})
        if not warm:
            yield spec, runner, []
            continue
        inputs = [values[i.name].contiguous() for i in spec.inputs]  # as they come from elsewhere
        yield spec, runner, inputs
        values.update(zip((o.name for o in spec.outputs), runner.forward(inputs, 0, keep=False)[0]))


def one_device(graph: Any, stages: int) -> Draft:
    """All stages on one device, in their order."""
    draft = draft_of(graph, Hardware.cpu(num_devices=1))
    return apply(draft, *all_passes(stages)[:4])


def assert_close(predicted: int, real: int, where: str) -> None:
    assert 0.97 * real - 256 <= predicted <= 1.12 * real + 256, (where, predicted, real)
