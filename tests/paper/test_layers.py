"""Products against torch's, initial weights, and positional encodings against numbers by hand."""

import math
import threading

import pytest
import torch
import torch.nn.functional as F

from aiayn.paper.layers import LearnedPositions, Linear, Sinusoids, product, sinusoids


def test_sinusoids_by_hand() -> None:
    table = sinusoids(3, 4)  # wavelengths of 2 pi and 100 * 2 pi
    expected = [[math.sin(p), math.cos(p), math.sin(p / 100), math.cos(p / 100)] for p in range(3)]
    torch.testing.assert_close(table, torch.tensor(expected, dtype=torch.float64))


def test_sinusoids_grow_and_are_no_part_of_a_checkpoint() -> None:
    positions = Sinusoids(6)
    for length in (3, 2, 11):
        positions.extend(length)
        torch.testing.assert_close(positions(torch.arange(length)).double(), sinusoids(length, 6))
    assert not positions.state_dict()
    assert len(positions.table) == 16  # a power of two: a search extends the table rarely


def test_two_threads_that_grow_the_table_keep_the_longer_one() -> None:
    positions = Sinusoids(6)
    shorter, longer, make = threading.Thread(target=positions.extend, args=(5,)), threading.Event(), positions.make

    def slow(length: int, d_model: int) -> torch.Tensor:
        if length == 8:  # the shorter, until the longer is there
            longer.wait(0.2)
        return make(length, d_model)

    positions.make = slow
    shorter.start()
    positions.extend(17)
    longer.set()
    shorter.join()
    assert len(positions.table) == 32


def test_learned_positions_beyond_the_table_share_its_last_row() -> None:
    positions = LearnedPositions(5, 3)
    rows = positions(torch.tensor([0, 4, 5, 97]))
    assert torch.equal(rows, positions.weight[[0, 4, 4, 4]])


@pytest.mark.parametrize("shape", [(128,), (67,), (3, 5)], ids=str)
def test_a_product_and_its_gradients_are_torch_s(shape: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(3)
    layer = Linear(17, 31)
    torch.nn.init.normal_(layer.bias, generator=random)
    x = torch.randn(*shape, 17, generator=random, requires_grad=True)
    gradient = torch.randn(*shape, 31, generator=random)
    inputs = (x, layer.weight, layer.bias)
    ours, theirs = product(*inputs), F.linear(*inputs)
    torch.testing.assert_close(ours, theirs)
    gradients = (torch.autograd.grad(y, inputs, gradient) for y in (ours, theirs))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(product(x, layer.weight, layer.bias + 1e-3), theirs)  # control
    with torch.autocast("cpu", torch.bfloat16):
        assert product(*inputs).dtype == torch.bfloat16
