"""Attention weights of every head of every layer, computed beside the forward pass: training knows nothing of it."""

from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from aiayn.paper.attention import MemoryAttention, SelfAttention, distances
from aiayn.paper.batch import Batch
from aiayn.paper.transformer import Transformer

# H heads; Q query tokens; M tokens that they look at
Weights = npt.NDArray[np.float32]  # (H, Q, M): each row sums to 1

KINDS = {
    "encoder": "Encoder self-attention",
    "decoder": "Decoder self-attention, masked",
    "cross": "Attention of the decoder to the encoder",
}


def weights_of(model: Transformer, batch: Batch) -> dict[str, list[Weights]]:
    """The attention weights of each layer of each of KINDS, for a batch of one sentence pair."""
    weights: dict[str, list[Weights]] = {kind: [] for kind in KINDS}
    with ExitStack() as hooks, torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, SelfAttention | MemoryAttention):
                kind = "cross" if isinstance(module, MemoryAttention) else name.partition(".")[0]
                hooks.enter_context(module.register_forward_hook(partial(_append, weights[kind]), with_kwargs=True))
        model.eval().hidden(batch)
    return weights


def _append(
    layers: list[Weights], module: nn.Module, inputs: tuple[Any, ...], options: dict[str, bool], output: Tensor
) -> None:
    if isinstance(module, SelfAttention):
        x, packing = inputs
        memory_packing = packing
        q, k, v = module.project(packing.pad(x))
    else:
        assert isinstance(module, MemoryAttention)
        x, memory, packing, memory_packing = inputs
        q, (k, v) = module.project(packing.pad(x)), module.project_memory(memory_packing.pad(memory))
    mask = packing.causal_mask if options.get("causal") else memory_packing.mask
    _, weights = module.heads_and_weights(q, k, v, mask, distances(q, k))
    # Sentences are padded, also to a size that suits kernels
    layers.append(weights[0, :, : packing.tokens, : memory_packing.tokens].float().cpu().numpy())
