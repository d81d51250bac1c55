"""Sentence pairs packed without padding, and the boundaries of the sentences within one packed side."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

# S source tokens of all sentences, packed; T target tokens; B sentences; L tokens of the longest one


@dataclass(frozen=True)
class Batch:
    """B sentence pairs, packed: their tokens one after the other, without padding; B may be 0."""

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


class Packing:
    """Boundaries of the sentences of one packed side, computed once per batch on the host.

    `offsets` (B + 1,) on the host says where each sentence begins and ends with the number of tokens; no sentence is
    empty. `rows` of a packed tensor, at least as many as there are tokens, may follow: they belong to no sentence.
    Tensors that the model reads are on `device`.
    """

    def __init__(self, offsets: Tensor, rows: int | None = None, device: torch.device | None = None) -> None:
        assert offsets.device.type == "cpu"
        self.offsets, self.lengths, self.device = offsets, offsets.diff(), device or offsets.device
        self.max_length = int(self.lengths.max())
        self.tokens = int(offsets[-1])
        self.rows = rows or self.tokens
        self.sentence = torch.repeat_interleave(self.lengths)  # (tokens,) the number of each token's sentence
        self.position = torch.arange(self.tokens) - offsets[self.sentence]  # (tokens,) in its sentence
        self.positions = to_device(self.fill(self.position), self.device)  # (rows,)

    def fill(self, tokens: Tensor) -> Tensor:
        """tokens (tokens,) with zeros behind them, as (rows,)."""
        return F.pad(tokens, (0, self.rows - self.tokens))

    def pad(self, packed: Tensor) -> Tensor:
        """Packed (rows, ...) as padded (B, L, ...), zero where no token is."""
        padded = packed.new_zeros(len(self.lengths) * self.max_length, *packed.shape[1:])
        padded = padded.index_copy(0, self.place, packed[: self.tokens])
        return padded.view(len(self.lengths), self.max_length, *packed.shape[1:])

    def unpad(self, padded: Tensor) -> Tensor:
        """Padded (B, L, ...) as packed (rows, ...): the inverse of `pad`, zero in rows of no sentence."""
        packed = padded.flatten(0, 1).index_select(0, self.place)
        return F.pad(packed, (0, 0) * (packed.dim() - 1) + (0, self.rows - self.tokens))

    @property
    def bound(self) -> int:
        """No position is this large or larger."""
        return self.max_length

    @cached_property
    def place(self) -> Tensor:
        """(tokens,): where each token stands in (B * L)."""
        return to_device(self.sentence * self.max_length + self.position, self.device)

    @cached_property
    def is_padding(self) -> Tensor:
        """(B, L) on the host: whether no token stands there."""
        return torch.arange(self.max_length) >= self.lengths.unsqueeze(1)

    @cached_property
    def mask(self) -> Tensor | None:
        """(B, 1, 1, L): 0 where a token is, -inf where none is; None when all sentences are equally long."""
        return to_device(_mask(self.is_padding[:, None, None]), self.device) if bool(self.is_padding.any()) else None

    @cached_property
    def causal_mask(self) -> Tensor:
        """(L, L): -inf where the key comes after the query, so that position i sees only positions up to i (3.2.3).

        Padding ends a sentence, so this hides it from every token.
        """
        later = torch.ones(self.max_length, self.max_length, dtype=torch.bool).triu_(1)
        return to_device(_mask(later), self.device)


def _mask(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


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
