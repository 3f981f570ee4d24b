"""A loop as one writes it by hand to train a GPT-2 whose states do not fit: one file per block, no overlap at all.

For each block the loop loads the weights, computes all micro-batches and drops the weights. The backward pass loads
them again and recomputes each block from its stored input. After it the optimizer updates one file after another. Word
and position tables, the last norm and all gradients stay in memory. Written files leave the page cache at once, which
would otherwise use the DRAM that is short.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class OffloadLoop:
    """Trains `model`, a GPT2LMHeadModel without dropout, whose blocks then hold no weights.

    The files are in `directory`; `close` removes them.
    """

    def __init__(self, model: Any, directory: str | Path, micro_batches: int, lr: float):
        self.model, self.micro_batches, self.lr = model.train(), micro_batches, lr
        self.blocks = list(model.transformer.h)
        self.files = [Path(directory, f"block{index}.pt") for index in range(len(self.blocks))]
        rest = [p for name, p in model.named_parameters() if not name.startswith("transformer.h.")]
        self.optimizer = torch.optim.AdamW(rest, lr=lr, fused=True)
        self.gradients: list[dict[str, Tensor]] = []
        self.steps = 0
        for block, file in zip(self.blocks, self.files):
            weights = {name: p.detach() for name, p in block.named_parameters()}
            zeros = {kind: {n: torch.zeros_like(w) for n, w in weights.items()} for kind in ("exp_avg", "exp_avg_sq")}
            save({"weights": weights, **zeros}, file)
            self._empty(block)

    def step(self, batch: Mapping[str, Tensor]) -> float:
        """One step on a global batch of `input_ids` and `labels`. Returns the mean loss."""
        self.optimizer.zero_grad(set_to_none=True)
        words, labels = (batch[name].chunk(self.micro_batches) for name in ("input_ids", "labels"))
        inputs = self._forward(words)
        losses, slopes = self._head(inputs[-1], labels)
        self._backward(inputs, slopes, words)
        self._update()
        return float(torch.stack(losses).mean())

    def _forward(self, words: tuple[Tensor, ...]) -> list[list[Tensor]]:
        """Every block's inputs, then the outputs of the last block; indexed by block, then by micro-batch."""
        with torch.no_grad():
            inputs = [[self._embed(piece) for piece in words]]
            for block, file in zip(self.blocks, self.files):
                self._fill(block, load(file)["weights"])
                inputs.append([block(x) for x in inputs[-1]])
                self._empty(block)
        return inputs

    def _embed(self, words: Tensor) -> Tensor:
        places = torch.arange(words.shape[1])
        return self.model.transformer.wte(words) + self.model.transformer.wpe(places)

    def _head(self, outputs: list[Tensor], labels: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
        """The losses, and their gradients with respect to the last block's outputs."""
        losses, slopes = [], []
        for output, target in zip(outputs, labels):
            leaf = output.requires_grad_()
            logits = self.model.lm_head(self.model.transformer.ln_f(leaf))
            loss = self.model.loss_function(logits=logits, labels=target, vocab_size=logits.shape[-1])
            (loss / self.micro_batches).backward()
            assert leaf.grad is not None
            losses.append(loss.detach())
            slopes.append(leaf.grad)
        return losses, slopes

    def _backward(self, inputs: list[list[Tensor]], slopes: list[Tensor], words: tuple[Tensor, ...]) -> None:
        self.gradients = []
        for block, file, block_inputs in reversed(list(zip(self.blocks, self.files, inputs))):
            self._fill(block, load(file)["weights"])
            for m, value in enumerate(block_inputs):
                leaf = value.requires_grad_()
                block(leaf).backward(slopes[m])
                assert leaf.grad is not None
                slopes[m] = leaf.grad
            self.gradients.insert(0, {name: p.grad for name, p in block.named_parameters() if p.grad is not None})
            self._empty(block)
        for piece, slope in zip(words, slopes):
            self._embed(piece).backward(slope)

    def _update(self) -> None:
        self.optimizer.step()
        for gradients, file in zip(self.gradients, self.files):
            states = load(file)
            weights = {name: nn.Parameter(value) for name, value in states["weights"].items()}
            optimizer = torch.optim.AdamW(weights.values(), lr=self.lr, fused=True)
            for name, weight in weights.items():
                weight.grad = gradients[name]
                moments = {kind: states[kind][name] for kind in ("exp_avg", "exp_avg_sq")}
                optimizer.state[weight] = {"step": torch.tensor(float(self.steps)), **moments}
            optimizer.step()
            save({**states, "weights": {name: weight.detach() for name, weight in weights.items()}}, file)
        self.gradients, self.steps = [], self.steps + 1

    def _fill(self, block: nn.Module, weights: Mapping[str, Tensor]) -> None:
        for name, param in block.named_parameters():
            param.data = weights[name]

    def _empty(self, block: nn.Module) -> None:
        for param in block.parameters():
            param.data, param.grad = torch.empty(0), None

    def close(self) -> None:
        for file in self.files:
            file.unlink(missing_ok=True)

    def __enter__(self) -> OffloadLoop:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def save(value: Any, path: Path) -> None:
    """`torch.save`; when it returns, the file is on the disk and not in the page cache."""
    with open(path, "wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load(path: Path) -> Any:
    """`torch.load`; the file does not stay in the page cache."""
    with open(path, "rb") as file:
        value = torch.load(file)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return value
