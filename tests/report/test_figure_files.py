"""A figure on a page takes the page's colours, asks for nothing, and hostile text in it stays text."""

import xml.etree.ElementTree as ElementTree
from importlib import resources

from matplotlib.figure import Figure

from aiayn.report import figure_files

HOSTILE = "</text><script>alert(1)</script> $x$ & 中 ]]>"


def figure(title: str = HOSTILE) -> Figure:
    made = Figure(figsize=(3, 2))
    axes = made.subplots()
    axes.plot([1, 2], [3, 5], color=figure_files.INK, gid="row.a_h1:7")
    axes.imshow([[1, 2], [3, 5]], aspect="auto")
    axes.set_title(title)
    return made


def test_on_a_page_it_has_no_style_no_url_and_identifiers_of_its_own() -> None:
    with figure_files.style():
        whole, inline = figure_files.svg(figure()).decode(), figure_files.inline(figure(), "one", "words & more")
    for word in ("style=", "<style", "http", "metadata", "xmlns"):
        assert word not in inline
        assert word in whole or word == "metadata"  # control: what matplotlib writes has them
    found = ElementTree.fromstring(str(inline))
    ids = [element.get("id", "one-") for element in found.iter()]
    assert all(name.startswith("one-") for name in ids)
    used = [value for e in found.iter() for key, value in e.items() if key == "href" and value.startswith("#")]
    assert used
    assert {value[1:] for value in used} <= set(ids)
    assert found.get("aria-label") == "words & more"


def test_its_text_and_axes_have_the_pages_colour_and_its_rows_a_class() -> None:
    with figure_files.style():
        found = ElementTree.fromstring(str(figure_files.inline(figure(), "one", "words")))
    assert found.get("fill") == figure_files.INK_OF_PAGE
    assert {element.get("fill") for element in found.iter("text")} == {None}
    assert figure_files.INK not in {value for element in found.iter() for value in element.attrib.values()}
    (row,) = [element for element in found.iter() if element.get("class") == "row-a_h1"]
    assert row.find("path") is not None


def test_a_page_knows_how_wide_a_figure_must_be_to_be_read() -> None:
    classes = []
    for inches in (3, 7, 12):
        with figure_files.style():
            made = figure_files.inline(Figure(figsize=(inches, 2)), "one", "words")
        classes.append(ElementTree.fromstring(str(made)).get("class"))
    assert classes == ["narrow", "medium", "wide"]
    sheet = (resources.files("aiayn.report") / "templates" / "style.css").read_text("utf-8")
    assert all(f"svg.{name} {{ min-width: " in sheet for name in classes)


def test_hostile_text_stays_text() -> None:
    with figure_files.style():
        for text in (figure_files.svg(figure()).decode(), str(figure_files.inline(figure(), "one", HOSTILE))):
            found = ElementTree.fromstring(text)
            assert not [element for element in found.iter() if element.tag.endswith("script")]
            assert HOSTILE in "".join(found.itertext())


def test_the_same_figure_gives_the_same_bytes() -> None:
    with figure_files.style():
        assert figure_files.svg(figure()) == figure_files.svg(figure())
        assert figure_files.png(figure()) == figure_files.png(figure())
        assert figure_files.svg(figure("another")) != figure_files.svg(figure())  # control
