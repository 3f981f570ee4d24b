"""Loops over the experts that got tokens train as in eager PyTorch: losses and weights, also of experts without
tokens, which an optimizer leaves alone."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.compiler.capture.trace import trace
from penstock.ir.errors import CaptureError, PenstockError
from penstock.tests.shown_elsewhere import slow_rows_but

WIDTH, EXPERTS, EACH = 8, 5, 2


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.silu(self.up(x)))


class Mixture(nn.Module):
    """`style`: how the loop is written. The last expert gets no tokens, and the others by what tokens are."""

    def __init__(self, style: Any):
        super().__init__()
        self.router, self.style = nn.Linear(WIDTH, EXPERTS), style
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.stacked = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        scores = self.router(tokens).softmax(-1)
        scores = scores * scores.new_tensor([1.0] * (EXPERTS - 1) + [0.0])
        weights, chosen = scores.topk(EACH, -1)
        return x + self.style(self, tokens, weights, chosen).view_as(x)


class Net(nn.Module):
    def __init__(self, style: Any):
        super().__init__()
        self.first, self.mixture, self.last = nn.Linear(WIDTH, WIDTH), Mixture(style), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.last(self.mixture(self.first(x).tanh())).squeeze(-1) - y).square().mean()


def hit_list(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(tokens)
    with torch.no_grad():
        mask = nn.functional.one_hot(chosen, EXPERTS + 1).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for expert in hit:
        place, token = torch.where(mask[expert].squeeze(0))
        state = tokens[None, token].reshape(-1, tokens.shape[-1])
        out.index_add_(0, token, m.experts[int(f"{expert[0]}")](state) * weights[token, place, None])
    return out


def use_stack(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(tokens)
    mask = nn.functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for each in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero(as_tuple=False):
        expert = int(each.item())
        place, token = torch.where(mask[expert])
        if token.numel() == 0:
            continue
        state = nn.functional.linear(tokens[token].view(token.shape[0], -1), m.stacked[expert])
        out.index_add_(0, token, (state * weights[token, place, None]).to(out.dtype))
    return out


def skip_empty(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(tokens)
    for number, expert in enumerate(m.experts):
        token, place = torch.where(chosen == number)
        if token.shape[0] == 0:
            continue
        out[token] += weights[token, place, None] * expert(tokens[token])
    return out


def branch(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(tokens)
    for number, expert in enumerate(m.experts):
        place, token = (chosen == number).t().nonzero(as_tuple=True)
        state = tokens[token]
        if len(state) > 0:
            out = out.index_add(0, token, expert(state) * weights[token, place].unsqueeze(-1))
    return out


def use_masks(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Each token comes once for each of its experts; every expert runs, also without tokens."""
    repeated, flat = tokens.repeat_interleave(EACH, dim=0), chosen.flatten()
    out = torch.empty_like(repeated)
    for number, expert in enumerate(m.experts):
        out[flat == number] = expert(repeated[flat == number])
    return (out.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)


def sort_by_size(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Tokens sorted by expert, each expert with its own number."""
    sizes = nn.functional.one_hot(chosen.flatten(), EXPERTS).sum(0).tolist()
    order = chosen.flatten().sort(stable=True)[1]
    runs = tokens[order // EACH].split(sizes, dim=0)
    found = torch.cat([nn.functional.linear(runs[i], m.stacked[i]) for i in range(EXPERTS)], dim=0)
    return torch.zeros_like(tokens).index_add(0, order // EACH, found * weights.flatten()[order][:, None])


def ask_for_next(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    (mask, hit), out = hits(chosen), torch.zeros_like(tokens)
    turns = iter(hit)
    while (expert := next(turns, None)) is not None:
        run_expert(m, mask, expert, tokens, out)
    return out


STYLES = [hit_list, use_stack, skip_empty, branch, use_masks, sort_by_size, ask_for_next]


def batch_of(rows: int = 4) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 3, WIDTH), "y": torch.randn(rows, 3)}


CASES = [(style, count) for style in STYLES for count in (1, 2)]
TELLING = [(use_stack, 1), (skip_empty, 1), (use_masks, 1)]


@pytest.mark.parametrize(("style", "count"), slow_rows_but(TELLING, CASES))
def test_loops_over_experts_train_as_in_eager(style: Any, count: int) -> None:
    """`count`: of micro-batches and devices."""
    torch.manual_seed(1)
    model = Net(style)
    before = copy.deepcopy(model.state_dict())
    eager, adam = copy.deepcopy(model), partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    optimizer, batches = adam(eager.parameters()), [batch_of() for _ in range(3)]
    losses = []
    for batch in batches:
        losses.append(eager(**batch))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    hardware = penstock.Hardware.cpu(count, memory="64MB")
    with penstock.compile(
        model, hardware, example_inputs=batches[0], optimizer=adam, micro_batches=count,
        strategy="gpipe" if count > 1 else "balanced",
    ) as job:  # fmt: skip
        assert not job.folder.settings.rows.couplings or style is sort_by_size
        for batch, loss in zip(batches, losses):
            torch.testing.assert_close(job.step(batch), loss.detach(), rtol=1e-5, atol=1e-6)
        state = job.state_dict()
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
    if style in (hit_list, skip_empty, branch):  # an expert without tokens
        name = "mixture.experts.4.up.weight"
        assert torch.equal(state[name], before[name])


@pytest.mark.slow
def test_halves_of_backward_leave_experts_without_tokens_alone() -> None:
    torch.manual_seed(1)
    model, batch = Net(skip_empty), batch_of()
    eager, adam = copy.deepcopy(model), partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    optimizer = adam(eager.parameters())
    eager(**batch).backward()
    optimizer.step()
    hardware = penstock.Hardware.cpu(2, memory="64MB")
    with penstock.compile(
        model, hardware, example_inputs=batch, optimizer=adam, micro_batches=2, strategy="zero-bubble"
    ) as job:  # fmt: skip
        job.step(batch)
        state = job.state_dict()
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_lanes_are_refused() -> None:
    hardware = penstock.Hardware.cpu(2, memory="64MB")
    with pytest.raises(PenstockError, match=r"without any, parameters have no gradient.*strategy=\"gpipe\""):
        penstock.compile(
            Net(skip_empty), hardware, example_inputs=batch_of(), optimizer=torch.optim.SGD, micro_batches=2,
            strategy="data-parallel",
        )  # fmt: skip


def count(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(tokens)
    for number, expert in enumerate(m.experts):
        token, _ = torch.where(chosen == number)
        out.index_add_(0, token, expert(tokens[token]) / token.numel())
    return out


def repeat(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    token, _ = torch.where(chosen == 0)
    for _ in range(token.numel()):
        tokens = m.experts[0](tokens)
    return tokens


def average(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(tokens)
    for number, expert in enumerate(m.experts):
        token, _ = torch.where(chosen == number)
        found = expert(tokens[token])
        out.index_add_(0, token, found - found.mean(0))
    return out


def escape(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    token, _ = torch.where(chosen == 0)
    return tokens * m.experts[0](tokens[token]).sum()


def penalise(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Eager adds the penalty for experts with tokens alone."""
    out, penalty = torch.zeros_like(tokens), tokens.new_zeros(())
    for number, expert in enumerate(m.experts):
        token, _ = torch.where(chosen == number)
        if token.numel() > 0:
            out.index_add_(0, token, expert(tokens[token]))
            penalty = penalty + expert.up.weight.square().sum()
    return out + penalty


def left(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Eager ends at the first expert without tokens."""
    out = torch.zeros_like(tokens)
    for number, expert in enumerate(m.experts):
        token, _ = torch.where(chosen == number)
        if token.numel() == 0:
            break
        out.index_add_(0, token, expert(tokens[token]))
    return out


def dense(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(tokens)
    for number in torch.zeros(EXPERTS).index_add(0, chosen.flatten(), torch.ones(chosen.numel())).nonzero():
        out = out + m.experts[number[0]](tokens)
    return out


def count_turns(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out, turns = torch.zeros_like(tokens), 0
    for number, expert in enumerate(m.experts):
        token, _ = torch.where(chosen == number)
        if token.numel() > 0:
            out.index_add_(0, token, expert(tokens[token]))
            turns += 1
    return out / turns


def list_turns(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(tokens)
    for number in nn.functional.one_hot(chosen, EXPERTS).sum((0, 1)).nonzero().flatten().tolist():
        token, _ = torch.where(chosen == number)
        out.index_add_(0, token, m.experts[number](tokens[token]))
    return out


@pytest.mark.parametrize("style", [count_turns, list_turns, count, repeat, average, escape, penalise, left, dense])
def test_what_rows_chosen_by_value_must_not_do(style: Any) -> None:
    with pytest.raises(CaptureError, match=r"test_chosen\.py:\d+: (.|\n)*where they are written"):
        trace(Net(style), batch_of())


def run_expert(m: Any, mask: Tensor, expert: Tensor, tokens: Tensor, out: Tensor, scale: float = 1.0) -> None:
    _, token = torch.where(mask[expert].squeeze(0))
    out.index_add_(0, token, m.experts[int(f"{expert[0]}")](tokens[token]) * scale)


def hits(chosen: Tensor) -> tuple[Tensor, Tensor]:
    mask = nn.functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    return mask, torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()


def count_in_a_list(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    (mask, hit), out, turns = hits(chosen), torch.zeros_like(tokens), [0]
    for expert in hit:
        run_expert(m, mask, expert, tokens, out)
        turns[0] += 1
    return out / turns[0]


def count_in_an_attribute(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    (mask, hit), out, m.turns = hits(chosen), torch.zeros_like(tokens), 0
    for expert in hit:
        run_expert(m, mask, expert, tokens, out)
        m.turns += 1
    return out / m.turns


def grow_a_tuple(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    (mask, hit), out, turns = hits(chosen), torch.zeros_like(tokens), ()
    for expert in hit:
        run_expert(m, mask, expert, tokens, out)
        turns = (*turns, expert)
    return out / len(turns)


def number_turns(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    (mask, hit), out = hits(chosen), torch.zeros_like(tokens)
    for number, expert in enumerate(hit):
        run_expert(m, mask, expert, tokens, out, 1.0 + number)
    return out


def carry_a_number(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    (mask, hit), out, scale = hits(chosen), torch.zeros_like(tokens), 1
    for expert in hit:
        run_expert(m, mask, expert, tokens, out, scale)
        scale += 1
    return out


def end_at_first(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    (mask, hit), out = hits(chosen), torch.zeros_like(tokens)
    for expert in hit:
        run_expert(m, mask, expert, tokens, out)
        break
    return out


def return_at_first(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    (mask, hit), out = hits(chosen), torch.zeros_like(tokens)
    for expert in hit:
        run_expert(m, mask, expert, tokens, out)
        return out
    return tokens


def take_first(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    (mask, hit), out = hits(chosen), torch.zeros_like(tokens)
    run_expert(m, mask, next(iter(hit)), tokens, out)
    return out


def count_by_comprehension(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    return tokens * sum(1 for _ in hits(chosen)[1])


def keep_last(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out, last = torch.zeros_like(tokens), m.experts[0]
    for number, expert in enumerate(m.experts):
        token, _ = torch.where(chosen == number)
        if token.numel() == 0:
            continue
        out.index_add_(0, token, expert(tokens[token]))
        last = expert
    return out + last(tokens)


def use_first(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out, first = torch.zeros_like(tokens), None
    for number, expert in enumerate(m.experts):
        token, _ = torch.where(chosen == number)
        if len(token) != 0:
            first = first or expert
            out.index_add_(0, token, first(tokens[token]))
    return out


def sum_a_list(m: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    (mask, hit), found = hits(chosen), []
    for expert in hit:
        found.append(torch.zeros_like(tokens))
        run_expert(m, mask, expert, tokens, found[-1])
    return sum(found, start=tokens)


@pytest.mark.parametrize(
    "style",
    [
        count_in_a_list, count_in_an_attribute, grow_a_tuple, number_turns, carry_a_number, end_at_first,
        return_at_first, take_first, count_by_comprehension, keep_last, use_first, sum_a_list,
    ],
)  # fmt: skip
def test_python_carries_nothing_out_of_a_part_that_may_be_left_out(style: Any) -> None:
    """Each of these does something else where an expert has no tokens, which the recording cannot show."""
    with pytest.raises(CaptureError, match=r"test_chosen\.py:\d+: (.|\n)*something else elsewhere when it leaves"):
        trace(Net(style), batch_of())
