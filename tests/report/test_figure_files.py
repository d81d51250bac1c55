"""A figure is a file as matplotlib writes it, the same in every run, and hostile text in it stays text."""

import base64
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from matplotlib.figure import Figure

from aiayn.report import figure_files

HOSTILE = "</text><script>alert(1)</script> $x$ & 中 ]]>"


def figure(title: str = HOSTILE) -> Figure:
    made = Figure(figsize=(3, 2))
    axes = made.subplots()
    axes.plot([1, 2], [3, 5], color=figure_files.INK)
    axes.set_title(title)
    return made


def test_an_image_of_a_page_is_the_file(tmp_path: Path) -> None:
    with figure_files.style():
        image = figure_files.write(tmp_path, "one", figure())
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "one.svg").read_bytes()
    assert image == f"data:image/svg+xml;base64,{base64.b64encode(drawn).decode()}"
    found = ElementTree.fromstring(drawn)
    assert not [element for element in found.iter() if element.tag.endswith("script")]
    assert HOSTILE in "".join(found.itertext())


def test_the_same_figure_gives_the_same_bytes() -> None:
    with figure_files.style():
        assert figure_files.drawn(figure(), "svg") == figure_files.drawn(figure(), "svg")
        assert figure_files.drawn(figure(), "png") == figure_files.drawn(figure(), "png")
        assert figure_files.drawn(figure("another"), "svg") != figure_files.drawn(figure(), "svg")  # control
