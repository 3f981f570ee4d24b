"""Width divided among the members of a team: jobs equal eager PyTorch, and whatever is saved is whole."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import penstock
from penstock.compiler.capture.trace import trace
from penstock.compiler.job.job import Job
from penstock.graph.divide.regions import find_regions
from penstock.ir import ops
from penstock.ir.errors import PassError
from penstock.ir.program import parse_program, work_of
from penstock.passes.draft import Draft
from penstock.passes.rewrite import split_width
from penstock.passes.rewrite.split_width import SplitWidth
from penstock.runtime import functions
from penstock.tests.compiler.eager_baseline import SGD, assert_close, assert_trains_like_eager, zoo_case
from penstock.tests.shown_elsewhere import slow_but
from penstock.tests.zoo import VOCABULARY, zoo

# Sums over members and over columns are added in another order than eager's: a few units of fp32's last place.
TOLERANCE = 5e-6
ADAM = partial(torch.optim.AdamW, lr=1e-3)
IN_ATTENTION_AND_MLP = ("llama", "mistral", "gpt2", "opt", "bert", "roberta", "vit", "qwen3")


def strategy(team: int, depth: int = 1, cut: str = "partition-balanced") -> str:
    return (
        f"drop-masks, split-width{{team={team}}}, coarsen, mesh{{depth={depth}}}, {cut}, map-round-robin, "
        "schedule-1f1b, insert-remat, insert-fetch, insert-optimizer"
    )


def job_of(model: nn.Module, batch: Any, num_devices: int, text: str, memory: str = "64MB", **options: Any) -> Job:
    hardware = penstock.Hardware.cpu(num_devices=num_devices, memory=memory, dram="1GB")
    given = {"optimizer": SGD, "micro_batches": 4, **options}
    return penstock.compile(model, hardware, example_inputs=batch, strategy=text, **given)


def experts_case(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A mixture of experts without dropout, and a batch of eight rows."""
    model, _ = getattr(penstock.tests.zoo, name)(dropout=0.0)
    ids = torch.randint(0, VOCABULARY, (8, 8), generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.parametrize("name", slow_but(("gpt2",), IN_ATTENTION_AND_MLP))
def test_attention_and_mlp_of_every_layer_are_found(name: str) -> None:
    model, batch = zoo()[name](dropout=0.0)
    found = find_regions(trace(model, batch), 2)
    layers = 2
    assert len([region for region in found if region.inside]) >= 2 * layers, [region.name for region in found]


@pytest.mark.slow
def test_what_mixes_columns_is_left_whole() -> None:
    """T5 adds another bias to each head; three members have no equal parts of four heads."""
    model, batch = zoo()["t5"](dropout=0.0)
    assert all("DenseReluDense" in region.name for region in find_regions(trace(model, batch), 2))
    model, batch = zoo()["llama"](dropout=0.0)
    assert find_regions(trace(model, batch), 3) == []


@pytest.mark.slow
def test_a_graph_is_divided_once_for_plan_and_rewrite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 layers that takes 15 s."""
    calls = []
    divide = split_width._divide_copy
    monkeypatch.setattr(split_width, "_divide_copy", lambda *args: calls.append(args) or divide(*args))
    model, batch = zoo()["llama"](dropout=0.0)
    draft = Draft(trace(model, batch), penstock.Hardware.cpu(2))
    for again in range(2):
        own = Draft(draft.graph, draft.machine)
        SplitWidth(2).rewrite(own, SplitWidth(2).plan(own))
        assert own.graph.divided and len(calls) == 1, again


class Normed(nn.Module):
    """Attention with modules that norm each head: of the head's numbers, and of all heads together."""

    def __init__(self, of_all: bool = False) -> None:
        super().__init__()
        self.first = nn.LayerNorm(16)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.of_all = of_all
        self.q_norm, self.k_norm = nn.RMSNorm(16 if of_all else 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.first(x)
        q, k, v = (layer(x) for layer in (self.q, self.k, self.v))
        q = self.q_norm(q) if self.of_all else q
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in (q, k, v))
        q = q if self.of_all else self.q_norm(q)
        out = nn.functional.scaled_dot_product_attention(q, self.k_norm(k), v)
        return {"loss": self.o(out.transpose(1, 2).flatten(2)).square().mean()}


def test_a_norm_over_each_head_is_divided_and_one_over_all_heads_is_not() -> None:
    model, batch = zoo()["qwen3"](dropout=0.0)
    found = find_regions(trace(model, batch), 2)
    assert len([region for region in found if "self_attn" in region.name]) == 2
    for of_all in (False, True):
        regions = find_regions(trace(Normed(of_all), {"x": torch.randn(2, 8, 16)}), 2)
        assert [region.name for region in regions] == ([] if of_all else ["o.weight"])


@pytest.mark.slow
def test_modules_that_norm_each_head_train_like_eager() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 8, 16)}
    assert_trains_like_eager(job_of(Normed(), batch, 2, strategy(2)), batch, TOLERANCE)


def test_dropout_between_the_products_keeps_them_whole() -> None:
    """A member would draw other numbers than the whole does."""
    model, batch = zoo()["llama"](dropout=0.1)
    assert all("self_attn" not in region.name for region in find_regions(trace(model, batch), 2))


@pytest.mark.slow
def test_sums_move_what_theory_says() -> None:
    """Two sums of a micro-batch's hidden states a layer, forward and backward, and one at each end (Megatron-LM 3)."""
    model, batch = zoo_case("gpt2")
    job = job_of(model, batch, 4, strategy(4))
    interface = job.folder.interface
    program = parse_program(job.code(0), interface, 0, "step")
    moved = [work_of(program, node).moved_bytes for node in program.ops() if node.target is ops.sum_parts]
    rows, tokens, width, layers, micro_batches = 2, 8, 32, 2, 4
    both_ends = 2  # what is looked up, and the gradient of what the head multiplies
    assert moved == [rows * tokens * width * 4] * ((2 * 2 * layers + both_ends) * micro_batches)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_ATTENTION_AND_MLP)
def test_two_members_train_like_eager(name: str) -> None:
    model, batch = zoo_case(name)
    job = job_of(model, batch, 2, strategy(2))
    assert len(job.plan.decisions.width.regions) >= 4
    assert_trains_like_eager(job, batch, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_devices, text, memory, options",
    [
        (4, strategy(4), "64MB", {}),
        (4, strategy(2, depth=2), "64MB", {}),  # a pipeline of two teams
        (4, strategy(2), "64MB", {}),  # two teams, each with its own micro-batches
        (2, strategy(2).replace("insert-fetch", "insert-fetch{swap=true}"), "64MB", {}),  # weights in DRAM
        (2, strategy(2), "64MB", {"max_grad_norm": 0.5}),
    ],
)
def test_composed(num_devices: int, text: str, memory: str, options: dict[str, Any]) -> None:
    model, batch = zoo_case("llama")
    job = job_of(model, batch, num_devices, text, memory, **options)
    assert bool(job.plan.decisions.fetch) == ("swap" in text)
    assert_trains_like_eager(job, batch, TOLERANCE, **options)


class Tables(nn.Module):
    """A table with a row that gets no gradient, a head with a bias and smoothed labels, whose logits have a cap."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(24, 8, padding_idx=13), nn.LayerNorm(8)
        self.head = nn.Linear(8, 24)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = 3.0 * torch.tanh(self.head(self.mix(self.table(ids))) / 3.0)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        return {"loss": loss}


def table_batch(rows: int = 8) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 24, (rows, 6), generator=torch.Generator().manual_seed(0))
    ids[:, 2] = 13
    return {"ids": ids, "labels": ids.flip(1).masked_fill(torch.arange(6) == 4, -100)}


@pytest.mark.slow
@pytest.mark.parametrize("team", [2, 4])
def test_members_have_rows_of_the_vocabulary(team: int) -> None:
    torch.manual_seed(0)
    job = job_of(Tables(), table_batch(), team, strategy(team))
    assert {"table.weight", "head.weight"} <= {*job.plan.decisions.width.regions}
    assert_trains_like_eager(job, table_batch(), TOLERANCE)


@pytest.mark.parametrize("by", slow_but((), ("heads", "rows")))
def test_members_with_different_tokens_have_rows_of_the_vocabulary(by: str) -> None:
    torch.manual_seed(0)
    text = strategy(2).replace("split-width", f"split-context{{team=2, by={by}}}, split-width")
    job = job_of(Tables(), table_batch(), 2, text)
    assert {"table.weight", "head.weight"} <= {*job.plan.decisions.width.regions}
    assert_trains_like_eager(job, table_batch(), TOLERANCE)


@pytest.mark.parametrize(
    ("passes", "said"),
    [
        ("split-vocabulary{parts=2}, split-width", r"table\.weight, head\.weight, .*parts already.*split-width before"),
        ("split-width, split-vocabulary{parts=2}", r"split-width, which comes before it, has divided tables among 2"),
    ],
)
def test_tables_are_in_parts_or_divided(passes: str, said: str) -> None:
    """In either order the words are about tables and the other pass, not about linear layers."""
    with pytest.raises(PassError, match=said):
        job_of(Tables(), table_batch(), 2, strategy(2).replace("split-width{team=2}", passes))


def test_experts_are_in_parts_or_divided() -> None:
    text = strategy(2).replace("split-width{team=2}", "split-width{team=2}, split-experts{parts=2}")
    with pytest.raises(PassError, match=r"split-width, .* has divided experts among 2 members; put it after"):
        job_of(*experts_case("mixtral"), 2, text)


def test_statistics_of_members_give_the_loss() -> None:
    """Each member knows where its classes begin on the device alone; a token that is no row is refused."""
    torch.manual_seed(0)
    hidden, labels = torch.randn(6, 8), torch.tensor([0, 3, 23, 12, -100, 13])
    head, table = nn.Linear(8, 24), nn.Embedding(24, 8, padding_idx=13)
    own = [
        functions.part_statistics(hidden, weight, bias, labels, torch.tensor([member]) * 12, 4)
        for member, (weight, bias) in enumerate(zip(head.weight.chunk(2), head.bias.chunk(2)))
    ]
    loss = functions.cross_entropy_of_parts(functions.joined_members(torch.cat(own)), labels, 24)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(head(hidden), labels))
    ids = labels.clamp(min=0)
    found = [functions.member_lookup(ids, table.weight.chunk(2)[i], torch.tensor([i]), 2, 13) for i in range(2)]
    assert torch.equal(sum(found), table(ids))
    with pytest.raises(IndexError, match="token 24 is no row of a table of 24"):
        functions.member_lookup(ids + 1, table.weight.chunk(2)[0], torch.tensor([0]), 2)


@pytest.mark.slow
def test_what_is_saved_is_whole_and_resumes_without_a_team(tmp_path: Path) -> None:
    model, batch = zoo_case("gpt2")
    with job_of(copy.deepcopy(model), batch, 2, strategy(2), optimizer=ADAM) as job:
        job.step(batch)
        saved = job.save(tmp_path / "saved")
        job.save_pretrained(tmp_path / "weights")
        found, state = load_file(tmp_path / "weights" / "model.safetensors"), job.state_dict()
        assert state.keys() - found.keys() == {"lm_head.weight"}  # tied
        assert_close(found, {name: state[name] for name in found}, 0.0)
        background = job.save(tmp_path / "background", wait=False)
        wanted = job.step(batch)
        background.wait()
    for text, count, place in (("balanced", 1, saved), (strategy(2), 2, tmp_path / "background")):
        with job_of(copy.deepcopy(model), batch, count, text, optimizer=ADAM) as job:
            job.resume(place)
            assert_close({"loss": job.step(batch)}, {"loss": wanted}, TOLERANCE)


@pytest.mark.slow
def test_whoever_asks_for_what_cannot_be_hears_why() -> None:
    model, batch = zoo_case("llama")
    with pytest.raises(PassError, match=r"the nearest team that can has 4"):
        job_of(model, batch, 5, strategy(5))
    with pytest.raises(PassError, match="its optimizer looks at whole parameters"):
        job_of(model, batch, 2, strategy(2), optimizer=partial(torch.optim.Adafactor, lr=1e-3))
    with pytest.raises(PassError, match="2 shards of teams of 2 x 1 deep are 4 devices, and 2 cannot be divided"):
        job_of(model, batch, 2, strategy(2).replace("depth=1", "shards=2"))
    job = job_of(model, batch, 2, strategy(2))
    job.plan.decisions.width.regions.append("model.norm.weight")
    with pytest.raises(PassError, match=r"'model.norm.weight' ends no part of this model that 2 can divide"):
        job_of(model, batch, 2, "auto", plan=job.plan)


@pytest.mark.slow
@pytest.mark.parametrize("name, team", [("mixtral", 2), ("qwen3_moe", 4), ("deepseek_v3", 2)])
def test_members_have_experts_of_their_own(name: str, team: int) -> None:
    """Each member takes the rows of its experts, and adds up over tokens."""
    model, batch = experts_case(name)
    job = job_of(model, batch, team, strategy(team))
    layers = [name for name in job.plan.decisions.width.regions if name.endswith(".experts")]
    assert len(layers) == (1 if name == "deepseek_v3" else 2)
    assert_trains_like_eager(job, batch, TOLERANCE)


@pytest.mark.slow
def test_members_of_experts_add_up_tokens_not_rows() -> None:
    model, batch = experts_case("mixtral")
    text = strategy(2)
    job = job_of(model, batch, 2, text)
    program = parse_program(job.code(0), job.folder.interface, 0, "step")
    moved = {work_of(program, node).moved_bytes for node in program.ops() if node.target is ops.sum_parts}
    tokens, width, rows = 2 * 8, 32, 2 * 8 * 2
    assert max(moved) == tokens * width * 4  # hidden states; a router's gradient is smaller
    assert min(moved) == rows * 4


class Tied(nn.Module):
    """Two layers, of which the second reads the first one's weight once more."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.down(torch.tanh(self.up(x)))
        return torch.nn.functional.linear(hidden.tanh(), self.up.weight).square().mean()


def test_a_weight_that_something_else_reads_stays_whole() -> None:
    assert find_regions(trace(Tied(), {"x": torch.ones(4, 8)}), 2) == []


class Chain(nn.Module):
    """Products with nothing between them: each is a region's last one, and its result the next one's first operand."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=bias) for i in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("bias", [True, False])
def test_products_one_after_the_other_train_like_eager(bias: bool) -> None:
    """Without a bias nothing lies between a region's sum and the next one's beginning."""
    torch.manual_seed(0)
    model, batch = Chain(bias), {"x": torch.randn(8, 8)}
    job = job_of(model, batch, 2, strategy(2))
    assert len(job.plan.decisions.width.regions) == 2
    assert_trains_like_eager(job, batch, TOLERANCE)


@pytest.mark.slow
def test_what_stands_in_the_middle_of_a_block_stays_whole() -> None:
    """PEFT's adapters of queries, keys and values lie between views that belong to one block."""
    model, batch = zoo_case("llama")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["gate_proj", "up_proj", "down_proj"], init_lora_weights=False)
    job = job_of(peft.get_peft_model(model, config), batch, 2, strategy(2))
    assert any("lora_B" in name for name in job.plan.decisions.width.regions)
    assert_trains_like_eager(job, batch, TOLERANCE)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    job = job_of(peft.get_peft_model(zoo_case("llama")[0], config), batch, 2, strategy(2))
    kept = job.plan.decisions.width.regions
    assert any("q_proj" in name for name in kept) and not any("k_proj" in name or "v_proj" in name for name in kept)
    assert_trains_like_eager(job, batch, TOLERANCE)


class NormOfHeads(nn.Module):
    """A norm over each head, with a weight that all heads share, as a module between two products."""

    def __init__(self, learns: bool) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(4, elementwise_affine=learns), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.norm(self.up(x).view(-1, 4, 4))
        return self.down(heads.reshape(-1, 16)).square().mean()


@pytest.mark.parametrize("learns", [False, True])
def test_a_trained_weight_of_all_columns_keeps_them_whole(learns: bool) -> None:
    """Of its gradient each member would have a part, and no block before the region could share it."""
    assert bool(find_regions(trace(NormOfHeads(learns), {"x": torch.ones(4, 8)}), 2)) != learns
