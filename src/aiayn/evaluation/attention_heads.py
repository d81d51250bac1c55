"""Attention weights of every head of every layer, computed beside the forward pass."""

from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from aiayn.paper.attention import MemoryAttention, MultiHeadAttention, SelfAttention, distances
from aiayn.paper.batch import Batch
from aiayn.paper.transformer import DecoderLayer, EncoderLayer, Transformer

# H heads; Q query tokens; M tokens that they look at
Weights = npt.NDArray[np.float32]
"""(H, Q, M): each row sums to 1."""

KINDS = {
    "encoder": "Encoder self-attention",
    "decoder": "Decoder self-attention, masked",
    "cross": "Attention of the decoder to the encoder",
}


def weights_of(model: Transformer, batch: Batch) -> dict[str, list[Weights]]:
    """The attention weights of each layer of each of KINDS, for a batch of one sentence pair.

    Computed beside the forward pass, from what each attention is given: training knows nothing of it.
    """
    found: dict[str, list[Weights]] = {kind: [] for kind in KINDS}
    with ExitStack() as hooks, torch.no_grad():
        for layer in [*model.encoder, *model.decoder]:
            assert isinstance(layer, EncoderLayer | DecoderLayer)
            kind = "encoder" if isinstance(layer, EncoderLayer) else "decoder"
            parts: dict[str, nn.Module] = {kind: layer.self_attention}
            if isinstance(layer, DecoderLayer):
                parts["cross"] = layer.memory_attention
            for kind, part in parts.items():
                hooks.enter_context(part.register_forward_hook(partial(_look, found[kind]), with_kwargs=True))
        model.eval().hidden(batch)
    return found


def _look(
    found: list[Weights], module: nn.Module, inputs: tuple[Any, ...], options: dict[str, bool], output: Tensor
) -> None:
    assert isinstance(module, MultiHeadAttention)
    if isinstance(module, SelfAttention):
        x, packing = inputs
        memory_packing = packing
        q, k, v = module.project(packing.pad(x))
    else:
        assert isinstance(module, MemoryAttention)
        x, memory, packing, memory_packing = inputs
        q, (k, v) = module.project(packing.pad(x)), module.project_memory(memory_packing.pad(memory))
    mask = packing.causal_mask if options.get("causal") else memory_packing.mask
    weights = module.heads_and_weights(q, k, v, mask, distances(q, k))[1]
    # Sentences are padded, also to a size that suits kernels
    queries, keys = (int((~side.is_padding[0]).sum()) for side in (packing, memory_packing))
    found.append(weights[0, :, :queries, :keys].float().cpu().numpy())
