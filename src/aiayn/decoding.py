"""The decoder one token at a time: the layers of `transformer`, laid out for few rows and without gradients."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aiayn.attention import MemoryAttention, SelfAttention, Sentences, scaled_dot_product_attention
from aiayn.kernels import LANES, LayerKernel
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
        compiled: bool,
    ) -> None:
        self.num_heads, self.d_k = self_attention.num_heads, self_attention.d_k
        layers = [
            *(self_attention.query_key_value, self_attention.output),
            *feed_forward,
            *(memory_attention.query, memory_attention.output),
        ]
        self.kernel: LayerKernel | None = None
        if compiled:
            layers.append(memory_attention.key_value)
            self.kernel = LayerKernel(layers, norms, self.num_heads, self.d_k, self_attention.d_v)
        else:
            self.products = [fixed_product(layer.weight, layer.bias) for layer in layers]
            self.norms = [(norm.normalized_shape, norm.weight, norm.bias, norm.eps) for norm in norms]
        self.keys_and_values = memory_attention.keys_and_values


class LayerDecoding:
    """What the next tokens of one batch look at in one decoder layer, and the layer's output for them."""

    def __init__(self, layout: DecoderLayout, memory: Tensor, sentences: Sentences, offsets: Tensor) -> None:
        self.layout = layout
        # Keys (B, H, K, room), values (B, H, room, V): not all of the room's columns may be taken
        if layout.kernel is not None:
            self.memory = layout.kernel.remember(memory, offsets)
        else:
            keys, values = layout.keys_and_values(memory, sentences)  # (B, H, L, K), (B, H, L, V)
            self.memory = _with_room(keys.transpose(2, 3), values, 0)
        self.memory_columns = sentences.max_length
        self.past = self.memory[0][..., :0], self.memory[1][:, :, :0]

    def step(self, x: Tensor, columns: slice, past_mask: Tensor | None, memory_mask: Tensor | None) -> Tensor:
        """The layer's output (R, D) for the next tokens x (R, D), whose keys and values take their `columns`.

        It may take the place of x.
        """
        if self.layout.kernel is not None:
            past, memory = (*self.past, past_mask, columns.stop), (*self.memory, memory_mask, self.memory_columns)
            self.layout.kernel.decode(x, past, memory)
            return x
        to_query_key_value, to_output, to_hidden, from_hidden, to_query, to_memory_output = self.layout.products
        num_heads, d_k = self.layout.num_heads, self.layout.d_k
        shape = (len(self.memory[0]), -1, num_heads)
        inner = num_heads * d_k

        query, key, value = (
            part.view(*shape, part.size(1) // num_heads).transpose(1, 2)
            for part in to_query_key_value(x).tensor_split((inner, 2 * inner), 1)
        )
        keys, values = self.past
        keys[..., columns], values[:, :, columns] = key.transpose(2, 3), value
        heads = _attention(query, self.past, columns.stop, past_mask)
        x = self._norm(0, x + to_output(heads.transpose(1, 2).reshape(len(x), -1)))

        query = to_query(x).view(*shape, d_k).transpose(1, 2)
        heads = _attention(query, self.memory, self.memory_columns, memory_mask)
        x = self._norm(2, x + to_memory_output(heads.transpose(1, 2).reshape(len(x), -1)))

        return self._norm(1, x + from_hidden(to_hidden(x).relu_()))

    def make_room(self, columns: int) -> None:
        """So many more columns, or somewhat more."""
        self.past = _with_room(*self.past, columns)

    def keep(self, rows: Tensor) -> None:
        """Only the sentences numbered `rows` (B',) stay, in that order."""
        self.memory, self.past = (
            (keys.index_select(0, rows), values.index_select(0, rows)) for keys, values in (self.memory, self.past)
        )

    def _norm(self, number: int, x: Tensor) -> Tensor:
        return F.layer_norm(x, *self.layout.norms[number])


def _with_room(keys: Tensor, values: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    columns += -(keys.size(3) + columns) % LANES
    return F.pad(keys, (0, columns)).contiguous(), F.pad(values, (0, 0, 0, columns)).contiguous()


def _attention(queries: Tensor, keys_and_values: tuple[Tensor, Tensor], columns: int, mask: Tensor | None) -> Tensor:
    keys, values = keys_and_values
    heads, _ = scaled_dot_product_attention(queries, keys[..., :columns].transpose(2, 3), values[:, :, :columns], mask)
    return heads  # (B, H, W, V)


class Decoder:
    """The decoder laid out once for many batches, which it decodes one token at a time, without gradients."""

    def __init__(
        self,
        layouts: list[DecoderLayout],
        encode: Callable[[Tensor, Tensor], tuple[Tensor, Sentences]],  # source (S,), offsets (B + 1,) as memory (S, D)
        embed: Callable[[Tensor, int], Tensor],  # tokens (R,) at a position as (R, D)
        embedding: Tensor,
        *,
        compiled: bool,
    ) -> None:
        self.compiled = compiled
        self.layouts, self.encode, self.embed = layouts, encode, embed
        self.logits = fixed_product(embedding)
        self.device = embedding.device

    def start(self, source: Tensor, source_offsets: Tensor) -> "Decoding":
        """The beginning of a batch: source (S,), `source_offsets` (B + 1,)."""
        memory, sentences = self.encode(source, source_offsets)
        layers = [LayerDecoding(layout, memory, sentences, source_offsets) for layout in self.layouts]
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
        # (B, 1, W, columns taken), 0 or -inf; None as long as there was never more than one hypothesis
        self.past_mask: Tensor | None = None
        self.steps = self.taken = 0

    def step(self, tokens: Tensor) -> Tensor:
        """The logits (B, W, vocabulary) after one more token (B, W) of each hypothesis; the first ones are BOS, W = 1.

        There is one empty hypothesis until `reorder` makes more of it.
        """
        x = self.embed(tokens.flatten(), self.steps)
        columns = self._columns(tokens.size(1))
        for layer in self.layers:
            x = layer.step(x, columns, self.past_mask, self.memory_mask)
        return self.logits(x).view(*tokens.shape, -1)

    def _columns(self, width: int) -> slice:
        """Room for one more token of `width` hypotheses."""
        room = self.layers[0].past[0].size(3)
        if self.taken + width > room:
            for layer in self.layers:
                layer.make_room(room + width)
        if self.past_mask is not None:
            own = self.past_mask.new_full((width, width), -torch.inf).fill_diagonal_(0)
            self.past_mask = torch.cat((self.past_mask, own.expand(len(self.past_mask), 1, -1, -1)), 3)
        self.steps, self.taken = self.steps + 1, self.taken + width
        return slice(self.taken - width, self.taken)

    def reorder(self, parents: Tensor) -> None:
        """Hypothesis w of sentence b goes on from what was hypothesis parents[b, w] (B, W'); W' may differ from W."""
        if self.past_mask is None:
            shape = len(parents), 1, parents.size(1), self.taken
            self.past_mask = torch.zeros(shape, device=parents.device, dtype=torch.float32)
            return
        rows = parents[:, None, :, None].expand(-1, -1, -1, self.taken)
        self.past_mask = self.past_mask.gather(2, rows)

    def keep(self, rows: Tensor) -> None:
        """Only the sentences numbered `rows` (B',) stay, in that order."""
        for layer in self.layers:
            layer.keep(rows)
        if self.past_mask is not None:
            self.past_mask = self.past_mask.index_select(0, rows)
        if self.memory_mask is not None:
            self.memory_mask = self.memory_mask.index_select(0, rows)
