"""The file of a folder that says what is counted, and checked, in a batch before each step.

In: the graph from a micro-batch's rows to counts, the graph from the batch's counts to divisors, and the graph from a
micro-batch's rows to the numbers of table rows and classes. Out: Python source with a class for each, in the form of a
device's stages.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from ..ir.program import ParamSpec, StageSpec, TensorSpec
from .block_source import BlockLibrary
from .file import BASES
from .imports import Imports
from .paths import camel_case
from .stage_source import StageSource

HEAD = """What is counted over the whole batch before each step, as divisors of terms of the loss.

`Counts` takes the rows of one micro-batch; its results are added up over all micro-batches."""
DIVISORS = " `Divisors` makes the\ndivisors of the sums."
PICKS = """`Picks` takes the rows of one micro-batch and gives the numbers of the rows of tables, and of the classes of
losses, that the step picks: they are checked before it."""


def write_counts(graphs: Mapping[str, fx.GraphModule], imports: Imports) -> str:
    """The source of `counts`, `divisors` and `picks`, as far as they are there."""
    library = BlockLibrary(imports)
    sources = [StageSource(_spec(name, graph), graph, library) for name, graph in graphs.items()]
    library.name_classes([camel_case(name) for name in graphs])
    classes = [*library.sources(), *(source.source() for source in sources)]
    table = ", ".join(f'"{name}": {camel_case(name)}' for name in graphs)
    heads = [HEAD + (DIVISORS if "divisors" in graphs else "")] if "counts" in graphs else []
    heads += [PICKS] if "picks" in graphs else []
    text = "\n\n".join(heads)
    top = f'"""{text}\n"""\n\n{imports.text()}\n\n{BASES}'
    parts = [top, *imports.copied.values(), *classes, f"STAGES = {{{table}}}"]
    return "\n\n\n".join(parts) + "\n"


def _spec(name: str, graph: fx.GraphModule) -> StageSpec:
    results = next(n for n in graph.graph.nodes if n.op == "output").args[0]
    return StageSpec(
        name=name,
        inputs=tuple(_tensor(n) for n in graph.graph.nodes if n.op == "placeholder"),
        outputs=tuple(_tensor(n) for n in results),
        params=(),
        buffers=tuple(
            ParamSpec(buffer, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), False)
            for buffer, tensor in graph.named_buffers()
        ),
    )


def _tensor(node: fx.Node) -> TensorSpec:
    value = node.meta["val"]
    return TensorSpec(node.name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
