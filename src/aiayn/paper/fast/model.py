"""Attaches the fast ways to a Transformer; its outputs and gradients stay the same but for rounding."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from aiayn.paper.attention import Linear, MemoryAttention, SelfAttention, scaled_dot_products
from aiayn.paper.batch import Batch
from aiayn.paper.dropout import Randomness
from aiayn.paper.fast.attention import HeadPacking, attend_to_memory, attend_to_self, leave_uncompiled
from aiayn.paper.fast.products import product, static_rows
from aiayn.paper.layers import AddAndNorm, LearnedPositions, Sinusoids
from aiayn.paper.transformer import Transformer

# S source tokens, T target tokens of all sentences, packed; D d_model


def accelerate(transformer: Transformer) -> Transformer:
    """The same object, with faster products, attention and packing in place of the paper's modules' own.

    A Transformer with parts from beyond Table 3 stays as it is.
    """
    if not can_accelerate(transformer):
        return transformer
    forwards: dict[type, Callable[..., Tensor]] = {
        Linear: lambda self, x: product(x, self.weight, self.bias),
        SelfAttention: attend_to_self,
        MemoryAttention: attend_to_memory,
    }
    for module in transformer.modules():
        if type(module) in forwards:
            module.forward = MethodType(forwards[type(module)], module)
    transformer.logits = MethodType(_logits, transformer)  # type: ignore[method-assign]
    transformer.pack = _pack  # type: ignore[method-assign]
    return transformer


def can_accelerate(transformer: Transformer) -> bool:
    """Whether each part is one of Table 3: what is faster knows no other."""
    attentions = [x for x in transformer.modules() if isinstance(x, SelfAttention | MemoryAttention)]
    norms = [x for x in transformer.modules() if isinstance(x, AddAndNorm)]
    return (
        all(x.scores is scaled_dot_products for x in attentions)
        and all(x.residual for x in norms)
        and isinstance(transformer.source_positions, Sinusoids | LearnedPositions)
    )


def _logits(self: Transformer, hidden: Tensor) -> Tensor:
    return product(hidden, self.embedding.weight)


def _pack(tokens: Tensor, offsets: Tensor, multiple: int = 0) -> HeadPacking:
    """The sentences with a multiple of so many rows, or else with one of few numbers of rows."""
    rows = -(-len(tokens) // multiple) * multiple if multiple else static_rows(len(tokens))
    return HeadPacking(offsets, rows, tokens.device)


def compile_stacks(transformer: Transformer, rows: int, **options: Any) -> None:
    """Compiles encoder and decoder of an accelerated Transformer, once for all batches of up to `rows` tokens a side.

    Batches are filled up to so many rows, larger ones to twice as many, and so on. The options are torch.compile's.
    """
    transformer.hidden = CompiledHidden(transformer, rows, **options)  # type: ignore[method-assign]


def is_compiled(model: nn.Module) -> bool:
    """Whether `hidden` runs compiled stacks now: not in evaluation, which is not worth the compiler's time."""
    return isinstance(model.hidden, CompiledHidden) and torch.is_grad_enabled()


class CompiledHidden:
    """Transformer.hidden with encoder and decoder compiled into one graph."""

    def __init__(self, transformer: Transformer, rows: int, **options: Any) -> None:
        self.transformer, self.rows = transformer, rows
        self.uncompiled = transformer.hidden
        leave_uncompiled()
        self.compiled = torch.compile(self.stacks, **options)

    def __call__(self, batch: Batch, seed_and_update: tuple[int, int] | None = None) -> Tensor:
        """The decoder's output (T, D)."""
        if not torch.is_grad_enabled():
            return self.uncompiled(batch, seed_and_update)
        source = _pack(batch.source, batch.source_offsets, self.rows)
        target = _pack(batch.target_input, batch.target_offsets, self.rows)
        randomness = self.transformer.randomness(batch, source, target, seed_and_update)
        # Outside the graph, which then sees tables that are long enough
        self.transformer.source_positions.extend(source.bound)
        self.transformer.target_positions.extend(target.bound)
        # The one size that differs from batch to batch; torch.compiler has no public way to say so for one dimension
        for packing in (source, target):
            torch._dynamo.mark_dynamic(packing.borders, 0)
        source_ids, target_ids = source.fill(batch.source), target.fill(batch.target_input)
        return self.compiled(source_ids, source, target_ids, target, *randomness)[: target.tokens]

    def stacks(
        self,
        source: Tensor,
        source_packing: HeadPacking,
        target_input: Tensor,
        packing: HeadPacking,
        source_randomness: Randomness | None,
        randomness: Randomness | None,
    ) -> Tensor:
        """Source (S,) and target shifted right (T,) as (T, D)."""
        memory = self.transformer.encode(source, source_packing, source_randomness)
        return self.transformer.decode(target_input, packing, memory, source_packing, randomness)
