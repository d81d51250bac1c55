"""Attention weights of every head, and their statistics over a split: distance, entropy, share on the diagonal."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from aiayn.data.encoded import Pairs
from aiayn.data.update_plan import evaluation_batches, gather
from aiayn.paper.attention import MemoryAttention, SelfAttention, attend, split_heads
from aiayn.paper.batch import Batch, Packing
from aiayn.paper.layers import DecoderLayer, EncoderLayer
from aiayn.paper.transformer import Transformer

# B sentences; H heads; Q query tokens and M tokens that they look at, of the longest sentence

KINDS = {
    "encoder": "Encoder self-attention",
    "decoder": "Decoder self-attention, masked",
    "cross": "Attention of the decoder to the encoder",
}
MEASURES = {  # and what its least and its most are called
    "distance": ("nearest", "farthest"),
    "entropy": ("sharpest", "widest"),
    "diagonal": ("least", "most"),
    "beside it": ("least", "most"),
}

See = Callable[[str, Tensor, Tensor, Packing], None]
"""Takes the kind of a layer's attention, its weights (B, H, Q, M), uniform weights (B, 1, Q, M), and the queries."""


@dataclass
class Sums:
    """What adds up over the query tokens of a split."""

    tokens: dict[str, int]  # of each kind
    # Of each kind and layer, (H + 1, MEASURES) in float64; the last row is of uniform weights
    sums: dict[str, list[Tensor]]

    def means(self, kind: str) -> Tensor:
        """(layers, H + 1, MEASURES) for each query token: tokens, nats, and shares of the weight."""
        return torch.stack(self.sums[kind]) / self.tokens[kind]


def look(model: Transformer, batch: Batch, see: See) -> None:
    """Shows `see` the attention weights of each layer, in order.

    Computed beside the forward pass, from what each attention is given: training knows nothing of it.
    """
    with ExitStack() as hooks, torch.no_grad():
        for layer in [*model.encoder, *model.decoder]:
            assert isinstance(layer, EncoderLayer | DecoderLayer)
            kind = "encoder" if isinstance(layer, EncoderLayer) else "decoder"
            parts: dict[str, nn.Module] = {kind: layer.self_attention}
            if isinstance(layer, DecoderLayer):
                parts["cross"] = layer.memory_attention
            for kind, part in parts.items():
                hooks.enter_context(part.register_forward_hook(partial(_look, see, kind), with_kwargs=True))
        model.eval().hidden(batch)


def _look(
    see: See, kind: str, module: nn.Module, inputs: tuple[Any, ...], options: dict[str, bool], output: Tensor
) -> None:
    if isinstance(module, SelfAttention):
        x, packing = inputs
        mask = packing.causal_mask if options["causal"] else packing.mask
        widths = (module.d_k, module.d_k, module.d_v)
        q, k, v = split_heads(module.query_key_value(x), packing, module.num_heads, widths)
    else:
        assert isinstance(module, MemoryAttention)
        x, memory, packing, memory_packing = inputs
        (q,) = split_heads(module.query(x), packing, module.num_heads, (module.d_k,))
        k, v = module.keys_and_values(memory, memory_packing)
        mask = memory_packing.mask
    scores = module.scores(q, k)
    weights, uniform = (attend(each, v, mask)[1] for each in (scores, torch.zeros_like(scores)))
    see(kind, weights, uniform[:, :1], packing)


def measured(weights: Tensor, is_padding: Tensor) -> Tensor:
    """(H, MEASURES) in float64: sums over the query tokens of weights (B, H, Q, M), where (B, Q) is no padding."""
    weights = weights.double().masked_fill(is_padding[:, None, :, None].to(weights.device), 0)
    queries, keys = (torch.arange(length, device=weights.device) for length in weights.shape[-2:])
    distance = (queries.unsqueeze(1) - keys).abs()
    parts = (weights * distance, torch.special.entr(weights), weights * (distance == 0), weights * (distance == 1))
    return torch.stack([part.sum((0, 2, 3)) for part in parts], -1).cpu()


def measure(model: Transformer, pairs: Pairs, tokens_per_batch: int, done: Callable[[int], None]) -> Sums:
    """The sums over a split, each token of it once and its batches all the same; `done` gets numbers of sentences."""
    found = Sums(dict.fromkeys(KINDS, 0), {kind: [] for kind in KINDS})
    for sentences in evaluation_batches(pairs.source_lengths, pairs.target_lengths, tokens_per_batch):
        of_batch: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}

        def see(kind: str, weights: Tensor, uniform: Tensor, packing: Packing, to: Any = of_batch) -> None:
            to[kind].append(measured(torch.cat((weights, uniform), 1), packing.is_padding))

        look(model, gather(pairs, sentences).to(next(model.parameters()).device), see)
        for kind, layers in of_batch.items():
            before = found.sums[kind] or [torch.zeros_like(layer) for layer in layers]
            found.sums[kind] = [sum_ + layer for sum_, layer in zip(before, layers, strict=True)]
        done(len(sentences))
    sizes = (len(pairs.source_ids), len(pairs.target_ids), len(pairs.target_ids))
    found.tokens = dict(zip(KINDS, sizes, strict=True))
    return found


def text(found: Sums) -> str:
    """A table of all heads, named `layer.head`, a line of uniform weights under each kind, and the extreme heads."""
    parts = []
    for kind, title in KINDS.items():
        means = found.means(kind)
        names = [f"{layer}.{head}" for layer in range(1, len(means) + 1) for head in range(1, means.size(1))]
        heads = means[:, :-1].flatten(0, 1)
        # Uniform weights are the same in every layer
        rows = [(name, *_cells(values.tolist())) for name, values in zip(names, heads, strict=True)]
        rows.append(("uniform", *_cells(means[0, -1].tolist())))
        head = ("head", "distance", "entropy, nats", "diagonal", "beside it")
        table = tabulate(rows, head, tablefmt="plain", stralign="right", disable_numparse=True)
        extremes = []
        for number, (name, (low, high)) in enumerate(MEASURES.items()):
            least, most = (rows[int(place)] for place in (heads[:, number].argmin(), heads[:, number].argmax()))
            extremes.append(f"{name}: {low} {least[0]} ({least[number + 1]}), {high} {most[0]} ({most[number + 1]})")
        parts.append(f"{title}, over {found.tokens[kind]:,} query tokens\n{table}\n" + "\n".join(extremes))
    return "\n\n".join(parts)


def _cells(values: Sequence[float]) -> list[str]:
    distance, entropy, *shares = values
    return [f"{distance:.2f}", f"{entropy:.2f}", *(f"{100 * share:.1f} %" for share in shares)]
