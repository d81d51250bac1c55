"""The fused loss against the paper's, torch's cross entropy and finite differences."""

import math
import shutil
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from aiayn.paper.fast import cross_entropy as module
from aiayn.paper.fast.cross_entropy import label_smoothed_cross_entropy
from aiayn.paper.fast.process import LARGEST_REUSED
from aiayn.paper.fast.products import STEP

T, D, V = 263, 7, 31  # more tokens than one chunk of logits has rows, not a multiple of it


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


def log_odds(probabilities: list[float]) -> tuple[Tensor, Tensor]:
    """One token's hidden state and an embedding whose logits are these logarithms."""
    return torch.ones(1, 1), torch.tensor(probabilities).log().unsqueeze(1)


def test_loss_and_nats_by_hand() -> None:
    hidden, embedding = log_odds([2.0, 1.0, 4.0, 1.0])  # probabilities 1/4, 1/8, 1/2, 1/8
    loss, nats = label_smoothed_cross_entropy(hidden, embedding, torch.tensor([2]), 0.3)
    assert float(nats) == pytest.approx(math.log(2))
    # 0.7 * ln 2 on the target, 0.1 * (ln 4 + ln 8 + ln 8) on the three others
    assert loss.item() == pytest.approx((0.7 + 0.1 * 8) * math.log(2))


def test_the_gradient_by_hand_is_what_the_model_says_minus_what_is_expected() -> None:
    hidden, embedding = log_odds([2.0, 1.0, 4.0, 1.0])
    embedding.requires_grad_()
    label_smoothed_cross_entropy(hidden, embedding, torch.tensor([2]), 0.3)[0].backward()
    expected = torch.tensor([0.25 - 0.1, 0.125 - 0.1, 0.5 - 0.7, 0.125 - 0.1])
    torch.testing.assert_close(embedding.grad, expected.unsqueeze(1))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.2])
@pytest.mark.parametrize("tokens", [1, 128, 256, T])
def test_loss_and_gradients_equal_the_definition(tokens: int, label_smoothing: float) -> None:
    hidden, embedding, target = example(tokens)
    loss, nats = label_smoothed_cross_entropy(hidden, embedding, target, label_smoothing)
    expected = reference(hidden @ embedding.T, target, label_smoothing)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(nats, F.cross_entropy(hidden @ embedding.T, target, reduction="sum"))
    for ours, theirs in zip(
        torch.autograd.grad(loss / 3, (hidden, embedding)),
        torch.autograd.grad(expected / 3, (hidden, embedding)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_torch_spreads_the_smoothing_over_the_target_too() -> None:
    hidden, embedding, _ = example()
    logits = hidden @ embedding.T
    target = logits.argmax(1)  # of a model that knows something; where it is wrong by chance the two are nearly equal
    loss, _ = label_smoothed_cross_entropy(hidden, embedding, target, 0.1)
    torchs = F.cross_entropy(logits, target, label_smoothing=0.1, reduction="sum")
    assert abs((loss / torchs).item() - 1) > 1e-3
    # The same share for each other token needs more smoothing from torch
    torchs = F.cross_entropy(logits, target, label_smoothing=0.1 * V / (V - 1), reduction="sum")
    torch.testing.assert_close(loss, torchs)


def test_gradients_equal_finite_differences() -> None:
    hidden, embedding, target = example(5)
    inputs = hidden, embedding
    assert torch.autograd.gradcheck(lambda h, e: label_smoothed_cross_entropy(h, e, target, 0.1)[0], inputs)


def test_a_model_that_knows_nothing_has_a_perplexity_of_the_vocabulary() -> None:
    _, nats = label_smoothed_cross_entropy(torch.zeros(T, D), torch.ones(V, D), torch.arange(T) % V, 0.1)
    assert math.exp(float(nats) / T) == pytest.approx(V, rel=1e-6)


def test_smoothing_changes_the_loss_but_not_the_nats() -> None:
    hidden, embedding, target = example()
    results = [label_smoothed_cross_entropy(hidden, embedding, target, smoothing) for smoothing in (0.0, 0.1, 0.2)]
    assert len({float(nats) for _, nats in results}) == 1
    assert len({loss.item() for loss, _ in results}) == 3
    torch.testing.assert_close(results[0][0].detach(), results[0][1])


def test_the_nats_are_float64_without_gradient_and_the_loss_has_the_model_s_type() -> None:
    loss, nats = label_smoothed_cross_entropy(*example(dtype=torch.float32), 0.1)
    assert (nats.dtype, nats.requires_grad) == (torch.float64, False)
    assert (loss.dtype, loss.requires_grad) == (torch.float32, True)


def test_without_gradients_the_sums_are_the_same() -> None:
    arguments = (*example(), 0.1)
    with torch.no_grad():
        loss, nats = label_smoothed_cross_entropy(*arguments)
    assert not loss.requires_grad
    assert [loss.item(), nats.item()] == [x.item() for x in label_smoothed_cross_entropy(*arguments)]


def test_the_loss_of_a_batch_is_the_sum_of_the_losses_of_its_parts() -> None:
    hidden, embedding, target = example()
    whole = torch.stack(label_smoothed_cross_entropy(hidden, embedding, target, 0.1))
    parts = sum(
        torch.stack(label_smoothed_cross_entropy(hidden[part], embedding, target[part], 0.1))
        for part in (slice(0, 61), slice(61, 61 + 149), slice(61 + 149, T))
    )
    torch.testing.assert_close(whole, parts)


@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_huge_logits_stay_finite(scale: float) -> None:
    hidden, embedding, target = example(dtype=torch.float32)
    loss, nats = label_smoothed_cross_entropy(hidden * scale, embedding, target, 0.1)
    gradients = torch.autograd.grad(loss, (hidden, embedding))
    assert all(bool(torch.isfinite(x).all()) for x in (loss, nats, *gradients))


def test_a_nan_in_the_model_is_a_nan_in_the_loss() -> None:
    hidden, embedding, target = example()
    with torch.no_grad():
        hidden[-1, 0] = torch.nan
    assert all(bool(x.isnan()) for x in label_smoothed_cross_entropy(hidden, embedding, target, 0.1))


def test_bfloat16_products_give_nearly_the_same() -> None:
    hidden, embedding, target = example(dtype=torch.float32)
    expected = label_smoothed_cross_entropy(hidden, embedding, target, 0.1)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = label_smoothed_cross_entropy(hidden, embedding, target, 0.1)[0]
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)
    for ours, theirs in zip(
        torch.autograd.grad(loss, (hidden, embedding)), torch.autograd.grad(expected, (hidden, embedding)), strict=True
    ):
        assert ours.dtype == torch.float32
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-2


def test_in_bfloat16_only_products_are_rounded_and_no_gradient_as_a_whole() -> None:
    hidden, embedding, target = example(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = label_smoothed_cross_entropy(hidden, embedding, target, 0.1)
    tokens = 24_611  # its inverse is rounded by a thousandth in bfloat16
    whole = torch.autograd.grad(loss, (hidden, embedding), retain_graph=True)
    for part, sum_of_all in zip(torch.autograd.grad(loss / tokens, (hidden, embedding)), whole, strict=True):
        torch.testing.assert_close(part * tokens, sum_of_all)
        assert not torch.equal(sum_of_all, sum_of_all.bfloat16().float())
    # Control: this is how far off it would be
    assert not torch.allclose(torch.tensor(1 / tokens).bfloat16().float() * tokens, torch.ones(()), rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_few_rows_at_a_time_have_the_bits_of_all_at_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, wide_vocabulary = 131, 2**17 + 3  # 7 rows at a time, fewer the last time
    random = torch.Generator().manual_seed(5)
    hidden = torch.randn(tokens, D, generator=random, requires_grad=True)
    embedding = torch.randn(wide_vocabulary, D, generator=random, requires_grad=True)
    target = torch.randint(wide_vocabulary, (tokens,), generator=random)
    parts: list[list[int]] = []
    results = []

    def counted(logits: Tensor, *rest: object) -> object:
        parts[-1].append(len(logits))
        return all_at_once(logits, *rest)  # type: ignore[arg-type]

    all_at_once = module._of_logits
    for rows in (module._a_few_at_a_time, all_at_once):
        parts.append([])
        monkeypatch.setattr(module, "_of_logits", counted)
        monkeypatch.setattr(module, "_a_few_at_a_time", counted if rows is all_at_once else rows)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss, nats = label_smoothed_cross_entropy(hidden, embedding, target, 0.1)
        results.append((loss, nats, *torch.autograd.grad(loss, (hidden, embedding))))
    assert [sum(part) for part in parts] == [tokens, tokens]
    assert max(parts[0]) == 7 < max(parts[1])
    assert all(torch.equal(a, b) for a, b in zip(results[0][2:], results[1][2:], strict=True))
    torch.testing.assert_close(results[0][:2], results[1][:2])
    with torch.no_grad():  # control: weights that are a little larger have other bits
        embedding *= 1.01
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        other = label_smoothed_cross_entropy(hidden, embedding, target, 0.1)[0]
    assert not torch.equal(torch.autograd.grad(other, hidden)[0], results[1][2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "d_model"), [(37_003, 512), (8_009, 128), (10_007, 1024), (2_003, 24)])
def test_on_a_cpu_no_piece_is_larger_than_memory_that_is_kept(
    dtype: torch.dtype, vocab_size: int, d_model: int
) -> None:
    rows, words = module._chunk(torch.empty(vocab_size, d_model, dtype=dtype, device="cpu"))
    assert rows % STEP == 0  # as oneDNN's products want them
    assert rows * vocab_size * dtype.itemsize <= LARGEST_REUSED
    assert min(words, vocab_size) * d_model * max(dtype.itemsize, 4) <= LARGEST_REUSED


def test_a_gradient_summed_some_words_at_a_time_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (*example(), 0.1)
    gradients = []
    for words in (V, 7):
        monkeypatch.setattr(module, "_chunk", lambda embedding, words=words: (128, words))
        gradients.append(torch.autograd.grad(label_smoothed_cross_entropy(*arguments)[0], arguments[1])[0])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_compiled_it_is_one_graph_for_whole_chunks_and_one_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(len(inputs))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(module._of_logits, backend=count, fullgraph=True)
    monkeypatch.setattr(module, "_fused", lambda: compiled)
    for tokens in (T, 2 * T, 3 * T + 1):
        arguments = (*example(tokens), 0.1)
        results = [label_smoothed_cross_entropy(*arguments, fused=fused) for fused in (False, True)]
        assert len({float(nats) for _, nats in results}) == 1
        ours, theirs = (torch.autograd.grad(found, arguments[:2]) for found, _ in results)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert len(graphs) == 2
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of torch's own compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_really_compiled_it_is_nearly_the_same(dtype: torch.dtype) -> None:
    hidden, embedding, target = example(dtype=torch.float32)
    results = []
    for fused in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            found, nats = label_smoothed_cross_entropy(hidden, embedding, target, 0.1, fused=fused)
        results.append((nats, *torch.autograd.grad(found, (hidden, embedding))))
    for ours, theirs in zip(*results, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-4
