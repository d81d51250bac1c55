"""The loss against its definition written out, torch's cross entropy, and numbers by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from aiayn.paper.loss import label_smoothed_cross_entropy

T, V = 263, 31


def example(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(T, V, generator=random, dtype=dtype)
    return logits.requires_grad_(), torch.randint(V, (T,), generator=random)


def test_loss_and_nats_by_hand() -> None:
    logits = torch.tensor([[2.0, 1.0, 4.0, 1.0]]).log()  # probabilities 1/4, 1/8, 1/2, 1/8
    loss, nats = label_smoothed_cross_entropy(logits, torch.tensor([2]), 0.3)
    assert float(nats) == pytest.approx(math.log(2))
    # 0.7 * ln 2 on the target, 0.1 * (ln 4 + ln 8 + ln 8) on the three others
    assert loss.item() == pytest.approx((0.7 + 0.1 * 8) * math.log(2))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.2])
def test_loss_and_gradient_equal_the_definition(label_smoothing: float) -> None:
    logits, target = example()
    loss, nats = label_smoothed_cross_entropy(logits, target, label_smoothing)
    expected = torch.full_like(logits, label_smoothing / (V - 1)).scatter_(1, target.unsqueeze(1), 1 - label_smoothing)
    definition = -(expected * logits.log_softmax(1)).sum()
    torch.testing.assert_close(loss, definition)
    torch.testing.assert_close(*(torch.autograd.grad(x, logits)[0] for x in (loss, definition)))
    torch.testing.assert_close(nats, F.cross_entropy(logits, target, reduction="sum").detach())


def test_torch_spreads_the_smoothing_over_the_target_too() -> None:
    logits, _ = example()
    target = logits.argmax(1)  # of a model that knows something; where it is wrong by chance the two are nearly equal
    loss, _ = label_smoothed_cross_entropy(logits, target, 0.1)
    assert abs((loss / F.cross_entropy(logits, target, label_smoothing=0.1, reduction="sum")).item() - 1) > 1e-3


def test_the_nats_are_float64_without_gradient_and_the_loss_is_float32_in_bf16() -> None:
    loss, nats = label_smoothed_cross_entropy(*example(torch.bfloat16), 0.1)
    assert (nats.dtype, nats.requires_grad) == (torch.float64, False)
    assert (loss.dtype, loss.requires_grad) == (torch.float32, True)


def test_a_model_that_knows_nothing_has_a_perplexity_of_the_vocabulary() -> None:
    _, nats = label_smoothed_cross_entropy(torch.zeros(T, V), torch.arange(T) % V, 0.1)
    assert math.exp(float(nats) / T) == pytest.approx(V, rel=1e-6)
