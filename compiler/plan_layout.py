"""A layout of a machine: how many devices share each stage, how many make a pipeline; the rest are replicas."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """`shards`, `depth` and `nearest` of `mesh`; depth 0: one pipeline over all devices."""

    shards: int = 1
    depth: int = 0
    nearest: str = "shards"

    @property
    def text(self) -> str:
        """The pass; nothing for one pipeline over all devices."""
        if not self.depth:
            return ""
        options = [f"{name}={value}" for name, value in (("shards", self.shards), ("depth", self.depth)) if value > 1]
        options += [f"nearest={self.nearest}"] if self.nearest != "shards" else []
        return f"mesh{{{', '.join(options)}}}" if options else "mesh"
