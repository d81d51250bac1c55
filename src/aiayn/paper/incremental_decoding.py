"""The decoder one token at a time, with the keys and values of earlier tokens kept (section 3.1: auto-regressive)."""

from typing import Protocol

import torch
from torch import Tensor

from aiayn.paper.attention import MemoryAttention, SelfAttention, attend
from aiayn.paper.batch import Packing
from aiayn.paper.layers import DecoderLayer
from aiayn.paper.transformer import Transformer

# B sentences; W hypotheses of each; L tokens of the longest source; N tokens so far
# D d_model; H heads; K d_k; V d_v


class Decoding(Protocol):
    """B sentences being decoded, each with W hypotheses, one empty hypothesis at first."""

    def step(self, tokens: Tensor) -> Tensor:
        """The logits (B, W, vocabulary) after one more token (B, W) of each hypothesis; the first ones are BOS."""

    def reorder(self, parents: Tensor) -> None:
        """Hypothesis w of sentence b continues what was hypothesis parents[b, w] (B, W'); W' may differ from W."""

    def keep(self, sentences: Tensor) -> None:
        """Only the sentences with these numbers (B',) stay, in that order."""


class Decoder(Protocol):
    """What starts to decode a batch."""

    device: torch.device

    def start(self, source: Tensor, source_offsets: Tensor) -> Decoding:
        """The beginning of a batch: source (S,), `source_offsets` (B + 1,)."""


class IncrementalDecoder:
    """A trained Transformer as a Decoder: the definition that `fast` is compared with."""

    def __init__(self, transformer: Transformer) -> None:
        assert not transformer.training, "dropout would be on: call eval()"
        self.transformer, self.device = transformer, transformer.embedding.weight.device

    def start(self, source: Tensor, source_offsets: Tensor) -> "IncrementalDecoding":
        """The beginning of a batch: source (S,), `source_offsets` (B + 1,)."""
        packing = self.transformer.pack(source, source_offsets)
        memory = self.transformer.encode(packing.fill(source), packing)
        return IncrementalDecoding(self.transformer, memory, packing)


class IncrementalDecoding:
    """A batch being decoded: for each layer the memory's keys and values, and those of the tokens so far."""

    def __init__(self, transformer: Transformer, memory: Tensor, packing: Packing) -> None:
        self.transformer, self.num_tokens = transformer, 0
        self.memory_mask = packing.mask  # (B, 1, 1, L) or None
        self.layers = [_LayerCache(layer, memory, packing) for layer in transformer.decoder]  # type: ignore[arg-type]

    def step(self, tokens: Tensor) -> Tensor:
        """See Decoding."""
        positions = torch.full_like(tokens, self.num_tokens)
        self.transformer.target_positions.extend(self.num_tokens + 1)
        x = self.transformer.embed_target(tokens, positions)  # (B, W, D)
        for number, layer in enumerate(self.layers):
            if number and self.transformer.positions_before_every_layer:
                x = x + self.transformer.target_positions(positions)
            x = layer.step(x, self.memory_mask)
        self.num_tokens += 1
        return self.transformer.logits(x)

    def reorder(self, parents: Tensor) -> None:
        """See Decoding."""
        for layer in self.layers:
            layer.past = [_of_parents(past, parents) for past in layer.past]

    def keep(self, sentences: Tensor) -> None:
        """See Decoding."""
        self.memory_mask = None if self.memory_mask is None else self.memory_mask[sentences]
        for layer in self.layers:
            layer.memory = [memory[sentences] for memory in layer.memory]
            layer.past = [past[sentences] for past in layer.past]


class _LayerCache:
    def __init__(self, layer: DecoderLayer, memory: Tensor, packing: Packing) -> None:
        self.layer = layer
        self.memory = list(layer.memory_attention.keys_and_values(memory, packing))  # (B, H, L, K), (B, H, L, V)
        self.past: list[Tensor] = []  # (B, W, H, N, K), (B, W, H, N, V)

    def step(self, x: Tensor, memory_mask: Tensor | None) -> Tensor:
        """The layer's output for the next token of each hypothesis, both (B, W, D)."""
        layer = self.layer
        x = layer.after_self_attention(x, self._attend_to_past(layer.self_attention, x), None)
        x = layer.after_memory_attention(x, self._attend_to_memory(layer.memory_attention, x, memory_mask), None)
        return layer.after_feed_forward(x, layer.feed_forward(x), None)  # type: ignore[no-any-return]

    def _attend_to_past(self, attention: SelfAttention, x: Tensor) -> Tensor:
        widths = [attention.num_heads * width for width in (attention.d_k, attention.d_k, attention.d_v)]
        parts = attention.query_key_value(x).split(widths, -1)
        query, *new = (part.unflatten(-1, (attention.num_heads, 1, -1)) for part in parts)  # (B, W, H, 1, K)
        self.past = [torch.cat(pair, 3) for pair in zip(self.past, new, strict=True)] if self.past else new
        keys, values = self.past
        heads, _ = attend(attention.scores(query, keys), values, None)
        return attention.output(heads.flatten(2))  # type: ignore[no-any-return]

    def _attend_to_memory(self, attention: MemoryAttention, x: Tensor, mask: Tensor | None) -> Tensor:
        queries = attention.query(x).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)  # (B, H, W, K)
        keys, values = self.memory
        heads, _ = attend(attention.scores(queries, keys), values, mask)
        return attention.output(heads.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def _of_parents(past: Tensor, parents: Tensor) -> Tensor:
    return past[torch.arange(len(parents), device=parents.device).unsqueeze(1), parents]
