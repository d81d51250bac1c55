"""A Transformer with parts of rows beyond Table 3."""

from typing import Any

from aiayn.alternatives.scores import AdditiveScores, RelativePositions, dot_products
from aiayn.paper.attention import MemoryAttention, SelfAttention
from aiayn.paper.layers import AddAndNorm
from aiayn.paper.transformer import Transformer


def transformer(*, kind: str, positions: str, scores: str, residual: str, **sizes: Any) -> Transformer:
    """The Transformer with parts as `model` of a configuration names them; sizes are those of Transformer."""
    assert kind == "transformer"
    model = Transformer(positions=positions, **sizes)
    for module in model.modules():
        if isinstance(module, SelfAttention | MemoryAttention):
            if scores == "dot":
                module.scores = dot_products
            elif scores == "additive":
                module.scores = AdditiveScores(module.num_heads, module.d_k)
            elif positions == "relative" and isinstance(module, SelfAttention):
                module.bias = RelativePositions(module.num_heads, module.d_k)
        elif isinstance(module, AddAndNorm):
            module.residual = residual == "connections"
    model.positions_before_every_layer = residual == "positions"
    return model
