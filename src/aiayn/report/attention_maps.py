"""`aiayn attention`: where every head of every layer looks, drawn for one sentence."""

import sys
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from torch import Tensor, nn

from aiayn.config.schema import Config, ConfigError
from aiayn.core import progress, storage
from aiayn.data.dataset import Dataset, Pairs
from aiayn.data.sentencepiece_bpe import BOS, EOS
from aiayn.data.update_plan import gather
from aiayn.evaluation.search import decoder_of, search
from aiayn.paper.attention import MemoryAttention, SelfAttention, distances
from aiayn.paper.batch import Batch
from aiayn.paper.transformer import Transformer
from aiayn.report import figure_files
from aiayn.report.figure_files import INK, PAPER_COLOUR
from aiayn.report.html_report import Section, page
from aiayn.runs.models import compute_with, trained
from aiayn.runs.records import printable

# H heads; Q query tokens; M tokens that they look at
Weights = npt.NDArray[np.float32]  # (H, Q, M): each row sums to 1

KINDS = {"encoder": "Encoder self-attention", "decoder": "Decoder self-attention, masked"}
KINDS |= {"cross": "Attention of the decoder to the encoder"}
LONGEST = 60  # tokens of a side: more are no picture any more
_COLUMNS = 2  # of heads, as a phone shows them
_FAINTEST = 0.02


def weights_of(model: Transformer, batch: Batch) -> dict[str, list[Weights]]:
    """The attention weights of each layer of each of KINDS, for a batch of one sentence pair."""
    weights: dict[str, list[Weights]] = {kind: [] for kind in KINDS}
    with ExitStack() as hooks, torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, SelfAttention | MemoryAttention):
                kind = "cross" if isinstance(module, MemoryAttention) else name.partition(".")[0]
                hooks.enter_context(module.register_forward_hook(partial(_append, weights[kind]), with_kwargs=True))
        model.eval().hidden(batch)
    return weights


def _append(
    layers: list[Weights], module: nn.Module, inputs: tuple[Any, ...], options: dict[str, bool], output: Tensor
) -> None:
    if isinstance(module, SelfAttention):
        x, packing = inputs
        memory_packing = packing
        q, k, v = module.project(packing.pad(x))
    else:
        assert isinstance(module, MemoryAttention)
        x, memory, packing, memory_packing = inputs
        q, (k, v) = module.project(packing.pad(x)), module.project_memory(memory_packing.pad(memory))
    mask = packing.causal_mask if options.get("causal") else memory_packing.mask
    _, weights = module.heads_and_weights(q, k, v, mask, distances(q, k))
    # Sentences are padded, also to a size that suits kernels
    layers.append(weights[0, :, : packing.tokens, : memory_packing.tokens].float().cpu().numpy())


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
        visible = of_head >= min(_FAINTEST, 0.9 / len(keys))
        ends, strengths = [[(0, q), (1, k)] for q, k in np.argwhere(visible).tolist()], of_head[visible].tolist()
        axes.add_collection(LineCollection(ends, colors=PAPER_COLOUR, alpha=strengths, linewidths=1.6))
        for place, side, align in ((-0.05, queries, "right"), (1.05, keys, "left")):
            for number, token in enumerate(side):
                axes.text(place, number, token, ha=align, va="center", fontsize=6, color=INK)
        axes.set(xlim=(-0.9, 1.9), ylim=(max(len(queries), len(keys)) - 0.5, -0.5))
        axes.axis("off")
    return figure


def _panels(count: int, width: float, height: float, title: str) -> tuple[Figure, list[Any]]:
    columns = min(count, _COLUMNS)
    rows = -(-count // columns)
    figure = Figure(figsize=(columns * max(width, 4 / columns), rows * height + 0.6))  # a title needs 4 inches
    panels = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for head, axes in enumerate(panels[:count], 1):
        axes.set_title(f"head {head}", fontsize=8)
    for unused in panels[count:]:
        unused.axis("off")
    figure.suptitle(title.replace(": ", "\n"), fontsize=9, x=0.01, ha="left")
    return figure, panels[:count]


def translated(model: Transformer, dataset: Dataset, config: Config, sentence: str) -> Batch:
    """The sentence with the model's own translation. ConfigError for one without text, or too long for a picture."""
    (ids,) = dataset.tokenizer.encode([sentence])
    if not 0 < len(ids) < LONGEST:
        raise ConfigError(
            f"the sentence has {len(ids)} tokens: attention draws one line of standard input, of 1 to {LONGEST - 1}"
        )
    (hypothesis,) = search(decoder_of(model), [ids], config.decoding, config.hardware)
    source, target = (np.array([*side, EOS]) for side in (ids.tolist(), hypothesis.ids[: LONGEST - 1]))
    pair = Pairs(source, np.array([0, len(source)]), target, np.array([0, len(target)]))
    return gather(pair, np.array([0])).to(next(model.parameters()).device)


def main(config: Config) -> None:
    """Draws the first line of standard input with the run that the configuration names, as a page."""
    compute_with(config.hardware.threads)
    if config.model.kind != "transformer":
        raise ConfigError(f"model.kind={config.model.kind}: it draws heads of Transformers, such as experiment=base")
    model, dataset, folder, _ = trained(config)
    assert isinstance(model, Transformer)
    sentence = sys.stdin.buffer.readline().decode("utf-8", "replace").strip()
    batch = translated(model, dataset, config, sentence)
    weights = weights_of(model, batch)
    named, subwords = {BOS: "<s>", EOS: "</s>"}, dict(enumerate(dataset.tokenizer.subwords))
    ids = batch.target_input.tolist(), batch.source.tolist()
    inner, outer = ([named.get(token) or printable(subwords.get(token, "?")) for token in side] for side in ids)
    sides = {"encoder": (outer, outer), "decoder": (inner, inner), "cross": (inner, outer)}
    name = f"{config.experiment} seed {config.seed}, scale {config.scale.name}, {config.data.name}"
    shown: dict[str, list[tuple[str, str]]] = {kind: [] for kind in KINDS}
    layers = [(kind, number, of_layer) for kind, found in weights.items() for number, of_layer in enumerate(found, 1)]
    with figure_files.style():
        for kind, number, of_layer in progress.tracked(layers, "drawing the layers"):
            title = f"{KINDS[kind]}, layer {number}: {name}"
            for look, draw, reading in (("lines", lines, "from left to right"), ("matrix", matrices, "a row looks")):
                figure = draw(of_layer, *sides[kind], f"{title}, {reading}")
                image = figure_files.write(folder / "attention", f"{kind}-layer{number}-{look}", figure)
                shown[kind].append((f"{title}, {look}", image))
    both = [printable(text) for text in (sentence, *dataset.tokenizer.decode([batch.target.tolist()]))]
    about = "Lines go from a token, on the left, to those that it looks at. A row of a matrix is where its token looks."
    parts = [Section("Sentence and translation", [*both, about])]
    parts += [Section(KINDS[kind], figures=found) for kind, found in shown.items()]
    path = folder / "attention" / "attention.html"
    storage.write_text(path, page(f"Attention of {name}", parts))
    print(*both, path, sep="\n")
