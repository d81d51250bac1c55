"""A small Transformer and sentences for it that several tests share."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate, chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiayn.alternatives import parts
from aiayn.alternatives.recurrent import RecurrentModel
from aiayn.paper.batch import Batch
from aiayn.paper.transformer import Transformer

BOS, EOS = 2, 3
VOCAB = 23
SOURCES = [[5, 7, 11, EOS], [13, EOS], [4, 4, 6, 5, 9, EOS]]
TARGETS = [[8, EOS], [10, 12, 13, 4, EOS], [7, 6, EOS]]
SIZES = {"num_layers": 2, "d_model": 14, "d_ff": 19, "num_heads": 3, "d_k": 5, "d_v": 7, "dropout": 0.1}

RELEASED = {"sinusoids_in_halves": True, "target_space": True, "zero_start": True}
# What Table 3 has, and each row beyond it whose model is a Transformer with one part changed
TABLE_3 = {"kind": "transformer", "positions": "sinusoids", "scores": "scaled", "residual": "connections"}
PARTS: dict[str, dict[str, Any]] = {
    "no_positions": {"positions": "none"},
    "relative_positions": {"positions": "relative"},
    "no_residual": {"residual": "none"},
    "no_residual_positions": {"residual": "positions"},
    "unscaled": {"scores": "dot"},
    "additive": {"scores": "additive"},
}


def transformer(**changes: float | str) -> Transformer:
    """A small float64 model in evaluation mode, no parameter of which is zero or one throughout."""
    torch.manual_seed(17)
    model = parts.transformer(**{**SIZES, **TABLE_3, "max_length": 7, "vocab_size": VOCAB, **changes})
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=0.5)
    return model.double().eval()


def visible(residual: str = "connections", **changes: float | str) -> Transformer:
    """The same with larger weights if it has no residual connections: what is far away would be below rounding."""
    model = transformer(residual=residual, **changes)
    for name, parameter in model.named_parameters():
        if residual != "connections" and parameter.dim() == 2 and "embedding" not in name:
            parameter.data.mul_(4)
    return model


def recurrent(attention: bool, **changes: float) -> RecurrentModel:
    """The same with LSTMs."""
    torch.manual_seed(17)
    sizes = {"num_layers": 2, "d_model": 14, "dropout": 0.1, "vocab_size": VOCAB}
    return RecurrentModel(**{**sizes, **changes}, attention=attention).double().eval()


Made = Callable[..., nn.Module]
# Table 3's with both kinds of positions, the released code's, and the rows beyond it
VARIANTS = {"table_3": {}, "learned_positions": {"positions": "learned"}, "released_code": RELEASED, **PARTS}
BUILDERS: dict[str, Made] = {name: partial(visible, **part) for name, part in VARIANTS.items()}
BUILDERS |= {"rnn": partial(recurrent, False), "rnn_attention": partial(recurrent, True)}
MODELS = pytest.mark.parametrize("made", BUILDERS.values(), ids=BUILDERS)


def pack(sentences: list[list[int]]) -> tuple[Tensor, Tensor]:
    """The sentences' tokens and offsets."""
    return torch.tensor([*chain(*sentences)]), torch.tensor([0, *accumulate(map(len, sentences))])


def batch(sources: list[list[int]] = SOURCES, targets: list[list[int]] = TARGETS) -> Batch:
    """The pairs as one Batch."""
    (source, source_offsets), (target, target_offsets) = pack(sources), pack(targets)
    target_input, _ = pack([[BOS, *target[:-1]] for target in targets])
    return Batch(source, target, target_input, source_offsets, target_offsets)


Score = Callable[[int, Tensor, Tensor, int], Tensor]  # of a head's query and key, whose distance is the last


def attend_by_definition(
    attention: Any,
    x: Tensor,
    memory: Tensor | None,
    causal: bool,
    score: Score = lambda h, q, k, d: q @ k / len(k) ** 0.5,
) -> Tensor:
    """Section 3.2 for one sentence x (T, D) and its memory (S, D), or itself: a loop over heads and pairs of tokens."""
    heads, wide, deep = attention.num_heads, attention.d_k, attention.d_v
    if memory is None:
        projected = attention.query_key_value(x).split([heads * wide, heads * wide, heads * deep], 1)
    else:
        projected = attention.query(x), *attention.key_value(memory).split([heads * wide, heads * deep], 1)
    queries, keys, values = (side.chunk(heads, 1) for side in projected)
    rows = []
    for t in range(len(x)):
        found = []
        for h in range(heads):
            seen = range(t + 1 if causal else len(keys[h]))
            weights = torch.stack([score(h, queries[h][t], keys[h][s], s - t) for s in seen]).exp()
            found.append(sum(w * values[h][s] for w, s in zip(weights / weights.sum(), seen, strict=True)))
        rows.append(torch.cat(found))
    return attention.output(torch.stack(rows))
