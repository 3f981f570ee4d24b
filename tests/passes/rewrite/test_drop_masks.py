"""Masks that are proven to be causal, a window or all ones go; every other mask stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.compiler.capture.trace import trace
from penstock.graph.edit import copy_graph
from penstock.graph.masks import visible
from penstock.graph.masks.forms import KeyWindow, MaskForm
from penstock.graph.opgraph import OpGraph
from penstock.ir.errors import PassError
from penstock.ir.machine.hardware import Hardware
from penstock.passes.rewrite import drop_masks
from penstock.passes.rewrite.drop_masks import DropMasks, masked_calls
from penstock.tests.golden_text import Golden
from penstock.tests.passes.running import Eager, all_passes, apply, draft_of, join_batches, reference
from penstock.tests.shown_elsewhere import slow_but
from penstock.tests.zoo import VOCABULARY, zoo

MakeMask = Callable[[Tensor, int], Tensor]  # queries and the number of keys to a mask
LENGTH, HEADS = 12, 2


class Attends(nn.Module):
    """Two layers of attention, one mask."""

    def __init__(self, mask: MakeMask, keys: int = LENGTH, dropout: float = 0.0):
        super().__init__()
        self.make, self.keys, self.dropout = mask, keys, dropout
        self.layers = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mask = self.make(x, self.keys)
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (3, HEADS, 4)).permute(2, 0, 3, 1, 4)
            k, v = k[:, :, : self.keys], v[:, :, : self.keys]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.dropout)
            x = x + out.transpose(1, 2).flatten(2)
        return {"loss": x.square().mean()}


def capture_mask(mask: MakeMask, keys: int = LENGTH, dropout: float = 0.0) -> OpGraph:
    torch.manual_seed(0)
    return trace(Attends(mask, keys, dropout), {"x": torch.randn(3, LENGTH, 8)})


def forms(graph: OpGraph) -> dict[str, MaskForm]:
    """Of a copy: a graph remembers what was proven of it."""
    return DropMasks().plan(draft_of(copy_graph(graph)))


def only_form(mask: MakeMask, keys: int = LENGTH) -> MaskForm | None:
    """The form of a mask: once computed as it is, once followed without a tensor of its size."""
    graph = capture_mask(mask, keys)
    found = [set(forms(graph).values())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visible, "VECTOR_ELEMENTS", 3 * LENGTH)
        patch.setattr(visible, "WHOLE_ELEMENTS", 3 * LENGTH)
        found.append(set(forms(graph).values()))
    assert found[0] == found[1] and len(found[0]) < 2
    return next(iter(found[0]), None)


def places(x: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    return torch.arange(x.shape[1])[:, None], torch.arange(keys)[None, :]


def causal(x: Tensor, keys: int) -> Tensor:
    i, j = places(x, keys)
    return j <= i


def lower_mask(x: Tensor, keys: int) -> Tensor:
    """A mask of numbers, as older models write it."""
    low = torch.finfo(torch.float32).min
    mask = torch.triu(torch.full((x.shape[1], keys), low), diagonal=1)
    i, j = places(x, keys)
    return (mask * (j > i)).expand(x.shape[0], 1, -1, -1)


def masked_window(x: Tensor, keys: int) -> Tensor:
    hidden = torch.ones(x.shape[1], keys, dtype=torch.bool).triu(1) | torch.ones(x.shape[1], keys).tril(-4).bool()
    return torch.zeros(x.shape[1], keys).masked_fill(hidden, float("-inf"))


def pack_mask(x: Tensor, keys: int) -> Tensor:
    """As transformers find documents in position ids: here there is one."""
    ids = torch.arange(x.shape[1]).unsqueeze(0).expand(x.shape[0], -1)
    document = (torch.diff(ids, prepend=ids[:, :1] - 1) != 1).cumsum(-1)
    rows = torch.arange(x.shape[0])[:, None, None, None]
    i, j = torch.arange(x.shape[1])[None, None, :, None], torch.arange(keys)[None, None, None, :]
    return (document[rows, i] == document[rows, j]) & (ids[rows, j] <= ids[rows, i]) & i.new_ones((), dtype=torch.bool)


FOUND: list[tuple[str, MakeMask, MaskForm]] = [
    ("comparison", causal, "causal"),
    ("tril", lambda x, keys: torch.ones(x.shape[1], keys, dtype=torch.bool).tril(), "causal"),
    ("numbers", lower_mask, "causal"),
    ("documents", pack_mask, "causal"),
    ("not later", lambda x, keys: ~causal(x, keys).logical_not(), "causal"),
    ("difference", lambda x, keys: places(x, keys)[1] - places(x, keys)[0] < 1, "causal"),
    ("from a number", lambda x, keys: 1 - (places(x, keys)[1] - places(x, keys)[0]) > 0, "causal"),
    ("where", lambda x, keys: torch.where(causal(x, keys), 0.0, float("-inf")).view(1, 1, x.shape[1], keys), "causal"),
    ("shape of an input", lambda x, keys: torch.ones_like(x[:, :, 0], dtype=torch.bool)[:, None, None, :keys], "all"),
    ("zeros", lambda x, keys: torch.zeros(1, HEADS, x.shape[1], keys), "all"),
    ("wide window", lambda x, keys: causal(x, keys) & (places(x, keys)[0] - places(x, keys)[1] < 64), "causal"),
    ("window", lambda x, keys: causal(x, keys) & (places(x, keys)[0] - places(x, keys)[1] < 4), KeyWindow(before=3)),
    ("window of numbers", masked_window, KeyWindow(before=3)),
    (
        "window to both sides",
        lambda x, keys: (places(x, keys)[0] - places(x, keys)[1]).abs() <= 2,
        KeyWindow(before=2, after=2),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("mask", "form"), [row[1:] for row in FOUND], ids=[row[0] for row in FOUND])
def test_found(mask: MakeMask, form: MaskForm) -> None:
    assert only_form(mask) == form


def test_found_for_another_number_of_keys() -> None:
    """Torch's causal attention counts places from the first query and the first key; so must the mask."""
    assert only_form(causal, keys=7) == "causal"
    assert only_form(lambda x, keys: places(x, keys)[1] <= places(x, keys)[0] - (LENGTH - keys), keys=7) is None


def test_keys_that_become_queries_are_not_taken_for_keys() -> None:
    """All queries see the first key, which says nothing of their own places, until it is transpose."""

    def transpose(x: Tensor, keys: int) -> Tensor:
        return causal(x, keys) | (places(x, keys)[1] < 1).expand(x.shape[1], keys).transpose(0, 1)

    assert only_form(transpose) is None


def flip_mask(x: Tensor, keys: int) -> Tensor:
    mask = causal(x, keys)
    i, j = places(x, keys)
    return mask ^ ((i == 9) & (j == 4))


def constant_mask() -> MakeMask:
    values = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    values[9, 4] = False
    return lambda x, keys: values & torch.ones(1, dtype=torch.bool)


def write_one(x: Tensor, keys: int) -> Tensor:
    mask = causal(x, keys).clone()
    mask[9, 4] = False
    return mask


STAYS: list[tuple[str, MakeMask]] = [
    ("one entry flipped", flip_mask),
    ("one entry of a constant", constant_mask()),
    ("one entry written", write_one),
    ("one row of the batch", lambda x, keys: causal(x, keys) | (torch.arange(x.shape[0]) == 1)[:, None, None, None]),
    ("one head", lambda x, keys: causal(x, keys) | (torch.arange(HEADS) == 1)[None, :, None, None]),
    ("an input", lambda x, keys: causal(x, keys) & (x[:, None, :1, 0:1] < 1e9)),
    ("random", lambda x, keys: causal(x, keys) | (torch.rand(x.shape[1], keys) < 0)),
    ("nearly hidden", lambda x, keys: torch.where(causal(x, keys), 0.0, -1e4)),
    ("a bias", lambda x, keys: torch.where(causal(x, keys), 1.0, float("-inf"))),
    ("blind rows", lambda x, keys: places(x, keys)[1] < places(x, keys)[0]),
    ("every second key", lambda x, keys: causal(x, keys) & (places(x, keys)[1] % 2 == 0)),
    ("distance", lambda x, keys: (places(x, keys)[1] - places(x, keys)[0]).float()),
]


@pytest.mark.parametrize("mask", [row[1] for row in STAYS], ids=[row[0] for row in STAYS])
def test_stays(mask: MakeMask) -> None:
    graph = capture_mask(mask)
    assert forms(graph) == {}
    draft = draft_of(graph)
    DropMasks().rewrite(draft, {})
    assert draft.graph is graph


def brute_form(mask: Tensor) -> MaskForm | None:
    """By comparison with every mask that there is a form for."""
    queries, keys = mask.shape
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    if mask.all():
        return "all"
    if torch.equal(mask, j <= i):
        return "causal"
    for before in range(queries):
        for after in range(keys):
            seen = (j >= i - before) & (j <= i + after)
            if torch.equal(mask, seen) and seen[-1, 0].logical_not() and seen[0, -1].logical_not():
                return KeyWindow(before=before, after=after) if seen.any(-1).all() else None
    return None


@st.composite
def index_masks(draw: Any) -> MakeMask:
    """Masks of a few comparisons of places, joined; most of them are almost one that has a form."""
    kind = st.sampled_from(["le", "lt", "ge", "gt", "eq", "ne"])
    terms = draw(st.lists(st.tuples(kind, st.integers(-6, 6), st.booleans(), st.booleans()), min_size=1, max_size=3))

    def make(x: Tensor, keys: int) -> Tensor:
        i, j = places(x, keys)
        mask = j <= i
        for name, offset, joins, absolute in terms:
            term = getattr((j - i).abs() if absolute else j - i, name)(offset)
            mask = mask & term if joins else mask | term
        return mask

    return make


@pytest.mark.slow
@settings(max_examples=30)
@given(index_masks(), st.integers(5, LENGTH))
def test_found_if_and_only_if_equal(mask: MakeMask, keys: int) -> None:
    graph = capture_mask(mask, keys)
    want = brute_form(mask(torch.zeros(1, LENGTH, 8), keys))
    assert set(forms(graph).values()) == ({want} if want else set())
    with pytest.MonkeyPatch.context() as patch:  # followed: it may find less, and nothing else
        patch.setattr(visible, "VECTOR_ELEMENTS", 3 * LENGTH)
        patch.setattr(visible, "WHOLE_ELEMENTS", 3 * LENGTH)
        assert set(forms(graph).values()) <= ({want} if want else set())


def test_long_masks_take_no_memory() -> None:
    """A window over 2^20 tokens: its mask would be a tebibyte."""
    length = 1 << 20

    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
            h = self.scale * x
            return {"loss": F.scaled_dot_product_attention(h, h, h, (j <= i) & (j > i - 4096)).mean()}

    graph = trace(Long(), {"x": {"shape": [1, 1, length, 4], "dtype": "float32"}})
    assert list(forms(graph).values()) == [KeyWindow(before=4095)]


@pytest.mark.usefixtures("short_rows")
def test_golden(golden: Golden) -> None:
    draft = apply(draft_of(capture_mask(causal, dropout=0.1)), DropMasks())
    golden(str(draft.graph.graph), "causal")
    draft = apply(draft_of(capture_mask(masked_window)), DropMasks())
    golden(str(draft.graph.graph), "window")
    graph = of_positions(gather)
    draft = apply(draft_of(graph, GPU), DropMasks())
    golden(str(draft.graph.graph), "documents")


# --- documents ------------------------------------------------------------------------------------------------------

MakeRelation = Callable[[Tensor], Tensor]  # position ids to a mask
GPU = Hardware.preset("rtx4090x1")


class Packed(nn.Module):
    """Attention under a mask made of position ids."""

    def __init__(self, mask: MakeRelation):
        super().__init__()
        self.make, self.layer = mask, nn.Linear(8, 24)

    def forward(self, x: Tensor, position_ids: Tensor) -> dict[str, Tensor]:
        q, k, v = self.layer(x).unflatten(-1, (3, HEADS, 4)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.make(position_ids))
        return {"loss": out.square().mean()}


def of_positions(mask: MakeRelation) -> OpGraph:
    return trace(Packed(mask), {"x": torch.randn(3, LENGTH, 8), "position_ids": torch.zeros(3, LENGTH).long()})


def count(ids: Tensor) -> Tensor:
    return (torch.diff(ids, prepend=ids[:, :1] - 1) != 1).cumsum(-1)


def pairs(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Of queries and of keys."""
    return numbers[:, None, :, None], numbers[:, None, None, :]


def same(numbers: Tensor) -> Tensor:
    queries, keys = pairs(numbers)
    return queries == keys


def not_later(numbers: Tensor) -> Tensor:
    queries, keys = pairs(numbers)
    return keys <= queries


def gather(ids: Tensor) -> Tensor:
    """As transformers writes it, with indices of all pairs."""
    documents = count(ids)
    rows, i = torch.arange(ids.shape[0])[:, None, None, None], torch.arange(LENGTH)[None, None, :, None]
    j = i.transpose(2, 3)
    return (
        i.new_ones((), dtype=torch.bool) & (documents[rows, i] == documents[rows, j]) & (ids[rows, j] <= ids[rows, i])
    )


DOCUMENTS: list[tuple[str, MakeRelation]] = [
    ("gathered", gather),
    ("laid out", lambda ids: same(count(ids)) & not_later(ids)),
    ("the other way around", lambda ids: (pairs(ids)[0] >= pairs(ids)[1]) & same(count(ids))),
    ("by places", lambda ids: same(count(ids)) & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()),
    ("any numbers, by places", lambda ids: same(ids) & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()),
    ("seen twice", lambda ids: same(count(ids)) & not_later(ids) & torch.ones(LENGTH, LENGTH).tril().bool()),
]
OTHERS: list[tuple[str, MakeRelation]] = [
    ("not causal", lambda ids: same(count(ids))),
    ("earlier", lambda ids: same(count(ids)) & (pairs(ids)[1] < pairs(ids)[0])),
    ("later", lambda ids: same(count(ids)) & (pairs(ids)[0] <= pairs(ids)[1])),
    ("positions alone", not_later),
    ("other positions", lambda ids: same(count(ids)) & not_later(ids * 2)),
    ("other borders", lambda ids: same((torch.diff(ids, prepend=ids[:, :1] - 1) != 2).cumsum(-1)) & not_later(ids)),
    ("second differences", lambda ids: same((torch.diff(ids, 1, 0, prepend=ids[:1]) != 1).cumsum(-1)) & not_later(ids)),
    ("borders of the rows", lambda ids: same((torch.diff(ids, prepend=ids[:, :1]) != 1).cumsum(0)) & not_later(ids)),
    ("either", lambda ids: same(count(ids)) | not_later(ids)),
    ("another row", lambda ids: same(count(ids)).flip(0) & not_later(ids)),
    ("backwards", lambda ids: (pairs(ids)[0] == pairs(ids)[1].flip(3)) & not_later(ids)),
    ("two documents", lambda ids: same(count(ids)) & same(ids) & torch.ones(LENGTH, LENGTH).tril().bool()),
    ("a window", lambda ids: same(count(ids)) & not_later(ids) & causal(ids, LENGTH).triu(-3)),
    ("a value", lambda ids: same(count(ids)) & not_later(ids) & (ids[:, None, None, :] < 9)),
]


@pytest.fixture
def short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if blocks won there, too."""
    monkeypatch.setattr(drop_masks, "LEAST_PACKED", 1)


@pytest.mark.usefixtures("short_rows")
@pytest.mark.parametrize("mask", [row[1] for row in DOCUMENTS], ids=[row[0] for row in DOCUMENTS])
def test_documents_are_found(mask: MakeRelation) -> None:
    graph = of_positions(mask)
    assert list(DropMasks().plan(draft_of(graph, GPU)).values()) == ["documents"]
    assert forms(graph) == {}  # on CPU the mask stays


def test_documents_of_short_rows_keep_their_mask() -> None:
    assert DropMasks().plan(draft_of(of_positions(gather), GPU)) == {}


@pytest.mark.usefixtures("short_rows")
@pytest.mark.parametrize("mask", [row[1] for row in OTHERS], ids=[row[0] for row in OTHERS])
def test_other_masks_of_positions_stay(mask: MakeRelation) -> None:
    assert DropMasks().plan(draft_of(of_positions(mask), GPU)) == {}


@pytest.mark.slow
@pytest.mark.usefixtures("short_rows")
@pytest.mark.parametrize("name", ("llama", "gpt2", "qwen3"))
def test_models_on_packed_rows_train_like_eager(name: str) -> None:
    """Borders lie elsewhere in each micro-batch, and two rows differ."""
    model, batches = without_padding(name)
    for batch, cuts in zip(batches, ((3, 5), (1, 7))):
        batch["position_ids"] = torch.stack([torch.cat([torch.arange(c), torch.arange(8 - c)]) for c in cuts])
    graph = trace(model, batches[0])
    masks = DropMasks().plan(draft_of(graph, GPU))
    assert list(masks.values()) == ["documents"] * 2
    draft = apply(draft_of(graph, micro_batches=2), DropMasks(), decisions={"masks": masks})
    assert not masked_calls(draft.graph)
    assert_same_step(draft_of(graph, micro_batches=2), draft, batches)


# --- training -------------------------------------------------------------------------------------------------------


def without_padding(name: str, **options: Any) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    model, _ = zoo()[name](dropout=options.pop("dropout", 0.0))
    batches = []
    for seed in range(2):
        ids = torch.randint(3, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(seed))
        batches.append({"input_ids": ids, "labels": ids})
    for key, value in options.items():
        setattr(model.config, key, value)
    return model, batches


# Attention's kernels add the same numbers in other blocks: a few units of fp32 at values up to 1, through two layers.
TOLERANCE = 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(("mistral",), ("mistral", "t5", "llama", "qwen3", "mixtral")))
def test_models_train_like_eager(name: str) -> None:
    model, batches = without_padding(name)
    graph = trace(model, batches[0])
    draft = apply(draft_of(graph, micro_batches=2), DropMasks())
    before, after = len(masked_calls(graph)), len(masked_calls(draft.graph))
    assert before - after == 2
    assert_same_step(draft_of(graph, micro_batches=2), draft, batches)


def test_keys_of_groups_of_heads_are_kept_once() -> None:
    """The copies for each head of queries go with the mask, where a kernel takes them so: not in fp32 on a GPU."""
    model, batches = without_padding("llama")
    graph = trace(model, batches[0])
    kept = []
    for machine, dtype in ((Hardware.cpu(), None), (GPU, torch.bfloat16), (GPU, None)):
        graph.autocast = dtype
        draft = apply(draft_of(graph, machine), DropMasks())
        calls = [node for node in draft.graph.nodes if node.target is F.scaled_dot_product_attention]
        heads = {call.args[1].meta["val"].shape[1] for call in calls}  # type: ignore[union-attr]
        kept.append((heads, {bool(call.kwargs.get("enable_gqa")) for call in calls}))
    assert kept == [({2}, {True}), ({2}, {True}), ({4}, {False})]


def assert_same_step(plain: Any, draft: Any, batches: list[dict[str, Tensor]]) -> None:
    """The rewritten graph's stages against the captured model in eager PyTorch, twice."""
    apply(draft, *all_passes(stages=2))
    machine, eager = reference(draft), Eager(plain)
    for _ in range(2):
        losses, grads = eager.step(batches)
        results = machine.step(join_batches(batches))["results"]["loss"]
        torch.testing.assert_close(torch.stack(results), torch.stack(losses), rtol=0, atol=TOLERANCE)
        for rows in machine.stage_grads.values():
            for key, grad in rows.items():
                torch.testing.assert_close(grad, grads[eager.ties.get(key, key)], rtol=0, atol=TOLERANCE)
    for rows in machine.stage_weights.values():
        for key, weight in rows.items():
            torch.testing.assert_close(weight, eager.params[eager.ties.get(key, key)], rtol=0, atol=TOLERANCE)


def test_padding_stays() -> None:
    model, batch = zoo()["gpt2"](dropout=0.0)
    graph = trace(model, batch)
    draft = apply(draft_of(graph, micro_batches=2), DropMasks())
    assert draft.graph is graph and len(masked_calls(graph)) == 2
    assert_same_step(draft_of(graph, micro_batches=2), draft, [batch, batch])


def test_dropout_draws_the_same() -> None:
    """On CPU attention with dropout takes the same draws with and without a mask."""
    graph = capture_mask(causal, dropout=0.5)
    draft = apply(draft_of(graph, micro_batches=2), DropMasks())
    batches = [{"x": torch.randn(3, LENGTH, 8)} for _ in range(2)]
    assert_same_step(draft_of(graph, micro_batches=2), draft, batches)


def test_evaluation_has_no_dropout() -> None:
    model, batches = without_padding("gpt2", dropout=0.5)
    graph = trace(model, batches[0])
    draft = apply(draft_of(graph, micro_batches=2), DropMasks())
    model.eval()
    found, want = draft.graph.evaluation()(**batches[0]), graph.evaluation()(**batches[0])
    torch.testing.assert_close(found["loss"], want["loss"], rtol=0, atol=TOLERANCE)


# --- decisions ------------------------------------------------------------------------------------------------------


def test_an_entry_left_out_keeps_its_mask() -> None:
    graph = capture_mask(causal)
    decision = forms(graph)
    kept, dropped = decision
    draft = apply(draft_of(graph), DropMasks(), decisions={"masks": {dropped: decision[dropped]}})
    assert list(masked_calls(draft.graph)) == [kept]
    assert len(masked_calls(graph)) == 2  # the captured graph is as it was


def test_what_is_not_proven_is_refused() -> None:
    with pytest.raises(PassError, match="is causal, but it is not proven to be that; leave the entry out"):
        place = next(iter(masked_calls(capture_mask(flip_mask))))
        apply(draft_of(capture_mask(flip_mask)), DropMasks(), decisions={"masks": {place: "causal"}})
    with pytest.raises(PassError, match="is a window of 3 keys, but it is proven to be causal"):
        apply(draft_of(capture_mask(causal)), DropMasks(), decisions={"masks": {place: KeyWindow(before=2)}})
    with pytest.raises(PassError, match=r"masks names 'no\.such\.place'; the model's attention calls"):
        apply(draft_of(capture_mask(causal)), DropMasks(), decisions={"masks": {"no.such.place": "causal"}})


def test_remarks() -> None:
    for mask, remark in (
        (causal, "attention calls that need no mask, as it is causal: 2"),
        (flip_mask, "the masks of 2 attention calls stay: it is not proven that they follow from places alone"),
    ):
        draft = draft_of(capture_mask(mask))
        apply(draft, DropMasks())
        assert draft.notes == {"drop-masks": remark}


def test_attention_that_a_model_writes_out_is_named() -> None:
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=64,
        attn_implementation="eager",
    )  # fmt: skip
    ids = torch.zeros(2, 8, dtype=torch.int64)
    draft = draft_of(trace(LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}))
    apply(draft, DropMasks())
    assert draft.notes == {
        "drop-masks": "attention that the model writes out as products and a softmax, with its masks: 2"
    }
