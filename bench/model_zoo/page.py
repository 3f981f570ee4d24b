"""docs/models.md, from the rows of the zoo."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

Row = dict[str, Any]
OUTCOMES = ("equal", "refused", "fails in eager", "different", "raw error")
# Kinds of refusals: by words of the first line of the message; the first that match count.
REFUSALS = (
    ("experts that got tokens", r"expert|hit = "),
    ("a check, or a branch on a value", r"\bif\b|assert|\bwhile\b|raise|numel\(\)|_check"),
    ("elements chosen by value", r"nonzero|unique|\[is_token|\[\w*(mask|inds)\w*[\].,]"),
    ("numbers read from a batch", r"tolist\(|\.item\(|int\(|grid_thw|sizes?\b|lengths|repeat_interleave|size\["),
)  # fmt: skip


def write_page(rows: Sequence[Row], listed: int, others: Sequence[Row] = ()) -> str:
    """The page: totals, by kind, and every class that is not equal. `listed`: the classes of the registries; `others`:
    rows of models that are not of transformers."""
    return "\n".join([*_lines(rows, listed), *_other_lines(others)]) + "\n"


def _other_lines(rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    yield from ("", "## Other libraries", "")
    yield (
        "Made by `make zoo-others`, in the same way: models of other libraries, tiny, with a loss function over their "
        "output. One micro-batch is compared where rows are coupled (BatchNorm), and where the inputs of a batch "
        "cannot be cut into rows: edges of graphs, a timestep without dimensions, positions without a row. Dropout is "
        "off, as what a micro-batch draws is not what a whole batch draws."
    )
    yield from ("", "| library | kind | " + " | ".join(OUTCOMES) + " | equal with one micro-batch |")
    yield "|---" * (3 + len(OUTCOMES)) + "|"
    for family, kind in dict.fromkeys((row["family"], row["kind"]) for row in rows):
        own = [row for row in rows if (row["family"], row["kind"]) == (family, kind)]
        count = Counter(row["outcome"] for row in own)
        single = sum(row["outcome"] == "equal" and row["micro_batches"] == 1 for row in own)
        counts = " | ".join(str(count[each]) for each in OUTCOMES)
        yield f"| {family} {own[0][family]} | {kind} | {counts} | {single} |"
    yield from ("", "| model | library | outcome | micro-batches | |", "|---|---|---|---|---|")
    for row in rows:
        is_plain = row["outcome"] == "equal" and row["micro_batches"] > 1
        text = "" if is_plain else f"{_code(_place(row))} {_text(row)}".strip().partition(": every input is cut")[0]
        yield f"| {row['class']} | {row['family']} | {row['outcome']} | {row.get('micro_batches', '')} | {text} |"


def _lines(rows: Sequence[Row], listed: int) -> Iterator[str]:
    versions = ", ".join(sorted({row["transformers"] for row in rows}))
    counts = Counter(row["outcome"] for row in rows)
    trained = len(rows) - counts["fails in eager"]
    yield "# Models"
    yield ""
    yield (
        f"Made by `make zoo` from `bench/results/zoo.jsonl`: classes of transformers {versions} that have a loss, from "
        "the library's own registries. Each is built from its configuration's defaults made small, and trained for two "
        "steps with SGD by eager PyTorch over the whole batch, and by a plan of two stages on two CPU devices with two "
        "micro-batches. Equal means: losses and weights within 1e-5, relative, in fp32; or in fp64, in which what is "
        "rounding falls at least tenfold. Where rows are coupled (BatchNorm), one micro-batch is compared, as the "
        "search would choose. Where forward draws, as the losses of segmentation draw points, `torch.rand` gives fixed "
        "numbers in both."
    )
    yield ""
    yield "Images of a model that sees have one size here; steps with several are in [promises.md](promises.md)."
    yield ""
    yield f"The rows are of {len(rows)} classes; the registries list {listed}, of which some have no loss."
    yield ""
    alone = Counter(row["without"] for row in rows if "without" in row and row["outcome"] != "fails in eager")
    yield (
        "Images and sound are handed over in forms that processors make. Where eager takes none of these, a class gets "
        f"tokens alone ({alone['features']} classes), or images or sound alone ({alone['tokens']})."
    )
    yield ""
    share = _share(counts["equal"], trained)
    yield f"{counts['equal']} of the {trained} classes that eager trains are equal ({share})."
    equal, all_families = _families(rows)
    yield f"By family, all of whose classes must be equal: {equal} of {all_families} ({_share(equal, all_families)})."
    yield ""
    yield "| kind of head | classes | " + " | ".join(OUTCOMES) + " |"
    yield "|---" * (2 + len(OUTCOMES)) + "|"
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = Counter(row["outcome"] for row in rows if row["kind"] == kind)
        yield f"| {kind.replace('_', ' ')} | {own.total()} | " + " | ".join(str(own[each]) for each in OUTCOMES) + " |"
    yield f"| all | {len(rows)} | " + " | ".join(str(counts[each]) for each in OUTCOMES) + " |"
    yield from ("", "| kind of refusal | classes |", "|---|---|")
    yield from (f"| {kind} | {count} |" for kind, count in refusals(rows).most_common())
    for outcome, heading in (("different", "Different"), ("raw error", "Raw errors"), ("refused", "Refused")):
        chosen = [row for row in rows if row["outcome"] == outcome]
        if chosen:
            yield from ("", f"## {heading}", "", "| class | at | message |", "|---|---|---|")
            yield from (f"| {row['class']} | {_code(_place(row))} | {_text(row)} |" for row in chosen)
    yield from ("", "## Fails in eager", "", "| class | message |", "|---|---|")
    yield from (f"| {row['class']} | {_text(row)} |" for row in rows if row["outcome"] == "fails in eager")
    yield from ("", "## Equal", "")
    for kind in dict.fromkeys(row["kind"] for row in rows if row["outcome"] == "equal"):
        names = [row["class"] for row in rows if row["kind"] == kind and row["outcome"] == "equal"]
        yield f"- {kind.replace('_', ' ')}: {', '.join(names)}"


def _families(rows: Sequence[Row]) -> tuple[int, int]:
    """The families of which eager trains a class, and those of them whose classes are all equal."""
    trained: dict[str, bool] = {}
    for row in rows:
        if row["outcome"] != "fails in eager":
            trained[row["family"]] = trained.get(row["family"], True) and row["outcome"] == "equal"
    return sum(trained.values()), len(trained)


def refusals(rows: Sequence[Row]) -> Counter[str]:
    """The number of refusals of each kind."""
    return Counter(
        next((kind for kind, words in REFUSALS if re.search(words, row["detail"].split("\n")[0])), "other")
        for row in rows
        if row["outcome"] == "refused"
    )


def _share(count: int, total: int) -> str:
    return f"{count / max(total, 1):.1%}"


def _place(row: Row) -> str:
    place = re.sub(r"^transformers/models/\w+/", "", row.get("line", ""))
    return place[:110]


def _code(text: str) -> str:
    text = text.replace("|", "\\|").replace("`", "'")
    return f"`{text}`" if text else ""


def _text(row: Row) -> str:
    if row["outcome"] == "different":
        return f"loss {row['loss_apart']:.1e}, weights {row['weights_apart']:.1e}, moves {row['moves_apart']:.1e} apart"
    text = " ".join(row.get("detail", "").split())[:200]
    return re.sub(r"([|<>*_`\[\]])", r"\\\1", text)
