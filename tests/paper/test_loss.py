"""The loss against its definition written out, torch's cross entropy and numbers by hand."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from aiayn.paper import loss as module
from aiayn.paper.loss import label_smoothed_cross_entropy

T, D, V = 263, 7, 31  # more tokens than one chunk of logits has rows, not a multiple of it


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.CHUNK_ELEMENTS, "cpu", 128 * V)


def example(tokens: int = T, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(5)
    hidden = torch.randn(tokens, D, generator=random, dtype=dtype, requires_grad=True)
    embedding = torch.randn(V, D, generator=random, dtype=dtype, requires_grad=True)
    return hidden, embedding, torch.randint(V, (tokens,), generator=random)


def reference(logits: Tensor, target: Tensor, label_smoothing: float) -> Tensor:
    """Cross entropy with the distribution of section 5.4 written out."""
    expected = torch.full_like(logits, label_smoothing / (logits.size(1) - 1))
    expected.scatter_(1, target.unsqueeze(1), 1 - label_smoothing)
    return -(expected * logits.log_softmax(1)).sum()


def test_loss_nats_and_gradient_by_hand() -> None:
    # Probabilities 1/4, 1/8, 1/2, 1/8
    hidden, embedding = torch.ones(1, 1), torch.tensor([2.0, 1.0, 4.0, 1.0]).log().unsqueeze(1).requires_grad_()
    loss, nats = label_smoothed_cross_entropy(hidden, embedding, torch.tensor([2]), 0.3)
    assert float(nats) == pytest.approx(math.log(2))
    # 0.7 * ln 2 on the target, 0.1 * (ln 4 + ln 8 + ln 8) on the three others
    assert loss.item() == pytest.approx((0.7 + 0.1 * 8) * math.log(2))
    loss.backward()
    # What the model says minus what is expected
    expected = torch.tensor([0.25 - 0.1, 0.125 - 0.1, 0.5 - 0.7, 0.125 - 0.1])
    torch.testing.assert_close(embedding.grad, expected.unsqueeze(1))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("tokens", [1, 256, T])
def test_loss_and_gradients_equal_the_definition(tokens: int, label_smoothing: float) -> None:
    hidden, embedding, target = example(tokens)
    loss, nats = label_smoothed_cross_entropy(hidden, embedding, target, label_smoothing)
    expected = reference(hidden @ embedding.T, target, label_smoothing)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(nats, F.cross_entropy(hidden @ embedding.T, target, reduction="sum"))
    torch.testing.assert_close(*(torch.autograd.grad(x / 3, (hidden, embedding)) for x in (loss, expected)))
    with torch.no_grad():
        assert label_smoothed_cross_entropy(hidden, embedding, target, label_smoothing) == (loss, nats)


def test_huge_logits_stay_finite_and_a_nan_stays_one() -> None:
    hidden, embedding, target = example(dtype=torch.float32)
    for scale in (1e4, -1e4):
        loss, nats = label_smoothed_cross_entropy(hidden * scale, embedding, target, 0.1)
        assert all(bool(x.isfinite().all()) for x in (loss, nats, *torch.autograd.grad(loss, (hidden, embedding))))
    with torch.no_grad():
        hidden[-1, 0] = torch.nan
    assert all(bool(x.isnan()) for x in label_smoothed_cross_entropy(hidden, embedding, target, 0.1))


def test_nats_are_summed_in_64_bits() -> None:
    embedding, target = torch.linspace(-2, 2, V).unsqueeze(1), torch.arange(24_611) % V
    _, nats = label_smoothed_cross_entropy(torch.ones(24_611, 1), embedding, target, 0.1)
    of_each = F.cross_entropy(embedding.T.expand(24_611, V), target, reduction="none")
    exact, rounded = float(of_each.double().sum()), float(of_each.sum())
    assert abs(float(nats) - exact) < 1e-9 * exact < abs(rounded - exact)


def test_in_bfloat16_products_alone_are_rounded() -> None:
    *inputs, target = example(dtype=torch.float32)
    expected, _ = label_smoothed_cross_entropy(*inputs, target, 0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, nats = label_smoothed_cross_entropy(*inputs, target, 0.1)
    assert (loss.dtype, nats.dtype, nats.requires_grad) == (torch.float32, torch.float64, False)
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)
    tokens = 24_611  # its inverse is rounded by a thousandth in bfloat16
    whole, scaled = (torch.autograd.grad(x, inputs, retain_graph=True) for x in (loss, loss / tokens))
    for ours, part, theirs in zip(whole, scaled, torch.autograd.grad(expected, inputs), strict=True):
        assert ours.dtype == torch.float32
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-2
        torch.testing.assert_close(part * tokens, ours)


def test_compiled_it_is_one_graph_for_whole_chunks_and_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(len(inputs))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(module.nats_and_gradient, backend=count, fullgraph=True)
    monkeypatch.setattr(module, "_compiled", lambda: compiled)
    for tokens in (T, 2 * T, 3 * T + 1):
        arguments = (*example(tokens), 0.1)
        results = [label_smoothed_cross_entropy(*arguments, compiled=compiled) for compiled in (False, True)]
        assert len({float(nats) for _, nats in results}) == 1
        ours, theirs = (torch.autograd.grad(found, arguments[:2]) for found, _ in results)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert len(graphs) == 2
    # With deterministic=true nothing is compiled: a resumed run sees other lengths first
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(module, "_compiled", None)
    label_smoothed_cross_entropy(*arguments, compiled=True)
    torch._dynamo.reset()
