"""Layers in C against torch's, for sizes that fill no vector, and what becomes of them without a compiler."""

import subprocess
from typing import Any

import pytest
import torch
from models import NEEDS_COMPILER, SOURCES, TARGETS, pack, transformer

from aiayn.paper.batch import Packing
from aiayn.paper.fast import kernels
from aiayn.paper.fast.decoding import FastDecoder, encoder_kernel


@NEEDS_COMPILER
@pytest.mark.parametrize("sizes", [{}, {"d_model": 48, "d_ff": 67, "num_heads": 2, "d_k": 16, "d_v": 37}], ids=str)
@pytest.mark.parametrize("sentences", [SOURCES, TARGETS, [[5]], [[7] * 301, [11] * 3]], ids=len)
def test_an_encoder_layer_in_c_is_torch_s(sizes: dict[str, float], sentences: list[list[int]]) -> None:
    layer = transformer(lambda model: model, **sizes).float().encoder[0]
    tokens, offsets = pack(sentences)
    x = torch.randn(len(tokens) + 3, layer.self_attention.query_key_value.in_features)
    ours = x.clone()
    with torch.no_grad():
        expected = layer(x[:-3], Packing(offsets))
        encoder_kernel(layer).encode(ours, offsets)
        torch.testing.assert_close(ours[:-3], expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(ours[-3:], x[-3:])  # of no sentence
        # Control: another layer is another function
        layer.feed_forward[2].bias[0] += 0.01
        assert not torch.allclose(layer(x[:-3], Packing(offsets)), expected, rtol=1e-5, atol=1e-5)


@NEEDS_COMPILER
def test_what_is_compiled_leaves_the_arithmetic_of_the_process_alone() -> None:
    kernels.library()
    assert torch.tensor([1e-40]).mul_(0.5).item() > 0


@NEEDS_COMPILER
def test_weights_in_other_types_are_refused() -> None:
    with pytest.raises(AssertionError):
        FastDecoder(transformer(), compiled=True)


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [(None, "there is no C compiler"), ("/nowhere/cc", "No such file"), ("false", "returned non-zero")],
)
def test_without_a_compiler_that_works_one_line_says_so(
    compiler: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "COMPILER", compiler)
    with pytest.raises(ValueError, match=rf"^decoding\.compile=true: .*{reason}.* use false$"):
        kernels.library.__wrapped__()


@NEEDS_COMPILER
def test_the_source_compiles_without_a_warning(tmp_path: Any) -> None:
    command = [str(kernels.COMPILER), *kernels.COMPILER_FLAGS.split(), "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    subprocess.run([*command, kernels.SOURCE], check=True, cwd=tmp_path)


@NEEDS_COMPILER
def test_infinite_logits_and_hypotheses_that_do_not_exist_are_ordered_as_by_torch() -> None:
    assert "INFINITY" in kernels.SOURCE.read_text()
    assert not {"-ffast-math", "-Ofast", "-ffinite-math-only"} & {*kernels.COMPILER_FLAGS.split()}
    logits = torch.randn(3, 2, 131, generator=torch.Generator().manual_seed(3))
    logits[:, :, ::3] = -torch.inf
    alive = torch.tensor([[-1.0, -torch.inf], [-torch.inf, -2.0], [-torch.inf, -torch.inf]])
    best, of, tokens = kernels.best_continuations(logits, alive, 7)
    expected = (logits.log_softmax(-1) + alive.unsqueeze(-1)).flatten(1).topk(7)
    torch.testing.assert_close(best, expected.values, rtol=1e-5, atol=1e-5)
    assert torch.equal((of * 131 + tokens)[:2], expected.indices[:2])
    assert bool(best[2].isneginf().all())
    assert not torch.allclose(best[:2], (logits.log_softmax(-1)).flatten(1).topk(7).values[:2])  # control
