"""Threads that run compiled functions as written, one after the other, leave torch as they found it."""

from __future__ import annotations

import threading

import torch
from torch._dynamo import eval_frame

from penstock.runtime.forced_eager import forced_eager


def test_threads_that_overlap_put_back_what_was_there() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    before, inside, entered = eval_frame._stance, threading.Event(), threading.Event()
    found: list[str] = []

    def second() -> None:
        inside.wait()
        entered.set()
        with forced_eager():
            found.append(eval_frame._stance.stance)
            compiled(torch.ones(1))

    thread = threading.Thread(target=second)
    thread.start()
    with forced_eager():
        inside.set()
        entered.wait()
        found.append(eval_frame._stance.stance)
    thread.join()
    assert found == ["force_eager", "force_eager"]
    assert eval_frame._stance == before
