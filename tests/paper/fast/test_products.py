"""The layer and its products against torch's, in every shape that takes a way of its own."""

import pytest
import torch
import torch.nn.functional as F

from aiayn.paper.attention import Linear
from aiayn.paper.fast import products
from aiayn.paper.fast.products import fixed_product, product, static_rows, transposed_product


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(64,), (128,), (67,), (3, 5)], ids=str)
@pytest.mark.parametrize("outputs", [3, 31])
def test_the_layer_and_its_gradients_are_torch_s(shape: tuple[int, ...], outputs: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(3)
    layer = Linear(17, outputs).to(dtype)
    torch.nn.init.normal_(layer.bias, generator=random)
    x = torch.randn(*shape, 17, generator=random, dtype=dtype, requires_grad=True)
    gradient = torch.randn(*shape, outputs, generator=random, dtype=dtype)
    inputs = (x, layer.weight, layer.bias)
    ours, theirs = product(*inputs), F.linear(*inputs)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(y, inputs, gradient) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(product(*inputs), theirs)
    # Control: another bias is noticed
    assert not torch.allclose(product(x, layer.weight, layer.bias + 1e-3), theirs)


@pytest.mark.parametrize("rows", [64, 67])
@pytest.mark.parametrize("widths", [(3, 29), (29, 3), (5, 5)])
def test_a_transposed_product_is_torch_s(rows: int, widths: tuple[int, int]) -> None:
    x, y = (torch.randn(rows, width) for width in widths)
    torch.testing.assert_close(transposed_product(x, y), x.t() @ y, rtol=1e-5, atol=1e-5)


def test_autocast_reaches_the_products() -> None:
    layer, x = Linear(17, 3), torch.randn(64, 17)
    with torch.autocast("cpu", torch.bfloat16):
        assert product(x, layer.weight, layer.bias).dtype == torch.bfloat16
    assert product(x, layer.weight, layer.bias).dtype == torch.float32


def test_many_numbers_of_tokens_share_few_numbers_of_rows() -> None:
    assert [static_rows(n) for n in (1, 3, 33, 64, 65, 1023, 1025, 2049)] == [1, 4, 64, 64, 128, 1024, 1152, 2304]
    rows = {tokens: static_rows(tokens) for tokens in range(1, 30001)}
    assert all(
        tokens <= some <= tokens + max(63, tokens / 8) and (some <= 64 or some % 64 == 0)
        for tokens, some in rows.items()
    )
    assert len(set(rows.values())) < 80


@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 64, 131])
def test_a_fixed_product_is_the_product_for_any_number_of_rows(
    rows: int, onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "ONEDNN", onednn and products.ONEDNN)
    x, weight, bias = torch.randn(rows, 29), torch.randn(37, 29), torch.randn(37)
    ours = fixed_product(weight, bias)
    torch.testing.assert_close(ours(x), F.linear(x, weight, bias))
    if products.ONEDNN:  # control: the weight is a copy laid out anew, and later changes are not seen
        before = ours(x)
        weight += 1
        assert torch.equal(ours(x), before)
