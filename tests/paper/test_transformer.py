"""The Transformer against torch.nn.Transformer, itself a token at a time, and the paper's sizes."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from kernel import stand_in
from models import BOS, EOS, SIZES, SOURCES, TARGETS, batch, transformer
from torch import Tensor, nn

from aiayn.bench.baselines import torch_state
from aiayn.paper import layers
from aiayn.paper.dropout import Dropout
from aiayn.paper.layers import Sinusoids, sinusoids
from aiayn.paper.loss import label_smoothed_cross_entropy
from aiayn.paper.transformer import Transformer


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
    theirs.load_state_dict(torch_state(ours))
    sides, targets = [], [[BOS, *target[:-1]] for target in TARGETS]
    for sentences, learned in ((SOURCES, ours.source_positions), (targets, ours.target_positions)):
        tokens = nn.utils.rnn.pad_sequence([torch.tensor(sentence) for sentence in sentences], batch_first=True)
        length = tokens.size(1)
        positions = sinusoids(length, d_model) if isinstance(learned, Sinusoids) else learned.weight[:length]
        sides.append(dropout(ours.embedding(tokens) * math.sqrt(d_model) + positions))
    return theirs, *sides


@pytest.mark.parametrize("positions", ["sinusoids", "learned"])
@pytest.mark.parametrize("dropout", [Dropout(0.0), Halve()])
def test_it_is_torch_s_transformer_with_dropout_in_two_places(dropout: nn.Module, positions: str) -> None:
    ours = transformer(d_model=12, num_heads=4, d_k=3, d_v=3, positions=positions)
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
    padding = {"src_key_padding_mask": source_padding, "memory_key_padding_mask": source_padding}
    hidden = theirs.train()(source, target, tgt_mask=later, tgt_key_padding_mask=target_padding, **padding)
    torch.testing.assert_close(ours.train()(batch()), hidden[~target_padding] @ ours.embedding.weight.T)


def test_embeddings_start_with_unit_variance_times_the_root() -> None:
    model = Transformer(**{**SIZES, "d_model": 64}, positions="learned", max_length=101, vocab_size=211)
    for weight in (model.embedding.weight, model.source_positions.weight, model.target_positions.weight):
        assert weight.detach().std().item() == pytest.approx(1 / 8, rel=0.03)
        assert abs(weight.detach().mean().item()) < 0.01
    assert model.embed(torch.arange(211)).std().item() == pytest.approx(1, rel=0.03)
    assert not torch.equal(model.source_positions.weight, model.target_positions.weight)  # each side has a table


def test_every_dropout_of_a_side_has_bits_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[str]()

    def watched(self: Dropout, x: Tensor, randomness: Any) -> Tensor:
        seen.append(f"{randomness.tokens[self.number, :2]} {randomness.features[self.number, 0, :2]}")
        return x

    monkeypatch.setattr(Dropout, "forward", watched)
    transformer().train()(batch(), (1, 2))
    # Embedding and two sub-layers, then embedding and three, in two layers each
    assert len(seen) == len(set(seen)) == 1 + 2 * 2 + 1 + 2 * 3


def test_rows_after_the_last_token_change_nothing() -> None:
    given, found = dataclasses.replace(batch(), first_source=5, first_target=7), []
    for rows in (0, 19):
        model = transformer().train()
        if rows:
            model.rows, model.compiled_stacks = rows, model.stacks
        logits = model(given, (1, 2))
        gradients = torch.autograd.grad(logits.square().sum(), [*model.parameters()])
        found.append((logits, torch.cat([x.flatten() for x in gradients])))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    elsewhere = dataclasses.replace(given, first_target=8)
    assert not torch.allclose(found[0][0], transformer().train()(elsewhere, (1, 2)))  # control


@pytest.mark.skipif(not layers.ONEDNN, reason="torch without oneDNN")
def test_updates_on_a_cpu_have_few_shapes_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each, oneDNN compiles a kernel: with a shape for each number of tokens an update takes 1.3 times as long."""
    model, shapes, onednn = transformer().float(), set[tuple[torch.Size, torch.Size]](), layers._onednn
    monkeypatch.setattr(layers, "_onednn", lambda x, y, *bias: shapes.add((x.shape, y.shape)) or onednn(x, y, *bias))
    counts = []
    for tokens in (33, 39, 50, 64, 65):  # the last is a row too many: control
        given = batch([tokens * [4]], [tokens * [5]])
        label_smoothed_cross_entropy(model.hidden(given), model.embedding.weight, given.target, 0.1)[0].backward()
        counts.append(len(shapes))
    assert counts[0] == counts[3] < counts[4]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # asked by torch's compiler
@pytest.mark.slow
@pytest.mark.parametrize("kernel", [True, False])
def test_both_stacks_compile_once_and_change_no_result(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's own tracing and the stand-in for the kernel; what a GPU does with the graph, only a GPU can show."""
    if kernel:  # padded attention stays out of the graphs
        stand_in(monkeypatch, torch.float64)
    graphs: list[Any] = []
    torch._dynamo.reset()
    batches = [batch(sources, TARGETS[: len(sources)]) for sources in (SOURCES, SOURCES[1:2], SOURCES[::-1])]
    model = transformer()
    in_training = [model.train()(given, (5, update)) for update, given in enumerate(batches)]
    model.compile_stacks(32, backend=lambda graph, _: graphs.append(graph) or graph.forward, fullgraph=kernel)
    with torch.no_grad():
        model.eval()(batches[0])
    assert graphs == [], "to evaluate a model is not worth the compiler's time"
    numbers = []
    for update, (given, theirs) in enumerate(zip(batches, in_training, strict=True)):
        torch.testing.assert_close(model.train()(given, (5, update)), theirs)
        numbers.append(len(graphs))
    assert len(set(numbers)) == 1, "whatever the update and the lengths of its sentences"
    assert numbers[0] == 1 or not kernel
    # Control: another number of rows is another graph
    model.rows = 64
    torch.testing.assert_close(model(batches[0], (5, 0)), in_training[0])
    assert len(graphs) > numbers[0]
    torch._dynamo.reset()


def test_in_bfloat16_loss_and_gradients_stay_near() -> None:
    torch.manual_seed(3)
    sizes = {**SIZES, "d_model": 122, "d_ff": 509, "d_k": 31, "d_v": 37}
    model = Transformer(**sizes, positions="sinusoids", max_length=13, vocab_size=211).train()
    # Enough tokens for their rounding errors to cancel
    sources = [[*torch.randint(4, 211, (1 + number % 12,)).tolist(), EOS] for number in range(97)]
    given = batch(sources, [[*(token * 7 % 197 + 4 for token in source[:-1]), EOS] for source in sources])
    found = []
    for reduced in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=reduced):
            hidden = model.hidden(given, (5, 0))
            loss, _ = label_smoothed_cross_entropy(hidden, model.embedding.weight, given.target, 0.1)
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        found.append((loss.detach(), torch.cat([x.flatten() for x in gradients])))
    (exact, gradient), (near, near_gradient) = found
    assert 0 < abs(near - exact) / exact < 1e-2
    assert 0 < (near_gradient - gradient).norm() / gradient.norm() < 2e-2
