"""Gradients summed over ranks: what is sent, in which order, and that it is sent while the backward pass goes on."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from aiayn.training.gradient_sum import GradientSum

WIDTHS = (3, 5, 7, 11)


class Chain(nn.Module):
    """Layers in a row, which note when the backward pass has left them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(13)
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(WIDTHS))
        self.events: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x.register_hook(lambda gradient, number=number: self.events.append(f"layer {number}"))
            x = layer(x).tanh()
        return x.sum()


@pytest.fixture
def sent(monkeypatch) -> list[Tensor]:
    """What a rank has sent; the other one has the same."""
    found: list[Tensor] = []

    def all_reduce(tensor: Tensor, async_op: bool = False) -> SimpleNamespace:
        assert async_op
        found.append(tensor.clone())
        return SimpleNamespace(wait=lambda: tensor.mul_(2))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return found


def chain(bucket_bytes: int = 1) -> tuple[Chain, GradientSum]:
    model = Chain()
    return model, GradientSum(model.parameters(), bucket_bytes)


def backward(model: Chain) -> None:
    model(torch.ones(2, WIDTHS[0], requires_grad=True)).backward()


def test_a_layer_is_sent_while_the_last_backward_pass_goes_on(sent, monkeypatch):
    model, total = chain()
    events = model.events
    backward(model)
    assert events == ["layer 2", "layer 1", "layer 0"]
    assert sent == []  # control: another micro-batch follows
    all_reduce = torch.distributed.all_reduce
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *a, **k: events.append("sent") or all_reduce(*a, **k))
    del events[:]
    total.expect()
    backward(model)
    # Each layer's bias and weight are a bucket each here
    assert events.index("sent") < events.index("layer 1")
    total.finish()
    assert events.count("sent") == len(total.buckets) == 6


@pytest.mark.parametrize("bucket_bytes", [1, 150, 10**6])
def test_gradients_become_their_sums_whatever_the_buckets_hold(bucket_bytes, sent):
    alone = Chain()
    backward(alone)
    backward(alone)
    model, total = chain(bucket_bytes)
    for _ in range(2):  # two updates
        model.zero_grad()
        backward(model)
        total.expect()
        backward(model)
        total.finish()
        for one, two in zip(alone.parameters(), model.parameters(), strict=True):
            assert torch.equal(2 * one.grad, two.grad)
    assert len(sent) == 2 * len(total.buckets)
    assert [len(bucket) for bucket in total.buckets] == {1: [1] * 6, 150: [2, 2, 2], 10**6: [6]}[bucket_bytes]


def test_buckets_go_in_order_even_if_a_later_one_is_filled_first(sent):
    model, total = chain()
    total.expect()
    (model.layers[0](torch.ones(2, WIDTHS[0])).sum()).backward()
    assert sent == []  # the first layer's come last
    total.finish()
    assert [len(part) for part in sent] == [p.numel() for p in reversed([*model.parameters()])]
