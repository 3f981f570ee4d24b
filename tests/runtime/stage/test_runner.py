"""A stage run by StageRunner against the same module run by eager PyTorch: bitwise."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import Tensor, nn

from penstock.ir.errors import VerifyError
from penstock.ir.program import ParamSpec, StageSpec, TensorSpec
from penstock.runtime.modules import Stage
from penstock.runtime.stage.draws import micro_batch_seed
from penstock.runtime.stage.runner import StageRunner
from penstock.runtime.stage.shards import FlatStage

CPU = torch.device("cpu")


class Mixed(nn.Module):
    """Dropout, BatchNorm, an embedding, a tie, a frozen and an unused parameter, an input handed through."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.norm = nn.BatchNorm1d(8)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("shift", torch.randn(8), persistent=False)

    def forward(self, ids: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y = self.norm(self.embed(ids) + h) + self.shift
        y = nn.functional.dropout(self.first(y), 0.5, self.training)
        y = self.second(self.frozen(torch.tanh(y)))
        return y, h, y.sum(1, keepdim=True).expand(4, 8), y.detach().argmax(1)


def spec_of(module: nn.Module, inputs: list[TensorSpec], outputs: list[TensorSpec], **fields: object) -> StageSpec:
    def rows(named: object) -> tuple[ParamSpec, ...]:
        return tuple(ParamSpec(n, tuple(t.shape), str(t.dtype)[6:], t.requires_grad) for n, t in named)  # type: ignore

    buffers = rows(module.named_buffers())
    fields.setdefault("changing_buffers", tuple(dict(module.named_buffers(remove_duplicate=False))))
    return StageSpec("stage0", tuple(inputs), tuple(outputs), rows(module.named_parameters()), buffers, **fields)


MIXED_INPUTS = [TensorSpec("ids", (4,), "int64"), TensorSpec("h", (4, 8), "float32", True)]
MIXED_OUTPUTS = [
    TensorSpec("y", (4, 8), "float32", True), TensorSpec("h", (4, 8), "float32", True),
    TensorSpec("s", (4, 8), "float32", True), TensorSpec("top", (4,), "int64"),
]  # fmt: skip


def runner_of(module: nn.Module, spec: StageSpec, **fields: object) -> tuple[StageRunner, dict[str, Tensor]]:
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    with torch.device("meta"):
        empty = type(module)()
    runner = StageRunner(spec, empty, CPU, "fp32", **fields)  # type: ignore[arg-type]
    runner.load_buffers(dict(module.named_buffers(remove_duplicate=False)))
    runner.bind(weights)
    return runner, weights


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("move", [True, False])
@pytest.mark.parametrize("flat", [True, False])
def test_gradients_outputs_and_buffers_are_those_of_eager(keep: bool, move: bool, flat: bool) -> None:
    """`flat`: gradients go to planned places, as those that will be scattered do."""
    torch.manual_seed(0)
    eager = Mixed()
    runner, weights = runner_of(eager, spec_of(eager, MIXED_INPUTS, MIXED_OUTPUTS), weights_move=move)
    flat_stage = FlatStage(runner.spec, runner.spec.segments(2), 0, 2)
    all_rows = flat_stage.new_grads(CPU)
    places = flat_stage.grad_views(all_rows) if flat else None
    eager.train()
    grads, kepts, batches, outs = None, [], [], []
    for m in range(3):
        ids, h = torch.randint(10, (4,)), torch.randn(4, 8)
        batches.append((ids, h, torch.randn(4, 8), torch.randn(4, 8)))
        out, kept = runner.forward([ids, h], micro_batch_seed(0, 0, m), keep=keep)
        outs.append(out)
        kepts.append(kept)
    if move:
        old = weights
        weights = {name: torch.zeros(7 + w.numel())[7:].view(w.shape).copy_(w) for name, w in old.items()}
        for w in old.values():
            w.fill_(float("nan"))
        runner.bind(weights)
    for m, (ids, h, d0, d2) in enumerate(batches):
        seed = micro_batch_seed(0, 0, m)
        dins, grads = runner.backward(kepts[m], [ids, h], [d0, None, d2, None], grads, seed, places)
        leaf = h.clone().requires_grad_()
        torch.manual_seed(seed)
        want = eager(ids, leaf)
        torch.autograd.backward([want[0], want[2]], [d0, d2])
        assert all(torch.equal(a, b) for a, b in zip(outs[m], want))
        assert len(dins) == 1 and torch.equal(dins[0], leaf.grad)
    expected = {name: p.grad for name, p in eager.named_parameters() if p.grad is not None}
    assert grads is not None and grads.keys() == expected.keys() and "unused" not in grads
    assert all(torch.equal(grads[name], expected[name]) for name in expected)
    if places is not None:
        assert all(grad.data_ptr() == places[name].data_ptr() for name, grad in grads.items())
        assert all(torch.equal(flat_stage.grad_views(all_rows)[name], expected[name]) for name in expected)
    for name, buffer in eager.named_buffers():
        assert torch.equal(runner.buffers()[name], buffer), name


def test_gradient_entering_only_through_an_input_handed_through() -> None:
    eager = Mixed()
    runner, _ = runner_of(eager, spec_of(eager, MIXED_INPUTS, MIXED_OUTPUTS))
    ids, h, dout = torch.randint(10, (4,)), torch.randn(4, 8), torch.randn(4, 8)
    outputs, kept = runner.forward([ids, h], 1)
    assert outputs[1].untyped_storage().data_ptr() != h.untyped_storage().data_ptr()
    dinputs, grads = runner.backward(kept, [ids, h], [None, dout, None, None], None, 1)
    assert torch.equal(dinputs[0], dout) and dinputs[0].data_ptr() != dout.data_ptr() and grads == {}
    _, kept = runner.forward([ids, h], 1)
    dinputs, _ = runner.backward(kept, [ids, h], [None, None, None, None], None, 1)
    assert torch.equal(dinputs[0], torch.zeros(4, 8))


def test_random_numbers_of_the_user_are_left_alone() -> None:
    eager = Mixed()
    runner, _ = runner_of(eager, spec_of(eager, MIXED_INPUTS, MIXED_OUTPUTS))
    inputs = [torch.randint(10, (4,)), torch.randn(4, 8)]
    before = torch.get_rng_state()
    first, _ = runner.forward(inputs, 5)
    assert torch.equal(before, torch.get_rng_state())
    again, _ = runner.forward(inputs, 5)
    other, _ = runner.forward(inputs, 6)
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], other[0])


class Shared(nn.Module):
    """Both gradients of the sum are the same memory in autograd's hands."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor]:
        return (self.p.view(2, 3) + x.view(2, 3) + z.view(2, 3),)


def test_gradients_never_share_memory() -> None:
    eager = Shared()
    inputs = [TensorSpec("x", (6,), "float32", True), TensorSpec("z", (6,), "float32", True)]
    runner, _ = runner_of(eager, spec_of(eager, inputs, [TensorSpec("y", (2, 3), "float32", True)]))
    x, z, dout = torch.randn(6), torch.randn(6), torch.randn(2, 3)
    _, kept = runner.forward([x, z], 0)
    (dx, dz), grads = runner.backward(kept, [x, z], [dout], None, 0)
    assert len({t.untyped_storage().data_ptr() for t in (dx, dz, grads["p"], dout)}) == 4
    assert torch.equal(dx, dout.view(6)) and torch.equal(dz, dx) and torch.equal(grads["p"], dx)
    _, kept = runner.forward([x, z], 0)
    held = grads["p"]
    _, again = runner.backward(kept, [x, z], [dout], grads, 0)
    assert again["p"] is held and torch.equal(held, 2 * dx)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16)
        self.register_buffer("scale", torch.randn(16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.linear(x))
        h = h * self.scale
        return h.exp().mean(), h


CHAIN_INPUTS = [TensorSpec("x", (4, 8), "float32", True)]
LOSS = TensorSpec("loss", (), "float32", True)


def test_loss_factor_and_kept_bytes() -> None:
    eager = Chain()
    spec = spec_of(eager, CHAIN_INPUTS, [LOSS], extra_outputs=(TensorSpec("h", (4, 16), "float32"),), loss="loss")
    runner, _ = runner_of(eager, spec)
    x = torch.randn(4, 8)
    (loss,), kept = runner.forward([x], 0)
    assert kept is not None
    assert kept.num_bytes == 2 * 4 * 16 * 4  # tanh's and exp's results; not x, the weight, or the buffer
    (dx,), grads = runner.backward(kept, [x], [1 / 4], None, 0)
    leaf = x.clone().requires_grad_()
    want = eager(leaf)[0]
    (want / 4).backward()
    assert torch.equal(loss, want) and torch.equal(dx, leaf.grad)
    assert torch.equal(grads["linear.weight"], eager.linear.weight.grad)
    shown = runner.evaluate([x], 0)
    assert len(shown) == 2 and torch.equal(shown[1], eager(x)[1]) and not shown[0].requires_grad


def test_memory_of_a_kept_forward_is_let_go() -> None:
    """A result that autograd saves must not keep its own graph alive through the packing hook."""
    eager = Chain()
    runner, _ = runner_of(eager, spec_of(eager, CHAIN_INPUTS, [LOSS]))
    outputs, kept = runner.forward([torch.randn(4, 8)], 0)
    assert kept is not None
    mark = Chain()
    kept.edges[0].node.metadata["mark"] = mark  # type: ignore[union-attr]
    alive = weakref.ref(mark)
    del mark
    assert alive() is not None
    del kept, outputs
    assert alive() is None


def test_evaluation_uses_running_statistics_and_returns_to_training() -> None:
    torch.manual_seed(0)
    eager = Mixed()
    runner, _ = runner_of(eager, spec_of(eager, MIXED_INPUTS, MIXED_OUTPUTS))
    inputs = [torch.randint(10, (4,)), torch.randn(4, 8)]
    got = runner.evaluate(inputs, 0)
    eager.eval()
    assert torch.equal(got[0], eager(*inputs)[0])
    eager.train()
    torch.manual_seed(9)
    assert torch.equal(runner.forward(inputs, 9)[0][0], eager(*inputs)[0])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast(precision: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    name = str(dtype)[6:]
    eager = Chain().to(dtype)
    runner = StageRunner(spec_of(eager, CHAIN_INPUTS, [LOSS]), copy.deepcopy(eager).to("meta"), CPU, precision)
    runner.load_buffers(dict(eager.named_buffers()))
    runner.bind({n: p.detach().clone() for n, p in eager.named_parameters()})
    x = torch.randn(4, 8)
    with torch.autocast("cpu", dtype=dtype):
        want = eager(x)[0]
    want.backward()
    try:
        (loss,), kept = runner.forward([x], 0)
    except VerifyError as error:  # the mean of a half tensor is half: then the interface has to say so
        assert name in str(error)
        spec = spec_of(eager, CHAIN_INPUTS, [TensorSpec("loss", (), name, True)])
        runner = StageRunner(spec, copy.deepcopy(eager).to("meta"), CPU, precision)
        runner.load_buffers(dict(eager.named_buffers()))
        runner.bind({n: p.detach().clone() for n, p in eager.named_parameters()})
        (loss,), kept = runner.forward([x], 0)
    _, grads = runner.backward(kept, [x], [1.0], None, 0)
    assert torch.equal(loss, want) and torch.equal(grads["linear.weight"], eager.linear.weight.grad)
    assert grads["linear.weight"].dtype == dtype


def test_module_and_interface_must_belong_together() -> None:
    eager = Chain()
    good = spec_of(eager, CHAIN_INPUTS, [LOSS])
    with pytest.raises(VerifyError, match="lacks the parameter 'other'"):
        StageRunner(StageSpec("stage0", good.inputs, good.outputs, (*good.params, ParamSpec("other", (1,), "float32"))),
                    Chain(), CPU, "fp32")  # fmt: skip
    with pytest.raises(VerifyError, match=r"'linear.bias' that its interface lacks"):
        StageRunner(StageSpec("stage0", good.inputs, good.outputs, good.params[:1]), Chain(), CPU, "fp32")
    with pytest.raises(VerifyError, match="buffer 'scale'"):
        StageRunner(good, Chain(), CPU, "fp32").load_buffers({})
    runner, _ = runner_of(eager, spec_of(eager, CHAIN_INPUTS, [TensorSpec("loss", (2,), "float32", True)]))
    with pytest.raises(VerifyError, match=r"output 'loss' of stage0 is float32\[\], its interface says float32\[2\]"):
        runner.forward([torch.randn(4, 8)], 0)


class Spoiler(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x.add_(1).mean(),)


def test_input_changed_in_place_is_refused() -> None:
    runner = StageRunner(StageSpec("stage0", (TensorSpec("x", (2,), "float32"),), (LOSS,), ()), Spoiler(), CPU, "fp32")
    with pytest.raises(VerifyError, match="changes its input 'x' in place"):
        runner.forward([torch.zeros(2)], 0)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.lstm(x)[0].mean(),)


def test_modules_that_list_their_own_weights() -> None:
    eager = Recurrent()
    spec = spec_of(eager, [TensorSpec("x", (2, 3, 8), "float32", True)], [LOSS])
    runner, _ = runner_of(eager, spec)
    x = torch.randn(2, 3, 8)
    (loss,), kept = runner.forward([x], 0)
    _, grads = runner.backward(kept, [x], [1.0], None, 0)
    want = eager(x)[0]
    want.backward()
    assert torch.equal(loss, want)
    assert all(torch.equal(grads[n], p.grad) for n, p in eager.named_parameters())


class Annealed(nn.Module):
    """Divides by a count of forwards, which backward needs as it was; the count has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(()))
        self.again = nn.Module()
        self.again.register_buffer("count", self.count)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        self.count += 1
        return ((self.linear(x) / self.count).sum() * self.again.count,)


def test_a_later_micro_batch_leaves_what_an_earlier_one_has_saved_of_a_buffer() -> None:
    eager = Annealed()
    runner, _ = runner_of(eager, spec_of(eager, [TensorSpec("x", (2, 3), "float32", True)], [LOSS]))
    inputs, grads = [torch.randn(2, 3) for _ in range(3)], None
    kepts = [runner.forward([x], m)[1] for m, x in enumerate(inputs)]
    for m, (x, kept) in enumerate(zip(inputs, kepts)):
        _, grads = runner.backward(kept, [x], [1.0], grads, m)
        eager(x)[0].backward()
    assert grads is not None and all(torch.equal(grads[n], p.grad) for n, p in eager.named_parameters())
    assert all(torch.equal(buffer, torch.tensor(3.0)) for buffer in runner.buffers().values())


def flatten_as_on_a_gpu(self: nn.RNNBase) -> None:
    """Give separate weights cuDNN's form: they become views of one buffer."""
    weights = [w for w in self._flat_weights if isinstance(w, Tensor) and w.numel()]
    if len({w.data_ptr() for w in weights}) == len(self._flat_weights):
        buffer = torch.cat([w.detach().reshape(-1) for w in weights])
        for weight, place in zip(weights, buffer.split([w.numel() for w in weights])):
            weight.data = place.view(weight.shape)


def test_weights_that_a_recurrent_layer_lays_side_by_side_stay_where_they_are_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuDNN's layers do it in the first forward that finds other parameters: updates would no longer reach them."""
    eager = Recurrent()
    spec = spec_of(eager, [TensorSpec("x", (2, 3, 8), "float32", True)], [LOSS])
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", flatten_as_on_a_gpu)
    runner, weights = runner_of(eager, spec)
    x = torch.randn(2, 3, 8)
    for _ in range(2):
        (loss,), _ = runner.forward([x], 0)
        assert torch.equal(loss, eager(x)[0])  # with gradients: without them a CPU takes another kernel
        with torch.no_grad():
            for name, param in eager.named_parameters():
                param.mul_(0.5)
                weights[name].copy_(param)


class Mover(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        self.weight.data = self.weight.data.clone()
        return ((x * self.weight).sum(),)


def test_a_module_that_moves_its_parameters_is_refused() -> None:
    eager = Mover()
    runner, _ = runner_of(eager, spec_of(eager, [TensorSpec("x", (3,), "float32", True)], [LOSS]))
    with pytest.raises(VerifyError, match="moves its parameter 'weight'"):
        runner.forward([torch.ones(3)], 0)


class Maker(Stage):
    def forward(self) -> tuple[Tensor]:
        return (torch.zeros((), device=self.device),)


def test_a_stage_knows_where_it_runs() -> None:
    runner = StageRunner(StageSpec("stage0", (), (LOSS,), ()), Maker(), torch.device("meta"), "fp32")
    assert runner.forward([], 0, keep=False)[0][0].device.type == "meta"


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 256)
        self.outer = nn.Linear(256, 64)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        h = nn.functional.dropout(torch.relu(self.inner(x)), 0.3, self.training)
        return (self.outer(h).float().square().mean(),)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("keep", [True, False])
def test_on_a_gpu_as_in_eager(precision: str, keep: bool) -> None:
    device, dtype = torch.device("cuda", torch.cuda.current_device()), torch.float32
    if precision == "bf16":
        dtype = torch.bfloat16
    eager = Wide().to(device, dtype)
    spec = spec_of(eager, [TensorSpec("x", (8, 64), "float32", True)], [LOSS])
    with torch.device("meta"):
        runner = StageRunner(spec, Wide(), device, precision)
    weights = {name: p.detach().clone() for name, p in eager.named_parameters()}
    runner.bind(weights)
    grads, x = None, torch.randn(8, 64, device=device)
    states = torch.cuda.get_rng_state(), torch.get_rng_state()
    kepts = [runner.forward([x], m, keep) for m in range(2)]
    assert torch.equal(states[0], torch.cuda.get_rng_state()) and torch.equal(states[1], torch.get_rng_state())
    moved = {name: w.clone() for name, w in weights.items()}
    for w in weights.values():
        w.fill_(float("nan"))
    runner.bind(moved)
    for m in range(2):
        (dx,), grads = runner.backward(kepts[m][1], [x], [0.5], grads, m)
        leaf = x.clone().requires_grad_()
        torch.manual_seed(m)
        with torch.autocast("cuda", dtype=dtype, enabled=precision != "fp32"):
            want = eager(leaf)[0]
        (want / 2).backward()
        assert torch.equal(kepts[m][0][0], want) and torch.equal(dx, leaf.grad)
    assert grads is not None and all(torch.equal(grads[n], p.grad) for n, p in eager.named_parameters())
