"""Sentence pairs packed without padding, and the boundaries of the sentences within one packed side."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

# S source tokens of all sentences, packed; T target tokens; B sentences; L tokens of the longest one, or 16

FILLERS, FILLER_LENGTH = 128, 256
"""Empty sentences that take the rows after the last token, and their length if so many are enough."""


@dataclass(frozen=True)
class Batch:
    """B sentence pairs, packed: their tokens one after the other, without padding."""

    source: Tensor  # (S,) every sentence ends with EOS
    target: Tensor  # (T,) the tokens to predict; every sentence ends with EOS
    target_input: Tensor  # (T,) the tokens the decoder sees: BOS, then the target without its EOS
    source_offsets: Tensor  # (B + 1,) where each sentence begins; the last one is S
    target_offsets: Tensor  # (B + 1,) where each sentence begins; the last one is T
    first_source: int = 0  # the number that the first source token has in its update
    first_target: int = 0  # the number that the first target token has in its update

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch with its tokens on `device`; the offsets stay on the host, which computes sizes from them."""
        source, target, target_input = (to_device(x, device) for x in (self.source, self.target, self.target_input))
        return replace(self, source=source, target=target, target_input=target_input)


def static_rows(tokens: int) -> int:
    """The rows to give `tokens` tokens on a CPU, one of few numbers: oneDNN compiles a kernel for each new shape.

    Multiples of 32, past 1023 tokens of 64, past 2047 of 128, and so on. An update of base at mini takes 41 ms, and 52
    where each batch has a row for each token (AMD Zen 5, 2026-11-26).
    """
    step = max(32, 1 << tokens.bit_length() >> 5)
    return -(-tokens // step) * step


class Packing:
    """Boundaries of the sentences of one packed side, computed once per batch on the host.

    `offsets` (B + 1,) on the host says where each sentence begins and ends with the number of tokens; no sentence is
    empty. `rows` of a packed tensor, at least as many as there are tokens, may follow: they belong to no sentence.
    Tensors that the model reads are on `device`.
    """

    def __init__(self, offsets: Tensor, rows: int | None = None, device: torch.device | None = None) -> None:
        assert offsets.device.type == "cpu"
        self.offsets, self.lengths, self.device = offsets, offsets.diff(), device or offsets.device
        # torch's softmax takes several times as long on rows that are shorter than a CPU's vector register
        self.max_length = max(16, int(self.lengths.max()))
        self.tokens = int(offsets[-1])
        self.rows = rows or self.tokens
        self.sentence = torch.repeat_interleave(self.lengths)  # (tokens,) the number of each token's sentence
        self.position = torch.arange(self.tokens) - offsets[self.sentence]  # (tokens,) in its sentence
        self.positions = to_device(self.fill(self.position), self.device)  # (rows,)
        # Flash attention: GPUs since Ampere
        self.has_kernel = self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) >= (8, 0)

    def fill(self, tokens: Tensor) -> Tensor:
        """tokens (tokens, ...) with zeros behind them, as (rows, ...)."""
        more = self.rows - self.tokens
        return F.pad(tokens, (0, 0) * (tokens.dim() - 1) + (0, more)) if more else tokens

    def pad(self, packed: Tensor) -> Tensor:
        """Packed (rows, ...) as padded (B, L, ...), zero where no token is."""
        padded = packed.new_zeros(len(self.lengths) * self.max_length, *packed.shape[1:])
        padded.index_copy_(0, self.padded_index, packed[: self.tokens])
        return padded.view(len(self.lengths), self.max_length, *packed.shape[1:])

    def unpad(self, padded: Tensor) -> Tensor:
        """Padded (B, L, ...) as packed (rows, ...): the inverse of `pad`, zero in rows of no sentence."""
        return self.fill(padded.flatten(0, 1).index_select(0, self.padded_index))

    @cached_property
    def padded_index(self) -> Tensor:
        """(tokens,): where each token stands in (B * L)."""
        return to_device(self.sentence * self.max_length + self.position, self.device)

    @cached_property
    def mask(self) -> Tensor | None:
        """(B, 1, 1, L): whether a token stands there, to be attended to; None when all sentences are equally long."""
        is_token = torch.arange(self.max_length) < self.lengths[:, None, None, None]  # on the host
        return None if bool(is_token.all()) else to_device(is_token, self.device)

    @cached_property
    def causal_mask(self) -> Tensor:
        """(L, L): whether the key comes not after the query: position i attends to positions up to i (3.2.3).

        Padding ends a sentence, so this hides it from every token.
        """
        return to_device(torch.ones(self.max_length, self.max_length, dtype=torch.bool).tril_(), self.device)

    @cached_property
    def kernel_offsets(self) -> Tensor:
        """The offsets in 32 bits, and after them the rows that belong to no sentence as fillers (B + 1 + FILLERS,).

        A kernel that only knows sentences then leaves no row undefined. It needs equally many sentences on both sides,
        wherever the tokens end: some fillers are empty.
        """
        fillers = self.tokens + self._filler_length * torch.arange(1, FILLERS + 1)
        return to_device(torch.cat((self.offsets, fillers.clamp(max=self.rows))).int(), self.device)

    @cached_property
    def max_position(self) -> int:
        """No sentence is longer, fillers included; few different numbers, since a graph is compiled for each."""
        return max(FILLER_LENGTH, 1 << (max(self.max_length, self._filler_length) - 1).bit_length())

    @property
    def _filler_length(self) -> int:
        return max(FILLER_LENGTH, -(-(self.rows - self.tokens) // FILLERS))


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """x on the device; to a GPU by a non-blocking copy from pinned memory, so that the host does not wait for it."""
    return x.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else x.to(device)


def to_host(x: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """x on the host, and a function that waits for this copy alone, not for what the GPU computes after it."""
    if x.device.type != "cuda":
        return x, lambda: None
    copy, event = x.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return copy, event.synchronize
