"""The decoder one token at a time, with the keys and values of earlier tokens kept (section 3.1: auto-regressive)."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from aiayn.paper.attention import merge_heads
from aiayn.paper.batch import Packing
from aiayn.paper.transformer import DecoderLayer, Transformer

# B sentences; W hypotheses of each; L tokens of the longest source; C columns, one for each token of each hypothesis
# D d_model; H heads; K d_k; V d_v


class DecoderState(Protocol):
    """B sentences being decoded, each with W hypotheses, one empty hypothesis at first."""

    def step(self, tokens: Tensor) -> Tensor:
        """The logits (B, W, vocabulary) after one more token (B, W) of each hypothesis; the first ones are BOS."""

    def reorder(self, parents: Tensor) -> None:
        """Hypothesis w of sentence b continues what was hypothesis parents[b, w] (B, W'); W' may differ from W."""

    def keep(self, sentences: Tensor) -> None:
        """Only the sentences with these numbers (B',) stay, in that order."""


class Decoder(NamedTuple):
    """Where a trained model is, and what begins a batch: source (S,), `source_offsets` (B + 1,)."""

    device: torch.device
    start: Callable[[Tensor, Tensor], DecoderState]


class TransformerDecoding:
    """A batch being decoded: for each layer the memory's keys and values, and those of the tokens so far.

    These stay in the columns where their step put them, whichever hypotheses continue: a mask says which columns hold
    a hypothesis's tokens. So no step moves them.
    """

    def __init__(self, transformer: Transformer, source: Tensor, source_offsets: Tensor) -> None:
        assert not transformer.training, "dropout would be on: call eval()"
        packing = transformer.pack(source, source_offsets, transformer.source_positions)
        memory = transformer.encode(packing.fill(source), packing)
        self.transformer, self.num_tokens = transformer, 0
        self.layers = [_LayerCache(layer, memory, packing) for layer in transformer.decoder]  # type: ignore[arg-type]
        self.memory_mask = packing.mask  # (B, 1, 1, L) or None
        # (B, 1, W, C); None as long as there was never more than one hypothesis
        self.past_mask: Tensor | None = None
        self.position = torch.empty(0, dtype=torch.int64, device=memory.device)  # (C,) of each column's token

    def step(self, tokens: Tensor) -> Tensor:
        """See DecoderState."""
        width = tokens.size(1)
        self.transformer.target_positions.extend(self.num_tokens + 1)
        position = torch.full((width,), self.num_tokens, device=tokens.device)
        self.position = torch.cat((self.position, position))
        if self.past_mask is not None:
            new = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(len(tokens), 1, -1, -1)
            self.past_mask = torch.cat((self.past_mask, new), 3)
        x = self.transformer.embed_target(tokens, position)  # (B, W, D)
        distance = (self.position - self.num_tokens).unsqueeze(0)  # (1, C)
        for number, layer in enumerate(self.layers):
            if number and self.transformer.positions_before_every_layer:
                x = x + self.transformer.target_positions(position)
            x = layer.step(x, self.past_mask, distance, self.memory_mask)
        self.num_tokens += 1
        return self.transformer.logits(x)

    def reorder(self, parents: Tensor) -> None:
        """See DecoderState."""
        if self.past_mask is None:
            shape = len(parents), 1, parents.size(1), self.num_tokens
            self.past_mask = torch.ones(shape, dtype=torch.bool, device=parents.device)
        else:
            rows = parents[:, None, :, None].expand(-1, -1, -1, self.past_mask.size(3))
            self.past_mask = self.past_mask.gather(2, rows)

    def keep(self, sentences: Tensor) -> None:
        """See DecoderState."""
        self.past_mask = None if self.past_mask is None else self.past_mask.index_select(0, sentences)
        self.memory_mask = None if self.memory_mask is None else self.memory_mask.index_select(0, sentences)
        for layer in self.layers:
            layer.keep(sentences)


class _LayerCache:
    def __init__(self, layer: DecoderLayer, memory: Tensor, packing: Packing) -> None:
        self.layer = layer
        parts = layer.memory_attention.project_memory(packing.pad(memory))
        self.memory = [part.contiguous() for part in parts]  # (B, H, L, K), (B, H, L, V)
        self.past: list[Tensor] = []  # (B, H, C, K), (B, H, C, V)

    def step(self, x: Tensor, past_mask: Tensor | None, distance: Tensor, memory_mask: Tensor | None) -> Tensor:
        """The layer's output for the next token of each hypothesis, both (B, W, D)."""
        layer, own, memory = self.layer, self.layer.self_attention, self.layer.memory_attention
        queries, *new = own.project(x)
        self.past = [torch.cat(pair, 2) for pair in zip(self.past, new, strict=True)] if self.past else new
        keys, values = self.past
        heads = own.heads(queries, keys, values, past_mask, distance)
        x = layer.after_self_attention(x, own.output(merge_heads(heads)), None)
        keys, values = self.memory
        heads = memory.heads(memory.project(x), keys, values, memory_mask, None)
        x = layer.after_memory_attention(x, memory.output(merge_heads(heads)), None)
        return layer.after_feed_forward(x, layer.feed_forward(x), None)  # type: ignore[no-any-return]

    def keep(self, sentences: Tensor) -> None:
        self.memory, self.past = ([x.index_select(0, sentences) for x in part] for part in (self.memory, self.past))
