"""The decoder one token at a time: the layers of `transformer`, laid out for few rows and without gradients."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aiayn.attention import MemoryAttention, SelfAttention, Sentences, scaled_dot_product_attention
from aiayn.linear import Linear, fixed_product

# B sentences; W hypotheses of each; R = B * W rows; C columns, one for each token of each hypothesis
# L tokens of the longest source; D d_model; H heads; K d_k; V d_v


class DecoderLayout:
    """One decoder layer's weights as one token at a time wants them."""

    def __init__(
        self,
        self_attention: SelfAttention,
        memory_attention: MemoryAttention,
        feed_forward: tuple[Linear, Linear],
        norms: tuple[nn.LayerNorm, nn.LayerNorm, nn.LayerNorm],
        *,
        int8: bool,
    ) -> None:
        self.num_heads, self.d_k = self_attention.num_heads, self_attention.d_k
        self.products = [
            fixed_product(layer.weight, layer.bias, int8=int8)
            for layer in (
                self_attention.query_key_value,
                self_attention.output,
                memory_attention.query,
                memory_attention.output,
                *feed_forward,
            )
        ]
        self.norms = [(norm.normalized_shape, norm.weight, norm.bias, norm.eps) for norm in norms]
        self.keys_and_values = memory_attention.keys_and_values


class LayerDecoding:
    """What the next tokens of one batch look at in one decoder layer, and the layer's output for them."""

    def __init__(self, layout: DecoderLayout, memory: Tensor, sentences: Sentences) -> None:
        self.layout = layout
        self.memory = [*layout.keys_and_values(memory, sentences)]  # (B, H, L, K), (B, H, L, V)
        self.past = [x[:, :, :0] for x in self.memory]  # (B, H, C, K), (B, H, C, V)

    def step(self, x: Tensor, columns: slice, past_mask: Tensor | None, memory_mask: Tensor | None) -> Tensor:
        """The layer's output (R, D) for the next tokens x (R, D), whose keys and values take their `columns`."""
        to_query_key_value, to_output, to_query, to_memory_output, to_hidden, from_hidden = self.layout.products
        num_heads, d_k = self.layout.num_heads, self.layout.d_k
        shape = (len(self.memory[0]), -1, num_heads)
        inner = num_heads * d_k

        query, key, value = (
            part.view(*shape, part.size(1) // num_heads).transpose(1, 2)
            for part in to_query_key_value(x).tensor_split((inner, 2 * inner), 1)
        )
        keys, values = self.past
        keys[:, :, columns], values[:, :, columns] = key, value
        seen = slice(columns.stop)
        heads, _ = scaled_dot_product_attention(query, keys[:, :, seen], values[:, :, seen], past_mask)  # (B, H, W, V)
        x = self._norm(0, x + to_output(heads.transpose(1, 2).reshape(len(x), -1)))

        query = to_query(x).view(*shape, d_k).transpose(1, 2)
        memory_keys, memory_values = self.memory
        heads, _ = scaled_dot_product_attention(query, memory_keys, memory_values, memory_mask)
        x = self._norm(1, x + to_memory_output(heads.transpose(1, 2).reshape(len(x), -1)))

        return self._norm(2, x + from_hidden(to_hidden(x).relu_()))

    def make_room(self, columns: int) -> None:
        """So many more columns."""
        self.past = [F.pad(x, (0, 0, 0, columns)) for x in self.past]

    def keep(self, rows: Tensor) -> None:
        """Only the sentences numbered `rows` (B',) stay, in that order."""
        self.memory, self.past = ([x.index_select(0, rows) for x in pair] for pair in (self.memory, self.past))

    def _norm(self, number: int, x: Tensor) -> Tensor:
        return F.layer_norm(x, *self.layout.norms[number])


class Decoder:
    """The decoder laid out once for many batches, which it decodes one token at a time, without gradients."""

    def __init__(
        self,
        layouts: list[DecoderLayout],
        encode: Callable[[Tensor, Tensor], tuple[Tensor, Sentences]],  # source (S,), offsets (B + 1,) as memory (S, D)
        embed: Callable[[Tensor, int], Tensor],  # tokens (R,) at a position as (R, D)
        embedding: Tensor,
        *,
        int8: bool,
    ) -> None:
        self.layouts, self.encode, self.embed = layouts, encode, embed
        self.logits = fixed_product(embedding, int8=int8)
        self.device = embedding.device

    def start(self, source: Tensor, source_offsets: Tensor) -> "Decoding":
        """The beginning of a batch: source (S,), `source_offsets` (B + 1,)."""
        memory, sentences = self.encode(source, source_offsets)
        layers = [LayerDecoding(layout, memory, sentences) for layout in self.layouts]
        return Decoding(layers, self.embed, self.logits, sentences.mask)


class Decoding:
    """B sentences being decoded one token at a time, each with one empty hypothesis at first.

    Keys and values stay in the columns where their step put them, whichever hypotheses go on from there: `past_mask`
    says which columns hold a hypothesis's own tokens.
    """

    def __init__(
        self,
        layers: list[LayerDecoding],
        embed: Callable[[Tensor, int], Tensor],
        logits: Callable[[Tensor], Tensor],
        memory_mask: Tensor | None,  # (B, 1, 1, L), 0 or -inf
    ) -> None:
        self.layers, self.embed, self.logits, self.memory_mask = layers, embed, logits, memory_mask
        keys = layers[0].memory[0]
        # (B, 1, W, columns taken), 0 or -inf
        self.past_mask = torch.zeros(len(keys), 1, 1, 0, device=keys.device, dtype=torch.float32)
        self.steps = 0

    def step(self, tokens: Tensor) -> Tensor:
        """The logits (B, W, vocabulary) after one more token (B, W) of each hypothesis; the first ones are BOS, W = 1.

        There is one empty hypothesis until `reorder` makes more of it.
        """
        x = self.embed(tokens.flatten(), self.steps)
        columns = self._columns(tokens.size(1))
        # As long as there was never more than one hypothesis, every column is its own
        past_mask = None if columns.stop == self.steps else self.past_mask
        for layer in self.layers:
            x = layer.step(x, columns, past_mask, self.memory_mask)
        return self.logits(x).view(*tokens.shape, -1)

    def _columns(self, width: int) -> slice:
        """Room for one more token of `width` hypotheses."""
        taken, room = self.past_mask.size(3), self.layers[0].past[0].size(2)
        if taken + width > room:
            for layer in self.layers:
                layer.make_room(room + width)
        own = self.past_mask.new_full((width, width), -torch.inf).fill_diagonal_(0)
        self.past_mask = torch.cat((self.past_mask, own.expand(len(self.past_mask), 1, -1, -1)), 3)
        self.steps += 1
        return slice(taken, taken + width)

    def reorder(self, parents: Tensor) -> None:
        """Hypothesis w of sentence b goes on from what was hypothesis parents[b, w] (B, W'); W' may differ from W."""
        rows = parents[:, None, :, None].expand(-1, -1, -1, self.past_mask.size(3))
        self.past_mask = self.past_mask.gather(2, rows)

    def keep(self, rows: Tensor) -> None:
        """Only the sentences numbered `rows` (B',) stay, in that order."""
        for layer in self.layers:
            layer.keep(rows)
        self.past_mask = self.past_mask.index_select(0, rows)
        if self.memory_mask is not None:
            self.memory_mask = self.memory_mask.index_select(0, rows)
