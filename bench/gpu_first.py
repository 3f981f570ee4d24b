"""The first hour on a real GPU: six calls of less than ten minutes each, and one row a figure, written at once.

    1  probe     what the machine has; its rates; context and libraries, locked pages, copies both ways, what the host
                 pays for an instruction, AdamW, NCCL with one rank
    2  tests     every test for a GPU, with streams delayed at random and memory poisoned; parity
    3  speed     steps against eager and against max(computation, copies, optimizer), with the time that kernels were
                 at work, by torch's profiler, and snapshots of the allocator
    4  reservoir a model of 7 billion parameters on 24 GB, alone
    5  peers     "bf16-true" against FSDP2 with offload, ZeRO-Offload and ZeRO-Infinity: at 24 GB, then the whole card
    6  several   where there are two GPUs or more: the memory of communicators, gathers and messages by their size, and
                 plans on all GPUs beside FSDP2 and torch.distributed.pipelining

A call does the parts of the first call that has open ones. Their limits and its start add up to less than its ten
minutes, so each of them is tried (bench/gpu/calls.py); in what they leave over it tries parts that failed in earlier
calls again, then those of later calls. What is done it reads from the rows in bench/results and in --out, which are all
that a call leaves: one that is killed loses nothing but the part that it was at. Each part runs in a process of
its own. The last row of a call says what is done, what failed and why, and what is left; a part is given up when it
has failed in three calls. Exit status 0: everything is done; 1: something is left or failed; 2: refused.

The machine needs Python 3.10+ and PyTorch, and no network: `--pack` on another machine gathers wheels of what the
package, its tests and the peers require; each call unpacks those that the machine lacks. Its first row says what was
found. Rows of an emulated GPU, of a CPU or of small sizes are refused in bench/results.

    python bench/gpu_first.py --pack build/wheels           where there is a network
    python bench/gpu_first.py [--out FOLDER]                on the GPU, six times or until nothing is left
    python bench/gpu_first.py --small --out FOLDER          rehearses all of it with tiny sizes; --scale 4 where slow
    python bench/gpu_first.py --list                        the parts
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
KEPT = ROOT / "build" / f"gpu_first-{sys.implementation.cache_tag}"  # unpacked and built once, for calls to come
EXTENSIONS = "TORCH_EXTENSIONS_DIR"  # where torch builds DeepSpeed's extensions, and finds them built
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """One call, or what the options ask for instead. Returns the exit status."""
    begin_s = time.monotonic()
    args = parsed_texts(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        make_importable(Path(folder))
        from penstock.bench.gpu import libaio, wheels
        from penstock.bench.gpu.part_list import PARTS

        if args.list:
            print("\n".join(f"call {part.call}  {part.limit_s:4.0f} s  {part.name}" for part in PARTS))
            return 0
        if args.pack:
            target = wheels.Target(args.python, args.glibc, args.machine)
            print("\n".join([*wheels.pack(ROOT / "setup.cfg", args.pack, target), libaio.pack(args.pack)]))
            return 0
        if args.run:
            return run_part(args)
        unknown = sorted({*(args.part or ())} - {part.name for part in PARTS})
        if unknown:
            print(f"--part {unknown[0]!r}: there is none of this name; --list prints all", file=sys.stderr)
            return 2
        carried = {
            "wheels": vars(wheels.unpack(args.wheels, KEPT / "site")),
            "libraries": libaio.unpack(args.wheels, KEPT / "libraries"),
        }
        return call(args, carried, Path(folder), begin_s)


def parsed_texts(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, help="fill this folder with wheels, and do nothing else")
    parser.add_argument("--python", default="3.12", help="of the machine that they are for (default %(default)s)")
    parser.add_argument("--glibc", default="2.35", help="the least that this machine has (default %(default)s)")
    parser.add_argument("--machine", default="x86_64", help="its processor (default %(default)s)")
    parser.add_argument("--wheels", type=Path, default=ROOT / "build" / "wheels", help="where they are")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder that gets the rows, in gpu_first.jsonl")
    parser.add_argument("--call", type=int, choices=range(1, 7), help="only parts of this call")
    parser.add_argument("--part", action="append", help="only this part, done or not; may be repeated")
    parser.add_argument("--seconds", type=float, help="of this call (default: 570, times --scale)")
    parser.add_argument("--scale", type=float, default=1.0, help="all limits times so much, on a slow machine")
    parser.add_argument("--small", action="store_true", help="tiny sizes: a rehearsal")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--commit", default=commit(), help="what rows say where there is no repository")
    parser.add_argument("--list", action="store_true", help="print the parts")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # a part, in this process: how calls start their children
    parser.add_argument("--origin", help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def commit() -> str:
    described = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    if shutil.which("git") is None:
        return "unknown"
    return subprocess.run(described, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def make_importable(folder: Path) -> None:
    """Let this process and its children import the package `penstock`, whatever the folder of the clone is called."""
    if importlib.util.find_spec("penstock") is None:
        (folder / "penstock").symlink_to(ROOT, target_is_directory=True)
        sys.path.insert(0, str(folder))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    # torch needs the first to be deterministic; idle threads spin without the others.
    settings = {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0",
        EXTENSIONS: str(KEPT / "extensions"),
    }  # fmt: skip
    os.environ.update({name: value for name, value in settings.items() if name not in os.environ})


def call(args: argparse.Namespace, found: dict[str, Any], folder: Path, begin_s: float) -> int:
    """Run parts until the time is over, which began at `begin_s`."""
    from penstock.bench.gpu import calls
    from penstock.bench.gpu.ledger import FILE, Ledger
    from penstock.bench.gpu.part_list import MACHINE, PARTS

    end_s = begin_s + (args.seconds or calls.TOTAL_S * args.scale)
    seen = identity(args)
    if seen is None:
        print(f"--device {args.device}: torch does not find one here; --device cpu --small rehearses", file=sys.stderr)
        return 2
    origin = {
        "commit": args.commit, "small": args.small, "command": command_line(),
        **{name: seen.pop(name) for name in ("device", "driver", "torch", "cuda")},
    }  # fmt: skip
    is_real = args.device == "cuda" and not seen["emulated"] and not args.small
    if not is_real and args.out.resolve() == RESULTS.resolve():
        what = "small sizes" if args.small else origin["device"]
        print(f"bench/results has rows of real GPUs only, and this is {what}: name a folder by --out", file=sys.stderr)
        return 2
    ledger = Ledger(args.out / FILE, origin, (RESULTS / FILE,) if is_real else ())
    ledger.write(MACHINE, {"figure": "what is here", "measured": seen, "target": None, "ok": None, **found})
    begun: list[str] = []
    for name in args.part or ():
        (part,) = (part for part in PARTS if part.name == name)
        run_child(args, ledger, part, min(end_s - time.monotonic(), args.scale * part.limit_s), folder)
    wanted = [part for part in PARTS if args.call in (None, part.call)]
    number = args.call or calls.current_call(wanted, calls.states_of(wanted, ledger))
    while not args.part:
        states, left_s = calls.states_of(wanted, ledger), end_s - time.monotonic()
        following = calls.next_part(wanted, states, number, left_s, begun, args.scale)
        if following is None:
            break
        run_child(args, ledger, *following, folder)
        begun.append(following[0].name)
    wanted = [part for part in wanted if part.name in (args.part or [part.name])]
    summary = calls.report(wanted, calls.states_of(wanted, ledger))
    ledger.write(MACHINE, {"figure": "parts of the first hour", "measured": summary, "target": None, "ok": None})
    return 1 if summary["failed"] or summary["left"] else 0


def command_line() -> str:
    """Without names of folders, which say nothing."""
    words = ["FOLDER" if "/" in word else word for word in sys.argv[1:]]
    return " ".join(["python", "bench/gpu_first.py", *words])


def identity(args: argparse.Namespace) -> dict[str, Any] | None:
    """The line of `bench/gpu/machine.py`, from a process of its own: this one shall not hold a context on the GPU. None
    where there is no such device."""
    from penstock.bench.gpu.machine import NO_DEVICE

    command = [sys.executable, "-m", "penstock.bench.gpu.machine", args.device]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == NO_DEVICE:
        return None
    done.check_returncode()
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def run_child(args: argparse.Namespace, ledger: Any, part: Any, limit_s: float, folder: Path) -> None:
    """Run a part in a process of its own and wait. The child writes the part's rows."""
    from penstock.bench.gpu.ledger import BEGINS, ENDS

    ledger.write(part, {"figure": BEGINS, "measured": round(limit_s), "target": None, "ok": None})
    command = [sys.executable, __file__, "--run", part.name, "--seconds", f"{limit_s:.0f}", "--out", str(args.out)]
    command += ["--device", args.device, "--scratch", str(folder), "--origin", json.dumps(ledger.origin)]
    for lock in Path(os.environ[EXTENSIONS]).glob("**/lock"):  # of a build that was killed: the next would wait for it
        lock.unlink()
    begin_s = time.monotonic()
    child = subprocess.Popen([*command, *(["--small"] if args.small else [])], start_new_session=True)
    try:
        status = child.wait(limit_s)
        errors = [row["error"] for row in ledger.rows(part.name) if "error" in row]
        reason = "" if not status else errors[-1] if status == 1 and errors else f"ended with exit code {status}"
    except subprocess.TimeoutExpired:
        reason = f"took more than {limit_s:.0f} s"
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)  # with what it started
        child.wait()
    took = {"figure": ENDS, "measured": round(time.monotonic() - begin_s, 1), "target": None, "ok": None}
    ledger.write(part, {**took, "ok": False, "reason": reason} if reason else took)


def run_part(args: argparse.Namespace) -> int:
    """In the child: write the rows of one part as they come. It failed if it raised, or if a row has an error."""
    ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)  # a call that is cut leaves no child
    from penstock.bench.gpu.ledger import FILE, Ledger
    from penstock.bench.gpu.part_list import PARTS, rows_of
    from penstock.bench.peers.rows import round_weights

    origin = json.loads(args.origin)
    ledger = Ledger(args.out / FILE, origin, () if origin["small"] else (RESULTS / FILE,))
    (part,) = (part for part in PARTS if part.name == args.run)
    status = 0
    try:
        for row in rows_of(part, args, ledger):
            ledger.write(part, round_weights(row))
            status |= "error" in row
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
        ledger.write(
            part, {"figure": "the part runs", "measured": False, "target": "true", "ok": False, "error": reason}
        )
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
