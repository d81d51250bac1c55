"""`aiayn attention`: where every head of every layer looks, drawn for one sentence and measured over a split."""

import sys
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from torch import Tensor

from aiayn.config.schema import Config, ConfigError
from aiayn.core import progress, storage
from aiayn.data.encoded import Dataset, Pairs
from aiayn.data.sentencepiece_bpe import BOS, EOS
from aiayn.data.update_plan import gather
from aiayn.evaluation import attention_heads
from aiayn.evaluation.attention_heads import KINDS
from aiayn.evaluation.evaluate import HeldOut, trained
from aiayn.evaluation.search import search
from aiayn.paper.batch import Batch
from aiayn.paper.fast.process import compute_with
from aiayn.paper.transformer import Transformer
from aiayn.report import figure_files, html_page
from aiayn.report.figure_files import INK
from aiayn.runs.records import printable

# H heads; Q query tokens; M tokens that they look at
Weights = npt.NDArray[np.float32]
"""(H, Q, M): each row sums to 1."""

LONGEST = 60  # tokens of a side: more are no picture any more
_COLUMNS = 2  # of heads, as a phone shows them
_FAINTEST = 0.02


def weights_of(model: Transformer, batch: Batch) -> dict[str, list[Weights]]:
    """The attention weights of each layer of each of KINDS, for a batch of one sentence pair."""
    found: dict[str, list[Weights]] = {kind: [] for kind in KINDS}
    attention_heads.look(model, batch, lambda kind, weights, *_: found[kind].append(weights[0].float().cpu().numpy()))
    return found


def matrices(weights: Weights, queries: list[str], keys: list[str], title: str) -> Figure:
    """A layer's heads, each as a matrix with the tokens on both axes: a row is where that token looks."""
    figure, panels = _panels(len(weights), 0.75 + 0.13 * len(keys), 0.75 + 0.13 * len(queries), title)
    for axes, of_head in zip(panels, weights, strict=True):
        axes.imshow(of_head, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        axes.set_xticks(range(len(keys)), keys, rotation=90, fontsize=6)
        axes.set_yticks(range(len(queries)), queries, fontsize=6)
        axes.grid(visible=False)
    return figure


def lines(weights: Weights, queries: list[str], keys: list[str], title: str) -> Figure:
    """A layer's heads as in the paper's Figures 3 to 5: a line from each token to those that it looks at."""
    figure, panels = _panels(len(weights), 2.2, 0.5 + 0.15 * max(len(queries), len(keys)), title)
    for axes, of_head in zip(panels, weights, strict=True):
        where = [(int(q), int(k)) for q, k in np.argwhere(of_head >= min(_FAINTEST, 0.9 / len(keys)))]
        strengths = [float(of_head[pair]) for pair in where]
        drawn = LineCollection([[(0, q), (1, k)] for q, k in where], colors="#b3541e", alpha=strengths, linewidths=1.6)
        axes.add_collection(drawn)
        for place, side, align in ((-0.05, queries, "right"), (1.05, keys, "left")):
            for number, token in enumerate(side):
                axes.text(place, number, token, ha=align, va="center", fontsize=6, color=INK)
        axes.set(xlim=(-0.9, 1.9), ylim=(max(len(queries), len(keys)) - 0.5, -0.5))
        axes.axis("off")
    return figure


def _panels(count: int, width: float, height: float, title: str) -> tuple[Figure, list[Any]]:
    columns = min(count, _COLUMNS)
    rows = -(-count // columns)
    figure = Figure(figsize=(columns * width, rows * height + 0.4))
    panels = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for head, axes in enumerate(panels[:count], 1):
        axes.set_title(f"head {head}", fontsize=8)
    for unused in panels[count:]:
        unused.axis("off")
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    return figure, panels[:count]


def translated(model: Transformer, dataset: Dataset, config: Config, sentence: str) -> Batch:
    """The sentence with the model's own translation. ConfigError for one without text, or too long for a picture."""
    (ids,) = dataset.tokenizer.encode([sentence])
    if not 0 < len(ids) < LONGEST:
        raise ConfigError(
            f"the sentence has {len(ids)} tokens: attention draws one line of standard input, of 1 to {LONGEST - 1}"
        )
    (hypothesis,) = search(model, [ids], config.decoding, config.hardware)
    source, target = (np.array([*side, EOS]) for side in (ids.tolist(), hypothesis.ids[: LONGEST - 1]))
    pair = Pairs(source, np.array([0, len(source)]), target, np.array([0, len(target)]))
    return gather(pair, np.array([0])).to(next(model.parameters()).device)


def _tokens(dataset: Dataset, ids: Tensor) -> list[str]:
    named = {BOS: "<s>", EOS: "</s>"}
    subwords = dataset.tokenizer.subwords
    return [named.get(token) or printable(subwords[token]) for token in ids.tolist()]


def main(config: Config, source: BinaryIO | None = None) -> None:
    """Draws the first line of standard input with the run that the configuration names, and measures its heads."""
    compute_with(config.hardware.threads)
    if config.model.kind != "transformer":
        raise ConfigError(f"model.kind={config.model.kind}: it draws heads of Transformers, such as experiment=base")
    model, dataset, folder = trained(config)
    assert isinstance(model, Transformer)
    sentence = (source or sys.stdin.buffer).readline().decode("utf-8", "replace").strip()
    batch = translated(model, dataset, config, sentence)
    weights = weights_of(model, batch)
    inner, outer = (_tokens(dataset, ids) for ids in (batch.target_input, batch.source))
    sides = {"encoder": (outer, outer), "decoder": (inner, inner), "cross": (inner, outer)}
    name = f"{config.experiment} seed {config.seed}, scale {config.scale.name}, {config.data.name}"
    kinds: dict[str, list[dict[str, Any]]] = {words: [] for words in KINDS.values()}
    layers = [(kind, number, of_layer) for kind, found in weights.items() for number, of_layer in enumerate(found, 1)]
    with figure_files.style():
        for kind, number, of_layer in progress.each(layers, "drawing the layers"):
            title = f"{KINDS[kind]}, layer {number}: {name}"
            drawn = {}
            for look, draw in (("lines", lines), ("matrix", matrices)):
                figure, file = draw(of_layer, *sides[kind], title), f"{kind}-layer{number}-{look}"
                drawn[look] = figure_files.inline(figure, file, title)
                figure_files.write(folder / "attention", file, figure)
            kinds[KINDS[kind]].append(drawn)
    (translation,) = dataset.tokenizer.decode([batch.target.tolist()])
    text = html_page.page(
        "attention.html", name=name, sentence=printable(sentence), translation=printable(translation), kinds=kinds
    )
    storage.write_text(folder / "attention" / "attention.html", text)
    print(f"{printable(sentence)}\n{printable(translation)}\n{folder / 'attention' / 'attention.html'}")
    pairs = dataset.pairs(cast(HeldOut, config.split))
    with progress.counted(f"looking at {config.split}", len(pairs), "sentences") as done:
        found = attention_heads.measure(model, pairs, config.hardware.tokens_per_micro_batch, done)
    print(f"\n{name}, {config.split} set of {len(pairs):,} sentences\n\n{attention_heads.text(found)}")
