"""The same Transformer, with the same weights, in other implementations: what `aiayn bench` measures ours against."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aiayn.data.sentencepiece_bpe import BOS, EOS
from aiayn.evaluation.export import NORM_EPSILON, marian, positions, standard_projections, write
from aiayn.paper.attention import MemoryAttention, SelfAttention
from aiayn.paper.batch import Batch, Packing
from aiayn.paper.layers import DecoderLayer, LearnedPositions
from aiayn.paper.transformer import Transformer

# B sentences; L tokens of the longest source, M of the longest target; T target tokens of all sentences, packed
# W hypotheses of a sentence; D d_model; V vocabulary

SENTENCES = 32
"""Sentences that are searched together."""

Decode = Callable[[Sequence[list[int]], int], list[list[int]]]
"""Gives for each source (its tokens without EOS) the best output of so many hypotheses, all equally long."""


@dataclass(frozen=True)
class Padded:
    """A Batch as others take it."""

    source: Tensor  # (B, L)
    source_padding: Tensor  # (B, L) True where no token is
    target_input: Tensor  # (B, M)
    is_target: Tensor  # (B, M)
    target: Tensor  # (T,)


def padded(batch: Batch) -> Padded:
    """The sentences of a batch side by side, filled up with zeros, which are PAD."""
    device = batch.source.device
    sources, targets = (Packing(offsets, device=device) for offsets in (batch.source_offsets, batch.target_offsets))
    source_padding, target_padding = sources.is_padding.to(device), targets.is_padding.to(device)
    return Padded(
        sources.pad(batch.source), source_padding, targets.pad(batch.target_input), ~target_padding, batch.target
    )


def smoothed_loss(hidden: Tensor, embedding: Tensor, batch: Padded, label_smoothing: float) -> Tensor:
    """The summed loss of section 5.4 on hidden (B, M, D), padding left out before the largest product."""
    vocab_size = len(embedding)
    # torch gives the target a share of what is smoothed, the paper's code does not
    spread = label_smoothing * vocab_size / (vocab_size - 1)
    logits = F.linear(hidden[batch.is_target], embedding)
    return F.cross_entropy(logits, batch.target, label_smoothing=spread, reduction="sum")


class TorchTransformer(nn.Module):
    """torch.nn.Transformer with the embedding, the positions and the weights of ours."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        first = model.encoder[0].self_attention
        assert isinstance(first, SelfAttention)
        d_ff = model.encoder[0].feed_forward[0].out_features  # type: ignore[index, union-attr]
        self.d_model = model.d_model
        self.dropout = model.source_dropout.probability
        options: dict[str, Any] = {"dropout": self.dropout, "layer_norm_eps": NORM_EPSILON, "batch_first": True}
        sizes = (model.d_model, first.num_heads, d_ff)
        encoder_layer = nn.TransformerEncoderLayer(*sizes, **options)
        decoder_layer = nn.TransformerDecoderLayer(*sizes, **options)
        self.transformer = nn.Transformer(
            *sizes[:2],
            # The paper has no norm at the end of a stack
            custom_encoder=nn.TransformerEncoder(encoder_layer, len(model.encoder), enable_nested_tensor=False),
            custom_decoder=nn.TransformerDecoder(decoder_layer, len(model.decoder)),
            batch_first=True,
        )
        for module in self.transformer.modules():
            # The paper drops out neither attention weights nor what is inside the feed-forward network: less work
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
            elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                module.dropout = nn.Identity()  # type: ignore[assignment]
        self.embedding = nn.Embedding(model.embedding.num_embeddings, model.d_model)
        self.register_buffer("source_positions", positions(model.source_positions))
        self.register_buffer("target_positions", positions(model.target_positions))
        self.source_positions: Tensor
        self.target_positions: Tensor
        self.to(model.embedding.weight.device)
        self.load_state_dict(torch_state(model), strict=False)

    def encode(self, source: Tensor, source_padding: Tensor | None) -> Tensor:
        """source (B, L) as memory (B, L, D)."""
        x = self._embed(source, self.source_positions)
        return self.transformer.encoder(x, src_key_padding_mask=source_padding)  # type: ignore[no-any-return]

    def decode(self, target_input: Tensor, memory: Tensor, source_padding: Tensor | None) -> Tensor:
        """target_input (B, M) and memory as (B, M, D)."""
        x = self._embed(target_input, self.target_positions)
        # Padding ends a sentence, so the causal mask hides it, and attention may take its fast path
        causal = nn.Transformer.generate_square_subsequent_mask(x.size(1), device=x.device, dtype=x.dtype)
        return self.transformer.decoder(  # type: ignore[no-any-return]
            x, memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=source_padding
        )

    def hidden(self, batch: Padded) -> Tensor:
        """What the logits are made of, as (B, M, D)."""
        padding = batch.source_padding if bool(batch.source_padding.any()) else None
        return self.decode(batch.target_input, self.encode(batch.source, padding), padding)

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.d_model**0.5 + positions[: tokens.size(1)]
        return F.dropout(x, self.dropout, self.training)


def torch_state(model: Transformer) -> dict[str, Tensor]:
    """The model's parameters, or gradients put in their place, under the names of TorchTransformer.

    Raises ConfigError for a row whose heads are wider than d_model / h.
    """
    state = {"embedding.weight": model.embedding.weight}

    def put(name: str, weight: Tensor, bias: Tensor) -> None:
        state[f"transformer.{name}.weight"], state[f"transformer.{name}.bias"] = weight, bias

    for side in ("encoder", "decoder"):
        for number, layer in enumerate(getattr(model, side)):
            name = f"{side}.layers.{number}"
            attentions = {"self_attn": layer.self_attention}
            norms = [layer.after_self_attention]
            if isinstance(layer, DecoderLayer):
                attentions["multihead_attn"] = layer.memory_attention
                norms.append(layer.after_memory_attention)
            for kind, attention in attentions.items():
                assert isinstance(attention, SelfAttention | MemoryAttention)
                *inputs, output = standard_projections(attention)
                put(f"{name}.{kind}.out_proj", output.weight, output.bias)
                state[f"transformer.{name}.{kind}.in_proj_weight"] = torch.cat([part.weight for part in inputs])
                state[f"transformer.{name}.{kind}.in_proj_bias"] = torch.cat([part.bias for part in inputs])
            put(f"{name}.linear1", layer.feed_forward[0].weight, layer.feed_forward[0].bias)
            put(f"{name}.linear2", layer.feed_forward[2].weight, layer.feed_forward[2].bias)
            for place, norm in enumerate([*norms, layer.after_feed_forward], 1):
                put(f"{name}.norm{place}", norm.norm.weight, norm.norm.bias)
    return {name: value.detach() for name, value in state.items()}


class MarianTransformer(nn.Module):
    """transformers' MarianMTModel with the weights of ours."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.marian = marian(model)
        self.embedding = self.marian.get_input_embeddings()

    def hidden(self, batch: Padded) -> Tensor:
        """What the logits are made of, as (B, M, D)."""
        return self.marian.model(  # type: ignore[no-any-return]
            input_ids=batch.source,
            attention_mask=(~batch.source_padding).long(),
            decoder_input_ids=batch.target_input,
            use_cache=False,
        ).last_hidden_state


def gradients_of(gradients: Transformer, name: str) -> dict[str, Tensor]:
    """The parameters of a model that has gradients in their place, under the names of the rival `name`."""
    if name == "torch.nn":
        return torch_state(gradients)
    return {
        key: value
        for key, value in MarianTransformer(gradients).state_dict().items()
        if "embed_positions" not in key and "final_logits_bias" not in key
    }


def trainable(model: Transformer) -> dict[str, nn.Module]:
    """The rivals that can be trained, each with the model's weights: those that are installed."""
    rivals: dict[str, nn.Module] = {"torch.nn": TorchTransformer(model)}
    if _has_marian(model):
        rivals["Marian"] = MarianTransformer(model)
    return rivals


def decoders(model: Transformer, threads: int, length: int, precision: str) -> dict[str, Decode]:
    """The rivals that can search, each with the model's weights, for outputs of `length` tokens that do not end.

    In float32 (`fp32`), `bf16` or `int8`; the caller puts torch under autocast.
    """
    found: dict[str, Decode] = {}
    if precision != "int8":
        found["torch.nn"] = _recomputing(TorchTransformer(model).eval(), length)
        if _has_marian(model):
            found["Marian"] = _generating(marian(model), length)
    compute_type = {"fp32": "float32", "int8": "int8"}.get(precision)
    if compute_type and find_spec("ctranslate2"):
        found["CTranslate2"] = _ctranslate2(model, compute_type, 1, threads, length)
        if threads > 1:
            found[f"CTranslate2, {threads} batches at once"] = _ctranslate2(model, compute_type, threads, 1, length)
    return found


def _has_marian(model: Transformer) -> bool:
    # It has no learned positions
    return find_spec("transformers") is not None and not isinstance(model.source_positions, LearnedPositions)


def _one_batch_after_another(decode_together: Decode) -> Decode:
    def decode(sentences: Sequence[list[int]], beam_size: int) -> list[list[int]]:
        starts = range(0, len(sentences), SENTENCES)
        return [ids for start in starts for ids in decode_together(sentences[start : start + SENTENCES], beam_size)]

    return decode


def _sources(sentences: Sequence[list[int]], like: Tensor) -> Tensor:
    return torch.tensor([[*sentence, EOS] for sentence in sentences], device=like.device)


def _recomputing(model: TorchTransformer, length: int) -> Decode:
    """torch.nn has no cache: every step goes over all tokens so far."""

    @torch.inference_mode()
    def decode_together(sentences: Sequence[list[int]], beam_size: int) -> list[list[int]]:
        weight = model.embedding.weight
        memory = model.encode(_sources(sentences, weight), None)
        batch = len(sentences)
        tokens = torch.full((batch, 1, 1), BOS, device=weight.device)  # (B, W, t)
        alive = torch.zeros(batch, 1, device=weight.device)  # (B, W)
        for step in range(length):
            width = tokens.size(1)
            if step < 2:  # one hypothesis before the first step, beam_size from the second on
                of_each = memory.repeat_interleave(width, 0)
            last = model.decode(tokens.flatten(0, 1), of_each, None)[:, -1]
            total = F.linear(last, weight).float().log_softmax(-1).view(batch, width, -1) + alive.unsqueeze(-1)
            alive, best = total.flatten(1).topk(beam_size)
            rows = torch.arange(batch, device=weight.device).unsqueeze(1)
            tokens = torch.cat((tokens[rows, best // total.size(2)], (best % total.size(2)).unsqueeze(-1)), -1)
        outputs: list[list[int]] = tokens[:, 0, 1:].tolist()
        return outputs

    return _one_batch_after_another(decode_together)


def _generating(model: Any, length: int) -> Decode:
    @torch.inference_mode()
    def decode_together(sentences: Sequence[list[int]], beam_size: int) -> list[list[int]]:
        source = _sources(sentences, model.get_input_embeddings().weight)
        output = model.generate(
            input_ids=source,
            attention_mask=torch.ones_like(source),
            num_beams=beam_size,
            do_sample=False,
            min_new_tokens=length,
            max_new_tokens=length,
        )
        outputs: list[list[int]] = output[:, 1:].tolist()
        return outputs

    return _one_batch_after_another(decode_together)


def _ctranslate2(model: Transformer, compute_type: str, batches_at_once: int, threads: int, length: int) -> Decode:
    import ctranslate2

    subwords = [str(number) for number in range(model.embedding.num_embeddings)]
    with tempfile.TemporaryDirectory() as folder:
        write(model, subwords, "ctranslate2", Path(folder))
        device = "cuda" if model.embedding.weight.is_cuda else "cpu"
        translator = ctranslate2.Translator(
            folder, device, compute_type=compute_type, inter_threads=batches_at_once, intra_threads=threads
        )

    def decode(sentences: Sequence[list[int]], beam_size: int) -> list[list[int]]:
        results = translator.translate_batch(
            [[subwords[token] for token in sentence] for sentence in sentences],
            beam_size=beam_size,
            max_batch_size=SENTENCES,
            max_decoding_length=length,
        )
        return [[int(subword) for subword in result.hypotheses[0]] for result in results]

    return decode
