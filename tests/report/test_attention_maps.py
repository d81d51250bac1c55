"""Drawn are the weights that the model attends with, between tokens of the right sides; the page is inert."""

import io
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from models import PARTS, batch, transformer

from aiayn.config import compose
from aiayn.config.schema import ConfigError
from aiayn.report import attention_maps
from aiayn.report.attention_maps import KINDS, weights_of

ONE = batch([[5, 7, 11, 13, 3]], [[8, 9, 10, 3]])


def test_every_head_has_weights_and_each_row_sums_to_1() -> None:
    found = weights_of(transformer(), ONE)
    shapes = {kind: [of_layer.shape for of_layer in layers] for kind, layers in found.items()}
    assert shapes == {"encoder": [(3, 5, 5)] * 2, "decoder": [(3, 4, 4)] * 2, "cross": [(3, 4, 5)] * 2}
    assert all(np.allclose(of_layer.sum(-1), 1, atol=1e-5) for layers in found.values() for of_layer in layers)
    assert all((np.triu(of_layer, 1) == 0).all() for of_layer in found["decoder"])
    assert not (np.triu(found["encoder"][0], 1) == 0).all()  # control


@pytest.mark.parametrize("name", PARTS)
def test_weights_follow_the_scores_of_the_row(name: str) -> None:
    found, plain = weights_of(transformer(**PARTS[name]), ONE), weights_of(transformer(), ONE)
    assert np.allclose(found["encoder"][0].sum(-1), 1, atol=1e-5)
    same = np.allclose(found["encoder"][0], plain["encoder"][0])
    assert same == (PARTS[name].get("positions", "sinusoids") == "sinusoids" and "scores" not in PARTS[name])


def test_the_weights_are_those_that_made_the_output() -> None:
    """The last layer's attention to the encoder, put together by hand from the weights, is what that layer returned."""
    model = transformer()
    before = model(ONE)
    attention = model.get_submodule("decoder.1.memory_attention")
    seen: list[torch.Tensor] = []
    with attention.register_forward_hook(lambda module, inputs, output: seen.extend((*inputs[:2], output))):
        weights = torch.from_numpy(weights_of(model, ONE)["cross"][-1]).double()
    # Rows after the last token belong to no sentence
    memory, output = seen[1][:5], seen[2][:4]
    _, values = torch.split(attention.key_value(memory), [3 * 5, 3 * 7], -1)
    values = values.unflatten(-1, (3, 7)).transpose(0, 1)  # (H, M, V)
    for given, same in ((weights, True), (weights.flip(-1), False)):  # the other one is a control
        by_hand = attention.output((given @ values).transpose(0, 1).flatten(1))
        assert torch.allclose(by_hand, output, atol=1e-5) == same
    assert torch.equal(model(ONE), before)
    assert not any(module._forward_hooks for module in model.modules())


def test_figures_show_the_weights_and_name_both_sides() -> None:
    weights = np.random.default_rng(3).dirichlet(np.ones(5), size=(3, 4)).astype(np.float32)
    queries, keys = ["a", "$b$", "c", "d"], ["v", "w", "x", "y", "</s>"]
    for axes, of_head in zip(attention_maps.matrices(weights, queries, keys, "title").axes, weights, strict=False):
        assert np.array_equal(axes.images[0].get_array(), of_head)
        assert [label.get_text() for label in axes.get_xticklabels()] == keys
        assert [label.get_text() for label in axes.get_yticklabels()] == queries
    (drawn,) = attention_maps.lines(weights, queries, keys, "title").axes[1].collections
    strengths = {(int(a[1]), int(b[1])): s for (a, b), s in zip(drawn.get_segments(), drawn.get_alpha(), strict=True)}
    expected = {(q, k): weights[1, q, k] for q in range(4) for k in range(5) if weights[1, q, k] >= 0.02}
    assert strengths == pytest.approx(expected)
    # A uniform head over many keys has a line to each
    (axes,) = attention_maps.lines(np.full((1, 3, 57), 1 / 57), ["a", "b", "c"], [""] * 57, "uniform").axes
    assert len(axes.collections[0].get_segments()) == 3 * 57


@pytest.mark.parametrize("line", [b"", b"   \n", b"1 " * 200])
def test_a_sentence_that_is_no_picture_is_refused(finished: list[str], line: bytes, monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(line)))
    with pytest.raises(ConfigError, match=r"the sentence has \d+ tokens"):
        attention_maps.main(compose.compose_row(*finished))


def test_a_sentence_gives_a_page_and_every_layer_as_files(finished: list[str], monkeypatch: Any) -> None:
    written: dict[str, bytes] = {}
    draw = Mock(wraps=attention_maps.matrices)
    monkeypatch.setattr(attention_maps, "matrices", draw)
    monkeypatch.setattr("aiayn.core.storage.write_bytes", lambda path, data: written.update({path.name: bytes(data)}))
    monkeypatch.setattr("aiayn.core.storage.write_text", lambda path, text: written.update({path.name: text.encode()}))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"1 2 <script>alert(1)</script> 3\nanother line\n")))
    attention_maps.main(compose.compose_row(*finished))
    names = {f"{kind}-layer1-{look}" for kind in KINDS for look in ("lines", "matrix")}
    assert set(written) == {f"{name}.{ending}" for name in names for ending in ("svg", "png")} | {"attention.html"}
    page = written["attention.html"].decode()
    assert "1 2 &lt;script&gt;alert(1)&lt;/script&gt; 3" in page
    assert "<script" not in page
    # The decoder's input begins with BOS, the source ends with EOS; queries look at keys
    calls = (call.args for call in draw.call_args_list)
    seen = {title.partition(", layer")[0]: (queries, keys) for _, queries, keys, title in calls}
    (outer, of_encoder), (inner, of_decoder) = seen[KINDS["encoder"]], seen[KINDS["decoder"]]
    assert (outer[-1], "<s>" in outer, inner[0], "</s>" in inner) == ("</s>", False, "<s>", False)
    assert (of_encoder, of_decoder, seen[KINDS["cross"]]) == (outer, inner, (inner, outer))
