"""The Transformer of section 3: encoder, decoder, embeddings, positions."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aiayn.attention import MemoryAttention, SelfAttention, Sentences
from aiayn.batching import Batch
from aiayn.decoding import Decoder, DecoderLayout
from aiayn.dropout import Dropout, RandomBits, layer_keys, random_bits
from aiayn.kernels import LayerKernel
from aiayn.linear import Linear, product, sent, static_rows

# S source tokens, T target tokens of all sentences, packed; B sentences
# D d_model


class AddAndNorm(nn.Module):
    """LayerNorm(x + Dropout(Sublayer(x))) around every sub-layer (3.1, 5.4)."""

    def __init__(self, d_model: int, dropout: float) -> None:
        super().__init__()
        # Paper: silent on epsilon; 1e-6 in the released code. The norm stands after the sum (3.1), so none ends a stack
        self.norm = nn.LayerNorm(d_model, eps=1e-6)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, sublayer_of_x: Tensor, bits: RandomBits | None = None) -> Tensor:
        """The input of a sub-layer and its output, added and normalised."""
        return self.norm(x + self.dropout(sublayer_of_x, bits))  # type: ignore[no-any-return]


class FeedForward(nn.Sequential):
    """max(0, x W1 + b1) W2 + b2, Eq. 2 (3.3)."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        # Paper: residual dropout only (5.4), so none between the two layers
        super().__init__(Linear(d_model, d_ff), nn.ReLU(inplace=True), Linear(d_ff, d_model))

    def layers(self) -> tuple[Linear, Linear]:
        """Both linear layers."""
        first, _, second = self
        assert isinstance(first, Linear)
        assert isinstance(second, Linear)
        return first, second


class EncoderLayer(nn.Module):
    """Self-attention, then the feed-forward network (3.1)."""

    def __init__(self, d_model: int, d_ff: int, num_heads: int, d_k: int, d_v: int, dropout: float) -> None:
        super().__init__()
        self.self_attention = SelfAttention(d_model, num_heads, d_k, d_v)
        self.feed_forward = FeedForward(d_model, d_ff)
        self.after_self_attention = AddAndNorm(d_model, dropout)
        self.after_feed_forward = AddAndNorm(d_model, dropout)

    def forward(self, x: Tensor, sentences: Sentences, bits: Sequence[RandomBits | None] = (None, None)) -> Tensor:
        """x (S, D) to (S, D), with the bits of both dropouts."""
        x = self.after_self_attention(x, self.self_attention(x, sentences, causal=False), bits[0])
        return self.after_feed_forward(x, self.feed_forward(x), bits[1])  # type: ignore[no-any-return]

    def kernel(self) -> LayerKernel:
        """The same in C."""
        attention = self.self_attention
        products = [attention.query_key_value, attention.output, *self.feed_forward.layers()]
        norms = [self.after_self_attention.norm, self.after_feed_forward.norm]
        return LayerKernel(products, norms, attention.num_heads, attention.d_k, attention.d_v)


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
        self,
        x: Tensor,
        memory: Tensor,
        sentences: Sentences,
        memory_sentences: Sentences,
        bits: Sequence[RandomBits | None] = (None, None, None),
    ) -> Tensor:
        """x (T, D) and the encoder's output (S, D) to (T, D), with the bits of all three dropouts."""
        x = self.after_self_attention(x, self.self_attention(x, sentences, causal=True), bits[0])
        looked_up = self.memory_attention(x, memory, sentences, memory_sentences)
        x = self.after_memory_attention(x, looked_up, bits[1])
        return self.after_feed_forward(x, self.feed_forward(x), bits[2])  # type: ignore[no-any-return]

    def layout(self, *, compiled: bool) -> DecoderLayout:
        """The same for one token at a time."""
        norms = (self.after_self_attention.norm, self.after_feed_forward.norm, self.after_memory_attention.norm)
        return DecoderLayout(
            self.self_attention, self.memory_attention, self.feed_forward.layers(), norms, compiled=compiled
        )


class Sinusoids(nn.Module):
    """Positional encoding of section 3.5; positions are computed for as long a sentence as ever came."""

    def __init__(self, d_model: int, in_halves: bool = False) -> None:
        super().__init__()
        if d_model % 2:
            raise ValueError(f"model.d_model is {d_model}, but sinusoids are pairs of sine and cosine: make it even")
        self.d_model = d_model
        self.make = sinusoids_in_halves if in_halves else sinusoids
        self.register_buffer("table", torch.empty(0, d_model), persistent=False)
        self.table: Tensor

    def reach(self, length: int) -> None:
        """Makes ready for positions below `length`."""
        if length > len(self.table):
            self.table = self.make(length, self.d_model).to(self.table)

    def forward(self, positions: Tensor) -> Tensor:
        """Positions that are in reach (...) as (..., D)."""
        return F.embedding(positions, self.table)


def sinusoids(length: int, d_model: int) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = the cosine (3.5), as (length, D) float64."""
    wavelengths = 10000 ** (torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    angles = torch.arange(length, dtype=torch.float64).unsqueeze(1) / wavelengths
    # Paper: sines and cosines alternate (3.5); the released code has all sines first, and wavelengths a little longer
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1)


def sinusoids_in_halves(length: int, d_model: int) -> Tensor:
    """The same as the released code has them: all sines, then all cosines; the last wavelength is 10000 * 2 pi."""
    # Paper: the exponent 2i / d_model never reaches 1 (3.5), though the text beside it says 10000 * 2 pi as well
    wavelengths = torch.logspace(0, 4, d_model // 2, dtype=torch.float64)
    angles = torch.arange(length, dtype=torch.float64).unsqueeze(1) / wavelengths
    return torch.cat((angles.sin(), angles.cos()), 1)


class LearnedPositions(nn.Embedding):
    """Row E of Table 3: one learned vector for each position."""

    def reach(self, length: int) -> None:
        """Nothing to do: the table stays as long as it is."""

    def forward(self, positions: Tensor) -> Tensor:
        """Positions (...) as (..., D)."""
        # Paper: silent on positions beyond the table; here they share its last row
        return super().forward(positions.clamp(max=self.num_embeddings - 1))


class Transformer(nn.Module):
    """Encoder and decoder of N layers each, and one embedding for source, target and softmax (3.4).

    The last three arguments turn it into the Transformer of the released code, where that differs from the paper.
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
        learned_positions: bool,
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
            LearnedPositions(max_length, d_model) if learned_positions else Sinusoids(d_model, sinusoids_in_halves)
            for _ in range(2)
        )
        self.dropout = Dropout(dropout)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                # Paper: silent; the released code's initialisation, which has unit variance times sqrt(d_model)
                nn.init.normal_(module.weight, std=d_model**-0.5)
        # Paper: none; the released code learns a vector for each kind of target and uses the one of its corpus: the
        # first here, since with one kind of target they are all alike
        self.target_spaces = nn.Parameter(nn.init.xavier_uniform_(torch.empty(32, d_model))) if target_space else None
        self.zero_start = zero_start
        self.fused_stacks: Callable[..., Tensor] | None = None
        self.fused_rows = 0

    def forward(self, batch: Batch, seed_and_update: tuple[int, int] | None = None) -> Tensor:
        """The logits (T, vocabulary) of each target token, given the source and the target tokens before it."""
        return self.logits(self.hidden(batch, seed_and_update))

    def hidden(self, batch: Batch, seed_and_update: tuple[int, int] | None = None) -> Tensor:
        """What `logits` turns into the logits, as (T, D): the loss does that itself, a part at a time.

        Training with dropout needs the run's seed and the number of the update: masks are a function of both, and of
        the numbers of the batch's tokens in the update.
        """
        fused_rows = self.fused_rows if self.is_fused else 0
        source = self._source(batch.source, batch.source_offsets, fused_rows)
        target = self._filled(batch.target, batch.target_offsets, fused_rows)
        self.target_positions.reach(target.bound)
        stacks = self.stacks
        if self.is_fused:
            assert self.fused_stacks is not None
            stacks = self.fused_stacks
            # The one size that differs from batch to batch
            for sentences in (source, target):
                torch._dynamo.mark_dynamic(sentences.borders, 0)
        of_source = self._bits("source", 1 + 2 * len(self.encoder), seed_and_update, batch.first_source, source)
        of_target = self._bits("target", 1 + 3 * len(self.decoder), seed_and_update, batch.first_target, target)
        ids, target_input = source.fill(batch.source), target.fill(batch.target_input)
        stacked = stacks(ids, source, of_source, target_input, target, of_target)
        return stacked[: target.tokens]

    def stacks(
        self,
        source: Tensor,
        source_sentences: Sentences,
        source_bits: RandomBits | None,
        target_input: Tensor,
        sentences: Sentences,
        bits: RandomBits | None,
    ) -> Tensor:
        """Source (S,) and target shifted right (T,) as (T, D); the bits are those of every dropout on each side."""
        memory = self.encode(source, source_sentences, source_bits)
        return self.decode(target_input, sentences, memory, source_sentences, bits)

    def fuse(self, rows: int, **options: Any) -> None:
        """From now on, what lies between tokens and hidden is compiled: once for all batches of up to `rows` tokens.

        They are filled up to so many on each side, larger ones to twice as many, and so on. The options are those of
        `torch.compile`.
        """
        self.fused_stacks, self.fused_rows = torch.compile(self.stacks, **options), rows

    @property
    def is_fused(self) -> bool:
        """Whether `fuse` was asked for, and gradients are: what is only evaluated is not worth the compiler's time."""
        return self.fused_stacks is not None and torch.is_grad_enabled()

    def encode(self, source: Tensor, sentences: Sentences, bits: RandomBits | None = None) -> Tensor:
        """The source (S,) as memory (S, D)."""
        first, *others = RandomBits.of_layers(bits, 1 + 2 * len(self.encoder))
        x = self.dropout(self._embed_source(source, sentences), first)
        for number, layer in enumerate(self.encoder):
            x = layer(x, sentences, others[2 * number : 2 * number + 2])
        return x  # type: ignore[no-any-return]

    def decode(
        self,
        target_input: Tensor,
        sentences: Sentences,
        memory: Tensor,
        memory_sentences: Sentences,
        bits: RandomBits | None = None,
    ) -> Tensor:
        """The target shifted right (T,) and the memory (S, D) as (T, D)."""
        first, *others = RandomBits.of_layers(bits, 1 + 3 * len(self.decoder))
        positions = self.target_positions(sentences.positions)
        x = self.dropout(self._embed(target_input, positions, self._starts(sentences.positions)), first)
        for number, layer in enumerate(self.decoder):
            x = layer(x, memory, sentences, memory_sentences, others[3 * number : 3 * number + 3])
        return x  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (..., D) as (..., vocabulary), with the embedding's weights (3.4)."""
        return product(hidden, self.embedding.weight)

    def laid_out(self, *, compiled: bool = False) -> Decoder:
        """The decoder for a search, as its weights are now; with `compiled`, for float32 on a CPU, by `kernels`."""
        assert not self.training, "dropout would be on: call model.eval()"
        layouts = [layer.layout(compiled=compiled) for layer in self.decoder]  # type: ignore[operator]
        kernels = [layer.kernel() for layer in self.encoder] if compiled else []  # type: ignore[operator]
        encode = partial(self._memory, kernels)
        return Decoder(layouts, encode, self._embed_at, self.embedding.weight, compiled=compiled)

    def _memory(self, kernels: list[LayerKernel], source: Tensor, offsets: Tensor) -> tuple[Tensor, Sentences]:
        sentences = self._source(source, offsets)
        if not kernels:
            return self.encode(sentences.fill(source), sentences), sentences
        x = self._embed_source(sentences.fill(source), sentences)
        for kernel in kernels:
            kernel.encode(x, offsets)
        return x, sentences

    def _bits(
        self, side: str, layers: int, seed_and_update: tuple[int, int] | None, first: int, sentences: Sentences
    ) -> RandomBits | None:
        """The bits of the dropouts on one side, whose first token has the number `first` in the update."""
        if not self.training or self.dropout.probability == 0:
            return None
        assert seed_and_update is not None, "dropout is a function of seed and update: give both"
        keys = sent(layer_keys(*seed_and_update, side, layers), sentences.positions.device)
        return random_bits(keys, first, sentences.rows, self.d_model)

    def _embed_source(self, source: Tensor, sentences: Sentences) -> Tensor:
        positions = self.source_positions(sentences.positions)
        if self.target_spaces is not None:
            positions = positions + self.target_spaces[0]
        return self._embed(source, positions)

    def _source(self, source: Tensor, offsets: Tensor, rows: int = 0) -> Sentences:
        sentences = self._filled(source, offsets, rows)
        self.source_positions.reach(sentences.bound)
        return sentences

    def _filled(self, tokens: Tensor, offsets: Tensor, rows: int) -> Sentences:
        """The sentences with a multiple of `rows` rows, or if that is 0 with one of few numbers of them."""
        filled = -(-len(tokens) // rows) * rows if rows else static_rows(len(tokens))
        return Sentences(offsets, filled, tokens.device)

    def _embed_at(self, tokens: Tensor, position: int) -> Tensor:
        self.target_positions.reach(position + 1)
        positions = torch.full((1,), position, device=tokens.device)
        return self._embed(tokens, self.target_positions(positions), self._starts(positions))

    def _embed(self, tokens: Tensor, positions: Tensor, empty: Tensor | None = None) -> Tensor:
        """Tokens (...) and positions (..., D) as (..., D); `empty` (..., 1) says where no token stands."""
        x: Tensor = self.embedding(tokens) * self.d_model**0.5
        if empty is not None:
            x = x.masked_fill(empty, 0)
        return x + positions

    def _starts(self, positions: Tensor) -> Tensor | None:
        # Paper: silent on the first input of the decoder (3.1); the released code has zeros in place of an embedding
        return (positions == 0).unsqueeze(-1) if self.zero_start else None
