"""Figures as files and as part of a page: PNG, SVG, and SVG that takes on the page's colours and asks for nothing."""

import io
import re
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure

from aiayn.core import storage

INK, INK_OF_PAGE = "#000000", "currentColor"  # what is black in a file has the colour of a page's text
PAPER_COLOUR = "#b3541e"
SUPTITLE: Any = {"fontsize": 10, "x": 0.01, "horizontalalignment": "left"}
ROW = "row."  # begins the name of what a page can switch on and off

_SETTINGS: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",  # where a narrow screen begins
    "legend.fontsize": 8.0,
    "axes.facecolor": "none",
    "legend.facecolor": "none",
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#888888",
    "grid.alpha": 0.25,
    "lines.linewidth": 1.2,
    "figure.constrained_layout.use": True,
    "text.parse_math": False,  # a token may hold dollars
    "svg.fonttype": "none",  # text stays text: to be searched, read aloud and coloured
    "svg.hashsalt": "aiayn",
}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_SVG, _XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"
_NARROW, _WIDE = 6.0, 9.0  # inches
_DECIMALS = re.compile(r"(\d\.\d\d)\d+")


@contextmanager
def style() -> Iterator[None]:
    """In it figures are made and drawn; two runs of it give the same bytes."""
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        # A character that the font lacks is an empty box in a PNG; in an SVG the reader's own fonts show it
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def write(folder: Path, name: str, figure: Figure) -> None:
    """Writes the figure into a folder, as SVG and as PNG."""
    storage.write_bytes(folder / f"{name}.svg", svg(figure))
    storage.write_bytes(folder / f"{name}.png", png(figure))


def png(figure: Figure) -> bytes:
    """The figure as a PNG file on white."""
    return _saved(figure, "png", facecolor="white", dpi=160)


def svg(figure: Figure) -> bytes:
    """The figure as an SVG file on white."""
    return _saved(figure, "svg", facecolor="white", metadata=_NO_METADATA)


def inline(figure: Figure, name: str, description: str) -> Markup:
    """The figure as an element of a page: no style of its own, no URL, its identifiers begin with `name`.

    What has a name beginning with `row.` gets it as a class, `row-...`.
    """
    root = ElementTree.fromstring(_saved(figure, "svg", facecolor="none", metadata=_NO_METADATA))
    drawn = _element(root, name)
    assert drawn is not None
    inches = float(drawn.attrib.pop("width").removesuffix("pt")) / 72
    drawn.attrib.pop("height")
    # A page shows it as wide as there is room, but never so small that its text cannot be read
    drawn.set("class", "narrow" if inches < _NARROW else "wide" if inches > _WIDE else "medium")
    # What is filled with black has no fill of its own, since SVG begins with black
    drawn.attrib |= {"role": "img", "aria-label": description, "fill": INK_OF_PAGE}
    return Markup(ElementTree.tostring(drawn, encoding="unicode"))  # ElementTree has escaped every text


def _saved(figure: Figure, format: str, **options: object) -> bytes:
    memory = io.BytesIO()
    figure.savefig(memory, format=format, **options)  # type: ignore[arg-type]
    # Laid out once: it takes as long as drawing does
    figure.set_layout_engine("none")
    return memory.getvalue()


def _element(old: ElementTree.Element, name: str) -> ElementTree.Element | None:
    """The same element without a namespace; None for one that no reader is shown."""
    tag = old.tag.removeprefix(_SVG)
    if tag in ("style", "metadata"):
        return None
    new = ElementTree.Element(tag)
    new.text, new.tail = old.text, old.tail
    for key, value in old.attrib.items():
        for attribute, text in _attributes(key.removeprefix(_XLINK), value, name):
            new.set(attribute, INK_OF_PAGE if text == INK else _DECIMALS.sub(r"\1", text))
    new.extend([child for part in old if (child := _element(part, name)) is not None])
    return new


def _attributes(key: str, value: str, name: str) -> Iterator[tuple[str, str]]:
    value = value.replace("url(#", f"url(#{name}-")
    if key == "style":
        # A page that forbids inline styles ignores them in its drawings too; attributes say the same
        for rule in filter(str.strip, value.split(";")):
            attribute, _, text = (part.strip() for part in rule.partition(":"))
            if attribute != "font-family":
                yield attribute, text
    elif key == "id" and value.startswith(ROW):
        yield "class", value.replace(ROW, "row-", 1).split(":")[0]
    elif key == "id":
        yield key, f"{name}-{value}"
    elif key == "href" and value.startswith("#"):
        yield key, f"#{name}-{value[1:]}"
    elif key != "version":
        yield key, value
