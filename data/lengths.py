"""Rows that are longer than the most: cut, left out, or refused, and what is said of them."""

from __future__ import annotations

from dataclasses import dataclass

from ..compiler.packing.documents import IGNORED
from ..ir.errors import PlanError
from .encode import Example
from .spec import LongRows


@dataclass
class Lengths:
    """Counts the rows over `limit` tokens, and does with them what `wish` says. `targets`: the limit of labels of
    their own, which an encoder-decoder has. `keep_last`: a row that is cut keeps its last token, a tokenizer's mark."""

    limit: int
    wish: LongRows
    targets: int | None = None
    keep_last: bool = False
    num_rows: int = 0
    num_long: int = 0
    num_cut_tokens: int = 0
    num_unlearned: int = 0  # left out, as no label was left
    longest: int = 0
    longest_at: str = ""

    def fit(self, example: Example, where: str) -> Example | None:
        """The example within the limit, or None for one that is left out."""
        self.num_rows += 1
        limits = {name: self.limit for name, value in example.items() if isinstance(value, list)}
        if "labels" in limits and self.targets is not None:
            limits["labels"] = self.targets
        over = max(len(example[name]) - limit for name, limit in limits.items())
        if over > 0:
            self.num_long += 1
            longest = max(len(example[name]) for name, limit in limits.items() if len(example[name]) > limit)
            if longest > self.longest:
                self.longest, self.longest_at = longest, where
            if self.wish != "truncate":
                return None
            if len(limits) < len(example):
                raise PlanError(
                    f"{where}: has {longest} tokens with those of its images, which are not cut; give --sequence "
                    f"{longest} or more, --long-rows drop, or smaller images (--image-size)"
                )
            for name, value in example.items():
                if not name.endswith("labels"):
                    self.num_cut_tokens += max(0, len(value) - limits[name])
            example = {name: self._cut(value, limits[name]) for name, value in example.items()}
        if any(name.endswith("labels") and not any(v != IGNORED for v in value) for name, value in example.items()):
            self.num_unlearned += 1
            return None
        return example

    def _cut(self, value: list[int], limit: int) -> list[int]:
        if len(value) <= limit:
            return value
        return [*value[: limit - 1], value[-1]] if self.keep_last else value[:limit]

    def describe(self) -> list[str]:
        """The treatment of long rows, in words. Raises `PlanError` where they are errors."""
        found = []
        if self.num_long:
            most = f"{self.num_long} of {self.num_rows} rows have more than {self.limit} tokens"
            at = f"the longest has {self.longest}: {self.longest_at}"
            if self.wish == "error":
                raise PlanError(
                    f"{most}, {at}; give --sequence {self.longest} or more, or --long-rows truncate or drop"
                )
            did = "were left out" if self.wish == "drop" else f"were cut, by {self.num_cut_tokens} tokens in all"
            found.append(f"{most} and {did}; {at}")
        if self.num_unlearned:
            found.append(f"{self.num_unlearned} rows have no label left to learn, and were left out")
        return found
