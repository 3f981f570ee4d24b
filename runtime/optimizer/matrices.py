"""Which parameters an optimizer for matrices, such as Muon, is meant for."""

from __future__ import annotations

from torch import nn

from ...ir.errors import PlanError


def hidden_matrices(model: nn.Module) -> list[str]:
    """The names of a model's trained parameters of two dimensions, without those of embeddings and of the head: what
    torch.optim.Muon is for. The head is what `model.get_output_embeddings()` returns, or else the last module with a
    matrix. For `param_groups=[{"params": penstock.hidden_matrices(model), "optimizer": ...}]`.

    Raises `PlanError` for a model that has none.
    """
    outer, last = set[int](), list[nn.Parameter]()
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p.dim() == 2]
        if isinstance(module, nn.Embedding):
            outer.update(map(id, own))
        elif own and head is None:
            last = own
    outer.update(map(id, head.parameters() if isinstance(head, nn.Module) else last))
    found = [name for name, p in model.named_parameters() if p.requires_grad and p.dim() == 2 and id(p) not in outer]
    if not found:
        raise PlanError(
            f"hidden_matrices: {type(model).__name__} has no trained matrix beside embeddings and its last layer; name "
            'the parameters, like {"params": ["*.weight"], ...}'
        )
    return found
