"""A Decoder for few rows at a time and without gradients: prepacked weights, and keys and values that never move."""

import torch
import torch.nn.functional as F
from torch import Tensor

from aiayn.paper.fast.attention import HeadPacking, weigh
from aiayn.paper.fast.kernels import LANES, LayerKernel
from aiayn.paper.fast.products import fixed_product, static_rows
from aiayn.paper.layers import DecoderLayer, EncoderLayer
from aiayn.paper.transformer import Transformer

# B sentences; W hypotheses of each; R = B * W rows; C columns, one for each token of each hypothesis
# L tokens of the longest source; D d_model; H heads; K d_k; V d_v


class FastDecoder:
    """A trained Transformer as a Decoder, with its weights prepacked as they are now.

    With `compiled`, for float32 on a CPU, its layers are those of `kernels`.
    """

    def __init__(self, transformer: Transformer, *, compiled: bool = False) -> None:
        assert not transformer.training, "dropout would be on: call eval()"
        self.transformer, self.device = transformer, transformer.embedding.weight.device
        self.encoder = [encoder_kernel(layer) for layer in transformer.encoder] if compiled else []  # type: ignore[arg-type]
        self.layers = [PrepackedLayer(layer, compiled=compiled) for layer in transformer.decoder]  # type: ignore[arg-type]
        self.logits = fixed_product(transformer.embedding.weight)

    def start(self, source: Tensor, source_offsets: Tensor) -> "FastDecoding":
        """The beginning of a batch: source (S,), `source_offsets` (B + 1,)."""
        packing = HeadPacking(source_offsets, static_rows(len(source)), source.device)
        source = packing.fill(source)
        if self.encoder:
            self.transformer.source_positions.extend(packing.bound)
            memory = self.transformer.embed_source(source, packing.positions)
            for kernel in self.encoder:
                kernel.encode(memory, source_offsets)
        else:
            memory = self.transformer.encode(source, packing)
        layers = [LayerDecoding(layer, memory, packing) for layer in self.layers]
        return FastDecoding(self, layers, packing.mask)


def encoder_kernel(layer: EncoderLayer) -> LayerKernel:
    """The layer in C."""
    attention = layer.self_attention
    products = [attention.query_key_value, attention.output, layer.feed_forward[0], layer.feed_forward[2]]
    norms = [layer.after_self_attention.norm, layer.after_feed_forward.norm]
    return LayerKernel(products, norms, attention.num_heads, attention.d_k, attention.d_v)  # type: ignore[arg-type]


class PrepackedLayer:
    """One decoder layer's weights prepacked for one token at a time."""

    def __init__(self, layer: DecoderLayer, *, compiled: bool) -> None:
        own, memory = layer.self_attention, layer.memory_attention
        self.num_heads, self.d_k = own.num_heads, own.d_k
        linears = [own.query_key_value, own.output, layer.feed_forward[0], layer.feed_forward[2]]
        linears += [memory.query, memory.output]
        norms = [layer.after_self_attention.norm, layer.after_feed_forward.norm, layer.after_memory_attention.norm]
        self.kernel: LayerKernel | None = None
        if compiled:
            linears.append(memory.key_value)
            self.kernel = LayerKernel(linears, norms, own.num_heads, own.d_k, own.d_v)  # type: ignore[arg-type]
        else:
            self.products = [fixed_product(linear.weight, linear.bias) for linear in linears]  # type: ignore[arg-type]
            self.norms = [(norm.normalized_shape, norm.weight, norm.bias, norm.eps) for norm in norms]
        self.memory_attention = memory

    def keys_and_values(self, memory: Tensor, packing: HeadPacking) -> tuple[Tensor, Tensor]:
        """The memory (S, D) as padded keys (B, H, L, K) and values (B, H, L, V)."""
        attention = self.memory_attention
        keys, values = packing.split(attention.key_value(memory), attention.num_heads, (attention.d_k, attention.d_v))
        return keys, values


class LayerDecoding:
    """The keys and values of one batch in one decoder layer, and the layer's output for the next tokens."""

    def __init__(self, layer: PrepackedLayer, memory: Tensor, packing: HeadPacking) -> None:
        self.layer = layer
        # Keys (B, H, K, capacity), values (B, H, capacity, V): the columns used may be fewer
        if layer.kernel is not None:
            self.memory = layer.kernel.remember(memory, packing.offsets)
        else:
            keys, values = layer.keys_and_values(memory, packing)
            self.memory = _with_capacity(keys.transpose(2, 3), values, 0)
        self.memory_columns = packing.max_length
        self.past = self.memory[0][..., :0], self.memory[1][:, :, :0]

    def step(self, x: Tensor, columns: slice, past_mask: Tensor | None, memory_mask: Tensor | None) -> Tensor:
        """The layer's output (R, D) for the next tokens x (R, D), whose keys and values take their `columns`.

        It may overwrite x.
        """
        if self.layer.kernel is not None:
            past, memory = (*self.past, past_mask, columns.stop), (*self.memory, memory_mask, self.memory_columns)
            self.layer.kernel.decode(x, past, memory)
            return x
        to_query_key_value, to_output, to_hidden, from_hidden, to_query, to_memory_output = self.layer.products
        num_heads, d_k = self.layer.num_heads, self.layer.d_k
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

    def reserve(self, columns: int) -> None:
        """Makes room for so many more columns, or somewhat more."""
        self.past = _with_capacity(*self.past, columns)

    def keep(self, sentences: Tensor) -> None:
        """Only the sentences with these numbers (B',) stay, in that order."""
        self.memory, self.past = (
            (keys.index_select(0, sentences), values.index_select(0, sentences))
            for keys, values in (self.memory, self.past)
        )

    def _norm(self, number: int, x: Tensor) -> Tensor:
        return F.layer_norm(x, *self.layer.norms[number])


def _with_capacity(keys: Tensor, values: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    columns += -(keys.size(3) + columns) % LANES
    return F.pad(keys, (0, columns)).contiguous(), F.pad(values, (0, 0, 0, columns)).contiguous()


def _attention(queries: Tensor, keys_and_values: tuple[Tensor, Tensor], columns: int, mask: Tensor | None) -> Tensor:
    keys, values = keys_and_values
    heads, _ = weigh(queries, keys[..., :columns].transpose(2, 3), values[:, :, :columns], mask)
    return heads  # (B, H, W, V)


class FastDecoding:
    """B sentences being decoded one token at a time, each with one empty hypothesis at first.

    Keys and values stay in the columns where their step put them, whichever hypotheses continue: `past_mask` says
    which columns hold a hypothesis's own tokens.
    """

    def __init__(self, decoder: FastDecoder, layers: list[LayerDecoding], memory_mask: Tensor | None) -> None:
        self.decoder, self.layers, self.memory_mask = decoder, layers, memory_mask  # (B, 1, 1, L), 0 or -inf
        # (B, 1, W, columns used), 0 or -inf; None as long as there was never more than one hypothesis
        self.past_mask: Tensor | None = None
        self.num_tokens = self.columns = 0

    def step(self, tokens: Tensor) -> Tensor:
        """The logits (B, W, vocabulary) after one more token (B, W) of each; the first are BOS, W = 1."""
        transformer = self.decoder.transformer
        transformer.target_positions.extend(self.num_tokens + 1)
        position = torch.full((1,), self.num_tokens, device=tokens.device)
        x = transformer.embed_target(tokens.flatten(), position)
        columns = self._reserve(tokens.size(1))
        for layer in self.layers:
            x = layer.step(x, columns, self.past_mask, self.memory_mask)
        self.num_tokens += 1
        return self.decoder.logits(x).view(*tokens.shape, -1)

    def _reserve(self, width: int) -> slice:
        """Columns for one more token of `width` hypotheses."""
        capacity = self.layers[0].past[0].size(3)
        if self.columns + width > capacity:
            for layer in self.layers:
                layer.reserve(capacity + width)
        if self.past_mask is not None:
            own = self.past_mask.new_full((width, width), -torch.inf).fill_diagonal_(0)
            self.past_mask = torch.cat((self.past_mask, own.expand(len(self.past_mask), 1, -1, -1)), 3)
        self.columns += width
        return slice(self.columns - width, self.columns)

    def reorder(self, parents: Tensor) -> None:
        """Hypothesis w of sentence b continues what was hypothesis parents[b, w] (B, W'); W' may differ from W."""
        if self.past_mask is None:
            shape = len(parents), 1, parents.size(1), self.columns
            self.past_mask = torch.zeros(shape, device=parents.device, dtype=torch.float32)
            return
        rows = parents[:, None, :, None].expand(-1, -1, -1, self.columns)
        self.past_mask = self.past_mask.gather(2, rows)

    def keep(self, sentences: Tensor) -> None:
        """Only the sentences with these numbers (B',) stay, in that order."""
        for layer in self.layers:
            layer.keep(sentences)
        if self.past_mask is not None:
            self.past_mask = self.past_mask.index_select(0, sentences)
        if self.memory_mask is not None:
            self.memory_mask = self.memory_mask.index_select(0, sentences)
