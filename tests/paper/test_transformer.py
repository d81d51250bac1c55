"""The Transformer against torch.nn.Transformer, itself a token at a time, finite differences, the paper's sizes."""

import copy
import math
from itertools import chain
from typing import Any

import model_properties
import pytest
import torch
from models import BOS, MODELS, SIZES, SOURCES, TARGETS, VOCAB, WAYS, Attach, Made, batch, transformer
from torch import Tensor, nn

from aiayn.paper.dropout import Dropout
from aiayn.paper.layers import sinusoids
from aiayn.paper.transformer import Transformer


def per_sentence(logits: Tensor) -> tuple[Tensor, ...]:
    return logits.split([len(target) for target in TARGETS])


class Halve(Dropout):
    """Stands in for dropout, so that where it acts shows in the result."""

    def __init__(self) -> None:
        super().__init__(0.0)

    def forward(self, x: Tensor, randomness: Any = None) -> Tensor:
        return x * 0.5


def reference(ours: Transformer, dropout: nn.Module) -> tuple[nn.Transformer, Tensor, Tensor]:
    """torch's Transformer with our weights, dropout where ours is and no final norms; both sides embedded, padded."""
    d_model, heads = ours.d_model, ours.encoder[0].self_attention.num_heads
    sizes = d_model, heads, len(ours.encoder), len(ours.decoder), 19
    theirs = nn.Transformer(*sizes, dropout=0.0, layer_norm_eps=1e-6, batch_first=True, dtype=torch.float64)
    theirs.encoder.norm = theirs.decoder.norm = None
    for module in theirs.modules():
        for name in ("dropout1", "dropout2", "dropout3"):  # on each sub-layer's output
            if hasattr(module, name):
                setattr(module, name, dropout)
    layers = chain(theirs.encoder.layers, theirs.decoder.layers), chain(ours.encoder, ours.decoder)
    for a, b in zip(*layers, strict=True):
        attentions, norms = [(a.self_attn, b.self_attention)], [(a.norm1, b.after_self_attention.norm)]
        if hasattr(a, "multihead_attn"):
            attentions.append((a.multihead_attn, b.memory_attention))
            norms.append((a.norm2, b.after_memory_attention.norm))
        norms.append((a.norm3 if hasattr(a, "norm3") else a.norm2, b.after_feed_forward.norm))
        for x, y in attentions:
            layers = [y.query_key_value] if hasattr(y, "query_key_value") else [y.query, y.key_value]
            x.in_proj_weight.data = torch.cat([layer.weight for layer in layers])
            x.in_proj_bias.data = torch.cat([layer.bias for layer in layers])
            x.out_proj.load_state_dict(y.output.state_dict())
        for x, y in [*norms, (a.linear1, b.feed_forward[0]), (a.linear2, b.feed_forward[2])]:
            x.load_state_dict(y.state_dict())
    sides = []
    for sentences in (SOURCES, [[BOS, *target[:-1]] for target in TARGETS]):
        tokens = nn.utils.rnn.pad_sequence([torch.tensor(sentence) for sentence in sentences], batch_first=True)
        positions = sinusoids(tokens.size(1), d_model)
        sides.append(dropout(ours.embedding(tokens) * math.sqrt(d_model) + positions))
    return theirs, *sides


@WAYS
@pytest.mark.parametrize("dropout", [Dropout(0.0), Halve()])
def test_it_is_torch_s_transformer_with_dropout_in_the_two_places_only(attach: Attach, dropout: nn.Module) -> None:
    ours = transformer(attach, d_model=12, num_heads=4, d_k=3, d_v=3)
    for module in ours.modules():
        for name, child in module.named_children():
            if isinstance(child, Dropout):
                setattr(module, name, dropout)
    theirs, source, target = reference(ours, dropout)
    source_padding, target_padding = (
        torch.arange(x.size(1)) >= torch.tensor([len(s) for s in sentences]).unsqueeze(1)
        for x, sentences in ((source, SOURCES), (target, TARGETS))
    )
    later = torch.ones(target.size(1), target.size(1), dtype=torch.bool).triu(1)
    hidden = theirs.train()(
        source,
        target,
        tgt_mask=later,
        src_key_padding_mask=source_padding,
        tgt_key_padding_mask=target_padding,
        memory_key_padding_mask=source_padding,
    )
    torch.testing.assert_close(ours.train()(batch()), hidden[~target_padding] @ ours.embedding.weight.T)


@MODELS
def test_sentences_in_one_batch_equal_sentences_alone(made: Made) -> None:
    model = made()
    together = per_sentence(model(batch()))
    for source, target, expected in zip(SOURCES, TARGETS, together, strict=True):
        torch.testing.assert_close(model(batch([source], [target])), expected)
    # Control: another source sentence gives other logits
    assert not torch.allclose(model(batch([SOURCES[1]], [TARGETS[0]])), together[0])


@MODELS
def test_a_later_target_token_never_changes_an_earlier_logit(made: Made) -> None:
    model = made()
    for name, parameter in model.named_parameters():
        # Without residual connections what is far away is soon below rounding
        parameter.data.mul_(2 if parameter.dim() == 2 and "embedding" not in name else 1)
    model_properties.assert_a_later_target_token_changes_no_earlier_logit(model)


@MODELS
def test_every_source_token_changes_every_logit_of_its_sentence_and_no_other(made: Made) -> None:
    model_properties.assert_a_source_token_changes_every_logit_of_its_sentence_alone(made())


@WAYS
def test_the_gradient_of_every_parameter_equals_finite_differences(attach: Attach) -> None:
    sizes = {"num_layers": 1, "d_model": 4, "d_ff": 5, "num_heads": 2, "d_k": 2, "d_v": 3}
    model = transformer(attach, **sizes, vocab_size=15, positions="learned")
    model_properties.assert_the_gradient_is_that_of_finite_differences(model)


@WAYS
def test_source_target_and_softmax_share_one_embedding(attach: Attach) -> None:
    model, given = transformer(attach), batch()
    assert [tuple(p.shape) for p in model.parameters()].count((VOCAB, 14)) == 1
    # Token 20 is in no sentence, 11 only in the first source, 12 only in the second target
    for token, sentences in ((20, set()), (11, {0}), (12, {1})):
        before = model(given)
        with torch.no_grad():
            model.embedding.weight[token] += 1
        moved = model(given) != before
        assert moved[:, token].all()
        moved[:, token] = False
        assert {i for i, logits in enumerate(per_sentence(moved)) if logits.any()} == sentences


def test_embeddings_start_with_the_standard_deviation_that_sqrt_d_model_undoes() -> None:
    model = Transformer(**{**SIZES, "d_model": 64}, positions="learned", max_length=101, vocab_size=211)
    for weight in (model.embedding.weight, model.source_positions.weight, model.target_positions.weight):
        assert weight.detach().std().item() == pytest.approx(1 / 8, rel=0.03)
        assert abs(weight.detach().mean().item()) < 0.01
    tokens = model.embed(torch.arange(211))
    assert tokens.detach().std().item() == pytest.approx(1, rel=0.03)


def test_the_same_seed_gives_the_same_model() -> None:
    first, second, third = (
        (torch.manual_seed(seed), Transformer(**SIZES, positions="learned", max_length=7, vocab_size=VOCAB))[1]
        for seed in (5, 5, 6)
    )
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.embedding.weight, third.embedding.weight)


@WAYS
def test_learned_positions_replace_the_sinusoids_on_both_sides(attach: Attach) -> None:
    model, given = transformer(attach, positions="learned"), batch()
    before = model(given)
    for positions in (model.source_positions, model.target_positions):
        with torch.no_grad():
            positions.weight[0] += 1
        after = model(given)
        assert not (after == before).any()
        before = after
    with torch.no_grad():
        model.source_positions.weight.zero_()
        model.target_positions.weight.zero_()
    shuffled = model(batch([sentence[::-1] for sentence in SOURCES]))
    torch.testing.assert_close(shuffled, model(given))  # without positions the order of the source is lost


@WAYS
def test_dropout_is_a_function_of_seed_and_update_while_training_and_off_in_evaluation(attach: Attach) -> None:
    model, given = transformer(attach), batch()
    assert torch.equal(model(given), model(given, (1, 2)))
    model.train()
    one, again, *others = (model(given, randomness) for randomness in ((1, 2), (1, 2), (1, 3), (2, 2)))
    assert torch.equal(one, again)
    assert not any(torch.equal(one, other) for other in others)
    with pytest.raises(AssertionError, match="seed and update"):
        model(given)


@WAYS
def test_every_dropout_of_a_side_has_bits_of_its_own(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Any]()
    forward = Dropout.forward

    def watched(self: Dropout, x: Tensor, randomness: Any) -> Tensor:
        seen.append((randomness.tokens[self.number, :2].tolist(), randomness.features[self.number, 0, :2].tolist()))
        return forward(self, x, randomness)

    monkeypatch.setattr(Dropout, "forward", watched)
    transformer(attach).train()(batch(), (1, 2))
    # Embedding and two sub-layers, then embedding and three, in two layers each
    assert len(seen) == len({str(bits) for bits in seen}) == 1 + 2 * 2 + 1 + 2 * 3


@WAYS
def test_training_and_evaluation_agree_without_dropout(attach: Attach) -> None:
    model, given = transformer(attach, dropout=0.0), batch()
    assert torch.equal(copy.deepcopy(model).train()(given), model(given))


@pytest.mark.parametrize(
    ("changes", "released", "paper"),
    [
        ({}, 65.13, 65),
        ({"num_heads": 1, "d_k": 512, "d_v": 512}, 65.13, 65),
        ({"d_k": 16}, 58.03, 58),
        ({"d_k": 32}, 60.40, 60),
        ({"num_layers": 2}, 35.70, 36),
        ({"num_layers": 4}, 50.41, 50),
        ({"num_layers": 8}, 79.84, 80),
        ({"d_model": 256, "d_k": 32, "d_v": 32}, 27.86, 28),
        ({"d_model": 1024, "d_k": 128, "d_v": 128}, 167.98, 168),
        ({"d_ff": 1024}, 52.53, 53),
        ({"d_ff": 4096}, 90.32, 90),
    ],
)
def test_the_rows_of_table_3_have_the_paper_s_millions_of_parameters(
    changes: dict[str, int], released: float, paper: int
) -> None:
    base = {"num_layers": 6, "d_model": 512, "d_ff": 2048, "num_heads": 8, "d_k": 64, "d_v": 64, "dropout": 0.1}
    with torch.device("meta"):
        model = Transformer(**{**base, **changes}, positions="sinusoids", max_length=256, vocab_size=40960)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert round(count / 1e6) == paper
    # The released code has 32 more vectors, for the "target space", which the paper does not have
    assert round((count + 32 * model.d_model) / 1e6, 2) == released
