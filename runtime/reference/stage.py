"""A stage of the reference runtime: what persists of it on one device, from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...ir.errors import PlanError
from ...ir.precision import Precision
from ...ir.program import StageSpec, TeamPart, aligned
from ..optimizer.gradients import Grads
from ..optimizer.hooks import change_params
from ..optimizer.stage_optimizer import OptimizerSpec, StageOptimizer
from ..stage.runner import StageRunner
from ..stage.shards import piece_of, rounding_of
from ..state.part_params import member_part

CPU_DEVICE = torch.device("cpu")
FULL = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # the dtype in which a parameter is updated


class ReferenceStage:
    """The lasting state of one stage on one device: its module, the parameters in full precision, and their optimizer.

    `piece` is the (index, count) of the shard that the device keeps of every parameter; None keeps them whole.
    """

    def __init__(
        self, spec: StageSpec, module: nn.Module, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor],
        optimizer: OptimizerSpec | None, precision: str, piece: tuple[int, int] | None = None,
        rounds: bool = False, member: int = 0,
    ):  # fmt: skip
        self.spec = spec
        self.runner = StageRunner(spec, module, CPU_DEVICE, precision)
        self.runner.load_buffers({name: buffers[name] for name in self.runner.buffers() if name in buffers})
        has_masters = not Precision.of(precision).is_pure
        self.masters: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}  # in the dtype of the computation; the masters themselves if that is full
        divided = {param.name: param for param in spec.params if isinstance(param.part, TeamPart)}
        for name, param in self.runner.parameters.items():
            whole = divided[name].whole_name if name in divided else name
            if whole not in weights:
                raise PlanError(f"{spec.name} needs a weight {whole!r}, for which there is no value")
            dtype = FULL.get(param.dtype, param.dtype) if has_masters else param.dtype
            given = member_part(weights[whole], divided[name], member) if name in divided else weights[name]
            full = given.detach().to(dtype, copy=True).contiguous()
            full = full if piece is None else piece_of(full, *piece)
            self.masters[name] = full
            self.weights[name] = full if full.dtype == param.dtype else full.to(param.dtype)
        trained = {name: self.masters[name] for name, p in self.runner.parameters.items() if p.requires_grad}
        index, count = piece or (0, 1)
        firsts = {param.name: index * -(-param.numel // count) for param in spec.params}
        self.rounds, rounding = rounds, rounding_of(spec, firsts) if rounds else None
        self.optimizer = None if optimizer is None else StageOptimizer(optimizer, trained, rounding=rounding)
        self.draw: tuple[int, ...] = ()  # what the roundings of the last update belong to: seed, step, its number in it
        self.updates: dict[tuple[int, str], int] = {}  # by step and part of the gradients
        self.grads: dict[str, Tensor] = {}
        self.before: Any = None  # a snapshot, taken by a speculative step

    def copy_weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Copies of these parameters in one flat buffer, each aligned."""
        flat = torch.empty(sum(aligned(self.weights[name].nbytes) for name in names), dtype=torch.uint8)
        copies, offset = {}, 0
        for name in names:
            weight = self.weights[name]
            place = flat[offset : offset + weight.nbytes].view(weight.dtype).view(weight.shape)
            copies[name] = place.copy_(weight)
            offset += aligned(weight.nbytes)
        return copies

    def begin_update(self, seed: int, step: int, part: str) -> None:
        number = self.updates.get((step, part), 0)
        self.updates = {key: count for key, count in self.updates.items() if key[0] == step} | {
            (step, part): number + 1
        }
        self.draw = seed, step, number

    def restore(self) -> None:
        """Restore the state before the last speculative step."""
        assert self.optimizer is not None and self.before is not None
        self.optimizer.restore(self.before)
        self._follow()

    def step(self, grads: Grads) -> None:
        change_params(self.spec.params, self.masters)
        kinds = {name: master.dtype for name, master in self.masters.items()}
        kinds = {name: FULL.get(kind, kind) for name, kind in kinds.items()} if self.rounds else kinds
        self.grads = {name: g.to(kinds[name], copy=True) for name, g in grads.to_full().items()}
        if self.optimizer is not None:
            self.optimizer.step(self.grads, part=grads.part, draw=self.draw)
            self._follow()

    def _follow(self) -> None:
        for name, weight in self.weights.items():
            if weight is not self.masters[name]:
                weight.copy_(self.masters[name])
