"""Scale losses that are sums over rows, and describe rows that meet.

In: the facts of a model's loss (`graph/follow/rows.py`). Out: graphs whose losses average to that of the whole
batch, the number of micro-batches that is left to "auto", and the words for errors and `explain`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

from ...ir.errors import CaptureError, DoesNotFit
from ..edit import GraphEdit, set_outputs
from ..operators.record import no_record
from ..operators.states import Kind
from ..opgraph import OpGraph
from .rows import Coupling, GraphOf, RowFacts, row_facts

MOST_NAMED = 4


def find_facts(trace: GraphOf, counts: Sequence[int], batch_size: int, device_kind: str) -> RowFacts:
    """The facts of a loss. `counts`: the numbers of micro-batches that may be planned, the likeliest first."""
    try:
        return row_facts(trace, counts[0], batch_size, device_kind, is_whole=[*counts] == [1])
    except CaptureError:  # a model that needs more rows than a micro-batch has
        if counts[0] == 1 or len(counts) == 1:
            raise
    return row_facts(trace, 1, batch_size, device_kind)


def scaled_loss(graph: OpGraph, facts: RowFacts, num_micro_batches: int) -> OpGraph:
    """The graph with its loss multiplied by the facts' factor, in place: then the losses of `num_micro_batches`
    micro-batches average to that of the whole batch. Notes which buffers are alike before each of these."""
    graph.repeated_buffers = facts.repeated_buffers
    factor, loss = facts.factor(num_micro_batches), graph.outputs["loss"]
    if factor == 1:
        return graph
    edit = GraphEdit(graph, graph.graph.output_node(), like=loss)
    made = edit.put("call_function", operator.mul, (loss, factor), loss.meta["val"] * factor)
    made.meta.update(module_path="", module_type=type(graph.model).__name__, module_call=0)
    set_outputs(graph, graph.outputs | {"loss": made})
    graph.module.recompile()
    return graph


def coupled_miss(miss: DoesNotFit, couplings: Sequence[Coupling]) -> DoesNotFit:
    """The same error, which says why nothing was tried with more than one micro-batch."""
    message = (
        f"{str(miss).rstrip('.')}. Rows of a batch are coupled: {coupling_text(couplings[0])}. So "
        'micro_batches="auto" means one micro-batch on one lane; an explicit micro_batches=... is possible and would '
        "train with another loss"
    )
    return DoesNotFit(message, memory=miss.memory, missing_bytes=miss.missing_bytes, nearest=miss.nearest)


def fact_lines(facts: RowFacts, total_micro_batches: int, asynchronous: bool) -> Iterator[str]:
    """The lines of `explain` about the rows of a batch, or, where it is `asynchronous`, of a mini-batch of
    `total_micro_batches` micro-batches."""
    if asynchronous and total_micro_batches == 1:
        return
    if facts.power:
        factor = "M" if facts.power == 1 else f"M ** {facts.power}"
        what = "a sum over rows" if facts.power == 1 else f"proportional to the number of rows ** {facts.power}"
        yield f"the loss is {what}: that of each of M micro-batches is multiplied by {factor} before they are averaged"
    if facts.updates and total_micro_batches > 1:
        yield (
            f"no row influences what forward writes into {_names(facts.repeated_buffers)}: each of "
            f"{total_micro_batches} micro-batches begins with the same values, so that a step updates them once"
        )
    if not facts.couplings:
        return
    if total_micro_batches == 1:
        yield "rows of a batch are coupled; there is one micro-batch, so the loss is that of the whole batch:"
    else:
        what, one = ("a mini-batch", "accumulate=1") if asynchronous else ("a batch", "micro_batches=1")
        yield (
            f"rows of {what} are coupled, and each of {total_micro_batches} micro-batches has only its own: the loss "
            f"is not that of the whole {what[2:]}, which {one} on one lane would give:"
        )
    yield from _coupling_lines(facts.couplings)


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"


def _coupling_lines(couplings: Sequence[Coupling]) -> Iterator[str]:
    norms = [coupling for coupling in couplings if coupling.kind is Kind.BATCH_NORM]
    others = [coupling for coupling in couplings if coupling.kind is not Kind.BATCH_NORM]
    if norms:
        yield (
            f"  BatchNorm: {_names([norm.module for norm in norms])}: its statistics, also those it keeps for "
            "evaluation, are those of a micro-batch"
        )
    yield from (f"  {coupling_text(coupling)}" for coupling in others[:MOST_NAMED])
    if len(others) > MOST_NAMED:
        yield f"  and {len(others) - MOST_NAMED} more places"


WORDS = {
    Kind.BATCH_NORM: "{module} is BatchNorm in training mode, whose statistics are those of a micro-batch",
    Kind.PAIRS: "{operator} takes rows together with all other rows",
    Kind.ACROSS: "{operator} runs across the rows",
    Kind.REORDERED: "{operator} puts rows in the place of other rows",
    Kind.REUSED: "{operator} uses for each row what all rows give together",
    Kind.NONLINEAR: "{operator} of what is summed over the rows is not linear",
    Kind.RATIO: "{operator} divides a sum over the rows by another one",
    Kind.COUNT: "the loss divides by {operator} of a micro-batch alone",
    Kind.UNEVEN: "{operator} joins a sum over the rows with a value that is none",
    Kind.ROW_NUMBER: "{operator} depends on the number of a row in its micro-batch",
    Kind.GRADIENT: "the backward of {operator} takes rows together, or does not add up over them",
    Kind.BUFFER: "forward updates the buffer {operator}, once for each micro-batch",
    Kind.ROW_COUNT: "the loss depends on how many rows there are, other than as a sum or a mean does",
    Kind.UNKNOWN: "{operator} may mix rows: what it does to them is not known",
}


def coupling_text(coupling: Coupling) -> str:
    """Say in words where rows meet."""
    if coupling.kind is Kind.NO_RECORD:
        return no_record(coupling.operator, coupling.source)
    text = WORDS[coupling.kind].format(module=coupling.module, operator=coupling.operator)
    return f"{text} at {coupling.source}" if coupling.source else text
