"""The same Transformer, with the same weights, in other implementations: what `aiayn bench` compares ours with."""

import copy
import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aiayn.config.schema import ConfigError
from aiayn.data.sentencepiece_bpe import PAD
from aiayn.evaluation.export import POSITIONS, positions, projections, write
from aiayn.paper.attention import SelfAttention
from aiayn.paper.batch import Batch, Packing
from aiayn.paper.layers import NORM_EPSILON, LearnedPositions
from aiayn.paper.transformer import DecoderLayer, Transformer

# B sentences; L tokens of the longest source, M of the longest target; D d_model

SENTENCES = 32  # that are searched together
# From each source's tokens without EOS and a number of hypotheses to the best output, all equally long
Decode = Callable[[Sequence[list[int]], int], list[list[int]]]
# What torch.nn calls the parts of a layer that MarianModel has
TORCH_NAMES = {
    **{"q_proj.": "in_proj_", "k_proj.": "in_proj_", "v_proj.": "in_proj_", "fc1": "linear1", "fc2": "linear2"},
    **{"self_attn_layer_norm": "norm1", "encoder_attn_layer_norm": "norm2", "encoder_attn": "multihead_attn"},
}


def padded(batch: Batch) -> tuple[Batch, Packing]:
    """The same sentences with source (B, L) and target_input (B, M) filled up, and how the target is packed."""
    device = batch.source.device
    sources, targets = (Packing(offsets, device=device) for offsets in (batch.source_offsets, batch.target_offsets))
    source, target_input = sources.pad(batch.source), targets.pad(batch.target_input)  # with PAD, which is zero
    return dataclasses.replace(batch, source=source, target_input=target_input), targets


def smoothed_loss(model: Any, batch: Batch, packing: Packing, label_smoothing: float) -> Tensor:
    """The summed loss of section 5.4 of what `padded` gave, padding left out before the largest product."""
    vocab_size = model.embedding.num_embeddings
    # torch gives the target a share of what is smoothed, the paper's code does not
    spread = label_smoothing * vocab_size / (vocab_size - 1)
    logits = F.linear(packing.unpad(model.hidden(batch)), model.embedding.weight)
    return F.cross_entropy(logits, batch.target, label_smoothing=spread, reduction="sum")


class TorchTransformer(nn.Module):
    """torch.nn.Transformer with the embedding, the positions and the weights of ours."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        (heads, d_ff), layers = sizes(model), len(model.encoder)
        self.dropout = model.source_dropout.probability
        options: dict[str, Any] = {"layer_norm_eps": NORM_EPSILON, "batch_first": True}
        self.transformer = nn.Transformer(model.d_model, heads, layers, layers, d_ff, self.dropout, **options)
        # The paper has no norm at the end of a stack
        self.transformer.encoder.norm = self.transformer.decoder.norm = None
        for module in self.transformer.modules():
            # The paper drops out neither attention weights nor what is inside the feed-forward network: less work
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
            elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                module.dropout = nn.Identity()  # type: ignore[assignment]
        self.transformer.load_state_dict(torch_state(model))
        self.embedding = copy.deepcopy(model.embedding)
        self.register_buffer("positions", positions(model.source_positions))
        self.register_buffer("causal", nn.Transformer.generate_square_subsequent_mask(POSITIONS))
        self.to(model.embedding.weight.device)

    def hidden(self, batch: Batch) -> Tensor:
        """What the logits are made of, as (B, M, D)."""
        padding = batch.source == PAD
        source, target = (self._embed(tokens) for tokens in (batch.source, batch.target_input))
        # Padding ends a sentence, so the causal mask hides it, and attention may take its fast path
        causal = self.get_buffer("causal")[: target.size(1), : target.size(1)]
        masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding, "tgt_mask": causal}
        return self.transformer(source, target, tgt_is_causal=True, **masks)  # type: ignore[no-any-return]

    def _embed(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.embedding.embedding_dim**0.5 + self.get_buffer("positions")[: tokens.size(1)]
        return F.dropout(x, self.dropout, self.training)


class MarianTransformer(nn.Module):
    """transformers' MarianMTModel with the positions and the weights of ours."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        import transformers

        heads, d_ff = sizes(model)
        stack = {"layers": len(model.encoder), "ffn_dim": d_ff, "attention_heads": heads}
        options = transformers.MarianConfig(
            **{f"{side}_{key}": value for key, value in stack.items() for side in ("encoder", "decoder")},
            d_model=model.d_model,
            vocab_size=model.embedding.num_embeddings,
            max_position_embeddings=POSITIONS,
            activation_function="relu",
            dropout=model.source_dropout.probability,
            scale_embedding=True,
            **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), PAD),
        )
        self.marian = transformers.MarianModel(options).to(model.embedding.weight.device)
        self.marian.load_state_dict(marian_state(model))
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = NORM_EPSILON
        self.embedding = self.marian.get_input_embeddings()

    def hidden(self, batch: Batch) -> Tensor:
        """What the logits are made of, as (B, M, D)."""
        mask = (batch.source != PAD).long()
        return self.marian(batch.source, mask, batch.target_input, use_cache=False).last_hidden_state  # type: ignore[no-any-return]


def sizes(model: Transformer) -> tuple[int, int]:
    """h and d_ff of the model. Raises ConfigError for a row that the baselines cannot hold."""
    first = model.encoder[0].self_attention
    assert isinstance(first, SelfAttention)
    width = model.d_model / first.num_heads
    if not first.d_k == first.d_v == width or isinstance(model.source_positions, LearnedPositions):
        raise ConfigError(
            f"model.d_k={first.d_k}, model.d_v={first.d_v}: the baselines, whose heads are d_model / h = {width:g} wide"
            " and whose positions are sinusoids, cannot hold this row; base at scale=mini they can"
        )
    return first.num_heads, model.encoder[0].feed_forward[0].out_features  # type: ignore[index, union-attr]


def marian_state(model: Transformer) -> dict[str, Tensor]:
    """The model's parameters and positions under the names of MarianModel."""
    state = {"shared.weight": model.embedding.weight}
    for side, table in (("encoder", model.source_positions), ("decoder", model.target_positions)):
        state[f"{side}.embed_tokens.weight"] = model.embedding.weight
        state[f"{side}.embed_positions.weight"] = positions(table)
        for number, layer in enumerate(getattr(model, side)):
            sublayers = {"self_attn": (layer.self_attention, layer.after_self_attention)}
            if isinstance(layer, DecoderLayer):
                sublayers["encoder_attn"] = (layer.memory_attention, layer.after_memory_attention)
            parts = {"fc1": layer.feed_forward[0], "fc2": layer.feed_forward[2]}
            for name, (attention, norm) in sublayers.items():
                linears = projections(attention, attention.d_k)
                names = (f"{name}.{letter}_proj" for letter in ("q", "k", "v", "out"))
                parts |= {**dict(zip(names, linears, strict=True)), f"{name}_layer_norm": norm.norm}
            parts["final_layer_norm"] = layer.after_feed_forward.norm
            for name, part in parts.items():
                state |= {f"{side}.layers.{number}.{name}.{kind}": getattr(part, kind) for kind in ("weight", "bias")}
    return {name: value.detach() for name, value in state.items()}


def torch_state(model: Transformer) -> dict[str, Tensor]:
    """The layers' parameters under the names of torch.nn.Transformer, which has queries, keys and values in one."""
    state: dict[str, Tensor] = {}
    for name, value in marian_state(model).items():
        if ".layers." in name:
            names = {**TORCH_NAMES, "final_layer_norm": "norm3" if name.startswith("decoder") else "norm2"}
            for theirs, torchs in names.items():
                name = name.replace(theirs, torchs)
            state[name] = torch.cat([state[name], value]) if name in state else value
    return state


def ctranslate2_decode(model: Transformer, threads: int, length: int) -> Decode:
    """CTranslate2's search with the model's weights, for outputs of `length` tokens that do not end."""
    import ctranslate2

    subwords = [str(number) for number in range(model.embedding.num_embeddings)]
    with tempfile.TemporaryDirectory() as folder:
        write(model, subwords, "ctranslate2", Path(folder))
        device = "cuda" if model.embedding.weight.is_cuda else "cpu"
        translator = ctranslate2.Translator(folder, device, compute_type="float32", intra_threads=threads)

    def decode(sentences: Sequence[list[int]], beam_size: int) -> list[list[int]]:
        words, options = [[str(token) for token in sentence] for sentence in sentences], {"beam_size": beam_size}
        results = translator.translate_batch(words, max_batch_size=SENTENCES, max_decoding_length=length, **options)
        return [[int(subword) for subword in result.hypotheses[0]] for result in results]

    return decode
