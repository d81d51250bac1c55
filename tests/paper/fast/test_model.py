"""An accelerated Transformer against the paper's own, the loss of its hidden states, filled rows and compilation."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel import stand_in
from models import EOS, SIZES, SOURCES, TARGETS, batch, transformer
from torch import Tensor

from aiayn.paper.fast import model as model_module
from aiayn.paper.fast.cross_entropy import label_smoothed_cross_entropy
from aiayn.paper.fast.model import accelerate, compile_stacks
from aiayn.paper.transformer import Transformer


def test_the_loss_of_the_hidden_states_is_the_loss_of_the_logits() -> None:
    model, given = transformer(), batch()
    _, nats = label_smoothed_cross_entropy(model.hidden(given), model.embedding.weight, given.target, 0.1)
    torch.testing.assert_close(nats, F.cross_entropy(model(given), given.target, reduction="sum"))


def test_rows_after_the_last_token_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    given = dataclasses.replace(batch(), first_source=5, first_target=7)
    found = []
    for more in (0, 0, 19):
        model = transformer().train()
        rows = model_module.static_rows
        with monkeypatch.context() as patch:
            patch.setattr(model_module, "static_rows", lambda tokens, rows=rows, more=more: rows(tokens) + more)
            logits = model(given, (1, 2))
        logits.square().sum().backward()
        found.append((logits, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    for one, other in zip(found[0], found[2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    elsewhere = dataclasses.replace(given, first_target=8)
    assert not torch.allclose(found[0][0], transformer().train()(elsewhere, (1, 2)))  # control


@pytest.mark.slow
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

    compile_stacks(model, 32, backend=count, fullgraph=True)
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
    model.hidden.rows = 64
    torch.testing.assert_close(model(batches[0], (5, 0)), in_training[0])
    assert len(graphs) == 3


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # asked by torch's compiler
@pytest.mark.slow
def test_where_the_kernel_does_not_suit_all_but_attention_compiles_once() -> None:
    """Row A with one head of 512: sentences of other lengths are no reason to compile again, nor are more layers."""
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
        compile_stacks(model, 32, backend=count)
        for given, theirs in zip(batches, expected, strict=True):
            torch.testing.assert_close(model(given), theirs)
            numbers.append(len(graphs))
    assert len(set(numbers)) == 1
    # Control: another number of rows is other graphs
    model.hidden.rows = 64
    torch.testing.assert_close(model(batches[0]), expected[0])
    assert len(graphs) > numbers[0]
    torch._dynamo.reset()


def test_in_bfloat16_loss_and_gradients_stay_near_those_in_float32() -> None:
    torch.manual_seed(3)
    sizes = {**SIZES, "d_model": 122, "d_ff": 509, "d_k": 31, "d_v": 37}
    model = accelerate(Transformer(**sizes, positions="sinusoids", max_length=13, vocab_size=211).train())
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


@pytest.mark.parametrize("changes", [{}, {"positions": "learned"}, {"zero_start": True, "target_space": True}], ids=str)
def test_logits_and_gradients_equal_the_paper_s_own(changes: dict[str, bool]) -> None:
    given, found = batch(), []
    for attach in (lambda model: model, accelerate):
        model = transformer(attach, **changes).train()
        logits = model(given, (3, 5))
        logits.square().sum().backward()
        found.append([logits, *(p.grad for p in model.parameters() if p.grad is not None)])
    for plain, fast in zip(*found, strict=True):
        torch.testing.assert_close(fast, plain)
    # Control: another update has other masks
    assert not torch.allclose(transformer(**changes).train()(given, (3, 6)), found[0][0])
