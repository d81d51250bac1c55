"""Attaches the fast ways to a Transformer; its outputs and gradients stay the same but for rounding."""

from collections.abc import Callable
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor

from aiayn.paper.attention import Linear, MemoryAttention, SelfAttention
from aiayn.paper.batch import Batch
from aiayn.paper.fast.attention import HeadPacking, attend_to_memory, attend_to_self
from aiayn.paper.fast.products import product, static_rows
from aiayn.paper.transformer import Transformer

# S source tokens, T target tokens of all sentences, packed; D d_model


def accelerate(transformer: Transformer) -> Transformer:
    """The same object, with faster products, attention and packing in place of the paper's modules' own."""
    forwards: dict[type, Callable[..., Tensor]] = {
        Linear: lambda self, x: product(x, self.weight, self.bias),
        SelfAttention: attend_to_self,
        MemoryAttention: attend_to_memory,
    }
    for module in transformer.modules():
        if type(module) in forwards:
            module.forward = MethodType(forwards[type(module)], module)
    transformer.logits = lambda hidden: product(hidden, transformer.embedding.weight)  # type: ignore[method-assign]
    transformer.hidden = FastHidden(transformer)  # type: ignore[method-assign]
    return transformer


def compile_stacks(transformer: Transformer, rows: int, **options: Any) -> None:
    """Compiles encoder and decoder of an accelerated Transformer, once for all batches of up to `rows` tokens a side.

    Batches are filled up to so many rows, larger ones to twice as many, and so on. The options are torch.compile's.
    """
    hidden = cast(FastHidden, transformer.hidden)
    hidden.compiled, hidden.rows = torch.compile(hidden.stacks, **options), rows


def is_compiled(transformer: Transformer) -> bool:
    """Whether the next call runs compiled stacks: evaluation does not, since it is not worth the compiler's time."""
    hidden = transformer.hidden
    return isinstance(hidden, FastHidden) and hidden.compiled is not None and torch.is_grad_enabled()


class FastHidden:
    """Transformer.hidden with few different numbers of rows, compiled where `compile_stacks` asks for it."""

    def __init__(self, transformer: Transformer) -> None:
        self.transformer = transformer
        self.compiled: Callable[..., Tensor] | None = None
        self.rows = 0

    def __call__(self, batch: Batch, seed_and_update: tuple[int, int] | None = None) -> Tensor:
        """The decoder's output (T, D)."""
        source = self._pack(batch.source, batch.source_offsets)
        target = self._pack(batch.target, batch.target_offsets)
        randomness = self.transformer.randomness(batch, source, target, seed_and_update)
        stacks = self.stacks
        if is_compiled(self.transformer):
            assert self.compiled is not None
            stacks = self.compiled
            # Outside the graph, which then sees tables that are long enough
            self.transformer.source_positions.extend(source.bound)  # type: ignore[operator]
            self.transformer.target_positions.extend(target.bound)  # type: ignore[operator]
            # The one size that differs from batch to batch
            for packing in (source, target):
                torch._dynamo.mark_dynamic(packing.borders, 0)
        hidden = stacks(source.fill(batch.source), source, target.fill(batch.target_input), target, *randomness)
        return hidden[: target.tokens]

    def stacks(
        self,
        source: Tensor,
        source_packing: HeadPacking,
        target_input: Tensor,
        packing: HeadPacking,
        source_randomness: Any,
        randomness: Any,
    ) -> Tensor:
        """Source (S,) and target shifted right (T,) as (T, D)."""
        memory = self.transformer.encode(source, source_packing, source_randomness)
        return self.transformer.decode(target_input, packing, memory, source_packing, randomness)

    def _pack(self, tokens: Tensor, offsets: Tensor) -> HeadPacking:
        """The sentences with a multiple of the compiled number of rows, or else one of few numbers of them."""
        rows = self.rows if is_compiled(self.transformer) else 0
        filled = -(-len(tokens) // rows) * rows if rows else static_rows(len(tokens))
        return HeadPacking(offsets, filled, tokens.device)
