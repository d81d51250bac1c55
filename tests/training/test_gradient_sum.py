"""Gradients summed over ranks, whatever buckets they are sent in."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from aiayn.training.gradient_sum import sum_gradients


@pytest.mark.parametrize(("bucket_bytes", "sizes"), [(1, [5, 15, 7, 35]), (70, [20, 42]), (10**6, [62])])
def test_gradients_become_their_sums_whatever_the_buckets_hold(bucket_bytes, sizes, monkeypatch):
    """The other rank has the same gradients, three times as large."""
    sent: list[Tensor] = []

    def all_reduce(flat: Tensor, async_op: bool) -> SimpleNamespace:
        sent.append(flat)
        return SimpleNamespace(wait=lambda: flat.mul_(4))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    torch.manual_seed(13)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
    model(torch.ones(2, 3)).sum().backward()
    parameters = [parameter for layer in model for parameter in (layer.bias, layer.weight)]
    expected = [4 * parameter.grad for parameter in parameters]
    parameters[2].grad, expected[2] = None, torch.zeros(7)  # this rank's share of the update had no sentence
    sum_gradients(parameters, bucket_bytes)
    assert [len(flat) for flat in sent] == sizes
    for parameter, total in zip(parameters, expected, strict=True):
        assert torch.equal(parameter.grad, total)
