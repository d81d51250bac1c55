"""What is drawn is what the model attends with, for every layer and head; a page that is as inert as the report."""

import dataclasses
import io
import re

import numpy as np
import pytest
import torch
from models import PARTS, WAYS, Attach
from models import transformer as small

from aiayn.config import compose
from aiayn.config.schema import ConfigError
from aiayn.data.sentencepiece_bpe import BOS, EOS
from aiayn.paper.batch import Batch
from aiayn.paper.layers import DecoderLayer
from aiayn.paper.transformer import Transformer
from aiayn.report import attention_maps
from aiayn.report.attention_maps import KINDS, weights_of


@pytest.fixture
def model(attach: Attach) -> Transformer:
    torch.manual_seed(5)
    sizes = {"num_layers": 2, "d_model": 22, "d_ff": 29, "num_heads": 3, "d_k": 5, "d_v": 7}
    return attach(Transformer(**sizes, dropout=0.1, positions="sinusoids", max_length=31, vocab_size=37))


@pytest.fixture
def batch() -> Batch:
    source, words = [11, 13, 17, 19, EOS], [23, 29, 31]
    sides = [torch.tensor(side) for side in (source, [*words, EOS], [BOS, *words])]
    return Batch(*sides, torch.tensor([0, 5]), torch.tensor([0, 4]))


@WAYS
def test_there_are_weights_of_every_head_of_every_layer_and_each_row_sums_to_1(model, batch) -> None:
    found = weights_of(model, batch)
    shapes = {kind: [of_layer.shape for of_layer in layers] for kind, layers in found.items()}
    assert shapes == {"encoder": [(3, 5, 5)] * 2, "decoder": [(3, 4, 4)] * 2, "cross": [(3, 4, 5)] * 2}
    for layers in found.values():
        for of_layer in layers:
            assert np.allclose(of_layer.sum(-1), 1, atol=1e-5)
    for of_layer in found["decoder"]:
        assert (np.triu(of_layer, 1) == 0).all()
    assert not (np.triu(found["encoder"][0], 1) == 0).all()  # control


@pytest.mark.parametrize("name", PARTS)
def test_the_weights_of_other_scores_are_those_that_its_self_attention_uses(name: str, batch: Batch) -> None:
    given = dataclasses.replace(batch, source=batch.source % 23, target_input=batch.target_input % 23)
    found, plain = weights_of(small(**PARTS[name]), given), weights_of(small(), given)
    for layers in found.values():
        assert all(np.allclose(of_layer.sum(-1), 1, atol=1e-5) for of_layer in layers)
    same = np.allclose(found["encoder"][0], plain["encoder"][0])
    assert same == (PARTS[name].get("positions", "sinusoids") == "sinusoids" and "scores" not in PARTS[name])


@WAYS
def test_the_weights_are_those_that_made_the_models_own_output(model, batch) -> None:
    """The last layer's attention to the encoder, put together by hand from the weights, is what that layer returned."""
    layer = model.decoder[-1]
    assert isinstance(layer, DecoderLayer)
    seen: list[torch.Tensor] = []
    hook = layer.memory_attention.register_forward_hook(
        lambda module, inputs, output: seen.extend((*inputs[:2], output))
    )
    weights = torch.from_numpy(weights_of(model, batch)["cross"][-1])
    hook.remove()
    # Rows after the last token belong to no sentence
    memory, output = seen[1][:5], seen[2][:4]
    _, values = torch.split(layer.memory_attention.key_value(memory), [3 * 5, 3 * 7], -1)
    values = values.unflatten(-1, (3, 7)).transpose(0, 1)  # (H, M, V)

    def by_hand(weights: torch.Tensor) -> torch.Tensor:
        return layer.memory_attention.output((weights @ values).transpose(0, 1).flatten(1))

    assert torch.allclose(by_hand(weights), output, atol=1e-5)
    assert not torch.allclose(by_hand(weights.flip(-1)), output, atol=1e-3)  # control


@WAYS
def test_looking_leaves_the_model_as_it_was(model, batch) -> None:
    model.eval()
    before = model(batch)
    weights_of(model, batch)
    assert torch.equal(model(batch), before)
    assert not any(module._forward_hooks for module in model.modules())


def test_figures_show_the_weights_and_name_both_sides() -> None:
    weights = np.random.default_rng(3).dirichlet(np.ones(5), size=(3, 4)).astype(np.float32)
    queries, keys = ["a", "$b$", "c", "d"], ["v", "w", "x", "y", "</s>"]
    matrix = attention_maps.matrices(weights, queries, keys, "title")
    for head in range(3):
        (image,) = matrix.axes[head].images
        assert np.array_equal(image.get_array(), weights[head])
        assert [label.get_text() for label in matrix.axes[head].get_xticklabels()] == keys
        assert [label.get_text() for label in matrix.axes[head].get_yticklabels()] == queries
    (drawn,) = attention_maps.lines(weights, queries, keys, "title").axes[1].collections
    strengths = {(int(a[1]), int(b[1])): s for (a, b), s in zip(drawn.get_segments(), drawn.get_alpha(), strict=True)}
    expected = {(q, k): weights[1, q, k] for q in range(4) for k in range(5) if weights[1, q, k] >= 0.02}
    assert strengths == pytest.approx(expected)


def test_a_uniform_head_over_many_keys_has_a_line_to_each() -> None:
    keys = [f"k{number}" for number in range(57)]  # weights of 0.018
    (axes,) = attention_maps.lines(np.full((1, 3, 57), 1 / 57), ["a", "b", "c"], keys, "uniform").axes
    assert len(axes.collections[0].get_segments()) == 3 * 57


@pytest.mark.parametrize("line", [b"", b"   \n", b"1 " * 200])
def test_a_sentence_that_is_no_picture_is_refused_in_one_line(finished: list[str], line: bytes) -> None:
    with pytest.raises(ConfigError, match=r"the sentence has \d+ tokens"):
        attention_maps.main(compose.compose_row(*finished), io.BytesIO(line))


def test_a_sentence_gives_a_page_every_layer_as_svg_and_png_and_every_head_in_numbers(
    finished: list[str], monkeypatch, capsys
) -> None:
    run = compose.compose_row(*finished)
    written: dict[str, bytes] = {}
    monkeypatch.setattr("aiayn.core.storage.write_bytes", lambda path, data: written.update({path.name: bytes(data)}))
    monkeypatch.setattr("aiayn.core.storage.write_text", lambda path, text: written.update({path.name: text.encode()}))
    attention_maps.main(run, io.BytesIO(b"1 2 <script>alert(1)</script> 3\nanother line\n"))
    names = {f"{kind}-layer1-{look}" for kind in KINDS for look in ("lines", "matrix")}
    assert set(written) == {f"{name}.{ending}" for name in names for ending in ("svg", "png")} | {"attention.html"}
    page = written["attention.html"].decode()
    assert "1 2 &lt;script&gt;alert(1)&lt;/script&gt; 3" in page
    assert page.count("<script>") == 1
    assert "style=" not in page
    assert all(f'id="{name}-' in page for name in names)
    assert not re.search(r'(src|href)="(?!#|data:image/png)', page)
    printed = capsys.readouterr().out
    assert "dev set of 41 sentences" in printed
    assert [line.split()[0] for line in printed.splitlines() if re.match(r" *\d\.\d ", line)] == ["1.1", "1.2"] * 3


def test_each_kind_is_drawn_between_its_own_sides(finished: list[str], monkeypatch) -> None:
    """The decoder's input begins with BOS, the source ends with EOS; queries look at keys."""
    seen: dict[str, tuple[list[str], list[str]]] = {}
    draw = attention_maps.matrices

    def watched(weights, queries, keys, title):
        seen[title.partition(", layer")[0]] = queries, keys
        return draw(weights, queries, keys, title)

    monkeypatch.setattr(attention_maps, "matrices", watched)
    monkeypatch.setattr(attention_maps.figure_files, "inline", lambda *_: "")  # drawing takes seconds
    monkeypatch.setattr(attention_maps.figure_files, "write", lambda *_: None)
    monkeypatch.setattr("aiayn.core.storage.write_text", lambda path, text: None)
    attention_maps.main(compose.compose_row(*finished), io.BytesIO(b"1 2 3\n"))
    (source, of_encoder), (inner, of_decoder) = seen[KINDS["encoder"]], seen[KINDS["decoder"]]
    assert (source[-1], "<s>" in source, inner[0], "</s>" in inner) == ("</s>", False, "<s>", False)
    assert (of_encoder, of_decoder) == (source, inner)
    assert seen[KINDS["cross"]] == (inner, source)
