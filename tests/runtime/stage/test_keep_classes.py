"""Classes of saved tensors where plan, stage and runner do not agree, and how what was kept moves."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from penstock.ir.errors import VerifyError
from penstock.ir.program import ParamSpec, SavedSpec, StageSpec, TensorSpec
from penstock.runtime.stage.kept import Kept
from penstock.runtime.stage.runner import StageRunner

CPU = torch.device("cpu")
ROWS, WIDTH = 4, 8


class Perceptron(nn.Module):
    """Three products; `mode` says what happens to the second's output."""

    def __init__(self, mode: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=i != 1) for i in range(3))
        self.norm, self.mode = nn.BatchNorm1d(WIDTH), mode

    def forward(self, x: Tensor) -> tuple[Tensor]:
        h = nn.functional.dropout(self.norm(torch.tanh(self.layers[0](x))), 0.5, self.training)
        h = self.layers[1](h.unsqueeze(0)).squeeze(0)
        if self.mode == "calls inside":
            h = h + torch.cdist(h, h, compute_mode="use_mm_for_euclid_dist").mean()  # one call, with a product inside
        if self.mode == "in place":
            h.add_(1)
        if self.mode == "more calls with gradients" and torch.is_grad_enabled():
            h = self.layers[0](h)
        if self.mode == "other shapes with gradients" and torch.is_grad_enabled():
            h = torch.cat([h, h])
        return (self.layers[2](h).square().mean(),)


CLASSES = tuple(SavedSpec(f"layers.{i}", ROWS * WIDTH * 4, 2.0 * ROWS * WIDTH**2, (i,)) for i in range(3))
NAMES = [row.name for row in CLASSES]


def spec_of(module: nn.Module, saved: Sequence[SavedSpec] = CLASSES) -> StageSpec:
    params = tuple(ParamSpec(n, tuple(p.shape), "float32") for n, p in module.named_parameters())
    buffers = tuple(ParamSpec(n, tuple(b.shape), str(b.dtype)[6:]) for n, b in module.named_buffers())
    inputs, loss = (TensorSpec("x", (ROWS, WIDTH), "float32", True),), (TensorSpec("loss", (), "float32", True),)
    changing = tuple(buffer.name for buffer in buffers)
    return StageSpec(
        "stage0", inputs, loss, params, buffers, loss="loss", saved=tuple(saved), changing_buffers=changing
    )


def runner_of(mode: str = "", saved: Sequence[SavedSpec] = CLASSES, device: torch.device = CPU) -> StageRunner:
    torch.manual_seed(0)
    module = Perceptron(mode)
    held = {name: t.detach().to(device) for name, t in (*module.named_parameters(), *module.named_buffers())}
    with torch.device("meta"):
        runner = StageRunner(spec_of(module, saved), Perceptron(mode), device, "fp32")
    runner.load_buffers({n: held[n] for n, _ in module.named_buffers()})
    runner.bind({n: held[n] for n, _ in module.named_parameters()})
    return runner


def step(runner: StageRunner, keep: bool | Sequence[str]) -> dict[str, Tensor]:
    """Two micro-batches: losses, gradients and buffers."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(ROWS, WIDTH, generator=generator).to(runner.device) for _ in range(2)]
    runs = [runner.forward([x], m, keep) for m, x in enumerate(batches)]
    found: dict[str, Tensor] = {f"loss{m}": outputs[0] for m, (outputs, _) in enumerate(runs)}
    grads: dict[str, Tensor] = {}
    for m, (x, (_, kept)) in enumerate(zip(batches, runs)):
        (found[f"dx{m}"],), grads = runner.backward(kept, [x], [0.5], grads, m)
    return found | grads | {f"buffer {n}": b.clone() for n, b in runner.buffers().items()}


@pytest.mark.parametrize("keep", [NAMES, NAMES[1:2], [NAMES[2], NAMES[0]], ()])
def test_any_choice_gives_the_same_bits(keep: Sequence[str]) -> None:
    wanted, found = step(runner_of(), True), step(runner_of(), keep)
    assert wanted.keys() == found.keys() and all(torch.equal(wanted[n], found[n]) for n in wanted)


def test_kept_tensors_are_skipped_and_let_go_of() -> None:
    runner, x = runner_of(), torch.randn(ROWS, WIDTH)
    _, kept = runner.forward([x], 0, NAMES[:2])
    assert kept is not None and kept.is_partial and list(kept.tensors) == NAMES[:2] and kept.num_bytes == 2 * 512
    with FlopCounterMode(display=False) as partly:
        runner.backward(kept, [x], [1.0], None, 0)
    with FlopCounterMode(display=False) as fully:
        runner.backward(None, [x], [1.0], None, 0)
    assert fully.get_total_flops() - partly.get_total_flops() == sum(row.flops for row in CLASSES[:2])
    assert kept.tensors == {}


def test_the_first_micro_batch_lets_go_at_once_too() -> None:
    """Not when Python next looks for rings of objects: a GPU's memory has no room for what is over."""
    runner, x = runner_of(), torch.randn(ROWS, WIDTH)
    gc.disable()
    try:
        for micro_batch in range(2):
            _, kept = runner.forward([x], micro_batch, NAMES)
            assert kept is not None
            made = [StorageWeakRef(tensor.untyped_storage()) for tensor in kept.tensors.values()]
            flat = torch.empty(kept.num_bytes, dtype=torch.uint8)
            kept, moved = kept.copied_to(flat), StorageWeakRef(flat.untyped_storage())
            del flat
            assert all(storage.expired() for storage in made), "what was moved lives on"
            runner.backward(kept, [x], [1.0], None, micro_batch)
            assert moved.expired(), "what backward has taken lives on"
    finally:
        gc.enable()


def test_later_forwards_take_what_is_kept_and_show_no_other_call() -> None:
    """Doubled values change the gradients: they were taken. Calls that are not costly have no Python to pass."""
    runner, x = runner_of(), torch.randn(ROWS, WIDTH)
    found = []
    for factor in (1.0, 1.0, 2.0):
        _, kept = runner.forward([x], 0, NAMES)
        assert kept is not None
        kept.tensors["layers.1"].mul_(factor)
        found.append(runner.backward(kept, [x], [1.0], None, 0)[1]["layers.2.weight"])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])
    with runner.classes.keeping(NAMES) as keeping:
        assert keeping.whole is None and torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_calls_inside_of_others_have_no_number() -> None:
    """`step` runs two micro-batches: the second one's calls are not watched whole."""
    seen = []
    for keep in (True, NAMES, NAMES[1:]):
        seen.append(step(runner_of("calls inside"), keep))
    assert all(torch.equal(seen[0][n], other[n]) for other in seen[1:] for n in seen[0])
    runner = runner_of("calls inside")
    step(runner, NAMES)
    assert runner.classes.count == 3 and all(runner.classes.inner.values()), "cdist makes no product inside"


def test_moved_tensors_keep_their_strides_and_places() -> None:
    tensors = {
        "a": torch.randn(3, 5).t(),
        "b": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last).bfloat16(),
    }
    kept = Kept.partial(tensors)
    flat = torch.zeros(kept.num_bytes, dtype=torch.uint8)
    moved = kept.copied_to(flat)
    for name, tensor in tensors.items():
        assert torch.equal(moved.tensors[name], tensor) and moved.tensors[name].stride() == tensor.stride()
    assert moved.tensors["b"].data_ptr() - flat.data_ptr() == 512 and moved.num_bytes == kept.num_bytes == 1024
    again = moved.placed_in(flat.clone())
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in tensors.items())


def test_a_wrong_plan_is_refused() -> None:
    x = torch.randn(ROWS, WIDTH)
    with pytest.raises(VerifyError, match=r"stage0 has no class 'layers.9' .* it has layers.0, layers.1, layers.2"):
        runner_of().forward([x], 0, ["layers.9"])
    beyond = replace(CLASSES[2], calls=(3,))
    with pytest.raises(VerifyError, match=r"'layers.2' of stage0 is costly call 3 of its forward, which makes 3"):
        runner_of(saved=[beyond]).forward([x], 0, ["layers.2"])
    larger = replace(CLASSES[2], bytes=512)
    with pytest.raises(VerifyError, match=r"class 'layers.2' of stage0 has 128 bytes, planned 512"):
        runner_of(saved=[larger]).forward([x], 0, ["layers.2"])
    twice = replace(CLASSES[1], calls=(0,))
    with pytest.raises(VerifyError, match=r"class 'layers.1' of stage0 must be one call of its own"):
        runner_of(saved=[CLASSES[0], twice]).forward([x], 0, ["layers.0", "layers.1"])


def test_what_is_changed_in_place_is_refused() -> None:
    """The product's output is changed through a view that autograd does not know as one."""
    runner, x = runner_of("in place"), torch.randn(ROWS, WIDTH)
    with pytest.raises(VerifyError, match=r"changes class 'layers.1' in place \(aten.add_.Tensor\)"):
        runner.forward([x], 0, ["layers.1"])
    wanted, found = step(runner_of("in place"), True), step(runner_of("in place"), ["layers.0", "layers.2"])
    assert all(torch.equal(wanted[n], found[n]) for n in wanted)


@pytest.mark.parametrize("kind, message", [
    ("more calls with gradients", "made 3 costly calls in a forward, and 4 in another"),
    ("other shapes with gradients", "class 'layers.2' of stage0: the call was"),
])  # fmt: skip
def test_a_second_forward_that_calls_otherwise_is_refused(kind: str, message: str) -> None:
    runner, x = runner_of(kind), torch.randn(ROWS, WIDTH)
    _, kept = runner.forward([x], 0, ["layers.0", "layers.2"])
    with pytest.raises(VerifyError, match=message):
        runner.backward(kept, [x], [1.0], None, 0)


def test_values_for_other_shapes_are_refused() -> None:
    runner, x = runner_of(), torch.randn(ROWS, WIDTH)
    _, kept = runner.forward([x], 0, ["layers.0"])
    assert kept is not None
    with pytest.raises(VerifyError, match=r"class 'layers.0' of stage0: the call was"):
        runner.backward(Kept.partial({"layers.0": kept.tensors["layers.0"].t()}), [x], [1.0], None, 0)


def test_stages_in_threads_do_not_see_each_other() -> None:
    """One thread keeps and takes while others compute everything; they share no stage."""
    keeps: list[bool | list[str]] = [False, True, NAMES[:1], NAMES]
    runners, barrier = [runner_of() for _ in keeps], threading.Barrier(len(keeps))
    counts: list[int | None] = [-1] * len(keeps)

    def work(i: int) -> None:
        barrier.wait()
        for _ in range(10):
            step(runners[i], keeps[i])
        counts[i] = runners[i].classes.count

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(keeps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [None, None, 3, 3]


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    wanted, found = step(runner_of(device=device), True), step(runner_of(device=device), NAMES)
    assert wanted.keys() == found.keys() and all(torch.equal(wanted[n], found[n]) for n in wanted)
