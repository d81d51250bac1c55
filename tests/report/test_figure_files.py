"""A figure is a file as matplotlib writes it, the same in every run."""

from matplotlib.figure import Figure

from aiayn.report import figure_files


def figure(title: str = "$x$ & 中") -> Figure:
    made = Figure(figsize=(3, 2))
    axes = made.subplots()
    axes.plot([1, 2], [3, 5], color=figure_files.INK)
    axes.set_title(title)
    return made


def test_the_same_figure_gives_the_same_bytes() -> None:
    with figure_files.style():
        assert figure_files.drawn(figure(), "svg") == figure_files.drawn(figure(), "svg")
        assert figure_files.drawn(figure(), "png") == figure_files.drawn(figure(), "png")
        assert figure_files.drawn(figure("another"), "svg") != figure_files.drawn(figure(), "svg")  # control
