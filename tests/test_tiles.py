"""Attention in tiles against Eq. 1 sentence by sentence: on a GPU where there is one, else by Triton's interpreter."""

from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_transformer import SOURCES, TARGETS, batch, transformer
from torch import Tensor

from aiayn import tiles
from aiayn.batching import Batch

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Sizes = tuple[int, int, int]
LENGTHS, MEMORY_LENGTHS = (1, 3, 33, 70), (2, 64, 31, 37)


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)


def drawn(rows: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=random).to(DEVICE, dtype).requires_grad_()


def given(sizes: Sizes, across: bool, dtype: torch.dtype = torch.float32, lengths: tuple[int, ...] = LENGTHS) -> Any:
    """What is asked of the operator: rows of tokens and, on each side, some that belong to no sentence."""
    num_heads, d_k, d_v = sizes
    if not across:
        return [drawn(sum(lengths) + 37, num_heads * (2 * d_k + d_v), dtype), None, *2 * [offsets(lengths)]]
    queries = drawn(sum(lengths) + 37, num_heads * d_k, dtype)
    keys_values = drawn(sum(MEMORY_LENGTHS) + 3, num_heads * (d_k + d_v), dtype, seed=2)
    return [queries, keys_values, offsets(lengths), offsets(MEMORY_LENGTHS)]


def by_definition(
    queries: Tensor, keys_values: Tensor | None, here: Tensor, there: Tensor, sizes: Sizes, causal: bool
) -> Tensor:
    """The same by torch, in 64 bits, a sentence at a time."""
    parts = [part.double() for part in tiles._parts(queries, keys_values, sizes)]
    found = torch.zeros(len(queries), sizes[0] * sizes[2], dtype=torch.float64, device=DEVICE)
    for (begin, end), (first, last) in zip(pairwise(here.tolist()), pairwise(there.tolist()), strict=True):
        sides = (slice(begin, end), slice(first, last), slice(first, last))
        q, k, v = (
            part[side].unflatten(1, (sizes[0], -1)).transpose(0, 1) for part, side in zip(parts, sides, strict=True)
        )
        found[begin:end] = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(0, 1).flatten(1)
    return found


def results(attend: Callable[..., Tensor], inputs: list[Any], sizes: Sizes, causal: bool) -> list[Tensor]:
    """The output and the gradients."""
    output = attend(*inputs, sizes, causal)
    to_output = drawn(*output.shape, seed=3).detach().to(output.dtype)
    sources = [x for x in inputs[:2] if x is not None]
    return [x.detach().float() for x in (output, *torch.autograd.grad(output, sources, to_output))]


def in_tiles(*arguments: Any) -> Tensor:
    return tiles.attend(*arguments)[0]


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("across", "causal"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("sizes", [(2, 5, 7), (1, 16, 64), pytest.param((1, 64, 16), marks=pytest.mark.slow)], ids=str)
def test_outputs_and_gradients_are_those_of_eq_1_sentence_by_sentence(sizes: Sizes, across: bool, causal: bool) -> None:
    inputs = given(sizes, across)
    found, expected = (results(way, inputs, sizes, causal) for way in (in_tiles, by_definition))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    # What belongs to no sentence is zero, and not just near it
    ends = [sum(LENGTHS), sum(LENGTHS), sum(MEMORY_LENGTHS)]
    assert not any(bool(x[end:].any()) for x, end in zip(found, ends, strict=False))


@pytest.mark.parametrize("across", [False, True])
def test_one_wide_head_is_cut_into_shorter_tiles(across: bool) -> None:
    """Row A with one head, which torch's own kernel cannot hold."""
    sizes, lengths = (1, 512, 512), (17, 1, 3, 2)
    inputs = given(sizes, across, lengths=lengths)
    found, expected = (results(way, inputs, sizes, not across) for way in (in_tiles, by_definition))
    assert distance(found, expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_every_length_is_right(causal: bool) -> None:
    lengths, sizes = tuple(range(1, 71)), (1, 3, 2)
    inputs = given(sizes, False, lengths=lengths)
    found, expected = (results(way, inputs, sizes, causal) for way in (in_tiles, by_definition))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.bfloat16, 1e-2), pytest.param(torch.float16, 1e-3, marks=pytest.mark.slow)],
    ids=str,
)
def test_in_16_bits_it_is_as_near_as_they_allow(
    dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cpu":
        products_of_bf16(monkeypatch)
    sizes = (1, 16, 32)
    for across in (False, True):
        inputs = given(sizes, across, dtype)
        found, expected = (results(way, inputs, sizes, False) for way in (in_tiles, by_definition))
        assert 1e-5 < distance(found, expected) < tolerance


def products_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter holds bf16 as whole numbers with the same bits, and multiplies those."""
    import numpy as np
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    dot = builder.create_dot

    def multiply(a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype == b.dtype == interpreter.tl.bfloat16:
            a, b = (
                interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), interpreter.tl.float32)
                for x in (a, b)
            )
        return dot(a, b, *rest)

    monkeypatch.setattr(builder, "create_dot", multiply)


def test_another_scale_or_border_would_be_noticed() -> None:  # control
    sizes = (1, 5, 7)
    packed, _, *borders = given(sizes, across=False)
    packed = packed.detach()
    expected = [by_definition(packed, None, *borders, sizes, False)]

    def far(packed: Tensor, borders: list[Tensor], causal: bool) -> float:
        return distance([in_tiles(packed, None, *borders, sizes, causal)], expected)

    assert far(packed, borders, False) < 1e-5
    assert far(packed, 2 * [offsets((1, 4, 32, 70))], False) > 1e-2
    assert far(packed, borders, True) > 1e-2
    scaled = packed * torch.tensor([1.01] * 5 + [1.0] * 12, device=DEVICE)  # the queries
    assert far(scaled, borders, False) > 1e-4


@pytest.mark.parametrize("across", [False, True])
def test_torch_finds_no_fault_with_the_operator(across: bool) -> None:
    sizes = (1, 3, 2)
    torch.library.opcheck(tiles.attend, (*given(sizes, across, lengths=(1, 3, 2, 5)), sizes, False))


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_both_stacks_compile_to_one_graph_for_any_number_of_sentences(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "available", lambda device: True)
    model = transformer(num_layers=1, num_heads=1).float().to(DEVICE)
    batches = [batch(sources, TARGETS[: len(sources)]).to(DEVICE) for sources in (SOURCES, SOURCES[:2])]
    parameters = list(model.parameters())

    def measured(given: Batch) -> list[Tensor | None]:
        hidden = model.hidden(given)
        return [hidden, *torch.autograd.grad(hidden.square().sum(), parameters, allow_unused=True)]

    expected = [measured(given) for given in batches]
    graphs = list[Any]()
    compiled = torch._dynamo.lookup_backend(backend)

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return compiled(graph, inputs)  # type: ignore[no-any-return]

    model.in_tiles = True
    model.fuse(32, backend=count, fullgraph=True)
    for given, theirs in zip(batches, expected, strict=True):
        torch.testing.assert_close(measured(given), theirs, rtol=1e-4, atol=1e-4)
    (graph,) = graphs
    names = [str(node.target) for node in graph.graph.nodes]
    assert sum("attend_in_tiles" in name for name in names) == 3
    torch._dynamo.reset()


def test_they_can_be_had_on_a_gpu_since_ampere_where_triton_is(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = tiles.available.__wrapped__
    assert not ask(torch.device("cpu"))
    for capability, expected in (((9, 0), True), ((8, 0), True), ((7, 5), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert ask(torch.device("cuda")) == expected
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(tiles, "find_spec", lambda name: None)
    assert not ask(torch.device("cuda"))
