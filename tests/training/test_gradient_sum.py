"""Gradients summed over ranks."""

import torch
from torch import nn

from aiayn.training.gradient_sum import sum_gradients


def test_gradients_become_their_sums_over_the_ranks(monkeypatch):
    """The other rank has the same gradients, three times as large."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda flat: flat.mul_(4))
    torch.manual_seed(13)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
    model(torch.ones(2, 3)).sum().backward()
    parameters = [parameter for layer in model for parameter in (layer.bias, layer.weight)]
    expected = [4 * parameter.grad for parameter in parameters]
    parameters[2].grad, expected[2] = None, torch.zeros(7)  # this rank's share of the update had no sentence
    sum_gradients(parameters)
    for parameter, total in zip(parameters, expected, strict=True):
        assert torch.equal(parameter.grad, total)
