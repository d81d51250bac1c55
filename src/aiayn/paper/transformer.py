"""The Transformer of section 3: encoder, decoder, and one embedding for source, target and softmax."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from aiayn.paper.attention import MemoryAttention, SelfAttention
from aiayn.paper.batch import Batch, Packing, static_rows, to_device
from aiayn.paper.dropout import Dropout, Randomness, draw, layer_keys
from aiayn.paper.layers import AddAndNorm, FeedForward, positional_encoding, product

# S source tokens, T target tokens of all sentences, packed; B sentences; D d_model


class EncoderLayer(nn.Module):
    """Self-attention, then the feed-forward network (3.1)."""

    def __init__(self, d_model: int, d_ff: int, num_heads: int, d_k: int, d_v: int, dropout: float) -> None:
        super().__init__()
        self.self_attention = SelfAttention(d_model, num_heads, d_k, d_v)
        self.feed_forward = FeedForward(d_model, d_ff)
        self.after_self_attention = AddAndNorm(d_model, dropout)
        self.after_feed_forward = AddAndNorm(d_model, dropout)

    def forward(self, x: Tensor, packing: Packing, randomness: Randomness | None = None) -> Tensor:
        """x (S, D) to (S, D)."""
        x = self.after_self_attention(x, self.self_attention(x, packing, causal=False), randomness)
        return self.after_feed_forward(x, self.feed_forward(x), randomness)  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Masked self-attention, attention to the encoder's output, then the feed-forward network (3.1)."""

    def __init__(self, d_model: int, d_ff: int, num_heads: int, d_k: int, d_v: int, dropout: float) -> None:
        super().__init__()
        self.self_attention = SelfAttention(d_model, num_heads, d_k, d_v)
        self.memory_attention = MemoryAttention(d_model, num_heads, d_k, d_v)
        self.feed_forward = FeedForward(d_model, d_ff)
        self.after_self_attention = AddAndNorm(d_model, dropout)
        self.after_memory_attention = AddAndNorm(d_model, dropout)
        self.after_feed_forward = AddAndNorm(d_model, dropout)

    def forward(
        self, x: Tensor, memory: Tensor, packing: Packing, memory_packing: Packing, randomness: Randomness | None = None
    ) -> Tensor:
        """x (T, D) and the encoder's output (S, D) to (T, D)."""
        x = self.after_self_attention(x, self.self_attention(x, packing, causal=True), randomness)
        attended = self.memory_attention(x, memory, packing, memory_packing)
        x = self.after_memory_attention(x, attended, randomness)
        return self.after_feed_forward(x, self.feed_forward(x), randomness)  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Encoder and decoder of N layers each (3.1), and one embedding for source, target and softmax (3.4).

    The last three arguments make it the Transformer of the released code, where that differs from the paper.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        d_model: int,
        d_ff: int,
        num_heads: int,
        d_k: int,
        d_v: int,
        dropout: float,
        positions: str,
        max_length: int,
        vocab_size: int,
        sinusoids_in_halves: bool = False,
        target_space: bool = False,
        zero_start: bool = False,
    ) -> None:
        super().__init__()
        self.d_model = d_model
        sizes = (d_model, d_ff, num_heads, d_k, d_v, dropout)
        self.encoder = nn.ModuleList(EncoderLayer(*sizes) for _ in range(num_layers))
        self.decoder = nn.ModuleList(DecoderLayer(*sizes) for _ in range(num_layers))
        self.embedding = nn.Embedding(vocab_size, d_model)
        # Paper: silent on row E's tables; one for each side, as the released code had them later
        self.source_positions, self.target_positions = (
            positional_encoding(positions, max_length, d_model, sinusoids_in_halves) for _ in range(2)
        )
        self.positions_before_every_layer = False  # beyond Table 3: True, not before the first alone
        self.source_dropout, self.target_dropout = Dropout(dropout), Dropout(dropout)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                # Paper: silent; the released code's initialisation, which has unit variance times sqrt(d_model). Row
                # E's vectors, not multiplied, start as small: docs/notebook.md has what larger ones gain
                nn.init.normal_(module.weight, std=d_model**-0.5)
        # Paper: none; the released code learns a vector for each kind of target and uses the one of its corpus: the
        # first here, since with one kind of target they are all alike
        self.target_spaces = nn.Parameter(nn.init.xavier_uniform_(torch.empty(32, d_model))) if target_space else None
        self.zero_start = zero_start
        self.rows = 0  # of compiled stacks
        self.compiled_stacks: Callable[..., Tensor] | None = None
        for side in ([self.source_dropout, self.encoder], [self.target_dropout, self.decoder]):
            dropouts = (module for part in side for module in part.modules() if isinstance(module, Dropout))
            for number, module in enumerate(dropouts):
                module.number = number

    def forward(self, batch: Batch, seed_and_update: tuple[int, int] | None = None) -> Tensor:
        """The logits (T, vocabulary) of each target token, given the source and the target tokens before it."""
        return self.logits(self.hidden(batch, seed_and_update))

    def hidden(self, batch: Batch, seed_and_update: tuple[int, int] | None = None) -> Tensor:
        """The decoder's output (T, D), from which `logits` follow.

        In training, dropout is a function of the run's seed, the number of the update and each token's number in it.
        """
        source = self.pack(batch.source, batch.source_offsets, self.source_positions)
        target = self.pack(batch.target_input, batch.target_offsets, self.target_positions)
        for_source = self._draw(seed_and_update, "source", 1 + 2 * len(self.encoder), batch.first_source, source)
        for_target = self._draw(seed_and_update, "target", 1 + 3 * len(self.decoder), batch.first_target, target)
        stacks = self.compiled_stacks if self.compiled_stacks is not None and torch.is_grad_enabled() else self.stacks
        tokens = source.fill(batch.source), target.fill(batch.target_input)
        return stacks(*tokens, source, target, for_source, for_target)[: target.tokens]

    def stacks(
        self,
        source: Tensor,
        target_input: Tensor,
        source_packing: Packing,
        packing: Packing,
        source_randomness: Randomness | None,
        randomness: Randomness | None,
    ) -> Tensor:
        """Source (S,) and target shifted right (T,) as (T, D)."""
        memory = self.encode(source, source_packing, source_randomness)
        return self.decode(target_input, packing, memory, source_packing, randomness)

    def compile_stacks(self, rows: int, **options: Any) -> None:
        """Compiles encoder and decoder in training, once for all batches of up to `rows` tokens a side.

        Batches are filled up to so many rows, larger ones to twice as many, and so on. The options are torch.compile's.
        """
        self.rows, self.compiled_stacks = rows, torch.compile(self.stacks, **options)

    def is_compiled(self) -> bool:
        """Whether `hidden` runs compiled stacks now: not in evaluation, which is not worth the compiler's time."""
        return self.compiled_stacks is not None and torch.is_grad_enabled()

    def pack(self, tokens: Tensor, offsets: Tensor, positions: nn.Module) -> Packing:
        """The boundaries `offsets` (B + 1,) of a side's sentences, for the device of its tokens (S,) or (T,)."""
        rows = static_rows(len(tokens)) if tokens.device.type == "cpu" else None
        if self.is_compiled():
            rows = -(-len(tokens) // self.rows) * self.rows
        packing = Packing(offsets, rows, tokens.device)
        positions.extend(packing.max_position)  # type: ignore[operator]
        if self.is_compiled():
            # The one size that differs from batch to batch; torch.compiler has no public name for one dimension
            torch._dynamo.mark_dynamic(packing.kernel_offsets, 0)
        return packing

    def _draw(
        self, seed_and_update: tuple[int, int] | None, side: str, layers: int, first: int, packing: Packing
    ) -> Randomness | None:
        """What the dropout layers of one side draw from; None where nothing is dropped."""
        if seed_and_update is None or not self.training or self.source_dropout.probability == 0:
            return None
        keys = to_device(layer_keys(*seed_and_update, side, layers), packing.device)
        return draw(keys, first, packing.rows, self.d_model)

    def encode(self, source: Tensor, packing: Packing, randomness: Randomness | None = None) -> Tensor:
        """The source (S,) as memory (S, D)."""
        x = self.source_dropout(self.embed_source(source, packing.positions), randomness)
        for number, layer in enumerate(self.encoder):
            if number and self.positions_before_every_layer:
                x = x + self.source_positions(packing.positions)
            x = layer(x, packing, randomness)
        return x  # type: ignore[no-any-return]

    def decode(
        self,
        target_input: Tensor,
        packing: Packing,
        memory: Tensor,
        memory_packing: Packing,
        randomness: Randomness | None = None,
    ) -> Tensor:
        """The target shifted right (T,) and the memory (S, D) as (T, D)."""
        x = self.target_dropout(self.embed_target(target_input, packing.positions), randomness)
        for number, layer in enumerate(self.decoder):
            if number and self.positions_before_every_layer:
                x = x + self.target_positions(packing.positions)
            x = layer(x, memory, packing, memory_packing, randomness)
        return x  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (..., D) as (..., vocabulary), with the embedding's weights (3.4)."""
        # Paper: silent on a bias of the softmax; the released code has none
        return product(hidden, self.embedding.weight)

    def embed_source(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Source tokens (...) at positions (...) as (..., D)."""
        positions = self.source_positions(positions)
        if self.target_spaces is not None:
            positions = positions + self.target_spaces[0]
        return self.embed(tokens) + positions

    def embed_target(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Input tokens of the decoder (...) at positions (...) as (..., D)."""
        x = self.embed(tokens)
        if self.zero_start:
            # Paper: silent on the first input of the decoder (3.1); the released code has zeros, not an embedding
            x = x.masked_fill((positions == 0).unsqueeze(-1), 0)
        return x + self.target_positions(positions)  # type: ignore[no-any-return]

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens (...) as (..., D), times sqrt(d_model) (3.4)."""
        return self.embedding(tokens) * self.d_model**0.5  # type: ignore[no-any-return]
