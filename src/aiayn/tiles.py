"""Attention (3.2) between packed sentences in tiles as short as most of them are: an operator of torch, for GPUs."""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

# T query tokens and S memory tokens of all sentences, packed; H heads; K d_k; V d_v

TYPES, WIDTH = {torch.bfloat16, torch.float16, torch.float32}, 512
"""What the kernels take."""
SHARERS, CLEARERS = 2, 8
"""Programs that share the tiles of a head of a sentence; as many times as many clear what lies after the last one."""


@cache
def available(device: torch.device) -> bool:
    """Whether the kernels run there: on a GPU since Ampere, where Triton is installed."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return find_spec("triton") is not None


def options(d_k: int, d_v: int) -> dict[str, int]:
    """The sizes of tiles for heads so wide, and how Triton is to compile for them."""
    # Its tiles are powers of two, and its products want 16 at least
    k_room, v_room = (max(16, 1 << (width - 1).bit_length()) for width in (d_k, d_v))
    widest = max(k_room, v_room)
    # Chosen by what the compiler says of registers: none is spilled. One stage, since where most sentences are one tile
    # there is no next one to load in the meantime
    tile, num_warps = 32 if widest <= 128 else 16, min(max(widest // 32, 2), 8)
    return {"TILE": tile, "K_ROOM": k_room, "V_ROOM": v_room, "num_warps": num_warps, "num_stages": 1}


@torch.library.custom_op("aiayn::attend_in_tiles", mutates_args=())
def attend(
    queries: Tensor,
    keys_values: Tensor | None,
    offsets: Tensor,
    memory_offsets: Tensor,
    sizes: Sequence[int],
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Eq. 1 sentence by sentence, from packed to packed (T, H * V), and the log of each softmax's denominator (H, T).

    `queries` (T, H * K) look at `keys_values` (S, H * (K + V)); or, where these are None, queries, keys and values are
    all in the first (T, H * (2 K + V)); `sizes` are H, K and V. The offsets (B + 1,) of 32 bits say where sentences
    begin and end, none of them empty; of rows after the last one output and gradients are zero.
    """
    from aiayn import tile_kernels

    results = _results(queries, sizes)
    launch = _launcher(offsets, memory_offsets, sizes, causal)
    launch(tile_kernels.forward, *_parts(queries, keys_values, sizes), *results)
    return results


@torch.library.custom_op("aiayn::attend_in_tiles_backward", mutates_args=())
def _attend_backward(
    to_output: Tensor,
    output: Tensor,
    logs: Tensor,
    queries: Tensor,
    keys_values: Tensor | None,
    offsets: Tensor,
    memory_offsets: Tensor,
    sizes: Sequence[int],
    causal: bool,
) -> list[Tensor]:
    """The gradients of `queries` and, where there are any, of `keys_values`."""
    from aiayn import tile_kernels

    gradients = _gradients(queries, keys_values)
    q, k, v = _parts(queries, keys_values, sizes)
    to_q, to_k, to_v = _parts(gradients[0], gradients[1] if keys_values is not None else None, sizes)
    to_output, deltas = to_output.contiguous(), torch.empty_like(logs)
    launch = _launcher(offsets, memory_offsets, sizes, causal)
    launch(tile_kernels.backward_to_queries, q, k, v, to_q, output, to_output, logs, deltas)
    launch(tile_kernels.backward_to_keys_and_values, q, k, v, to_k, to_v, to_output, logs, deltas)
    return gradients


def _launcher(offsets: Tensor, memory_offsets: Tensor, sizes: Sequence[int], causal: bool) -> Callable[..., None]:
    """What starts a kernel on queries, keys and whatever else it wants of these sentences."""
    (num_heads, d_k, d_v), sentences = sizes, len(offsets) - 1
    assert len(memory_offsets) == len(offsets)

    def launch(kernel: Any, queries: Tensor, keys: Tensor, *others: Tensor) -> None:
        counts = sentences, len(queries), len(keys), queries.stride(0), keys.stride(0)
        kernel[sentences + CLEARERS, num_heads, SHARERS](
            *(queries, keys, *others, offsets, memory_offsets, *counts),
            **{"CAUSAL": causal, "K": d_k, "V": d_v, **options(d_k, d_v)},
        )

    return launch


def _parts(queries: Tensor, keys_values: Tensor | None, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Views of queries, keys and values: the kernels read and write them where they lie."""
    num_heads, d_k, d_v = sizes
    if keys_values is None:
        return torch.split(queries.contiguous(), [num_heads * width for width in (d_k, d_k, d_v)], 1)
    return queries.contiguous(), *torch.split(keys_values.contiguous(), [num_heads * d_k, num_heads * d_v], 1)


def _results(queries: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    (rows, _), (num_heads, _, d_v) = queries.shape, sizes
    return queries.new_empty(rows, num_heads * d_v), queries.new_empty(num_heads, rows, dtype=torch.float32)


def _gradients(queries: Tensor, keys_values: Tensor | None) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (queries, keys_values) if x is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.rest = inputs[:4], inputs[4:]
    ctx.save_for_backward(*output, *tensors)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, to_output: Tensor, _: None) -> tuple[Tensor | None, ...]:
    to_queries, *to_keys_values = _attend_backward(to_output, *ctx.saved_tensors, *ctx.rest)
    return to_queries, *(to_keys_values or [None]), *(None,) * 4


attend.register_fake(lambda queries, keys_values, offsets, memory_offsets, sizes, causal: _results(queries, sizes))
attend.register_autograd(_differentiate, setup_context=_keep)
_attend_backward.register_fake(
    lambda to_output, output, logs, queries, keys_values, *rest: _gradients(queries, keys_values)
)
