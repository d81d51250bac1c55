"""The Transformer against torch.nn.Transformer, itself a token at a time, finite differences, the paper's sizes."""

import copy
import dataclasses
import math
import random
from collections.abc import Callable
from itertools import accumulate, chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel import stand_in
from torch import Tensor, nn

import aiayn.attention
from aiayn import transformer as transformer_module
from aiayn.batching import Batch
from aiayn.dropout import Dropout
from aiayn.loss import label_smoothed_cross_entropy
from aiayn.transformer import LearnedPositions, Sinusoids, Transformer, sinusoids

BOS, EOS = 2, 3
VOCAB = 23
SOURCES = [[5, 7, 11, EOS], [13, EOS], [4, 4, 6, 5, 9, EOS]]
TARGETS = [[8, EOS], [10, 12, 13, 4, EOS], [7, 6, EOS]]
SIZES = {"num_layers": 2, "d_model": 14, "d_ff": 19, "num_heads": 3, "d_k": 5, "d_v": 7, "dropout": 0.1}


def transformer(**changes: float) -> Transformer:
    """A small float64 model in evaluation mode, no parameter of which is zero or one throughout."""
    torch.manual_seed(17)
    model = Transformer(**{**SIZES, "learned_positions": False, "max_length": 7, "vocab_size": VOCAB, **changes})
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=0.5)
    return model.double().eval()


def pack(sentences: list[list[int]]) -> tuple[Tensor, Tensor]:
    return torch.tensor([*chain(*sentences)]), torch.tensor([0, *accumulate(map(len, sentences))])


def batch(sources: list[list[int]] = SOURCES, targets: list[list[int]] = TARGETS) -> Batch:
    (source, source_offsets), (target, target_offsets) = pack(sources), pack(targets)
    target_input, _ = pack([[BOS, *target[:-1]] for target in targets])
    return Batch(source, target, target_input, source_offsets, target_offsets)


def per_sentence(logits: Tensor) -> tuple[Tensor, ...]:
    return logits.split([len(target) for target in TARGETS])


class Halve(Dropout):
    """Stands in for dropout, so that where it acts shows in the result."""

    def __init__(self) -> None:
        super().__init__(0.0)

    def forward(self, x: Tensor, bits: Any = None) -> Tensor:
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


@pytest.mark.parametrize("dropout", [Dropout(0.0), Halve()])
def test_it_is_torch_s_transformer_with_dropout_in_the_two_places_only(dropout: nn.Module) -> None:
    ours = transformer(d_model=12, num_heads=4, d_k=3, d_v=3)
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


def test_sentences_in_one_batch_equal_sentences_alone() -> None:
    model = transformer()
    together = per_sentence(model(batch()))
    for source, target, expected in zip(SOURCES, TARGETS, together, strict=True):
        torch.testing.assert_close(model(batch([source], [target])), expected)
    # Control: another source sentence gives other logits
    assert not torch.allclose(model(batch([SOURCES[1]], [TARGETS[0]])), together[0])


def test_a_later_target_token_never_changes_an_earlier_logit() -> None:
    model, given = transformer(), batch()
    logits = model(given)
    for changed in range(len(given.target)):
        target_input = given.target_input.clone()
        target_input[changed] = 14
        other = model(Batch(given.source, given.target, target_input, given.source_offsets, given.target_offsets))
        different = (logits != other).any(1).nonzero().squeeze(1).tolist()
        end = next(int(end) for end in given.target_offsets if end > changed)
        assert different == list(range(changed, end))


def test_every_source_token_changes_every_logit_of_its_sentence_and_no_other() -> None:
    model, given = transformer(), batch()
    logits = model(given)
    for changed in range(len(given.source)):
        source = given.source.clone()
        source[changed] = 14
        other = model(Batch(source, given.target, given.target_input, given.source_offsets, given.target_offsets))
        sentence = int(torch.searchsorted(given.source_offsets, changed, right=True)) - 1
        expected = torch.zeros(len(logits), dtype=torch.bool)
        expected[given.target_offsets[sentence] : given.target_offsets[sentence + 1]] = True
        assert torch.equal((logits != other).any(1), expected)


def test_the_gradient_of_every_parameter_equals_finite_differences() -> None:
    sizes = {"num_layers": 1, "d_model": 4, "d_ff": 5, "num_heads": 2, "d_k": 2, "d_v": 3}
    model = transformer(**sizes, vocab_size=15, learned_positions=True)
    names, parameters = zip(*_Loss(model).named_parameters(), strict=True)

    def loss(*values: Tensor) -> Tensor:
        return torch.func.functional_call(_Loss(model), dict(zip(names, values, strict=True)), (batch(),))

    assert torch.autograd.gradcheck(loss, parameters, fast_mode=True)


class _Loss(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, given: Batch) -> Tensor:
        embedding = self.model.embedding.weight
        return label_smoothed_cross_entropy(self.model.hidden(given), embedding, given.target, 0.1)[0]


def test_the_loss_of_the_hidden_states_is_the_loss_of_the_logits() -> None:
    model, given = transformer(), batch()
    _, nats = label_smoothed_cross_entropy(model.hidden(given), model.embedding.weight, given.target, 0.1)
    torch.testing.assert_close(nats, F.cross_entropy(model(given), given.target, reduction="sum"))


def test_source_target_and_softmax_share_one_embedding() -> None:
    model, given = transformer(), batch()
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
    model = Transformer(**{**SIZES, "d_model": 64}, learned_positions=True, max_length=101, vocab_size=211)
    for weight in (model.embedding.weight, model.source_positions.weight, model.target_positions.weight):
        assert weight.detach().std().item() == pytest.approx(1 / 8, rel=0.03)
        assert abs(weight.detach().mean().item()) < 0.01
    tokens = model.eval()._embed(torch.arange(211), torch.zeros(64))
    assert tokens.detach().std().item() == pytest.approx(1, rel=0.03)


def test_the_feed_forward_network_starts_glorot_uniform_with_biases_of_zero() -> None:
    model = Transformer(**{**SIZES, "d_model": 46, "d_ff": 97}, learned_positions=False, max_length=7, vocab_size=VOCAB)
    for layer in (*model.encoder, *model.decoder):
        for linear in (layer.feed_forward[0], layer.feed_forward[2]):
            assert linear.weight.detach().abs().max().item() == pytest.approx(math.sqrt(6 / (46 + 97)), rel=0.01)
            assert not linear.bias.any()


def test_the_same_seed_gives_the_same_model() -> None:
    first, second, third = (
        (torch.manual_seed(seed), Transformer(**SIZES, learned_positions=True, max_length=7, vocab_size=VOCAB))[1]
        for seed in (5, 5, 6)
    )
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.embedding.weight, third.embedding.weight)


def test_sinusoids_by_hand() -> None:
    table = sinusoids(3, 4)  # wavelengths of 2 pi and 100 * 2 pi
    expected = [[math.sin(p), math.cos(p), math.sin(p / 100), math.cos(p / 100)] for p in range(3)]
    torch.testing.assert_close(table, torch.tensor(expected, dtype=torch.float64))
    assert table[0].tolist() == [0, 1, 0, 1]


def test_sinusoids_grow_with_the_sentences_and_are_no_part_of_a_checkpoint() -> None:
    positions = Sinusoids(6)
    for length in (3, 2, 11):
        positions.reach(length)
        torch.testing.assert_close(positions(torch.arange(length)).double(), sinusoids(length, 6))
    assert not positions.state_dict()
    assert len(positions.table) == 11


def test_an_odd_d_model_has_no_sinusoids() -> None:
    with pytest.raises(ValueError, match=r"model\.d_model is 15.*make it even"):
        transformer(d_model=15)
    transformer(d_model=15, learned_positions=True)


def test_learned_positions_beyond_the_table_share_its_last_row() -> None:
    positions = LearnedPositions(5, 3)
    rows = positions(torch.tensor([0, 4, 5, 97]))
    assert torch.equal(rows, positions.weight[[0, 4, 4, 4]])


def test_learned_positions_replace_the_sinusoids_on_both_sides() -> None:
    model, given = transformer(learned_positions=True), batch()
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


def test_dropout_is_a_function_of_seed_and_update_while_training_and_off_in_evaluation() -> None:
    model, given = transformer(), batch()
    assert torch.equal(model(given), model(given, (1, 2)))
    model.train()
    one, again, *others = (model(given, randomness) for randomness in ((1, 2), (1, 2), (1, 3), (2, 2)))
    assert torch.equal(one, again)
    assert not any(torch.equal(one, other) for other in others)
    with pytest.raises(AssertionError, match="seed and update"):
        model(given)


def test_every_dropout_of_a_side_has_bits_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Any]()
    forward = Dropout.forward

    def watched(self: Dropout, x: Tensor, bits: Any) -> Tensor:
        seen.append((bits.tokens[:2].flatten().tolist(), bits.features[0, :2].tolist()))
        return forward(self, x, bits)

    monkeypatch.setattr(Dropout, "forward", watched)
    transformer().train()(batch(), (1, 2))
    # Embedding and two sub-layers, then embedding and three, in two layers each
    assert len(seen) == len({str(bits) for bits in seen}) == 1 + 2 * 2 + 1 + 2 * 3


def test_rows_after_the_last_token_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    given = dataclasses.replace(batch(), first_source=5, first_target=7)
    found = []
    for more in (0, 0, 19):
        model = transformer().train()
        rows = transformer_module.static_rows
        with monkeypatch.context() as patch:
            patch.setattr(transformer_module, "static_rows", lambda tokens, rows=rows, more=more: rows(tokens) + more)
            logits = model(given, (1, 2))
        logits.square().sum().backward()
        found.append((logits, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    for one, other in zip(found[0], found[2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    elsewhere = dataclasses.replace(given, first_target=8)
    assert not torch.allclose(found[0][0], transformer().train()(elsewhere, (1, 2)))  # control


def test_training_and_evaluation_agree_without_dropout() -> None:
    model, given = transformer(dropout=0.0), batch()
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
        model = Transformer(**{**base, **changes}, learned_positions=False, max_length=256, vocab_size=40960)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert round(count / 1e6) == paper
    # The released code has 32 more vectors, for the "target space", which the paper does not have
    assert round((count + 32 * model.d_model) / 1e6, 2) == released


def test_in_bfloat16_loss_and_gradients_stay_near_those_in_float32() -> None:
    torch.manual_seed(3)
    sizes = {**SIZES, "d_model": 122, "d_ff": 509, "d_k": 31, "d_v": 37}
    model = Transformer(**sizes, learned_positions=False, max_length=13, vocab_size=211).train()
    draw = random.Random(7)  # enough tokens for their rounding errors to cancel
    sources = [[*(draw.randint(4, 210) for _ in range(draw.randint(1, 12))), EOS] for _ in range(97)]
    given = batch(sources, [[*(token * 7 % 197 + 4 for token in source[:-1]), EOS] for source in sources])

    def measured(reduced: bool) -> tuple[Tensor, Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=reduced):
            hidden = model.hidden(given, (5, 0))
            loss, _ = label_smoothed_cross_entropy(hidden, model.embedding.weight, given.target, 0.1)
        loss.backward()
        return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    (exact, gradient), (near, near_gradient) = measured(False), measured(True)
    assert 0 < abs(near - exact) / exact < 1e-2
    assert 0 < (near_gradient - gradient).norm() / gradient.norm() < 2e-2


def test_both_stacks_compile_once_for_batches_of_one_shape_and_change_no_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With torch's own tracing and the stand-in for the kernel; what a GPU does with the graph, only a GPU can show
    stand_in(monkeypatch, torch.float64)
    batches = [batch(sources, TARGETS[: len(sources)]) for sources in (SOURCES, SOURCES[:2], SOURCES[::-1])]
    model = transformer()
    in_training = [model.train()(given, (5, update)) for update, given in enumerate(batches)]
    expected = [model.eval()(given) for given in batches]
    graphs = list[Any]()

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    model.fuse(32, backend=count, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(model(batches[0]), expected[0])
    assert graphs == [], "to evaluate a model is not worth the compiler's time"
    for given, theirs in zip(batches, expected, strict=True):
        torch.testing.assert_close(model(given), theirs)
    assert len(graphs) == 1
    model.train()
    for update, (given, theirs) in enumerate(zip(batches, in_training, strict=True)):
        torch.testing.assert_close(model(given, (5, update)), theirs)
    assert len(graphs) == 2, "one with dropout, whatever the update"
    # Control: another number of rows is another graph
    model.fused_rows = 64
    torch.testing.assert_close(model(batches[0], (5, 0)), in_training[0])
    assert len(graphs) == 3


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # asked by torch's compiler
@pytest.mark.parametrize("padded", ["_padded_attention", "_padded_attention_of_torch"])
def test_where_the_kernel_does_not_suit_all_but_attention_compiles_once(
    padded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row A with one head of 512: sentences of other lengths are no reason to compile again, nor are more layers."""
    monkeypatch.setattr(aiayn.attention, "_padded_attention", getattr(aiayn.attention, padded))
    batches = [batch(sources, TARGETS[: len(sources)]) for sources in (SOURCES, SOURCES[1:2], SOURCES[:2])]
    graphs = list[Any]()

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    numbers = []
    for num_layers in (2, 5):
        model = transformer(num_layers=num_layers)
        expected = [model(given) for given in batches]
        torch._dynamo.reset()
        graphs.clear()
        model.fuse(32, backend=count)
        for given, theirs in zip(batches, expected, strict=True):
            torch.testing.assert_close(model(given), theirs)
            numbers.append(len(graphs))
    assert len(set(numbers)) == 1
    # Control: another number of rows is other graphs
    model.fused_rows = 64
    torch.testing.assert_close(model(batches[0]), expected[0])
    assert len(graphs) > numbers[0]
    torch._dynamo.reset()
