"""What holds for all tests: their helpers can be imported (`from zoo import zoo`), and they compute on one thread.

A sum that is split over threads is added up in another order, and many tests compare bit for bit with workers, which
have one thread each. Ctrl-C reaches the scripts that tests start, also where whoever started the tests ignores it, as
a shell's background jobs do. Python's collector does nothing until all tests are found, and then leaves out what is
there, which takes an eighth of the tests' time: modules and their tests, which stay anyway. After that it collects as
rarely as while a user's model is planned. Where tests run code that collects all garbage itself, several times each,
what earlier tests have left is left out, too. Processes of tests store bytecode in pytest's cache even under
PYTHONDONTWRITEBYTECODE: each of several dozen would compile PyTorch anew, which takes five CPU seconds.
"""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from penstock.compiler.planning import RARE

COLLECT_THEMSELVES = ("integrations", "compiler/profile")  # `Trainer` does, and the timing of blocks

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # which processes inherit
    signal.signal(signal.SIGINT, signal.default_int_handler)
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    bytecode = Path(__file__).parents[1] / ".pytest_cache" / "bytecode"
    sys.dont_write_bytecode, sys.pycache_prefix = False, os.environ.setdefault("PYTHONPYCACHEPREFIX", str(bytecode))
gc.disable()
sys.path.insert(0, str(Path(__file__).parent))
torch.get_num_threads()  # the first use would else overwrite the number set next
torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(*RARE)
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def leave_out_what_is_there(request: pytest.FixtureRequest) -> None:
    folder = request.path.parent.relative_to(Path(__file__).parent).as_posix()
    if folder.startswith(COLLECT_THEMSELVES):
        gc.collect()
        gc.freeze()
