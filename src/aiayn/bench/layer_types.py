"""The layers of Table 1 side by side: the time of a token against the length of its sequence."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aiayn.bench.cases import Case, computing, time_interleaved
from aiayn.config.schema import HEAD_WIDTH, Bench, Config

# B sequences; N tokens of each; D d_model; H heads; K d_k; S blocks; W queries of a block

# Name, complexity, sequential operations, maximum path; what builds a layer from d_model and the layers below it
LayerType = tuple[str, str, str, str, Callable[[int, int], nn.Module]]


class Attention(nn.Module):
    """Section 3.2.2 with its four projections: among all tokens, or to so many before and after each output's own."""

    def __init__(self, d_model: int, radius: int | None = None) -> None:
        super().__init__()
        self.num_heads, self.radius = max(1, d_model // HEAD_WIDTH), radius
        self.query_key_value = nn.Linear(d_model, 3 * d_model)
        self.output = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.query_key_value(x).view(*x.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attend = partial(attend_nearby, radius=self.radius) if self.radius else F.scaled_dot_product_attention
        return self.output(attend(*parts).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def attend_nearby(queries: Tensor, keys: Tensor, values: Tensor, radius: int) -> Tensor:
    """Eq. 1 of (B, H, N, K) each, for keys at most `radius` tokens from their query."""
    # In blocks of `radius` queries, each with its own keys and those of a block before and after it
    length, rest = queries.size(2), -queries.size(2) % radius
    blocks = torch.unflatten(F.pad(queries, (0, 0, 0, rest)).flatten(0, 1), 1, (-1, radius))  # (B * H, S, W, K)
    keys, values = (
        F.pad(side, (0, 0, radius, radius + rest)).flatten(0, 1).unfold(1, 3 * radius, radius).transpose(2, 3)
        for side in (keys, values)
    )  # (B * H, S, 3 * W, K)
    query = torch.arange(length + rest, device=queries.device).view(-1, radius, 1)
    key = torch.arange(-radius, 2 * radius, device=queries.device) + query[:, :1]
    mask = ((key - query).abs() <= radius) & (key >= 0) & (key < length)  # (S, W, 3 * W)
    heads = F.scaled_dot_product_attention(blocks, keys, values, attn_mask=mask)  # (B * H, S, W, K)
    return heads.reshape(*queries.shape[:2], length + rest, -1)[:, :, :length]


class Convolution(nn.Module):
    """A convolution of `kernel_width` tokens: the output's own and, `dilation` apart, those before it."""

    def __init__(self, d_model: int, kernel_width: int, dilation: int) -> None:
        super().__init__()
        # Paper: silent on where a kernel stands. Centred, dilated kernels leave some pairs unconnected near the ends.
        self.before = (kernel_width - 1) * dilation
        self.convolution = nn.Conv1d(d_model, d_model, kernel_width, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(F.pad(x.transpose(1, 2), (self.before, 0))).transpose(1, 2)  # type: ignore[no-any-return]


def layer_types(bench: Bench) -> list[LayerType]:
    """Table 1 in the paper's order; its convolutions contiguous and dilated."""
    radius, k = bench.neighbourhood // 2, bench.kernel_width
    return [
        ("Self-Attention", "O(n² d)", "O(1)", "O(1)", lambda d, i: Attention(d)),
        ("Recurrent", "O(n d²)", "O(n)", "O(n)", lambda d, i: nn.LSTM(d, d, batch_first=True)),
        ("Convolutional, contiguous", "O(k n d²)", "O(1)", "O(n/k)", lambda d, i: Convolution(d, k, 1)),
        ("Convolutional, dilated", "O(k n d²)", "O(1)", "O(log_k n)", lambda d, i: Convolution(d, k, k**i)),
        ("Self-Attention, restricted", "O(r n d)", "O(1)", "O(n/r)", lambda d, i: Attention(d, radius)),
    ]


def layers(run: Config) -> dict[str, Any]:
    """The seconds of each layer type's rounds at each length, and the median seconds of a token, as plain data."""
    torch.manual_seed(run.seed)
    bench, device, types = run.bench, run.hardware.device, layer_types(run.bench)
    lengths = [2**power for power in range(4, bench.max_length.bit_length())]
    precision, tokens = "bf16" if device == "cuda" else "fp32", bench.sequences * lengths[-1]
    modules = [build(bench.d_model, 1).to(device) for *_, build in types]  # one below: dilated where its type is
    keys = ("name", "complexity", "sequential", "path", "seconds_per_round", "seconds_per_token")
    lines: list[dict[str, Any]] = [dict(zip(keys, (*told, [], []), strict=True)) for *told, _ in types]
    for length in lengths:
        cases = [Case("", precision, _passes(module, length, lengths[-1] // length, run)) for module in modules]
        time_interleaved(cases, bench.rounds, device)
        for line, case in zip(lines, cases, strict=True):
            line["seconds_per_round"].append(case.seconds_per_round)
            line["seconds_per_token"].append(statistics.median(case.seconds_per_round) / tokens)
    return {"precision": precision, "lengths": lengths, "layers": lines}


def _passes(module: nn.Module, length: int, passes: int, run: Config) -> Callable[[int], None]:
    """Forward and backward, so many times that every length has as many tokens."""
    device = run.hardware.device
    x = torch.randn(run.bench.sequences, length, run.bench.d_model, device=device, requires_grad=True)
    gradient, weights = torch.randn_like(x), list(module.parameters())

    def compute(round_number: int) -> None:
        with computing("bf16" if device == "cuda" else "fp32", device, training=True):
            for _ in range(passes):
                outputs = module(x)[0] if isinstance(module, nn.LSTM) else module(x)
                torch.autograd.grad(outputs, [x, *weights], gradient.to(outputs.dtype))

    return compute
