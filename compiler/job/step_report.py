"""The report of a step that has ended."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class StepReport:
    """The figures of one step. Shares are of `seconds`; bytes are per memory or route, over all devices.

    `allocator`: per GPU "allocated_bytes" and "reserved_bytes", the peaks of torch's allocator since the GPU's process
    began, and "retries", how often it gave memory back before it could take more. `gradient_norm`: before clipping;
    None where the program computes none, without `max_grad_norm` in another precision than fp16: it would be a further
    pass over all gradients. `learning_rates`: of each group of parameters, as this step used them.
    """

    step: int
    loss: float
    seconds: float
    predicted_s: float | None
    busy_share: dict[str, dict[str, float]] = field(default_factory=dict)  # device name -> stream -> share
    moved_bytes: dict[str, int] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    allocator: dict[str, dict[str, int]] = field(default_factory=dict)
    gradient_norm: float | None = None
    learning_rates: tuple[float, ...] = ()
    loss_scale: float | None = None
    skipped: bool = False
    eager_blocks: dict[str, dict[str, str]] = field(default_factory=dict)  # stage -> class -> why it is not compiled
    ungraphed: dict[str, str] = field(default_factory=dict)  # stage -> why it runs from no CUDA graph
