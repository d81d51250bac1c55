"""Figures as files and as images of a page, exactly as matplotlib writes them."""

import base64
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from aiayn.core import storage

INK, GREY, PAPER_COLOUR = "#000000", "#888888", "#b3541e"
SUPTITLE: Any = {"fontsize": 10, "x": 0.01, "horizontalalignment": "left"}

_SETTINGS: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",  # where a narrow screen begins
    "legend.fontsize": 8.0,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "lines.linewidth": 1.2,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 160,
    "text.parse_math": False,  # a token may hold dollars
    "svg.fonttype": "none",  # text stays text: it can be searched and read aloud
    "svg.hashsalt": "aiayn",
}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@contextmanager
def style() -> Iterator[None]:
    """In it figures are made and drawn; two runs of it give the same bytes."""
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        # A character that the font lacks is an empty box in a PNG; in an SVG the reader's own fonts show it
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def drawn(figure: Figure, format: str) -> bytes:
    """The figure as an SVG or PNG file on white."""
    memory = io.BytesIO()
    figure.savefig(memory, format=format, facecolor="white", metadata=_NO_METADATA if format == "svg" else None)
    # Laid out once: it takes as long as drawing does
    figure.set_layout_engine("none")
    return memory.getvalue()


def write(folder: Path, name: str, figure: Figure) -> str:
    """Writes the figure into a folder, as SVG and as PNG. Returns the SVG as the URI of an image, for a page."""
    svg = drawn(figure, "svg")
    storage.write_bytes(folder / f"{name}.svg", svg)
    storage.write_bytes(folder / f"{name}.png", drawn(figure, "png"))
    # In an image a browser runs nothing and fetches nothing
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
