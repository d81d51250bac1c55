"""What is drawn is what was measured: points, intervals and titles read back from the figures."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from scipy import stats

from aiayn.config import compose, schema
from aiayn.paper.layers import sinusoids
from aiayn.report import figures
from aiayn.report.curves import AXES, Curve
from aiayn.report.figure_files import style
from aiayn.tables.table3 import Table
from tests.tables.test_formats import table as made_up


def table(scale: str, data: str, seeds: int) -> Table:
    """Made-up results in which each seed adds 1 % of perplexity and 0.1 BLEU."""
    return made_up(
        scale,
        data,
        range(seeds),
        ppl=lambda row, seed: row.paper.ppl * 2 * (1 + seed / 100),
        bleu=lambda row, seed: row.paper.bleu + seed / 10,
    )


def points(figure: Figure, panel: int, marker: str) -> list[float]:
    lines = sorted(
        (line for line in figure.axes[panel].lines if line.get_marker() == marker), key=lambda x: x.get_xdata()[0]
    )
    return [float(line.get_ydata()[0]) for line in lines]


def test_each_row_has_a_colour_of_its_own() -> None:
    found = figures.colours(table("mini", "tiny", 1))
    assert set(found) == set(compose.ROWS)
    assert len(set(found.values())) == 20


def test_a_group_shows_the_papers_effects_and_ours() -> None:
    figure = figures.group(table("mini", "tiny", 3), "(A)")
    rows = [compose.rows()[row].paper for row in ("a_h1", "a_h4", "base", "a_h16", "a_h32")]
    for panel, effects in (
        (0, [100 * (row.ppl / 4.92 - 1) for row in rows]),
        (1, [row.bleu - 25.8 for row in rows]),
    ):
        assert points(figure, panel, "D") == pytest.approx(effects)
        assert points(figure, panel, "o") == pytest.approx(effects, abs=0.15)
    assert "scale mini" in figure.get_suptitle()
    labels = [label.get_text() for label in figure.axes[1].get_xticklabels()]
    assert labels == ["h 1", "h 4", "base", "h 16", "h 32"]


def test_under_the_papers_conditions_a_group_shows_the_figures_themselves() -> None:
    figure = figures.group(table("paper", "wmt14_en_de", 1), "(A)")
    assert points(figure, 0, "D") == [5.29, 5.0, 4.92, 4.91, 5.01]
    assert points(figure, 0, "o") == pytest.approx([2 * value for value in (5.29, 5.0, 4.92, 4.91, 5.01)])


def bar(figure: Figure, row: int) -> list[float] | None:
    """The two ends of a row's interval of BLEU, by the row's place in the figure; None where no bar is drawn."""
    ours = [found for found in figure.axes[1].containers if str(found.get_label()).startswith("ours")]
    return None if not ours[row].lines[2] else ours[row].lines[2][0].get_segments()[0][:, 1].tolist()


def test_an_effects_interval_is_welchs_and_one_seed_has_none() -> None:
    made = table("mini", "tiny", 3)
    base, learned = np.array([25.8, 25.9, 26.0]), np.array([25.7, 26.1, 26.2])
    for result, bleu in zip(next(line for line in made.lines if line.group == "(E)").finished, learned, strict=True):
        result["dev"]["bleu"]["paper"] = bleu
    figure = figures.group(made, "(E)")
    expected = stats.ttest_ind(learned, base, equal_var=False).confidence_interval(0.95)
    assert bar(figure, 1) == pytest.approx(expected, abs=1e-9)
    assert bar(figure, 0) is None, "base's difference from itself is no measurement"
    assert bar(figures.group(table("mini", "tiny", 1), "(E)"), 1) is None


def test_a_figures_own_interval_is_students() -> None:
    figure = figures.group(table("paper", "wmt14_en_de", 3), "(E)")
    sample = np.array([25.8, 25.9, 26.0])
    expected = stats.t.interval(0.95, 2, sample.mean(), stats.sem(sample))
    assert bar(figure, 0) == pytest.approx(expected, abs=1e-9)


def curves_of(*quantities: str) -> dict[str, Curve]:
    """Three points of each quantity, at other places along each axis; every number of them is another."""
    made = {}
    for first, quantity in enumerate(quantities):
        places = {axis: 10.0 ** (power + first) * np.array([1, 2, 3]) for power, axis in enumerate(AXES)}
        made[quantity] = Curve(places, 7 * np.array([5.0, 3.0, 2.0]) + first)
    return made


@pytest.mark.parametrize("axis", AXES)
def test_a_curve_is_drawn_from_its_own_values_along_the_axis_asked_for(axis: str) -> None:
    drawn = curves_of("train/loss", "dev/ppl")
    (axes,) = figures.curve(table("mini", "tiny", 1), {("a_h1", 2): drawn}, "dev/ppl", axis).axes
    (line,) = axes.lines
    assert line.get_xdata().tolist() == drawn["dev/ppl"].axes[axis].tolist()
    assert line.get_ydata().tolist() == [36, 22, 15]
    names = {"steps": "updates", "tokens": "target tokens", "minutes": "minutes of training"}
    assert (axes.get_xlabel(), axes.get_ylabel()) == (names[axis], "dev perplexity")


def test_a_run_has_its_loss_above_and_its_dev_perplexity_below() -> None:
    drawn = curves_of("train/loss", "dev/ppl")
    above, below = figures.run(table("mini", "tiny", 1), {("a_h1", 1): drawn}, "a_h1").axes
    for axes, title, values in (
        (above, "training loss, label-smoothed", [35, 21, 14]),
        (below, "dev perplexity", [36, 22, 15]),
    ):
        assert title in (axes.get_title("left"), axes.get_title())
        assert [line.get_ydata().tolist() for line in axes.lines] == [values]


def test_every_title_names_scale_and_data() -> None:
    made = table("mini", "tiny", 1)
    curve = {
        ("base", 1): {
            "train/loss": Curve({axis: np.arange(3.0) for axis in ("steps", "tokens", "minutes")}, np.ones(3))
        }
    }
    with style():
        drawn = [
            figures.curve(made, curve, "train/loss", "tokens"),
            figures.run(made, curve, "a_h1"),
            figures.group(made, "(D)"),
            figures.schedule(made),
            figures.ranks(made, "PPL"),
            figures.lengths(made, {("base", 1): np.ones((9, 10), np.int64)}, range(9)),
        ]
    for figure in drawn:
        words = [
            figure.get_suptitle(),
            *(text for axes in figure.axes for text in (axes.get_title("left"), axes.get_title(), axes.get_ylabel())),
        ]
        assert any("scale mini" in text and "tiny" in text for text in words), words
    assert [line.get_gid() for line in drawn[0].axes[0].lines] == ["row.base:1"]


def names_and_dots(figure: Figure) -> tuple[dict[str, Bbox], list[tuple[float, float]]]:
    """Where each row's name and dot is, in pixels."""
    (axes,) = figure.axes
    figure.draw_without_rendering()
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    return {text.get_text(): text.get_window_extent() for text in axes.texts}, [
        tuple(axes.transData.transform((line.get_xdata()[0], line.get_ydata()[0]))) for line in dots
    ]


@pytest.mark.parametrize("metric", ["PPL", "BLEU"])
def test_in_the_plot_of_ranks_every_row_is_named_and_no_name_lies_on_another(metric: Any) -> None:
    """In the paper's own figures, where rows stand most closely: on the diagonal, some on one point."""
    with style():
        figure = figures.ranks(table("mini", "tiny", 1), metric)
        names, dots = names_and_dots(figure)
    assert set(names) == set(compose.ROWS)
    assert len(dots) == 20
    assert not [pair for pair in itertools.combinations(names, 2) if names[pair[0]].overlaps(names[pair[1]])]
    assert not [name for name, box in names.items() if any(box.contains(*dot) for dot in dots)]
    assert all(figure.axes[0].bbox.count_contains(box.corners()) == 4 for box in names.values())
    for text in figure.axes[0].texts:  # control: names beside their dots, as they would be without a search
        dot = dots[compose.ROWS.index(text.get_text())]
        text.set_position(figure.axes[0].transData.inverted().transform((dot[0] + 20, dot[1])))
    names, _ = names_and_dots(figure)
    assert [pair for pair in itertools.combinations(names, 2) if names[pair[0]].overlaps(names[pair[1]])]


@pytest.mark.parametrize("metric", ["PPL", "BLEU"])
def test_in_the_plot_of_ranks_the_paper_lies_along_and_ours_stands_upright(metric: Any) -> None:
    with style():
        (axes,) = figures.ranks(table("mini", "tiny", 3), metric).axes
    rows = [row.paper for row in compose.rows().values()]
    paper = [row.ppl if metric == "PPL" else row.bleu for row in rows]
    ours = [row.ppl * 2 * 1.01 if metric == "PPL" else row.bleu + 0.1 for row in rows]
    dots = [line.get_xydata()[0] for line in axes.lines if line.get_marker() == "o"]
    assert np.allclose(dots, np.transpose([paper, ours]))
    assert axes.get_xlabel() == f"{metric}, paper"


def test_the_schedule_is_eq_3_times_the_scales_factor() -> None:
    for factor in (1.0, 0.5):
        made = table("mini", "tiny", 1)
        lines = tuple(
            dataclasses.replace(line, trained=schema.vary(line.trained, training={"learning_rate_factor": factor}))
            for line in made.lines
        )
        (base, _) = figures.schedule(dataclasses.replace(made, lines=lines)).axes[0].lines
        step, training = int(base.get_xdata()[0]), lines[0].trained.training
        assert step == 1
        assert base.get_ydata()[0] == pytest.approx(factor * 128**-0.5 * training.warmup_steps**-1.5)


def test_the_schedule_peaks_at_the_end_of_the_warm_up() -> None:
    (base, big) = figures.schedule(table("mini", "tiny", 1)).axes[0].lines
    for line, row in ((base, "base"), (big, "big")):
        trained = compose.scaled(
            dataclasses.replace(compose.rows()[row], scale=compose.compose_row("scale=mini").scale)
        )
        peak = line.get_xdata()[int(np.argmax(line.get_ydata()))]
        assert peak == pytest.approx(trained.training.warmup_steps, rel=0.02)


def test_the_range_of_an_offsets_cosine_has_no_width_for_sinusoids_alone() -> None:
    learned = np.random.default_rng(3).normal(size=(61, 22))
    figure = figures.positions({"Sinusoids": sinusoids(61, 22).numpy(), "Learned": learned})
    *_, below = figure.axes
    assert [line.get_label() for line in below.lines] == ["Sinusoids", "Learned"]
    widths = []
    for band in below.collections:
        places = band.get_paths()[0].vertices
        widths.append(max(np.ptp(places[places[:, 0] == k, 1]) for k in range(1, 30)))
    assert widths[0] < 1e-12
    assert widths[1] > 0.5
    angles = 7 / 10000 ** (np.arange(0, 22, 2) / 22)
    assert below.lines[0].get_ydata()[7] == pytest.approx(np.cos(angles).mean())


def test_the_longest_sentence_in_training_is_a_line_between_two_buckets_of_lengths() -> None:
    words = [n % 23 + 1 for n in range(230)]
    made = table("mini", "tiny", 1)
    for limit, lines in ((0, 0), (23, 0), (9, 1)):
        scale = dataclasses.replace(made.scale, max_words=0, max_train_words=limit)
        own = dataclasses.replace(made, scale=scale)
        (axes,) = figures.lengths(own, {("base", 1): np.ones((230, 10), np.int64)}, words).axes
        limits = [line for line in axes.lines if line.get_linestyle() == "--"]
        assert len(limits) == len(axes.texts) == lines
    labels = [label.get_text() for label in axes.get_xticklabels()]
    at = limits[0].get_xdata()[0]
    assert labels[int(at - 0.5)].split()[-1] == "9"
    assert labels[int(at + 0.5)].split()[0] == "10"
    assert axes.texts[0].get_text() == "trained on up to 9"


@pytest.mark.parametrize(
    ("words", "limit", "buckets"),
    [([16] * 300, 0, ["16"]), ([1, 2, 3, 9, 12] * 60, 5, ["1 to 2", "3", "4 to 9", "10 to 12"])],
)
def test_no_bucket_of_lengths_is_empty(words: list[int], limit: int, buckets: list[str]) -> None:
    made = table("mini", "tiny", 1)
    scale = dataclasses.replace(made.scale, max_words=0, max_train_words=limit)
    counts = {("base", 1): np.ones((300, 10), np.int64)}
    (axes,) = figures.lengths(dataclasses.replace(made, scale=scale), counts, words).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == buckets
    (drawn,) = (line for line in axes.lines if line.get_gid())
    assert all(bleu > 0 for bleu in drawn.get_ydata())


def test_a_bucket_of_lengths_has_the_bleu_of_its_own_sentences_alone() -> None:
    # Of each sentence the n-grams that are right, and all, of 1 to 4 words; its length, and its reference's
    wrong, right = [0, 0, 0, 0, 9, 8, 7, 6, 9, 9], [9, 8, 7, 6, 9, 8, 7, 6, 9, 9]
    words = [3, 5, 9] * 60
    counts = np.array([right if length == 9 else wrong for length in words])
    (axes,) = figures.lengths(table("mini", "tiny", 1), {("base", 1): counts}, words).axes
    assert [label.get_text().split()[-1] for label in axes.get_xticklabels()] == ["5", "9"]
    (drawn,) = (line for line in axes.lines if line.get_gid())
    assert drawn.get_ydata() == pytest.approx([0, 100])


@pytest.mark.parametrize(("values", "fewest"), [((6.1, 6.4, 6.9), 3), ((6.0, 9.0, 20.0), 3), ((5.0, 40.0, 900.0), 3)])
def test_a_logarithmic_axis_names_several_values_however_near_they_are(values, fewest) -> None:
    figure, axes = figures._figure((4, 4))
    axes.plot(range(3), values)
    figures._plain_logarithms(axes)
    figure.draw_without_rendering()
    low, high = axes.get_ylim()
    ticks = [*axes.get_yticklabels(), *axes.get_yticklabels(minor=True)]
    named = [tick for tick in ticks if tick.get_text() and low <= tick.get_position()[1] <= high]
    assert len(named) >= fewest
    assert axes.get_yscale() == "log"


def test_a_legend_names_each_row_once_for_all_its_seeds() -> None:
    counts = {(row, seed): np.ones((9, 10), np.int64) for row in ("base", "c_n2") for seed in (1, 2)}
    made = table("mini", "tiny", 1)
    (legend,) = figures.with_legend(figures.lengths(made, counts, range(9))).legends
    assert [text.get_text() for text in legend.get_texts()] == ["base", "c_n2"]


def test_buckets_of_lengths_reach_from_the_shortest_to_the_longest_source() -> None:
    words = [n % 23 + 1 for n in range(230)]
    (axes,) = figures.lengths(table("mini", "tiny", 1), {("base", 1): np.ones((230, 10), np.int64)}, words).axes
    first, *_, last = [label.get_text() for label in axes.get_xticklabels()]
    assert (first.partition(" ")[0], last.rpartition(" ")[2]) == ("1", "23")


def test_each_layer_type_has_a_line_of_its_seconds_against_lengths() -> None:
    times = {f"type {number}": [(16, number * 1e-6), (32, number * 3e-6)] for number in (2, 3, 5, 7, 11)}
    with style():
        (axes,) = figures.layers(times).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(times)
    for line, points in zip(axes.lines, times.values(), strict=True):
        assert list(zip(line.get_xdata(), line.get_ydata(), strict=True)) == points
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
