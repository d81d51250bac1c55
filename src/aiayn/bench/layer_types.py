"""The layers of Table 1 side by side: time against length, operations counted, steps and paths found by gradients."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aiayn.bench.contestants import Contestant, computing, take_turns
from aiayn.config.schema import HEAD_WIDTH, Bench, Config

# B sequences; N tokens of each; D d_model; H heads; K d_k; S blocks; W queries of a block

SHORTEST = 16  # tokens
NARROW = 1  # d_model where paths are searched for: they do not depend on it


class Layer(nn.Module):
    """Makes outputs (B, N, D) of inputs (B, N, D); unless it says otherwise all in one step: no token waits."""

    vectors = 1  # of a token, that one step hands to the next

    def steps(self, length: int) -> int:
        """Steps that have to follow each other in a sequence of `length` tokens."""
        return 1

    def step(self, x: Tensor, states: Tensor) -> Tensor:
        """What one step makes of inputs (B, N, D) and states (B, N, `vectors` * D) that the one before it has made."""
        return self(x + states)  # type: ignore[no-any-return]


class Attention(Layer):
    """Section 3.2.2 among all tokens of a sequence, with its four projections."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.num_heads = max(1, d_model // HEAD_WIDTH)
        self.query_key_value = nn.Linear(d_model, 3 * d_model)
        self.output = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.query_key_value(x).view(*x.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        heads = self.attend(*parts)  # (B, H, N, K)
        return self.output(heads.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Eq. 1 of (B, H, N, K) each."""
        return F.scaled_dot_product_attention(queries, keys, values)


class NeighbourhoodAttention(Attention):
    """Section 4: attention to the `neighbourhood` tokens centred around each output, as many before it as after it."""

    def __init__(self, d_model: int, neighbourhood: int) -> None:
        super().__init__(d_model)
        self.radius = neighbourhood // 2

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Eq. 1 in blocks of `radius` queries, each with its own keys and those of a block before and after it."""
        length, radius, rest = queries.size(2), self.radius, -queries.size(2) % self.radius
        count = (length + rest) // radius
        blocks = F.pad(queries, (0, 0, 0, rest)).reshape(-1, count, radius, queries.size(3))  # (B * H, S, W, K)
        keys, values = (
            F.pad(side, (0, 0, radius, radius + rest)).flatten(0, 1).unfold(1, 3 * radius, radius).transpose(2, 3)
            for side in (keys, values)
        )  # (B * H, S, 3 * W, K)
        query = torch.arange(length + rest, device=queries.device).view(-1, radius, 1)
        key = torch.arange(-radius, 2 * radius, device=queries.device) + query[:, :1]
        seen = ((key - query).abs() <= radius) & (key >= 0) & (key < length)  # (S, W, 3 * W)
        found = F.scaled_dot_product_attention(blocks, keys, values, attn_mask=seen)  # (B * H, S, W, K)
        return found.reshape(*queries.shape[:2], length + rest, -1)[:, :, :length]


class Convolution(Layer):
    """A convolution of `kernel_width` tokens: the output's own and, `dilation` apart, those before it."""

    def __init__(self, d_model: int, kernel_width: int, dilation: int) -> None:
        super().__init__()
        # Paper: silent on where a kernel stands. Centred, dilated kernels leave some pairs unconnected near the ends.
        self.before = (kernel_width - 1) * dilation
        self.convolution = nn.Conv1d(d_model, d_model, kernel_width, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(F.pad(x.transpose(1, 2), (self.before, 0))).transpose(1, 2)  # type: ignore[no-any-return]


class Recurrence(Layer):
    """An LSTM in one direction: a step a token, which hands on an output and a cell."""

    vectors = 2

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(d_model, d_model, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]  # type: ignore[no-any-return]

    def steps(self, length: int) -> int:
        return length

    def step(self, x: Tensor, states: Tensor) -> Tensor:
        before = F.pad(states, (0, 0, 1, 0))[:, :-1].flatten(0, 1).unsqueeze(0)
        _, (outputs, cells) = self.lstm(
            x.reshape(-1, 1, x.size(-1)), tuple(t.contiguous() for t in before.chunk(2, -1))
        )
        return torch.cat([outputs, cells], -1).view(*x.shape[:2], -1)


@dataclass(frozen=True)
class LayerType:
    """A line of Table 1: its name, its three orders, what builds a layer of it, and what a sequence costs."""

    name: str
    complexity: str
    sequential: str
    path: str
    build: Callable[[int, int], Layer]  # d_model, and how many layers lie below it
    products: Callable[[int], int]  # multiplications of a forward pass over n tokens

    def flops(self, length: int) -> int:
        """Forward and backward over `length` tokens, nothing computed twice; a multiplication and an addition are 2.

        Without biases, softmax and what an LSTM does beside its products.
        """
        return 6 * self.products(length)


def layer_types(bench: Bench) -> list[LayerType]:
    """Table 1 in the paper's order; its convolutions contiguous and dilated."""
    d, r, k = bench.d_model, bench.neighbourhood, bench.kernel_width
    radius = r // 2
    convolved = lambda n: k * n * d**2  # noqa: E731
    return [
        LayerType(
            *("Self-Attention", "O(n² d)", "O(1)", "O(1)"),
            lambda width, below: Attention(width),
            lambda n: 4 * n * d**2 + 2 * n**2 * d,
        ),
        LayerType(
            *("Recurrent", "O(n d²)", "O(n)", "O(n)"), lambda width, below: Recurrence(width), lambda n: 8 * n * d**2
        ),
        LayerType(
            *("Convolutional, contiguous", "O(k n d²)", "O(1)", "O(n/k)"),
            lambda width, below: Convolution(width, k, 1),
            convolved,
        ),
        LayerType(
            *("Convolutional, dilated", "O(k n d²)", "O(1)", "O(log_k n)"),
            lambda width, below: Convolution(width, k, k**below),
            convolved,
        ),
        LayerType(
            *("Self-Attention, restricted", "O(r n d)", "O(1)", "O(n/r)"),
            lambda width, below: NeighbourhoodAttention(width, r),
            # In whole blocks, and of three blocks of keys those outside of the neighbourhood too
            lambda n: 4 * n * d**2 + 2 * math.ceil(n / radius) * radius * 3 * radius * d,
        ),
    ]


def lengths_to(longest: int) -> list[int]:
    """Powers of two from the shortest up to `longest`."""
    return [2**power for power in range(SHORTEST.bit_length() - 1, longest.bit_length())]


def layers(run: Config) -> dict[str, Any]:
    """What each layer type's rounds took at each length, and all that follows from it, as plain data."""
    torch.manual_seed(run.seed)
    bench, types, device = run.bench, layer_types(run.bench), run.hardware.device
    lengths = lengths_to(bench.max_length)
    precision = "bf16" if device == "cuda" else "fp32"
    # The second layer of a stack: dilated where its type is
    modules = [(kind.name, kind.build(bench.d_model, 1).to(device)) for kind in types]
    rounds: dict[str, list[list[float]]] = {kind.name: [] for kind in types}
    for length in lengths:
        passes = lengths[-1] // length  # as many tokens at every length
        contestants = [
            Contestant(name, precision, _passes(module, length, passes, bench, precision, device), {})
            for name, module in modules
        ]
        take_turns(contestants, bench.rounds, device)
        for contestant in contestants:
            rounds[contestant.name].append(contestant.seconds_a_round)
    tokens = bench.sequences * lengths[-1]
    lines = [_line(kind, lengths, rounds[kind.name], tokens) for kind in types]
    d, each = bench.d_model, range(1, 8 * bench.d_model)
    return {
        "precision": precision,
        "sizes": {"d": d, "r": bench.neighbourhood, "k": bench.kernel_width, "sequences": bench.sequences},
        "lengths": lengths,
        "layers": lines,
        # From which length on self-attention costs more than the recurrent layer
        "crossings": {
            "measured": crossing(lengths, *(line["seconds_a_token"] for line in lines[:2])),
            "counted": crossing(each, *([kind.flops(n) for n in each] for kind in types[:2])),
            "by_orders": crossing(each, [n**2 * d for n in each], [n * d**2 for n in each]),
        },
    }


def exponent(lengths: Sequence[int], quantities: Sequence[float]) -> float:
    """The power of n with which a quantity of a whole sequence grows: a line through the logarithms.

    Of the longer half of the lengths, since what a call costs at any length hides it in the shorter ones.
    """
    half = len(lengths) // 2
    return float(np.polyfit(np.log(lengths[half:]), np.log(quantities[half:]), 1)[0])


def crossing(lengths: Sequence[int], rising: Sequence[float], other: Sequence[float]) -> float | None:
    """The length from which on the first costs more than the other, by logarithms between two lengths.

    None where it costs more at all lengths, or no more than the other at the longest.
    """
    gaps = [math.log(one / two) for one, two in zip(rising, other, strict=True)]
    if gaps[-1] <= 0:
        return None
    for at in range(len(gaps) - 1, 0, -1):
        if gaps[at - 1] <= 0 < gaps[at]:
            share = gaps[at - 1] / (gaps[at - 1] - gaps[at])
            return float(lengths[at - 1] * (lengths[at] / lengths[at - 1]) ** share)
    return None


def path_length(kind: LayerType, length: int) -> int:
    """The most steps on the shortest path between an input and an output that it can change, by breadth-first search.

    From the outputs at both ends, which lie farthest from the inputs.
    """
    longest = 0
    for end in (0, length - 1):
        before, frontier = torch.zeros(2, length, dtype=torch.bool)
        reached, frontier[end] = before, True
        done = 0
        while frontier.any() and not torch.equal(frontier, before):
            inputs, states = depends_on(kind.build(NARROW, done), frontier)
            done += 1
            if (inputs & ~reached).any():
                longest, reached = max(longest, done), reached | inputs
            before, frontier = frontier, states
    return longest


def depends_on(layer: Layer, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """The inputs and the states (N,) that one step makes the chosen outputs (N,) of, by gradients."""
    x = torch.randn(1, len(outputs), NARROW, requires_grad=True)
    states = torch.randn(1, len(outputs), layer.vectors * NARROW, requires_grad=True)
    found = layer.step(x, states)
    gradients = torch.autograd.grad(found, (x, states), torch.randn_like(found) * outputs[:, None])
    of_inputs, of_states = ((gradient != 0).any(-1)[0] for gradient in gradients)
    return of_inputs, of_states


def _passes(
    module: nn.Module, length: int, passes: int, bench: Bench, precision: str, device: str
) -> Callable[[int], None]:
    x = torch.randn(bench.sequences, length, bench.d_model, device=device, requires_grad=True)
    gradient = torch.randn_like(x)
    weights = list(module.parameters())

    def run(round_number: int) -> None:
        with computing(precision, device, training=True):
            for _ in range(passes):
                outputs = module(x)
                torch.autograd.grad(outputs, [x, *weights], gradient.to(outputs.dtype))

    return run


def _line(kind: LayerType, lengths: Sequence[int], seconds: list[list[float]], tokens: int) -> dict[str, Any]:
    medians = [statistics.median(rounds) / tokens for rounds in seconds]
    flops = [kind.flops(length) for length in lengths]
    return {
        **{key: getattr(kind, key) for key in ("name", "complexity", "sequential", "path")},
        "steps": kind.build(NARROW, 0).steps(lengths[-1]),
        "path_length": path_length(kind, lengths[-1]),
        "seconds_a_round": seconds,
        "seconds_a_token": medians,
        "flops": flops,
        "exponent": exponent(lengths, [median * length for median, length in zip(medians, lengths, strict=True)]),
        "exponent_of_flops": exponent(lengths, flops),
    }
