"""Recurrent sequence to sequence, before the Transformer: LSTM encoder and decoder, with or without attention between.

The sources are Luong, Pham and Manning 2015, "Effective Approaches to Attention-based Neural Machine Translation", and
Britz, Goldie, Luong and Le 2017, "Massive Exploration of Neural Machine Translation Architectures".
"""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from aiayn.paper.attention import attend
from aiayn.paper.batch import Batch, Packing, to_device
from aiayn.paper.dropout import Dropout, Randomness, draw, layer_keys
from aiayn.paper.transformer import Transformer

# S source tokens, T target tokens of all sentences, packed; B sentences; L tokens of the longest source
# W hypotheses of each sentence; D d_model

State = tuple[Tensor, Tensor]  # the hidden state and the cell state of one LSTM layer, each (1, B, D)
SeedAndUpdate = tuple[int, int] | None


class RecurrentModel(nn.Module):
    """LSTM encoder and decoder of N layers each, and one embedding for source, target and softmax.

    The encoder's final state is the decoder's first one: without `attention` all that the decoder has of the source.
    """

    def __init__(self, *, num_layers: int, d_model: int, dropout: float, attention: bool, vocab_size: int) -> None:
        super().__init__()
        self.d_model = d_model
        # Paper: Luong reads the source backwards, Britz in both directions, which they find better (their
        # section 4.4); here each direction has half of the units, so that both final states make up the decoder's first
        # Paper: Luong draws all weights from U(-0.1, 0.1); here as torch draws those of its LSTM
        self.encoder = nn.ModuleList(nn.LSTM(d_model, d_model // 2, bidirectional=True) for _ in range(num_layers))
        self.decoder = nn.ModuleList(nn.LSTM(d_model, d_model) for _ in range(num_layers))
        self.attention = DotAttention(d_model) if attention else None
        # Paper: both have an embedding for each language and a softmax of its own; tied here, as in the Transformer
        self.embedding = nn.Embedding(vocab_size, d_model)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        # Paper: Britz drops the input of each cell; Luong points to Zaremba et al. 2014, who drop the last output too
        dropouts = [[Dropout(dropout, number) for number in range(num_layers)] for _ in range(2)]
        self.source_dropouts, self.target_dropouts = map(nn.ModuleList, dropouts)

    def forward(self, batch: Batch, seed_and_update: SeedAndUpdate = None) -> Tensor:
        """The logits (T, vocabulary) of each target token, given the source and the target tokens before it."""
        return self.logits(self.hidden(batch, seed_and_update))

    def hidden(self, batch: Batch, seed_and_update: SeedAndUpdate = None) -> Tensor:
        """The decoder's output (T, D), from which `logits` follow; dropout as in `Transformer.hidden`."""
        source = TimeSteps(batch.source_offsets, batch.source.device)
        target = TimeSteps(batch.target_offsets, batch.target_input.device)
        for_source = self._draw(seed_and_update, "source", batch.first_source, source)
        for_target = self._draw(seed_and_update, "target", batch.first_target, target)
        memory, states = self.encode(batch.source, source, for_source)
        x = self.embed(target.in_time(batch.target_input))
        for lstm, dropout, state in zip(self.decoder, self.target_dropouts, states, strict=True):
            x, _ = target.run(lstm, dropout(x, for_target), state)
        x = target.in_sentences(x)
        if self.attention is not None:
            x = target.unpad(self.attention(target.pad(x), source.pad(memory), source.mask))
        return x

    def encode(
        self, tokens: Tensor, source: "TimeSteps", randomness: Randomness | None = None
    ) -> tuple[Tensor, list[State]]:
        """The source (S,) as memory (S, D), and the first state of each of the decoder's layers."""
        x, states = self.embed(source.in_time(tokens)), []
        for lstm, dropout in zip(self.encoder, self.source_dropouts, strict=True):
            x, both = source.run(lstm, dropout(x, randomness))
            hidden, cell = (torch.cat(directions.chunk(2), 2) for directions in both)  # from (2, B, D / 2)
            states.append((hidden, cell))
        return source.in_sentences(x), states

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (..., D) as (..., vocabulary), with the embedding's weights."""
        return hidden @ self.embedding.weight.t()

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens (...) as (..., D), times sqrt(d_model) as in the Transformer."""
        return self.embedding(tokens) * self.d_model**0.5  # type: ignore[no-any-return]

    def _draw(self, seed_and_update: SeedAndUpdate, side: str, first: int, steps: "TimeSteps") -> Randomness | None:
        if seed_and_update is None or not self.training or self.source_dropouts[0].probability == 0:
            return None
        keys = to_device(layer_keys(*seed_and_update, side, len(self.encoder)), steps.device)
        drawn = draw(keys, first, steps.tokens, self.d_model)
        return Randomness(drawn.tokens[:, steps.order.data], drawn.features)


TranslationModel = Transformer | RecurrentModel
"""What can be trained and searched with: `hidden` of a Batch, `embedding`, `logits`."""


class TimeSteps(Packing):
    """A packed side whose tokens can stand in the order of nn.LSTM: the first of every sentence, then the second."""

    def __init__(self, offsets: Tensor, device: torch.device) -> None:
        super().__init__(offsets, device=device)
        # On the host, which then waits for no GPU
        numbers = torch.split(torch.arange(self.tokens), self.lengths.tolist())
        order = pack_sequence([*numbers], enforce_sorted=False)
        self.order: PackedSequence = to_device(order, device)  # type: ignore[arg-type, assignment]

    def in_time(self, x: Tensor) -> Tensor:
        """x (tokens, ...) of one sentence after the other, in the order of time steps."""
        return x[self.order.data]

    def in_sentences(self, x: Tensor) -> Tensor:
        """The inverse of `in_time`."""
        return x[self.order.data.argsort()]

    def run(self, lstm: nn.Module, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """The outputs for x (tokens, D) in the order of time steps, and the state after each sentence's last token."""
        # In the weights' precision: cuDNN would take float16 whatever was asked for, in which gradients of 25 000
        # tokens' mean are 0 (ATen/cudnn/AutocastRNN.cpp); oneDNN has no bf16 for LSTMs without AVX-512
        with torch.autocast(x.device.type, enabled=False):
            output, state = lstm(self.order._replace(data=x.to(lstm.get_parameter("weight_ih_l0").dtype)), state)
        return output.data, state


class DotAttention(nn.Module):
    """Global attention with dot scores (Luong, section 3.1): tanh(W_c [c; h]) of the decoder's state h, context c."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        # Paper: with and without "input feeding" of this layer's output (Luong, section 3.3); here without
        self.combine = nn.Linear(2 * d_model, d_model, bias=False)

    def forward(self, states: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        """The decoder's states (B, T, D) as (B, T, D); memory (B, L, D), a mask (B, 1, 1, L)."""
        context, _ = attend(states @ memory.transpose(1, 2), memory, None if mask is None else mask.squeeze(1))
        return self.combine(torch.cat((context, states), 2)).tanh()  # type: ignore[no-any-return]


class RecurrentDecoding:
    """A batch being decoded: the state of each layer and hypothesis, and the memory once for all hypotheses."""

    def __init__(self, model: RecurrentModel, source: Tensor, source_offsets: Tensor) -> None:
        assert not model.training, "dropout would be on: call eval()"
        steps = TimeSteps(source_offsets, source.device)
        memory, states = model.encode(source, steps)
        self.model, self.memory, self.mask = model, steps.pad(memory), steps.mask  # (B, L, D), (B, 1, 1, L) or None
        self.states = [[part.transpose(0, 1) for part in state] for state in states]  # (B, W, D)

    def step(self, tokens: Tensor) -> Tensor:
        """See DecoderState."""
        x = self.model.embed(tokens.flatten()).unsqueeze(0)  # (1, B * W, D): one time step
        for number, lstm in enumerate(self.model.decoder):
            hidden, cell = (part.flatten(0, 1).unsqueeze(0) for part in self.states[number])
            with torch.autocast(x.device.type, enabled=False):  # as in TimeSteps.run
                x, state = lstm(x.to(hidden.dtype), (hidden, cell))
            self.states[number] = [part.view(*tokens.shape, -1) for part in state]
        x = x.view(*tokens.shape, -1)
        if self.model.attention is not None:
            x = self.model.attention(x, self.memory, self.mask)
        return self.model.logits(x)

    def reorder(self, parents: Tensor) -> None:
        """See DecoderState."""
        rows = torch.arange(len(parents), device=parents.device).unsqueeze(1)
        self.states = [[part[rows, parents] for part in state] for state in self.states]

    def keep(self, sentences: Tensor) -> None:
        """See DecoderState."""
        self.memory = self.memory[sentences]
        self.mask = None if self.mask is None else self.mask[sentences]
        self.states = [[part[sentences] for part in state] for state in self.states]
