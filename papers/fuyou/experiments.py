"""Fuyou's setup, and the simulation of one of its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ...compiler.models.named import find_model
from ...ir.machine.hardware import Hardware
from ...ir.units import format_seconds
from ..experiments import Experiments, said_memory, said_shares, step_flops
from ..lab import SimulatedStep, Workload
from .equations import Load, Serial, Swappable, serial
from .programs import (
    BLOCK_FLOPS,
    COLOSSAL,
    FUYOU,
    PAGEABLE,
    PRECISION,
    ZERO_INFINITY,
    ZERO_OFFLOAD,
    busy_share,
    halvings,
    lacks_device,
    machine,
    rates,
    repeated_blocks,
)  # fmt: skip

USEFUL = 0.75  # of the FLOPs of a step in which every block is computed again


class Fuyou(Experiments):
    """Fuyou's setup. `models` maps the paper's names to ours; a batch is the number of rows in one step."""

    title = "Fuyou (2024) in simulation"
    left_out = {
        "table 1": "which systems have which mechanism: no number.",
        "figure 2": "a drawing of the three schedules; `penstock simulate --trace` draws ours.",
    }
    factors = {
        " and ".join(f"{flops / 1e12:.0f} TFLOPS ({gpu})" for gpu, flops in BLOCK_FLOPS.items()): "the rate of a block "
        "that the paper measured, for all systems; not fitted",
        f"{PAGEABLE / 1e9:g} GB/s": "a free number for DeepSpeed alone, fitted to figure 1: its checkpoints' way "
        "through pageable memory. Without it ZeRO-Infinity is our own program, which stands beside it",
        "39% of what 12 disks read alone": "a free number for all systems, fitted to figure 8",
    }
    precision, sequence = PRECISION, 1024
    models: Mapping[str, str] = {f"{size}B": f"gpt3-{size}b" for size in (13, 33, 65, 135, 175, 276, 412, 805)}
    presets = ("fuyou-a100", "fuyou-4090")
    usual = "13B"  # of figures 5b to 9
    halfway = "65B"  # of section 1
    large = "175B"  # of figures 5a and 10
    larger: Sequence[str] = ("276B", "412B")  # of figure 6
    gpus: Sequence[str] = ("A100", "4090")
    batches: Mapping[tuple[str, str], Sequence[int]] = {  # (model, GPU) -> of figure 5
        ("13B", "A100"): (8, 16, 32, 64, 80),
        ("13B", "4090"): (8, 16, 32, 64),
        ("175B", "A100"): (8, 16, 32, 64),
        ("175B", "4090"): (8, 16),
    }
    extreme_batch = 64
    overlapped: Mapping[str, Mapping[int, float]] = {  # figure 7: model -> batch -> the paper's gain
        "13B": {8: 1.09, 16: 1.25, 32: 1.38, 64: 1.22},
        "175B": {8: 1.16, 16: 1.18},
    }
    pipelined: Mapping[str, Mapping[int, float]] = {  # figure 8: GPU -> batch -> the paper's gain
        "A100": {8: 1.66, 16: 1.88, 32: 1.97},
        "4090": {8: 1.85, 16: 1.92, 32: 2.28},
    }
    swapped: Mapping[int, bool] = {
        32: False,
        64: True,
        80: True,
    }  # figure 9: batch -> is the best coefficient positive?
    priced: Mapping[str, int] = {"4090": 16, "A100": 64}  # figure 10: GPU -> batch
    drams: Sequence[str] = ("128GB", "256GB", "384GB", "512GB", "640GB", "768GB")
    shares: Sequence[float] = (0.0, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
    ssds: Sequence[int] = (1, 3, 6, 9, 12)

    def small(self) -> Iterator[tuple[str, Workload, Hardware, str]]:
        work = self.workload("gpt2:n_layer=4,n_embd=1024,n_head=8,vocab_size=1024,n_positions=1024", 8, 1)
        for name, line in (("Fuyou", FUYOU), ("ZeRO-Infinity", ZERO_INFINITY)):
            yield name, work, machine("4090"), line

    def trial(self, model: str, batch: int, hardware: Hardware, line: str = FUYOU) -> SimulatedStep:
        """Simulate a step of the batch in one piece if the GPU holds it, else cut inside each stage into as few equal
        parts as fit. Weights move once a step in both cases."""
        name = self.models[model]
        too_large = self.rows_too_large(name, hardware, line)
        pieces = list(halvings(batch))
        for parts in pieces:
            if batch // parts >= too_large and 2 * parts in pieces:
                continue
            found = self.lab.trial(self.workload(name, batch // parts, parts), hardware, line)
            if not lacks_device(found):
                break
        return found

    def rows_too_large(self, name: str, hardware: Hardware, line: str) -> float:
        """The fewest rows of a micro-batch for which the same GPU was too small under the same passes."""
        tried = self.lab.trials.items()
        rows = (t.workload.micro_batch for (_, _, text), t in tried if text == line and t.workload.model == name
                and t.hardware.devices == hardware.devices and lacks_device(t))  # fmt: skip
        return min(rows, default=float("inf"))

    def flops(self, model: str, batch: int) -> float:
        """FLOPs of a step as the paper must count them, see `step_flops`."""
        config = find_model(self.models[model]).config
        return step_flops(batch, self.sequence, config.n_layer, config.n_embd, config.vocab_size)

    def tflops(self, trial: SimulatedStep) -> float | None:
        """TFLOPS of useful work: three quarters of what the formula counts, a forward of four being computed again."""
        formula = self.formula_tflops(trial)
        return USEFUL * formula if formula else None

    def computed_tflops(self, trial: SimulatedStep) -> float | None:
        """TFLOPS of what the GPU computes, what it computes again included: its share of a block's rate, over the whole
        step."""
        return (
            busy_share(trial) * trial.hardware.devices[0].achieved_flops(self.precision) / 1e12
            if trial.step_s
            else None
        )

    def formula_tflops(self, trial: SimulatedStep) -> float | None:
        """TFLOPS by the formula that counts the recomputation of every block, whether it is done or not."""
        model = next(name for name, ours in self.models.items() if ours == trial.workload.model)
        batch = trial.workload.micro_batch * trial.workload.micro_batches
        return self.flops(model, batch) / trial.step_s / 1e12 if trial.step_s else None

    def deepspeed(self, batch: int, gpu: str, line: str = ZERO_INFINITY) -> tuple[SimulatedStep, Serial]:
        """Our program of 13B under the rules of ZeRO-Infinity or ZeRO-Offload, and the step in which nothing of it
        overlaps."""
        trial = self.trial(self.usual, batch, machine(gpu), line)
        return trial, serial(rates(trial.hardware), self.load(trial), PAGEABLE, line == ZERO_INFINITY)

    def load(self, trial: SimulatedStep) -> Load:
        """The trial's model and batch as the equations need them, taken from its blocks."""
        work = trial.workload
        blocks = self.blocks(work, trial.hardware)
        repeated = repeated_blocks(blocks)
        boundary = sum(v.numel() * v.element_size() for b in repeated for v in (b.outputs[0].meta["val"],))
        return Load(
            trial.params,
            work.micro_batches * sum(block.cost.forward_flops for block in blocks),
            work.micro_batches * boundary,
            [
                Swappable(work.micro_batches * call.bytes, work.micro_batches * call.flops)
                for block in repeated
                for call in block.cost.calls or ()
            ],
        )

    def assumptions(self) -> dict[str, str]:
        """The assumptions of all figures, taken from the preset that is simulated."""
        hardware = machine("A100")
        host, ssd = hardware.hosts[0], hardware.hosts[0].ssds[0]
        speeds = ", ".join(f"{flops / 1e12:.0f} TFLOPS on {gpu}" for gpu, flops in BLOCK_FLOPS.items())
        memory = ", ".join(f"{gpu} {said_memory(machine(gpu).devices[0])}" for gpu in BLOCK_FLOPS)
        return {
            "GPU memory": memory,
            "GPU time": f"{speeds}, memory traffic included: what the paper calls its peak, which it measures on a "
            "transformer block (87 TFLOPS are 53% of it, 172 are 86%). The last finding shows the preset's own rates",
            "GPU link": f"{hardware.devices[0].h2d_bandwidth / 1e9:.0f} GB/s per direction (PCIe 4 x16 at 83% of its "
            "wire rate), pinned memory but under DeepSpeed",
            "SSDs": f"{len(host.ssds)} P5510, striped, simplex: {ssd.read_bandwidth / 1e9:.1f} GB/s read and "
            f"{ssd.write_bandwidth / 1e9:.1f} GB/s write each (datasheet); several together reach "
            f"{said_shares(host.ssd_shares, lambda disks: f'{disks:.0f}')} of the sum, fitted once, to the 1.66x of "
            "figure 8 (A100, batch 8)",
            "optimizer": f"AdamW on the CPU at {host.optimizer_params_per_s / 1e9:.1f} B parameters/s "
            f"({format_seconds(1e9 / host.optimizer_params_per_s)} for 1e9): 28 bytes a parameter at 48% of the "
            "rate of 16 channels of DDR4-2933, as for all presets",
            "precision": "bf16 with fp32 masters: bytes and rates of fp16 without its loss scale, whose overflow check "
            "the paper leaves out",
            "bytes of a parameter": "2 for its weight and 2 for its gradient on the GPU; on SSD 2 + 4 + 8 (weight, "
            "master, states)",
            "batch": f"one step of so many rows of {self.sequence} tokens without accumulation; where the GPU does not "
            "hold a block's activations at once, in equal pieces inside each stage, which move no more weights",
            "Fuyou": f"`{FUYOU}`",
            "ZeRO-Infinity": "a step in which nothing overlaps, by arithmetic, as section 3.2 observes it. What fits "
            f"is found out with `{ZERO_INFINITY}`, whose step is given, too",
            "ZeRO-Offload": f"the same without disks. What fits is found out with `{ZERO_OFFLOAD}`",
            "pageable memory": f"checkpoints move at {PAGEABLE / 1e9:g} GB/s under DeepSpeed, which allocates their "
            "memory as it goes: fitted once to the 28% of figure 1",
            "Colossal-AI": f"`{COLOSSAL}`. Missing: its memory manager, of which the paper says nothing",
            "TFLOPS": "of useful work, what is computed again left out. The paper does not say how it counts; its "
            "highest numbers are 101%, 95%, 86% and 53% of a block's rate, which a formula that counts recomputation "
            "that is not done would exceed wherever activations are swapped. What a GPU computes would be 56 TFLOPS "
            "for ZeRO-Infinity at batch 32 by the 28% of figure 1, and more for larger batches, where figure 5 has 59 "
            "at most. Both other counts stand beside it",
            "prices": "table 5; for Megatron-LM see figure 10",
        }
