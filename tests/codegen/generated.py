"""Models cut into stages, printed, loaded back and run by hand, for tests of generated files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.codegen.file import Header, write_directory, write_file
from penstock.compiler.capture.trace import trace
from penstock.graph.layers import layer_runs, make_blocks
from penstock.graph.opgraph import OpGraph
from penstock.graph.stages import PlannedStage, build_stages
from penstock.ir.program import Interface, Program
from penstock.runtime.device.file import INTERFACE_FILE, DeviceFile, open_directory
from penstock.runtime.source.trust import Trust

HEADER = Header(model="a model", hardware="a machine")


@dataclass
class Generated:
    """All stages of a model in the file of one device."""

    graph: OpGraph
    stages: list[PlannedStage]
    interface: Interface
    text: str

    def load(self, folder: Path, trust: Trust | None = None) -> DeviceFile:
        write_directory(folder, {0: self.text}, {INTERFACE_FILE: self.interface.to_json()})
        return open_directory(folder, trust=trust)[0]


def generate(model: nn.Module, batch: Any, num_stages: int = 1) -> Generated:
    """Trace, cut the blocks evenly, print."""
    graph = trace(model, batch)
    blocks = make_blocks(graph, layer_runs(graph))
    names = [block.name for block in blocks]
    cuts = [len(names) * i // num_stages for i in range(num_stages + 1)]
    stages = build_stages(graph, blocks, [names[a:b] for a, b in pairwise(cuts)])
    interface = Interface({s.spec.name: s.spec for s in stages}, {})
    text = write_file(empty_program(interface), None, {s.spec.name: s.graph for s in stages}, HEADER)
    return Generated(graph, stages, interface, text)


def empty_program(interface: Interface) -> Program:
    program = Program(0, interface)
    program.returns({})
    return program


def run(generated: Generated, file: DeviceFile, batch: Mapping[str, Tensor], training: bool) -> dict[str, Tensor]:
    """All results by name, computed by the generated stages on the model's own parameters and buffers."""
    values: dict[str, Tensor] = dict(batch)
    for stage in generated.stages:
        module = file.build(stage.spec.name).train(training)
        bind(module, generated.graph)
        results = module(*(values[i.name] for i in stage.spec.inputs))
        assert type(results) is tuple
        values |= dict(zip((o.name for o in (*stage.spec.outputs, *stage.spec.extra_outputs)), results, strict=True))
    loss = generated.stages[-1].spec.loss
    assert loss is not None
    return values | {"loss": values[loss]}


def bind(module: nn.Module, graph: OpGraph) -> None:
    """Let a generated module use the user's own tensors; a tie made in the file must be a tie of the model."""
    tensors = {**graph.parameters(), **graph.buffers(), **graph.constants}
    homes: dict[int, Tensor] = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, made in named:
        owner, _, last = name.rpartition(".")
        held = module.get_submodule(owner)
        assert homes.setdefault(id(made), tensors[name]) is tensors[name]
        assert made.requires_grad == tensors[name].requires_grad, name
        members = held._parameters if last in held._parameters else held._buffers
        members[last] = tensors[name]  # type: ignore[index]


def eager(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    result = model(**batch)
    return result["loss"] if isinstance(result, dict) else result.loss


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def equal(left: Mapping[str, Tensor | None], right: Mapping[str, Tensor | None]) -> list[str]:
    """The names whose tensors are not bit for bit equal."""
    differ = []
    for name in left.keys() | right.keys():
        a, b = left.get(name), right.get(name)
        if (a is None) != (b is None) or (a is not None and b is not None and not torch.equal(a, b)):
            differ.append(name)
    return differ


def differences(model: nn.Module, generated: Generated, file: DeviceFile, batch: Any) -> list[str]:
    """The names of the loss and the gradients that a training step of the file has other than the model's own."""
    outcomes = []
    for is_generated in (False, True):
        model.zero_grad(set_to_none=True)
        loss = run(generated, file, batch, True)["loss"] if is_generated else eager(model, batch)
        loss.backward()
        outcomes.append({"loss": loss.detach(), **gradients(model)})
    return equal(*outcomes)
