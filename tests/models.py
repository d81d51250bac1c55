"""A small Transformer and sentences for it that several tests share."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate, chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiayn.alternatives import parts
from aiayn.paper.batch import Batch
from aiayn.paper.transformer import Transformer

BOS, EOS = 2, 3
VOCAB = 23
SOURCES = [[5, 7, 11, EOS], [13, EOS], [4, 4, 6, 5, 9, EOS]]
TARGETS = [[8, EOS], [10, 12, 13, 4, EOS], [7, 6, EOS]]
SIZES = {"num_layers": 2, "d_model": 14, "d_ff": 19, "num_heads": 3, "d_k": 5, "d_v": 7, "dropout": 0.1}

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


Made = Callable[[], Transformer]
# Table 3's with both kinds of positions, and with each part of the rows beyond it
VARIANTS = {"table_3": {}, "learned_positions": {"positions": "learned"}, **PARTS}
MODELS = pytest.mark.parametrize("made", [partial(transformer, **part) for part in VARIANTS.values()], ids=VARIANTS)


def pack(sentences: list[list[int]]) -> tuple[Tensor, Tensor]:
    """The sentences' tokens and offsets."""
    return torch.tensor([*chain(*sentences)]), torch.tensor([0, *accumulate(map(len, sentences))])


def batch(sources: list[list[int]] = SOURCES, targets: list[list[int]] = TARGETS) -> Batch:
    """The pairs as one Batch."""
    (source, source_offsets), (target, target_offsets) = pack(sources), pack(targets)
    target_input, _ = pack([[BOS, *target[:-1]] for target in targets])
    return Batch(source, target, target_input, source_offsets, target_offsets)
