"""Random numbers by place: every draw in a forward begins with a seed of its own.

The seed is a hash of the run's seed, the step, the micro-batch, the draw's place in the user's model and its number
there. A place is the dotted path of the module in whose forward the draw is; numbers count the draws at a place in the
order of the whole model. No decision of a plan is in it: whatever the partition, devices, schedule and memory, a
micro-batch gets the same masks, in its rematerialisation too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache

import torch

from ...ir.errors import VerifyError
from ..accelerator import generator_of
from ..modules import Stage, draw_from, draw_numbers


@lru_cache(4096)
def micro_batch_seed(seed: int, step: int, micro_batch: int) -> int:
    """The seed of a micro-batch of one step, counted in the whole batch."""
    return _hash(f"{seed}/{step}/{micro_batch}")


def evaluation_seed(seed: int, step: int, evaluation: int, micro_batch: int) -> int:
    """The seed of a micro-batch of an evaluation, by its number since the last step."""
    return _hash(f"{seed}/{step}/evaluation {evaluation}/{micro_batch}")


def draw_seed(seed: int, place: str, number: int) -> int:
    """The seed of one draw of the micro-batch that has the seed `seed`."""
    return _hash(f"{seed}/{place}/{number}")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generators_of(device: torch.device) -> list[torch.Generator]:
    """The generators that a forward on the device may draw from: the CPU's, and that of the GPU."""
    own = generator_of(device)
    return [torch.default_generator, *([] if own is torch.default_generator else [own])]


class Draws:
    """Seeds torch's global generators before each draw of one stage, and leaves them as they were after its run."""

    def __init__(self, name: str, module: torch.nn.Module, device: torch.device):
        self.name, self.generators = name, generators_of(device)
        self._numbers: Mapping[str, Sequence[int]] = {}
        self._must_say = isinstance(module, Stage)  # a module that no stage's class made may draw as it likes
        if isinstance(module, Stage):
            self._numbers = draw_numbers(module)
            draw_from(module, self)
        self._seed = 0
        self._counts: dict[str, int] = {}
        self._draws_nothing = False  # a checked run has drawn nothing, and no other will: a stage has no branches

    @property
    def may_draw(self) -> bool:
        """Whether the next run may draw, as the first one shows."""
        return not self._draws_nothing

    def seed_draws(self, seed: int, check: bool = False) -> AbstractContextManager[None]:
        """For one run of the stage on the micro-batch of this seed.

        `check` raises `VerifyError` if the run draws and no line of the stage says where.
        """
        return nullcontext() if self._draws_nothing else self._seed_draws(seed, check)

    @contextmanager
    def _seed_draws(self, seed: int, check: bool) -> Iterator[None]:
        self._seed, self._counts = seed, {}
        before = [generator.get_state() for generator in self.generators]
        for generator in self.generators:
            generator.manual_seed(seed)
        begun = [generator.get_state() for generator in self.generators] if check and self._must_say else []
        try:
            yield
            if begun and not self._counts:
                self._check(begun)
                self._draws_nothing = True
        finally:
            for generator, state in zip(self.generators, before):
                generator.set_state(state)

    def begin(self, place: str) -> int:
        """Seed the generators for the next draw at this place. Returns its number."""
        count = self._counts.get(place, 0)
        self._counts[place] = count + 1
        numbers = self._numbers.get(place)
        number = count if numbers is None else numbers[count]
        self.start(self._seed, place, number)
        return number

    def start(self, seed: int, place: str, number: int) -> None:
        """Seed the generators for one draw of the micro-batch of this seed."""
        seed = draw_seed(seed, place, number)
        for generator in self.generators:
            generator.manual_seed(seed)

    def take_back(self, place: str) -> None:
        """Undo the last beginning at this place: it did not draw."""
        self._counts[place] -= 1

    def _check(self, begun: Sequence[torch.Tensor]) -> None:
        if not all(torch.equal(g.get_state(), state) for g, state in zip(self.generators, begun)):
            raise VerifyError(
                f"{self.name} draws random numbers and does not say where, so they would depend on the partition: put "
                '`draw_at(self, "path.of.the.module")` before each line that draws, or compile the model anew'
            )
