"""A script for torchrun: an ordinary training loop that saves every second step, in which one rank meets a fault.

    torchrun --nproc-per-node=N faulty_rank.py FOLDER [FAULT RANK] [--hosts H] [--steps S] [--timeout T]

Every rank that is not killed writes FOLDER/rankR.json: its losses, the error that ended it, if any, and its seconds.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import platform
import resource
import signal
import threading
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import penstock
from penstock.ir.errors import PenstockError

WIDTH, ROWS, MICRO_BATCHES = 64, 16, 4
FAULT_STEP = 3  # the last checkpoint before it continues with step 2
MEETS_S = 0.3  # into a step, which is made to last longer, at which the signal comes


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _on_ssd() -> str:
    from penstock.tests.compiler.job.ssd_jobs import on_ssd  # imported here, because it imports much

    return on_ssd()


def batch_of(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def loss_of(output: Tensor, batch: object) -> Tensor:
    return output.square().mean()


def compile_job(options: argparse.Namespace, fault: str) -> penstock.Job:
    if fault == "versions":
        torch.__version__ = "2.13.9"  # type: ignore[assignment]
        platform.python_version = lambda: "3.10.1"
    torch.manual_seed(0)
    world = int(os.environ["WORLD_SIZE"])
    hardware = penstock.Hardware.cpu(
        num_devices=options.devices or world,
        memory="64MB",
        hosts=options.hosts,
        link="5kB/s" if options.slow else None,
        network="5kB/s" if options.slow and options.hosts > 1 else None,
        ssd="1GB" if options.ssd else None,
        ssd_dir=options.folder / "ssd" if options.ssd else None,
    )
    lr = 0.2 if fault == "optimizer" else 0.1
    job = penstock.compile(
        Slow(),
        hardware,
        example_inputs=(batch_of(0),),
        loss_fn=loss_of,
        optimizer=partial(torch.optim.SGD, lr=lr, momentum=0.9),
        micro_batches=MICRO_BATCHES,
        strategy=_on_ssd() if options.ssd else "balanced",
        precision="bf16" if fault == "precision" else "fp32",
        seed=1 if fault == "seed" else 0,
        timeout_s=options.timeout,
    )
    if options.fault == "loaded":
        torch.manual_seed(0)
        return penstock.load(job.write(options.folder / f"files{os.environ['RANK']}"), Slow())
    if fault == "edited":
        folder = job.write(options.folder / "edited")
        path = folder / f"device{options.rank}.py"
        path.write_text(path.read_text() + "\n# a note\n")
        return penstock.load(folder, Slow())
    return job


def no_more_room() -> None:
    """From now on no file of this process may grow beyond a few bytes, as on a disk that is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))


def no_room(*args: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def send_signal_soon(number: int) -> None:
    threading.Timer(MEETS_S, os.kill, (os.getpid(), number)).start()


def train(job: penstock.Job, options: argparse.Namespace, fault: str, losses: list[float]) -> None:
    position = job.resume(options.folder / "checkpoint")["next"] if options.resume else job.step_count
    for step in range(position, options.steps):
        batch = batch_of(step)
        if step == FAULT_STEP:
            Path(options.folder, f"reached{os.environ['RANK']}").touch()
            if fault == "kill":
                send_signal_soon(signal.SIGKILL)
            if fault == "stop":
                send_signal_soon(signal.SIGSTOP)
            if fault == "interrupt":
                send_signal_soon(signal.SIGINT)
            if fault == "raise":
                raise ValueError("no such column")
            if fault == "uneven":
                batch = batch[:-3]
        losses.append(job.step((batch,)).item())
        if step % 2:
            if fault == "disk" and step == FAULT_STEP:
                no_more_room()
            job.save(options.folder / "checkpoint", data={"next": step + 1})


def after_training(job: penstock.Job, folder: Path) -> dict[str, object]:
    """The figures that every rank sees of a trained job, whichever device has it."""
    evaluated = job.evaluate((batch_of(0),))
    job.sync()
    job.save_pretrained(folder / "model")
    weights = job.state_dict()["layers.7.weight"]
    same = torch.equal(weights, job.model.layers[7].weight)  # type: ignore[union-attr, index, arg-type]
    shapes = {name: list(value.shape) for name, value in evaluated.items()}
    return {"evaluated": float(evaluated.loss), "outputs": shapes, "weights": weights.sum().item(), "synced": same}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("fault", nargs="?", default="")
    parser.add_argument("rank", nargs="?", type=int, default=-1)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--devices", type=int)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--slow", action="store_true", help="make a step last a second")
    parser.add_argument("--ssd", action="store_true", help="keep weights and states on SSD")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    rank = os.environ["RANK"]
    fault = options.fault if int(rank) == options.rank else ""
    Path(options.folder, "ssd").mkdir(exist_ok=True)
    Path(options.folder, f"pid{rank}").write_text(str(os.getpid()))
    found: dict[str, object] = {"losses": []}
    began_s = time.time()
    try:
        with compile_job(options, fault) as job:
            began_s = time.time()
            if fault == "ssd":
                os.posix_fallocate = no_room
            if fault == "slowed":  # its generated file calls this, once it has been looked at
                _, usual = job.driver, torch.tanh
                torch.tanh = lambda x: (time.sleep(0.01), usual(x))[1]  # type: ignore[assignment]
            try:
                train(job, options, fault, found["losses"])  # type: ignore[arg-type]
            except KeyboardInterrupt:
                found |= {"interrupted after": job.step_count}
                job.save(options.folder / "checkpoint", data={"next": job.step_count})
                train(job, options, "", found["losses"])  # type: ignore[arg-type]
            if options.fault == "slowed":
                found["stragglers"] = [str(row) for row in job.stragglers()]
            if options.fault == "none":
                found |= after_training(job, options.folder)
    except (PenstockError, ValueError) as error:
        found |= {"error": str(error), "type": type(error).__name__}
        raise
    finally:
        found |= {"seconds": time.time() - began_s}
        Path(options.folder, f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
